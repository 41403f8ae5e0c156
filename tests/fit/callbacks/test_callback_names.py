"""Callbacks with Lightning's arguments and attributes if the meaning is equal, and a clear error otherwise."""

import logging
import math
from functools import partial
from pathlib import Path

import pytest
import torch

import lumen
from lumen.errors import ConfigError
from lumen.errors.lightning_names import ATTRIBUTES_OF_CALLBACKS, INSTEAD_IN_CHECKPOINTS, NEUTRAL_IN_CHECKPOINTS
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


class Scored(Regression):
    """Task that logs one value of `score` after the other, at each validation."""

    def __init__(self, scores=(4.0, 1.0, 3.0, 2.0, 5.0, 6.0, 7.0, 8.0)):
        super().__init__()
        self.scores = iter(scores)

    def validation_step(self, batch):
        pass

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("score", next(self.scores))


def fit(tmp_path, *callbacks, epochs=4, make=quiet_trainer, **options):
    trainer = make(tmp_path, max_epochs=epochs, callbacks=[*callbacks], **options)
    trainer.fit(Scored(), loader(16, 8), loader(8, 8))
    return trainer


# ---------------------------------------------------------------------- ModelCheckpoint


def test_scores_are_tensors_as_those_of_lightning(tmp_path):
    saver = lumen.ModelCheckpoint(tmp_path / "best", monitor="score", save_top_k=2, save_last=True)
    assert saver.best_model_score is saver.current_score is saver.kth_value is None
    fit(tmp_path, saver)
    assert (saver.best_model_score.item(), saver.current_score.item(), saver.kth_value.item()) == (1.0, 2.0, 2.0)
    assert [score.item() for score in saver.best_k_models.values()] == [1.0, 2.0]
    assert {each.dtype for each in (saver.best_model_score, *saver.best_k_models.values())} == {torch.float64}
    assert Path(saver.best_model_path).parent == tmp_path / "best"
    assert Path(saver.last_model_path).name == "step-00000008"
    assert saver.kth_best_model_path == [*saver.best_k_models][-1]


@pytest.mark.parametrize("verbose", [True, False])
def test_saves_are_said_on_request(tmp_path, caplog, verbose):
    caplog.set_level(logging.INFO)
    fit(tmp_path, lumen.ModelCheckpoint(verbose=verbose), epochs=1, log_level="INFO")
    said = [each.message for each in caplog.records if "step-00000002" in each.message]
    assert any(each.startswith(("saved ", "saving ")) for each in said) is verbose


def test_model_checkpoint_accepts_neutral_lightning_arguments():
    neutral = {name: values[0] for name, values in NEUTRAL_IN_CHECKPOINTS.items()}
    assert lumen.ModelCheckpoint(save_last=None, verbose=False, every_n_train_steps=None, **neutral).keep_last == 2
    for name, values in NEUTRAL_IN_CHECKPOINTS.items():
        for value in values:
            lumen.ModelCheckpoint(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("save_weights_only", True), ("save_on_exception", True),
        ("save_on_train_epoch_end", False), ("every_n_val_epochs", 2), ("period", 1), ("prefix", "best"),
    ],
)  # fmt: skip
def test_model_checkpoint_rejects_unsupported_arguments_with_a_hint(name, value):
    with pytest.raises(ConfigError) as caught:
        lumen.ModelCheckpoint(**{name: value})
    assert str(caught.value) == f"ModelCheckpoint has no argument {name}. {INSTEAD_IN_CHECKPOINTS[name]}"


