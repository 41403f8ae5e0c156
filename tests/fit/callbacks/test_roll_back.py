"""Roll-back: after a spike, training returns to a checkpoint and skips the steps around the spike."""

import os
import shutil
import signal
import time

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lumen
from lumen.checkpoint import find_checkpoints
from lumen.checkpoint.format import folder
from lumen.checkpoint.format.folder import remove_checkpoints
from lumen.checkpoint.save import async_save
from lumen.errors import ConfigError, TrainingError
from tests.helpers.tasks import FEATURES, Drawing, Regression, quiet_trainer, regression_data, weights
from tests.promises.lives import final_state

BATCH = 4


def make_loader(*spikes, steps=20, kept=None):
    """Return an ordered loader with some targets far off; `kept` selects its batches."""
    inputs, targets = regression_data(steps * BATCH)
    for batch in spikes:
        targets[batch * BATCH : (batch + 1) * BATCH] += 20.0
    rows = [batch * BATCH + row for batch in (range(steps) if kept is None else kept) for row in range(BATCH)]
    return DataLoader(TensorDataset(inputs[rows], targets[rows]), BATCH)


def make_detection(**options):
    return lumen.SpikeDetection(**{"rtol": 9.0, "warmup": 3, "action": "rollback", "before": 3, "after": 1} | options)


def save_often(**options):
    return lumen.ModelCheckpoint(**{"every_n_train_steps": 2, "keep_last": 4} | options)


def fit(path, batches, *callbacks, **options):
    task = Regression()
    trainer = quiet_trainer(path, **{"max_epochs": 1, "callbacks": [*callbacks]} | options)
    trainer.fit(task, batches)
    return trainer, task


def test_rolled_back_run_equals_run_without_skipped_data(tmp_path):
    trainer, task = fit(
        tmp_path, make_loader(11), make_detection(), save_often(), log_every_n_steps=1, log_level="INFO"
    )
    _, without = fit(tmp_path / "without", make_loader(kept=[*range(8), *range(13, 20)]))
    assert (trainer.global_step, trainer.progress.left_out) == (15, [[8, 13]])
    assert torch.equal(weights(task), weights(without))
    assert trainer.run_directory == tmp_path / "runs" / "run"
    rows = (trainer.run_directory / "metrics.csv").read_text().splitlines()[1:]
    assert len({row.split(",")[0] for row in rows}) == 15
    said = (trainer.run_directory / "run.log").read_text()
    assert "rolling back from step 11 to step-00000008, to leave out micro-batches 8 to 12 of the run" in said
    assert said.count("the run is in ") == 1  # the session, its directory and its logs stayed open


def test_which_checkpoint_it_goes_back_to_changes_nothing(tmp_path):
    ends = []
    for every in (1, 5):
        _, task = fit(tmp_path / str(every), make_loader(11), make_detection(), save_often(every_n_train_steps=every))
        ends.append(weights(task))
    assert torch.equal(*ends)


def test_rolls_back_at_each_spike_up_to_limit(tmp_path):
    trainer, task = fit(tmp_path, make_loader(6, 15), make_detection(max_rollbacks=2), save_often())
    _, without = fit(tmp_path / "without", make_loader(kept=[0, 1, 2, 8, 9, 10, 11, 17, 18, 19]))
    assert trainer.progress.left_out == [[3, 8], [12, 17]]
    assert torch.equal(weights(task), weights(without))
    with pytest.raises(
        TrainingError, match=r"rolled back 1 times, and there is a further spike after step 10: .*before"
    ):
        fit(tmp_path / "once", make_loader(6, 15), make_detection(max_rollbacks=1), save_often())


class Unsaved(Regression):
    """Task whose loss depends on a buffer that no checkpoint has."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def training_step(self, batch):
        self.steps += 1
        return super().training_step(batch) * (1 + 0.05 * self.steps)


def test_unsaved_buffers_go_back_as_after_a_kill(tmp_path):
    ends = []
    for name, callbacks in (("back", [make_detection(), save_often()]), ("killed", [])):
        batches = make_loader(11) if callbacks else make_loader(kept=[*range(8), *range(13, 20)])
        for steps in [20] if callbacks else [8, 15]:  # a new process builds its task again
            task = Unsaved()
            options = {"max_steps": steps, "resume": "auto", "callbacks": [*callbacks]}
            quiet_trainer(tmp_path / name, **options | ({"max_epochs": 1} if callbacks else {})).fit(task, batches)
        ends.append((weights(task), task.steps))
    assert ends[0][1] == ends[1][1] == 7
    assert torch.equal(ends[0][0], ends[1][0])


class Thawed(lumen.TaskModule):
    """Task with all kinds of state: dropout, a frozen part with statistics, a schedule."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss * (1e4 if (self.current_epoch, batch_idx) == (1, 2) else 1.0)

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.head(self.backbone(batch[0])), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]


