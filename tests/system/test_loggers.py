"""Records of runs that are killed or cut by signals; logging without TensorBoard."""

import os
import signal
import subprocess
import sys

import pytest

from lumen.checkpoint import find_checkpoints
from tests.helpers import ROOT
from tests.helpers.loggers import csv_record, events, hyperparameters, scalars


def test_without_tensorboard_lumen_works_and_the_logger_says_what_to_install():
    code = """
import sys
sys.modules["tensorboard"] = None
import lumen
lumen.Trainer(max_epochs=1, logger=lumen.CSVLogger())
try:
    lumen.TensorBoardLogger()
except lumen.LumenError as error:
    print(error)
"""
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "TensorBoardLogger needs TensorBoard" in shown
    assert 'pip install "lumen[tensorboard]"' in shown


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
def test_what_a_validation_records_is_there_once_although_a_signal_cut_it(tmp_path, number, code):
    def part(directory, signal_number):
        command = [sys.executable, "-c", STOPPED, str(directory), str(int(signal_number))]
        return subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)

    cut, whole = tmp_path / "cut", tmp_path / "whole"
    assert part(whole, 0).returncode == 0
    assert part(cut, number).returncode in (code, -number)
    assert [path.name for path in find_checkpoints(cut / "runs/run/checkpoints")][-1] == "step-00000008-validating"
    shown = [event.step for event in events(cut / "runs/run").Images("seen")]
    assert shown == [400, 401, 402, 800, 801]  # nothing is taken away before the run goes on
    assert part(cut, 0).returncode == 0

    for name, kind in (("seen", "Images"), ("targets", "Histograms"), ("batch/text_summary", "Tensors")):
        steps, expected = (
            [event.step for event in getattr(events(each / "runs/run"), kind)(name)] for each in (cut, whole)
        )
        assert steps == expected == [step + batch for step in (400, 800, 1200) for batch in range(3)], name
    record, undisturbed = scalars(cut / "runs/run"), scalars(whole / "runs/run")
    assert record == csv_record(cut / "runs/run")
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
    """Run the script above to its end, or kill it when it comes to a step; returns the steps it came to."""
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
    directory, undisturbed = killed / "runs/run", scalars(whole / "runs/run")

    record = scalars(directory)
    assert record == csv_record(directory)
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
            [(event.step, getattr(event, content)) for event in getattr(events(path / "runs/run"), kind)(name)]
            for path in (killed, whole)
        )
        assert kept == expected
        assert [step for step, _ in kept] == list(range(24))
    assert hyperparameters(directory) == hyperparameters(whole / "runs/run")
