"""What users of a training library rely on, and the tests that hold it; those that no other file holds are here.

A step is one completed update, under accumulation too, and `max_steps` ends exactly
    test_loop.py::test_max_steps_with_accumulation_ends_exactly
    test_loop.py::test_an_epoch_is_cut_into_whole_steps_and_a_short_last_one
"""

import ast
import csv
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
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lumen
from lumen.errors import ConfigError
from lumen.hooks import HOOKS
from tests.tasks import FEATURES, Regression, Seeing, bare_trainer, loader, numbers, plain, quiet_trainer

# ---------------------------------------------------------------------- steps, epochs, counts


class Counts(Regression):
    """Notes (epoch, step, batch_idx) of every micro-batch and the rate and mode it was trained with."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, self.global_step, batch_idx))
        return super().training_step(batch)


@pytest.mark.parametrize(("first", "epoch"), [({"max_epochs": 1}, 1), ({"max_steps": 5}, 1), ({"max_steps": 2}, 0)])
def test_counts_are_exact_after_a_fit_a_resumed_one_and_a_second_one(tmp_path, first, epoch):
    """Nine micro-batches in steps of three: epochs of three steps."""

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
    """Notes the step of every validation; may ask for the end in a training step."""

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
def test_a_stop_asked_for_in_training_adds_no_validation_and_drops_none(tmp_path, stop_in, options, steps, validated):
    when = When(stop_in)
    trainer = bare_trainer(tmp_path, max_epochs=4, num_sanity_val_steps=0, callbacks=[when], **options)
    trainer.fit(Regression(), loader(40, 8), val_dataloaders=loader(8, 8))
    assert (trainer.global_step, when.validated) == (steps, validated)


# ---------------------------------------------------------------------- validation leaves training alone


@pytest.mark.parametrize("interval", [0.1, 0.5, 1.0, 1])
def test_a_validation_never_falls_inside_a_step_and_leaves_its_gradients_alone(tmp_path, interval):
    """Ten micro-batches in steps of four: every tenth of an epoch ends inside one."""

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


def test_what_is_drawn_after_the_sanity_check_does_not_depend_on_it(tmp_path):
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
    """Keeps the batches of each evaluation too."""

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


def test_an_empty_validation_loader_gives_no_value_and_disturbs_nothing(tmp_path):
    data, empty = DataLoader(numbers(8), 4), DataLoader(numbers(0), 4)
    for loaders in (empty, [data, empty], [empty, data]):
        task, trainer = Validated(), bare_trainer(tmp_path, max_epochs=2)
        trainer.fit(task, data, val_dataloaders=loaders)
        assert trainer.global_step == 4
        values = {name: value.item() for name, value in trainer.callback_metrics.items()}
        full = isinstance(loaders, list) and loaders.index(data)
        assert values == ({} if loaders is empty else {f"value/dataloader_idx_{full}": 3.5})
        assert task.evaluated == [[] if loaders is empty else [[0, 1, 2, 3], [4, 5, 6, 7]]] * 3


@pytest.mark.parametrize("has_length", [True, False])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_has_nothing_in_one_epoch_skips_it_with_a_warning(tmp_path, caplog, has_length, workers):
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
    assert {epoch: plain(batches) for epoch, batches in task.epochs.items()} == {
        0: [[0, 1], [2, 3]], 2: [[0, 1], [2, 3]]
    }  # fmt: skip
    assert (trainer.global_step, trainer.current_epoch) == (4, 3)
    assert "epoch 1 made no optimizer step" in caplog.text


class Endless(IterableDataset):
    """Fails where more than a few samples too many are asked of it."""

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
            trainer.fit(task, DataLoader(numbers(4), 4), val_dataloaders=data)
        else:
            getattr(trainer, stage)(task, data[:1])

    run(3)
    batches = [[0, 1], [2, 3], [4, 5]]
    assert task.evaluated == ([batches[:2] * 2, batches * 2, batches * 2] if stage == "fit" else [batches])
    with pytest.raises(ConfigError, match=f"limit_{name}_batches: 0.5 is a fraction, but the loader has no length"):
        run(0.5)


class Counting(lumen.DataModule):
    """Notes which loaders it is asked for."""

    def __init__(self):
        self.made = []

    def train_dataloader(self):
        self.made.append("train")
        return DataLoader(numbers(8), 4)

    def val_dataloader(self):
        self.made.append("val")
        return DataLoader(numbers(8), 4)

    def test_dataloader(self):
        self.made.append("test")
        return DataLoader(numbers(8), 4)

    def predict_dataloader(self):
        self.made.append("predict")
        return DataLoader(numbers(8), 4)


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
def test_a_data_module_is_asked_for_each_loader_once_and_only_for_its_stage(tmp_path, stage, options, made):
    data = Counting()
    getattr(bare_trainer(tmp_path, max_epochs=3, **options), stage)(Validated(), data)
    assert data.made == made


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("stage", ["sanity", "fit", "validate", "test", "predict"])
def test_no_worker_of_an_evaluation_outlives_it(tmp_path, stage, fails, persistent):
    class Failing(Validated):
        running = 0

        def look(self):
            self.running = max(self.running, len(multiprocessing.active_children()))
            if fails is not None and self.running and (stage != "fit" or self.global_step == 2):
                raise fails("on purpose")

        def validation_step(self, batch):
            self.look()

        test_step = predict_step = validation_step

    data = DataLoader(numbers(8), 4, num_workers=1, persistent_workers=persistent)
    task, trainer = Failing(), bare_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=2 * (stage == "sanity"))

    def run():
        if stage in ("sanity", "fit"):
            trainer.fit(task, DataLoader(numbers(8), 4), val_dataloaders=data)
        else:
            getattr(trainer, stage)(task, data)

    if fails is None:
        run()
    else:
        with pytest.raises(fails):
            run()
    assert task.running == 1
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_an_evaluation_reads_each_sample_once_and_in_the_same_order_every_time(tmp_path, stage):
    """Also where a sampler for several processes was given, which would leave half of them out."""
    data = numbers(10)
    for sampler in ({"sampler": DistributedSampler(data, num_replicas=2, rank=1)}, {"shuffle": True}):
        task, batches = Validated(), DataLoader(data, 4, **sampler)
        trainer = bare_trainer(tmp_path, max_epochs=3, num_sanity_val_steps=0)
        for _ in range(1 if stage == "fit" else 3):
            if stage == "fit":
                trainer.fit(task, DataLoader(numbers(4), 4), val_dataloaders=batches)
            else:
                getattr(trainer, stage)(task, batches)
        assert len(task.evaluated) == 3
        assert task.evaluated[0] == task.evaluated[1] == task.evaluated[2]
        assert sorted(sum(task.evaluated[0], [])) == list(range(10)) != sum(task.evaluated[0], [])


@pytest.mark.parametrize("workers", [0, 2])
def test_each_prediction_comes_with_the_numbers_of_its_batch_and_loader(tmp_path, workers):
    class Writer(lumen.Callback):
        def __init__(self):
            self.written = []

        def on_predict_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
            self.written.append((dataloader_idx, batch_idx, batch[0].tolist(), outputs.tolist()))

    class Doubling(lumen.TaskModule):
        def predict_step(self, batch):
            return 2 * batch[0]

    writer = Writer()
    loaders = [DataLoader(numbers(5), 2, num_workers=workers), DataLoader(numbers(3), batch_sampler=[[2], [0, 1]])]
    predictions = bare_trainer(tmp_path, callbacks=[writer]).predict(Doubling(), loaders)
    assert writer.written == [
        (0, 0, [0, 1], [0, 2]), (0, 1, [2, 3], [4, 6]), (0, 2, [4], [8]), (1, 0, [2], [4]), (1, 1, [0, 1], [0, 2])
    ]  # fmt: skip
    assert [[batch.tolist() for batch in each] for each in predictions] == [[[0, 2], [4, 6], [8]], [[4], [0, 2]]]


# ---------------------------------------------------------------------- interruptions


class Failure(Exception):
    pass


class Rich(Regression):
    """Everything that a checkpoint has to bring back: dropout, statistics, momentum, schedules, epoch values."""

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

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch

    def on_save_checkpoint(self, checkpoint):
        pass

    def on_load_checkpoint(self, checkpoint):
        pass

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(lambda *_: setattr(self, "updates", self.updates + 1))
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
            {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)},
        ]


def train(folder, task, *callbacks, validate=True, **options):
    """Two epochs of three steps, of which the last is short; a checkpoint at each boundary."""
    saving = lumen.ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)
    options = {"max_epochs": 2, "accumulate_grad_batches": 2, "val_check_interval": 2, "resume": "auto"} | options
    trainer = quiet_trainer(folder, log_every_n_steps=1, callbacks=[*callbacks, saving], **options)
    evaluation = loader(12, 6, shuffle=False) if validate else None
    try:
        trainer.fit(task, loader(38, 8), val_dataloaders=evaluation)
    finally:
        assert not hasattr(trainer.run, "optimizer") or trainer.global_step >= task.updates
    return trainer


def outcome(trainer, task):
    """Everything that a run ends with, in comparable form."""
    tensors = {name: tensor.tolist() for name, tensor in task.state_dict().items()}
    state = trainer.optimizers[0].state_dict()
    tensors |= {(n, key): value.tolist() for n, entry in state["state"].items() for key, value in entry.items()}
    with (trainer.run_directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return tensors, state["param_groups"], rows, trainer.global_step, trainer.current_epoch


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What runs with and without validation end with."""
    found = {}
    for validate in (False, True):
        task = Rich()
        found[validate] = outcome(train(tmp_path_factory.mktemp("whole"), task, validate=validate), task)
    return found


