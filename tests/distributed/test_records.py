"""The record that every run directory has, metrics.csv and system.csv: what it costs, what is in it, and when."""

import csv

from tests.helpers.records import stops_after


def log_last_steps(folder):
    return stops_after(folder / "whole", None, "ddp"), stops_after(folder / "cut", 6, "ddp")


def test_the_last_step_over_several_processes_is_that_of_all(group, tmp_path):
    ((whole, cut), _) = group(2).run(log_last_steps, tmp_path)
    assert cut == whole
    assert [row["step"] for row in csv.DictReader(whole.splitlines()) if row["loss"]] == ["4", "6"]
