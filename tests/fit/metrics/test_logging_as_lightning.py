"""Values of `self.log`, read at each moment of a run, compared with the values of the installed Lightning."""

import logging
import math
import warnings

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import lumen
from lumen.errors import ConfigError

MOMENTS = (
    "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end", "on_validation_start",
    "on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end", "on_train_end",
    "on_fit_end", "on_test_epoch_end", "on_test_end",
)  # fmt: skip
BASES = {pl: pl.LightningModule, lumen: lumen.TaskModule}


def make_numbers(samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(values[:, :3], values[:, 3:]), 4)


def make_task(library, methods):
    class Task(BASES[library]):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.error, self.validation_error = MeanSquaredError(), MeanSquaredError()

        def training_step(self, batch, batch_idx):
            return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            return None

        def test_step(self, batch, batch_idx):
            return None

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    return type("Task", (Task,), methods)()


def run(library, folder, methods, *, loaders=1, callback_methods=None, **options):
    """Train one epoch and test; return what can be read at each moment, rounded to float32."""
    seen = []

    def read(moment, trainer):
        kinds = trainer.logged_metrics, trainer.callback_metrics, trainer.progress_bar_metrics
        seen.append((moment, *({name: float(kind[name]) for name in sorted(kind)} for kind in kinds)))

    def make_reader(moment):
        return lambda self, trainer, *_: read(moment, trainer)

    # Hooks that log come first, as the callbacks of a user.
    first = type("First", (library.Callback,), callback_methods or {})()
    reader = type("Reader", (library.Callback,), {moment: make_reader(moment) for moment in MOMENTS})()
    settings = {
        "max_epochs": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "accelerator": "cpu", "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False,
        "default_root_dir": folder, "callbacks": [first, reader],
    } | options  # fmt: skip
    with warnings.catch_warnings():
        if library is pl:
            warnings.simplefilter("ignore")
        trainer, task = library.Trainer(**settings), make_task(library, methods)
        validation = [make_numbers(8, seed + 1) for seed in range(loaders)]
        trainer.fit(task, make_numbers(16), val_dataloaders=validation[0] if loaders == 1 else validation)
        trainer.test(task, validation[0], verbose=False)
    return seen


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "level", logging.ERROR)


def log_loss(**options):
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.layer(batch[0]), batch[1])
        self.log("loss", loss, **options)
        return loss

    return training_step


def log_evaluation(**options):
    def evaluation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("v", nn.functional.mse_loss(self.layer(batch[0]), batch[1]), **options)

    return evaluation_step


def log_metric(**options):
    def training_step(self, batch, batch_idx):
        guess = self.layer(batch[0])
        self.error(guess, batch[1])
        self.log("error", self.error, **options)
        return nn.functional.mse_loss(guess, batch[1])

    return training_step


def log_sometimes(self, batch, batch_idx):
    if batch_idx == 1:
        self.log("x", 2.0, prog_bar=True)
    return nn.functional.mse_loss(self.layer(batch[0]), batch[1])


def update_validation(self, batch, batch_idx):
    self.validation_error.update(self.layer(batch[0]), batch[1])
    self.log("v", self.validation_error)


def reset_error(self):
    self.error.reset()


def reset_validation_error(self):
    self.validation_error.reset()


def log_best(self):
    self.log("best", 2 * self.trainer.callback_metrics["v"], prog_bar=True)


def log_from_callback(self, trainer, task, *_):
    self.log("c", 1.5, prog_bar=True)
    self.log_dict({"d": 2.5}, on_epoch=True, on_step=False)


CASES = {
    "step": {"training_step": log_loss()},
    "step and epoch": {"training_step": log_loss(on_epoch=True, prog_bar=True)},
    "epoch": {"training_step": log_loss(on_step=False, on_epoch=True, prog_bar=True)},
    "bar only": {"training_step": log_loss(logger=False, prog_bar=True)},
    "maximum": {"training_step": log_loss(on_epoch=True, reduce_fx=torch.max)},
    "some steps": {"training_step": log_sometimes},
    "Lightning's defaults": {
        "training_step": log_loss(
            enable_graph=False, sync_dist=False, sync_dist_group=None, metric_attribute=None, rank_zero_only=False
        )
    },
    "rank zero": {"training_step": log_loss(rank_zero_only=True, on_epoch=True)},
    "metric": {"training_step": log_metric(on_step=True, on_epoch=True, metric_attribute="error")},
    "metric per step": {"training_step": log_metric(on_step=True, on_epoch=False)},
    "metric per epoch": {"training_step": log_metric(on_step=False, on_epoch=True)},
    "validation": {"validation_step": log_evaluation(prog_bar=True), "test_step": log_evaluation()},
    "validation steps": {"validation_step": log_evaluation(on_step=True), "test_step": log_evaluation(on_step=True)},
    "validation steps only": {"validation_step": log_evaluation(on_step=True, on_epoch=False)},
    "sum": {"validation_step": log_evaluation(reduce_fx="sum"), "test_step": log_evaluation(reduce_fx=sum)},
    "reset in a hook": {
        "training_step": log_metric(on_step=False, on_epoch=True), "validation_step": update_validation,
        "on_validation_epoch_end": reset_validation_error, "on_train_epoch_end": reset_error,
    },
}  # fmt: skip


