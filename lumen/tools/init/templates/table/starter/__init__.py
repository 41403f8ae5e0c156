"""A small network that tells the classes of a table's rows apart."""
