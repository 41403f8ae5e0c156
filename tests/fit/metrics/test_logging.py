"""`self.log`: values that it writes, averages and refuses."""

import copy
import csv
import gc
import math
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, MetricCollection, MetricTracker, MinMaxMetric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassPrecision,
    MulticlassRecall,
)

import lumen
from lumen.data.permutation import make_epoch_order
from lumen.errors import ConfigError
from lumen.metrics.log_call import as_number
from lumen.metrics.step_values import Accumulator
from tests.helpers.tasks import Regression, bare_trainer, loader, network, quiet_trainer, regression_data

SEED = 3


class Memory(lumen.Logger):
    """Logger that keeps its values: (step, epoch, values)."""

    def __init__(self):
        self.rows = []

    def open(self, directory, *, resumed):
        self.opened = directory

    def log_metrics(self, metrics, step, epoch):
        assert all(type(value) is float for value in metrics.values())
        self.rows.append((step, epoch, dict(metrics)))

    def of(self, name):
        """Return (step, value) of one name."""
        return [(step, values[name]) for step, _, values in self.rows if name in values]


def fit(tmp_path, task, data, **options):
    """Train with everything logged at every step; return the logger's values and the trainer."""
    memory = Memory()
    options = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": False,
    } | options
    validation = options.pop("val_dataloaders", None)
    trainer = quiet_trainer(tmp_path, logger=memory, **options)
    trainer.fit(task, data, val_dataloaders=validation)
    return memory, trainer


class Logs(Regression):
    """Task that calls a function with itself and the batch in each training step, and one in each validation step."""

    def __init__(self, in_training=lambda task, batch: None, in_validation=lambda task, batch: None, **options):
        super().__init__(**options)
        self.in_training, self.in_validation = in_training, in_validation

    def training_step(self, batch):
        self.in_training(self, batch)
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch):
        self.in_validation(self, batch)


# ---------------------------------------------------------------------- names and defaults


@pytest.mark.parametrize(
    ("options", "in_training", "in_validation"),
    [
        ({}, ["x"], ["v"]),
        ({"on_step": True}, ["x"], ["v_step", "v_epoch"]),
        ({"on_epoch": True}, ["x_step", "x_epoch"], ["v"]),
        ({"on_step": True, "on_epoch": True}, ["x_step", "x_epoch"], ["v_step", "v_epoch"]),
        ({"on_step": False, "on_epoch": True}, ["x"], ["v"]),
        ({"on_step": True, "on_epoch": False}, ["x"], ["v"]),
        ({"logger": False}, [], []),
    ],
)
def test_steps_log_each_step_and_evaluations_their_mean(tmp_path, options, in_training, in_validation):
    task = Logs(lambda task, batch: task.log("x", 1.0, **options), lambda task, batch: task.log("v", 2.0, **options))
    memory, _ = fit(tmp_path, task, loader(24, 8), val_dataloaders=loader(24, 8))
    names = {name for _, _, values in memory.rows for name in values}
    assert names == {*in_training, *in_validation}
    for name in in_training:
        averaged = name.endswith("_epoch") or options == {"on_step": False, "on_epoch": True}
        assert memory.of(name) == ([(3, 1.0)] if averaged else [(1, 1.0), (2, 1.0), (3, 1.0)])


