"""Loading: chooses a checkpoint, reads the parts asked for, and puts them into a run or a module."""
