"""Training and evaluation loops. `fit` loops over epochs and steps, and `step` makes one optimizer step."""
