"""Loggers: TensorBoard's record beside the CSV files, one run after another, killed and resumed."""

import csv
import io

import pytest

import lumen
from lumen.run.records import Records
from tests.helpers.loggers import fit


class BreakingOff(lumen.Callback):
    """Notes whether the row of step 2 is written when that step is over, and breaks off the run in step 6."""

    def on_step_checkpoint(self, trainer, task):
        if trainer.global_step == 2 and trainer.is_global_zero:
            self.written = (trainer.run_directory / "metrics.csv").exists()

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 6:
            raise InterruptedError


@pytest.mark.parametrize("world", [1, 2])
def test_a_record_is_the_same_where_values_arrive_when_the_next_step_is_made(group, tmp_path, world):
    (written, now), (written_later, later) = (
        group(world).run(broken_off_and_resumed, tmp_path / name, name == "later")[0] for name in ("now", "later")
    )
    assert (written, written_later) == (True, False)
    assert later == now
    rows = list(csv.DictReader(io.StringIO(now)))
    assert [(int(row["step"]), [name for name in row if row[name]][2:]) for row in rows] == [
        (2, ["loss", "grad_norm"]), (3, ["val_loss"]), (4, ["loss", "grad_norm"]), (6, ["loss", "grad_norm"]),
        (6, ["val_loss"]), (8, ["loss", "grad_norm"]), (9, ["val_loss"]), (9, ["loss", "grad_norm"]),
    ]  # fmt: skip


def broken_off_and_resumed(folder, later):
    breaking_off = BreakingOff()
    saver = lumen.ModelCheckpoint(every_n_train_steps=4)
    options = {
        "strategy": "ddp", "max_epochs": 3, "max_steps": 9, "log_every_n_steps": 2, "logger": lumen.CSVLogger(),
        "val_check_interval": 3, "gradient_clip_val": 1.0, "resume": "auto",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        if later:  # as on CUDA
            patch.setattr(Records, "is_asynchronous", True)
        with pytest.raises(InterruptedError):
            fit(folder, **options, callbacks=[saver, breaking_off])
        trainer = fit(folder, **options, callbacks=[saver])
    return getattr(breaking_off, "written", None), (trainer.run_directory / "metrics.csv").read_text()
