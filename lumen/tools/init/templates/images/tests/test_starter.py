"""The project trains as its configuration says, and the model is what it should be."""

from pathlib import Path

import lumen
import pytest
import torch

from starter.task import Classifier

CONFIG = Path(__file__).parents[1] / "starter.yaml"


def test_two_epochs_are_better_than_guessing(tmp_path, monkeypatch):
    """What the config says, but shorter and in a directory of its own."""
    monkeypatch.chdir(CONFIG.parent)
    words = ["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=2"]
    cli = lumen.CLI(args=words)
    assert cli.trainer.current_epoch == 2
    assert cli.trainer.callback_metrics["val_acc"] > 0.3


@pytest.mark.parametrize("size", [8, 28])
def test_images_of_any_size_get_a_logit_for_each_class(size):
    """It pools what it sees."""
    assert Classifier(channels=3, classes=5)(torch.zeros(2, 3, size, size)).shape == (2, 5)
