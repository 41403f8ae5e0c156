"""Unsharded matrices for optimizers under FSDP: updates equal one process, and any strategy reads the checkpoints."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.errors import ConfigError
from lumen.optim import WholeMatrices
from tests.helpers.checkpoints import is_same_tensor, read_tensors
from tests.helpers.sharded import list_tensors
from tests.helpers.tasks import Saving, bare_trainer, loader, quiet_trainer
from tests.helpers.whole_matrices import KINDS, Matrices

STRATEGIES = {
    "auto": lambda: "auto",
    "ddp": lambda: "ddp",
    "fsdp": lambda: "fsdp",
    "copies": lambda: lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=1),
}


def train(folder, strategy, kind, max_steps=8):
    """Return the parameters, and whether the optimizer's state is sharded."""
    task = Matrices(kind)
    options = {"max_steps": max_steps, "strategy": STRATEGIES[strategy](), "resume": "auto", "gradient_clip_val": 0.5}
    trainer = quiet_trainer(folder, global_batch_size=12, **options)
    trainer.fit(task, loader(50, 4, dtype=torch.float64))
    state = trainer.optimizers[0].state[task.net[0].weight]
    held = [each for each in state.values() if isinstance(each, torch.Tensor) and each.ndim == 2]
    return list_tensors(dict(task.named_parameters())), [hasattr(each, "to_local") for each in held]


def read_contents(folder):
    checkpoint = Checkpoint.open(find_checkpoints(folder / "runs" / "run" / "checkpoints")[-1])
    return read_tensors(checkpoint.path, "model", "optimizer"), checkpoint.state["optimizer"]


def close(ours, theirs):
    for name, each in theirs.items():
        torch.testing.assert_close(torch.tensor(ours[name]), torch.tensor(each), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_several_processes_make_the_updates_of_one(group, tmp_path, kind):
    alone, cut = train(tmp_path / "alone", "auto", kind)
    assert not any(cut)
    for strategy in ("fsdp", "copies", "ddp"):
        for found, cut in group(2).run(train, tmp_path / strategy, strategy, kind):
            close(found, alone)
            assert cut
            assert all(cut) == (strategy != "ddp")
        theirs, ours = read_contents(tmp_path / strategy), read_contents(tmp_path / "alone")
        assert theirs[0].keys() == ours[0].keys()
        assert theirs[1] == ours[1]  # including counters and options
        for name, each in ours[0].items():
            torch.testing.assert_close(theirs[0][name], each, rtol=0, atol=1e-9)


def write(root, strategy, kind):
    trainer = bare_trainer(
        root, strategy=strategy, global_batch_size=12, max_steps=3, callbacks=Saving(3, root / f"{strategy}-{kind}")
    )
    trainer.fit(Matrices(kind), loader(50, 4, dtype=torch.float64))


def read(root, source, strategy, kind):
    """Load a checkpoint or begin, save the loaded state, and train two more steps."""
    options = {"strategy": strategy, "global_batch_size": 12, "max_steps": 5}
    if source is not None:
        to = root / f"{source}-read-by-{strategy}"
        saving = lumen.LambdaCallback(on_fit_start=lambda trainer, _: trainer.save_checkpoint(to))
        options |= {"resume": root / source, "callbacks": saving}
    trainer = bare_trainer(root, **options)
    task = Matrices(kind)
    trainer.fit(task, loader(50, 4, dtype=torch.float64))
    return list_tensors(dict(task.named_parameters()))


@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
def test_any_strategy_resumes_from_any_other(group, tmp_path, kind):
    def on(strategy, function, *args):
        return function(*args) if strategy == "auto" else group(2).run(function, *args)[0]

    alone = read(tmp_path, None, "auto", kind)
    for writer in ("auto", "ddp", "fsdp"):
        on(writer, write, tmp_path, writer, kind)
    for writer, reader in (("fsdp", "auto"), ("auto", "fsdp"), ("ddp", "fsdp"), ("fsdp", "fsdp"), ("fsdp", "ddp")):
        source = f"{writer}-{kind}"
        found = on(reader, read, tmp_path, source, reader, kind)
        checkpoints = [Checkpoint.open(tmp_path / name) for name in (source, f"{source}-read-by-{reader}")]
        assert checkpoints[0].state["optimizer"] == checkpoints[1].state["optimizer"]
        for section in ("model", "optimizer"):
            names = checkpoints[0].list_tensor_names(section)
            assert sorted(names) == sorted(checkpoints[1].list_tensor_names(section))
            assert all(is_same_tensor(*(each.read_tensor(section, name) for each in checkpoints)) for name in names)
        close(found, alone)


@pytest.mark.parametrize("kind", ["Muon", "Shampoo"])
def test_resumed_fsdp_run_is_exact(group, tmp_path, kind):
    whole = group(2).run(train, tmp_path / "whole", "fsdp", kind)
    for steps in (3, 6, 8):
        parts = group(2).run(train, tmp_path / "parts", "fsdp", kind, steps)
    assert parts == whole
    assert is_same_tensor(read_contents(tmp_path / "parts")[0], read_contents(tmp_path / "whole")[0])


class Averaging(Matrices):
    """Task whose optimizer cannot update sharded tensors."""

    def configure_optimizers(self):
        return torch.optim.Adafactor(self.parameters())


class Counting(Optimizer):
    """Optimizer that keeps one number for all parameters, in one of three places."""

    def __init__(self, params, place):
        super().__init__(params, {"lr": 0.1, "calls": 0})
        self.place, self.calls = place, 0

    @torch.no_grad()
    def step(self, closure=None):
        if self.place == "state":
            self.state["calls"] = self.state.get("calls", 0) + 1
        elif self.place == "attribute":
            self.calls += 1
        else:
            self.param_groups[0]["calls"] = sum(p.grad.numel() for p in self.param_groups[0]["params"])
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])


def list_refusals():
    found = []
    for place in ("attribute", "state", "group"):
        net = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
        fully_shard(net)
        optimizer = WholeMatrices(Counting(net.parameters(), place))
        net(torch.ones(2, 6)).sum().backward()
        with pytest.raises(ConfigError) as caught:
            optimizer.step()
        found.append(str(caught.value))
    return found


def test_state_of_all_parameters_together_is_refused(group):
    for found in group(2).run(list_refusals):
        assert [each.partition(" for all")[0] for each in found] == ["WholeMatrices: Counting keeps calls"] * 3


def catch_error(folder):
    with pytest.raises(ConfigError, match=r"Use lumen.optim.WholeMatrices\(torch.optim.Muon\(...\)\)"):
        bare_trainer(folder, strategy="fsdp", max_steps=1).fit(Matrices("Muon", False), loader(dtype=torch.float64))
    with pytest.raises(RuntimeError) as caught:
        bare_trainer(folder, strategy="fsdp", max_steps=1).fit(Averaging("Muon"), loader(dtype=torch.float64))
    assert "write lumen.optim.WholeMatrices(Adafactor(...))" in caught.value.__notes__[0]


def test_optimizers_that_need_whole_parameters_are_named(group, tmp_path):
    group(2).run(catch_error, tmp_path)
