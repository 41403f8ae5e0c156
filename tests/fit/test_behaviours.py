"""Behaviours that users of a training library rely on, their tests, and the tests that fit no other file.

A step is a completed update, also with accumulation, and max_steps ends exactly there
    fit/loop/test_loop.py::test_max_steps_with_accumulation_ends_exactly
    fit/loop/test_loop.py::test_epoch_is_cut_into_steps_with_short_last
Epochs, steps and batches are counted exactly in a fit, in a resumed one, and in a second one, which begins at zero
    fit/test_behaviours.py::test_counts_are_exact_after_fit_resume_and_refit
The first limit that is reached ends the run; -1 means no limit, 0 trains nothing, a smaller one is refused
    fit/loop/test_loop.py::test_the_first_limit_reached_ends_the_run
    fit/loop/test_loop.py::test_invalid_trainer_setting_is_named_at_construction
A minimum of steps or epochs delays a stop, which neither adds nor drops a validation
    fit/loop/test_loop.py::test_a_minimum_delays_a_stop
    fit/loop/test_validation.py::test_an_early_stop_does_not_add_a_validation
    fit/test_behaviours.py::test_stop_adds_or_drops_no_validation
A stop requested inside an epoch ends the run after the step in progress
    fit/loop/test_loop.py::test_a_stop_leaves_after_the_step_in_progress
-1 from on_train_batch_start skips the rest of the epoch, and schedules still move
    fit/loop/test_loop.py::test_returning_minus_one_skips_rest_of_epoch
    fit/callbacks/test_callbacks.py::test_a_function_may_end_the_epoch
Hooks come in one order, in training, with accumulation, resumed, and in each evaluation
    fit/task/test_hooks.py::test_fit_follows_the_hook_order
    fit/task/test_hooks.py::test_fit_resumed_in_mid_epoch_follows_hook_order
    fit/task/test_hooks.py::test_an_evaluation_calls_what_the_map_says
Each submodule has its earlier mode after an evaluation
    fit/loop/test_validation.py::test_each_submodule_gets_its_own_mode_back
    fit/loop/test_validation.py::test_modes_come_back_after_an_error_too
A validation never runs inside a step, and changes neither gradients nor generators
    fit/test_behaviours.py::test_validation_never_falls_inside_a_step
    fit/loop/test_validation.py::test_validation_disturbs_neither_gradients_nor_generators
The sanity check leaves no value and no row behind, and does not change later draws
    fit/loop/test_validation.py::test_the_sanity_check_leaves_no_trace
    fit/test_behaviours.py::test_sanity_check_does_not_change_later_draws

An empty loader is an error in training, and a warning in an evaluation
    fit/data/test_data.py::test_empty_training_loader_raises_and_names_the_cause
    fit/data/test_data.py::test_an_empty_evaluation_loader_is_one_warning
    fit/loop/test_validation.py::test_an_empty_evaluation_gives_nothing
A stream needs no length, may have a wrong length, and may be empty in an epoch
    fit/data/test_data.py::test_a_loader_of_another_kind_repeats_and_resumes
    fit/data/test_loaders.py::test_stream_with_wrong_length_is_read_completely
    fit/test_behaviours.py::test_empty_epoch_of_a_stream_warns_and_continues
A limit is a count or a fraction, 0 too; an endless loader needs a count; a fraction of less than a batch is an error
    fit/loop/test_loop.py::test_limit_is_a_count_or_fraction
    fit/loop/test_loop.py::test_fraction_below_one_batch_raises
    fit/loop/test_validation.py::test_limits_hold_for_every_evaluation
    fit/data/test_data.py::test_an_endless_stream_needs_only_a_limit
    fit/test_behaviours.py::test_endless_evaluation_loaders_need_only_a_count
Several training loaders combine in every mode; several validation loaders have separate values
    fit/data/test_loaders.py::test_several_loaders_are_read_together
    fit/data/test_loaders.py::test_mode_applies_to_all_nested_loaders
    fit/task/test_hooks.py::test_hooks_get_what_they_are_promised
    fit/loop/test_validation.py::test_several_loaders_have_a_value_each
Loaders are made once, only for the stages that need them, and reloaded every n epochs
    fit/test_behaviours.py::test_each_loader_is_requested_once_for_its_stage
    fit/loop/test_loop.py::test_loaders_may_live_on_the_task
    fit/data/test_loaders.py::test_loaders_are_reloaded_every_n_epochs
Workers end with the run and with the evaluation, also when it fails, persistent or not
    fit/data/test_data.py::test_no_worker_outlives_its_run
    fit/test_behaviours.py::test_no_worker_of_an_evaluation_outlives_it
No two workers, samples or epochs draw the same numbers
    fit/data/test_data.py::test_workers_get_seeds_of_their_own_that_repeat
    fit/data/test_data.py::test_augmentation_belongs_to_the_sample
A user's sampler is kept and gets the epoch; a sampler for several processes skips no sample
    fit/data/test_loaders.py::test_whatever_wants_to_know_the_epoch_is_told
    fit/data/test_loaders.py::test_distributed_sampler_is_replaced
    fit/test_behaviours.py::test_evaluation_reads_each_sample_once_in_fixed_order
overfit_batches repeats the same batches in every epoch
    fit/data/test_loaders.py::test_overfitting_repeats_the_same_batches_in_every_epoch
Predictions have each sample once, in order, and each batch has its number
    promises/test_exact_evaluation.py::test_one_process_gives_what_plain_code_gives
    fit/test_behaviours.py::test_predictions_have_batch_and_loader_indices

Backward runs once for each micro-batch and each evaluation of a closure
    fit/loop/test_closures.py::test_backward_runs_once_per_micro_batch_and_evaluation
Gradients are clipped by norm and by value like torch, in every precision
    fit/optim/test_optim_adamw.py::test_clipping_uses_unscaled_gradients_in_every_precision
    fit/test_precision.py::test_one_dtype_equals_the_loop_by_hand
Schedules move by step and epoch, at their frequency, by their monitor, and are saved in their state after the update
    fit/optim/test_schedulers.py::test_rates_are_those_of_the_hand_written_loop
    fit/optim/test_schedulers.py::test_a_plateau_follows_its_monitor
    fit/optim/test_schedulers.py::test_missing_monitor_raises_and_lists_logged_names
    fit/optim/test_schedulers.py::test_non_strict_missing_monitor_keeps_the_rate
    fit/optim/test_schedulers.py::test_a_checkpoint_holds_the_schedule_after_the_update
Under fp16 gradients are unscaled before they are clipped, fused or not, and an overflow moves no parameter
    fit/optim/test_optim_adamw.py::test_fused_scaled_updates_equal_the_manual_loop
    promises/test_hand_written_loop.py::test_autocast_equals_autocast_by_hand
    promises/test_hand_written_loop.py::test_an_overflowing_fp16_update_moves_nothing
A loss or a monitor that is not finite ends the run, and detect_anomaly finds its operation
    fit/run/test_weights.py::test_non_finite_loss_raises_and_names_the_step
    fit/callbacks/test_callbacks.py::test_early_stopping_stops_at_the_right_epoch
    fit/run/test_anomalies.py::test_operation_with_nan_backward_is_named_with_line
Tasks that cannot be trained are refused before training
    fit/errors/test_errors.py::test_a_task_that_cannot_be_trained_is_refused

A run stopped or killed anywhere and resumed equals an uninterrupted run, with and without validation
    fit/test_behaviours.py::test_run_stopped_at_any_step_resumes_exactly
    promises/test_exact_resume.py::test_three_kills_leave_no_trace
A loader's state is saved, and a resumed run uses the state
    fit/data/test_loaders.py::test_stateful_stream_resumes_from_its_state
    fit/data/test_loaders.py::test_a_stateful_loader_is_not_read_again
A run with an exception in any hook, step or save resumes exactly
    fit/test_behaviours.py::test_exception_anywhere_leaves_a_run_that_resumes_exactly
States of callbacks survive; the state of a missing callback is named
    fit/checkpoint/test_partial_resume.py::test_every_combination_of_parts_takes_over_exactly_these
    fit/callbacks/test_model_checkpoint.py::test_callback_missing_on_resume_is_named
Each rule writes and keeps exactly its checkpoints, also after an exception
    fit/callbacks/test_model_checkpoint.py::test_exactly_the_expected_checkpoints_are_kept
    fit/callbacks/test_model_checkpoint.py::test_the_interval_counts_from_the_last_save
    fit/callbacks/test_on_exception_checkpoint.py::test_failure_before_update_saves_previous_parameters
The end of training is saved if no other rule saved the step, and no step is saved twice
    fit/callbacks/test_model_checkpoint.py::test_exactly_the_expected_checkpoints_are_kept
    fit/callbacks/test_model_checkpoint.py::test_a_step_with_several_reasons_is_saved_once
NaN as the first score does not block a later best checkpoint
    fit/callbacks/test_model_checkpoint.py::test_nan_first_score_allows_a_later_best
A resumed run never removes the checkpoints of its source
    fit/callbacks/test_model_checkpoint.py::test_new_run_from_checkpoint_keeps_the_old_run
    fit/callbacks/test_model_checkpoint.py::test_resume_source_is_kept_until_a_newer_commit
Parameters load strictly or leniently, with more and with fewer names
    fit/checkpoint/test_load.py::test_strict_mismatch_raises_and_non_strict_warns
"""

