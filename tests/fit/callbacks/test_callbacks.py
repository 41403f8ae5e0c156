"""Callbacks that stop, time, log and call functions."""

import math
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS
from tests.helpers.scripted_values import Scripted, fit_scripted
from tests.helpers.tables import read_rows
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer


@pytest.mark.parametrize(
    ("values", "options", "epochs"),
    [
        ([5, 4, 4.5, 4.2, 1, 1], {"patience": 2}, 4),
        ([5, 4, 3, 2, 1, 0], {"patience": 1}, 6),
        ([1, 2, 3, 3, 3, 9], {"mode": "max", "patience": 2}, 5),
        ([5, 4.95, 4.9, 4.85, 1, 1], {"min_delta": 0.5, "patience": 3}, 4),
        ([5, math.nan, 1, 1, 1, 1], {}, 2),
        ([5, math.nan, 1, 1, 1, 1], {"check_finite": False, "patience": 5}, 6),
        ([5, 3, 1, 1, 1, 1], {"stopping_threshold": 4.0}, 2),
        ([5, 30, 1, 1, 1, 1], {"divergence_threshold": 20.0}, 2),
    ],
)
def test_early_stopping_stops_at_the_right_epoch(tmp_path, values, options, epochs):
    stopping = lumen.EarlyStopping("score", **options)
    trainer = fit_scripted(tmp_path, values, [stopping])
    assert trainer.current_epoch == epochs
    assert stopping.stopped_epoch == (epochs - 1 if trainer.should_stop else 0)
    assert (stopping.stopping_reason_message is not None) == trainer.should_stop


@pytest.mark.parametrize("options", [{"verbose": True}, {}])
def test_verbose_early_stopping_logs_each_comparison(tmp_path, options):
    stopping = lumen.EarlyStopping("score", patience=2, **options)
    trainer = fit_scripted(tmp_path, [5, 4, 4.5, 6, 1], [stopping], log_level="INFO")
    said = [line.split(" INFO ")[1] for line in (trainer.run_directory / "run.log").read_text().splitlines()]
    assert [line for line in said if line.startswith("early stopping")] == [
        "early stopping: score 5, best 5, 0 of 2 values since",
        "early stopping: score 4, best 4, 0 of 2 values since",
        "early stopping: score 4.5, best 4, 1 of 2 values since",
        "early stopping: score 6, best 4, 2 of 2 values since",
        "early stopping: score: no improvement on 4 in the last 2 values",
    ][-1 if not options else 0 :]


@pytest.mark.parametrize(
    ("values", "minimum", "options", "epochs"),
    [
        ([5, 6, 4, 3, 2, 1], {"min_epochs": 4}, {}, 6),  # withdrawn by better values
        ([5, 6, 4, 3, 4, 1], {"min_epochs": 4}, {}, 5),  # withdrawn, and requested again
        ([5, 6, 5, 3, 2, 1], {"min_steps": 5}, {"min_delta": 9}, 2.5),
        ([5, 9, 1, 8, 8, 8], {"min_epochs": 4}, {"patience": 9, "divergence_threshold": 7}, 4),
        ([5, 9, 6, 4, 3, 2], {"min_epochs": 5}, {"patience": 9, "divergence_threshold": 8}, 6),
        ([5, 9, 6, 6, 3, 2], {"min_epochs": 4}, {"patience": 9, "divergence_threshold": 8}, 4),  # 6 is not a new best
        ([5, math.nan, 4, 3, 2, 1], {"min_epochs": 3}, {}, 6),
        ([5, 1, 3, 4, 4, 4], {"min_epochs": 4}, {"patience": 9, "stopping_threshold": 2}, 4),  # a limit stays reached
    ],
)
@pytest.mark.parametrize("cut", [None, 2])
def test_new_best_cancels_a_stop_waiting_for_minimum(tmp_path, values, minimum, options, epochs, cut):
    if cut is not None:
        fit_scripted(
            tmp_path, values, [lumen.EarlyStopping("score", **{"patience": 1} | options)], max_epochs=cut, **minimum
        )
    stopping = lumen.EarlyStopping("score", **{"patience": 1} | options)
    trainer = fit_scripted(tmp_path, values, [stopping], resume="auto", **minimum)
    assert trainer.global_step == 2 * epochs
    assert stopping.stopped_epoch == (0 if epochs == 6 else math.ceil(epochs) - 1)
    assert stopping.best_score == min(value for value in values[: math.ceil(epochs)] if value >= 1)


