"""One module per system, with a function for each kind of case, written as its experienced users would."""
