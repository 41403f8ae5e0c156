"""Stop signals: which signals stop a run, and which ones keep their handlers."""

import faulthandler
import json
import logging
import multiprocessing
import os
import signal
import threading
import time

import pytest

import lumen
from lumen.errors import ConfigError
from tests.helpers.run_ends import list_checkpoints
from tests.helpers.tasks import Regression, loader, quiet_trainer

ASKING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
LEFT_ALONE = [signal.SIGHUP, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _no_handler_stays():
    before = {number: signal.getsignal(number) for number in LEFT_ALONE}
    for number in LEFT_ALONE:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Sent(Regression):
    """Task that receives signals in its third step."""

    def __init__(self, *numbers):
        super().__init__()
        self.numbers = numbers

    def training_step(self, batch):
        if self.global_step == 2:
            for number in self.numbers:
                os.kill(os.getpid(), number)
        return super().training_step(batch)


def fit(tmp_path, *numbers, **options):
    trainer = quiet_trainer(tmp_path, max_steps=6, **{"log_level": "INFO", **options})
    trainer.fit(Sent(*numbers), loader())
    return trainer


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGUSR1, 75)])
def test_signal_saves_and_exits_with_its_code(tmp_path, number, code):
    """The earlier handlers are restored."""
    before = [signal.getsignal(each) for each in ASKING]
    with pytest.raises(SystemExit) as left:
        fit(tmp_path, number)
    assert left.value.code == code
    assert list_checkpoints(tmp_path) == ["step-00000003"]
    assert [signal.getsignal(each) for each in ASKING] == before
    log = (tmp_path / "runs/run/run.log").read_text()
    assert f"{number.name}: finishing this step" in log
    assert f"stopped at step 3 by {number.name}; newest checkpoint: step-00000003" in log


@pytest.mark.parametrize("number", LEFT_ALONE)
def test_what_is_ignored_stays_ignored_as_under_nohup(tmp_path, number):
    signal.signal(number, signal.SIG_IGN)
    assert fit(tmp_path, number).global_step == 6
    assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.parametrize("number", LEFT_ALONE)
def test_user_signal_handlers_are_kept(tmp_path, number):
    got = []
    signal.signal(number, lambda *received: got.append(received[0]))
    assert fit(tmp_path, number).global_step == 6
    assert got == [number]


def test_non_python_signal_handlers_are_kept(tmp_path):
    with (tmp_path / "stacks").open("w+") as stacks:
        faulthandler.register(signal.SIGUSR1, stacks, all_threads=False)
        try:
            assert fit(tmp_path, signal.SIGUSR1).global_step == 6
        finally:
            faulthandler.unregister(signal.SIGUSR1)
        stacks.seek(0)
        assert "in training_step" in stacks.read()


def sleep(has_begun):
    has_begun.set()
    time.sleep(1000)


class Sleeping(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        if self.global_step == 2:
            context = multiprocessing.get_context("fork")
            has_begun = context.Event()
            child = context.Process(target=sleep, args=(has_begun,), daemon=True)
            child.start()
            assert has_begun.wait(60)  # Python drops signals that arrive within the fork
            child.terminate()
            child.join(60)
            self.code = child.exitcode


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_children_can_be_terminated(tmp_path):
    """`multiprocessing.Pool` ends its processes in this way."""
    task = Sleeping()
    quiet_trainer(tmp_path, max_steps=3).fit(task, loader())
    assert task.code == -signal.SIGTERM


def test_sighup_after_sigterm_is_one_request(tmp_path):
    with pytest.raises(SystemExit, match="143"):
        fit(tmp_path, signal.SIGTERM, signal.SIGHUP, signal.SIGTERM)
    assert list_checkpoints(tmp_path) == ["step-00000003"]


def test_ctrl_c_after_another_signal_leaves_at_once(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, signal.SIGUSR1, signal.SIGINT)
    assert not list_checkpoints(tmp_path)
    assert "stopped at once: SIGINT" in (tmp_path / "runs/run/run.log").read_text()


def test_a_later_signal_leaves_at_once(tmp_path, clock):
    class Later(Sent):
        def training_step(self, batch):
            if self.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)
                clock.sleep(10)
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch)

    with pytest.raises(SystemExit, match="143"):
        quiet_trainer(tmp_path, max_steps=6).fit(Later(), loader())
    assert not list_checkpoints(tmp_path)


def test_nested_run_handles_signals(tmp_path):
    def inner(trainer, task):
        fit(tmp_path / "inner", signal.SIGHUP)

    with pytest.raises(SystemExit, match="143"):
        fit(tmp_path, callbacks=[lumen.LambdaCallback(on_train_start=inner)])
    assert list_checkpoints(tmp_path / "inner") == ["step-00000003"]


def test_slurm_job_is_recorded_in_environment_json(tmp_path, monkeypatch):
    for name, value in {"JOB_ID": "71", "ARRAY_JOB_ID": "70", "ARRAY_TASK_ID": "3", "RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    fit(tmp_path)
    written = json.loads((tmp_path / "runs/run/environment.json").read_text())
    assert written["slurm"] == {"job_id": "71", "array_job_id": "70", "array_task_id": "3", "restarts": 2}


def test_run_within_grace_s_exits_normally(tmp_path):
    before, wakes = threading.enumerate(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakes)
    with pytest.raises(SystemExit, match="75"):
        fit(tmp_path, signal.SIGUSR1, grace_s=60)
    assert list_checkpoints(tmp_path) == ["step-00000003"]
    assert fit(tmp_path, grace_s=60, resume="auto").global_step == 6
    assert threading.enumerate() == before
    assert signal.set_wakeup_fd(wakes) == wakes


@pytest.mark.parametrize("grace_s", [0, -1.0, float("nan")])
def test_no_time_at_all_is_no_grace(grace_s):
    with pytest.raises(ConfigError, match="grace_s: must be more than 0"):
        lumen.Trainer(max_steps=1, grace_s=grace_s)


@pytest.mark.parametrize(
    ("others", "said"),
    [({}, True), ({"SLURM_JOB_NAME": "bash"}, False), ({"SLURM_NTASKS": "1"}, False)],
    ids=["in a batch script", "in a shell", "one task"],
)
def test_unlaunched_slurm_tasks_suggest_srun(tmp_path, monkeypatch, others, said):
    for name, value in {"SLURM_JOB_ID": "71", "SLURM_NTASKS": "4", "SLURM_JOB_NAME": "gpt", **others}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lumen").addHandler(handler)
    try:
        fit(tmp_path)
    finally:
        logging.getLogger("lumen").removeHandler(handler)
    notice = "SLURM has 4 tasks for this job, but this process runs alone; put srun before the command"
    assert (notice in lines) == said
