"""Tests that need torchvision, which is not installed in the environment of the other tests.

If its compiled file does not fit the build of torch, transformers and torchmetrics find it and fail on import.
"""