def test_hooks_log_where_they_are(tmp_path):
    class Hooked(Regression):
        def on_train_epoch_start(self):
            self.log("at_epoch_start", self.current_epoch)

        def on_train_batch_start(self, batch, batch_idx):
            self.log("at_batch_start", batch_idx)

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.log("at_batch_end", outputs.item())

        def on_train_epoch_end(self):
            self.log("at_epoch_end", self.global_step)

        def on_validation_epoch_end(self):
            self.log("at_validation_end", -self.global_step)

    class Watching(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            task.log("from_a_callback", 2.0 * batch_idx)

    memory, _ = fit(
        tmp_path, Hooked(), loader(16, 8), max_epochs=2, callbacks=[Watching()], val_dataloaders=loader(8, 8)
    )
    losses = memory.of("loss")
    assert memory.of("at_epoch_start") == [(2, 0.0), (4, 1.0)]
    assert memory.of("at_batch_start") == [(1, 0.0), (2, 1.0), (3, 0.0), (4, 1.0)]
    assert memory.of("at_batch_end") == losses
    assert memory.of("at_epoch_end") == [(2, 2.0), (4, 4.0)]
    assert memory.of("at_validation_end") == [(2, -2.0), (4, -4.0)]
    assert memory.of("from_a_callback") == [(1, 0.0), (2, 2.0), (3, 0.0), (4, 2.0)]


def test_end_of_a_skipped_epoch_is_logged(tmp_path):
    class Skipping(Logs):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 1 else None

        def on_train_epoch_end(self):
            self.log("at_epoch_end", 1.0 + self.current_epoch)

    memory, _ = fit(tmp_path, Skipping(), loader(24, 8), max_epochs=2, log_every_n_steps=50)
    assert memory.of("at_epoch_end") == [(1, 1.0), (2, 2.0)]


def test_one_name_is_logged_in_one_way(tmp_path):
    def differently(task, batch):
        task.log("x", 1.0, prog_bar=task.global_step > 0)

    with pytest.raises(
        ConfigError, match=r"self.log\('x'\) was called with prog_bar=True after a call with prog_bar=False\. Log"
    ):
        fit(tmp_path, Logs(differently), loader(24, 8))


@pytest.mark.parametrize(
    ("name", "found"),
    [(5, "int"), (None, "NoneType"), (["x"], "list"), ("", "str"), (b"x", "bytes"), (nn.ReLU(), "ReLU")],
)
@pytest.mark.parametrize("loaders", [1, 2])
def test_invalid_log_name_raises_with_a_fix(tmp_path, name, found, loaders):
    task = Logs(in_validation=lambda task, batch: task.log(name, 1.0, add_dataloader_idx=name != ""))
    with pytest.raises(ConfigError, match=rf"self\.log\(.*found {found}\. Write self\.log\('loss', loss\)"):
        bare_trainer(tmp_path).validate(task, [loader(8, 8) for _ in range(loaders)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prog_bar": "yes"}, r"self\.log\('x', prog_bar='yes'\): expected True or False"),
        ({"logger": "no"}, r"self\.log\('x', logger='no'\): expected True or False"),
        ({"on_step": "no"}, r"self\.log\('x', on_step='no'\): expected True or False"),
        ({"on_epoch": 2}, r"self\.log\('x', on_epoch=2\): expected True or False"),
        ({"add_dataloader_idx": "no"}, r"self\.log\('x', add_dataloader_idx='no'\): expected True or False"),
        ({"reduce_fx": 3}, r"self\.log\('x', reduce_fx=3\): expected one of mean, sum, min, max"),
        ({"reduce_fx": torch.median}, r"self\.log\('x', reduce_fx=.*expected one of mean, sum, min, max"),
        ({"reduce_fx": ["mean"]}, r"self\.log\('x', reduce_fx=.*expected one of mean, sum, min, max"),
        ({"batch_size": -1}, r"self\.log\('x'\): expected a finite batch_size >= 0, found -1\."),
        ({"batch_size": "8"}, r"self\.log\('x'\): expected a finite batch_size >= 0, found '8'\."),
        ({"weight": 10**400}, r"self\.log\('x'\): expected a finite weight >= 0, found 1000"),
        ({"weight": 1, "batch_size": 8}, r"self\.log\('x', weight=1, batch_size=8\): both arguments set.*Pass one"),
        ({"sync_dist_group": 3}, r"self\.log has no argument sync_dist_group\. Leave it out"),
        (
            {"on_step": False, "on_epoch": False},
            r"self\.log\('x', on_step=False, on_epoch=False\) records nothing\. Set",
        ),
        ({"enable_graph": True}, r"self\.log has no argument enable_graph\. Leave it out"),
        ({"on_epochs": True}, r"self\.log has no argument on_epochs\. Did you mean on_epoch or on_step\?"),
        ({"zzz": True}, r"self\.log has no argument zzz\. See help"),
    ],
)
@pytest.mark.parametrize("method", ["log", "log_dict"])
def test_invalid_log_option_raises_with_a_fix(tmp_path, options, message, method):
    def log(task, batch):
        task.log("before", 1.0)
        task.log("x", 1.0, **options) if method == "log" else task.log_dict({"x": 1.0}, **options)

    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_steps=1).fit(Logs(log), loader(8, 8))