def test_taking_a_stop_back_leaves_the_users_own(tmp_path):
    stopping = lumen.EarlyStopping("score", patience=1)
    own = lumen.LambdaCallback(on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", True))
    trainer = fit_scripted(tmp_path, [5, 6, 4, 3, 2, 1], [stopping, own], min_epochs=4)
    assert (trainer.current_epoch, stopping.stopped_epoch) == (4, 0)


class Seldom(Scripted):
    """Task with a new value in every second epoch only, each better than the last one."""

    def __init__(self, *names):
        super().__init__([])
        self.names = names

    def validation_step(self, batch):
        for name in self.names:
            self.log(name, -float(self.current_epoch))


def fit_seldom(tmp_path, callbacks, names=("score",), **options):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, callbacks=callbacks, num_sanity_val_steps=0, **options)
    trainer.fit(Seldom(*names), data, val_dataloaders=data)
    return trainer


def test_callbacks_ignore_stale_values_even_after_resume(tmp_path):
    def callbacks():
        return [lumen.EarlyStopping("score", patience=1), lumen.ModelCheckpoint(monitor="score", save_top_k=9)]

    fit_seldom(tmp_path, callbacks(), check_val_every_n_epoch=2, max_epochs=3)
    stopping, saving = resumed = callbacks()
    assert fit_seldom(tmp_path, resumed, check_val_every_n_epoch=2, max_epochs=8, resume="auto").current_epoch == 8
    assert (stopping.best_score, stopping.wait_count) == (-7.0, 0)
    assert [*saving.best_k_models.values()] == [-7.0, -5.0, -3.0, -1.0]


@pytest.mark.parametrize("kind", [lumen.EarlyStopping, lumen.ModelCheckpoint])
def test_unlogged_monitor_after_resume_raises(tmp_path, kind):
    options = {"check_val_every_n_epoch": 2}
    fit_seldom(tmp_path, [kind(monitor="score")], max_epochs=2, **options)
    fit_seldom(tmp_path, [kind(monitor="score")], ["other"], max_epochs=3, resume="auto", **options)  # never validated
    with pytest.raises(ConfigError, match="'score' was never logged since the run resumed; logged so far: other"):
        fit_seldom(tmp_path, [kind(monitor="score")], ["other"], max_epochs=8, resume="auto", **options)


class PerStep(Scripted):
    """Task that logs its loss like a Lightning task, with given arguments."""

    def __init__(self, **options):
        super().__init__([1, 1, 1])
        self.options = options

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("loss", loss, **self.options)
        return loss


MONITORS = {
    "EarlyStopping": lambda monitor: [lumen.EarlyStopping(monitor)],
    "ModelCheckpoint": lambda monitor: [lumen.ModelCheckpoint(monitor=monitor)],
}


@pytest.mark.parametrize("who", MONITORS)
@pytest.mark.parametrize(
    ("monitor", "options", "message"),
    [
        ("loss", {}, r"'loss' has values of single steps only.*Write self\.log\('loss', \.\.\., on_step=False, "
                     r"on_epoch=True\); or write on_epoch=True alone, and use 'loss_epoch' as the monitor"),
        ("loss", {"on_epoch": True}, "'loss' has values of single steps only.*Use 'loss_epoch' as the monitor"),
        ("loss_step", {"on_epoch": True}, "'loss_step' has values of single steps only.*Use 'loss_epoch'"),
    ],
)  # fmt: skip
def test_per_step_monitor_raises_with_a_fix(tmp_path, who, monitor, options, message):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=MONITORS[who](monitor))
    with pytest.raises(ConfigError, match=f"{who}: the monitor {message}"):
        trainer.fit(PerStep(**options), data, val_dataloaders=data)
    assert trainer.current_epoch == 1


