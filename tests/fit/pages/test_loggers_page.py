"""Programs and commands of the page on loggers."""

import re
from pathlib import Path

import pytest

import lumen
from lumen.cli import main
from tests.helpers import ROOT
from tests.helpers.pages import run_programs
from tests.helpers.services import of_csv, read_wandb
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader")  # a warning of SQLAlchemy about MLflow
PAGE = (ROOT / "docs/guides/loggers.md").read_text()


@pytest.mark.slow
def test_programs_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    said = [capsys.readouterr().out.splitlines()[-1] for _ in run_programs("docs/guides/loggers.md")]
    assert said == ["runs/line ['TensorBoardLogger', 'MLFlowLogger']", "True", "4"]


@pytest.mark.slow
def test_commands_and_yaml_of_the_page_train(config_directory):
    commands = re.findall(r"^lumen (fit .*)", PAGE, re.M)
    assert len(commands) == 2
    words = [word.strip('"') for word in re.findall(r'"[^"]*"|\S+', commands[0])]
    assert main([*words, "--trainer.max_epochs=1"]) == 0
    (given,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    Path("loggers.yaml").write_text(given)
    words = ["fit", "--config", "line.yaml", "--config", "loggers.yaml", "--trainer.log_every_n_steps=1"]
    assert main(words) == 0
    directory = max(Path("runs").glob("*/wandb")).parent
    assert read_wandb(directory) == of_csv(directory)


@pytest.mark.parametrize("name", re.findall(r"^\| `(\w+)` \|", PAGE, re.M))
def test_every_name_of_the_page_is_a_logger(name):
    if name == "aim":
        pytest.importorskip("aim", reason="no Aim for this version of Python")
    (logger,) = lumen.Trainer(logger=name).loggers
    assert isinstance(logger, lumen.Logger)
