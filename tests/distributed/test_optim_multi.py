"""Several optimizers as one: training equals a loop that steps each of them, and users of the optimizer see one."""

import pytest
from torch.distributed.tensor import DTensor

import lumen
from lumen.checkpoint import Checkpoint
from tests.helpers.checkpoints import is_same_tensor, read_tensors
from tests.helpers.optim_multi import make_task
from tests.helpers.tasks import Saving, bare_trainer, loader


class SaveAtOnce(lumen.Callback):
    """Callback that saves the loaded state and records whether the optimizers' state is sharded."""

    def __init__(self, path):
        self.path = path

    def on_fit_start(self, trainer, task):
        trainer.save_checkpoint(self.path)
        entries = [
            entry for each in trainer.optimizers[0].state.values() for key, entry in each.items() if key != "step"
        ]
        (self.is_cut,) = {isinstance(entry, DTensor) for entry in entries}


def write(root, strategy, processes):
    trainer = bare_trainer(
        root, strategy=strategy, global_batch_size=8, max_steps=3, callbacks=Saving(3, root / f"{strategy}-{processes}")
    )
    trainer.fit(make_task(dropout=0.1), loader())


def read(root, source, strategy):
    """Load a checkpoint, save the loaded state, and train one more step."""
    saving = SaveAtOnce(root / f"{source}-read-by-{strategy}")
    trainer = bare_trainer(
        root, strategy=strategy, global_batch_size=8, max_steps=4, resume=root / source, callbacks=saving
    )
    trainer.fit(make_task(dropout=0.1), loader())
    assert trainer.global_step == 4
    return saving.is_cut


def read_contents(path):
    return read_tensors(path, "model", "optimizer"), Checkpoint.open(path).state["optimizer"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_multi_optimizer_checkpoints_load_under_other_strategies(group, tmp_path, strategy):
    group(2).run(write, tmp_path, strategy, 2)
    write(tmp_path, "single", 1)
    assert not read(tmp_path, f"{strategy}-2", "single")
    assert group(2).run(read, tmp_path, "single-1", strategy) == [strategy == "fsdp"] * 2
    for source, reader in ((f"{strategy}-2", "single"), ("single-1", strategy)):
        (ours, state), (theirs, other) = (
            read_contents(tmp_path / name) for name in (source, f"{source}-read-by-{reader}")
        )
        assert is_same_tensor(ours, theirs)
        assert state == other
        assert {key: {*state["state"][key]} for key in ("net.0.weight", "net.0.bias")} == {
            "net.0.weight": {"momentum_buffer"},
            "net.0.bias": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
        }
