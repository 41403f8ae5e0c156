"""Less memory on one process: the step is unchanged, and all ranks learn the max samples."""

import pytest
import torch
from torch import nn

from lumen import DDP, FSDP
from lumen.errors import ConfigError, TrainingError
from tests.helpers.limited_memory import Cramped, Weighed, WeighedBefore
from tests.helpers.tasks import bare_trainer, loader, weights

KINDS = {"plain": Cramped, "weighed": Weighed, "weighed before": WeighedBefore}


def train(folder, kind, fits, where, strategy="auto", batch_size=8, **options):
    """Return weights, max samples and the sizes of tried batches after two epochs of 50 samples in batches of 32."""
    strategy = DDP(find_unused_parameters=True) if strategy == "find unused" else strategy
    task = KINDS[kind](fits, where, ranks=(1,))
    task = task if options.get("precision", "fp64") == "fp64" else task.float()
    options = {"max_epochs": 2, "precision": "fp64", "global_batch_size": 32} | options
    trainer = bare_trainer(folder, strategy=strategy, halve_on_oom=fits < 100, **options)
    trainer.fit(task, loader(50, batch_size, dtype=next(task.parameters()).dtype))
    return weights(task), trainer.progress.fits, task.sizes


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("kind", "strategy"), [(kind, "auto") for kind in KINDS] + [("plain", "find unused")])
def test_halved_batches_make_the_same_step(group, tmp_path, where, kind, strategy):
    """The second step has 18 samples in three batches: two on the first process, one on the second."""
    whole = group(2).run(train, tmp_path, kind, 10**6, where, strategy)
    halved = group(2).run(train, tmp_path, kind, 3, where, strategy)
    for (expected, _, _), (found, fits, _) in zip(whole, halved, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
        assert fits == 2
    assert torch.equal(halved[0][0], halved[1][0])
    first, second = (sizes for _, _, sizes in halved)
    assert first == [8, 8, *[2] * 5, *[2] * 8, *[2] * 5]  # in the second step, a batch of 8 and one of 2
    assert second == [8, 4, *[2] * 8, *[2] * 4, *[2] * 8, *[2] * 4]


def test_a_gradient_scaler_sees_the_same_step(group, tmp_path):
    """All ranks agree once on the first guess of the sum of weights, the failing process too."""
    whole, halved = (
        group(2).run(train, tmp_path, "weighed", fits, "backward", precision="fp16") for fits in (10**6, 3)
    )
    for (expected, _, _), (found, fits, _) in zip(whole, halved, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3)
        assert fits == 2


class Late(Weighed):
    """Task without a loss of its first batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch) if batch_idx else None


def train_late(folder):
    task = Late(3, "backward", ranks=(1,)).float()
    trainer = bare_trainer(folder, max_steps=3, global_batch_size=8, halve_on_oom=True, precision="fp16")
    trainer.fit(task, loader(50, 8))
    return trainer.global_step, weights(task)


def test_first_guess_waits_for_a_late_loss(group, tmp_path):
    """The first process runs more backwards of zeros than the second."""
    (steps, first), (_, second) = group(2).run(train_late, tmp_path)
    assert steps == 3
    assert torch.equal(first, second)


def test_halving_is_exact_while_memory_suffices(group, tmp_path):
    without, flagged = (group(2).run(train, tmp_path, "plain", fits, "forward") for fits in (10**6, 99))
    for (expected, *_), (found, *_) in zip(without, flagged, strict=True):
        assert torch.equal(found, expected)


class Forgetting(Cramped):
    """Task that skips a layer."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Linear(2, 2, dtype=torch.float64)


def forget(folder):
    with pytest.raises(TrainingError, match="2 parameters did not contribute to the loss of rank") as caught:
        bare_trainer(folder, strategy="auto", halve_on_oom=True, max_steps=2, precision="fp64").fit(
            Forgetting(), loader(50, 8, dtype=torch.float64)
        )
    return "unused.weight, unused.bias" in str(caught.value)


def test_unused_parameter_is_still_an_error(group, tmp_path):
    assert group(2).run(forget, tmp_path) == [True, True]


def refuse(folder):
    """Return the sizes of batches that the task gets under FSDP, in training and in an evaluation."""
    task = Cramped()
    for stage in ("fit", "validate"):
        trainer = bare_trainer(folder, strategy=FSDP(), halve_on_oom=True, max_steps=1, precision="fp64")
        with pytest.raises(ConfigError, match="halve_on_oom: the processes communicate in each forward"):
            getattr(trainer, stage)(task, loader(8, dtype=torch.float64))
    return task.sizes


def test_strategies_whose_forwards_communicate_refuse_halving(group, tmp_path):
    assert group(2).run(refuse, tmp_path) == [[], []]
