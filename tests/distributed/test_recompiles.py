"""Compiled runs on several processes: each process compiles in its first steps only."""

import warnings

import pytest

import lumen
from tests.helpers.recompiles import EPOCHS, Deep, count_compilations

BLOCKS = {"blocks": ["Block"]}


def train_compiled(folder, strategy, setting):
    for message in ("The .grad attribute of a Tensor", ".torch.jit"):  # torch's own code warns when it compiles
        warnings.filterwarnings("ignore", message)
    callbacks = [lumen.EMA(0.9)]
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "strategy": strategy}
    return count_compilations(folder, Deep(), setting=setting, callbacks=callbacks, **options)


@pytest.mark.parametrize(("strategy", "setting"), [("ddp", {}), ("ddp", BLOCKS), ("fsdp", BLOCKS)])
def test_no_rank_recompiles_after_first_epoch(group, tmp_path, strategy, setting):
    for first, *others in group(2).run(train_compiled, tmp_path, strategy, setting):
        assert others == [first] * (EPOCHS - 1)
        assert first[:2] == (2, 0)