def assert_equal(ours, theirs):
    assert [moment for moment, *_ in ours] == [moment for moment, *_ in theirs]
    for (moment, *mine), (_, *other) in zip(ours, theirs, strict=True):
        for kind, found, expected in zip(("logged", "callback", "bar"), mine, other, strict=True):
            assert found.keys() == expected.keys(), (moment, kind)
            for name, value in expected.items():  # Lightning sums in float32.
                assert math.isclose(found[name], value, rel_tol=3e-7), (moment, kind, name)


@pytest.mark.parametrize("methods", CASES.values(), ids=CASES)
def test_logged_values_are_readable_as_in_lightning(tmp_path, methods):
    assert_equal(run(lumen, tmp_path, methods), run(pl, tmp_path, methods))


def test_names_of_several_loaders_are_as_in_lightning(tmp_path):
    methods = {"validation_step": log_evaluation(on_step=True)}
    ours, theirs = (
        [each for each in run(library, tmp_path, methods, loaders=2) if each[0] != "on_validation_batch_end"]
        for library in (lumen, pl)
    )
    assert_equal(ours, theirs)


def test_epoch_end_hooks_read_values_of_the_pass(tmp_path):
    methods = {"validation_step": log_evaluation(), "on_validation_epoch_end": log_best}
    ours, theirs = (
        [each for each in run(library, tmp_path, methods) if each[0] == "on_validation_end"] for library in (lumen, pl)
    )
    assert_equal(ours, theirs)


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end", "on_validation_epoch_end"]
)
def test_callbacks_log_as_in_lightning(tmp_path, hook):
    ours, theirs = (
        [
            each
            for each in run(library, tmp_path, {}, callback_methods={hook: log_from_callback})
            if each[0] in ("on_train_batch_end", "on_validation_end", "on_train_end", "on_test_end")
        ]
        for library in (lumen, pl)
    )
    assert any(logged for _, logged, *_ in ours)
    assert_equal(ours, theirs)


def log_x(**options):
    return lambda self, *_: self.log("x", 1.0, **options)


@pytest.mark.parametrize(
    ("hook", "options", "advice"),
    [
        ("on_train_epoch_end", {"on_step": True}, r"on_step=True\) was called outside of a batch.*Leave on_step out"),
        ("on_train_epoch_start", {"on_epoch": False}, r"on_epoch=False\) records nothing\. Set one"),
        ("on_validation_epoch_end", {"on_step": True, "on_epoch": False}, "outside of a batch"),
        ("on_train_batch_end", {"on_step": False, "on_epoch": False}, "records nothing"),
        ("on_fit_start", {}, "outside of a training or evaluation epoch. Call self.log in a step"),
        ("on_validation_end", {}, "outside of a training or evaluation epoch"),
        ("configure_optimizers", {}, "outside of a training or evaluation epoch"),
    ],
)
def test_calls_that_lightning_refuses_say_what_to_write(tmp_path, hook, options, advice):
    for library, error, words in ((pl, MisconfigurationException, None), (lumen, ConfigError, advice)):
        with pytest.raises(error, match=words):
            run(library, tmp_path, {hook: log_x(**options)})


@pytest.mark.parametrize("loaders", [1, 2])
def test_loader_suffix_in_a_name_is_refused(tmp_path, loaders):
    methods = {"validation_step": lambda self, *_: self.log("x/dataloader_idx_0", 1.0)}
    advice = (
        r"self\.log\('x/dataloader_idx_0'\): Lumen appends .* Write the name without it, or add add_dataloader_idx="
    )
    for library, error, words in ((pl, MisconfigurationException, None), (lumen, ConfigError, advice)):
        with pytest.raises(error, match=words):
            run(library, tmp_path, methods, loaders=loaders)


def test_callback_copy_logs_for_no_run(tmp_path):
    import copy

    class Copied(lumen.Callback):
        def on_train_epoch_end(self, trainer, task):
            self.log("x", 1.0)
            with pytest.raises(AttributeError, match=r"Call it in a hook that the trainer calls, or call task\.log"):
                copy.deepcopy(self).log("x", 1.0)
            lumen.Trainer(max_epochs=1, callbacks=[Inner()], **inner).fit(make_task(lumen, {}), make_numbers(8))
            self.log("y", 1.0)

    class Inner(lumen.Callback):
        def on_train_epoch_end(self, trainer, task):
            self.log("inner", 1.0)

    inner = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }  # fmt: skip
    callback = Copied()
    trainer = lumen.Trainer(max_epochs=1, callbacks=[callback], **inner)
    trainer.fit(make_task(lumen, {}), make_numbers(8))
    assert trainer.callback_metrics.keys() == {"x", "y"}
    assert not hasattr(callback, "log")


@pytest.mark.parametrize("stop", [3, 4, 6])
def test_values_of_earlier_steps_are_resumed(tmp_path, stop):
    """The only value of x is that of step 2; an epoch has four steps."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 1:
            self.log("x", 2.0)
        return nn.functional.mse_loss(self.layer(batch[0]), batch[1])

    for steps in (stop, 8):
        trainer = lumen.Trainer(
            max_steps=steps, default_root_dir=tmp_path, name="run", resume="auto", logger=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(make_task(lumen, {"training_step": training_step}), make_numbers(16))
        assert {name: float(value) for name, value in trainer.callback_metrics.items()} == {"x": 2.0}
