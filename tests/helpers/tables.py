"""Read the records that a run writes."""

import csv


def rows_of(path):
    """The rows of a CSV file, each by the names of its columns."""
    with path.open(newline="") as file:
        return [*csv.DictReader(file)]
