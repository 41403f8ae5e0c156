"""The processes of a run: how they start, find each other and communicate, and how an error of one ends them all."""
