"""Runs on several processes: one record, equal decisions on every rank, and an exact resume."""

import errno
import io
import logging
import os
import signal
import tempfile
import time
import traceback
from functools import partial

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lumen
from lumen.checkpoint import Checkpoint
from lumen.checkpoint.load import weights_source
from lumen.errors import CheckpointError, ConfigError, DataError, RunDirectoryError
from lumen.run.run_end import StopVote
from lumen.trainer.run_directory import RunDirectory
from tests.helpers.checkpoints import read_tensors
from tests.helpers.group import catch_message
from tests.helpers.tables import read_rows
from tests.helpers.tasks import FEATURES, Regression, Saving, Seeing, bare_trainer, loader, quiet_trainer

F64 = torch.float64


class Full(Regression):
    """Task with everything that a checkpoint holds: dropout, buffers, epoch means, metrics, schedulers."""

    def __init__(self, norm=True):
        super().__init__(dropout=0.2, dtype=F64)
        self.norm = nn.BatchNorm1d(FEATURES, dtype=F64) if norm else nn.Identity()
        self.mean = MeanMetric().set_dtype(F64)

    def forward(self, inputs):
        return self.net(self.norm(inputs))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"}]


def data():
    return loader(100, 4, dtype=F64)


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


# ---------------------------------------------------------------------- one record


def test_one_rank_claims_directory_and_writes_record(group, tmp_path):
    alone = quiet_trainer(tmp_path / "alone", max_epochs=2, accumulate_grad_batches=2)
    alone.fit(Regression(dtype=F64), loader(dtype=F64), val_dataloaders=loader(dtype=F64))
    first, second = group(2).run(fit_and_describe, tmp_path)
    assert first["directory"] == second["directory"] == tmp_path / "runs" / "run"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run"]
    assert (first["loggers"], second["loggers"]) == (1, 0)
    assert (first["seed"], second["seed"]) == (first["seed"],) * 2
    environment = (first["directory"] / "environment.json").read_text()
    for entry in ('"strategy": "DDP"', '"processes": 2', '"nodes": 1', '"backend": "gloo"'):
        assert entry in environment
    assert len(read_rows(first["directory"] / "metrics.csv")) == len(read_rows(alone.run_directory / "metrics.csv"))
    assert RunDirectory.read_live_holder(first["directory"]) is None


def fit_and_describe(tmp_path):
    task = Regression(dtype=F64)
    trainer = quiet_trainer(tmp_path, strategy="ddp", max_epochs=2, seed=None)
    before = process_state()
    trainer.fit(task, loader(dtype=F64), val_dataloaders=loader(dtype=F64))
    assert process_state() == before
    return {"directory": trainer.run_directory, "loggers": len(trainer.run.records.loggers), "seed": trainer.run.seed}


def process_state():
    """Return the state of the process that a run must not change."""
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    return dict(os.environ), handlers, list(logging.getLogger("lumen").handlers)


def test_directory_in_use_raises_equally_on_all_ranks(group, tmp_path):
    with RunDirectory.claim(tmp_path / "runs", "run", reuse=True):
        first, second = group(2).run(catch_error, tmp_path, RunDirectoryError, {"resume": "auto"})
    assert first == second
    assert f"process {os.getpid()}" in first


def catch_error(tmp_path, kind, options):
    with pytest.raises(kind) as caught:
        quiet_trainer(tmp_path, strategy="ddp", max_steps=1, **options).fit(Regression(), loader())
    assert not any(isinstance(handler, logging.FileHandler) for handler in logging.getLogger("lumen").handlers)
    return str(caught.value)


def test_run_failing_before_start_frees_its_name(group, tmp_path):
    group(2).run(catch_error, tmp_path, CheckpointError, {"init_from": tmp_path / "nothing.safetensors"})
    group(2).run(catch_error, tmp_path, CheckpointError, {"resume": tmp_path / "nowhere"})
    assert list((tmp_path / "runs").iterdir()) == []