@pytest.mark.parametrize(
    ("options", "monitor"), [({"on_step": False, "on_epoch": True}, "loss"), ({"on_epoch": True}, "loss_epoch")]
)
def test_what_that_error_says_to_write_works(tmp_path, options, monitor):
    callbacks = [*MONITORS["EarlyStopping"](monitor), *MONITORS["ModelCheckpoint"](monitor)]
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    quiet_trainer(tmp_path, max_epochs=2, callbacks=callbacks).fit(PerStep(**options), data, val_dataloaders=data)
    assert callbacks[1].best_model_score == callbacks[0].best_score < 4


class Plateau(PerStep):
    """Task with a schedule that depends on its loss at every step or at every epoch."""

    def __init__(self, interval, monitor="loss", **options):
        super().__init__(**options)
        self.interval, self.monitor = interval, monitor

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval, "monitor": self.monitor}]


def test_epoch_schedule_rejects_per_step_monitor(tmp_path):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    with pytest.raises(
        ConfigError, match=r"lr_scheduler: the monitor 'loss' has values of single steps only.*on_epoch=True"
    ):
        quiet_trainer(tmp_path, max_epochs=3).fit(Plateau("epoch"), data)


@pytest.mark.parametrize("count", ["step", "epoch"])
def test_counters_as_monitors_raise_with_a_fix(tmp_path, count):
    """`ModelCheckpoint` has these monitors, as in Lightning; `test_model_checkpoint.py` has its test."""
    data, words = (
        DataLoader(TensorDataset(torch.arange(4.0)), 2),
        f"{count}' is a counter.*write Trainer.max_{count}s=N",
    )
    with pytest.raises(ConfigError, match=f"EarlyStopping: the monitor '{words}"):
        bare_trainer(tmp_path, max_epochs=3, callbacks=[lumen.EarlyStopping(count)]).fit(PerStep(), data)
    with pytest.raises(ConfigError, match=f"lr_scheduler: the monitor '{words}"):
        bare_trainer(tmp_path, max_epochs=3).fit(Plateau("epoch", monitor=count), data)


def test_callbacks_do_not_see_per_step_values(tmp_path):
    data = DataLoader(TensorDataset(torch.arange(4.0)), 2)
    trainer = quiet_trainer(tmp_path, max_epochs=3, callbacks=MONITORS["ModelCheckpoint"]("loss"))
    with pytest.raises(ConfigError, match="ModelCheckpoint: the monitor 'loss' has values of single steps only"):
        trainer.fit(Plateau("step"), data)


@pytest.mark.parametrize("callback", [lumen.EarlyStopping("scroe"), lumen.ModelCheckpoint(monitor="scroe")])
def test_never_logged_monitor_raises_and_lists_logged_names(tmp_path, callback):
    with pytest.raises(ConfigError, match="'scroe' was never logged; logged so far: score"):
        fit_scripted(tmp_path, [1, 2], [callback])


def test_a_training_value_can_be_monitored(tmp_path):
    class Logging(Regression):
        def training_step(self, batch):
            loss = super().training_step(batch)
            self.log("epoch_loss", loss, on_step=False, on_epoch=True)
            return loss

    stopping = lumen.EarlyStopping("epoch_loss", patience=0, min_delta=1e9)
    trainer = quiet_trainer(tmp_path, max_epochs=9, callbacks=[stopping])
    trainer.fit(Logging(), loader())
    assert trainer.current_epoch == 2


def test_named_callbacks_can_be_switched_off(tmp_path):
    trainer = quiet_trainer(tmp_path, callbacks={"stop": None, "rate": lumen.LearningRateMonitor()}, max_epochs=1)
    kinds = [type(callback).__name__ for callback in trainer.callbacks]
    assert "EarlyStopping" not in kinds
    assert "LearningRateMonitor" in kinds


def rows(tmp_path, name="run"):
    return read_rows(tmp_path / "runs" / name / "metrics.csv")


# ---------------------------------------------------------------------- functions as callbacks


def test_lambda_callback_runs_only_the_given_hooks(tmp_path):
    calls = []
    functions = lumen.LambdaCallback(
        setup=lambda trainer, task, stage: calls.append(("setup", stage)),
        on_train_batch_end=lambda trainer, task, outputs, batch, batch_idx: calls.append(("batch", batch_idx)),
        on_step_end=lambda trainer, task: calls.append(("boundary", trainer.global_step)),
    )
    trainer = fit_scripted(tmp_path, [1], [functions])
    assert calls == [("setup", "fit"), ("batch", 0), ("boundary", 1), ("batch", 1), ("boundary", 2)]
    of_the_callback = {
        name
        for name in HOOKS
        if any(getattr(hook, "func", None) in vars(functions).values() for hook in getattr(trainer.run.hooks, name))
    }
    assert of_the_callback == {"setup", "on_train_batch_end", "on_step_end"}
    assert not trainer.run.hooks.on_after_backward


