"""One torchmetrics object in several stages: each stage computes over its own samples only."""

import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection, MinMaxMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision, MulticlassRecall

import lumen
from lumen.errors import ConfigError
from tests.helpers.logged_values import MemoryLogger, make_numbers, make_predictions
from tests.helpers.tasks import Saving, bare_trainer, quiet_trainer

TRAINING, VALIDATION = 8, 5


def make_held_out(count=VALIDATION):
    """Return batches of the numbers 100, 101, ..."""
    loader = make_numbers(count)
    loader.dataset.tensors[0].add_(100)
    return loader


class Shared(lumen.TaskModule):
    """Task that feeds one metric in all stages; `log` and hooks say how."""

    def __init__(self, metric, feed=lambda metric, batch: metric.update(batch), log_in=("train", "val", "test")):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.metric, self.feed, self.log_in = metric, feed, log_in
        self.found = []

    def follow(self, stage, batch):
        self.feed(self.metric, batch[0])
        if stage in self.log_in:
            named = self.metric if isinstance(self.metric, MetricCollection) else {"metric": self.metric}
            self.log_dict({f"{stage}_{name}": metric for name, metric in named.items()})

    def training_step(self, batch):
        self.follow("train", batch)
        return self.weight * batch[0].mean()

    def validation_step(self, batch):
        self.follow("val", batch)

    def test_step(self, batch):
        self.follow("test", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def fit(folder, task, **options):
    memory = MemoryLogger()
    options = {"max_epochs": 2, "val_check_interval": 0.5, "enable_checkpointing": False} | options
    trainer = quiet_trainer(folder, logger=memory, **options)
    trainer.fit(task, make_numbers(TRAINING), val_dataloaders=make_held_out())
    return [(step, row) for step, row in memory.rows if row]


def compute_expected(make, feed, prefixes=("train", "val")):
    """Return the values that separate objects give over all samples of a stage."""
    values = {}
    for stage, data in zip(prefixes, (make_numbers(TRAINING), make_held_out()), strict=True):
        metric = make()
        for (batch,) in data:
            feed(metric, batch)
        found = metric.compute()
        found = found if isinstance(metric, MetricCollection) else {"metric": found}
        values[stage] = {f"{stage}_{name}": float(value) for name, value in found.items()}
    return values


def update(metric, batch):
    metric.update(batch)


def forward(metric, batch):
    metric(batch)


def classify(metric, batch):
    metric.update(*make_predictions(batch))


class Total(CatMetric):
    def compute(self):
        return super().compute().sum()


def make_collection():
    """Make a collection: three metrics share their states, and the fourth has its own."""
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3),
            "precision": MulticlassPrecision(3),
            "recall": MulticlassRecall(3),
            "top": MulticlassAccuracy(3, top_k=2, average="micro"),
        }
    )