def test_ranks_log_to_files_and_rank_0_prints(group, tmp_path):
    shown = group(2).run(warn_on_every_rank, tmp_path)
    directory = tmp_path / "runs" / "run"
    logs = sorted((directory / "logs").iterdir())
    stamps = {path.name.rpartition("-")[0] for path in logs}
    assert [path.name.rpartition("-")[2] for path in logs] == ["rank0.log", "rank1.log"]
    assert len(stamps) == 1
    first, second = (path.read_text() for path in logs)
    assert "WARNING from rank 0" in first
    assert "WARNING from rank 0" in (directory / "run.log").read_text()
    assert "from rank 1" not in first + (directory / "run.log").read_text()
    assert "WARNING from rank 1" in second
    for rank, log in enumerate((first, second)):
        assert [line.split(" ", 2)[2] for line in log.splitlines() if "word" in line] == [
            f"INFO mine: user's word of {rank}"
        ]
    assert shown[0].count("mine: user's word of 0") == 1
    assert "from rank 0" in shown[0]
    assert "printed by 0" in shown[0]
    assert shown[1] == ""


class Warning_(lumen.Callback):
    def on_train_start(self, trainer, task):
        logging.getLogger("lumen").warning("from rank %d", trainer.global_rank)
        logging.getLogger("mine").info("user's word of %d", trainer.global_rank)
        task.print("printed by", trainer.global_rank)


