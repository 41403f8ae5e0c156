"""User's `logging` in a run: the messages in `run.log` and on the terminal, and the restored configuration."""

import io
import json
import logging
from itertools import product

import pytest
import torch
import torchmetrics
from torch.utils.data import DataLoader, Dataset

import lumen
from lumen.errors import ConfigError
from lumen.tools.runs.command import run as list_runs
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer
from tests.helpers.user_logging import LogMessages, filter_messages, fit_with_messages

LIBRARY = f"{torchmetrics.__name__}.x"


class Speaks(Regression):
    def training_step(self, batch):
        logging.getLogger("project.task").info("said by the task")
        return super().training_step(batch)


class SpeaksToo(lumen.DataModule):
    def setup(self, stage):
        logging.getLogger("data").info("said by the data module")

    def train_dataloader(self):
        return loader()


def test_user_messages_reach_run_log_and_terminal(tmp_path, capsys):
    lines = fit_with_messages(tmp_path, "__main__", task=Speaks(), data=SpeaksToo())
    assert filter_messages(lines) == [
        "INFO data: said by the data module",
        "INFO __main__: said at 20",
        "WARNING __main__: said at 30",
        "INFO project.task: said by the task",
    ]
    shown = [line for line in capsys.readouterr().err.splitlines() if "said" in line]
    assert shown == [
        "data: said by the data module", "__main__: said at 20", "warning: __main__: said at 30",
        "project.task: said by the task",
    ]  # fmt: skip


def test_run_log_begins_with_the_run_directory(tmp_path):
    begin, *others = (line.split(" ", 2)[2] for line in fit_with_messages(tmp_path))
    assert begin == f"INFO the run is in {tmp_path / 'runs/run'}"
    assert "INFO finished: max_steps=1 reached at step 1, epoch 1" in others


@pytest.mark.parametrize(
    ("level", "heard"),
    [
        ("DEBUG", [*product(["a.b", "a.c"], [10, 20, 30]), (LIBRARY, 30)]),
        ("WARNING", [("a.b", 30), ("a.c", 30), (LIBRARY, 30)]),
        ("ERROR", []),
        ({"a.b": "WARNING"}, [("a.b", 30), ("a.c", 20), ("a.c", 30), (LIBRARY, 30)]),
        ({"root": "ERROR", "a": "WARNING", "a.b": "DEBUG"}, [("a.b", 10), ("a.b", 20), ("a.b", 30), ("a.c", 30)]),
        ({"root": "ERROR", "torchmetrics": "INFO"}, [(LIBRARY, 20), (LIBRARY, 30)]),
    ],
)  # fmt: skip
def test_logger_levels_are_respected_libraries_start_at_warning(tmp_path, level, heard):
    lines = fit_with_messages(tmp_path, "a.b", "a.c", LIBRARY, log_level=level)
    names = {10: "DEBUG", 20: "INFO", 30: "WARNING"}
    assert filter_messages(lines) == [f"{names[number]} {name}: said at {number}" for name, number in heard]


class Fails(LogMessages):
    def on_train_end(self, trainer, task):
        raise KeyError("on purpose")


@pytest.mark.parametrize("callback", [LogMessages, Fails])
def test_user_handlers_are_unaffected_and_restored(tmp_path, callback):
    root, mine, text = logging.getLogger(), logging.getLogger("mine"), io.StringIO()
    handler = logging.StreamHandler(text)
    root.addHandler(handler)
    mine.setLevel(logging.ERROR)
    try:
        before = root.level, [*root.handlers], [[*each.filters] for each in root.handlers]
        options = {"log_level": {"root": "DEBUG", "asked": "INFO"}, "callbacks": callback("other", "mine", "asked")}
        if callback is Fails:
            with pytest.raises(KeyError, match="on purpose"):
                fit_with_messages(tmp_path, **options)
        else:
            assert "DEBUG other: said at 10" in filter_messages(fit_with_messages(tmp_path, **options))
        assert (root.level, [*root.handlers], [[*each.filters] for each in root.handlers]) == before
        assert (mine.level, logging.getLogger("asked").level) == (logging.ERROR, logging.NOTSET)
        log = (tmp_path / "runs/run/run.log").read_text()
        assert "mine" not in log
        assert [line for line in text.getvalue().splitlines() if line.startswith("said")] == [
            "said at 30", "said at 20", "said at 30"
        ]  # fmt: skip
    finally:
        root.removeHandler(handler)
        mine.setLevel(logging.NOTSET)


FORMAT = "[%(levelname)s][%(name)s] %(message)s"


def test_log_format_is_that_of_every_line(tmp_path):
    lines = fit_with_messages(tmp_path, "mine", log_format=FORMAT)
    assert lines[0] == f"[INFO][lumen] the run is in {tmp_path / 'runs/run'}"
    assert "[INFO][mine] said at 20" in lines
    assert "[INFO][lumen] finished: max_steps=1 reached at step 1, epoch 1" in lines
    assert [line for line in lines if not line.startswith(("[INFO][", "[WARNING]["))] == []


def test_runs_lists_the_status_whatever_log_format(tmp_path, capsys):
    def status():
        capsys.readouterr()
        assert list_runs([str(tmp_path / "runs"), "--json"]) == 0
        (run,) = json.loads(capsys.readouterr().out)
        return run["status"], run["error"]

    fit_with_messages(tmp_path, log_format=FORMAT)
    assert status() == ("finished", None)
    for step, form in enumerate((FORMAT, None, FORMAT), start=2):
        longer = {"resume": "auto", "max_steps": step, "log_format": form}
        with pytest.raises(KeyError, match="on purpose"):
            fit_with_messages(tmp_path, **longer, callbacks=Fails())
        assert status() == ("failed", f"KeyError: 'on purpose' (after step {step})")
        fit_with_messages(tmp_path, **longer)
        assert status() == ("finished", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"log_level": {"root": "LOUD"}}, "log_level.root: expected DEBUG, INFO, WARNING or ERROR, found 'LOUD'"),
        ({"log_format": "%(nothing"}, "log_format: .*logging.Formatter"),
        ({"log_format": "{message}"}, "log_format: .*logging.Formatter"),
    ],
)
def test_invalid_level_or_format_is_rejected(tmp_path, options, said):
    with pytest.raises(ConfigError, match=said):
        quiet_trainer(tmp_path, **options)


class Loud(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        logging.getLogger("dataset").info("said of sample %d", index)
        return torch.full((FEATURES,), float(index)), torch.zeros(1)


def test_messages_of_workers_are_logged(tmp_path):
    lines = fit_with_messages(tmp_path, data=DataLoader(Loud(), 8, num_workers=1, multiprocessing_context="fork"))
    assert filter_messages(lines) == [f"INFO dataset: said of sample {index}" for index in range(8)]
