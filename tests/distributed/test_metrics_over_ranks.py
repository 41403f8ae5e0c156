"""Values logged on several processes: one value over the batches of all ranks, equal on every rank."""

import copy
import logging
import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import CatMetric, MaxMetric, MeanMetric, Metric, MetricCollection, MinMaxMetric, MinMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.retrieval import RetrievalMRR

import lumen
from lumen.errors import CheckpointMismatch, ConfigError, TrainingError
from tests.helpers.logged_values import CLASSES, MemoryLogger, make_numbers, make_predictions
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


class Logs(lumen.TaskModule):
    """Task that calls functions with the task and the batch in training and validation steps; each logs metrics."""

    def __init__(self, in_training=None, in_validation=None, at_end=None, **metrics):
        super().__init__()
        self.net = nn.Linear(1, 1, dtype=torch.float64)
        self.metrics = nn.ModuleDict(metrics)
        self.in_training, self.in_validation, self.at_end = in_training, in_validation, at_end
        self.found = {}

    def training_step(self, batch):
        if self.in_training:
            self.in_training(self, batch[0])
        return self.net(batch[0][:, None]).square().mean()

    def validation_step(self, batch):
        if self.in_validation:
            self.in_validation(self, batch[0])

    def on_validation_epoch_end(self):
        if self.at_end:
            self.at_end(self)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def evaluate(folder, task, count, batch_size=1, strategy="ddp"):
    return bare_trainer(folder, strategy=strategy).validate(task, make_numbers(count, batch_size))[0]


def rank():
    return torch.distributed.get_rank()


# ---------------------------------------------------------------------- self.log


def log_from_one_rank(folder):
    def step(task, batch):
        if rank() == 1:
            task.log("rank_1", batch.mean())
            task.log("peak", batch.max(), reduce_fx="max")
            task.log("count", float(len(batch)), reduce_fx="sum")
        task.log(f"of_{rank()}", batch.mean())
        task.log("all", batch.mean())

    return evaluate(folder, Logs(in_validation=step), 7, batch_size=2)


def test_names_of_some_ranks_are_averaged_over_these(group, tmp_path):
    for values in group(2).run(log_from_one_rank, tmp_path):  # batches (0, 1), (4, 5) and (2, 3), (6)
        assert values == {"of_0": 2.5, "of_1": 11 / 3, "all": 3.0, "rank_1": 11 / 3, "peak": 6.0, "count": 3.0}
        assert list(values) == ["of_0", "all", "rank_1", "peak", "count", "of_1"]


def log_in_another_order(folder):
    def step(task, batch):
        for name in ("a", "b", "c")[:: 1 - 2 * rank()]:
            task.log(name, batch.mean() * ord(name))

    return evaluate(folder, Logs(in_validation=step), 4)


def test_ranks_may_log_in_any_order(group, tmp_path):
    assert group(2).run(log_in_another_order, tmp_path) == [{"a": 1.5 * 97, "b": 1.5 * 98, "c": 1.5 * 99}] * 2


def log_with_other_options(folder, **by_rank):
    def step(task, batch):
        task.log("x", batch.mean(), **{name: values[rank()] for name, values in by_rank.items()})

    with pytest.raises(
        ConfigError, match=r"self.log\('x'\) was called with .* on one rank and with .* on a different rank"
    ):
        evaluate(folder, Logs(in_validation=step), 4)


def log_with_other_options_in_a_step(folder):
    task = Logs(in_training=lambda task, batch: task.log("x", batch.mean(), prog_bar=rank() == 0))
    with pytest.raises(
        ConfigError, match=r"prog_bar=True.* on one rank and with .*prog_bar=False.* on a different rank"
    ):
        bare_trainer(folder, strategy="ddp", max_steps=1, log_every_n_steps=1).fit(task, make_numbers(4))


def log_a_metric_here_and_a_number_there(folder):
    task = Logs(in_validation=lambda task, batch: task.log("x", task.metrics["mean"] if rank() else 1.0))
    task.metrics["mean"] = MeanMetric()
    with pytest.raises(ConfigError, match="MeanMetric"):
        evaluate(folder, task, 4)


def log_a_metric_that_is_no_part_of_the_task(folder):
    stray = MeanMetric()

    def step(task, batch):
        stray.update(batch)
        task.log("x", stray)

    with pytest.raises(ConfigError, match="MeanMetric is not a part of the task"):
        evaluate(folder, Logs(in_validation=step), 4)


def test_different_log_options_raise_equally_on_all_ranks(group, tmp_path):
    group(2).run(log_with_other_options, tmp_path, reduce_fx=["mean", "sum"])
    group(2).run(log_with_other_options_in_a_step, tmp_path)
    group(2).run(log_a_metric_here_and_a_number_there, tmp_path)
    group(2).run(log_a_metric_that_is_no_part_of_the_task, tmp_path)


