"""A small network that reads handwritten digits."""
