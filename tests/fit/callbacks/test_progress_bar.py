"""ProgressBar: correct numbers on every terminal and without one, and the terminal restored."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.utils.data import DataLoader, IterableDataset

import lumen
from lumen.callbacks import Callback, ProgressBar
from lumen.callbacks.display import format_duration, format_megabytes, format_number, format_speed
from lumen.errors import ConfigError
from tests.helpers.clock import Clock
from tests.helpers.progress_bar import BATCH, Task, make_loader, make_trainer, replace_console, strip_escapes
from tests.helpers.terminal import HIDE, SHOW


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> ProgressBar:
    """Make the bar draw at every step, even if drawing is slow."""
    monkeypatch.setattr("lumen.callbacks.display._MAX_DRAWING_SHARE", math.inf)
    return ProgressBar(refresh_per_second=1e9, plain_every_s=0.0)


def split_frames(written: str) -> list[str]:
    """Return the texts that the terminal showed, one per drawing."""
    return [strip_escapes(frame) for frame in re.split(r"\r\x1b\[2K(?:\x1b\[1A\x1b\[2K)*", written)]


def find_pairs(text: str) -> Iterator[tuple[int, int]]:
    """Return the shown step, and the number that was logged at this step."""
    for step, value in re.findall(r"step (\d+)\D.*?\bnumber ([\d.]+)", text, re.DOTALL):
        yield int(step), int(float(value))


# ---------------------------------------------------------------------- subclasses


class Renaming(ProgressBar):
    """Bar that removes, renames and formats values, like a bar of Lightning."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        items = super().get_metrics(trainer, pl_module)
        items.pop("v_num", None)
        assert type(items["number"]) is float
        shown = f"{items.pop('number'):.1f} of {self.total_train_batches}"
        return {"n": shown, "rate": torch.tensor(trainer.optimizers[0].param_groups[0]["lr"]), **items}


def test_get_metrics_of_a_subclass_chooses_shown_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, Renaming(plain_every_s=0.0), max_epochs=2).fit(
        Task(), make_loader(3), val_dataloaders=make_loader(1)
    )
    lines = [line for line in written().splitlines() if line.startswith("step 5/6 · ")]
    assert lines[0].startswith("step 5/6 · epoch 2/2 · n 5.0 of 3 · rate 0.01000 · val_number 1003 · ")
    assert "· number " not in written()


@pytest.mark.parametrize("how", ["disable", "enable"])
def test_disabled_bar_shows_nothing_until_enabled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str) -> None:
    written, bar = replace_console(monkeypatch, terminal=False), ProgressBar(plain_every_s=0.0)
    bar.disable()
    getattr(bar, how)()
    assert bar.is_disabled == (how == "disable") != bar.is_enabled
    make_trainer(tmp_path, bar, max_steps=2).fit(Task(), make_loader(3))
    assert ("step 2/2" in written()) == bar.is_enabled
    with pytest.raises(ConfigError, match="no run is in progress"):
        bar.total_train_batches  # noqa: B018


# ---------------------------------------------------------------------- plain lines


def test_plain_lines_hold_everything_in_one_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_epochs=2).fit(
        Task(pause_s=0.002), make_loader(6), val_dataloaders=make_loader(2)
    )
    lines = [line for line in written().splitlines() if re.match(r"step \d+/12 · epoch 2/2 · ", line)]
    assert re.fullmatch(
        r"step 8/12 · epoch 2/2 · number 8\.000 · val_number 1006 · [\d,.]+ steps/s · [\d,.]+ samples/s · "
        r"data \d+ % · [\d.]+ [MG]B · 0:\d\d:\d\d left",
        lines[1],
    )
    assert "\x1b" not in written()


