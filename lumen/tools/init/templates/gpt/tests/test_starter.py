"""The project trains as its configuration says, and the model is what it should be."""

import math
from pathlib import Path

import lumen
import torch

from starter.task import GPT

CONFIG = Path(__file__).parents[1] / "starter.yaml"
QUICK = ["--trainer.max_steps=20", "--trainer.val_check_interval=20", "--trainer.limit_val_batches=2"]


def test_a_few_steps_are_better_than_guessing(tmp_path, monkeypatch):
    """What the config says, but shorter and in a directory of its own."""
    monkeypatch.chdir(CONFIG.parent)
    cli = lumen.CLI(args=["fit", "--config", str(CONFIG), f"--trainer.default_root_dir={tmp_path}", *QUICK])
    assert cli.trainer.global_step == 20
    assert cli.trainer.callback_metrics["val_loss"] < math.log(cli.datamodule.vocab_size)


def test_no_prediction_depends_on_a_later_token():
    """Else it would learn to copy the answer."""
    model = GPT(vocab_size=10, block_size=8, width=16).eval()
    ids = torch.randint(10, (1, 8))
    changed = ids.clone()
    changed[:, 5:] = (ids[:, 5:] + 1) % 10
    before, after = model(ids), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
