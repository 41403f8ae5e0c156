"""A small network that classifies the rows of a table."""
