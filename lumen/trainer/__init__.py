"""The `Trainer` and its parts: run directory, process settings, and the start of a run."""
