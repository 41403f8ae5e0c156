"""`lumen migrate --check`: Lightning and Lumen train the same first steps, or the cause of a difference is named."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT
from tests.helpers.migrate import run_migrate

PROJECTS = ROOT / "tests/projects"
PAGE = ROOT / "docs/migration/move-a-project.md"
SCRIPT = r"""
import json, os, sys, urllib.request
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

settings = json.loads(sys.argv[1])
size, dropout, shuffle = settings.pop("size", 40), settings.pop("dropout", 0.0), settings.pop("shuffle", False)
special = settings.pop("special", "")


class Line(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.automatic_optimization = special != "manual"

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss * 2 if special == "own loss" and Line.__base__.__name__ == "TaskModule" else loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Stream(IterableDataset):
    def __iter__(self):
        while True:
            x = torch.randn(4)
            yield x, x.sum(0, keepdim=True)


x = torch.randn(size, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
train = DataLoader(Stream(), 8) if special == "stream" else DataLoader(data, 8, shuffle=shuffle)
if special == "network":
    urllib.request.urlopen("http://lumen.invalid")
if special == "write":
    open(settings.pop("file"), "w")
if special == "exit":
    sys.exit(3)
if special != "no fit":
    trainer = L.Trainer(max_steps=30, **{"accelerator": "cpu", **settings})
    trainer.fit(Line(), train, DataLoader(data, 16), ckpt_path="a.ckpt" if special == "resume" else None)
"""


def check(path, *words, options=(), **settings):
    """Run the command in a new process; return exit code, stdout and stderr."""
    words = words or ("python", "train.py", json.dumps(settings))
    command = [sys.executable, "-m", "lumen", "migrate", ".", "--check", *options, "--", *words]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def project(tmp_path, monkeypatch):
    path = tmp_path / "project"
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle": True, "dropout": 0.5, "size": 39},
        {"accumulate_grad_batches": 2, "size": 64, "gradient_clip_val": 0.1},
        {"precision": "bf16-mixed"},
        {"special": "manual", "dropout": 0.1, "shuffle": True},
        {"special": "stream"},
        {"devices": 4, "strategy": "ddp"},
    ],
    ids=lambda settings: settings.get("special", "-".join(settings)),
)
def test_check_equal_losses_are_bitwise_identical(project, settings):
    before = sorted(project.rglob("*"))
    code, out, _ = check(project, **settings)
    batches = 10 * settings.get("accumulate_grad_batches", 1)
    assert f"equal: {batches} of {batches} losses bitwise identical, 1 validation value\n" in out
    assert ("the batches" in out) == ("shuffle" in settings or settings.get("special") == "stream")
    assert code == 0
    assert sorted(project.rglob("*")) == before
    assert (project / "train.py").read_text() == SCRIPT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"accumulate_grad_batches": 2, "size": 29},
            "differ from step 3: accumulation: Lightning averages batch means, Lumen samples (sizes 8, 5)\n"
            "  first different value: the gradient of net.0.weight, in step 2\n",
        ),
        (
            {"accumulate_grad_batches": 2, "size": 24},
            "differ from step 3: last window: Lightning divides the sum of 1 batch mean by 2\n",
        ),
        (
            {"precision": "16-mixed"},  # Lightning replaces fp16 by bf16 on the CPU.
            "precision: the output of net.0 is torch.bfloat16 with Lightning, torch.float16 with Lumen",
        ),
        ({"special": "own loss"}, "differ from step 1: the loss, from the same outputs of modules, in step 1"),
    ],
    ids=["ragged", "last-window", "precision", "loss"],
)
def test_check_names_the_cause_of_a_difference(project, settings, message):
    code, out, err = check(project, **settings)
    assert message in out, err
    assert code == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"special": "no fit"}, "the command does not call fit of Lightning's Trainer.\n"),
        ({"special": "exit"}, "the command for Lightning failed: exit code 3\n"),
        ({"special": "resume"}, "the command resumes a training. Give a command that starts a new training.\n"),
        ({"special": "network"}, "the project asks lumen.invalid.>\n"),
        ({"accelerator": "tpu"}, "the command for Lightning failed: "),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each.values()),
)
def test_check_says_why_it_cannot_compare(project, settings, reason):
    code, out, err = check(project, **settings)
    assert out.startswith("cannot compare: "), err
    assert reason in out
    assert out.count("\n") == 1
    assert code == 2


@pytest.mark.slow
def test_check_lists_manual_edits_after_a_failure(project):
    code, out, err = check(project, precision="16-true")
    assert out.startswith("cannot compare: the command for Lumen failed: lumen.errors.ConfigError: precision: 16-true")
    assert "To check by hand:\ntrain.py:" in err
    assert code == 2


@pytest.mark.slow
def test_check_writes_nothing_into_the_project(project):
    file = project / "new.txt"
    code, out, _ = check(project, special="write", file=str(file))
    assert (code, file.exists()) == (2, False)
    assert f"`lumen migrate --check` writes nothing in {project}, but the project writes {file}." in out


@pytest.mark.slow
def test_check_compares_written_edits_with_the_original(project):
    original = project.with_name("original")
    shutil.copytree(project, original)
    assert run_migrate(".", "--write", "--force")[0] == 0
    code, out, _ = check(project)
    assert code == 2
    assert "trains with Lumen. If the edits are written, name the project before them by --original." in out
    code, out, _ = check(project, options=("--original", str(original), "--steps", "3"))
    assert "equal: 3 of 3 losses bitwise identical" in out
    assert code == 0


@pytest.mark.slow
def test_check_ends_a_training_after_the_time_limit(project):
    code, out, _ = check(project, "sleep", "60", options=("--time-limit", "0.1"))
    assert out == "cannot compare: Lightning did not train 10 steps in 0.1 s. See --steps and --time-limit.\n"
    assert code == 2


@pytest.mark.slow
@pytest.mark.time_limit(300)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("digitgan", ("python", "train.py", "--accelerator", "cpu")),
        ("selfsup", ("python", "pretrain.py")),
        ("winecli", ("python", "main.py", "fit", "--config", "configs/base.yaml")),
    ],
)
def test_check_of_a_project_finds_equal_losses(project, name, words):
    shutil.copytree(PROJECTS / name, project / name)
    code, out, err = check(project / name, *words)
    assert "equal: 10 of 10 losses bitwise identical" in out, err
    assert code == 0
    if name == "winecli":
        assert _format_example(words, out) in PAGE.read_text()
        words = (*words, "--trainer.accumulate_grad_batches", "4")
        code, out, _ = check(project / name, *words)
        assert _format_example(words, out) in PAGE.read_text()


def _format_example(words, out):
    """Return a command and its output, as the guide shows them."""
    command = f"$ lumen migrate . --check -- {' '.join(words)}".replace(" --trainer", " \\\n      --trainer")
    return f"```\n{command}\n{out}```"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--check",),
            "--check needs the command that trains the project. Write it after `--`: `lumen migrate . --check",
        ),
        (("--", "python"), "the command after `--` is only for --check."),
        (("--check", "--steps", "0", "--", "python"), "--steps: must be at least 1, found 0."),
        (("--check", "--", "no-program"), "cannot compare: there is no program no-program."),
        (("--check", "--write", "--", "python"), "not allowed with argument"),
    ],
)
def test_check_refuses_a_wrong_command_line(project, words, message):
    code, out, err = run_migrate(".", *words)
    assert code == 2
    assert message in out + err


def test_check_copies_no_special_files(project):
    os.mkfifo("pipe")
    assert run_migrate(".", "--check", "--", "no-program")[1] == "cannot compare: there is no program no-program.\n"
