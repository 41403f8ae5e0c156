"""Records of every run directory, metrics.csv and system.csv: their cost, their rows, and when rows are written."""

import csv

from tests.helpers.records import record_until_plateau


def log_last_steps(folder):
    return record_until_plateau(folder / "whole", None, "ddp"), record_until_plateau(folder / "cut", 6, "ddp")


def test_last_logged_step_covers_all_ranks(group, tmp_path):
    ((whole, cut), _) = group(2).run(log_last_steps, tmp_path)
    assert cut == whole
    assert [row["step"] for row in csv.DictReader(whole.splitlines()) if row["loss"]] == ["4", "6"]