def test_plain_lines_show_a_validation_in_progress(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The line of training has no new values while a validation runs."""
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_epochs=1).fit(
        Task(), make_loader(2), val_dataloaders=make_loader(3)
    )
    lines = written().splitlines()
    assert [done for done in (1, 2, 3) if any(line.startswith(f"validation {done}/3") for line in lines)] == [1, 2, 3]


def test_the_total_follows_data_that_grows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written, data = replace_console(monkeypatch, terminal=False), [(torch.ones(2),)] * 8
    growing = lumen.LambdaCallback(on_train_epoch_end=lambda trainer, task: data.extend(data[:4]))
    bar = ProgressBar(plain_every_s=0.0)
    settings: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    growing_run = lumen.Trainer(default_root_dir=tmp_path, callbacks=[bar, growing], max_epochs=3, **settings)
    growing_run.fit(Task(), DataLoader(data, batch_size=BATCH))
    totals = [int(total) for _, total in re.findall(r"step (\d+)/(\d+) · epoch", written())]
    assert list(dict.fromkeys(totals)) == [6, 8, 9]  # 3 x 2, 2 + 2 x 3, 2 + 3 + 4


def test_total_counts_steps_with_scheduled_accumulation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    bar = ProgressBar(plain_every_s=0.0)
    make_trainer(tmp_path, bar, max_epochs=4, accumulate_grad_batches={1: 2, 3: 6}).fit(Task(), make_loader(6))
    shown = re.findall(r"step (\d+)/(\d+) · epoch (\d)/4", written())
    assert {total for _, total, _ in shown} == {"13"}
    assert dict(map(itemgetter(2, 0), shown)) == {"1": "6", "2": "9", "3": "12", "4": "13"}  # the last of each epoch


def test_plain_lines_show_values_of_their_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_steps=9).fit(Task(), make_loader(20))
    assert list(find_pairs(written())) == [(step, step) for step in range(1, 10)]


def test_samples_per_second_match_steps_and_batch_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_steps=30, accumulate_grad_batches=3).fit(
        Task(pause_s=0.003), make_loader(90)
    )
    rates = [
        (float(steps), float(samples.replace(",", "")))
        for steps, samples in re.findall(r"([\d.]+) steps/s · ([\d.,]+) samples/s", written())
    ]
    assert len(rates) >= 25  # a step that takes a second is written as s/step
    assert all(samples == pytest.approx(steps * 3 * BATCH, rel=0.02) for steps, samples in rates)
    assert rates[-1][0] < 1 / 0.009


@pytest.mark.parametrize("plain_every_s", [0.0, 0.1, 1000.0])
def test_plain_lines_follow_interval_at_validations_and_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock, plain_every_s: float
) -> None:
    written = replace_console(monkeypatch, terminal=False)
    run = make_trainer(tmp_path, ProgressBar(plain_every_s=plain_every_s), max_epochs=4, num_sanity_val_steps=0)
    run.fit(Task(), make_loader(6), val_dataloaders=make_loader(2))
    shown = [line.split(" · ")[:4] for line in written().splitlines() if line.startswith("step")]
    expected = [
        [
            f"step {6 * epoch}/24",
            f"epoch {epoch}/4",
            f"number {format_number(6 * epoch, 4)}",
            f"val_number {1000 + 6 * epoch}",
        ]
        for epoch in (1, 2, 3, 4)
    ]
    assert [line for line in shown if line in expected] == expected
    if plain_every_s == 1000.0:  # otherwise there are lines of single steps too
        assert shown == expected
    assert "took 0:00:0" in written().splitlines()[-2]


def test_no_time_is_left_when_no_step_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_steps=5).fit(Task(pause_s=0.01), make_loader(5))
    assert re.findall(r"step (\d)/5 .* · (0:00:\d\d left|took)", written()) == [
        *((str(step), "0:00:01 left") for step in range(1, 5)), ("5", "took"),
    ]  # fmt: skip


def test_default_bar_shows_loss_and_first_validation_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    task = Task(bar=False)
    make_trainer(tmp_path, max_epochs=1).fit(task, make_loader(5), val_dataloaders=make_loader(2))
    assert f"loss {format_number(task.losses[-1], 4)} · val_number 1005 · unasked 7.000 · " in written()


def test_epoch_mean_is_shown_once_available(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Means(Task):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            self.log("mean", float(self.global_step), on_step=False, on_epoch=True, prog_bar=True)
            return super().training_step(batch)

    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_epochs=2).fit(Means(), make_loader(3))
    shown = re.findall(r"step (\d)/6 .*? · mean ([\d.]+)", written())
    assert shown == [(step, "1.000") for step in "345"] + [("6", "4.000")]


def test_the_sanity_check_leaves_no_values_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_steps=2).fit(
        Task(), make_loader(5), val_dataloaders=make_loader(2)
    )
    assert "sanity check 1/2" in written()
    assert "val_number" not in written()


def test_a_time_limit_tells_the_time_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_time=timedelta(hours=30), max_epochs=1).fit(
        Task(), make_loader(3)
    )
    assert "step 3/3 " in written()
    written = replace_console(monkeypatch, terminal=False)
    stop = Task()
    stop.at[2] = lambda: setattr(stop.trainer, "should_stop", True)
    make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_time=timedelta(hours=30)).fit(stop, make_loader(3))
    assert re.search(r"^step 1 · epoch 1 · number 1.000 .* · 1 day, [56]:\d\d:\d\d left$", written(), re.MULTILINE)


def test_data_without_length_has_no_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Stream(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            return iter([[torch.ones(BATCH, 2)]] * 3)

    written = replace_console(monkeypatch, terminal=True)
    task = Task(pause_s=0.01)
    task.at[8] = lambda: setattr(task.trainer, "should_stop", True)
    make_trainer(tmp_path, max_time=timedelta(hours=1)).fit(task, DataLoader(Stream(), batch_size=None))
    assert "step 0 · epoch 0 ━" in strip_escapes(written())  # the bar of the time limit
    written = replace_console(monkeypatch, terminal=True)
    make_trainer(tmp_path, max_epochs=2).fit(Task(pause_s=0.01), DataLoader(Stream(), batch_size=None))
    assert re.search(r"step 6 · epoch 2/2 · took", split_frames(written())[-1])
    assert "━" not in written()


def test_evaluation_ends_in_one_line_with_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for terminal in (False, True):
        written = replace_console(monkeypatch, terminal=terminal)
        task, judge = Task(), make_trainer(tmp_path)
        judge.test(task, [make_loader(2), make_loader(3)])
        judge.validate(task, make_loader(4))
        judge.predict(task, make_loader(3))
        text = re.sub(r"\s+", " ", strip_escapes(written()))
        assert re.search(
            r"test 5/5 · (took 0:00:\d\d |)test_a/dataloader_idx_0 0.000 · test_b/dataloader_idx_0 1", text
        )
        assert re.search(r"validation 4/4 · (took 0:00:\d\d |)val_number 1000", text)
        assert "predict 3/3 · took 0:00:" in text
        assert "step" not in text
        assert written().count(HIDE) == written().count(SHOW) == 3 * terminal


class LogsGivenValues(Task):
    """Task whose validations return given values and take a second each; each of its steps takes a tenth."""

    def __init__(self, *scores: float) -> None:
        super().__init__(pause_s=0.1)
        self.scores = scores

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        time.sleep(1.0)
        self.log_dict({"score": self.scores[self.global_step // 5 - 1], "a": 1.0, "b": 2.0, "c": 3.0})


def fit_judged(folder: Path, bar: ProgressBar, steps: int, *scores: float, **options: Any) -> None:
    """Train with a validation after every fifth step."""
    settings: dict[str, Any] = {"enable_checkpointing": True, "num_sanity_val_steps": 0, **options}
    run = make_trainer(folder, bar, max_steps=steps, val_check_interval=5, **settings)
    run.callbacks.insert(0, lumen.ModelCheckpoint(monitor="score", mode="max", keep_last=1))
    run.fit(LogsGivenValues(*scores), make_loader(100), val_dataloaders=make_loader(1))


def test_time_left_includes_remaining_validations(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock
) -> None:
    written = replace_console(monkeypatch, terminal=False)
    fit_judged(tmp_path, ProgressBar(plain_every_s=0.0), 24, *[1.0] * 4, enable_checkpointing=False)
    left = re.findall(r"^step (\d+)/24 .* · 0:00:(\d\d) left$", written(), re.MULTILINE)
    seconds = {int(step): int(left_s) for step, left_s in left}
    assert seconds == {
        step: math.ceil(round(0.1 * (24 - step) + (step >= 5) * (4 - step // 5), 6)) for step in range(1, 24)
    }


def test_best_validation_is_marked_also_after_resume(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for steps, scores, resume in ((15, (0.5, 0.75, 0.25), None), (25, (0, 0, 0, 0.625, 0.875), "auto")):
        written = replace_console(monkeypatch, terminal=False)
        fit_judged(tmp_path, ProgressBar(plain_every_s=0.0), steps, *scores, name="run", resume=resume)
        best = re.findall(r"^step (\d+)/.* score ([\d.]+) \(best so far\) ", written(), re.MULTILINE)
        assert best == ([("5", "0.5000"), ("10", "0.7500")] if resume is None else [("25", "0.8750")])


# ---------------------------------------------------------------------- the live bar


def test_each_validation_leaves_one_line_above_the_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    for options in ({}, {"enable_progress_bar": False}):
        written = replace_console(monkeypatch, terminal=True)
        run = make_trainer(tmp_path, max_steps=15, val_check_interval=5)
        run.callbacks = [each for each in run.callbacks if not options or not isinstance(each, ProgressBar)]
        run.callbacks.append(lumen.EarlyStopping("score", mode="max"))
        run.fit(LogsGivenValues(0.5, 0.75, 0.25), make_loader(100), val_dataloaders=make_loader(1))
        lines = [line for line in strip_escapes(written()).splitlines() if " · score " in line and "MB" not in line]
        assert [line for line in lines if line.startswith("step")] == (
            []
            if options
            else [
                "step 5/15 · epoch 1 · number 5.000 · score 0.5000 (best so far) · a 1.000",
                "step 10/15 · epoch 1 · number 10.00 · score 0.7500 (best so far) · a 1.000",
            ]
        )
        last = {line.partition(" · took")[0] for line in strip_escapes(written()).splitlines() if "took" in line}
        assert last == (set() if options else {"step 15/15 · epoch 1"})  # The last picture has the values of this step.


class LogsLongNames(Task):
    """Task whose validations log values that do not fit into one line of a terminal."""

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        self.log_dict({f"val_value_with_a_long_name_{name}": float(self.global_step) for name in "abcd"}, prog_bar=True)


@pytest.mark.parametrize("width", [50, 80, 140])
def test_terminal_keeps_whole_values_of_the_pipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, width: int) -> None:
    pipe = replace_console(monkeypatch, terminal=False)
    make_trainer(tmp_path, max_epochs=3).fit(LogsLongNames(), make_loader(5), val_dataloaders=make_loader(1))
    of_pipe = [line.split(" · ")[:-4] for line in pipe().splitlines() if line.startswith("step")]
    written = replace_console(monkeypatch, terminal=True, width=width)
    make_trainer(tmp_path, max_epochs=3).fit(LogsLongNames(), make_loader(5), val_dataloaders=make_loader(1))
    text = strip_escapes(written()).replace("\r", "\n")
    assert all(len(line) <= width for line in text.splitlines())
    rows = re.findall(r"^(step \d+/15 · epoch \d/3 · number .*(?:\n  .*)*)$", text, re.MULTILINE)
    of_terminal = [[each for line in row.split("\n  ") for each in line.split(" · ")] for row in rows]
    assert [len(each) for each in of_terminal] == [7, 7]
    assert [each[:7] for each in of_pipe] == [*of_terminal, *[each[:7] for each in of_pipe[2:]]]
    last = text[text.rindex("step 15/15 · epoch 3/3 · took") :].splitlines()
    assert [each for line in last[1:] for each in line.split(" · ")][:5] == of_pipe[2][2:7]


@pytest.mark.parametrize("width", [50, 80, 140])
def test_a_terminal_shows_everything_within_its_width(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every_step: ProgressBar, width: int
) -> None:
    written = replace_console(monkeypatch, terminal=True, width=width)
    make_trainer(tmp_path, every_step, max_epochs=2, log_level="WARNING").fit(
        Task(pause_s=0.002), make_loader(20), val_dataloaders=make_loader(8)
    )
    seen = split_frames(written())
    assert all(len(line) <= width for frame in seen for line in frame.splitlines())
    training = [frame for frame in seen if re.search(r"step (2[1-9]|3\d)/40 · epoch 2/2", frame)]
    assert len(training) == 19
    rest = re.sub(r"\s+", " ", training[-2])
    assert re.search(
        r"(━|2/2) \d+ % · 0:\d\d:\d\d left number \d\d.00 · val_number 1020 (· )?[\d.,]+ steps/s · "
        r"[\d.,]+ samples/s (· )?data \d+ % · [\d.]+ [MG]B",
        rest,
    ), rest
    assert any("━" in frame and "validation " in frame for frame in seen)
    assert all(any(f"validation {done}/8" in frame for frame in seen) for done in range(9))
    assert "step 40/40 · epoch 2/2 · took 0:" in seen[-1]
    assert "validation" not in seen[-1]


def test_frames_show_values_of_their_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every_step: ProgressBar
) -> None:
    written = replace_console(monkeypatch, terminal=True)
    make_trainer(tmp_path, every_step, max_steps=30).fit(Task(), make_loader(20))
    shown = [pair for frame in split_frames(written()) for pair in find_pairs(frame)]
    assert all(step == value for step, value in shown)
    assert {step for step, _ in shown} == set(range(1, 31))


def test_bar_covers_epoch_or_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every_step: ProgressBar) -> None:
    written = replace_console(monkeypatch, terminal=True)
    make_trainer(tmp_path, every_step, max_epochs=3).fit(Task(), make_loader(20))
    shown = re.findall(r"step (\d+)/60 · epoch (\d)/3 [━╸╺]+ (\d+) %", strip_escapes(written()))
    assert len(shown) >= 60
    expected = {(step, step // 20 + 1, step % 20 * 5) for step in range(1, 60) if step % 20}
    expected |= {(0, 0, 0), (20, 1, 100), (40, 2, 100)}
    assert {(int(step), int(epoch), int(percent)) for step, epoch, percent in shown} == expected

    written = replace_console(monkeypatch, terminal=True)
    make_trainer(tmp_path, every_step, max_steps=10).fit(Task(), make_loader(20))
    shown = re.findall(r"step (\d+)/10 · epoch [01] [━╸╺]+ (\d+) %", strip_escapes(written()))
    assert len(shown) >= 10
    assert all(int(percent) == 10 * int(step) for step, percent in shown)


def test_terminal_refresh_rate_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    written = replace_console(monkeypatch, terminal=True)
    start = clock.read()
    make_trainer(tmp_path, ProgressBar(refresh_per_second=5), max_steps=100).fit(Task(pause_s=0.01), make_loader(100))
    took_s = clock.read() - start
    assert 3 <= len(split_frames(written())) <= 5 * took_s + 4  # also at the start, at the end, and at closing


def test_a_slow_terminal_is_drawn_less_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clock: Clock) -> None:
    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            time.sleep(0.003)
            return super().write(text)

    screen = Console(file=Slow(), force_terminal=True, width=80, soft_wrap=True, _environ={"TERM": "xterm"})
    monkeypatch.setattr("lumen.console.console", screen)
    start = clock.read()
    make_trainer(tmp_path, ProgressBar(refresh_per_second=1e9), max_steps=100).fit(Task(pause_s=0.01), make_loader(100))
    took_s = clock.read() - start
    assert 3 <= len(split_frames(screen.file.getvalue())) <= took_s / 0.3 + 4  # 0.003 s is 1 % of 0.3 s


def test_messages_stay_whole_above_the_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written = replace_console(monkeypatch, terminal=True)
    task = Task(pause_s=0.01)
    task.at[5] = lambda: task.print("[first] message")
    make_trainer(tmp_path, max_steps=20).fit(task, make_loader(20))
    above = next(frame for frame in split_frames(written()) if "message" in frame)
    message, bar, *_ = above.splitlines()
    assert message == "[first] message"
    assert bar.startswith("step ")
    assert split_frames(written())[-1].splitlines()[-1] == "finished: max_steps=20 reached at step 20, epoch 1"


def fail() -> None:
    raise RuntimeError("a mistake of the user")


class FailsInValidation(Callback):
    def on_validation_batch_end(self, *arguments: Any, **more: Any) -> None:
        fail()


@pytest.mark.parametrize("place", ["step", "validation", "stop"])
def test_no_live_display_remains_after_error_or_stop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    written = replace_console(monkeypatch, terminal=True)
    task = Task(pause_s=0.01)
    task.at = {12: {"step": fail, "stop": lambda: os.kill(os.getpid(), signal.SIGINT)}.get(place, lambda: None)}
    run = make_trainer(tmp_path, max_epochs=1, num_sanity_val_steps=0)
    run.callbacks += [FailsInValidation()] * (place == "validation")
    with pytest.raises(KeyboardInterrupt if place == "stop" else RuntimeError):
        run.fit(task, make_loader(20), val_dataloaders=make_loader(2))
    assert written().count(HIDE) == 1
    assert SHOW in written().rpartition(HIDE)[2]
    ends = {
        "step": "step 11/20 · epoch 1/1 · failed in step 12 after 0:",
        "validation": "step 20/20 · epoch 1/1 · failed in the validation after 0:",
        "stop": "step 12/20 · epoch 1/1 · stopped after 0:",
    }
    last = split_frames(written())[-1]
    assert last.startswith(ends[place])
    assert [*find_pairs(last)] == {"step": [], "validation": [(20, 20)], "stop": [(12, 12)]}[place]
    assert "━" not in last
    before = written()
    lumen.console.console.print("afterwards")
    assert written().removeprefix(before) == "afterwards\n"


# ---------------------------------------------------------------------- costs


def test_the_bar_does_not_change_the_training(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Drops(Task):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            return super().training_step([torch.nn.functional.dropout(batch[0])])

    weights = []
    for shown in (True, False):
        replace_console(monkeypatch, terminal=True)
        torch.manual_seed(0)
        task = Drops()
        lumen.Trainer(
            max_epochs=3, seed=1, logger=False, enable_checkpointing=False, enable_progress_bar=shown,
            callbacks=ProgressBar(refresh_per_second=1e6) if shown else None, default_root_dir=tmp_path,
        ).fit(task, make_loader(20), val_dataloaders=make_loader(3))  # fmt: skip
        weights.append(task.net.weight.detach().clone())
    assert torch.equal(*weights)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.cuda
def test_showing_never_waits_for_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Allows(Callback):
        def __init__(self, mode: str) -> None:
            self.mode = mode

        def on_step_end(self, trainer: lumen.Trainer, task: lumen.TaskModule) -> None:
            torch.cuda.set_sync_debug_mode(self.mode)

    class OnDevice(Task):
        def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
            loss = super().training_step(batch)
            self.log("on_device", loss * 0 + self.global_step + 1, prog_bar=True)
            return loss

    written = replace_console(monkeypatch, terminal=False)
    run = make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), max_steps=50, accelerator="cuda")
    run.callbacks = [Allows("error"), *run.callbacks, Allows("default")]
    run.fit(OnDevice(), make_loader(50))
    shown = re.findall(r"step (\d+)/50 .*number ([\d.]+) · on_device ([\d.]+) ", written())
    assert len(shown) >= 10
    assert all(int(step) == float(value) == float(on_device) for step, value, on_device in shown)


# ---------------------------------------------------------------------- format of numbers


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (2.7312, 4, "2.731"), (2.8, 4, "2.800"), (0.0, 4, "0.000"), (1234.4, 4, "1234"), (12345.6, 4, "12,346"),
        (-98765.4, 4, "-98,765"), (2.7312e-5, 4, "2.731e-05"), (3e12, 4, "3.000e+12"), (float("nan"), 4, "nan"),
        (517.2, 3, "517"), (43.14, 3, "43.1"),
    ],
)  # fmt: skip
def test_numbers_have_as_many_digits_as_say_something(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_slow_steps_are_written_as_seconds_per_step() -> None:
    assert format_speed(43.14, "step") == "43.1 steps/s"
    assert format_speed(0.4, "step") == "2.50 s/step"
    assert format_megabytes(612.4) == "612 MB"
    assert format_megabytes(12_345.0) == "12.3 GB"
    assert format_duration(3723.4) == "1:02:03"


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match="refresh_per_second must be more than 0, found 0"):
        ProgressBar(refresh_per_second=0)
    with pytest.raises(ConfigError, match="plain_every_s must be at least 0, found -1"):
        ProgressBar(plain_every_s=-1)