def test_a_function_may_end_the_epoch(tmp_path):
    skip = lumen.LambdaCallback(on_train_batch_start=lambda trainer, task, batch, batch_idx: -1 if batch_idx else None)
    assert fit_scripted(tmp_path, [1, 2], [skip]).global_step == 2


# ---------------------------------------------------------------------- time


class Sleepy(Scripted):
    def training_step(self, batch):
        time.sleep(0.05)
        return super().training_step(batch)


def fit_with_timer(tmp_path, timer, task=None, **options):
    data = DataLoader(TensorDataset(torch.arange(8.0)), 2)
    trainer = quiet_trainer(tmp_path, callbacks=[timer, lumen.ModelCheckpoint()], **({"max_epochs": 5} | options))
    trainer.fit(task or Sleepy([1] * 9), data, val_dataloaders=data)
    return trainer


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(("interval", "steps"), [("step", 3), ("epoch", 4)])
def test_timer_ends_training_at_its_limit(tmp_path, interval, steps):
    timer = lumen.Timer({"seconds": 0.12}, interval)
    trainer = fit_with_timer(tmp_path, timer)
    assert trainer.global_step == steps
    assert timer.time_elapsed() == pytest.approx(0.05 * steps)
    assert timer.time_remaining() == pytest.approx(0.12 - 0.05 * steps)


def test_a_timer_waits_for_the_minimum_of_steps(tmp_path):
    assert fit_with_timer(tmp_path, lumen.Timer({"seconds": 0.01}), min_steps=6).global_step == 6


def test_a_timer_tells_the_time_of_each_stage(tmp_path, clock):
    timer = lumen.Timer()
    assert timer.start_time() is timer.end_time("test") is timer.time_remaining() is None
    assert timer.time_elapsed("train") == timer.time_elapsed("validate") == 0.0
    began = clock.now_s
    trainer = fit_with_timer(tmp_path, timer, max_epochs=1)
    assert timer.time_elapsed("train") == pytest.approx(0.2)
    assert began <= timer.start_time("train") <= timer.start_time("validate") <= timer.end_time("validate")
    assert timer.time_elapsed("validate") == timer.end_time("validate") - timer.start_time("validate")

    class Slow(Scripted):
        def test_step(self, batch):
            time.sleep(0.01)

    trainer.test(Slow([1]), DataLoader(TensorDataset(torch.arange(8.0)), 2))
    assert timer.time_elapsed("test") == pytest.approx(0.04)
    assert timer.time_elapsed("train") == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="one of train, validate, test, predict, found 'fit'"):
        timer.time_elapsed("fit")


def test_timer_counts_resumed_time_and_accepts_more(tmp_path, clock):
    first = lumen.Timer({"seconds": 0.12})
    assert fit_with_timer(tmp_path, first).global_step == 3
    same = lumen.Timer({"seconds": 0.12})
    assert fit_with_timer(tmp_path, same, resume="auto").global_step == 3
    longer = lumen.Timer({"seconds": first.time_elapsed() + 0.12})
    trainer = fit_with_timer(tmp_path, longer, resume="auto")
    assert 4 <= trainer.global_step <= 6
    assert longer.time_elapsed() == trainer.run.progress.elapsed_s >= first.time_elapsed() + 0.12


def test_every_clock_stops_when_the_run_fails(tmp_path):
    class Failing(Sleepy):
        def validation_step(self, batch):
            if not self.trainer.sanity_checking:
                raise RuntimeError("on purpose")

    timer = lumen.Timer()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit_with_timer(tmp_path, timer, Failing([1]))
    assert timer.end_time("validate") is not None
    assert timer.end_time("train") is not None


# ---------------------------------------------------------------------- optimizer settings


