"""Programs of the first pages for newcomers."""

import dataclasses
import filecmp
import inspect
import re
import sys
from pathlib import Path

import pytest
from transformers import Trainer, TrainingArguments

import lumen
from lumen import errors
from lumen.cli import main
from lumen.errors import LumenError
from lumen.tools.migrate.transformers import TRANSLATED
from tests.helpers import ROOT
from tests.helpers.pages import find_programs, run_programs
from tests.helpers.tasks import Regression, loader

SAID = {
    "guides/custom-callback": ["True True True"],
    "migration/from-a-plain-loop": ["True"],
    "migration/from-transformers": ["['eval_accuracy', 'eval_loss', 'loss']"],
    "guides/data-loaders": ["20"],
    "guides/multiple-dataloaders": ["['all_loss', 'val_loss/clean', 'val_loss/noisy']", "3 [None, 3]", "4"],
    "guides/evaluation": ["True"],
    "guides/finetuning": ["[('blocks.0 decay', 0.00025), ('blocks.1 decay', 0.0005), ('head decay', 0.001)]"],
    "guides/freeze-layers": [
        "True",
        "0 batches changed BatchNorm's statistics",
        "{'head': 4, 'backbone': 2}",
        "[None, 'epoch 2', 'epoch 4']",
    ],
    "guides/learning-rate-schedules": ["0.001", "0.0057", "0.01"],
    "guides/momentum-teacher": ["0 10"],
    "guides/resume": ["True", "20"],
    "concepts/step": ["True"],
    "guides/custom-strategy": ["True", "True"],
    "tutorials/image-classifier": [
        "epochs: 3",
        "epochs: 6",
        "identical: True",
        "accuracy above 0.9: True",
        "predictions: (297,)",
        "width: 16",
    ],
}


@pytest.mark.parametrize("page", SAID)
def test_programs_of_a_page_print_what_it_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert list(run_programs(f"docs/{page}.md"))
    assert [line for line in capsys.readouterr().out.splitlines() if line in SAID[page]] == SAID[page]
    if page == "guides/resume":
        assert filecmp.cmp("runs/whole/metrics.csv", "runs/parts/metrics.csv", shallow=False)


def test_quick_start_script_trains_ends_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (script,) = find_programs("docs/tutorials/quick-start.md")
    for epochs, steps in ((5, 200), (5, 200), (10, 400)):
        found = {"__name__": "page"}
        exec(script.replace("max_epochs=5", f"max_epochs={epochs}"), found)
        assert sorted(path.name for path in Path("runs/circle/checkpoints").iterdir())[-1] == f"step-{steps:08}"
        assert "accuracy" in capsys.readouterr().out
        assert found["trainer"].callback_metrics["accuracy"] > 0.95
    straight = script.replace("max_epochs=5", "max_epochs=10").replace('name="circle"', 'name="straight"')
    exec(straight, {"__name__": "page"})
    assert main(["diff", "runs/circle", "runs/straight", "--records"]) == 0
    assert "A and B are equal" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "project"), [("quick-start", "mine"), ("image-classifier", "images")])
def test_commands_of_a_tutorial_run(page, project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / f"docs/tutorials/{page}.md").read_text()
    modules = {*sys.modules}
    for line in re.search(r"```\n(lumen init.*?)```", text, re.S)[1].splitlines():
        program, *words = line.split()
        if program == "cd":
            monkeypatch.chdir(words[0])
            monkeypatch.syspath_prepend(Path.cwd())
        else:
            assert main(words) == 0, line
    assert project != "mine" or "mine-2" in capsys.readouterr().out
    for name in {*sys.modules} - modules:
        if name.split(".")[0] == project:
            del sys.modules[name]


def test_arguments_and_methods_in_the_page_exist():
    page = (ROOT / "docs/migration/from-transformers.md").read_text()
    (arguments,) = re.findall(r"^## Arguments\n(.*?)^## ", page, re.S | re.M)
    (methods,) = re.findall(r"^## Methods\n(.*?)^## ", page, re.S | re.M)
    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    left = [re.findall(r"`(\w+)`", row.split(" | ")[0]) for row in re.findall(r"^\| `\w.*", arguments, re.M)][1:]
    named = {name for row in left for name in row}
    assert len(named) > 30
    assert named <= theirs | TRANSLATED  # older versions of transformers have some of them
    ours = {*inspect.signature(lumen.Trainer).parameters, *inspect.signature(lumen.ModelCheckpoint).parameters}
    used = {*re.findall(r"\b(\w+)=", " ".join(re.findall(r"^\|.*", arguments, re.M)))} - {
        "warmup",
        "ckpt_path",
        "wrap",
        "shuffle",
    }
    assert used <= ours
    rows = re.findall(r"^\| `\w.*", methods, re.M)
    called = {name for row in rows for name in re.findall(r"`(\w+)(?:\(\))?`", row.split(" | ")[0])}
    known = {*dir(Trainer), *inspect.signature(Trainer).parameters, "TrainerCallback", "Trainer"}
    assert called - known == {"num_items_in_batch"}
    assert "num_items_in_batch" in inspect.signature(Trainer.compute_loss).parameters


def test_troubleshooting_snippets_and_config_are_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for program in find_programs("docs/troubleshooting.md"):
        exec(program, {"__name__": "page"})
    (config,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/troubleshooting.md").read_text(), re.S)
    Path("more.yaml").write_text(config)
    assert main(["fit", "--config", f"{ROOT}/models/digits.yaml", "--config", "more.yaml", "--print_config"]) == 0
    assert "startup_timeout_s: 120" in capsys.readouterr().out


def test_errors_of_troubleshooting_are_raised(tmp_path):
    page = (ROOT / "docs/troubleshooting.md").read_text()
    trainer = lumen.Trainer(max_epochs=1, default_root_dir=tmp_path, name="none", resume="last")
    with pytest.raises(LumenError, match="no valid checkpoint found"):
        trainer.fit(Regression(), loader())
    assert "`no valid checkpoint found`" in page
    for name in re.findall(r"`(\w+)`: the loss", page):
        assert issubclass(getattr(errors, name), LumenError)


def test_migrated_example_is_the_one_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/migration/from-lightning.md").read_text()
    lines = re.search(r"```diff\n(.*?)```", page, re.S)[1].splitlines(keepends=True)
    before, after = ("".join(line[1:] or line for line in lines if line[0] in kept) for kept in (" -\n", " +\n"))
    Path("train.py").write_text(before)
    assert main(["migrate", "train.py", "--write", "--force"]) == 0
    assert Path("train.py").read_text() == after
    exec(after, found := {"__name__": "page"})
    assert found["trainer"].global_step == 160
