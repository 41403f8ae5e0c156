"""What needs torchvision, which does not stand in the environment of the other tests.

Where its compiled file does not fit the build of torch, each library that finds it there ends with an error when it is
imported: transformers and torchmetrics too.
"""
