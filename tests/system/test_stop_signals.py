"""Jobs with a stop signal, at any phase and receiver: the job saves, exits, and resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lumen.checkpoint import Checkpoint, find_checkpoints
from tests.helpers.jobs import find_processes, wait_until_received

pytestmark = pytest.mark.usefixtures("program_directory")
JOB = """
import os, sys, time
from pathlib import Path
import lumen
from tests.helpers.tasks import Regression, loader

PHASE, DEVICES, RANK = os.environ.get("PHASE"), int(os.environ["DEVICES"]), os.environ.get("RANK", "0")

class Task(Regression):
    def arrive(self, phase):
        if phase is None or phase != PHASE or Path(f"at-{RANK}").exists():
            return
        Path(f"at-{RANK}.new").write_text(str(os.getpid()))
        Path(f"at-{RANK}.new").rename(f"at-{RANK}")
        while not Path("sent").exists():
            time.sleep(0.01)
        while RANK in os.environ["HEARS"] and self.trainer.run.ending.vote.requested_signal is None:
            time.sleep(0.01)

    def setup(self, stage):
        self.arrive("set-up")

    def training_step(self, batch):
        self.arrive({0: "first step", 4: "training"}.get(self.trainer.global_step))
        return super().training_step(batch)

    def validation_step(self, batch):
        self.arrive("validation" if not self.trainer.sanity_checking else None)
        return super().validation_step(batch)

    def on_save_checkpoint(self, checkpoint):
        self.arrive("saving")

    def on_train_epoch_end(self):
        self.arrive("between epochs")

lumen.Trainer(
    max_epochs=3, devices=DEVICES or None, accelerator="cpu", name="run", seed=5, global_batch_size=8, resume="auto",
    callbacks=[lumen.ModelCheckpoint(every_n_train_steps=3, keep_last=-1)], log_every_n_steps=1,
    enable_progress_bar=False, enable_model_summary=False,
).fit(Task(dropout=0.3), loader(40, 4, num_workers=1), val_dataloaders=loader(16, 4, shuffle=False))
"""
PHASES = ["set-up", "first step", "training", "validation", "saving", "between epochs"]
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGUSR1: 75, signal.SIGHUP: 143}
LAUNCHED = ("rank 0", "rank 1", "all ranks", "launcher", "every process")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


def start(devices, launcher=(), **environment):
    Path("job.py").write_text(JOB)
    return subprocess.Popen(
        [sys.executable, *launcher, "job.py"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "DEVICES": str(0 if launcher else devices), **environment}, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # these tests may run under nohup
    )  # fmt: skip


def list_other_processes():
    return {pid: words for pid, words in find_processes(".").items() if pid != os.getpid()}


def finish(job):
    try:
        output = job.communicate(timeout=90)[0]
    except subprocess.TimeoutExpired:
        job.kill()  # its workers end with it
        pytest.fail(f"not done after 90 s\n{job.communicate()[0]}")
    until = time.monotonic() + 60
    while left := list_other_processes():
        assert time.monotonic() < until, (left, output)
        time.sleep(0.05)
    return job.returncode, output


def read_result():
    """Return the rows of the record and the final parameters, equal to an uninterrupted run or not."""
    end = Checkpoint.open(find_checkpoints(Path("runs/run/checkpoints"))[-1])
    parameters = {name: end.read_tensor("model", name).tolist() for name in end.list_tensor_names("model")}
    return end.info["step"], Path("runs/run/metrics.csv").read_text(), parameters


@pytest.fixture(scope="module")
def train_uninterrupted(tmp_path_factory):
    """Return the result of a number of processes without a stop."""
    known = {}

    def of(devices):
        if devices not in known:
            here = Path.cwd()
            os.chdir(tmp_path_factory.mktemp(f"undisturbed-{devices}"))
            assert finish(start(devices))[0] == 0
            known[devices] = read_result()
            os.chdir(here)
        return known[devices]

    return of


def send_signal(job, number, receiver, ranks):
    """Send a signal when every rank is at the place where it waits."""
    until = time.monotonic() + 60
    while not all(Path(f"at-{rank}").exists() for rank in range(ranks)):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    workers = [int(Path(f"at-{rank}").read_text()) for rank in range(ranks)]
    if receiver == "every process":  # like systemd, and SLURM at the end of a job
        for pid in list_other_processes():
            os.kill(pid, number)
    elif receiver == "process group":
        os.killpg(job.pid, number)
    else:
        to = {"launcher": [job.pid], "all ranks": workers}
        for pid in to.get(receiver) or [workers[int(receiver[-1])]]:
            os.kill(pid, number)
    Path("sent").touch()


def stop_and_resume(train_uninterrupted, number, receiver, phase, devices, launcher=(), code=None):
    """Stop a job and resume it; compare the result with an uninterrupted run."""
    hears = receiver[-1] if receiver.startswith("rank") else "01"
    job = start(devices, launcher, PHASE=phase, HEARS=hears)
    send_signal(job, number, receiver, devices)
    found, output = finish(job)
    expected = SIGNALS[number] if code is None else code
    assert found == expected or (expected == 130 and found == -signal.SIGINT), output
    log = Path("runs/run/run.log").read_text()
    assert log.count("stopped at step ") == 1, log
    if phase == "set-up":  # no step was trained
        assert "stopped at step 0 by " in log
    else:
        newest = find_checkpoints(Path("runs/run/checkpoints"))[-1]
        step = Checkpoint.open(newest).info["step"]
        said = f"stopped at step {step} by {signal.Signals(number).name}; newest checkpoint: {newest.name}"
        assert said in log
        assert said in output
        assert ("exit code 75: requeue the job" in log) == (number == signal.SIGUSR1)
    whole = train_uninterrupted(devices)
    code, output = finish(start(devices, launcher, HEARS=""))
    assert code == 0, output
    assert read_result() == whole


@pytest.mark.parametrize(
    ("number", "receiver", "phase", "devices"),
    [
        pytest.param(signal.SIGUSR1, "rank 1", "validation", 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, "launcher", "first step", 2, marks=pytest.mark.slow),
        (signal.SIGUSR1, "process group", "training", 1),
    ],
)
def test_stopped_job_saves_returns_signal_code_and_resumes(train_uninterrupted, number, receiver, phase, devices):
    stop_and_resume(train_uninterrupted, number, receiver, phase, devices)


STUCK = """
import ctypes, os, sys, time
from pathlib import Path
import lumen
from tests.helpers.tasks import Regression, loader

