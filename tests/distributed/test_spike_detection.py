"""Spikes are those of the step over all processes: single, DDP and FSDP leave out the same updates."""

import pytest
import torch
from torch.distributed.tensor import DTensor

import lumen
from tests.helpers.tasks import Regression, bare_trainer, loader


class Weighed(Regression):
    """Weights that only the forward tells, other ones on each process."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch), 1.0 + batch_idx % 3


def fit(path, strategy, monitor):
    detection = lumen.SpikeDetection(monitor, rtol=0.25, window=4, warmup=3, max_in_a_row=99)
    options = {"devices": 1, "accumulate_grad_batches": 4}
    if strategy != "single":
        options = {"devices": 2, "accumulate_grad_batches": 2, "strategy": strategy}
    task = Weighed(dtype=torch.float64)
    trainer = bare_trainer(path, max_epochs=4, callbacks=[detection], gradient_clip_val=0.5, **options)
    trainer.fit(task, loader(75, 4, dtype=torch.float64))
    whole = [each.full_tensor() if isinstance(each, DTensor) else each for each in task.parameters()]
    return [each.tolist() for each in whole], detection.state_dict(), trainer.global_step


@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_processes_leave_out_the_updates_that_one_does(group, tmp_path, strategy, monitor):
    alone, state, steps = fit(tmp_path, "single", monitor)
    assert 2 < state["spikes"] < 12
    ranks = group(2).run(fit, tmp_path, strategy, monitor)
    assert ranks[0] == ranks[1]
    parameters, found, found_steps = ranks[0]
    assert (found["spikes"], found["seen"], found_steps) == (state["spikes"], state["seen"], steps)
    torch.testing.assert_close(torch.tensor(found["values"]), torch.tensor(state["values"]), rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(parameters, alone, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), rtol=1e-10, atol=1e-10)
