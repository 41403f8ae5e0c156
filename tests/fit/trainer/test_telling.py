"""Messages at the beginning and the end of a run: correct statements, and commands that work."""

import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, IterableDataset

import lumen
from lumen.cli import main
from tests.helpers.cli_tasks import Line, Points
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer
from tests.helpers.working_directory import LINE, find_commands


class Judged(Regression):
    """Task whose validations return given values, one after the other."""

    def __init__(self, *values):
        super().__init__()
        self.values = values

    def validation_step(self, batch):
        self.log("score", self.values[self.current_epoch])


def read_lines(capsys, tmp_path):
    """Return the text on the terminal, without the directory of the test."""
    return capsys.readouterr().err.replace(f"{tmp_path}/", "").splitlines()


def test_start_names_device_precision_and_step_size(tmp_path, capsys):
    threads = torch.get_num_threads()
    for options, said in (
        ({}, "fp32 · global batch 8"),
        ({"precision": "bf16", "accumulate_grad_batches": 3}, "bf16 · global batch 24 = 8 x accumulate 3"),
        ({"global_batch_size": 16}, "fp32 · global batch 16 = 8 x accumulate 2"),
        ({"accumulate_grad_batches": {0: 1, 1: 2}}, "fp32"),
    ):
        quiet_trainer(tmp_path, max_steps=1, log_level="INFO", **options).fit(Regression(), loader())
        assert read_lines(capsys, tmp_path)[1] == f"CPU, {threads} thread{'s' * (threads > 1)} · {said} · seed 3"


def test_unknown_step_size_is_not_shown(tmp_path, capsys):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.ones(4, FEATURES), torch.ones(4, 1))] * 3)

    quiet_trainer(tmp_path, max_steps=1, log_level="INFO").fit(Regression(), DataLoader(Stream(), batch_size=None))
    assert "global batch" not in capsys.readouterr().err


def test_end_names_best_checkpoint_and_working_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver = lumen.ModelCheckpoint(monitor="score", mode="max")
    quiet_trainer(tmp_path, max_epochs=3, log_level="INFO", callbacks=saver).fit(
        Judged(0.25, 0.75, 0.5), loader(), val_dataloaders=loader()
    )
    said = read_lines(capsys, tmp_path)
    told = said[said.index("finished: max_epochs=3 reached at step 21, epoch 3") + 1 :]
    assert told == [
        "best: score 0.7500 in runs/run/checkpoints/step-00000014",
        'longer: Trainer(..., name="run", resume="auto", max_epochs=6).fit(...)',
        "curves: lumen report runs/run",
        "weights: lumen export runs/run/checkpoints/step-00000014 --output run.safetensors",
    ]
    for line in told[2:]:
        assert main(shlex.split(line)[2:]) == 0, line
    assert {path.suffix for path in tmp_path.iterdir() if path.is_file()} == {".html", ".safetensors"}


@pytest.mark.parametrize(
    ("monitor", "then"),
    [("score", ""), ("scor", " Did you mean score?"), ("x", " The code of Judged never names it.")],
)
def test_monitor_without_value_is_reported_at_end(tmp_path, capsys, monitor, then):
    callbacks = [lumen.EarlyStopping(monitor), lumen.ModelCheckpoint(monitor=monitor)]
    fit = quiet_trainer(tmp_path, max_steps=2, val_check_interval=3, log_level="INFO", callbacks=callbacks).fit
    fit(Judged(0.25), loader(), val_dataloaders=loader())
    had_nothing = "EarlyStopping and ModelCheckpoint took no action."
    told = f"{monitor} had no value: the run ended before its first validation. {had_nothing}{then}"
    assert read_lines(capsys, tmp_path).count(told) == 1


def test_monitor_with_value_is_not_reported(tmp_path, capsys):
    saver = lumen.ModelCheckpoint(monitor="score")
    quiet_trainer(tmp_path, max_steps=4, val_check_interval=3, log_level="INFO", callbacks=saver).fit(
        Judged(0.25), loader(), val_dataloaders=loader()
    )
    assert "had no value" not in capsys.readouterr().err


CONFIG = LINE.replace("max_steps: 2", "max_epochs: 1")
CYCLE = "{class_path: OneCycleLR, init_args: {max_lr: 0.1, total_steps: 3}}"
STOPS = "{stops: {class_path: EarlyStopping, init_args: {monitor: val_loss, mode: max, patience: 1}}}"
SITUATIONS = {
    "plain": (),
    "cycle": ("--optimizer", "SGD", "--lr_scheduler", CYCLE, "--lr_schedule.interval", "step"),
    "cosine": ("--optimizer", "SGD", "--lr_scheduler", "CosineAnnealingLR", "--lr_scheduler.T_max", "2"),
    "stopped": ("--trainer.callbacks", STOPS, "--trainer.max_epochs", "2", "--model.lr", "0"),
    "averaged": ("--trainer.callbacks+", "{class_path: EMA, init_args: {decay: 0.5}}"),
    "best": ("--trainer.callbacks+", "{class_path: ModelCheckpoint, init_args: {monitor: val_loss}}"),
}


@pytest.mark.usefixtures("config_directory")
@pytest.mark.parametrize("situation", SITUATIONS)
def test_every_printed_command_runs(capsys, situation):
    assert main(["fit", "--config", "line.yaml", *SITUATIONS[situation]]) == 0
    printed = find_commands(capsys.readouterr().err)
    expected = {"curves", "weights"} | ({"longer"} if situation not in ("cycle", "stopped") else set())
    assert printed.keys() == expected
    for name, command in printed.items():
        assert main(shlex.split(command)[1:]) == 0, command
        if name == "longer":
            assert "\nfinished: max_epochs=2 reached" in capsys.readouterr().err


