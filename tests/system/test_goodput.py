"""Goodput: the time of a run by bucket, from its directory, across a kill and a restart."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import lumen
from lumen.cli import main
from lumen.run import goodput as measuring
from lumen.trainer import status_messages
from tests.helpers import ROOT
from tests.helpers.tasks import Regression, loader

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
PROGRAM = """
import sys, time, lumen
from tests.helpers.tasks import Regression, loader

class Slow(Regression):
    def training_step(self, batch):
        time.sleep(0.02)
        return super().training_step(batch)

    def validation_step(self, batch):
        time.sleep(0.02)

saves = lumen.ModelCheckpoint(every_n_train_steps=20)
lumen.Trainer(name="slow", max_steps=int(sys.argv[1]), resume="auto", callbacks=[saves], max_epochs=None,
    log_every_n_steps=1,
).fit(
    Slow(), loader(), loader()
)
"""


def fit(tmp_path, steps, *callbacks):
    trainer = lumen.Trainer(
        max_steps=steps, name="run", default_root_dir=tmp_path, resume="auto", enable_progress_bar=False,
        callbacks=[*callbacks],
    )  # fmt: skip
    trainer.fit(Regression(), loader())
    return trainer.global_step


class Stopped(lumen.Callback):
    """Callback that sends this process a signal in the second step."""

    def __init__(self, number):
        self.number = number

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 1:
            os.kill(os.getpid(), self.number)


def move_into_the_past(run, seconds):
    """Let a run have ended earlier, by its record of time and by its files."""
    file = run / measuring.FILE
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    moved = [line | {key: line[key] - seconds for key in ("from_s", "to_s")} for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in moved))
    for name in measuring._ACTIVITY_FILES:
        if (run / name).exists():
            os.utime(run / name, (time.time() - seconds,) * 2)


@pytest.mark.parametrize(
    ("number", "has_terminal", "queue_s"),
    [
        (signal.SIGINT, False, 0),
        (signal.SIGTERM, False, 1800),
        (signal.SIGUSR1, False, 1800),
        (signal.SIGTERM, True, 0),
    ],
)
def test_only_preempted_runs_wait_in_a_queue(tmp_path, monkeypatch, number, has_terminal, queue_s):
    monkeypatch.setitem(measuring._process_state, "is_age_counted", True)
    ours, theirs = os.openpty()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(tmp_path, 4, Stopped(number))
    move_into_the_past(tmp_path / "run", 1800)
    with open(theirs if has_terminal else os.devnull) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        assert fit(tmp_path, 4) == 4
    os.close(ours)
    spent = lumen.goodput(tmp_path / "run")
    assert spent.spent_s["queue"] == pytest.approx(queue_s, abs=60)
    assert spent.wall_s == pytest.approx(sum(spent.spent_s.values()))
    assert spent.lives == 2


def test_start_of_a_finished_run_is_not_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(status_messages, "_MIN_REPORTED_S", 0.0)
    assert fit(tmp_path, 3) == 3
    record = (tmp_path / "run" / measuring.FILE).read_bytes()
    assert "\ngoodput " in capsys.readouterr().err
    assert fit(tmp_path, 3) == 3
    assert "nothing to do: " in (said := capsys.readouterr().err)
    assert "goodput" not in said
    assert (tmp_path / "run" / measuring.FILE).read_bytes() == record
    assert fit(tmp_path, 5) == 5
    assert lumen.goodput(tmp_path / "run").lives == 2


@pytest.mark.slow
def test_times_sum_to_wall_time_across_restarts(tmp_path):
    command, run = [sys.executable, "-c", PROGRAM], tmp_path / "runs/slow"
    begun = time.time()
    first = subprocess.Popen([*command, "1000000"], env=ENVIRONMENT, cwd=tmp_path, stderr=subprocess.DEVNULL)
    while not list(run.glob("checkpoints/step-*40/manifest.json")):
        assert first.poll() is None
        time.sleep(0.05)
    while int((run / "metrics.csv").read_text().splitlines()[-2].partition(",")[0]) % 20 < 8:
        assert first.poll() is None
        time.sleep(0.01)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    with open(run / "goodput.jsonl", "a") as file:
        file.write('{"life": 1, "fro')  # a torn line
    time.sleep(1)
    ended = subprocess.run([*command, "80"], env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    wall_s = time.time() - begun
    assert ended.returncode == 0, ended.stderr
    spent = lumen.goodput(run)
    assert spent.lives == 2
    assert sum(spent.spent_s.values()) == pytest.approx(spent.wall_s, rel=0.01)
    assert 0.3 * wall_s < spent.wall_s <= wall_s - 0.9  # the second between the starts does not count
    assert spent.spent_s["queue"] == 0
    assert spent.spent_s["lost"] > 0.05
    assert spent.spent_s["step"] >= 40 * 0.02 * 0.9  # of the second start, at least
    assert min(spent.spent_s[name] for name in ("startup", "evaluation", "checkpoint")) > 0


def test_steps_that_were_computed_again_are_not_productive(tmp_path):
    lines = [
        {"life": 1, "from_s": 0, "to_s": 2, "step": 0, "spent": {"startup": 2}},
        {"life": 1, "from_s": 2, "to_s": 12, "step": 10, "spent": {"step": 8, "data": 2}},
        {"life": 1, "from_s": 12, "to_s": 13, "lost": True},
        {"life": 2, "from_s": 16, "to_s": 17, "step": 5, "spent": {"startup": 1}, "queued": True},
        {"life": 2, "from_s": 17, "to_s": 20, "step": 10, "spent": {"step": 3}},
    ]
    (tmp_path / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spent = lumen.goodput(tmp_path)
    told = {name: seconds for name, seconds in spent.spent_s.items() if seconds}
    assert told == {"startup": 3, "data": 1, "step": 7, "lost": 6, "queue": 3}
    assert (spent.wall_s, spent.goodput, spent.lives) == (20, 7 / 20, 2)
    assert str(spent) == "goodput 35 % of 20 s: startup 15 %, data 5 %, lost 30 %, queue 15 %"


def test_goodput_is_printed_after_a_minute(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(
        measuring._process_state, "is_age_counted", True
    )  # the time since these tests began is no start
    for minute_s, told in ((60.0, False), (0.0, True)):
        monkeypatch.setattr(status_messages, "_MIN_REPORTED_S", minute_s)
        trainer = lumen.Trainer(max_steps=3, default_root_dir=tmp_path, enable_progress_bar=False)
        trainer.fit(Regression(), loader())
        assert ("\ngoodput " in capsys.readouterr().err) is told


def test_the_list_of_runs_tells_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lumen.Trainer(name="told", max_steps=3, enable_progress_bar=False).fit(Regression(), loader())
    capsys.readouterr()
    assert main(["runs", "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    spent = lumen.goodput("runs/told")
    assert shown["goodput"]["share"] == spent.goodput > 0
    assert shown["goodput"]["spent_s"] == spent.spent_s


def test_unwritable_goodput_record_does_not_end_training(tmp_path, monkeypatch):
    monkeypatch.setattr(status_messages, "_MIN_REPORTED_S", 0.0)
    place = tmp_path / "run" / measuring.FILE

    class Taken(lumen.Callback):
        def on_train_start(self, trainer, task):
            place.unlink(missing_ok=True)
            place.symlink_to(tmp_path / "nowhere" / "at all")

    assert fit(tmp_path, 3, Taken()) == 3
    place.unlink()
    place.mkdir()
    assert fit(tmp_path, 6) == 6
    place.rmdir()
    of_others = [3, {"life": "a"}, {"life": 1, "from_s": 0, "to_s": 1, "step": 2, "spent": {"x": 1}}, {"life": 1}]
    place.write_text("\n".join(map(json.dumps, of_others)))
    assert fit(tmp_path, 8) == 8
    assert lumen.goodput(tmp_path / "run").lives == 1


def test_directory_without_goodput_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no goodput.jsonl in .*: is it the directory of a run\?"):
        lumen.goodput(tmp_path)
