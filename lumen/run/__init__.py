"""State of a run: plan, progress, loaders, optimizers, loss weights, logged values and the end of the run."""
