"""Records of a run, read."""

import csv


def read_rows(path):
    """Return the rows of a CSV file, each by the names of its columns."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]
