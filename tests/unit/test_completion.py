"""What is completed: the words of the parsers, files, and arguments that a source names."""

import json
import re

import pytest
import torch

from lumen.cli import COMMANDS, LOOKS, WITHOUT_CONFIG, main
from lumen.cli.completion.answer import WORDS
from lumen.cli.completion.generate import as_text, words
from lumen.cli.completion.paths import configs, directories, files, runs, runs_and_configs
from lumen.cli.completion.source import arguments_of, class_in

KEPT = json.loads(WORDS.read_text())


def test_the_words_that_are_kept_are_those_of_the_parsers():
    found = words()
    assert json.loads(as_text(found)) == found
    if KEPT["torch"] != ".".join(torch.__version__.split(".")[:2]):
        for each in (found, KEPT):
            del each["torch"], each["classes"]["--optimizer"], each["classes"]["--lr_scheduler"]
    assert found == KEPT, "write them anew: python -m lumen.cli.completion.generate"


@pytest.mark.filterwarnings(r"ignore:\s*Hit failing import")  # of a class that another test has left behind
@pytest.mark.parametrize("command", ["fit", "predict"])
def test_the_options_that_are_completed_are_those_of_the_help(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help", "all"])
    shown = {*re.findall(r"^  (?:-h, )?--([\w.]+)", capsys.readouterr().out, re.MULTILINE)}
    entries = KEPT["commands"]["fit"] + (KEPT["commands"][command] if command != "fit" else [])
    kept = {entry["names"][-1].removeprefix("--").removesuffix("+") for entry in entries}
    several_at_once = {"trainer", "lookahead", "lr_schedule", "parameter_groups"}
    assert shown - several_at_once == kept - {"trainer.help"}


def test_every_command_is_completed():
    assert [*KEPT["summaries"]] == [*COMMANDS, *LOOKS, *WITHOUT_CONFIG]
    assert {*KEPT["commands"]} == {*KEPT["summaries"]}


def test_names_of_strategies_precisions_loggers_callbacks_and_accelerators_are_values():
    values = {entry["names"][0]: entry.get("values", []) for entry in KEPT["commands"]["fit"]}
    assert {"auto", "single", "ddp", "fsdp"} == {*values["--trainer.strategy"]}
    assert {"fp32", "bf16", "fp16", "bf16-true", "fp64"} < {*values["--trainer.precision"]}
    assert {"csv", "tensorboard", "wandb", "mlflow", "aim"} < {*values["--trainer.logger"]}
    assert {"auto", "cpu", "cuda", "gpu", "mps"} == {*values["--trainer.accelerator"]}
    assert {"EarlyStopping", "ModelCheckpoint", "EMA"} < {*KEPT["classes"]["--trainer.callbacks"]}
    assert {"lr", "betas", "weight_decay"} < {*KEPT["classes"]["--optimizer"]["AdamW"]}


def test_paths_lead_to_configs_and_runs_and_to_nothing_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("runs/gpt/checkpoints/step-1", "runs/empty", "confs/deep", "notes", ".hidden"):
        (tmp_path / folder).mkdir(parents=True)
    for file in (
        "runs/gpt/run.log", "runs/gpt/checkpoints/step-1/manifest.json", "confs/deep/a.yml", "b.yaml", "c.txt",
        ".hidden/d.yaml",
    ):  # fmt: skip
        (tmp_path / file).touch()
    assert [*configs("")] == ["b.yaml", "confs/"]
    assert [*configs("confs/")] == ["confs/deep/"]
    assert [*configs("~/confs/d")] == ["~/confs/deep/"]
    assert [*configs(".h")] == [".hidden/"]
    assert [*runs("")] == ["runs/"]
    assert [*runs("runs/")] == ["runs/gpt"]
    assert [*runs("runs/gpt/")] == ["runs/gpt/checkpoints/"]
    assert [*runs("runs/gpt/checkpoints/")] == ["runs/gpt/checkpoints/step-1"]
    assert [*runs_and_configs("")] == ["b.yaml", "confs/", "runs/"]
    assert [*files("c")] == ["c.txt", "confs/"]
    assert [*directories("")] == ["confs/", "notes/", "runs/"]
    assert [*configs("nowhere/")] == []


def test_arguments_of_a_class_are_read_from_its_source_and_nothing_is_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kits/nets").mkdir(parents=True)
    (tmp_path / "kits/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "kits/nets/small.py").write_text(
        "from dataclasses import dataclass\nraise SystemExit('imported')\n"
        "class Base:\n    def __init__(self, depth, /, width=3, *, lr: float): ...\n"
        "class Same(Base): ...\n"
        "class More(Base):\n    def __init__(self, label, **others): ...\n"
        "@dataclass\nclass Data:\n    size: int\n    folder: str = ''\n"
        "class Loop(Loop): ...\n"
    )
    assert arguments_of("kits.nets.small.Base") == ["depth", "width", "lr"]
    assert arguments_of("kits.nets.small.Same") == ["depth", "width", "lr"]
    assert arguments_of("kits.nets.small.More") == ["label", "depth", "width", "lr"]
    assert arguments_of("kits.nets.small.Data") == ["size", "folder"]
    for name in ("kits.nets.small.Loop", "kits.nets.small.None", "kits.nowhere.Net", "Net", ""):
        assert arguments_of(name) == []
    (tmp_path / "broken.py").write_text("def (")
    assert arguments_of("broken.Net") == []


def test_the_class_is_that_of_the_line_or_else_of_the_last_config_that_has_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").write_text("model: {class_path: a.Net}\ntrainer: {logger: CSVLogger}\n")
    (tmp_path / "b.yaml").write_text("model: b.Net\n")
    (tmp_path / "bad.yaml").write_text("model: [")
    files = ["--config", "a.yaml", "--config=b.yaml", "--config", "bad.yaml", "--config", "nowhere.yaml"]
    assert class_in(files, "--model") == "b.Net"
    assert class_in(files[:2], "--model") == "a.Net"
    assert class_in(files, "--trainer.logger") == "CSVLogger"
    assert class_in(files, "--data") == ""
    assert class_in(["--model", "c.Net", *files], "--model") == "c.Net"
    assert class_in(["--trainer.callbacks+=EMA", "--trainer.callbacks+=Timer"], "--trainer.callbacks") == "Timer"
