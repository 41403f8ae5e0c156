"""Resumed runs: their checkpoint, their directory, and the reasons for a refusal."""

from tests.helpers.resume import fit_expanded


def test_so_they_are_on_two_processes(group, tmp_path):
    group(2).run(fit_expanded, tmp_path, "ddp")
