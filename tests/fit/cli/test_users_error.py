"""Errors in a user's code, as the command shows them: the user's lines, and the step of the run."""

import re
import sys
from pathlib import Path

import pytest

from lumen.cli import main
from lumen.cli.user_errors import fold_traceback
from tests.helpers import ROOT

CONFIG = """\
seed_everything: 7
model: {class_path: failing.Task}
data: {class_path: failing.Data}
trainer: {max_epochs: 2, enable_progress_bar: false, enable_model_summary: false}
"""
CODE = """\
import torch
from torch.utils.data import DataLoader, Dataset

import lumen
from tests.helpers.cli_tasks import Line


class Rows(Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == self.bad:
            raise KeyError(f"no row {index}")
        return torch.ones(3), torch.ones(1)


class Data(lumen.DataModule):
    def __init__(self, bad: int = -1, workers: int = 0):
        super().__init__()
        self.bad, self.workers = bad, workers

    def train_dataloader(self):
        return DataLoader(Rows(self.bad), 2, num_workers=self.workers)

    def val_dataloader(self):
        return DataLoader(Rows(-1), 2)


class Task(Line):
    def __init__(self, where: str = ""):
        super().__init__(3)
        self.where = where

    def fail(self, where):
        if self.where == where:
            raise RuntimeError("a mistake")

    def training_step(self, batch, batch_idx):
        if self.global_step == 5 and self.where == "shape":
            batch = [batch[0][:, :2], batch[1]]
        return super().training_step(batch)

    def validation_step(self, batch, batch_idx):
        if batch_idx == (1 if self.global_step else 3):
            self.fail("validation" if self.global_step else "sanity")

    def on_train_epoch_start(self):
        self.fail("epoch")

    def on_train_epoch_end(self):
        self.fail("end")

    def configure_optimizers(self):
        try:
            self.fail("optimizer")
        except RuntimeError as error:
            raise ValueError("no optimizer") from error
        return super().configure_optimizers()
"""
pytestmark = pytest.mark.usefixtures("config_directory")


@pytest.fixture
def show_error(capsys, monkeypatch):
    """Run a command as in a separate process, and return the text that it shows of the final error."""
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    monkeypatch.delenv("LUMEN_DEBUG", raising=False)
    Path("failing.py").write_text(CODE)

    def run(*words):
        capsys.readouterr()
        monkeypatch.setenv("LUMEN_DEBUG", "")
        monkeypatch.setattr(sys, "argv", ["lumen", "fit", "--config", "line.yaml", *words])
        assert main() == 1
        told = capsys.readouterr().err
        return re.sub(r"\n +[\^~]+\n", "\n", told[told.index("Traceback") :])  # marks differ between versions of Python

    return run


def find_line(words):
    """Return the number of the line of CODE that contains a text."""
    (number,) = [number for number, line in enumerate(CODE.splitlines(), 1) if words in line]
    return number


def format_place(path, words, function):
    return f'  File "{path}/failing.py", line {find_line(words)}, in {function}\n    {words}\n'


def test_library_frames_are_folded_into_one_line(show_error, tmp_path):
    told = show_error("--model.where", "shape")
    helper = ROOT / "tests" / "helpers" / "cli_tasks.py"
    begin, inside, end = re.split(rf'(  File "{helper}".*\n.*\n)+', told)
    assert begin == "Traceback (most recent call last):\n" + format_place(
        tmp_path, "return super().training_step(batch)", "training_step"
    )
    assert "in forward\n    return self.layer(" in inside
    assert re.fullmatch(
        r"  \.\.\. \d\d frames of lumen and torch; --verbose shows all\n"
        r"RuntimeError: (addmm: )?mat1 and mat2 shapes cannot be multiplied \(2x2 and 3x1\)\n"
        r"This was in step 6 \(epoch 1, batch_idx 1\)\.\nThe log of the run is runs/line/run\.log\.\n"
        r"(The newest checkpoint is .*\. Resume with:\n  lumen fit .*\n)?",
        end,
    ), end
    log = Path("runs/line/run.log").read_text()
    assert "torch/nn/modules/linear.py" in log
    assert log.endswith("This was in step 6 (epoch 1, batch_idx 1).\n")


def test_verbose_shows_every_frame(show_error):
    told = show_error("--model.where", "shape", "--verbose")
    assert "torch/nn/modules/linear.py" in told
    assert "lumen/loop/step.py" in told
    assert "frames of" not in told


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("sanity", "the sanity check of the validation (batch_idx 3)"),
        ("epoch", "fit, before its first step (epoch 0)"),
        ("end", "fit, after step 4 (epoch 0)"),
        ("validation", "the validation after step 4 (epoch 0, batch_idx 1)"),
    ],
)
def test_it_says_where_the_run_stood(show_error, where, said):
    told = show_error("--model.where", where, "--trainer.num_sanity_val_steps", "4")
    assert f"RuntimeError: a mistake\nThis was in {said}.\n" in told, told


def test_cause_of_an_error_is_shown_first(show_error, tmp_path):
    told = show_error("--model.where", "optimizer")
    first, second = told.split("\n\nThe above exception was the direct cause of the following exception:\n\n")
    assert (
        first
        == "Traceback (most recent call last):\n"
        + format_place(tmp_path, 'self.fail("optimizer")', "configure_optimizers")
        + format_place(tmp_path, 'raise RuntimeError("a mistake")', "fail")
        + "RuntimeError: a mistake"
    )
    assert second.startswith(
        format_place(tmp_path, 'raise ValueError("no optimizer") from error', "configure_optimizers")
    )
    assert second.endswith("; --verbose shows all\nValueError: no optimizer\nThis was in fit, before its first step.\n")


@pytest.mark.parametrize("workers", [0, 1])
def test_dataset_error_names_the_sample(show_error, tmp_path, workers):
    told = show_error("--data.bad", "5", f"--data.workers={workers}")
    inside, libraries = (", in DataLoader worker process 0", "lumen and torch") if workers else ("", "lumen")
    raised = format_place(tmp_path, 'raise KeyError(f"no row {index}")', "__getitem__")
    assert told.startswith(f"Traceback (most recent call last){inside}:\n{raised}  ... "), told
    end = "KeyError: 'no row 5'\nIt was raised for sample 5 of Rows.\nThis was in step"
    assert f"frames of {libraries}; --verbose shows all\n{end}" in told


def test_syntax_error_in_module_shows_its_line(show_error, tmp_path):
    Path("unreadable.py").write_text("import lumen\n\nclass Task(lumen.TaskModule:\n    pass\n")
    told = show_error("--model", "unreadable.Task").splitlines()
    assert re.fullmatch(r"  \.\.\. \d+ frames of .*lumen.*; --verbose shows all", told[1])
    assert told[2] == f'  File "{tmp_path}/unreadable.py", line 3'
    assert told[-1].startswith("SyntaxError: ")
    assert len(told) <= 6


def test_traceback_without_user_frames_is_complete():
    text = f'Traceback (most recent call last):\n  File "{ROOT}/lumen/run/run.py", line 1, in go\n    x\nKeyError: 1\n'
    assert "\n".join(fold_traceback(text)) + "\n" == text