def fit_with_monitor(tmp_path, monitor, make, **options):
    class Scheduled(Regression):
        def configure_optimizers(self):
            optimizer = make(self.net)
            return [optimizer], [
                {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}
            ]

    trainer = quiet_trainer(tmp_path, callbacks=[monitor], max_epochs=2, log_every_n_steps=1, **options)
    trainer.fit(Scheduled(), loader(32, 16))
    return rows(tmp_path)


def test_lr_monitor_logs_rate_momentum_and_weight_decay(tmp_path):
    monitor = lumen.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    found = fit_with_monitor(
        tmp_path, monitor, lambda net: torch.optim.SGD(net.parameters(), 0.5, momentum=0.75, weight_decay=0.125)
    )
    steps = [row for row in found if row["lr"]]
    assert [float(row["lr"]) for row in steps] == [0.5, 0.25, 0.125, 0.0625]
    assert {(row["momentum"], row["weight_decay"]) for row in steps} == {("0.75", "0.125")}


def test_lr_monitor_logs_first_update_of_each_epoch(tmp_path):
    monitor = lumen.LearningRateMonitor(logging_interval="epoch", log_momentum=True)

    def make(net):
        groups = [{"params": net[0].parameters()}, {"params": net[3].parameters(), "lr": 0.25}]
        return torch.optim.AdamW(groups, 0.5, betas=(0.875, 0.99))

    found = fit_with_monitor(tmp_path, monitor, make)
    logged = [row for row in found if row["lr/group_0"]]
    assert [(row["step"], row["lr/group_0"], row["lr/group_1"]) for row in logged] == [
        ("2", "0.5", "0.25"),
        ("4", "0.125", "0.0625"),
    ]
    assert {row["momentum/group_1"] for row in logged} == {"0.875"}


def test_lr_monitor_names_groups_and_numbers_duplicates(tmp_path):
    def make(net):
        kinds = [{"name": "low"}, {"name": "top"}, {"name": "top", "lr": 0.25}, {}]
        parameters = list(net.parameters())
        return torch.optim.SGD([kind | {"params": [each]} for kind, each in zip(kinds, parameters, strict=True)], 0.5)

    found = fit_with_monitor(tmp_path, lumen.LearningRateMonitor(), make)
    rates = {name: row for row in found[:1] for name, row in row.items() if name.startswith("lr")}
    assert rates == {"lr/low": "0.5", "lr/top 1": "0.5", "lr/top 2": "0.25", "lr/group_3": "0.5"}


def test_lr_monitor_rejects_momentum_the_optimizer_lacks(tmp_path):
    with pytest.raises(ConfigError, match=r"Adagrad has no momentum\. Leave log_momentum out"):
        fit_with_monitor(
            tmp_path, lumen.LearningRateMonitor(log_momentum=True), lambda net: torch.optim.Adagrad(net.parameters())
        )


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lumen.EarlyStopping("x", mode="down"), "mode: expected 'min' or 'max', found 'down'"),
        (lambda: lumen.EarlyStopping("x", patience=-1), "must be >= 0"),
        (lambda: lumen.EarlyStopping("x", pacience=2), "no argument pacience. Did you mean patience"),
        (
            lambda: lumen.ProgressBar(refresh_rate=20),
            "no argument refresh_rate. Use refresh_per_second, which counts in time",
        ),
        (lambda: lumen.ModelSummary(mode="full"), r"no argument mode. See help\(lumen.ModelSummary\)"),
        (lambda: lumen.LearningRateMonitor("batch"), "expected 'step' or 'epoch', found 'batch'"),
        (lambda: lumen.Timer("soon"), "expected a duration"),
        (lambda: lumen.Timer(interval="minute"), "expected 'step' or 'epoch', found 'minute'"),
        (lambda: lumen.LambdaCallback(on_train_epoch_over=print), "Did you mean on_train_epoch_"),
        (lambda: lumen.LambdaCallback(state_dict=print), "For a state in checkpoints, subclass"),
        (lambda: lumen.LambdaCallback(on_fit_end=3), "on_fit_end must be a function, found 3"),
        (lambda: lumen.ThroughputMonitor(window_s=-1), "window_s must be at least 0"),
        (lambda: lumen.ThroughputMonitor(batch_size_fn=len), "Lumen counts the samples of the loader"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
