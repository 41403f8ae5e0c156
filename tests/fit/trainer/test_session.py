"""Phases of a session: a failing phase leaves nothing behind, and the next fit works."""

import gc
import re
from contextlib import contextmanager

import pytest

import lumen
from lumen.errors import CheckpointError, LumenError, RunDirectoryError
from lumen.trainer import process_settings, session
from lumen.trainer.run_directory import RunDirectory
from tests.helpers.process_state import find_changes, read_process_state
from tests.helpers.tasks import Regression, loader, quiet_trainer, weights

SWITCHES = {
    "max_steps": 2, "deterministic": True, "detect_anomaly": True, "matmul_precision": "medium", "benchmark": True,
    "gc_every_n_steps": 2, "profiler": "simple", "precision": "bf16", "log_level": {"root": "DEBUG", "a.name": "ERROR"},
}  # fmt: skip
NAMES = [phase.__name__ for phase in (*session.PHASES, *session.PHASES_OF_RUN)]


class Refusal(Exception):
    """Error that a test raises in a phase."""


def fit(path, task, workers=1, **options):
    data = loader(32, 8, num_workers=workers, persistent_workers=workers > 0)
    trainer = quiet_trainer(path, **SWITCHES | options)
    try:
        trainer.fit(task, data, data)
    finally:
        trainer.profiler = None  # the trainer holds the table
    return trainer


@pytest.fixture(scope="module")
def expected_weights(tmp_path_factory):
    """Return the weights after a fit in a process without failures; this also fills imports and caches."""
    task = Regression()
    fit(tmp_path_factory.mktemp("expected"), task)
    gc.collect()
    gc.freeze()  # a collection after each failure would traverse all imports
    return weights(task)


def catch_error(path, task, error, **options):
    """Check that a refused fit has left nothing behind, and return its message."""
    gc.collect()
    before, message = read_process_state(), None
    try:  # not pytest.raises, which keeps the traceback and all failed objects alive
        fit(path, task, **options)
    except error as exception:
        message = str(exception)
    assert message is not None
    assert find_changes(before) == {}
    assert not process_settings._open
    assert task._run is None or not task._run.stage
    return message


def assert_next_fit_works(path, task, expected_weights, name="run"):
    trainer = fit(path, task, workers=0)
    assert trainer.run_directory.name == name  # the name of a fit that never began is free
    assert trainer.state.status == "finished"
    assert (weights(task) == expected_weights).all()


def add_phase(patched, place, *, while_open):
    """Add a phase after a named one; it raises when it is entered or when it is left."""

    @contextmanager
    def refuse(_):
        if not while_open:
            raise Refusal("entering")
        yield
        raise Refusal("leaving")

    for name in ("PHASES", "PHASES_OF_RUN"):
        phases = getattr(session, name)
        index = next((number for number, each in enumerate(phases, 1) if each.__name__ == place), 0)
        patched.setattr(session, name, (*phases[:index], refuse, *phases[index:]) if index else phases)


@pytest.mark.slow
@pytest.mark.parametrize("place", NAMES)
def test_failure_after_a_phase_releases_everything(tmp_path, monkeypatch, expected_weights, place):
    task = Regression()
    with monkeypatch.context() as patched:
        add_phase(patched, place, while_open=False)
        assert catch_error(tmp_path, task, Refusal) == "entering"
    assert not [path for path in (tmp_path / "runs").glob("*") if RunDirectory.read_live_holder(path)]
    assert_next_fit_works(tmp_path, task, expected_weights)


@pytest.mark.slow
@pytest.mark.parametrize("place", NAMES)
def test_failure_while_closing_releases_the_rest(tmp_path, monkeypatch, expected_weights, place):
    with monkeypatch.context() as patched:
        add_phase(patched, place, while_open=True)
        assert catch_error(tmp_path, Regression(), Refusal) == "leaving"
    assert RunDirectory.read_live_holder(tmp_path / "runs" / "run") is None
    assert_next_fit_works(tmp_path, Regression(), expected_weights, name="run-2")


class Disconnected(lumen.SingleDevice):
    def connect(self):
        raise Refusal("no network")


class Unplaced(lumen.SingleDevice):
    def setup(self, task):
        raise Refusal("no room")


class Closed(lumen.Logger):
    def log_metrics(self, metrics, step):
        pass

    def open(self, directory, *, resumed=False):
        raise Refusal("no service")


def refuse(*_):
    raise Refusal("no setup")


def block_with_file(path):
    path.touch()
    return path


def make_unwritable_log(path):
    """Make a run directory in which the log cannot be a file."""
    (path / "runs" / "run" / "run.log").mkdir(parents=True)
    return {"resume": "auto"}


FAILURES = {
    "the directory of runs is a file": (
        lambda path: block_with_file(path / "runs") and {}, RunDirectoryError, "cannot use",
    ),
    "the directory of checkpoints is in a file": (
        lambda path: {"callbacks": [lumen.ModelCheckpoint(dirpath=block_with_file(path / "file") / "a")]},
        LumenError, "file",
    ),
    "the log is a directory": (make_unwritable_log, LumenError, "run.log"),
    "the strategy cannot connect": (lambda _: {"strategy": Disconnected("cpu")}, Refusal, "no network"),
    "the strategy cannot place the task": (lambda _: {"strategy": Unplaced("cpu")}, Refusal, "no room"),
    "there is nothing to resume": (lambda _: {"resume": "last"}, CheckpointError, "no valid checkpoint"),
    "a logger cannot open": (lambda _: {"logger": Closed()}, Refusal, "no service"),
    "a callback cannot set up": (lambda _: {"callbacks": [lumen.LambdaCallback(setup=refuse)]}, Refusal, "no setup"),
    "a hook before training fails": (
        lambda _: {"callbacks": [lumen.LambdaCallback(on_fit_start=refuse)]}, Refusal, "no setup",
    ),
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_real_failure_while_opening_releases_everything(tmp_path, expected_weights, failure):
    options, error, text = FAILURES[failure]
    task = Regression()
    assert text in catch_error(tmp_path, task, error, **options(tmp_path))
    assert_next_fit_works(tmp_path / "next", Regression(), expected_weights)


def test_table_of_phases_is_what_opens():
    rows = re.findall(r"^\| `(\w+)` \|", session.__doc__, re.M)
    assert rows == NAMES
