"""Paths in settings: `~` is the home directory, and an empty path is an error."""

import os
import sys
from pathlib import Path

import pytest
import yaml

import lumen
from datamodules.download import download
from datamodules.mnist import MNIST5k
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.cli import main
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer

CONFIG = {
    "seed_everything": 7,
    "model": {"class_path": "tests.helpers.cli_tasks.Line"},
    "data": {"class_path": "tests.helpers.cli_tasks.Points"},
    "trainer": {"max_steps": 2, "enable_progress_bar": False, "enable_model_summary": False},
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Make a home directory and a working directory, which must not contain a file called `~` afterwards."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home/line.yaml").write_text(yaml.safe_dump(CONFIG))
    yield tmp_path / "home"
    assert not [path for path in Path().rglob("*") if "~" in path.name]


def fit(**options):
    trainer = lumen.Trainer(max_steps=2, enable_progress_bar=False, enable_model_summary=False, **options)
    trainer.fit(Regression(), loader())
    return trainer


# ---------------------------------------------------------------------- home directory


def test_home_paths_work_for_runs_and_checkpoints(home):
    saver = lumen.ModelCheckpoint(dirpath="~/kept")
    profiler = lumen.TorchProfiler(wait=0, warmup=1, active=1, dirpath=Path("~/traces"))
    trainer = fit(default_root_dir="~/runs", name="one", callbacks=[saver], profiler=profiler)
    assert trainer.run_directory == home / "runs/one"
    assert saver.last_model_path == str(home / "kept/step-00000002")
    assert list((home / "traces").iterdir())
    fit(default_root_dir=Path("~/runs"), name="two")
    for given in ("~/kept/step-00000002", Path("~/kept/step-00000002"), "~/runs/two"):
        assert Regression.load_from_checkpoint(given) is not None
        bare_trainer(Path("there")).validate(Regression(), loader(), ckpt_path=given)
        assert fit(name="again", resume=given).global_step == 2
        assert fit(name="begun", init_from=given).global_step == 2
        assert fit(name="begun", init_from=lumen.Weights(given)).global_step == 2
    assert fit(default_root_dir="~/runs", name="two", resume="auto").global_step == 2
    assert not (home / "runs/two-2").exists()


def test_exception_checkpoint_may_use_home_path(home):
    class Fails(Regression):
        def training_step(self, batch):
            if self.global_step == 1:
                raise KeyError("x")
            return super().training_step(batch)

    trainer = quiet_trainer(Path("runs"), max_steps=2, callbacks=[lumen.OnExceptionCheckpoint("~/failures")])
    with pytest.raises(KeyError):
        trainer.fit(Fails(), loader())
    assert [path.name for path in (home / "failures").iterdir()] == ["exception-step-00000001"]


def test_command_line_accepts_home_paths(home, capsys):
    fit_words = ["fit", "--config", "~/line.yaml", "--trainer.default_root_dir=~/runs"]
    assert main([*fit_words, "--trainer.callbacks", "{saver: {class_path: ModelCheckpoint, dirpath: ~/kept}}"]) == 0
    assert main([*fit_words, "--trainer.name=plain"]) == 0
    assert sorted(path.name for path in (home / "runs").iterdir()) == ["line", "plain"]
    assert main([*fit_words, "--trainer.resume=auto", "--trainer.name=plain"]) == 0  # the run finds its seed there
    assert main(["validate", "--ckpt_path=~/runs/plain", "--output=~/values.json"]) == 0
    assert (home / "values.json").is_file()
    assert main(["export", "~/runs/plain", "--output=~/plain.safetensors"]) == 0
    assert (home / "plain.safetensors").is_file()
    assert main([*fit_words, "--trainer.name=begun", "--trainer.init_from=~/plain.safetensors"]) == 0
    capsys.readouterr()
    assert main(["runs", "~/runs"]) == 0
    assert str(home / "runs/plain") in capsys.readouterr().out


def test_data_is_read_from_the_home_directory(home):
    (home / "digits").mkdir()
    data = MNIST5k(root="~/digits")
    with pytest.raises(lumen.LumenError, match=str(home / "digits")):
        data.setup("fit")
    (home / "source.txt").write_text("text")
    sha256 = "982d9e3eb996f559e633f4d194def3761d909f5a3b647d1a851fead67c32c9d1"
    assert download((home / "source.txt").as_uri(), "~/data/text.txt", sha256) == home / "data/text.txt"


def test_other_tildes_are_plain_names(home):
    for path in ("a~", "./~", "a/~/b", "~nobody-of-this-name/x"):
        assert as_path_or_url(path) == Path(path)
    assert as_path_or_url("memory://~/x").name == "x"
    assert as_path_or_url("~") == home


# ---------------------------------------------------------------------- empty paths


def test_empty_path_raises(capsys):
    fit(default_root_dir="runs", name="one")
    before = sorted(Path().rglob("*"))
    for take in (
        lambda: fit(default_root_dir=""),
        lambda: fit(resume=""),
        lambda: fit(init_from=""),
        lambda: lumen.ModelCheckpoint(dirpath=""),
        lambda: lumen.OnExceptionCheckpoint(""),
        lambda: lumen.TorchProfiler(dirpath=""),
        lambda: Regression.load_from_checkpoint(""),
        lambda: bare_trainer(Path("x"), max_steps=1).fit(Regression(), loader(), ckpt_path=""),
        lambda: bare_trainer(Path("x")).validate(Regression(), loader(), ckpt_path=""),
        lambda: bare_trainer(Path("x")).test(Regression(), loader(), ckpt_path=lumen.ModelCheckpoint().best_model_path),
    ):
        with pytest.raises(ConfigError, match=r"a path is empty.*best_model_path is empty until a checkpoint exists"):
            take()
    for words in (
        ["fit", "--config", ""],
        ["fit", "--config", "~/line.yaml", "--trainer.default_root_dir="],
        ["fit", "--config", "~/line.yaml", "--trainer.resume="],
        ["validate", "--config", "~/line.yaml", "--ckpt_path="],
        ["validate", "--config", "~/line.yaml", "--output="],
        ["export", "runs/one", "--output="],
        ["export", "", "--output=x.safetensors"],
        ["runs", ""],
    ):
        capsys.readouterr()
        assert main(words) == 2, words
        assert "a path is empty" in capsys.readouterr().err
    assert [path for path in sorted(Path().rglob("*")) if path not in before and not path.is_relative_to("x")] == []
    assert os.listdir("runs") == ["one"]
