"""Tests of the project: its config trains a model, and predictions do not depend on later tokens."""

import math
from pathlib import Path

import lumen
import torch

from starter.task import GPT

CONFIG = Path(__file__).parents[1] / "starter.yaml"
QUICK = ["--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=2"]


def test_short_training_beats_guessing(tmp_path, monkeypatch):
    """Train with the config of the project, but for 20 steps and in a temporary directory."""
    monkeypatch.chdir(CONFIG.parent)
    cli = lumen.CLI(args=["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", *QUICK])
    assert cli.trainer.global_step == 20
    assert cli.trainer.callback_metrics["val_loss"] < math.log(cli.datamodule.vocab_size)


def test_predictions_ignore_later_tokens():
    """Otherwise the model would learn to copy the targets."""
    model = GPT(vocab_size=10, block_size=8, width=16).eval()
    ids = torch.randint(10, (1, 8))
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 10
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