import ast
import multiprocessing
import os
import random
import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data.distributed import DistributedSampler

import lumen
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS
from tests.helpers import ROOT
from tests.helpers.tables import read_rows
from tests.helpers.tasks import (
    FEATURES,
    Regression,
    Seeing,
    as_lists,
    bare_trainer,
    loader,
    make_numbers,
    quiet_trainer,
)

# ---------------------------------------------------------------------- the table above


def test_table_and_tests_agree():
    held, behaviour = {}, ""
    for line in __doc__.splitlines()[2:]:
        if line.startswith(" "):
            held[behaviour].append(line.strip().split("::"))
        elif line:
            behaviour, held[line] = line, []
    named = {(file, test) for tests in held.values() for file, test in tests}
    assert [behaviour for behaviour, tests in held.items() if not tests] == []
    there = {
        (file, item.name)
        for file in {file for file, _ in named}
        for item in ast.parse((ROOT / "tests" / file).read_text()).body
        if isinstance(item, ast.FunctionDef) and item.name.startswith("test_")
    }
    assert named - there == set()
    this_file = Path(__file__).relative_to(ROOT / "tests").as_posix()
    assert {test for file, test in there - named if file == this_file} == {"test_table_and_tests_agree"}


# ---------------------------------------------------------------------- steps, epochs, counts


