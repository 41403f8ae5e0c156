"""`lumen export`: standard tools load its files, and a refused export writes nothing."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import lumen
from lumen.cli import main
from tests.helpers.tasks import Regression, loader, quiet_trainer


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def export(*words):
    assert main(["export", *map(str, words)]) == 0


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))  # neither can be divided evenly


class Blocks(Regression):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 5), Block(), Block(), nn.Linear(5, 1))


def train_sharded(folder):
    trainer = quiet_trainer(folder, max_steps=3, strategy=lumen.FSDP())
    trainer.fit(task := Blocks(), loader())
    return {name: tensor.full_tensor().tolist() for name, tensor in task.state_dict().items()}


def test_what_fsdp_saved_on_two_processes_is_consolidated(group, tmp_path):
    expected, same_ones = group(2).run(train_sharded, tmp_path)
    assert expected == same_ones
    assert len(list(Path("runs/run/checkpoints/step-00000003/model").iterdir())) == 2  # files of each process
    export("runs/run", "--output", "whole.safetensors")
    found = load_file("whole.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected
    Blocks().load_state_dict(found, strict=True)
