"""Tests of the project: its config trains a model, training images vary, and images of any size are taken."""

from pathlib import Path

import lumen
import pytest
import torch

from starter.data import Digits
from starter.task import Classifier

CONFIG = Path(__file__).parents[1] / "starter.yaml"


def test_short_training_beats_guessing(tmp_path, monkeypatch):
    """Train with the config of the project, but for two epochs and in a temporary directory."""
    monkeypatch.chdir(CONFIG.parent)
    arguments = ["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=2"]
    cli = lumen.CLI(args=arguments)
    assert cli.trainer.current_epoch == 2
    assert cli.trainer.callback_metrics["val_acc"] > 0.3


def test_training_images_vary_and_others_do_not():
    """An image is augmented each time it is read, but keeps its size."""
    data = Digits()
    data.setup("fit")
    assert data.train[0][0].shape == (1, 8, 8)
    assert not torch.equal(data.train[0][0], data.train[0][0])
    assert torch.equal(data.val[0][0], data.val[0][0])


@pytest.mark.parametrize("size", [8, 28])
def test_images_of_any_size_are_classified(size):
    """The pooling layer gives images of any size the same number of features."""
    assert Classifier(channels=3, classes=5)(torch.zeros(2, 3, size, size)).shape == (2, 5)
