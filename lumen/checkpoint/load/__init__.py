"""Loading of checkpoints: choose a checkpoint, read the requested parts, and load them into a run or a module."""