class Counts(Regression):
    """Task that records (epoch, step, batch_idx) of every micro-batch, with its rate and mode."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, self.global_step, batch_idx))
        return super().training_step(batch)


@pytest.mark.parametrize(("first", "epoch"), [({"max_epochs": 1}, 1), ({"max_steps": 5}, 1), ({"max_steps": 2}, 0)])
def test_counts_are_exact_after_fit_resume_and_refit(tmp_path, first, epoch):
    """Nine micro-batches in steps of three are epochs of three steps."""

    def fit(task, **options):
        trainer = quiet_trainer(tmp_path, accumulate_grad_batches=3, **options)
        trainer.fit(task, loader(72, 8))
        return trainer

    def counts(trainer):
        return trainer.global_step, trainer.current_epoch, trainer.run.progress.micro_batches

    whole = [(number // 9, number // 3, number % 9) for number in range(27)]
    begun, resumed = Counts(), Counts()
    trainer = fit(begun, **first)
    steps = len(begun.seen) // 3
    assert counts(trainer) == (steps, epoch, 3 * steps)
    trainer = fit(resumed, max_epochs=3, resume="auto")
    assert counts(trainer) == (9, 3, 27)
    assert begun.seen + resumed.seen == whole
    again = Counts()
    trainer = fit(again, max_epochs=3)
    trainer.fit(again, loader(72, 8))
    assert counts(trainer) == (9, 3, 27)
    assert again.seen == whole + whole


class When(lumen.Callback):
    """Callback that records the step of every validation and may request a stop in a training step."""

    def __init__(self, stop_in=None):
        self.stop_in, self.validated = stop_in, []

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == self.stop_in:
            trainer.should_stop = True

    def on_validation_start(self, trainer, task):
        self.validated.append(trainer.global_step)


@pytest.mark.parametrize(
    ("stop_in", "options", "steps", "validated"),
    [
        (3, {}, 3, []),
        (5, {}, 5, [5]),
        (3, {"min_epochs": 1}, 5, [5]),
        (3, {"min_steps": 7}, 7, [5]),
        (3, {"val_check_interval": 3}, 3, [3]),
        (3, {"val_check_interval": 2, "min_steps": 6}, 6, [2, 4, 6]),
    ],
)
def test_stop_adds_or_drops_no_validation(tmp_path, stop_in, options, steps, validated):
    when = When(stop_in)
    trainer = bare_trainer(tmp_path, max_epochs=4, num_sanity_val_steps=0, callbacks=[when], **options)
    trainer.fit(Regression(), loader(40, 8), val_dataloaders=loader(8, 8))
    assert (trainer.global_step, when.validated) == (steps, validated)


# ---------------------------------------------------------------------- validation does not affect training


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0, 1])
def test_validation_never_falls_inside_a_step(tmp_path, interval):
    """Ten micro-batches in steps of four: a tenth of an epoch ends inside a step. Gradients are unchanged."""

    class Watched(Regression):
        def __init__(self):
            super().__init__(dropout=0.3)
            self.gradients, self.pending = [], 0

        def on_after_backward(self):
            self.pending += 1

        def on_before_optimizer_step(self, optimizer):
            self.gradients.append([parameter.grad.clone() for parameter in self.parameters()])
            self.pending = 0

        def on_validation_start(self):
            assert self.pending == 0

    tasks = [Watched(), Watched()]
    for task, options in zip(tasks, ({"limit_val_batches": 0}, {"val_check_interval": interval}), strict=True):
        trainer = bare_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=4, **options)
        trainer.fit(task, loader(80, 8), val_dataloaders=loader(24, 8))
    assert len(tasks[0].gradients) == 6
    for alone, validated in zip(*[task.gradients for task in tasks], strict=True):
        for expected, found in zip(alone, validated, strict=True):
            assert torch.equal(expected, found)


def test_sanity_check_does_not_change_later_draws(tmp_path):
    class Draws(Regression):
        def draw(self):
            return torch.rand(()).item(), np.random.rand(), random.random()

        def validation_step(self, batch):
            self.draw()

        def on_sanity_check_end(self):
            self.draw()

        def on_validation_end(self):
            self.draw()

        def on_train_start(self):
            self.drawn = self.draw()

    drawn = []
    for steps in (0, 1, -1):
        task = Draws()
        bare_trainer(tmp_path, max_steps=1, num_sanity_val_steps=steps).fit(task, loader(), val_dataloaders=loader())
        drawn.append(task.drawn)
    assert drawn[0] == drawn[1] == drawn[2]


# ---------------------------------------------------------------------- loaders


class Validated(Seeing):
    """Task that also records the batches of each evaluation."""

    def __init__(self):
        super().__init__()
        self.evaluated = []

    def on_validation_start(self):
        self.evaluated.append([])

    on_test_start = on_predict_start = on_validation_start

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("value", batch[0].float().mean())
        self.evaluated[-1].append(batch[0].tolist())

    def test_step(self, batch):
        self.validation_step(batch, 0, 0)

    def predict_step(self, batch):
        self.evaluated[-1].append(batch[0].tolist())


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_empty_epoch_of_a_stream_warns_and_continues(tmp_path, caplog, has_length, workers):
    class Stream(IterableDataset):
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([] if self.epoch == 1 else range(4))

    if has_length:
        Stream.__len__ = lambda self: 4
    task, trainer = Seeing(), bare_trainer(tmp_path, max_epochs=3, log_level="WARNING")
    trainer.fit(task, DataLoader(Stream(), 2, num_workers=workers))
    assert {epoch: as_lists(batches) for epoch, batches in task.epochs.items()} == {
        0: [[0, 1], [2, 3]], 2: [[0, 1], [2, 3]]
    }  # fmt: skip
    assert (trainer.global_step, trainer.current_epoch) == (4, 3)
    assert "epoch 1 made no optimizer step" in caplog.text


class Endless(IterableDataset):
    """Stream that fails if the loop asks for more than a few extra samples."""

    def __init__(self, most):
        self.most = most

    def __iter__(self):
        for number in range(self.most + 1):
            assert number < self.most
            yield (number,)


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_endless_evaluation_loaders_need_only_a_count(tmp_path, stage):
    name = "val" if stage in ("fit", "validate") else stage
    task, data = Validated(), [DataLoader(Endless(6), 2), DataLoader(Endless(6), 2)]

    def run(limit):
        trainer = bare_trainer(tmp_path, max_epochs=2, **{f"limit_{name}_batches": limit})
        if stage == "fit":
            trainer.fit(task, DataLoader(make_numbers(4), 4), val_dataloaders=data)
        else:
            getattr(trainer, stage)(task, data[:1])

    run(3)
    batches = [[0, 1], [2, 3], [4, 5]]
    assert task.evaluated == ([batches[:2] * 2, batches * 2, batches * 2] if stage == "fit" else [batches])
    with pytest.raises(ConfigError, match=f"limit_{name}_batches: 0.5 is a fraction, but the loader has no length"):
        run(0.5)


class Counting(lumen.DataModule):
    """Data module that records which of its loaders are requested."""

    def __init__(self):
        self.made = []

    def train_dataloader(self):
        self.made.append("train")
        return DataLoader(make_numbers(8), 4)

    def val_dataloader(self):
        self.made.append("val")
        return DataLoader(make_numbers(8), 4)

    def test_dataloader(self):
        self.made.append("test")
        return DataLoader(make_numbers(8), 4)

    def predict_dataloader(self):
        self.made.append("predict")
        return DataLoader(make_numbers(8), 4)


@pytest.mark.parametrize(
    ("stage", "options", "made"),
    [
        ("fit", {}, ["train", "val"]),
        ("fit", {"num_sanity_val_steps": 0, "val_check_interval": 1}, ["train", "val"]),
        ("fit", {"limit_val_batches": 0}, ["train"]),
        ("fit", {"fast_dev_run": True}, ["train", "val"]),
        ("fit", {"reload_dataloaders_every_n_epochs": 2}, ["train", "val"] * 2),
        ("validate", {}, ["val"]),
        ("test", {}, ["test"]),
        ("predict", {}, ["predict"]),
    ],
)
def test_each_loader_is_requested_once_for_its_stage(tmp_path, stage, options, made):
    data = Counting()
    getattr(bare_trainer(tmp_path, max_epochs=3, **options), stage)(Validated(), data)
    assert data.made == made


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["sanity", "fit", "validate", "test", "predict"])
def test_no_worker_of_an_evaluation_outlives_it(tmp_path, stage, fails, persistent):
    before = set(multiprocessing.active_children())  # processes of other tests

    class Failing(Validated):
        running = 0

        def look(self):
            self.running = max(self.running, len(set(multiprocessing.active_children()) - before))
            if fails is not None and self.running and (stage != "fit" or self.global_step == 2):
                raise fails("on purpose")

        def validation_step(self, batch):
            self.look()

        test_step = predict_step = validation_step

    data = DataLoader(make_numbers(8), 4, num_workers=1, persistent_workers=persistent)
    task, trainer = Failing(), bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=2 * (stage == "sanity"))

    def run():
        if stage in ("sanity", "fit"):
            trainer.fit(task, DataLoader(make_numbers(8), 4), val_dataloaders=data)
        else:
            getattr(trainer, stage)(task, data)

    if fails is None:
        run()
    else:
        with pytest.raises(fails):
            run()
    assert task.running == 1
    assert set(multiprocessing.active_children()) <= before


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_evaluation_reads_each_sample_once_in_fixed_order(tmp_path, stage):
    """A sampler for several processes would skip half of the samples."""
    data = make_numbers(10)
    for sampler in ({"sampler": DistributedSampler(data, num_replicas=2, rank=1)}, {"shuffle": True}):
        task, batches = Validated(), DataLoader(data, 4, **sampler)
        trainer = bare_trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0)
        for _ in range(1 if stage == "fit" else 3):
            if stage == "fit":
                trainer.fit(task, DataLoader(make_numbers(4), 4), val_dataloaders=batches)
            else:
                getattr(trainer, stage)(task, batches)
        assert len(task.evaluated) == 3
        assert task.evaluated[0] == task.evaluated[1] == task.evaluated[2]
        order = [number for batch in task.evaluated[0] for number in batch]
        assert sorted(order) == list(range(10)) != order


@pytest.mark.parametrize("workers", [0, 2])
def test_predictions_have_batch_and_loader_indices(tmp_path, workers):
    class Writer(lumen.Callback):
        def __init__(self):
            self.written = []

        def on_predict_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
            self.written.append((dataloader_idx, batch_idx, batch[0].tolist(), outputs.tolist()))

    class Doubling(lumen.TaskModule):
        def predict_step(self, batch):
            return 2 * batch[0]

    writer = Writer()
    loaders = [
        DataLoader(make_numbers(5), 2, num_workers=workers),
        DataLoader(make_numbers(3), batch_sampler=[[2], [0, 1]]),
    ]
    predictions = bare_trainer(tmp_path, callbacks=[writer]).predict(Doubling(), loaders)
    assert writer.written == [
        (0, 0, [0, 1], [0, 2]), (0, 1, [2, 3], [4, 6]), (0, 2, [4], [8]), (1, 0, [2], [4]), (1, 1, [0, 1], [0, 2])
    ]  # fmt: skip
    assert [[batch.tolist() for batch in each] for each in predictions] == [[[0, 2], [4, 6], [8]], [[4], [0, 2]]]


# ---------------------------------------------------------------------- interruptions


class Failure(Exception):
    pass


class Rich(Regression):
    """Task with every state in a checkpoint: dropout, statistics, momentum, schedules, values of the epoch."""

    def __init__(self):
        super().__init__(dropout=0.2)
        self.norm = nn.BatchNorm1d(FEATURES)
        self.updates = 0

    def forward(self, inputs):
        return self.net(self.norm(inputs))

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True)
        return loss

    def collate(self, samples):
        return default_collate(samples)

    def before_update(self):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda *_: self.before_update())
        optimizer.register_step_post_hook(lambda *_: setattr(self, "updates", self.updates + 1))
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
        ]


def saving_trainer(folder, *callbacks):
    """Return a trainer of two epochs with a checkpoint at each step."""
    saving = lumen.ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 2, "log_every_n_steps": 1}
    return quiet_trainer(folder, resume="auto", callbacks=[*callbacks, saving], **options)


def fit(trainer, task, validate=True):
    """Train epochs of three steps, of which the last is short. Return the final state in comparable form."""
    training = loader(38, 8, collate_fn=task.collate)
    trainer.fit(task, training, val_dataloaders=loader(12, 6, shuffle=False) if validate else None)
    tensors = {name: tensor.tolist() for name, tensor in task.state_dict().items()}
    optimizer = trainer.optimizers[0].state_dict()
    moments = [[value.tolist() for value in entry.values()] for entry in optimizer["state"].values()]
    rows = read_rows(trainer.run_directory / "metrics.csv")
    return tensors, moments, optimizer["param_groups"], rows, trainer.global_step, trainer.current_epoch


@pytest.fixture(scope="module")
def uninterrupted_states(tmp_path_factory):
    """Return the final states of runs without and with validation."""
    return [fit(saving_trainer(tmp_path_factory.mktemp("whole")), Rich(), validate) for validate in (False, True)]


@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("validate", [False, True])
def test_run_stopped_at_any_step_resumes_exactly(tmp_path, uninterrupted_states, validate, step):
    class Stop(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if trainer.global_step == step and trainer.run.ending.vote.requested_signal is None:
                os.kill(os.getpid(), signal.SIGINT)

    trainer = saving_trainer(tmp_path, Stop())
    with pytest.raises(KeyboardInterrupt):
        fit(trainer, Rich(), validate)
    assert trainer.global_step == step
    assert fit(saving_trainer(tmp_path), Rich(), validate) == uninterrupted_states[validate]


BEFORE_TRAINING = (
    "prepare_data", "setup", "configure_model", "configure_optimizers", "on_fit_start", "on_sanity_check_start",
    "on_sanity_check_end", "on_train_start", "teardown",
)  # fmt: skip
PLACES = {
    lumen.Callback: [name for name in HOOKS if not re.search("test|predict|exception|load", name)],
    Rich: [
        "prepare_data", "configure_model", "configure_optimizers", "collate", "on_before_batch_transfer",
        "transfer_batch_to_device", "on_after_batch_transfer", "training_step", "before_update", "validation_step",
        "on_save_checkpoint",
    ],
}  # fmt: skip


def make_failing(base, name):
    """Return an object with one failing method: in the second epoch, or at once if called before training only."""
    since = 0 if name in BEFORE_TRAINING else 3 if name == "on_train_epoch_start" else 4

    def method(self, *args, **options):
        trainer = self.trainer if base is Rich else args[0]
        if trainer.global_step >= since:
            raise Failure(name)
        return getattr(base, name)(self, *args, **options)

    def step(self, batch):  # Lumen calls a step with the arguments in its signature
        return method(self, batch)

    return type("Failing", (base,), {name: step if name in ("training_step", "validation_step") else method})()


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in PLACES.items() for name in names])
def test_exception_anywhere_leaves_a_run_that_resumes_exactly(tmp_path, uninterrupted_states, owner, name):
    broken = make_failing(owner, name)
    trainer = saving_trainer(tmp_path, *([broken] if owner is lumen.Callback else []))
    task = Rich() if owner is lumen.Callback else broken
    with pytest.raises(Failure, match=name):
        fit(trainer, task)
    assert trainer.global_step == task.updates
    assert all(module.training for module in task.modules())
    again = saving_trainer(tmp_path) if owner is lumen.Callback else trainer
    assert fit(again, Rich()) == uninterrupted_states[True]