@pytest.mark.parametrize("values", [None, [("x", 1.0)], "x", 1.0, MeanSquaredError(), dict])
def test_log_dict_takes_a_dictionary_alone(tmp_path, values):
    task = Logs(lambda task, batch: task.log_dict(values))
    with pytest.raises(
        ConfigError,
        match=rf"self\.log_dict: expected a dictionary.*found an object of type "
        rf"{type(values).__name__}\. Write self\.log_dict\(",
    ):
        bare_trainer(tmp_path, max_steps=1).fit(task, loader(8, 8))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("text", "type str here.*For text call logger.log_text"),
        ({"a": 1.0}, "type dict here.*For several values call self.log_dict"),
        (MetricCollection([MeanSquaredError()]), "type MetricCollection here.*call self.log_dict"),
        (10**400, "the number is too large for a float"),
        (torch.ones(2), r"a tensor of shape \(2,\)\. Log the mean"),
        ([1.0], "an object of type list"),
        (None, "an object of type NoneType"),
        (1j, "an object of type complex"),
        (torch.tensor(1j), "expected a real number, found torch.complex64"),
    ],
)
def test_unloggable_values_name_the_alternative(tmp_path, value, message):
    with pytest.raises(ConfigError, match=rf"self\.log\('x'.*{message}"):
        bare_trainer(tmp_path, max_steps=1).fit(Logs(lambda task, batch: task.log("x", value)), loader(8, 8))


@pytest.mark.parametrize("weight", ["weight", "batch_size"])
def test_weight_0_leaves_no_trace_in_means(tmp_path, weight):
    """The loss of a batch of padding only is NaN; its weight 0 keeps the mean over all tokens correct."""

    def log(task, batch):
        samples = [3, 0, 1][task.global_step]
        task.log("x", float(samples) if samples else math.nan, on_step=False, on_epoch=True, **{weight: samples})

    memory, _ = fit(tmp_path, Logs(log), loader(24, 8))
    assert memory.of("x") == [(3, (3 * 3.0 + 1 * 1.0) / 4)]


def test_first_log_options_may_be_positional(tmp_path):
    def log(task, batch):
        task.log("x", 1.0, True, False)
        task.log("y", 2.0, False, True, False, True)
        task.log_dict({"z": 3.0}, False, True, True, True)

    memory, trainer = fit(tmp_path, Logs(log), loader(8, 8))
    assert memory.rows == [(1, 0, {"z_step": 3.0}), (1, 0, {"y": 2.0, "z_epoch": 3.0})]
    assert trainer.callback_metrics["x"] == 1.0


@pytest.mark.parametrize("names", [("x", "x_epoch"), ("x_epoch", "x"), ("x", "x_step")])
def test_two_values_do_not_share_a_name(tmp_path, names):
    """Sharing a name would lose one of the values and record the other in its place."""

    def log(task, batch):
        for name in names:
            task.log(name, 1.0, on_step=name != "x_epoch", on_epoch=name != "x_step")

    with pytest.raises(ConfigError, match=rf"self.log\('{names[1]}'\).*'x_(step|epoch)' already"):
        fit(tmp_path, Logs(log), loader(8, 8))


def test_grad_norm_logged_by_user_is_kept(tmp_path):
    memory, _ = fit(
        tmp_path, Logs(lambda task, batch: task.log("grad_norm", -1.0)), loader(16, 8), gradient_clip_val=1.0
    )
    assert memory.of("grad_norm") == [(1, -1.0), (2, -1.0)]


@pytest.mark.parametrize("name", ["=cmd", "+1", "-loss", "@sum", "a\nb", "a\x1b[2J", "a\u2028b"])
@pytest.mark.parametrize("by_logger", [False, True])
def test_names_with_formulas_or_controls_are_refused(tmp_path, name, by_logger):
    def log(task, batch):
        if by_logger:
            task.trainer.logger.log_metrics({name: 1.0}, 1)
        else:
            task.log(name, 1.0)

    with pytest.raises(ConfigError, match="must not contain control characters or begin with"):
        quiet_trainer(tmp_path, max_steps=1, logger=[lumen.CSVLogger()], enable_checkpointing=False).fit(
            Logs(log), loader(8, 8)
        )


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_the_names_of_a_rows_place_are_taken(tmp_path, name):
    with pytest.raises(ConfigError, match=f"every logged row already has a column {name}"):
        fit(tmp_path, Logs(lambda task, batch: task.log(name, 1.0)), loader(8, 8))


@pytest.mark.parametrize("value", ["0.5", None, MeanSquaredError()])
def test_a_name_stays_a_number_or_a_metric(tmp_path, value):
    def log(task, batch):
        task.log("x", value if task.global_step else 1.0, on_step=True, on_epoch=False)

    with pytest.raises(ConfigError, match=rf"self.log\('x'\): cannot log an object of type {type(value).__name__}"):
        fit(tmp_path, Logs(log), loader(16, 8))


