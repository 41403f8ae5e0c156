"""Costs of the training loop, compared with a hand-written loop and other libraries: `python -m benchmarks --help`."""
