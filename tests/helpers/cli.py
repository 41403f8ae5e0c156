"""Helpers for tests of the command line."""

from pathlib import Path

import yaml

from lumen.cli import main
from tests.helpers.cli_tasks import Spy


def write_config(path, config):
    Path(path).write_text(config if isinstance(config, str) else yaml.safe_dump(config, sort_keys=False))
    return str(path)


def read_saved_config(path="runs/line"):
    return yaml.safe_load((Path(path) / "config.yaml").read_text())


def fit(*words, config="line.yaml"):
    """Train with the command line; return the trainer and the task from the config's spy."""
    assert main(["fit", "--config", config, *words]) == 0
    return Spy.trainer, Spy.task


def run_model(command, name, root, *words):
    """Run one of the configs of `models/`, below a directory."""
    config = ["--config", f"models/{name}.yaml", f"--trainer.default_root_dir={root}"]
    assert main([command, *config, *words]) == 0
