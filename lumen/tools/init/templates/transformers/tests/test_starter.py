"""The project trains as its configuration says, and the data is what it should be."""

import math
from pathlib import Path

import lumen

from starter.data import Names

CONFIG = Path(__file__).parents[1] / "starter.yaml"
QUICK = ["--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=5"]


def test_a_few_steps_are_better_than_guessing(tmp_path, monkeypatch):
    """What the config says, but shorter and in a directory of its own."""
    monkeypatch.chdir(CONFIG.parent)
    cli = lumen.CLI(args=["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", *QUICK])
    assert cli.trainer.global_step == 20
    assert cli.trainer.callback_metrics["val_loss"] < math.log(cli.datamodule.classes)


def test_a_batch_is_as_long_as_its_longest_text():
    """The mask says which tokens are of the text: its bytes, and one for its end."""
    batch = Names().collate([("DIGIT ONE", 2), ("SNOWMAN WITHOUT SNOW", 4)])
    assert batch["input_ids"].shape == (2, 21)
    assert batch["attention_mask"].sum(dim=1).tolist() == [10, 21]
    assert batch["labels"].tolist() == [2, 4]
