"""Spikes of steps over all processes: one process, DDP and FSDP skip, or roll back, the same steps."""

import pytest
import torch

import lumen
from tests.helpers.sharded import unshard
from tests.helpers.tasks import Regression, loader, quiet_trainer

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Weighed(Regression):
    """Task whose forward returns the weights, different ones on each process."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch), 1.0 + batch_idx % 3


def fit(path, strategy, **detecting):
    detection = lumen.SpikeDetection(window=4, warmup=3, **detecting)
    goes_back = "action" in detecting
    options = {"devices": 1, "accumulate_grad_batches": 4}
    if strategy != "single":
        options = {"devices": 2, "accumulate_grad_batches": 2, "strategy": strategy}
    if not goes_back:
        options |= {"logger": False, "enable_checkpointing": False}
    task = Weighed(dtype=torch.float64)
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
    trainer = quiet_trainer(
        path, max_epochs=4, callbacks=[detection, *[saver] * goes_back], gradient_clip_val=0.5, **options
    )
    trainer.fit(task, loader(75, 4, dtype=torch.float64))
    parameters = [unshard(each).tolist() for each in task.parameters()]
    return parameters, detection.state_dict(), trainer.global_step, trainer.progress.left_out


@pytest.mark.parametrize(
    "detecting",
    [
        {"rtol": 0.25, "max_in_a_row": 99},
        {"monitor": "grad_norm", "rtol": 0.25, "max_in_a_row": 99},
        {"rtol": 0.3, "action": "rollback", "before": 1, "after": 0, "max_rollbacks": 99},
    ],
    ids=["loss", "grad_norm", "rollback"],
)
def test_ranks_skip_the_steps_of_a_single_process(group, tmp_path, detecting):
    alone, state, steps, left_out = fit(tmp_path / "single", "single", **detecting)
    assert 2 < state["spikes"] < 12 or len(left_out) > 1
    for strategy in ("ddp", "fsdp"):
        ranks = group(2).run(fit, tmp_path / strategy, strategy, **detecting)
        assert ranks[0] == ranks[1]
        parameters, found, *same = ranks[0]
        assert same == [steps, left_out]
        assert (found["spikes"], found["seen"]) == (state["spikes"], state["seen"])
        compared = [(found["values"], state["values"]), *zip(parameters, alone, strict=True)]
        for mine, theirs in compared:
            torch.testing.assert_close(*(torch.tensor(each, dtype=torch.float64) for each in (mine, theirs)), **CLOSE)
