"""What the training loop costs, beside the loop written by hand and other libraries: `python -m benchmarks --help`."""
