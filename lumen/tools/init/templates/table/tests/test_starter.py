"""Tests of the project: its config trains a model, and the data module reads a table."""

from pathlib import Path

import lumen
import torch

from starter.data import Table

CONFIG = Path(__file__).parents[1] / "starter.yaml"


def test_short_training_beats_guessing(tmp_path, monkeypatch):
    """Train with the config of the project, but for five epochs and in a temporary directory."""
    monkeypatch.chdir(CONFIG.parent)
    arguments = ["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=5"]
    cli = lumen.CLI(args=arguments)
    assert cli.trainer.current_epoch == 5
    assert cli.trainer.callback_metrics["val_acc"] > 0.5


def test_every_row_is_read_once(tmp_path):
    """Of ten rows, six are for training, two for validation and two for the test."""
    path = tmp_path / "rows.csv"
    path.write_text("size,kind,weight\n" + "".join(f"{n},{'odd' if n % 2 else 'even'},{n / 2}\n" for n in range(10)))
    data = Table(str(path), target="kind")
    data.setup("fit")
    assert (data.features, data.classes, data.names) == (2, 2, ["even", "odd"])
    rows, labels = (torch.cat(each) for each in zip(data.train[:], data.val[:], data.test[:], strict=True))
    assert sorted(rows[:, 0].tolist()) == list(range(10))
    assert torch.equal(rows[:, 1], rows[:, 0] / 2)
    assert torch.equal(labels, rows[:, 0].long() % 2)