class ToldToLeaveOut(lumen.Callback):
    def on_train_start(self, trainer, task):
        trainer.progress.left_out = [[6, 14]]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_rolled_back_run_equals_resume_with_skipped_batches(tmp_path, workers):
    """The roll-back crosses the end of an epoch, after which the backbone was unfrozen."""

    def run(path, *more, **options):
        callbacks = [
            lumen.BackboneFinetuning(1, train_bn=False),
            lumen.EMA(0.9),
            lumen.ModelCheckpoint(every_n_train_steps=2, keep_last=-1, monitor="val_loss"),
            make_detection(before=4, after=3),
        ]
        torch.manual_seed(5)
        loader = DataLoader(Drawing(32), 4, shuffle=True, num_workers=workers)
        trainer = quiet_trainer(path, max_epochs=3, callbacks=[*callbacks, *more], log_every_n_steps=1, **options)
        trainer.fit(Thawed(), loader, DataLoader(Drawing(8), 4))
        return trainer

    trainer = run(tmp_path / "back")
    assert trainer.progress.left_out == [[6, 14]]
    shutil.copytree(tmp_path / "back", tmp_path / "told")
    for path in find_checkpoints(tmp_path / "told" / "runs" / "run" / "checkpoints"):
        if path.name > "step-00000006":
            shutil.rmtree(path)
    run(tmp_path / "told", ToldToLeaveOut(), resume="auto")
    ends = [final_state(tmp_path / name / "runs") for name in ("back", "told")]
    assert ends[0] == ends[1]


class Interrupted(lumen.Callback):
    def on_before_optimizer_step(self, trainer, task, optimizer):
        if trainer.global_step == 11:
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupt_at_spike_rolls_back_on_resume(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, make_loader(11), make_detection(), save_often(), Interrupted())
    trainer, task = fit(tmp_path, make_loader(11), make_detection(), save_often(), resume="auto")
    _, without = fit(tmp_path / "without", make_loader(kept=[*range(8), *range(13, 20)]))
    assert trainer.progress.left_out == [[8, 13]]
    assert torch.equal(weights(task), weights(without))


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*regression_data(48), strict=True)


def test_a_stream_goes_back_too(tmp_path):
    class Spiking(Regression):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch) * (1e4 if batch_idx == 8 else 1.0)

    task = Spiking()
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[make_detection(before=2), save_often()])
    trainer.fit(task, DataLoader(Stream(), BATCH))
    _, without = fit(tmp_path / "without", make_loader(steps=12, kept=[*range(6), 10, 11]))
    assert trainer.progress.left_out == [[6, 10]]
    assert torch.equal(weights(task), weights(without))


def test_epoch_skipped_entirely_is_no_failure(tmp_path):
    trainer, _ = fit(
        tmp_path, make_loader(4, steps=5), make_detection(before=1, after=6), save_often(), max_epochs=None, max_steps=6
    )
    assert (trainer.global_step, trainer.current_epoch, trainer.progress.left_out) == (6, 2, [[3, 11]])


@pytest.mark.parametrize(
    ("spike", "options", "says"),
    [
        (5, {}, r"from step 5: no checkpoint is from before micro-batch 2, only step-00000003 "),
        (3, {"before": 5}, "no checkpoint is from before micro-batch.*warmup"),
    ],
)
def test_spike_without_earlier_checkpoint_ends_the_run(tmp_path, spike, options, says):
    with pytest.raises(TrainingError, match=says):
        fit(tmp_path, make_loader(spike), make_detection(**options), save_often(every_n_train_steps=3))
    assert len(find_checkpoints(tmp_path / "runs" / "run" / "checkpoints")) == spike // 3


def test_roll_back_waits_for_checkpoint_removals(tmp_path, monkeypatch):
    def remove_slowly(paths):
        time.sleep(0.5)
        remove_checkpoints(paths)

    monkeypatch.setattr(async_save, "remove_checkpoints", remove_slowly)
    with pytest.raises(TrainingError, match="cannot roll back from step 11: no checkpoint is from before"):
        fit(tmp_path, make_loader(11), make_detection(), save_often(keep_last=1, asynchronous=True))
    assert [path.name for path in find_checkpoints(tmp_path / "runs/run/checkpoints")] == ["step-00000010"]


def test_roll_back_without_its_checkpoint_is_an_error(tmp_path, monkeypatch):
    def remove_all(newer):
        remove_checkpoints([*newer, *find_checkpoints(tmp_path / "runs/run/checkpoints")])

    monkeypatch.setattr(folder, "remove_checkpoints", remove_all)
    with pytest.raises(TrainingError, match=r"cannot roll back: no checkpoint is left in .*/run/checkpoints"):
        fit(tmp_path, make_loader(11), make_detection(), save_often())


def test_roll_back_requires_saved_checkpoints(tmp_path):
    """A fast_dev_run saves no checkpoint and skips the update."""
    with pytest.raises(ConfigError, match="needs checkpoints, but this run saves none"):
        fit(tmp_path, make_loader(), make_detection(), enable_checkpointing=False)
    trainer, _ = fit(tmp_path, make_loader(5), make_detection(), fast_dev_run=8)
    assert trainer.global_step == 7


def test_what_is_no_step_cannot_be_undone(tmp_path):
    calls = lumen.LambdaCallback(on_step_end=lambda trainer, *_: trainer.roll_back())
    with pytest.raises(TrainingError, match="roll_back: no step is in progress"):
        fit(tmp_path, make_loader(), calls)
    calls = lumen.LambdaCallback(on_before_optimizer_step=lambda trainer, *_: trainer.roll_back(before=-1))
    with pytest.raises(ConfigError, match="before"):
        fit(tmp_path, make_loader(), calls)
