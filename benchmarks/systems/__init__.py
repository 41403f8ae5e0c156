"""One module per system, with a function for each kind of case, written as its users would at their best."""