@pytest.mark.parametrize(
    "value",
    [
        3,
        3.0,
        True,
        torch.tensor(3),
        torch.tensor([3.0]),
        torch.tensor([[3.0]], dtype=torch.bfloat16),
        np.float64(3.0),
        np.float32(3.0),
        np.int64(3),
    ],
)
def test_every_kind_of_number_can_be_logged(tmp_path, value):
    memory, _ = fit(tmp_path, Logs(lambda task, batch: task.log("x", value, on_epoch=True)), loader(16, 8))
    assert memory.of("x_step") == [(1, float(value)), (2, float(value))]
    assert memory.of("x_epoch") == [(2, float(value))]


# ---------------------------------------------------------------------- means


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("how", ["samples", "weight", "batch_size"])
def test_an_epoch_mean_is_exact_over_ragged_batches(tmp_path, how, accumulate):
    """Fifty samples are in batches of eight: each batch weighs its number of samples, or the given weight."""

    def log(task, batch):
        inputs = batch[0]
        if how == "samples":
            task.log("x", inputs.mean(), on_epoch=True)
        else:
            weights = inputs[:, 0].abs()
            task.log("x", (weights * inputs[:, 1]).sum() / weights.sum(), on_epoch=True, **{how: weights.sum().item()})

    task = Logs(log, log, dtype=torch.float64)
    data = loader(50, 8, dtype=torch.float64)
    memory, _ = fit(
        tmp_path,
        task,
        data,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        val_dataloaders=loader(21, 4, dtype=torch.float64),
    )

    def expected(inputs):
        weights = torch.ones(len(inputs), 1).double() if how == "samples" else inputs[:, :1].abs()
        values = inputs if how == "samples" else inputs[:, 1:2]
        return pytest.approx(((weights * values.mean(1, keepdim=True)).sum() / weights.sum()).item(), rel=1e-12)

    inputs, _ = regression_data(50, torch.float64)
    steps = [
        step for epoch in range(2) for step in make_epoch_order(50, SEED, epoch, shuffle=True).split(8 * accumulate)
    ]
    assert [value for _, value in memory.of("x_step")] == [expected(inputs[step]) for step in steps]
    assert [value for _, value in memory.of("x_epoch")] == [expected(inputs)] * 2
    assert [value for _, value in memory.of("x")] == [expected(regression_data(21, torch.float64)[0])] * 2


@pytest.mark.parametrize(
    ("reduce_fx", "expected"), [("mean", (8 * 0 + 8 * 1 + 4 * 2) / 20), ("sum", 3.0), ("min", 0.0), ("max", 2.0)]
)
@pytest.mark.parametrize("as_tensor", [True, False])
def test_epoch_values_are_reduced_in_four_ways(tmp_path, reduce_fx, expected, as_tensor):
    def log(task, batch):
        value = float(task.global_step)
        task.log("x", torch.tensor(value) if as_tensor else value, on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    memory, _ = fit(tmp_path, Logs(log), loader(20, 8))
    assert memory.of("x") == [(3, pytest.approx(expected, rel=1e-12))]


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_device_values_are_reduced_like_numbers(reduce_fx):
    """Values on an accelerator are kept as tensors and reduced in groups; a restored sum is bitwise identical."""
    values = torch.randn(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weights = [float(1 + number % 7) for number in range(200)]
    kept, restored, by_number = (Accumulator(reduce_fx) for _ in range(3))
    for number, (value, weight) in enumerate(zip(values, weights, strict=True)):
        for accumulator in (kept, restored):
            accumulator.add(value, weight)
        by_number.add(value.item(), weight)
        if number == 100:
            restored = Accumulator.from_state(restored.state_dict(), torch.device("cpu"))
    assert float(kept.compute()) == float(restored.compute())
    assert float(kept.compute()) == pytest.approx(by_number.compute(), rel=1e-12)


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
def test_nan_stays_nan_however_values_are_reduced(reduce_fx, place, as_tensor):
    """NaN may come from numbers or tensors, from one process or from a reduction over several."""
    ranks = [Accumulator(reduce_fx) for _ in range(3)]
    for rank, accumulator in enumerate(ranks):
        for value in [5.0, math.nan if rank == place else 1.0, 3.0]:
            accumulator.add(torch.tensor(value, dtype=torch.float64) if as_tensor else value, 1.0)
    assert [math.isnan(accumulator.compute()) for accumulator in ranks] == [rank == place for rank in range(3)]
    assert math.isnan(Accumulator.from_ranks(reduce_fx, [accumulator.get_sums() for accumulator in ranks]).compute())


def test_tensor_weights_do_not_round_the_mean(tmp_path):
    """A token count from `mask.sum()` must not turn the sum of the values into float32."""

    def log(task, batch):
        task.log("x", 0.1, weight=torch.tensor(3), on_step=False, on_epoch=True)
        task.log("many", float(2**24 + 1), batch_size=torch.tensor(1.0), on_step=False, on_epoch=True)

    memory, _ = fit(tmp_path, Logs(log), loader(16, 8))
    assert memory.of("x") == [(2, (0.1 * 3 + 0.1 * 3) / 6)]
    assert memory.of("many") == [(2, float(2**24 + 1))]


def test_mean_of_equal_values_is_the_value(tmp_path):
    """(0.1 + 0.1 + 0.1) / 3 is more than 0.1."""
    log = Logs(lambda task, batch: task.log("x", 0.1, weight=1))
    memory, _ = fit(tmp_path, log, loader(24, 8), accumulate_grad_batches=3)
    assert memory.of("x") == [(1, 0.1)]


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf, torch.ones(2), "all"])
def test_a_weight_that_is_none_is_an_error(tmp_path, weight):
    with pytest.raises(ConfigError, match=r"self.log\('x'\): expected a finite weight >= 0, found"):
        fit(tmp_path, Logs(lambda task, batch: task.log("x", 1.0, weight=weight)), loader(8, 8))


