"""Examples on several processes: two processes train exactly like one, in float64."""

import contextlib
import shlex

import pytest
import torch
from safetensors.torch import load_file

from datamodules.noise import DigitsAndNoise
from datamodules.packed import PackedSurnames
from datamodules.views import TwoViews
from lumen.cli import main
from models.byol import BYOL
from models.gan import Gan
from models.lora_gpt2 import LoraAnswers
from tests.helpers.checkpoints import read_tensors
from tests.helpers.documented_commands import find_commands, make_home
from tests.helpers.following_training import Answers, Asking
from tests.helpers.tasks import bare_trainer, quiet_trainer, weights


def train(folder, task, data, **options):
    options = {"precision": "64-true", "max_epochs": 2, "limit_val_batches": 0} | options
    trainer = bare_trainer(folder, **options)
    trainer.fit(task, data)
    return weights(task).tolist(), trainer.global_step


def train_gan(folder, strategy, batch_size):
    torch.manual_seed(0)
    data = DigitsAndNoise(noise=8, batch_size=batch_size)
    task = Gan(noise=8, width=4, penalty_every=2)
    return train(folder, task, data, strategy=strategy, global_batch_size=16, limit_train_batches=3)


def train_byol(folder, strategy, batch_size):
    torch.manual_seed(0)
    data = TwoViews(batch_size=batch_size)
    task = BYOL(features=8, width=8, decay=0.9)
    return train(folder, task, data, strategy=strategy, global_batch_size=16, limit_train_batches=6)


@pytest.mark.parametrize(("train_it", "batch_size"), [(train_gan, 16), (train_byol, 8)], ids=["gan", "byol"])
def test_two_processes_train_what_one_does(group, tmp_path, train_it, batch_size):
    alone, steps = train_it(tmp_path, "auto", batch_size)
    assert steps == 6
    for found, count in group(2).run(train_it, tmp_path, "ddp", 8):
        assert count == steps
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)


def train_adapter(folder, strategy):
    """Train `lora_gpt2` and return the files written for peft."""
    config = {"vocab_size": 256, "n_positions": 48, "n_embd": 16, "n_layer": 2, "n_head": 2}
    torch.manual_seed(0)
    task = LoraAnswers(config, rank=2, warmup_steps=2)
    data = PackedSurnames(only="Finnish", labelled=48, batch_size=8, row=48)
    trainer = quiet_trainer(
        folder, strategy=strategy, precision="64-true", max_epochs=2, global_batch_size=16, limit_val_batches=0,
        enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(task, data)
    return load_file(trainer.run_directory / "adapter/adapter_model.safetensors")


def test_two_processes_write_the_adapter_of_one(group, tmp_path):
    alone = train_adapter(tmp_path / "alone", "auto")
    assert len(alone) == 8
    assert all(each.abs().max() > 0 for each in alone.values())
    for found in group(2).run(train_adapter, tmp_path / "two", "fsdp"):
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-10)


def run_in(home, *words):
    with contextlib.chdir(home):
        return main(words)


@pytest.mark.usefixtures("program_directory")
def test_gpt_on_a_mesh_equals_one_process(group, tmp_path):
    """The commands of the config run, and the parameters equal one process."""
    fit, predict = (shlex.split(line)[1:] for line in find_commands("models/gpt_mesh.yaml"))
    small = ["--trainer.precision=64-true", "--data.truncate=0.005", "--model.n_layer=1"]
    fit += ["--trainer.max_steps=3", "--trainer.val_check_interval=3", "--trainer.limit_val_batches=2", *small]
    homes = [tmp_path / name for name in ("mesh", "one")]
    for home in homes:
        home.mkdir()
        make_home(home)
    assert group(4).run(run_in, homes[0], *fit) == [0] * 4
    assert run_in(homes[1], *fit, "--trainer.devices=1", "--trainer.strategy=single") == 0
    mesh, one = (home / "runs/gpt_mesh" for home in homes)
    found, expected = (read_tensors(next((run / "checkpoints").glob("step-*")), "model") for run in (mesh, one))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert run_in(homes[0], *predict, "--model.max_new_tokens=2", *small) == 0


class Own(Answers):
    """Argument that is computed by each process from the training."""

    shards_itself = True

    def __len__(self):
        return self.length


def ask(folder, strategy, kind, accumulate=1, steps=7, **options):
    task = Asking() if kind is None else Asking(kind, length=2)
    options |= {"strategy": strategy, "accumulate_grad_batches": accumulate}
    quiet_trainer(folder, max_steps=steps, **options).fit(task)
    return task.met, task.held, task.weight.item()


def test_data_following_training_equals_single_process(group, tmp_path):
    _, _, weight = ask(tmp_path / "alone", "auto", None, accumulate=2)
    for met, held, found in group(2).run(ask, tmp_path / "ddp", "ddp", None):
        assert met == held
        assert found == pytest.approx(weight, abs=1e-12)


def test_data_following_each_rank_resumes_exactly(group, tmp_path):
    whole = group(2).run(ask, tmp_path / "whole", "ddp", Own)
    for met, held, _ in whole:
        assert met == held
        assert len(met) == 7
    first = group(2).run(ask, tmp_path / "parts", "ddp", Own, 1, 3)
    rest = group(2).run(ask, tmp_path / "parts", "ddp", Own, resume="auto")
    for (met, _, _), (more, _, found), (all_met, _, weight) in zip(first, rest, whole, strict=True):
        assert met + more == all_met
        assert found == weight
