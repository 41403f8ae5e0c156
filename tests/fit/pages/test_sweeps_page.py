"""Programs of the page on sweeps: each one runs, and the statements of the page hold."""

import pytest

from tests.helpers.pages import programs_run
from tests.helpers.tables import rows_of


@pytest.mark.slow  # twenty short runs
def test_programs_of_the_page_run(tmp_path, monkeypatch, listed):
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    *_, found = programs_run("docs/guides/sweeps.md")
    assert found["best"] == 0.03
    assert len(found["scores"]) == 4
    assert sum(bool(row["probe_loss"]) for row in rows_of(tmp_path / "runs/probed/metrics.csv")) == 2
    states = [trial.state.name for trial in found["study"].trials]
    assert {*states} == {"COMPLETE", "PRUNED"}
    runs = listed()
    for number, state in enumerate(states):
        assert runs[f"trial-{number}"]["status"].startswith("finished")
        epochs = sum(bool(row["val_loss"]) for row in rows_of(tmp_path / f"runs/trial-{number}/metrics.csv"))
        assert epochs == 4 if state == "COMPLETE" else epochs < 4