def test_nan_and_infinity_are_logged_unchanged(tmp_path):
    memory, _ = fit(
        tmp_path, Logs(lambda task, batch: task.log("x", math.nan if task.global_step else math.inf)), loader(16, 8)
    )
    (_, first), (_, second) = memory.of("x")
    assert first == math.inf
    assert math.isnan(second)


# ---------------------------------------------------------------------- torchmetrics


class Classification(lumen.TaskModule):
    """Task with three classes; a parameter says how the metrics are updated."""

    def __init__(self, feed, metrics, itself=False, **options):
        super().__init__()
        self.net = nn.Linear(6, 3)
        nn.init.constant_(self.net.bias, 0.1)
        with torch.no_grad():
            self.net.weight.copy_(torch.arange(18.0).reshape(3, 6).sin())
        self.itself = itself
        names = ({"prefix": "train_"}, {"prefix": "val_"}) if itself else ({}, {})
        self.train_metrics, self.val_metrics = (metrics.clone(**name) for name in names)
        self.feed, self.options = feed, options

    def follow(self, metrics, prefix, batch):
        scores, classes = self.net(batch[0]), compute_class(batch[1])
        if self.feed == "update":
            metrics.update(scores, classes)
        else:
            metrics(scores, classes)
        if self.itself:
            self.log_dict(metrics, **self.options)
        elif isinstance(metrics, MetricCollection):
            self.log_dict({f"{prefix}{name}": metric for name, metric in metrics.items()}, **self.options)
        else:
            self.log(f"{prefix}metric", metrics, **self.options)
        return nn.functional.cross_entropy(scores, classes)

    def training_step(self, batch):
        return self.follow(self.train_metrics, "train_", batch)

    def validation_step(self, batch):
        self.follow(self.val_metrics, "val_", batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)  # the model still exists, so its metrics can be recomputed


def compute_class(targets):
    return (targets.squeeze(1) > -0.5).long() + (targets.squeeze(1) > 0.5).long()


def compute_metric(metric, task, samples):
    inputs, targets = regression_data(samples)
    with torch.no_grad():
        return metric.clone()(task.net(inputs), compute_class(targets))


