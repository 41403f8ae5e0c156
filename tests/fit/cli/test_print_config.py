"""Output of `--print_config=skip_default`: a config that repeats the run."""

from pathlib import Path

import pytest
import yaml

from lumen.cli import main
from tests.helpers.cli import read_saved_config, write_config
from tests.helpers.working_directory import CONFIG

__all__ = ["CONFIG"]  # the file that config_directory writes
pytestmark = pytest.mark.usefixtures("config_directory")

WORDS = [
    "--model", "tests.helpers.cli_tasks.Slope", "--model.lr=0.3", "--data.samples=8", "--optimizer=SGD",
    "--optimizer.momentum=0.9", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2", "--lr_schedule.interval=step",
    "--lr_schedule.warmup_steps=2", "--trainer.callbacks.stop=EarlyStopping",
    "--trainer.callbacks.stop.monitor=val_loss", "--trainer.max_epochs=3", "--trainer.precision=fp64",
    "--trainer.logger=[csv]", "--trainer.accelerator=cpu",
]  # fmt: skip


def print_config(capsys, command, *words):
    capsys.readouterr()
    assert main([command, *words, "--print_config=skip_default"]) == 0
    return capsys.readouterr().out


def test_fit_is_reproduced_by_non_default_config(capsys):
    short = print_config(capsys, "fit", "--config", "line.yaml", *WORDS)
    assert main(["fit", "--config", "line.yaml", *WORDS]) == 0
    assert main(["fit", "--config", write_config("short.yaml", short)]) == 0
    first, again = read_saved_config("runs/line"), read_saved_config("runs/line-2")
    assert (first["trainer"].pop("name"), again["trainer"].pop("name")) == ("line", "line-2")
    assert first == again
    assert Path("runs/line/metrics.csv").read_bytes() == Path("runs/line-2/metrics.csv").read_bytes()
    assert print_config(capsys, "fit", "--config", "short.yaml") == short


def test_it_has_what_differs_and_nothing_else(capsys):
    text = print_config(capsys, "fit", "--config", "line.yaml", *WORDS, "--model.steepness=1.0")
    assert yaml.safe_load(text) == {
        "seed_everything": 7,
        "data": {"class_path": "tests.helpers.cli_tasks.Points", "init_args": {"samples": 8}},
        "model": {"class_path": "tests.helpers.cli_tasks.Slope", "init_args": {"lr": 0.3}},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}},
        "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.StepLR", "init_args": {"step_size": 2}},
        "lr_schedule": {"interval": "step", "warmup_steps": 2},
        "trainer": {
            "max_epochs": 3,
            "accelerator": "cpu",
            "precision": "fp64",
            "log_every_n_steps": 1,
            "callbacks": {
                "spy": {"class_path": "tests.helpers.cli_tasks.Spy"},
                "stop": {"class_path": "lumen.EarlyStopping", "init_args": {"monitor": "val_loss"}},
            },
            "logger": ["csv"],
            "name": "line",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        },
    }


@pytest.mark.slow
def test_evaluation_is_reproduced_by_non_default_config(capsys):
    """The config includes the checkpoint, the average and the output."""
    assert main(["fit", "--config", "line.yaml", *WORDS]) == 0
    for command, output in (("validate", "out.json"), ("test", "out.json"), ("predict", "out.jsonl")):
        words = [*WORDS, "--ckpt_path=runs/line", f"--output={output}"]
        assert main([command, "--config", "line.yaml", *words]) == 0
        of_newest = Path(output).read_text()
        short = print_config(capsys, command, "--config", "line.yaml", *words, "--average=last:2")
        kept = {"ckpt_path": "runs/line", "average": "last:2", "output": output}
        assert kept.items() <= yaml.safe_load(short).items()
        results = []
        for again in (
            ["--config", "line.yaml", *words, "--average=last:2"],
            ["--config", write_config("short.yaml", short)],
        ):
            assert main([command, *again]) == 0
            results.append(Path(output).read_text())
            Path(output).unlink()
        assert results[0] == results[1] != of_newest