def log_steps(folder, strategy, accumulate):
    memory = MemoryLogger()

    def step(task, batch):
        task.log("x", batch.mean(), on_step=True, on_epoch=True)
        if int(batch[0]) % 4 == 2:  # logged for some micro-batches only
            task.log("rare", batch.mean() / 3)

    trainer = quiet_trainer(
        folder, logger=memory, enable_checkpointing=False, strategy=strategy, max_epochs=1, log_every_n_steps=2,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(Logs(in_training=step), make_numbers(23, batch_size=2))
    return memory.rows, {name: value for name, value in trainer.newest_values.items() if name == "x_epoch"}


def test_step_values_average_micro_batches_of_all_ranks(group, tmp_path):
    alone, epoch_alone = log_steps(tmp_path, "single", 4)
    (first, epoch), (_, other) = group(2).run(log_steps, tmp_path / "ranks", "ddp", 2)
    strip = [(step, {name: value for name, value in row.items() if "/" not in name}) for step, row in alone]
    assert strip == [(step, {name: value for name, value in row.items() if "/" not in name}) for step, row in first]
    assert strip[0] == (2, {"x_step": 11.5, "rare": pytest.approx((10.5 + 14.5) / 6, rel=1e-15)})
    assert epoch == other == epoch_alone == {"x_epoch": 11.0}


def log_rows_of_an_evaluation(folder):
    memory = MemoryLogger()
    trainer = quiet_trainer(
        folder, logger=memory, enable_checkpointing=False, strategy="ddp", max_steps=1, num_sanity_val_steps=0,
        limit_train_batches=2,
    )  # fmt: skip
    task = Logs(in_validation=lambda task, batch: task.log("x", batch.mean(), on_step=True, on_epoch=False))
    trainer.fit(task, make_numbers(4), val_dataloaders=make_numbers(5))
    return memory.rows


def test_evaluation_rows_are_in_batch_order(group, tmp_path):
    rows, _ = group(2).run(log_rows_of_an_evaluation, tmp_path)
    assert [row["x"] for _, row in rows if "x" in row] == [0, 1, 2, 3, 4]


def read_in_the_middle(folder):
    reads = []

    class Reader(lumen.Callback):
        def on_train_epoch_end(self, trainer, task):
            reads.append(trainer.newest_values["x"])
            if rank() == 0:
                task.log("x", 100.0, on_epoch=True, on_step=False, weight=4)

    task = Logs(in_training=lambda task, batch: task.log("x", batch.mean(), on_epoch=True, on_step=False))
    trainer = bare_trainer(folder, strategy="ddp", max_epochs=1, callbacks=[Reader()])
    trainer.fit(task, make_numbers(4))
    return [*reads, trainer.newest_values["x"]]


def test_reading_values_early_keeps_epoch_result(group, tmp_path):
    assert group(2).run(read_in_the_middle, tmp_path) == [[1.5, 406 / 8]] * 2


# ---------------------------------------------------------------------- outside of steps


def collect_warnings(function):
    """Return the result of a function and the warnings that Lumen logs meanwhile."""
    messages = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("lumen").addHandler(handler)
    try:
        return function(), messages
    finally:
        logging.getLogger("lumen").removeHandler(handler)


class Keeps(Logs):
    """Task that keeps its inputs, like code for a single process."""

    def __init__(self, at_end, **metrics):
        super().__init__(in_validation=lambda task, batch: task.kept.append(batch), at_end=at_end, **metrics)
        self.kept = []

    @property
    def all(self):
        return torch.cat(self.kept)

    def on_validation_start(self):
        self.kept.clear()


def log_at_the_end(folder, at_end, count, callback=None):
    task = Keeps(at_end, kept=CatMetric())
    trainer = bare_trainer(
        folder, strategy="ddp", log_level="WARNING", callbacks=[callback] if callback else [], max_steps=2,
        val_check_interval=1,
    )  # fmt: skip
    _, messages = collect_warnings(lambda: trainer.fit(task, make_numbers(4), val_dataloaders=make_numbers(count)))
    return dict(trainer.newest_values), messages


def log_of_own_samples(folder):
    found = {
        "count": log_at_the_end(folder, lambda task: task.log("x", len(task.kept)), 10),
        "ragged mean": log_at_the_end(folder, lambda task: task.log("x", task.all.mean()), 5),
        "float count": log_at_the_end(folder, lambda task: task.log("x", float(len(task.kept))), 10),
        "dict": log_at_the_end(folder, lambda task: task.log_dict({"x": task.all.sum(), "y": 0.5}), 10),
    }

    class Callback(lumen.Callback):
        def on_validation_epoch_end(self, trainer, task):
            task.log("x", len(task.kept))

    found["callback"] = log_at_the_end(folder, None, 10, Callback())
    return found


def test_rank_value_logged_as_global_warns_once(group, tmp_path):
    for found in group(2).run(log_of_own_samples, tmp_path):
        for name, (_, messages) in found.items():
            (message,) = messages  # of a sanity check and two validations
            assert message.startswith("on_validation_epoch_end logs 'x' as one number per process"), name
            assert 'reduce_fx="sum"' in message
            assert "all_gather" in message
        assert found["count"][0] == {"x": 5.0}  # unchanged; the fix that the warning proposes gives 10 below


def log_of_own_samples_in_other_stages(folder):
    class Callback(lumen.Callback):
        def on_train_epoch_end(self, trainer, task):
            task.log("of_training", len(task.kept))

        def on_test_epoch_end(self, trainer, task):
            task.log("of_test", sum(map(len, task.kept)) / 3)

    class Trained(Keeps):
        def training_step(self, batch):
            self.kept.append(batch[0])
            return super().training_step(batch)

        def test_step(self, batch):
            self.kept.append(batch[0])

        def on_test_start(self):
            self.kept.clear()

    task = Trained(None)
    options = {"strategy": "ddp", "log_level": "WARNING", "callbacks": [Callback()]}
    _, messages = collect_warnings(lambda: bare_trainer(folder, max_epochs=2, **options).fit(task, make_numbers(10)))
    return messages + collect_warnings(lambda: bare_trainer(folder, **options).test(task, make_numbers(5)))[1]


def test_rank_value_logged_as_global_warns_in_stages(group, tmp_path):
    """The task logs the value in training and in a test."""
    for messages in group(2).run(log_of_own_samples_in_other_stages, tmp_path):
        training, test = messages
        assert training.startswith("on_train_epoch_end logs 'of_training' as one number per process (5, 5)")
        assert test.startswith("on_test_epoch_end logs 'of_test' as one number per process (1, 0.666667)")


def log_with_a_word(folder):
    def at_end(task):
        own = task.all
        task.log("count", len(own), reduce_fx="sum")
        task.log("largest", own.max(), reduce_fx="max")
        task.log("mean", own.mean(), weight=len(own))
        task.log("meant", len(own), reduce_fx="mean")
        task.log("gathered", task.all_gather(torch.tensor(len(own))).sum())

    return log_at_the_end(folder, at_end, 11)


def test_rank_values_with_explicit_reduction_are_exact(group, tmp_path):
    for values, messages in group(2).run(log_with_a_word, tmp_path):
        assert values == {"count": 11.0, "largest": 10.0, "mean": 5.0, "meant": 5.5, "gathered": 11.0}
        assert messages == []


class Counting(Logs):
    """Task that logs its mean loss over the items of its samples, and also sums it by hand like a DDP loop."""

    def on_validation_epoch_start(self):
        self.sums = torch.zeros(2, dtype=torch.float64)

    def validation_step(self, batch):
        values, items = batch
        loss = (values * items).sum()
        self.sums += torch.stack([loss, items.sum()])
        self.log("val_loss", loss / items.sum(), weight=items.sum())

    def on_validation_epoch_end(self):
        torch.distributed.all_reduce(self.sums)
        self.log("by_hand", self.sums[0] / self.sums[1])


def evaluate_by_items(folder, samples):
    trainer = bare_trainer(folder, strategy="ddp")
    return trainer.validate(Counting(), DataLoader(TensorDataset(*samples), 2))[0]


def test_weighted_means_equal_sums_reduced_by_hand(group, tmp_path):
    values, items = torch.tensor([1.0, 2, 10, 20, 3]).double(), torch.tensor([4.0, 1, 2, 7, 5]).double()
    mean = ((values * items).sum() / items.sum()).item()
    for found in group(2).run(evaluate_by_items, tmp_path, (values, items)):
        assert found == {"val_loss": pytest.approx(mean, rel=1e-15), "by_hand": pytest.approx(mean, rel=1e-15)}


def log_what_is_the_same_everywhere(folder):
    class Training(lumen.Callback):
        def on_train_epoch_start(self, trainer, task):
            task.log("epoch_begun", trainer.current_epoch)
            task.log("lr", trainer.optimizers[0].param_groups[0]["lr"])

        def on_train_epoch_end(self, trainer, task):
            task.log("nothing", 0)
            task.log("again", trainer.callback_metrics["loss_of_epoch"])
            if trainer.is_global_zero:
                task.log("of_one", 7)

    def at_end(task):
        task.log("computed", task.metrics["mean"].compute())
        task.log("number", float(task.metrics["mean"].compute()) / 3)
        task.log("is_one", task.metrics["one"].compute())

    def step(task, batch):
        task.metrics["mean"].update(batch)
        task.metrics["one"].update(torch.ones(1))

    task = Logs(
        in_training=lambda task, batch: task.log("loss_of_epoch", batch.mean(), on_step=False, on_epoch=True),
        in_validation=step, at_end=at_end, mean=MeanMetric(), one=MaxMetric(),
    )  # fmt: skip
    trainer = bare_trainer(folder, strategy="ddp", log_level="WARNING", max_epochs=3, callbacks=[Training()])
    return collect_warnings(lambda: trainer.fit(task, make_numbers(8), val_dataloaders=make_numbers(8)))


def test_values_equal_on_all_ranks_warn_nothing(group, tmp_path):
    for _, messages in group(2).run(log_what_is_the_same_everywhere, tmp_path):
        assert messages == []


def test_on_one_process_nothing_is_doubted(tmp_path):
    task = Keeps(lambda task: task.log("x", len(task.kept)))
    values, messages = collect_warnings(
        lambda: bare_trainer(tmp_path, log_level="WARNING").validate(task, make_numbers(10))
    )
    assert values == [{"x": 10.0}]
    assert [message for message in messages if "logs 'x'" in message] == []


def test_step_name_is_refused_in_epoch_hooks(tmp_path):
    """The mean would mix the values of samples with one number of a hook."""
    task = Keeps(lambda task: task.log("x", task.all.mean()))
    task.in_validation = lambda task, batch: task.kept.append(batch) or task.log("x", batch.mean())
    with pytest.raises(
        ConfigError, match=r"self.log\('x'\) was called in on_validation_epoch_end after a call in a step"
    ):
        bare_trainer(tmp_path).validate(task, make_numbers(10, 3))


# ---------------------------------------------------------------------- decisions


def stop_early(folder, min_steps=0, **options):
    task = Regression()
    stopping = lumen.EarlyStopping("val_loss", patience=1, min_delta=1.0)
    options = {"strategy": "ddp"} | options
    trainer = bare_trainer(folder, max_epochs=10, min_steps=min_steps, callbacks=[stopping], **options)
    trainer.fit(task, loader(20), val_dataloaders=loader(13, batch_size=3, shuffle=False))
    return trainer.current_epoch, trainer.global_step, stopping.best_score, stopping.stopping_reason_message


def test_early_stopping_decides_alike_on_all_ranks(group, tmp_path):
    alone = stop_early(tmp_path, strategy="auto", accumulate_grad_batches=2)
    first, second = group(2).run(stop_early, tmp_path)
    assert first == second
    assert first[:2] == alone[:2]
    assert first[0] == 2
    assert first[2].item() == pytest.approx(alone[2].item())  # the mean over the samples of both ranks


def test_min_steps_delays_early_stopping_on_all_ranks(group, tmp_path):
    first, second = group(2).run(stop_early, tmp_path, 5)
    assert first == second
    assert first[:2] == (2, 5)  # two steps an epoch: the run stops in the middle of the third one


class Plateau(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.05)
        return [optimizer], [{"scheduler": scheduler, "monitor": "loss", "interval": "step"}]


def follow_a_plateau(folder, **options):
    task = Plateau(dtype=torch.float64)
    trainer = bare_trainer(folder, max_epochs=3, **options)
    trainer.fit(task, loader(50, dtype=torch.float64))
    return trainer.lr_scheduler_configs[0].scheduler.state_dict() | {"lr": trainer.optimizers[0].param_groups[0]["lr"]}


def test_plateau_schedule_of_step_values_equals_single_process(group, tmp_path):
    alone = follow_a_plateau(tmp_path, accumulate_grad_batches=2)
    for each in group(2).run(follow_a_plateau, tmp_path, strategy="ddp"):
        assert each["lr"] == alone["lr"] < 0.1
        assert each["best"] == pytest.approx(alone["best"], rel=1e-12)


# ---------------------------------------------------------------------- torchmetrics


class Weighted(Metric):
    """Metric with states of every reduction that torchmetrics has."""

    full_state_update = False

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="mean")
        self.add_state("low", torch.tensor(math.inf, dtype=torch.float64), dist_reduce_fx="min")
        self.add_state("kept", [], dist_reduce_fx="cat")
        self.add_state("loose", [], dist_reduce_fx=None)
        self.add_state("own", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx=lambda stacked: stacked.sum(0))

    def update(self, numbers):
        self.mean = self.mean + (numbers.mean() - self.mean) / self._update_count
        self.low = torch.minimum(self.low, numbers.min())
        self.kept.append(numbers.long())
        self.loose += list(numbers)
        self.own = self.own + numbers.sum()

    def compute(self):
        kept = torch.cat(self.kept) if isinstance(self.kept, list) else self.kept
        assert kept.dtype == torch.int64
        assert sorted(kept.tolist()) == sorted(each.item() for each in self.loose)
        return self.mean + self.low + kept.sum() + self.own