@pytest.mark.parametrize("feed", ["update", "forward"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_metric_is_computed_once_per_epoch(tmp_path, feed, accumulate):
    metric = MulticlassAccuracy(3)  # a mean over classes, which no mean over batches equals
    task = Classification(feed, metric)
    memory, trainer = fit(
        tmp_path, task, loader(50, 8), max_epochs=3, accumulate_grad_batches=accumulate, val_check_interval=0.5,
        num_sanity_val_steps=2, val_dataloaders=loader(21, 4),
    )  # fmt: skip
    assert [value for _, value in memory.of("train_metric")] == [compute_metric(metric, task, 50).item()] * 3
    assert [value for _, value in memory.of("val_metric")] == [compute_metric(metric, task, 21).item()] * 6
    assert task.train_metrics.update_count == task.val_metrics.update_count == 0
    assert trainer.test(Evaluated(task), loader(33, 4)) == [{"test_metric": compute_metric(metric, task, 33).item()}]


class Evaluated(lumen.TaskModule):
    def __init__(self, task):
        super().__init__()
        self.task = task

    def test_step(self, batch):
        self.task.val_metrics.update(self.task.net(batch[0]), compute_class(batch[1]))
        self.log("test_metric", self.task.val_metrics)


@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("feed", ["update", "forward"])
def test_a_collection_is_logged_by_log_dict(tmp_path, feed, itself):
    """Accuracy, precision and recall share a state in the collection; the fourth metric has its own."""
    collection = MetricCollection(
        {
            "accuracy": MulticlassAccuracy(3),
            "precision": MulticlassPrecision(3),
            "recall": MulticlassRecall(3, average="micro"),
            "top2": MulticlassAccuracy(3, top_k=2),
        }
    )
    task = Classification(feed, collection, itself)
    memory, _ = fit(tmp_path, task, loader(50, 8), max_epochs=3, val_dataloaders=loader(21, 4))
    for name, value in compute_metric(collection, task, 50).items():
        assert [found for _, found in memory.of(f"train_{name}")] == [value.item()] * 3
    for name, value in compute_metric(collection, task, 21).items():
        assert [found for _, found in memory.of(f"val_{name}")] == [value.item()] * 3


def test_metric_may_log_each_step(tmp_path):
    metric = MeanSquaredError()

    def log(task, batch):
        metric(task(batch[0]), batch[1])
        task.log("error", metric, on_step=True, on_epoch=True)

    task = Logs(log, lr=0.0)
    memory, _ = fit(tmp_path, task, loader(20, 8, shuffle=False))
    inputs, targets = regression_data(20)
    with torch.no_grad():
        errors = (task(inputs) - targets).pow(2)
    assert [value for _, value in memory.of("error_step")] == [
        pytest.approx(errors[part].mean().item(), rel=1e-6) for part in (slice(0, 8), slice(8, 16), slice(16, 20))
    ]
    assert memory.of("error_epoch") == [(3, pytest.approx(errors.mean().item(), rel=1e-6))]


def test_metric_without_a_step_value_raises(tmp_path):
    metric = MeanSquaredError()

    def log(task, batch):
        metric.update(task(batch[0]), batch[1])
        task.log("error", metric, on_step=True)

    with pytest.raises(ConfigError, match=r"self.log\('error', .*Call metric\(preds, target\)"):
        fit(tmp_path, Logs(log), loader(8, 8))


def test_metric_with_several_values_raises(tmp_path):
    metric = MulticlassConfusionMatrix(3)

    def log(task, batch):
        metric.update(torch.zeros(8, dtype=torch.long), torch.zeros(8, dtype=torch.long))
        task.log("confusion", metric)

    with pytest.raises(ConfigError, match=r"self.log\('confusion', metric\): MulticlassConfusionMatrix"):
        fit(tmp_path, Logs(log), loader(8, 8))


def test_metric_may_be_logged_only_at_epoch_end(tmp_path):
    class AtTheEnd(Regression):
        def __init__(self):
            super().__init__()
            self.largest, self.mean = MaxMetric(), MeanMetric()

        def training_step(self, batch, batch_idx):
            self.largest.update(float(batch_idx + 10 * self.current_epoch))
            self.mean.update(float(batch_idx))
            return super().training_step(batch)

        def on_train_epoch_end(self):
            self.log("largest", self.largest)
            self.log_dict({"mean": self.mean})

    memory, _ = fit(tmp_path, AtTheEnd(), loader(24, 8), max_epochs=2)
    assert memory.of("largest") == [(3, 2.0), (6, 12.0)]
    assert memory.of("mean") == [(3, 1.0), (6, 1.0)]


def test_one_metric_for_two_loaders_is_an_error(tmp_path):
    """Both loaders would update it, and neither value would be right."""

    class Shared(Regression):
        def __init__(self):
            super().__init__()
            self.error = MeanSquaredError()

        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.error.update(self(batch[0]), batch[1])
            self.log("error", self.error)

    with pytest.raises(ConfigError, match=r"self.log\('error/dataloader_idx_1'\).*one metric.*for each loader"):
        bare_trainer(tmp_path).validate(Shared(), [loader(8, 8), loader(8, 8)])


# ---------------------------------------------------------------------- readers of logged values


def test_callback_metrics_hold_the_newest_values(tmp_path):
    found = []

    class Look(lumen.Callback):
        def note(self, trainer):
            values = trainer.callback_metrics
            assert all(value.dtype == torch.float32 and value.dim() == 0 for value in values.values())
            found.append({name: value.item() for name, value in values.items()})

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.note(trainer)

        def on_step_end(self, trainer, task):
            self.note(trainer)

        def on_validation_end(self, trainer, task):
            self.note(trainer)

    def log(task, batch):
        task.log("x", float(task.global_step), on_epoch=True)
        task.log("hidden", 7.0, logger=False)

    task = Logs(log, lambda task, batch: task.log("v", float(task.global_step)))
    memory, trainer = fit(tmp_path, task, loader(16, 8), callbacks=[Look()], val_dataloaders=loader(8, 8))
    step = [{"x": float(number), "x_step": float(number), "hidden": 7.0} for number in range(2)]
    epoch = {"x": 0.5, "x_epoch": 0.5, "v": 2.0}
    assert found == [step[0], step[0], step[1], {**step[1], "v": 2.0}, {**step[1], **epoch}]
    assert {name: value.item() for name, value in trainer.callback_metrics.items()} == {**step[1], **epoch}
    assert memory.of("hidden") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_callback_metrics_have_the_precision_of_the_task(tmp_path, dtype):
    count = 2.0**24 + 1  # float32 has no such number
    task = Logs(lambda task, batch: task.log("count", count)).to(dtype)
    memory, trainer = fit(tmp_path, task, loader(16, 8, dtype=dtype))
    for values in (trainer.callback_metrics, trainer.logged_metrics):
        torch.testing.assert_close(values["count"], torch.tensor(count, dtype=dtype))
    assert trainer.newest_values["count"] == count
    assert {value for _, value in memory.of("count")} == {count}


def test_the_norm_of_clipped_gradients_is_logged(tmp_path):
    memory, _ = fit(tmp_path, Regression(), loader(8, 8, shuffle=False), gradient_clip_val=0.01)
    net, (inputs, targets) = network(), regression_data(8)
    nn.functional.mse_loss(net(inputs), targets).backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in net.parameters()]).item()
    assert memory.of("grad_norm") == [(1, norm)]


