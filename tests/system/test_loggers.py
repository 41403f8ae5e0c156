"""Records of killed or interrupted runs; logging without TensorBoard."""

import os
import signal
import subprocess
import sys

import pytest

from lumen.checkpoint import find_checkpoints
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Line
from tests.helpers.loggers import read_csv, read_events, read_hyperparameters, read_scalars
from tests.helpers.programs import run_python
from tests.helpers.services import OFFLINE, list_mlflow_runs, of_csv, read_mlflow, read_wandb


@pytest.mark.parametrize(
    ("module", "logger", "extra"),
    [("tensorboard", "TensorBoardLogger", "tensorboard"), ("wandb", "WandbLogger", "wandb"),
     ("mlflow", "MLFlowLogger", "mlflow"), ("aim", "AimLogger", "aim")],
)  # fmt: skip
def test_missing_logger_library_raises_with_install_command(module, logger, extra):
    """Lumen itself works without the library."""
    code = f"""
import sys
sys.modules["{module}"] = None
import lumen
lumen.Trainer(max_epochs=1, logger=lumen.CSVLogger())
try:
    lumen.Trainer(logger="{extra}")
except lumen.LumenError as error:
    print(error)
"""
    shown, _ = run_python("-c", code)
    assert f"{logger} needs " in shown
    assert f"pip install 'lumen-train[{extra}]'" in shown


STOPPED = """
import os, signal, sys
from pathlib import Path
import lumen
from tests.helpers.tasks import loader, quiet_trainer
from tests.helpers.loggers import Drawn
class Shown(Drawn):
    def validation_step(self, batch, batch_idx):
        super().validation_step(batch)
        for logger in self.trainer.loggers:
            logger.log_image("seen", batch[0].sigmoid(), 100 * self.global_step + batch_idx)
            logger.log_histogram("targets", batch[1], 100 * self.global_step + batch_idx)
            logger.log_text("batch", str(batch_idx), 100 * self.global_step + batch_idx)
        if sys.argv[2] != "0" and self.global_step == 8 and batch_idx == 1:
            os.kill(os.getpid(), int(sys.argv[2]))
quiet_trainer(
    Path(sys.argv[1]), max_steps=12, log_every_n_steps=1, resume="auto", val_check_interval=4, num_sanity_val_steps=0,
    logger=[lumen.CSVLogger(), lumen.TensorBoardLogger()],
).fit(Shown(dropout=0.2), loader(), val_dataloaders=loader(24, shuffle=False))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_validation_cut_by_signal_is_recorded_once(tmp_path, number, code):
    def part(directory, signal_number):
        command = [sys.executable, "-c", STOPPED, str(directory), str(int(signal_number))]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)

    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert part(whole, 0).returncode == 0
    assert part(cut, number).returncode in (code, -number)
    assert [path.name for path in find_checkpoints(cut / "runs/run/checkpoints")][-1] == "step-00000008-validating"
    shown = [event.step for event in read_events(cut / "runs/run").Images("seen")]
    assert shown == [400, 401, 402, 800, 801]  # no row is removed before the run resumes
    assert part(cut, 0).returncode == 0

    for name, kind in (("seen", "Images"), ("targets", "Histograms"), ("batch/text_summary", "Tensors")):
        steps, expected = (
            [event.step for event in getattr(read_events(each / "runs/run"), kind)(name)] for each in (cut, whole)
        )
        assert steps == expected == [step + batch for step in (400, 800, 1200) for batch in range(3)], name
    record, undisturbed = read_scalars(cut / "runs/run"), read_scalars(whole / "runs/run")
    assert record == read_csv(cut / "runs/run")
    for name in record:
        assert [step for step, _ in record[name]] == [step for step, _ in undisturbed[name]], name
    assert (cut / "runs/run/metrics.csv").read_bytes() == (whole / "runs/run/metrics.csv").read_bytes()


KILLED = """
import sys
from pathlib import Path
import lumen
from tests.helpers.tasks import loader, quiet_trainer
from tests.helpers.loggers import Drawn
class Telling(lumen.Callback):
    def on_train_batch_start(self, trainer, *_):
        print(trainer.global_step, flush=True)