WHERE, DEVICES = sys.argv[1], int(sys.argv[2])
RANK = os.environ.get("RANK", "0")

def arrive():
    Path(f"at-{RANK}.new").write_text(str(os.getpid()))
    Path(f"at-{RANK}.new").rename(f"at-{RANK}")

class Task(Regression):
    def training_step(self, batch):
        if WHERE == "step" and self.global_step == 3:
            arrive()
            if RANK == str(DEVICES - 1):
                mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
                lock(mutex)
                lock(mutex)  # for ever, and no handler of Python is called
        return super().training_step(batch)

    def on_save_checkpoint(self, checkpoint):
        if WHERE == "save" and self.global_step == 4:
            arrive()
            time.sleep(1000)

lumen.Trainer(
    max_steps=8, devices=DEVICES, accelerator="cpu", name="run", resume="auto", max_restarts=DEVICES - 1, grace_s=1,
    callbacks=[lumen.ModelCheckpoint(every_n_train_steps=2)], enable_progress_bar=False, enable_model_summary=False,
).fit(Task(), loader(40, 4, num_workers=1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "devices", "stood"), [("save", 1, 4), ("step", 2, 3)], ids=["in a save", "a rank in a lock of C"]
)
def test_unfinished_work_after_grace_s_is_abandoned(where, devices, stood):
    """The output names the newest checkpoint."""
    Path("stuck.py").write_text(STUCK)
    words = [sys.executable, "stuck.py"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "start_new_session": True}
    job = subprocess.Popen([*words, where, str(devices)], **options)
    send_signal(job, signal.SIGUSR1, "launcher", devices)
    code, output = finish(job)
    assert code == 75, output
    said = (
        f"stopped at step {stood} by SIGUSR1, not done within grace_s=1; newest checkpoint: step-00000002; exit code 75"
    )
    assert said in output
    assert said in Path("runs/run/run.log").read_text()
    assert "restart 1 of" not in output
    code, output = finish(subprocess.Popen([*words, "nowhere", str(devices)], **options))
    assert code == 0, output
    assert "resuming from runs/run/checkpoints/step-00000002" in output


