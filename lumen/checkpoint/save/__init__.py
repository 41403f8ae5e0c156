"""Saving: collects the state of a run, divides the writing among processes, and commits the checkpoint."""