def warn_on_every_rank(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        file = io.StringIO()
        patch.setattr("lumen.console.console", Console(file=file, width=200))
        trainer = quiet_trainer(
            tmp_path, strategy="ddp", max_steps=1, log_level="INFO", callbacks=Warning_(), enable_progress_bar=True,
            enable_model_summary=True, profiler="simple",
        )  # fmt: skip
        trainer.fit(Regression(), loader())
        return file.getvalue()


def test_failing_ranks_write_tracebacks_and_name_their_folder(group, tmp_path):
    shown = group(2).run(fail_on_every_rank, tmp_path)
    directory, where = tmp_path / "runs" / "run", "This was in step 2 (epoch 0, batch_idx {}, rank {})."
    for rank, log in enumerate(sorted((directory / "logs").iterdir())):
        end = f"KeyError: 'of rank {rank}'\n{where.format(2 + rank, rank)}\n"
        assert shown[rank].endswith(f"{end}The tracebacks of all ranks are in {directory}/logs.\n")
        text = log.read_text()
        assert text.count("Traceback (most recent call last):") == 1
        assert text.endswith(end)
        assert "in training_step" in text
    assert (directory / "run.log").read_text().endswith(f"KeyError: 'of rank 0'\n{where.format(2, 0)}\n")


class FailsOnEach(Regression):
    def training_step(self, batch):
        if self.global_step == 1:
            raise KeyError(f"of rank {self.trainer.global_rank}")
        return super().training_step(batch)


def fail_on_every_rank(tmp_path):
    with pytest.raises(KeyError) as caught:
        quiet_trainer(tmp_path, strategy="ddp", max_steps=2, log_level="CRITICAL").fit(FailsOnEach(), loader())
    return "".join(traceback.format_exception(caught.value))


def test_loggers_of_other_ranks_write_nothing(group, tmp_path):
    group(2).run(log_by_hand, tmp_path)
    metrics = (tmp_path / "runs" / "run" / "metrics.csv").read_text()
    assert metrics.count("7.5") == 4
    assert len(list((tmp_path / "runs" / "run" / "tensorboard").iterdir())) == 1


class ByHand(Regression):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        for logger in self.trainer.loggers:
            logger.log_metrics({"mine": 7.5}, self.global_step)
            logger.log_image("image", torch.zeros(2, 2), self.global_step)
        self.trainer.loggers[1].experiment.add_scalar("own", 1.0, self.global_step)


def log_by_hand(tmp_path):
    loggers = [lumen.CSVLogger(), lumen.TensorBoardLogger()]
    quiet_trainer(tmp_path, strategy="ddp", max_steps=4, logger=loggers).fit(ByHand(), loader())


# ---------------------------------------------------------------------- set-up


class Prepared(lumen.DataModule):
    def __init__(self, folder, fails=False):
        self.folder, self.fails = folder, fails

    def prepare_data(self):
        time.sleep(0.2)
        torch.rand(5)
        (self.folder / f"prepared-by-{os.getpid()}").touch()
        if self.fails:
            raise DataError("the download is broken")

    def setup(self, stage):
        assert len(list(self.folder.glob("prepared-*"))) == 1  # no rank is here before it is done
        self.drawn = torch.rand(3).tolist()

    def train_dataloader(self):
        return loader()


def test_data_is_prepared_once_and_setup_draws_equally(group, tmp_path):
    (folder := tmp_path / "data").mkdir()
    drawn = group(2).run(prepare, tmp_path, folder)
    (alone := tmp_path / "alone").mkdir()
    assert [*drawn, prepare(tmp_path, alone, "single")] == [drawn[0]] * 3


def prepare(tmp_path, folder, strategy="ddp"):
    module = Prepared(folder)
    bare_trainer(tmp_path, strategy=strategy, max_steps=1).fit(Regression(), module)
    return module.drawn


def test_prepare_data_error_raises_on_all_ranks(group, tmp_path):
    assert group(2).run(prepare_badly, tmp_path) == ["the download is broken"] * 2


def prepare_badly(tmp_path):
    trainer = bare_trainer(tmp_path, strategy="ddp", max_steps=1)
    return catch_message(DataError, trainer.fit, Regression(), Prepared(tmp_path, fails=True))


def test_sync_batchnorm_needs_cuda(group, tmp_path):
    options = {"strategy": "ddp", "sync_batchnorm": True, "max_steps": 1}
    for message in group(2).run(catch_message, ConfigError, bare_trainer, tmp_path, **options):
        assert "2 processes run on the CPU" in message
    bare_trainer(tmp_path, sync_batchnorm=True, max_steps=1).fit(Full(), data())  # one process has no values to share


@pytest.mark.parametrize("url", [False, True])
def test_initial_weights_are_fetched_once_per_node(group, tmp_path, url):
    weights = {name: torch.randn_like(tensor) for name, tensor in Regression(dtype=F64).state_dict().items()}
    save_file(weights, path := tmp_path / "other.safetensors")
    answers = group(2).run(begin_with, tmp_path, f"file://{path}" if url else path)
    for state, _ in answers:
        assert_equal(state, weights)
    assert [fetched for _, fetched in answers] == [int(url), 0]


def begin_with(tmp_path, path):
    (folder := tmp_path / f"temporary-{os.getpid()}").mkdir(exist_ok=True)
    fetched, begun = [], {}
    with pytest.MonkeyPatch.context() as patch:
        fetch = weights_source._fetch
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.setattr(weights_source, "_fetch", lambda *args: fetched.append(1) or fetch(*args))
        take = lumen.LambdaCallback(
            on_fit_start=lambda trainer, task: begun.update({n: t.clone() for n, t in task.state_dict().items()})
        )
        trainer = bare_trainer(tmp_path, strategy="ddp", max_steps=1, init_from=path, callbacks=take)
        trainer.fit(Regression(dtype=F64), loader(dtype=F64))
    assert list(folder.iterdir()) == []
    return begun, len(fetched)


# ---------------------------------------------------------------------- decisions


class Slow(Regression):
    """Task that makes every rank slow in a different way."""

    def training_step(self, batch):
        time.sleep(0.01 + 0.02 * self.trainer.global_rank)
        return super().training_step(batch)


@pytest.mark.parametrize("how", ["max_time", "Timer", "train_time_interval"])
def test_clocks_decide_the_same_on_every_rank(group, tmp_path, how):
    first, second = group(2).run(run_by_the_clock, tmp_path, how)
    assert first == second
    assert len(first[1]) >= 1
    if how != "train_time_interval":
        assert 1 <= first[0] < 1000


def run_by_the_clock(tmp_path, how):
    half = {"seconds": 0.8}
    options = {
        "max_time": {"max_time": half},
        "Timer": {"max_steps": 1000, "callbacks": lumen.Timer(half)},
        "train_time_interval": {
            "max_steps": 60,
            "callbacks": lumen.ModelCheckpoint(train_time_interval={"seconds": 0.3}, keep_last=-1),
        },
    }[how]
    trainer = quiet_trainer(tmp_path, strategy="ddp", **options)
    trainer.fit(Slow(), loader(400, 4))
    return trainer.global_step, sorted(path.name for path in (trainer.run_directory / "checkpoints").iterdir())


def test_signal_to_one_rank_saves_and_stops_all(group, tmp_path):
    steps = group(2).run(stop_rank_one, tmp_path)
    assert steps[0] == steps[1] >= 5
    (saved,) = (tmp_path / "runs" / "run" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps[0]:08d}"
    assert Checkpoint.open(saved).info["step"] == steps[0]


class Terminated(lumen.Callback):
    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_rank_one(tmp_path):
    trainer = quiet_trainer(tmp_path, strategy="ddp", max_steps=100_000, callbacks=Terminated())
    with pytest.raises(SystemExit) as caught:
        trainer.fit(Regression(), loader(400, 4))
    assert caught.value.code == 128 + signal.SIGTERM
    return trainer.global_step


class Announcing(lumen.Callback):
    """Callback that announces a flag on rank 1. All ranks read the flag after the second announcement."""

    def on_train_start(self, trainer, task):
        vote, self.heard = StopVote(trainer.processes), []
        vote.local_save_ended = trainer.global_rank == 1
        for beat in range(1, 7):
            vote.poll_when_due()
            self.heard.append(vote.save_ended)
            if beat == 3:  # it asks at every second step
                vote.acknowledge_save()


def test_announcement_of_one_rank_reaches_all(group, tmp_path):
    assert group(2).run(announce, tmp_path) == [[True, True, True, False, False, False]] * 2


def announce(tmp_path, kind=Announcing):
    trainer = quiet_trainer(tmp_path, strategy="ddp", max_steps=1, callbacks=(listening := kind()))
    trainer.fit(Regression(), loader(400, 4))
    return listening.heard


class Signalled(lumen.Callback):
    """Callback that sends a signal to rank 1 in a step longer than the time between votes, or in a first step."""

    def on_train_start(self, trainer, task):
        slow, changing = StopVote(trainer.processes), StopVote(trainer.processes)
        for _ in range(2):
            time.sleep(0.6)
            slow.poll_when_due()
        for _ in range(1000):
            changing.poll_when_due()
        changing.reset_interval()
        time.sleep(0.6)
        for vote in (slow, changing):
            vote.requested_signal = signal.SIGTERM if trainer.global_rank == 1 else None
            vote.poll_when_due()
        self.heard = slow.stop_signal, changing.stop_signal


def test_signal_is_seen_after_slow_or_changed_steps(group, tmp_path):
    assert group(2).run(announce, tmp_path, Signalled) == [(signal.SIGTERM, signal.SIGTERM)] * 2


# ---------------------------------------------------------------------- checkpoints


STRATEGIES = ["ddp", "fsdp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_equals_uninterrupted_run(group, tmp_path, strategy):
    answers = group(2).run(train_and_resume, tmp_path, strategy)
    for undisturbed, resumed in answers:
        assert undisturbed == resumed
    ends = [tmp_path / name / "runs/run/checkpoints/step-00000019" for name in ("a", "b")]
    assert_equal(*(read_tensors(end, "model", "optimizer") for end in ends))


def train_and_resume(tmp_path, strategy):
    """Return an uninterrupted run and a run resumed in the middle of an epoch, each with its last step saved."""
    records = []
    for name, parts in (("a", [19]), ("b", [5, 8, 19])):
        for steps in parts:
            trainer = quiet_trainer(
                tmp_path / name, strategy=strategy, max_steps=steps, resume="auto", log_every_n_steps=1,
                callbacks=lumen.ModelCheckpoint(every_n_train_steps=4),
            )  # fmt: skip
            trainer.fit(task := Full(), data())
        rows = read_rows(trainer.run_directory / "metrics.csv")
        records.append((rows, trainer.run.progress.samples, task.mean.update_count))
    return records


def test_any_strategy_reads_what_any_other_has_written(group, tmp_path):
    quiet_trainer(tmp_path, max_steps=4, callbacks=Saving(4, tmp_path / "single")).fit(Full(), data())
    before = "single"
    for world, strategy in [(2, "ddp"), (2, "fsdp"), (3, "fsdp"), (1, "single")]:
        name = f"{strategy}-{world}"
        run = copy if world == 1 else partial(group(world).run, copy)
        run(tmp_path, before, name, strategy)
        assert_equal(*(read_tensors(tmp_path / each, "model", "optimizer") for each in ("single", name)))
        before = name


def copy(tmp_path, source, name, strategy):
    """Load a checkpoint and save the loaded state."""
    saving = lumen.LambdaCallback(on_fit_start=lambda trainer, _: trainer.save_checkpoint(tmp_path / name))
    options = {"strategy": strategy, "max_steps": 5, "resume": tmp_path / source, "callbacks": saving}
    quiet_trainer(tmp_path, **options).fit(Full(), data())


def test_epoch_resumed_on_other_ranks_has_one_mean(group, tmp_path):
    alone = end_an_epoch(tmp_path / "alone", "single", None, tmp_path / "begun-by-1")
    group(2).run(end_an_epoch, tmp_path / "two", "ddp", None, tmp_path / "begun-by-2")
    fewer = end_an_epoch(tmp_path / "fewer", "single", tmp_path / "begun-by-2", None)
    more = group(2).run(end_an_epoch, tmp_path / "more", "ddp", tmp_path / "begun-by-1", None)
    for other in (fewer, *more):
        for name in ("loss_epoch", "mean"):
            assert other[name].item() == pytest.approx(alone[name].item(), rel=1e-10)


def end_an_epoch(folder, strategy, resume, saved):
    trainer = quiet_trainer(
        folder, strategy=strategy, resume=resume, max_epochs=1, global_batch_size=8, callbacks=Saving(5, saved)
    )
    trainer.fit(Full(norm=False), data())
    return trainer.callback_metrics


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_failed_save_on_writer_raises_on_all_ranks(group, tmp_path, strategy):
    messages = group(2).run(save_on_a_full_disk, tmp_path, strategy)
    assert messages[0] == messages[1]
    assert len(messages[0]) == 3
    assert list(tmp_path.glob("**/step-*")) == []
    assert list(tmp_path.glob("**/*.tmp-*")) == []


class FailedSaves(lumen.Callback):
    """Callback that saves while the disk refuses the k-th file."""

    def __init__(self, path):
        self.path, self.messages = path, []

    def on_step_end(self, trainer, task):
        for k in (1, 2, 3):
            with pytest.MonkeyPatch.context() as patch:
                if trainer.is_global_zero:
                    patch.setattr(os, "fsync", fail_at_call(k, os.fsync))
                with pytest.raises(CheckpointError) as caught:
                    trainer.save_checkpoint(self.path / "step-1")
            self.messages.append(str(caught.value))


def fail_at_call(k, function):
    calls = []

    def call(*args):
        calls.append(1)
        if len(calls) == k:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return function(*args)

    return call


def save_on_a_full_disk(tmp_path, strategy):
    saves = FailedSaves(tmp_path)
    bare_trainer(tmp_path, strategy=strategy, max_steps=1, logger=False, callbacks=saves).fit(Full(), data())
    return saves.messages


def test_all_ranks_find_the_best_checkpoint(group, tmp_path):
    first, second = group(2).run(evaluate_best, tmp_path)
    assert first == second


def evaluate_best(tmp_path):
    saver = lumen.ModelCheckpoint(monitor="val_loss", every_n_epochs=1, keep_last=1)
    trainer = quiet_trainer(tmp_path, strategy="ddp", max_epochs=3, callbacks=saver)
    trainer.fit(Regression(dtype=F64), loader(dtype=F64), val_dataloaders=loader(dtype=F64))
    found = trainer.validate(Regression(dtype=F64), loader(dtype=F64), ckpt_path="best")
    assert found[0]["val_loss"] == pytest.approx(saver.best_model_score.item(), rel=1e-12)
    return found, saver.scores, saver.best_model_path, sorted(os.listdir(saver.dirpath))


# ---------------------------------------------------------------------- callbacks and profilers


def test_throughput_covers_all_ranks_and_each_has_trace(group, tmp_path):
    options = {"max_steps": 6, "global_batch_size": 8, "log_every_n_steps": 2}
    alone = measure_step(tmp_path / "alone", "single", options)
    first, second = group(2).run(measure_step, tmp_path, "ddp", options)
    for name in ("samples_per_s", "batches_per_s", "flop_per_step"):
        assert first[name] == pytest.approx(alone[name], rel=1e-6)
    assert second is None
    traces = [path.name for path in (tmp_path / "runs" / "run" / "profile").iterdir()]
    assert sorted(name.split(".")[0].rpartition("-")[2] for name in traces) == ["rank0", "rank1"]


def measure_step(folder, strategy, options):
    """Return the samples, micro-batches and operations of an optimizer step; None if the run records nothing."""
    trainer = quiet_trainer(
        folder, strategy=strategy, profiler=lumen.TorchProfiler(wait=1, warmup=1, active=1),
        callbacks=lumen.ThroughputMonitor(measure_flops=True), **options,
    )  # fmt: skip
    trainer.fit(Regression(dtype=F64), loader(400, 4, dtype=F64))
    if not trainer.run.records.loggers:
        return None
    *_, row = read_rows(trainer.run_directory / "system.csv")
    per_s = float(row["steps_per_s"])
    return {
        "samples_per_s": float(row["samples_per_s"]) / per_s,
        "batches_per_s": float(row["batches_per_s"]) / per_s,
        "flop_per_step": float(row["flop_per_step"]),
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_summary_counts_the_whole_model(group, tmp_path, strategy):
    group(2).run(read_summary, tmp_path, strategy)
    log = (tmp_path / "runs" / "run" / "run.log").read_text()
    assert "Regression: 129 parameters (129 trainable, 0 frozen), < 0.01 MB float64" in log


def read_summary(tmp_path, strategy):
    quiet_trainer(tmp_path, strategy=strategy, max_steps=1, log_level="INFO", enable_model_summary=True).fit(
        Regression(dtype=F64), loader(dtype=F64)
    )


def test_larger_step_from_more_ranks_is_reported(group, tmp_path):
    """The run reports no such step if `global_batch_size` is set."""
    for name, options in {"by processes": {}, "set": {"global_batch_size": 8}}.items():
        quiet_trainer(tmp_path / name, max_steps=2, **options).fit(Regression(), loader(batch_size=4))
        group(2).run(resume_run, tmp_path / name, options)
    said = (tmp_path / "by processes" / "runs" / "run" / "run.log").read_text()
    assert "processes was 1, is 2; global_batch_size was 4, is 8. The new settings apply" in said
    assert "settings differ" not in (tmp_path / "set" / "runs" / "run" / "run.log").read_text()


def resume_run(folder, options):
    options = {"max_steps": 3, "strategy": "ddp", "resume": "auto", "log_level": "WARNING"} | options
    quiet_trainer(folder, **options).fit(Regression(), loader(batch_size=4))


def test_growing_data_must_grow_equally_on_all_ranks(group, tmp_path):
    first, second = group(2).run(grow, tmp_path, 2, 2)
    assert sorted(first[1] + second[1]) == [*range(10)]
    for message in group(2).run(grow, tmp_path, 2, 4):
        assert "a different data set or order than rank 0: {'samples': 12" in message


def grow(folder, more, on_rank_one):
    task, data = Seeing(), list(range(8))
    task.on_train_epoch_end = lambda: data.extend(
        range(len(data), len(data) + (on_rank_one if task.trainer.global_rank else more))
    )
    try:
        bare_trainer(folder, max_epochs=2, strategy="ddp").fit(task, DataLoader(data, 2, shuffle=True))
    except DataError as error:
        return str(error)
    return {epoch: task.samples(epoch) for epoch in task.epochs}


# ---------------------------------------------------------------------- callbacks that differ


class Asking(lumen.Callback):
    """Callback with a collective at the end of the first step."""

    def on_step_end(self, trainer, task):
        trainer.request_stop_vote()


DIFFERENT = {
    "on one rank": (lambda rank: [Asking()] * rank, r"rank 0 has none; rank 1 has Asking\. Pass the same callbacks"),
    "in another order": (
        lambda rank: [Asking(), lumen.EarlyStopping("loss")][:: 1 - 2 * rank],
        "rank 0 has Asking, EarlyStopping.*; rank 1 has EarlyStopping.*, Asking",
    ),
    "with another key": (
        lambda rank: lumen.EarlyStopping(("loss", "val_loss")[rank]),
        "EarlyStopping.*'loss'.*; rank 1.*'val_loss'",
    ),
}


def fit_with_callbacks_by_rank(folder, name):
    make, said = DIFFERENT[name]
    trainer = bare_trainer(folder, max_steps=2, strategy="ddp", callbacks=make(torch.distributed.get_rank()))
    with pytest.raises(ConfigError, match=f"callbacks differ between ranks: .*{said}"):
        trainer.fit(Regression(), loader(16))


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_callbacks_are_refused_before_the_run(group, tmp_path, name):
    group(2).run(fit_with_callbacks_by_rank, tmp_path, name, limit_s=20)


def fit_with_a_bar_on_one_rank(folder):
    first = torch.distributed.get_rank() == 0
    options = {"max_steps": 2, "strategy": "ddp", "enable_model_summary": first, "callbacks": [Asking()]}
    trainer = bare_trainer(folder, **options, logger=first)
    trainer.fit(Regression(), loader(16))
    return trainer.global_step


def test_what_shows_and_records_may_differ_between_ranks(group, tmp_path):
    assert group(2).run(fit_with_a_bar_on_one_rank, tmp_path) == [2, 2]