HUNG = """
import ctypes, os, sys
from pathlib import Path
import lumen
from tests.helpers.tasks import Regression, loader

STAGE = sys.argv[1]
RANK = os.environ.get("RANK", "")

def arrive():
    Path(f"at-{RANK}.new").write_text(str(os.getpid()))
    Path(f"at-{RANK}.new").rename(f"at-{RANK}")

class Task(Regression):
    def hang(self):
        arrive()
        if RANK == "1":
            mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
            lock(mutex)
            lock(mutex)  # never returns, and Python calls no handler meanwhile

    def training_step(self, batch):
        self.hang()
        return super().training_step(batch)

    def validation_step(self, batch):
        self.hang()

    def predict_step(self, batch):
        self.hang()

    test_step = validation_step

trainer = lumen.Trainer(
    max_steps=8, devices=2, accelerator="cpu", name="run", enable_progress_bar=False, enable_model_summary=False
)
getattr(trainer, STAGE)(Task(), loader(40, 4))
"""


def stop_hung_job(stage, *numbers):
    """Send signals to the launcher of a job of which no rank runs Python; return the exit code and the output."""
    Path("hung.py").write_text(HUNG)
    words = [sys.executable, "hung.py", stage]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    send_signal(job, numbers[0], "launcher", 2)
    for number in numbers[1:]:
        wait_until_received(job.pid, numbers[0])
        time.sleep(1)  # of pending signals, Python handles the lowest number first
        os.kill(job.pid, number)
    return finish(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stage", ["validate", "fit", *(pytest.param(stage, marks=pytest.mark.torture) for stage in ("test", "predict"))]
)
def test_second_signals_end_hung_jobs_in_each_stage(stage):
    code, output = stop_hung_job(stage, signal.SIGTERM, signal.SIGINT)
    assert code == 143, output
    assert f"{'stopped at step 0' if stage == 'fit' else f'{stage} stopped'} by SIGINT, at once" in output


@pytest.mark.torture
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_one_signal_ends_a_hung_evaluation(stage):
    code, output = stop_hung_job(stage, signal.SIGTERM)
    assert code == 143, output
    assert f"{stage} stopped by SIGTERM, not done within 30 s, which grace_s changes" in output


# every signal with every phase; each receiver meets all of both
TABLE = [
    (number, LAUNCHED[(row + 2 * column) % len(LAUNCHED)], phase, 2)
    for row, number in enumerate(SIGNALS)
    for column, phase in enumerate(PHASES)
]
TABLE += [
    (number, ("rank 0", "process group")[(row + column) % 2], phase, 1)
    for row, number in enumerate(SIGNALS)
    for column, phase in enumerate(PHASES)
]


@pytest.mark.torture
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(("number", "receiver", "phase", "devices"), TABLE)
def test_each_signal_in_each_phase(train_uninterrupted, number, receiver, phase, devices):
    if (number, receiver) == (signal.SIGINT, "every process"):
        receiver = "launcher"  # Ctrl-C reaches only the launcher; sent to all, it would count twice
    stop_and_resume(train_uninterrupted, number, receiver, phase, devices)


@pytest.mark.torture
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("phase", PHASES[1:])
@pytest.mark.parametrize(
    ("number", "receiver"),
    [
        (signal.SIGTERM, "launcher"),
        (signal.SIGHUP, "launcher"),
        (signal.SIGUSR1, "all ranks"),
        (signal.SIGTERM, "rank 1"),
    ],
)
def test_each_phase_under_torchrun(train_uninterrupted, number, receiver, phase):
    stop_and_resume(train_uninterrupted, number, receiver, phase, 2, TORCHRUN, code=1)  # with any output of its workers
