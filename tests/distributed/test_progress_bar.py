"""ProgressBar: correct numbers on every terminal and without one, and the terminal restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lumen.callbacks import ProgressBar
from tests.helpers.progress_bar import Task, make_loader, make_trainer, replace_console, strip_escapes


@pytest.mark.parametrize("terminal", [False, True])
def test_processes_other_than_the_first_show_nothing(group: Any, tmp_path: Path, terminal: bool) -> None:
    first, second = group(2).run(shown_by_one_of_two, tmp_path, terminal)
    assert "step 2/2 · epoch 1/1" in strip_escapes(first)
    assert "validation 3/3" in strip_escapes(first) or terminal
    assert second == ""


def shown_by_one_of_two(tmp_path: Path, terminal: bool) -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        written = replace_console(monkeypatch, terminal=terminal)
        options: dict[str, Any] = {"strategy": "ddp", "max_epochs": 1, "log_level": "WARNING"}
        make_trainer(tmp_path, ProgressBar(plain_every_s=0.0), **options).fit(
            Task(), make_loader(3), val_dataloaders=make_loader(3)
        )
        return written()
