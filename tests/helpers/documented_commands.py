"""Documented commands: collect them, and run each in a directory like a user's."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from lumen.cli import main
from lumen.cli.commands import list_commands
from tests.helpers import ROOT

PROGRAMS = (
    "aim|cd|cmp|cp|git|kubectl|lumen|make|mkdir|mlflow|pip|python|ray|sbatch|scontrol|sky|source|srun|tensorboard|"
    "torchrun|wandb"
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{PROGRAMS}) \S.*")
IN_SENTENCE = re.compile(
    rf"\b(?:lumen (?:{'|'.join(list_commands())})|pip install|torchrun)"
    r"(?: (?:[A-Z]\S*[A-Z]\b\S*|--\S+ \S+|'\S+'|\"\S+\"|runs/\S+))+"
)
OPTIONS = re.compile(r"(?:--[\w.+]+ (?!--)\S+ ?)+")
SOURCES = {
    str(path.relative_to(ROOT)): path
    for pattern in ("models/*.yaml", "*.md", "docs/**/*.md", "models/*.py", "datamodules/*.py", "lumen/**/*.py")
    for path in sorted(ROOT.glob(pattern))
    # tests/hydra runs a project with the commands of the page on Hydra, which needs another environment.
    if path.name not in ("CHANGELOG.md", "hydra.md") and "templates" not in path.parts
}


def find_commands(source):
    """Return the commands of a file in order: from code blocks, comments, docstrings and messages."""
    text = SOURCES[source].read_text()
    if source.endswith(".md"):
        return list(_find_in_page(text))
    if source.endswith(".yaml"):
        return list(_filter(_comments(text)))
    return list(_find_in_strings(text))


def find_options(source):
    """Return the options that the comments of a config offer for its own command."""
    text = " ".join(line for line in _comments(SOURCES[source].read_text()) if not COMMAND.match(line))
    return [found.strip().rstrip(".,;:") for found in OPTIONS.findall(text)]


def _comments(text):
    return [line.partition("#")[2].strip() for line in text.splitlines() if "#" in line]


def _find_in_page(text):
    for language, block, code in re.findall(r"^ *```(\w*)\n(.*?)^ *```|`([^`]+)`", text, re.S | re.M):
        if code:
            yield from _filter([code])
        elif language == "bash":  # a single script with loops and exit codes
            yield block.strip()
        elif language in ("", "sh"):
            yield from _filter(line.strip().removeprefix("$ ") for line in block.splitlines())


def _find_in_strings(text):
    if not re.search(PROGRAMS, text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            string = " ".join(node.value.split())
            yield from _filter(re.findall(r"`([^`]+)`", string))
            outside = re.sub("`[^`]+`", "", string)
            yield from (found[0].rstrip(".,;:") for found in IN_SENTENCE.finditer(outside))


def _filter(texts):
    return filter(COMMAND.fullmatch, (" ".join(text.partition(" #")[0].split()) for text in texts))


# ---------------------------------------------------------------------- running the commands

EVALUATION = ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1"]
TWO_EPOCHS = ["--trainer.max_steps=8", "--trainer.limit_train_batches=4"]
SEVERAL_CHECKPOINTS = [
    "--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=2",
    "--trainer.callbacks.keep_last=3",
]  # fmt: skip
SHORT = {
    "fit": ["--trainer.max_steps=2", *EVALUATION],
    "validate": ["--trainer.limit_val_batches=1"],
    "test": ["--trainer.limit_test_batches=1"],
    "predict": ["--trainer.limit_predict_batches=1"],
}
PLACEHOLDERS = {
    "--config FILE": "--config models/digits.yaml", "convert FILE": "convert old.ckpt", "FILE": "new.safetensors",
    "runs DIR": "runs runs", "DIR": "new", "runs/NAME": "runs/gpt", "N": "2", "...": "",
    "RUN --format huggingface": "runs/gpt2_pretrain --format huggingface", "RUN": "runs/gpt",
    "A": "runs/digits", "B": "runs/digits-2",
}  # fmt: skip


def make_home(home):
    """Fill a directory with a checkout's examples and with the files of users that pages name."""
    (home / "runs").mkdir()
    for name in ("models", "datamodules", "docs"):
        (home / name).symlink_to(ROOT / name)
    for name in ("line", "mine"):
        (home / f"{name}.yaml").write_text(
            "seed_everything: 7\nmodel: {class_path: tests.helpers.cli_tasks.Line, init_args: {lr: 0.05}}\n"
            "data: tests.helpers.cli_tasks.Points\ntrainer: {max_epochs: 4}\n"
        )
    (home / "my_book.txt").write_text((ROOT / "docs/guides/third-party-datasets.md").read_text())
    torch.save({"state_dict": {"model.weight": torch.ones(2)}}, home / "old.ckpt")