#: Callbacks by class, and the class of Lightning.
KINDS = {
    "BaseFinetuning": (lumen.BackboneFinetuning, "BaseFinetuning"),
    "EMA": (lumen.EMA, "EMAWeightAveraging"),
    "EarlyStopping": (partial(lumen.EarlyStopping, "x"), "EarlyStopping"),
    "GradientAccumulationScheduler": (
        partial(lumen.GradientAccumulationScheduler, {0: 1}), "GradientAccumulationScheduler",
    ),
    "ProgressBar": (lumen.ProgressBar, "TQDMProgressBar"),
    "SWA": (partial(lumen.SWA, 0.1), "StochasticWeightAveraging"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ATTRIBUTES_OF_CALLBACKS)
def test_missing_lightning_attributes_name_their_replacement(kind):
    callback = KINDS.get(kind, [getattr(lumen, kind)])[0]()
    for name, text in ATTRIBUTES_OF_CALLBACKS[kind].items():
        assert not hasattr(callback, name)
        with pytest.raises(AttributeError) as caught:
            getattr(callback, name)
        assert str(caught.value) == f"{type(callback).__name__} has no attribute {name}. {text}"


@pytest.mark.parametrize(
    ("base", "name"),
    [
        (lumen.ProgressBar, "init_validation_tqdm"),
        (lumen.ModelCheckpoint, "_save_checkpoint"),
        (partial(lumen.EarlyStopping, "val_loss"), "_run_early_stopping_check"),
        (lumen.LearningRateMonitor, "_extract_stats"),
        (lumen.ModelSummary, "summarize"),
    ],
)
def test_methods_that_only_lightning_calls_raise(tmp_path, base, name):
    kind = base.func if isinstance(base, partial) else base
    mine = type("Mine", (kind,), {name: lambda self, *_: None})
    callback = mine(*(base.args if isinstance(base, partial) else ()))
    with pytest.raises(ConfigError, match=f"Mine defines methods that Lumen does not call.*\n  {name}: "):
        quiet_trainer(tmp_path, max_steps=1, callbacks=[callback], enable_progress_bar=None).fit(Scored(), loader())


# ---------------------------------------------------------------------- EarlyStopping


def test_early_stopping_has_stopping_reason_and_best_score(tmp_path):
    stopping = lumen.EarlyStopping("score", patience=2, log_rank_zero_only=False)
    assert (stopping.stopping_reason, stopping.stopped_epoch) == ("not_stopped", 0)
    assert stopping.best_score.item() == math.inf
    trainer = fit(tmp_path, stopping, make=bare_trainer, epochs=9)
    assert (stopping.best_score.item(), stopping.best_score.dtype) == (1.0, torch.float64)
    assert (stopping.stopping_reason, stopping.wait_count) == ("patience_exhausted", 2)
    assert (trainer.current_epoch, stopping.stopped_epoch) == (4, 3)


@pytest.mark.parametrize(
    ("options", "reason", "epochs"),
    [
        ({"stopping_threshold": 1.5}, "stopping_threshold", 2),
        ({"divergence_threshold": 4.5}, "divergence_threshold", 5),
    ],
)
def test_thresholds_are_reasons_too(tmp_path, options, reason, epochs):
    stopping = lumen.EarlyStopping("score", patience=9, **options)
    trainer = fit(tmp_path, stopping, make=bare_trainer, epochs=9)
    assert (stopping.stopping_reason, trainer.current_epoch) == (reason, epochs)


@pytest.mark.parametrize(("at_epochs", "step"), [(None, 4), (False, 4), (True, 6)])
def test_early_stopping_checks_new_values_or_epoch_ends(tmp_path, at_epochs, step):
    """Two validations an epoch (4 1, 3 2, 5 6, 7 8) leave the newest values 1 2 6 8 at the ends."""
    stopping = lumen.EarlyStopping("score", patience=2, check_on_train_epoch_end=at_epochs)
    trainer = fit(tmp_path, stopping, make=bare_trainer, epochs=9, val_check_interval=1)
    assert (stopping.best_score, trainer.global_step) == (1.0, step)


def test_pending_value_is_checked_after_resume(tmp_path):
    """The run is interrupted after the first validation of an epoch, whose value counts only at the epoch's end."""

    def run(name, **options):
        stopping = lumen.EarlyStopping("score", patience=2, check_on_train_epoch_end=True)
        trainer = lumen.Trainer(
            max_epochs=9, callbacks=[stopping], default_root_dir=tmp_path, name=name, accelerator="cpu", seed=1,
            log_level="ERROR", enable_progress_bar=False, enable_model_summary=False, val_check_interval=3, **options,
        )  # fmt: skip
        task = Scored()
        for _ in range(trainer.global_step):
            next(task.scores)
        return trainer, stopping, task

    whole, first, task = run("whole")
    whole.fit(task, loader(32, 8), loader(8, 8))
    part, _, task = run("part", min_steps=0)
    part.plan.max_steps = 3
    part.fit(task, loader(32, 8), loader(8, 8))
    again, second, task = run("part", resume="last")
    next(task.scores)
    again.fit(task, loader(32, 8), loader(8, 8))
    assert again.global_step == whole.global_step
    assert second.state_dict() == first.state_dict()


# ---------------------------------------------------------------------- other callbacks


def test_other_callbacks_accept_neutral_lightning_arguments(tmp_path):
    assert lumen.Timer(verbose=False).time_remaining("train") is None
    assert lumen.LearningRateMonitor(logging_interval=None).logging_interval == "step"
    lumen.OnExceptionCheckpoint(tmp_path, filename="on_exception")
    with pytest.raises(
        ConfigError, match=r"OnExceptionCheckpoint has no argument filename. Lumen names the checkpoint by its step"
    ):
        lumen.OnExceptionCheckpoint(tmp_path, filename="crash")


def test_trainer_accepts_neutral_lightning_arguments():
    trainer = lumen.Trainer(
        barebones=False, plugins=None, use_distributed_sampler=True, enable_autolog_hparams=True, model_registry=None,
        logger=None, enable_checkpointing=None, enable_progress_bar=None, num_sanity_val_steps=None, precision=None,
        log_every_n_steps=None, val_check_interval=None, deterministic=None, min_epochs=None, default_root_dir=None,
        gradient_clip_algorithm=None,
    )  # fmt: skip
    default = lumen.Trainer()
    assert trainer.plan == default.plan
    assert (trainer.default_root_dir, trainer.precision) == (default.default_root_dir, default.precision)
    with pytest.raises(ConfigError, match="Trainer has no argument use_distributed_sampler"):
        lumen.Trainer(use_distributed_sampler=False)


def test_deterministic_warn_only_warns(tmp_path):
    seen = []

    class Looking(Regression):
        def training_step(self, batch):
            seen.append(torch.is_deterministic_algorithms_warn_only_enabled())
            return super().training_step(batch)

    bare_trainer(tmp_path, max_steps=1, deterministic="warn").fit(Looking(), loader())
    bare_trainer(tmp_path, max_steps=1, deterministic=True).fit(Looking(), loader())
    assert seen == [True, False]
    assert not torch.are_deterministic_algorithms_enabled()
