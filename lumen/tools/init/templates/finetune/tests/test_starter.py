"""Tests of the project: its config trains the adapter alone, and only answers count in the loss."""

from pathlib import Path

import lumen
import pytest
import torch
from transformers import AutoModelForCausalLM

from starter import example
from starter.data import IGNORED, Pairs

CONFIG = Path(__file__).parents[1] / "starter.yaml"


@pytest.fixture(autouse=True)
def _example(tmp_path, monkeypatch):
    """Write the model and the pairs of the example to a temporary directory, and work there."""
    monkeypatch.chdir(tmp_path)
    example.main()


def test_short_training_changes_the_adapter_alone():
    """Train with the config of the project, but for 40 steps and in a temporary directory."""
    cli = lumen.CLI(args=["fit", "--config", str(CONFIG), "--trainer.max_steps=40", "--trainer.val_check_interval=20"])
    base = AutoModelForCausalLM.from_pretrained("base").state_dict()
    trained = cli.model.model.unload().state_dict()
    assert all(torch.equal(trained[name], value) for name, value in base.items())
    assert cli.trainer.callback_metrics["val_loss"] < 3


def test_only_the_answer_has_labels():
    """The prompt, the line break after the prompt and the padding count nothing."""
    data = Pairs("pairs.jsonl", "base")
    batch = data.collate([{"prompt": "14", "answer": "XIV"}, {"prompt": "1", "answer": "I"}])
    assert batch["attention_mask"].sum(dim=1).tolist() == [7, 4]
    counted = [labels[labels != IGNORED] for labels in batch["labels"]]
    assert [data.tokenizer.decode(labels) for labels in counted] == ["XIV</s>", "I</s>"]
