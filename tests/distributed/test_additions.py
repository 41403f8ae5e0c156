"""Additions of callbacks and the task to a checkpoint: `on_load_checkpoint` gets what `on_save_checkpoint` added."""

import shutil

import pytest
import torch

import lumen
from tests.helpers.checkpoint_additions import Average
from tests.helpers.sharded import list_tensors
from tests.helpers.tasks import Regression, loader, quiet_trainer


def fit_on_ranks(path, strategy, steps, resume):
    saver = lumen.ModelCheckpoint(dirpath=path / strategy, at_end=True)
    average = Average()
    options = {"max_steps": steps, "callbacks": [saver, average], "resume": resume, "devices": 1}
    if strategy != "single":
        options |= {"devices": 2, "strategy": {"ddp": lumen.DDP, "fsdp": lumen.FSDP}[strategy]()}
    options["accumulate_grad_batches"] = 2 if strategy == "single" else 1
    data = loader(96, dtype=torch.float64)
    quiet_trainer(path / f"{strategy}-{steps}", logger=False, **options).fit(Regression(dtype=torch.float64), data)
    return list_tensors(average.average), saver.last_model_path


@pytest.mark.parametrize(
    ("before", "after"), [("single", "fsdp"), ("fsdp", "single"), ("fsdp", "ddp"), ("ddp", "fsdp")]
)
def test_an_average_comes_back_under_every_strategy(group, tmp_path, before, after):
    def run(strategy, *arguments):
        if strategy == "single":
            return fit_on_ranks(tmp_path, strategy, *arguments)
        return group(2).run(fit_on_ranks, tmp_path, strategy, *arguments)[0]

    straight, _ = run(before, 4, None)
    shutil.rmtree(tmp_path)
    _, path = run(before, 2, None)
    resumed, _ = run(after, 4, path)
    for name, each in straight.items():
        torch.testing.assert_close(torch.tensor(resumed[name]), torch.tensor(each), rtol=1e-10, atol=1e-10)