def make_every_metric():
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "auroc": MulticlassAUROC(CLASSES),
        "max": MaxMetric(),
        "min": MinMetric(),
        "pearson": PearsonCorrCoef(),
        "weighted": Weighted(),
        "mrr": RetrievalMRR(),
    }


def update(task, batch):
    scores, classes = make_predictions(batch)
    metrics = task.metrics
    for name in ("accuracy", "auroc"):
        metrics[name].update(scores, classes)
    for name in ("max", "min", "weighted"):
        metrics[name].update(batch)
    metrics["pearson"].update(batch, batch.sin())
    metrics["mrr"].update(scores[:, 0], classes == 1, indexes=batch.long() // 2)


def update_and_log(task, batch):
    update(task, batch)
    task.log_dict(task.metrics)


def update_everywhere_and_log_on_rank_0(task, batch):
    update(task, batch)
    if not torch.distributed.is_initialized() or rank() == 0:
        task.log_dict(task.metrics)


def compute_at_the_end(task):
    for name, metric in task.metrics.items():
        task.log(name, metric.compute())
    for metric in task.metrics.values():
        metric.reset()


def evaluate_metrics(folder, count, how, strategy):
    steps = {"logged": update_and_log, "rank 0": update_everywhere_and_log_on_rank_0, "computed": update}
    task = Logs(
        in_validation=steps[how], at_end=compute_at_the_end if how == "computed" else None, **make_every_metric()
    )
    trainer = bare_trainer(folder, strategy=strategy)
    first, second = (trainer.validate(task, make_numbers(count, 4))[0] for _ in range(2))
    assert not any(metric.update_called for metric in task.metrics.values())
    assert not any("_sync_dist" in vars(metric) for metric in task.metrics.values())
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    return first


@pytest.mark.parametrize("how", ["logged", "rank 0", "computed"])
@pytest.mark.parametrize(("world", "count"), [(2, 3), (2, 11), (3, 5)])
def test_torchmetrics_objects_compute_over_all_ranks(group, tmp_path, world, count, how):
    alone = evaluate_metrics(tmp_path, count, how, "single")
    assert len(alone) == 7
    for values in group(world).run(evaluate_metrics, tmp_path, count, how, "ddp"):
        assert values == pytest.approx(alone, rel=1e-6)


def train_with_metrics(folder, strategy, accumulate):
    def step(task, batch):
        task.metrics["max"](batch)
        task.metrics["auroc"].update(*make_predictions(batch))
        task.log("max", task.metrics["max"], on_step=True, on_epoch=True)
        task.log("auroc", task.metrics["auroc"])

    memory = MemoryLogger()
    task = Logs(in_training=step, **{name: make_every_metric()[name] for name in ("max", "auroc")})
    trainer = quiet_trainer(
        folder, logger=memory, enable_checkpointing=False, strategy=strategy, max_epochs=2, log_every_n_steps=1,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    trainer.fit(task, make_numbers(13, 2))
    kept = {"max_step", "max_epoch", "auroc"}
    return [(step, {name: row[name] for name in kept & set(row)}) for step, row in memory.rows if kept & set(row)]


def test_training_metrics_cover_all_ranks_and_one_epoch(group, tmp_path):
    alone = train_with_metrics(tmp_path, "single", 2)
    rows, _ = group(2).run(train_with_metrics, tmp_path / "ranks", "ddp", 1)
    assert len(rows) == len(alone) == 10  # four steps and an epoch, twice
    for (step, row), (step_alone, row_alone) in zip(rows, alone, strict=True):
        assert step == step_alone
        assert row == pytest.approx(row_alone, rel=1e-6)


def evaluate_a_collection(folder, strategy):
    def step(task, batch):
        task.collection.update(*make_predictions(batch))
        task.log_dict(task.collection)
        task.extremes.update(*make_predictions(batch))

    def at_end(task):
        task.found = {name: float(value) for name, value in task.extremes.compute().items()}

    task = Logs(in_validation=step, at_end=at_end)
    task.collection = MetricCollection(
        {"micro": MulticlassAccuracy(CLASSES, average="micro"), "macro": MulticlassAccuracy(CLASSES)}, prefix="val_"
    )
    task.extremes = MinMaxMetric(MulticlassAccuracy(CLASSES, average="micro"))
    return evaluate(folder, task, 7, batch_size=2, strategy=strategy), task.found


def test_collections_and_wrappers_compute_over_all_ranks(group, tmp_path):
    alone, extremes_alone = evaluate_a_collection(tmp_path, "single")
    assert set(alone) == {"val_micro", "val_macro"}
    for values, extremes in group(2).run(evaluate_a_collection, tmp_path, "ddp"):
        assert values == pytest.approx(alone, rel=1e-6)
        assert extremes == pytest.approx(extremes_alone, rel=1e-6)


def copy_a_metric(folder):
    def at_end(task):
        copied = copy.deepcopy(task.metrics["kept"])
        copied.update(torch.tensor([10.0 + rank()]))
        task.found = {"copy": copied.compute().tolist(), "own": task.metrics["kept"].compute().tolist()}

    task = Logs(in_validation=lambda task, batch: task.metrics["kept"].update(batch), at_end=at_end, kept=CatMetric())
    evaluate(folder, task, 3)
    return task.found


def test_copied_metric_is_reduced_over_its_copies(group, tmp_path):
    """List states are joined in the order of a single process."""
    assert group(2).run(copy_a_metric, tmp_path) == [{"copy": [0, 1, 2, 11, 10], "own": [0, 1, 2]}] * 2


def compute_within_a_step(folder):
    def step(task, batch):
        task.metrics["kept"].update(batch)
        task.log("so_far", task.metrics["kept"].compute().mean())

    task = Logs(in_validation=step, kept=CatMetric())
    return evaluate(folder, task, 3)


def test_metric_computed_in_a_step_is_local(group, tmp_path):
    expected = {"so_far": (0 + 1 + (0 + 2) / 2) / 3}  # rank 0 had the batches 0 and 2, rank 1 had 1
    assert group(2).run(compute_within_a_step, tmp_path) == [expected] * 2


# ---------------------------------------------------------------------- dummy batches


class Watched(Logs):
    """Task that counts its forwards in a buffer and in an attribute, and its batches in a hook."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("counted", torch.tensor(0))
        self.forwards, self.batches = 0, []

    def forward(self, batch):
        self.forwards += 1
        self.counted += 1
        return batch

    def validation_step(self, batch):
        super().validation_step((self(batch[0]),))

    def predict_step(self, batch):
        return self(batch[0])

    def on_validation_batch_end(self, outputs, batch, batch_idx, dataloader_idx=0):
        self.batches.append(batch_idx)


def stand_in(folder, count):
    def step(task, batch):
        task.metrics["kept"].update(batch)
        task.log("x", batch.mean(), on_step=True, on_epoch=True)
        task.log("count", 1.0, reduce_fx="sum")
        task.log("kept", task.metrics["kept"])

    class Sum(CatMetric):
        def compute(self):
            return super().compute().sum()

    strategy = lumen.DDP()
    strategy.has_collectives_in = lambda part: True  # equal to the case with a forward in an evaluation
    task = Watched(in_validation=step, kept=Sum())
    values = evaluate(folder, task, count, strategy=strategy)
    forwards, counted = task.forwards, int(task.counted)
    predictions = bare_trainer(folder, strategy=strategy).predict(task, make_numbers(count))
    return values, task.batches, forwards, counted, torch.cat(predictions).tolist()


@pytest.mark.parametrize(("world", "count"), [(2, 5), (3, 1)])
def test_dummy_batches_run_forward_but_count_nowhere(group, tmp_path, world, count):
    found = group(world).run(stand_in, tmp_path, count)
    for rank, (values, batches, forwards, counted, predicted) in enumerate(found):
        assert values == {"x_epoch": (count - 1) / 2, "count": count, "kept": sum(range(count))}
        assert batches == list(range(rank, count, world))
        assert counted == len(batches)
        assert forwards == -(-count // world)  # equal on every rank
        assert predicted == list(range(count))


# ---------------------------------------------------------------------- buffers


def evaluate_with_buffers(folder):
    class Differ(lumen.Callback):
        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            task.norm.running_mean.fill_(5.0 + rank())
            task.norm.num_batches_tracked += rank()
            task.mask.fill_(rank() == 0)
            task.own.fill_(rank())
            task.metrics["mean"].update(float(rank()))

    task = Logs(in_validation=lambda task, batch: task.log("seen", task.norm.running_mean.mean()), mean=MeanMetric())
    task.norm = nn.BatchNorm1d(2, affine=False)
    task.register_buffer("mask", torch.tensor([False]))
    task.register_buffer("own", torch.tensor(0.0), persistent=False)
    strategy = lumen.DDP(broadcast_buffers=False)
    trainer = bare_trainer(folder, strategy=strategy, max_steps=1, num_sanity_val_steps=0, callbacks=[Differ()])
    trainer.fit(task, make_numbers(2), val_dataloaders=make_numbers(4))
    kept = float(task.own) == rank() and float(task.metrics["mean"].mean_value) == rank()
    return trainer.newest_values["seen"], int(task.norm.num_batches_tracked), bool(task.mask), kept


def test_evaluation_uses_persistent_buffers_of_rank_0(group, tmp_path):
    assert group(2).run(evaluate_with_buffers, tmp_path) == [(5.0, 0, True, True)] * 2


# ---------------------------------------------------------------------- all_gather


def gather_tensors(folder):
    task = Logs(at_end=lambda task: task.found.update(task.all_gather({
        "vector": torch.tensor([1.0, 2.0]) * (rank() + 1), "number": rank(), "flags": [torch.tensor(rank() == 0)],
        "name": "same",
    })))  # fmt: skip
    evaluate(folder, task, 2)
    return task.found


def test_all_gather_stacks_the_tensors_of_all_ranks(group, tmp_path):
    for found in group(2).run(gather_tensors, tmp_path):
        assert found["vector"].tolist() == [[1.0, 2.0], [2.0, 4.0]]
        assert found["number"].tolist() == [0, 1]
        assert found["flags"][0].tolist() == [True, False]
        assert found["name"] == "same"


class Communicating(Logs):
    """Task with the collectives of a tutorial in a hook: by the strategy, and by torch itself."""

    def on_train_epoch_end(self):
        strategy, first = self.trainer.strategy, rank() == 0
        mine, parts = torch.tensor([rank() + 1.0, -rank()]), [torch.tensor([10.0]), torch.tensor([20.0])]
        self.found["broadcast"] = [strategy.broadcast(mine, source).tolist() for source in (0, 1)]
        self.found["gather"] = [each.tolist() for each in strategy.all_gather(mine)]
        self.found["plain"] = strategy.broadcast({"rank": rank()}, 1), strategy.all_gather({"rank": rank()})
        self.found["scatter"] = strategy.broadcast(parts if first else None)[rank()].item()
        strategy.barrier()
        total, part, gathered = mine.clone(), torch.zeros(1), [torch.zeros(2), torch.zeros(2)]
        torch.distributed.all_reduce(total)
        torch.distributed.scatter(part, parts if first else None, src=0)
        torch.distributed.gather(mine, gathered if first else None, dst=0)
        torch.distributed.broadcast(mine, src=1)
        by_torch = {"total": total, "part": part, "gathered": torch.stack(gathered), "broadcast": mine}
        self.found |= {f"{name} by torch": value.tolist() for name, value in by_torch.items()}


def communicate(folder):
    task = Communicating()
    data = DataLoader(TensorDataset(torch.ones(4, dtype=torch.float64)), 1)
    bare_trainer(folder, strategy="ddp", max_epochs=1).fit(task, data)
    return task.found


def test_collectives_in_a_hook_move_each_value(group, tmp_path):
    both = [[1.0, 0.0], [2.0, -1.0]]
    for number, found in enumerate(group(2).run(communicate, tmp_path)):
        assert found == {
            "broadcast": both, "gather": both, "plain": ({"rank": 1}, [{"rank": 0}, {"rank": 1}]),
            "scatter": [10.0, 20.0][number], "total by torch": [3.0, -1.0], "part by torch": [[10.0], [20.0]][number],
            "gathered by torch": [[[0.0, 0.0]] * 2, both][number == 0], "broadcast by torch": both[1],
        }  # fmt: skip


def gather_with_gradients(folder):
    task = Logs()
    given = torch.tensor([1.0, 2.0], requires_grad=True)
    seen = {}

    class Watch(lumen.Callback):
        def on_fit_start(self, trainer, task):
            gathered = task.all_gather(given * (rank() + 1), sync_grads=True)
            (gathered * torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * (rank() + 1)).sum().backward()
            seen["detached"] = not task.all_gather(given).requires_grad

    bare_trainer(folder, strategy="ddp", max_steps=1, callbacks=[Watch()]).fit(task, make_numbers(2))
    return given.grad.tolist(), seen["detached"]


def test_all_gather_lets_gradients_flow_back_if_asked(group, tmp_path):
    first, second = group(2).run(gather_with_gradients, tmp_path)
    assert first == ([3.0, 6.0], True)  # the loss of rank r weighs row 0 by (1, 2), times 1 and 2
    assert second == ([18.0, 24.0], True)


def gather_unequal_shapes(folder):
    with pytest.raises(TrainingError, match=r"rank 0 gives float32\[1\] and rank 1 gives float32\[2\]"):
        evaluate(folder, Logs(at_end=lambda task: task.all_gather(torch.ones(rank() + 1))), 2)


def test_all_gather_of_unequal_shapes_raises_everywhere(group, tmp_path):
    group(2).run(gather_unequal_shapes, tmp_path)


def test_all_gather_in_one_process_keeps_tensors():
    tensor = torch.ones(2)
    found = Regression().all_gather([tensor, 3])
    assert found[0] is tensor
    assert found[1].tolist() == 3


def print_on_all_ranks(folder):
    printed = []
    task = Logs(at_end=lambda task: task.print("once"))
    from lumen import console

    before, console.console.print = console.console.print, lambda *values, **_: printed.extend(values)
    try:
        evaluate(folder, task, 2)
    finally:
        console.console.print = before
    return printed


def test_print_prints_on_rank_0_only(group, tmp_path):
    assert group(2).run(print_on_all_ranks, tmp_path) == [["once"], []]


# ---------------------------------------------------------------------- batches of each rank


def log_by_rank(task, values):
    task.log("val_loss", values.mean())
    task.log(f"val_loss/rank{task.trainer.global_rank}", values.mean())


def test_loss_of_each_rank_is_logged_with_mean(group, tmp_path):
    numbers = torch.tensor([1.0, 2.0, 10.0, 20.0, 3.0], dtype=torch.float64)  # batches [1, 2], [10, 20], [3]
    for found in group(2).run(evaluate_by_rank, tmp_path, numbers):
        assert found == {"val_loss": 7.2, "val_loss/rank0": 2.0, "val_loss/rank1": 15.0}


def evaluate_by_rank(folder, numbers):
    trainer = quiet_trainer(folder, strategy="ddp", logger=False, enable_checkpointing=False)
    (found,) = trainer.validate(Logs(in_validation=log_by_rank), DataLoader(TensorDataset(numbers), 2))
    return found


def test_reduce_supports_every_operation_and_destination(group, tmp_path):
    expected = {"sum": [5, -1], "mean": [2.5, -0.5], "max": [3, 1], "min": [2, -2], "prod": [6, -2]}
    for rank, (to_all, to_one) in enumerate(group(2).run(reduce_all, tmp_path)):
        assert to_all == expected
        assert to_one == (expected if rank == 1 else {name: [2, 1] for name in expected})


def reduce_all(folder):
    trainer = bare_trainer(folder, strategy="ddp", max_steps=1)
    trainer.fit(Regression(), loader())
    strategy = trainer.strategy
    mine = torch.tensor([[2.0, 1.0], [3.0, -2.0]][trainer.global_rank])
    operations = ("sum", "mean", "max", "min", "prod")
    to_all = {name: strategy.reduce(mine, reduce_op=name).tolist() for name in operations}
    to_one = {name: strategy.reduce(mine, reduce_op=name, dst=1).tolist() for name in operations}
    assert to_all["mean"] == strategy.reduce(mine).tolist() == strategy.reduce(mine, None).tolist()
    with pytest.raises(ConfigError, match=r"reduce: all processes take part, but group='max' was given"):
        strategy.reduce(mine, "max")
    assert mine.tolist() == [[2.0, 1.0], [3.0, -2.0]][trainer.global_rank]
    for wrong in ({"reduce_op": "median"}, {"dst": 2}):
        with pytest.raises(ConfigError, match="reduce_op is one of mean, sum, max, min, prod, and dst a rank, 0 to 1"):
            strategy.reduce(mine, **wrong)
    return to_all, to_one


# ---------------------------------------------------------------------- a resume on another number of processes


class Correlated(Regression):
    def __init__(self):
        super().__init__()
        self.correlation = PearsonCorrCoef()

    def training_step(self, batch):
        self.correlation.update(batch[1].flatten(), batch[0].sum(1))
        self.log("correlation", self.correlation, on_step=False, on_epoch=True)
        return super().training_step(batch)


def stop_at_steps(folder, steps):
    saver = lumen.ModelCheckpoint(every_n_train_steps=steps, at_end=False)
    quiet_trainer(folder, strategy="ddp", max_steps=steps, callbacks=[saver]).fit(Correlated(), loader(48, 4))


@pytest.mark.parametrize("steps", [2, 6], ids=["in mid-epoch", "at the end of an epoch"])
def test_unreduced_metric_states_are_refused_on_another_world(group, tmp_path, steps):
    group(2).run(stop_at_steps, tmp_path, steps)
    said = r"the PearsonCorrCoef correlation was in the middle of an epoch on 2 processes, .* Resume on 2 processes, or"
    with pytest.raises(CheckpointMismatch, match=said) if steps == 2 else nullcontext():
        trainer = quiet_trainer(tmp_path, max_steps=steps + 1, resume="auto", global_batch_size=8)
        trainer.fit(Correlated(), loader(48, 4))
