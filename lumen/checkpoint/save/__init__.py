"""Saving of checkpoints: collect a run's state, divide the writing among processes, and commit."""