KINDS = {
    "mean": (MeanMetric, update),
    "forward": (MeanMetric, forward),
    "list": (Total, update),
    "collection": (make_collection, classify),
    "collection, forward": (make_collection, lambda metric, batch: metric(*make_predictions(batch))),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_computes_over_its_own_samples(tmp_path, kind):
    make, feed = KINDS[kind]
    values = compute_expected(make, feed)
    rows = fit(tmp_path, Shared(make(), feed))
    assert rows == [
        (step, values[stage])
        for first in (0, 8)
        for step, stage in ((first + 4, "val"), (first + 8, "val"), (first + 8, "train"))
    ]


@pytest.mark.parametrize("logged", ["train", "val"])
def test_metric_is_separate_in_stages_that_never_log(tmp_path, logged):
    """The other test logs the result of `forward`: `self.log("acc", self.accuracy(scores, classes))`."""
    values = compute_expected(MeanMetric, update)
    task = Shared(MeanMetric(), forward, log_in=(logged, "test"))
    rows = fit(tmp_path, task)
    if logged == "val":
        assert [row for _, row in rows] == [values["val"]] * 4
        found = bare_trainer(tmp_path).test(task, make_held_out(3))
        assert found == [{"test_metric": 101.0}]  # without the training before, which is never reset
    else:
        assert [row for _, row in rows] == [values["train"]] * 2


class Reading(Shared):
    """Task that trains with the metric alone and reads the metric at the end of validations."""

    resets = False

    def validation_step(self, batch):
        pass

    def on_validation_epoch_start(self):
        self.found.append(self.metric.compute().item() if self.metric.update_called else None)

    def on_validation_epoch_end(self):
        self.on_validation_epoch_start()
        if self.resets:
            self.metric.reset()


@pytest.mark.parametrize("resets", [False, True])
def test_training_metric_is_readable_and_resettable_in_validation(tmp_path, resets):
    task = Reading(SumMetric(), lambda metric, batch: metric.update(batch + 1), log_in=())
    task.resets = resets
    fit(tmp_path, task, max_epochs=1, num_sanity_val_steps=0)
    at_start, at_end, at_second_start, at_second_end = task.found
    assert at_start == at_end > 0
    assert at_second_start == at_second_end == sum(range(1, 9)) - at_start * resets


def test_metric_without_reset_accumulates_across_evaluations(tmp_path):
    class Counting(Shared):
        def follow(self, stage, batch):
            if stage != "train":
                super().follow(stage, batch)

        def on_validation_epoch_end(self):
            self.found.append(self.metric.compute().item())

    task = Counting(SumMetric(), lambda metric, batch: metric.update(torch.ones(len(batch))), log_in=())
    fit(tmp_path, task)
    assert task.found[1:] == [5, 10, 15, 20]  # without the counts of the sanity check, which is the first one
    trainer = bare_trainer(tmp_path)
    trainer.validate(task, make_held_out())
    assert task.found[-1] == 25


@pytest.mark.parametrize("wrap", [lambda metric: metric, MinMaxMetric], ids=["alone", "in a wrapper"])
def test_an_evaluation_that_resets_takes_nothing_from_training(tmp_path, wrap):
    class Manual(Shared):
        def log_and_reset(self, name):
            value = self.metric.compute()
            self.log(name, value["raw"] if isinstance(value, dict) else value)
            self.metric.reset()

        def on_validation_epoch_end(self):
            self.log_and_reset("val")

        def on_train_epoch_end(self):
            self.log_and_reset("train")

    rows = fit(tmp_path, Manual(wrap(MeanMetric()), log_in=()))
    assert [row for _, row in rows] == [{"val": 102.0}, {"val": 102.0}, {"train": 3.5}] * 2


def test_validation_batch_value_is_not_logged_in_training(tmp_path):
    class Mixed(Shared):
        def training_step(self, batch):
            self.metric.update(batch[0])  # does not keep the value of this batch
            if self.global_step:
                self.log("x", self.metric, on_step=True)
            return self.weight * batch[0].mean()

        def validation_step(self, batch):
            self.metric(batch[0])

    with pytest.raises(ConfigError, match="has no number for this batch"):
        fit(tmp_path, Mixed(MeanMetric()), max_epochs=1, val_check_interval=1, log_every_n_steps=1)


@pytest.mark.parametrize("step", [3, 4, 6])
def test_a_resumed_run_keeps_them_apart(tmp_path, step):
    """The checkpoints are from before, at and after the validation in the middle of an epoch of 8 steps."""
    whole = fit(tmp_path, Shared(Total()), max_epochs=1, callbacks=[Saving(step, tmp_path / "saved")])
    resumed = fit(tmp_path / "again", Shared(Total()), max_epochs=1, resume=tmp_path / "saved")
    assert resumed == [(at, row) for at, row in whole if at > step]
    assert len(whole) == 3


# ---------------------------------------------------------------------- several processes


def fit_on_ranks(folder, training, validation):
    memory = MemoryLogger()
    task = Shared(Total())
    trainer = quiet_trainer(
        folder, logger=memory, strategy="ddp", max_epochs=2, val_check_interval=1, enable_checkpointing=False,
        num_sanity_val_steps=0,
    )  # fmt: skip
    trainer.fit(task, make_numbers(training), val_dataloaders=make_held_out(validation))
    return [row for _, row in memory.rows if row], dict(trainer.newest_values)


@pytest.mark.parametrize(("training", "validation"), [(5, 1), (1, 5), (4, 3)])
def test_stages_stay_separate_on_ranks_without_batches(group, tmp_path, training, validation):
    of_training = {"train_metric": sum(range(training))}
    of_validation = {"val_metric": sum(range(100, 100 + validation))}
    epoch = [of_validation] * -(-training // 2) + [of_training]
    for rank, (rows, values) in enumerate(group(2).run(fit_on_ranks, tmp_path, training, validation)):
        assert rows == (epoch * 2 if rank == 0 else [])
        assert values == of_training | of_validation
