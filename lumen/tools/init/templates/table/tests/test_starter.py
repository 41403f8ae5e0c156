"""The project trains as its configuration says, and the model is what it should be."""

from pathlib import Path

import lumen
import torch

from starter.data import Table

CONFIG = Path(__file__).parents[1] / "starter.yaml"


def test_a_few_epochs_are_better_than_guessing(tmp_path, monkeypatch):
    """What the config says, but shorter and in a directory of its own."""
    monkeypatch.chdir(CONFIG.parent)
    words = ["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=5"]
    cli = lumen.CLI(args=words)
    assert cli.trainer.current_epoch == 5
    assert cli.trainer.callback_metrics["val_acc"] > 0.5


def test_a_table_is_read_as_it_stands_there(tmp_path):
    """Ten rows: six to train, two to validate, two to test; none twice."""
    path = tmp_path / "rows.csv"
    path.write_text("size,kind,weight\n" + "".join(f"{n},{'odd' if n % 2 else 'even'},{n / 2}\n" for n in range(10)))
    data = Table(str(path), target="kind")
    data.setup("fit")
    assert (data.features, data.classes, data.names) == (2, 2, ["even", "odd"])
    rows, labels = (torch.cat(each) for each in zip(data.train[:], data.val[:], data.test[:], strict=True))
    assert sorted(rows[:, 0].tolist()) == list(range(10))
    assert torch.equal(rows[:, 1], rows[:, 0] / 2)
    assert torch.equal(labels, rows[:, 0].long() % 2)