@pytest.mark.parametrize("step", range(1, 7))
@pytest.mark.parametrize("validate", [False, True])
def test_a_run_stopped_at_any_step_and_resumed_ends_like_one_that_was_not(tmp_path, undisturbed, validate, step):
    class Stop(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            if trainer.global_step == step and trainer.run.stop_signal is None:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, Rich(), Stop(), validate=validate)
    task = Rich()
    assert outcome(train(tmp_path, task, validate=validate), task) == undisturbed[validate]


BEFORE = ("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_train_start")
PLACES = [name for name in HOOKS if not re.search("test|predict|exception", name)]
METHODS = [
    "training_step", "validation_step", "on_before_batch_transfer", "transfer_batch_to_device",
    "on_after_batch_transfer", "on_save_checkpoint", "configure_optimizers",
]  # fmt: skip


def failing(base, name):
    """A subclass in which one method fails: from the fourth step on, or at once where it is called before training."""

    def method(self, *args, **options):
        trainer = self.trainer if isinstance(self, lumen.TaskModule) else args[0]
        if name in (*BEFORE, "configure_optimizers", "teardown") or trainer.global_step >= 4:
            raise Failure(name)
        return getattr(base, name)(self, *args, **options)

    if name in ("training_step", "validation_step"):  # called with what the signature has
        return type("Failing", (base,), {name: lambda self, batch: method(self, batch)})
    return type("Failing", (base,), {name: method})


@pytest.mark.parametrize(("owner", "name"), [
    *[("callback", name) for name in PLACES], *[("task", name) for name in METHODS],
])  # fmt: skip
def test_an_exception_anywhere_leaves_a_run_that_goes_on_exactly(tmp_path, undisturbed, owner, name):
    broken = failing(Rich, name)() if owner == "task" else Rich()
    callbacks = [failing(lumen.Callback, name)()] if owner == "callback" else []
    trainer = None
    with pytest.raises(Failure, match=name):
        train(tmp_path, broken, *callbacks)
    assert {module.training for module in broken.modules()} == {True}
    task = Rich()
    assert outcome(train(tmp_path, task), task) == undisturbed[True]


@pytest.mark.parametrize("detect", [True, False])
def test_the_operation_whose_backward_made_a_nan_is_found_on_demand(tmp_path, detect):
    class Root(Regression):
        def training_step(self, batch):
            return (self(batch[0]) * 0.0).sqrt().mean()

    with pytest.raises(RuntimeError if detect else lumen.LumenError, match="SqrtBackward0" if detect else "NaN|nan"):
        bare_trainer(tmp_path, max_steps=3, detect_anomaly=detect).fit(Root(), loader())
    assert not torch.is_anomaly_enabled()