def test_values_are_written_every_n_steps_and_last(tmp_path):
    memory, _ = fit(tmp_path, Regression(), loader(40, 8), max_epochs=2, log_every_n_steps=3)
    assert [step for step, _ in memory.of("loss")] == [3, 6, 9, 10]


GRAPHS = weakref.WeakSet()


class Traced(torch.autograd.Function):
    """Identity function; `GRAPHS` counts its living nodes in autograd graphs."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark = type("Mark", (), {})()
        GRAPHS.add(ctx.mark)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TracedLoss(Regression):
    def training_step(self, batch):
        loss = Traced.apply(super().training_step(batch))
        self.log("mean", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        gc.collect()
        self.graphs = [*getattr(self, "graphs", []), len(GRAPHS)]


def test_logged_values_keep_no_graph(tmp_path):
    _, trainer = fit(tmp_path, task := TracedLoss(), loader(40, 8))
    assert len(task.graphs) == 5
    assert max(task.graphs) <= 1  # the loss of the step before
    assert not any(value.requires_grad for value in trainer.callback_metrics.values())


def test_device_values_are_detached_without_synchronization():
    """A meta tensor has no number, so reading it, which synchronizes a device, would fail."""
    accumulator = Accumulator()
    for _ in range(65):
        value = as_number("x", torch.ones(1, device="meta", requires_grad=True) * 2)
        assert not value.requires_grad
        accumulator.add(value, 1.0)
    assert accumulator.compute().device.type == "meta"


def test_all_loggers_get_the_same_values(tmp_path):
    first, second = Memory(), Memory()
    trainer = quiet_trainer(
        tmp_path, max_epochs=1, log_every_n_steps=1, logger=[first, second], enable_checkpointing=False
    )
    trainer.fit(Regression(), loader(16, 8))
    assert first.rows == second.rows
    assert len(first.rows) == 2
    assert trainer.logger is first
    assert first.opened == trainer.run_directory


# ---------------------------------------------------------------------- without a run


def test_steps_can_be_called_without_a_trainer():
    task = Regression()
    (batch,) = loader(8, 8)
    assert task.training_step(batch).requires_grad
    task.validation_step(batch)
    task.log_dict({"x": 1.0, "y": MeanSquaredError()})
    assert (task.global_step, task.current_epoch) == (0, 0)
    with pytest.raises(ConfigError, match="Regression is not attached to a trainer"):
        _ = task.trainer


def test_steps_can_be_called_after_a_run(tmp_path):
    task = Regression()
    _, trainer = fit(tmp_path, task, loader())
    before = trainer.callback_metrics
    (batch,) = loader(8, 8)
    task.training_step(batch)
    task.validation_step(batch)
    assert trainer.callback_metrics == before


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_copied_task_has_no_run(tmp_path, copied):
    task = Regression()
    bare_trainer(tmp_path, max_steps=2).fit(task, loader())
    twin = copied(task)
    assert task.global_step == 2
    assert twin.global_step == 0
    (batch,) = loader(8, 8)
    twin.training_step(batch)
    assert torch.equal(twin(batch[0]), task(batch[0]))


# ---------------------------------------------------------------------- metrics.csv


def read(path):
    with path.open(newline="") as file:
        return list(csv.reader(file))


def test_csv_holds_every_digit_per_event(tmp_path):
    task = Regression(optimizer="SGD")
    trainer = quiet_trainer(tmp_path, max_epochs=2, log_every_n_steps=1, enable_checkpointing=False)
    trainer.fit(task, loader(16, 8, shuffle=False), val_dataloaders=loader(6, 6, shuffle=False))

    net, (inputs, targets), held_out = network(), regression_data(16), regression_data(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    expected = [["step", "epoch", "loss", "val_loss"]]
    for epoch in range(2):
        for batch in range(2):
            part = slice(8 * batch, 8 * batch + 8)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs[part]), targets[part])
            loss.backward()
            optimizer.step()
            expected.append([str(2 * epoch + batch + 1), str(epoch), repr(loss.item()), ""])
        with torch.no_grad():
            loss = nn.functional.mse_loss(net(held_out[0]), held_out[1])
        expected.append([str(2 * epoch + 2), str(epoch), "", repr(loss.item())])
    assert read(trainer.run_directory / "metrics.csv") == expected


def test_late_name_adds_a_column_without_losing_rows(tmp_path):
    def log(task, batch):
        task.log("x", 0.1 + task.global_step)
        if task.global_step == 2:
            task.log("late, with a comma", -1e-300)

    trainer = quiet_trainer(tmp_path, max_epochs=1, log_every_n_steps=1, enable_checkpointing=False)
    trainer.fit(Logs(log), loader(32, 8))
    assert read(trainer.run_directory / "metrics.csv") == [
        ["step", "epoch", "x", "late, with a comma"],
        ["1", "0", "0.1", ""],
        ["2", "0", "1.1", ""],
        ["3", "0", "2.1", "-1e-300"],
        ["4", "0", "3.1", ""],
    ]


def test_a_run_that_logs_nothing_writes_no_csv(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    trainer.fit(Logs(), loader(16, 8))
    assert not (trainer.run_directory / "metrics.csv").exists()


# ---------------------------------------------------------------------- resume with wrappers of torchmetrics


def test_trackers_and_bounds_of_metrics_are_resumed(tmp_path):
    class Tracked(Regression):
        def __init__(self):
            super().__init__()
            self.tracker = MetricTracker(MeanMetric(), maximize=True)
            self.bounds = MinMaxMetric(MeanMetric())

        def on_train_epoch_start(self):
            self.tracker.increment()

        def training_step(self, batch):
            loss = super().training_step(batch)
            self.tracker.update(loss.detach())
            self.bounds.update(loss.detach())
            return loss

        def on_train_epoch_end(self):
            self.log("best", self.tracker.best_metric())
            self.log("members", float(self.tracker.n_steps))
            self.log_dict({f"bounds_{name}": value for name, value in self.bounds.compute().items()})
            self.bounds.reset()

    def rows(folder, *parts):
        for steps in parts:
            trainer = quiet_trainer(tmp_path / folder, max_steps=steps, resume="auto", log_every_n_steps=1)
            trainer.fit(Tracked(), loader())
        return (trainer.run_directory / "metrics.csv").read_text()

    assert rows("parts", 10, 17, 28) == rows("whole", 28)


class TwoMetrics(Regression):
    def __init__(self):
        super().__init__()
        self.errors = nn.ModuleList([MeanSquaredError(), MeanSquaredError()])

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.errors[dataloader_idx].update(self(batch[0]), batch[1])
        self.log("error", self.errors[dataloader_idx], add_dataloader_idx=False)


def test_one_name_of_two_metric_objects_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the name has the values of one MeanSquaredError, and now of a different"):
        bare_trainer(tmp_path).validate(TwoMetrics(), [loader(8), loader(8)])
