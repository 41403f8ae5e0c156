"""Tests of the project: its config trains a model, and batches are padded."""

import math
from pathlib import Path

import lumen

from starter.data import Names

CONFIG = Path(__file__).parents[1] / "starter.yaml"
QUICK = ["--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=5"]


def test_short_training_beats_guessing(tmp_path, monkeypatch):
    """Train with the config of the project, but for 20 steps and in a temporary directory."""
    monkeypatch.chdir(CONFIG.parent)
    cli = lumen.CLI(args=["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", *QUICK])
    assert cli.trainer.global_step == 20
    assert cli.trainer.callback_metrics["val_loss"] < math.log(cli.datamodule.classes)


def test_batch_is_padded_to_longest_text():
    """The attention mask covers the bytes of a text and the token at its end."""
    batch = Names().collate([("DIGIT ONE", 2), ("SNOWMAN WITHOUT SNOW", 4)])
    assert batch["input_ids"].shape == (2, 21)
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 21]
    assert batch["labels"].tolist() == [2, 4]
