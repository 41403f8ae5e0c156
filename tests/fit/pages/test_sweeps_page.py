"""Programs of the page on sweeps: each one runs, and the statements of the page hold."""

import pytest

from tests.helpers.pages import run_programs
from tests.helpers.tables import read_rows


@pytest.mark.slow  # twenty short runs
def test_programs_of_the_page_run(tmp_path, monkeypatch, list_runs):
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    *_, found = run_programs("docs/guides/sweeps.md")
    assert found["best"] == 0.03
    assert len(found["scores"]) == 4
    assert sum(bool(row["probe_loss"]) for row in read_rows(tmp_path / "runs/probed/metrics.csv")) == 2
    states = [trial.state.name for trial in found["study"].trials]
    assert {*states} == {"COMPLETE", "PRUNED"}
    runs = list_runs()
    for number, state in enumerate(states):
        assert runs[f"trial-{number}"]["status"].startswith("finished")
        epochs = sum(bool(row["val_loss"]) for row in read_rows(tmp_path / f"runs/trial-{number}/metrics.csv"))
        assert epochs == 4 if state == "COMPLETE" else epochs < 4
