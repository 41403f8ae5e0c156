"""Tests of libraries that `make ecosystem` installs outside the environment of the other tests.

With torchvision in that environment, transformers and torchmetrics fail on import if its compiled file does not fit.
"""