class EndsOnce(lumen.Callback):
    """Callback that ends the first attempt of a run at step 3: by an error, or by the signal of a scheduler."""

    def __init__(self, by: str):
        self.by, self.mark = by, Path("ended")

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == 3 and not self.mark.exists():
            self.mark.touch()
            if self.by == "error":
                raise KeyError("a mistake")
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("config_directory")
@pytest.mark.parametrize("by", ["error", "signal"])
def test_printed_resuming_commands_run(capsys, by):
    saver = "{class_path: ModelCheckpoint, init_args: {every_n_train_steps: 2}}"
    ends = f"{{class_path: tests.fit.trainer.test_telling.EndsOnce, init_args: {{by: {by}}}}}"
    callbacks = ["--trainer.callbacks+", saver, "--trainer.callbacks+", ends]
    with pytest.raises((KeyError, SystemExit)) as caught:
        main(["fit", "--config", "line.yaml", *callbacks, "--trainer.max_epochs", "3"])
    said = "\n".join([capsys.readouterr().err, *getattr(caught.value, "__notes__", [])])
    (command,) = re.findall(r"Resume with:\n  (lumen .*)$", said, re.MULTILINE)
    assert main(shlex.split(command)[1:]) == 0
    assert "finished: max_epochs=3 reached" in capsys.readouterr().err


@pytest.mark.usefixtures("config_directory")
def test_longer_commands_of_scripts_name_the_script(monkeypatch, capsys):
    """`lumen fit` does not know the script's classes and options."""
    ended, words = [], ["train.py", "fit", "--config", "own.yaml"]
    own = yaml.safe_load(CONFIG)
    del own["model"]["class_path"], own["data"]["class_path"]
    Path("own.yaml").write_text(yaml.safe_dump(own | {"model": own["model"]["init_args"], "data": {}}))
    for last in (1, 2):
        monkeypatch.setattr(sys, "argv", words)
        monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-u", *words])
        ended.append(lumen.CLI(Line, Points).trainer.global_step)
        program, *words = shlex.split(find_commands(capsys.readouterr().err)["longer"])
        assert [program, words.pop(0)] == [Path(sys.executable).name, "-u"], last
    assert ended[1] == 2 * ended[0]


def test_suggested_time_limit_keeps_its_format(tmp_path, capsys):
    trainer = quiet_trainer(tmp_path, max_time="00:00:00:01", log_level="INFO")
    trainer.fit(Regression(), loader())
    assert 'resume="auto", max_time="00:00:00:02").fit(...)' in capsys.readouterr().err


def test_nothing_is_named_that_does_not_exist(tmp_path, capsys):
    stops = lumen.EarlyStopping("score", patience=1)
    for options, told in (
        ({"logger": False, "enable_checkpointing": False}, []),
        ({"enable_checkpointing": False}, ["curves"]),
        ({"enable_checkpointing": False, "callbacks": stops}, ["best", "curves"]),
        ({"logger": False}, ["newest checkpoint", "longer", "weights"]),
        ({"callbacks": stops, "max_epochs": 3}, ["best", "curves", "weights"]),  # the run did not end at a limit
        ({"callbacks": stops, "max_epochs": 2}, ["best", "curves", "weights"]),  # a longer run would end there too
    ):
        task = Judged(1.0, 2.0, 3.0)
        quiet_trainer(tmp_path, **{"log_level": "INFO", "max_epochs": 1} | options).fit(task, loader(), loader())
        _, *said = capsys.readouterr().err.partition("finished: ")[2].splitlines()
        assert [line.partition(":")[0] for line in said] == told, options
        if "best" in told:
            assert said[0].startswith("best: score 1.000")


def test_a_quiet_run_says_nothing(tmp_path, capsys):
    quiet_trainer(tmp_path, max_steps=1).fit(Regression(), loader())
    assert capsys.readouterr() == ("", "")


class Fails(lumen.Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        if trainer.global_step == self.step:
            raise KeyError("a mistake")


@pytest.mark.parametrize(("step", "saved"), [(3, None), (10, "step-00000007")])
def test_failure_names_log_and_how_to_resume(tmp_path, step, saved):
    with pytest.raises(KeyError) as caught:
        quiet_trainer(tmp_path, max_epochs=2, callbacks=Fails(step)).fit(Regression(), loader())
    run = tmp_path / "runs" / "run"
    _, log, *others = caught.value.__notes__
    assert log == f"The log of the run is {run / 'run.log'}."
    assert "KeyError: 'a mistake'" in (run / "run.log").read_text()
    assert [each.partition(". Resume with:\n  ")[0] for each in others] == (
        [f"The newest checkpoint is {run / 'checkpoints' / saved}"] if saved else []
    )
    assert all('Trainer(..., name="run", resume="auto")' in each for each in others)


def test_failure_before_start_names_no_log(tmp_path):
    class Unready(Regression):
        def configure_optimizers(self):
            raise KeyError("a mistake")

    with pytest.raises(KeyError) as caught:
        quiet_trainer(tmp_path, max_epochs=2).fit(Unready(), loader())
    assert "run.log" not in "".join(getattr(caught.value, "__notes__", []))