def complete_command(line):
    """Replace the placeholders of a command and add the arguments that a sentence leaves out."""
    for placeholder, text in PLACEHOLDERS.items():
        line = re.sub(rf"(?<!\S){re.escape(placeholder)}(?!\S)", text, line)
    if re.search(r"\blumen (fit|validate|test|predict|check)\b(?!.*--(config|ckpt_path) \S)", line):
        line = re.sub(r"\b(lumen \w+)( --config$)?", r"\1 --config models/gpt.yaml", line)
    line = re.sub(r"\b(lumen (export|report|replay))(?=$| --)", r"\1 runs/gpt", line)
    return re.sub(r"(lumen submit .*)(?<!--dry-run) -- ", r"\1 --dry-run -- ", line)


def run_command(line):
    """Run a command after the trainings whose runs it reads."""
    line = complete_command(line)
    for name in sorted(find_runs(line)):
        train(name)
    if line.startswith("lumen ") and not re.search("[<>|&]", re.sub('"[^"]*"', "", line)):
        _, command, *words = shlex.split(line)
        assert _exit_code([command, *words, *([] if "--help" in words else SHORT.get(command, []))]) == 0, line
    else:
        settings, _, command = line.partition(" lumen ")
        short = SHORT.get(command.partition(" ")[0], []) if re.fullmatch(r"(\w+=\S+ ?)+", settings) else []
        run_in_shell(f"{line} {shlex.join(short)}")


def _exit_code(words):
    try:
        return main(words)
    except SystemExit as end:  # placeholders of --help
        return end.code


def run_in_shell(line):
    """Run a command as bash does, with the programs of this environment."""
    done = subprocess.run(["bash", "-c", line], env=make_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{line}\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    return done.stdout + done.stderr


def make_environment():
    """Return the variables of this process, with the programs of its Python in the path."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": os.getcwd()}


def find_runs(line):
    """Return the names of the runs that a command reads."""
    names = set(re.findall(r"(?<![\w/])runs/([\w-]+)", line))
    configs = re.findall(r"models/(\w+)\.yaml", line)
    if not re.search(r"\blumen (fit|check|submit)\b", line):
        return names | set(configs)
    trainers = [yaml.safe_load((ROOT / f"models/{name}.yaml").read_text())["trainer"] for name in configs]
    return names | {Path(trainer["init_from"]["path"]).name for trainer in trainers if "init_from" in trainer}


def train(name):
    """Train the example of a run for a few steps, or a small task, unless the run exists."""
    if Path("runs", name).exists():
        return
    first = name.removesuffix("-2")
    config = f"models/{first}.yaml" if Path(f"models/{first}.yaml").exists() else "line.yaml"
    for needed in sorted(find_runs(f"lumen fit --config {config}")):
        train(needed)
    if first != name:
        train(first)
    words = ["fit", "--config", config, f"--trainer.name={name}", *TWO_EPOCHS, *EVALUATION]
    assert _exit_code([*words, *(SEVERAL_CHECKPOINTS if name == "kept" else [])]) == 0
