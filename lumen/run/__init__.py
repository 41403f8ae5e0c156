"""A run: what is trained, how far it is, when it ends; the step's loaders, optimizers and loss weights."""
