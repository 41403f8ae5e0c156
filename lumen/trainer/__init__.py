"""The Trainer, and what surrounds a run: its directory, the settings of its process, where it starts from."""