quiet_trainer(
    Path(sys.argv[1]), max_steps=24, log_every_n_steps=1, resume="auto", val_check_interval=4,
    logger=[lumen.CSVLogger(), lumen.TensorBoardLogger()],
    callbacks=[Telling(), lumen.ModelCheckpoint(every_n_train_steps=5)],
).fit(Drawn(dropout=0.2), loader(), val_dataloaders=loader(20, shuffle=False))
"""


def run(directory, kill_at=None):
    """Run the script above to its end, or kill it at a step; return the steps that it reached."""
    steps = []
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(directory)], cwd=ROOT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as child:  # fmt: skip
        for line in child.stdout:
            steps.append(int(line))
            if steps[-1] == kill_at:
                os.kill(child.pid, signal.SIGKILL)
                break
        errors = child.communicate()[1]
    assert child.returncode == (0 if kill_at is None else -signal.SIGKILL), errors
    return steps


@pytest.mark.slow
def test_kills_leave_a_record_without_gap_or_repetition(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    assert run(whole)[0] == 0
    starts = [run(killed, kill_at)[0] for kill_at in (3, 9, 19, None)]
    assert starts == [0, 0, 5, 15]  # every kill lost steps that were already recorded
    directory, undisturbed = killed / "runs/run", read_scalars(whole / "runs/run")

    record = read_scalars(directory)
    assert record == read_csv(directory)
    assert record.keys() == undisturbed.keys()
    for name in record:
        assert [step for step, _ in record[name]] == [step for step, _ in undisturbed[name]], name
    for name in ("loss", "val_loss"):
        assert record[name] == undisturbed[name]
    assert [step for step, _ in record["loss"]] == list(range(1, 25))
    for name, kind, content in (
        ("weights", "Images", "encoded_image_string"),
        ("first layer", "Histograms", "histogram_value"),
        ("note/text_summary", "Tensors", "tensor_proto"),
    ):
        kept, expected = (
            [(event.step, getattr(event, content)) for event in getattr(read_events(path / "runs/run"), kind)(name)]
            for path in (killed, whole)
        )
        assert kept == expected
        assert [step for step, _ in kept] == list(range(24))
    assert read_hyperparameters(directory) == read_hyperparameters(whole / "runs/run")


SERVICES = """
model: {class_path: tests.system.test_loggers.Killed}
data: {class_path: tests.helpers.cli_tasks.Points, init_args: {samples: 48, batch_size: 2}}
trainer:
  name: line
  max_steps: 20
  log_every_n_steps: 1
  val_check_interval: 4
  resume: auto
  logger: [tensorboard, wandb, mlflow]
  callbacks: {saver: {class_path: ModelCheckpoint, init_args: {every_n_train_steps: 5}}}
  enable_progress_bar: false
  enable_model_summary: false
"""


class Killed(Line):
    """Task that kills its process in the step of KILL_AT."""

    def training_step(self, batch):
        if self.global_step == int(os.environ.get("KILL_AT", "-1")):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch)


LIVES = """
import os, sys, time
from contextlib import suppress
from pathlib import Path
import mlflow.tracking, wandb
from lumen.cli import main
from lumen.integrations.tensorboard_events import EventWriter

def is_served(life):
    for words in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--pid\\0{life}".encode() in words.read_bytes():
                return True
    return False

for kill_at in ("7", "18", "-1"):
    sys.stderr.write(f"--- killed at {kill_at}\\n")
    sys.stderr.flush()
    if not (life := os.fork()):  # each has the libraries that were imported once
        os.environ["KILL_AT"] = kill_at
        sys.exit(main(["fit", "--config", "line.yaml"]))
    print(os.waitstatus_to_exitcode(os.waitpid(life, 0)[1]), flush=True)
    while is_served(life):  # The service of a killed life still writes what it received.
        time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.filterwarnings("ignore:The ``noload`` loader")
def test_services_record_one_complete_run_despite_kills(tmp_path):
    (tmp_path / "line.yaml").write_text(SERVICES)
    environment = {**os.environ, **OFFLINE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("WANDB_SERVICE", None)  # An earlier test's service would survive the kills and keep their run open.
    command = [sys.executable, "-c", LIVES]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert [int(code) for code in ended.stdout.split()] == [-signal.SIGKILL, -signal.SIGKILL, 0], ended.stderr
    directory, uri = tmp_path / "runs/line", f"sqlite:///{tmp_path}/runs/mlflow.db"
    (run,) = list_mlflow_runs(uri)
    own = of_csv(directory)
    assert [step for step, _ in own["loss"]] == list(range(1, 21))
    records = {
        "mlflow": read_mlflow(uri, run.info.run_id),
        "wandb": read_wandb(directory),
        "events": read_scalars(directory),
    }
    steps_of = {
        title: {name: [step for step, _ in record[name]] for name in record} for title, record in records.items()
    }
    for title, steps in steps_of.items():
        assert steps == {name: [step for step, _ in rows] for name, rows in own.items()}, f"{title}\n{ended.stderr}"
    assert records["mlflow"]["loss"] == records["wandb"]["loss"] == own["loss"]
    assert run.info.status == "FINISHED"
    assert len({path.name for path in directory.glob("wandb/offline-run-*/run-*.wandb")}) == 1
    assert len([*directory.glob("wandb/offline-run-*")]) == 3  # one part for each attempt
