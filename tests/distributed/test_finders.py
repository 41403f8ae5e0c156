"""Results of finders on several processes: the run equals that of one process with the same results."""

import shutil

import pytest
import torch

import lumen
from tests.helpers.group import assert_equal
from tests.helpers.optimizer_state import read_unsharded_state
from tests.helpers.tasks import Regression, loader, quiet_trainer

STEPS = 14


class Cramped(Regression):
    """Task that runs out of memory if batches are too large."""

    def __init__(self, lr=1e-6):
        super().__init__(lr, dtype=torch.float64)

    def training_step(self, batch):
        if len(batch[0]) > 20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch)


class Sized(lumen.DataModule):
    def __init__(self, batch_size=2):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader(200, self.hparams.batch_size, dtype=torch.float64)


def fit(path, strategy, steps):
    """Return the final state and the results of the search at the start of the run."""
    task, data = Cramped(), Sized()
    finders = [lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40), lumen.BatchSizeFinder()]
    trainer = quiet_trainer(
        path, max_steps=steps, callbacks=finders, global_batch_size=32, resume="auto", strategy=strategy
    )
    trainer.fit(task, datamodule=data)
    found = {"lr": task.hparams.lr, "batch_size": data.hparams.batch_size}
    return found | {name: value.numpy() for name, value in read_unsharded_state(task).items()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_after_tuning_resumes_on_several_ranks(group, tmp_path, strategy):
    alone = fit(tmp_path / "alone", "auto", STEPS)
    assert (alone["lr"] > 1e-3, alone["batch_size"]) == (True, 16)
    fit(tmp_path / "whole", "auto", 5)
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    ended = group(2).run(fit, tmp_path / "whole", strategy, STEPS)
    for each in ended:
        assert_equal(each, alone, 1e-10)
    group(2).run(fit, tmp_path / "parts", strategy, 9)
    for one, other in zip(group(2).run(fit, tmp_path / "parts", strategy, STEPS), ended, strict=True):
        assert_equal(one, other, 0.0)
