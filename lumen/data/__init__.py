"""Data: orders of samples, loaders, and the micro-batches of one optimizer step."""
