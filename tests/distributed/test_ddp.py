"""DDP: several processes train exactly like one, and an unsupported setup raises one clear error on every rank."""

import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import lumen
from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.errors import ConfigError, LumenError, TrainingError
from tests.helpers.group import assert_equal, catch_message, run_on_ranks
from tests.helpers.tasks import Regression, bare_trainer, loader, make_numbers, quiet_trainer, regression_data


def read_state(task):
    return {name: value.detach().numpy() for name, value in task.state_dict().items()}


def fit(folder, task, data=None, **options):
    """Train a task; return the trainer and the final parameters."""
    trainer = bare_trainer(folder, **{"max_epochs": 2} | options)
    trainer.fit(task, loader(dtype=torch.float64) if data is None else data)
    return trainer, read_state(task)


def train_new(folder, kind, *args, **options):
    """Return the final parameters of a task of this class."""
    return fit(folder, kind(*args), **options)[1]


def train_and_read_steps(folder, kind, *args, **options):
    """Return the steps of a task of this class and its final parameters."""
    trainer, state = fit(folder, kind(*args), **options)
    return trainer.global_step, state


# ---------------------------------------------------------------------- options


def train(folder, options, **trainer):
    task = Regression(dtype=torch.float64)
    strategy = None if options is None else lumen.DDP(**options)
    return fit(folder, task, **trainer, **({} if strategy is None else {"strategy": strategy}))[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.0001},
        {"broadcast_buffers": False},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    ],
    ids=str,
)
def test_every_option_trains_what_one_process_trains(group, tmp_path, options):
    alone = train(tmp_path, None, accumulate_grad_batches=4)
    assert_equal(run_on_ranks(group, 2, train, tmp_path, options, accumulate_grad_batches=2), alone)


class Reentrant(Regression):
    """Task that uses a layer three times, twice under reentrant checkpointing."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.mix = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, inputs):
        inputs = self.mix(inputs)
        for _ in range(2):
            inputs = checkpoint(self.mix, inputs, use_reentrant=True)
        return self.net(inputs)


def train_reentrant(folder, batches):
    torch.manual_seed(0)
    return fit(folder, Reentrant(), accumulate_grad_batches=batches, max_epochs=1)[1]


def test_reentrant_checkpoints_train_what_one_process_trains(group, tmp_path):
    alone = train_reentrant(tmp_path, 4)
    assert_equal(run_on_ranks(group, 2, train_reentrant, tmp_path, 2), alone)


def test_all_ranks_start_with_weights_of_rank_0(group, tmp_path):
    alone = fit(tmp_path, Regression(optimizer="SGD", dtype=torch.float64), accumulate_grad_batches=2)[1]
    assert_equal(run_on_ranks(group, 2, train_what_ranks_built_differently, tmp_path), alone)


def train_what_ranks_built_differently(folder):
    task = Regression(optimizer="SGD", dtype=torch.float64)
    with torch.no_grad():
        for parameter in task.parameters():
            parameter.add_(float(os.environ["RANK"]))
    return fit(folder, task, strategy="ddp")[1]


def test_a_static_graph_trains_what_one_process_trains(group, tmp_path):
    alone = train(tmp_path, None, accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, train, tmp_path, {"static_graph": True}), alone)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_compressed_gradients_are_rounded_and_nothing_else(group, tmp_path, kind):
    alone = take_a_step(tmp_path, accumulate_grad_batches=2)
    compressed = run_on_ranks(group, 2, take_a_step, tmp_path, strategy=lumen.DDP(gradient_compression=kind))
    assert_equal(compressed, alone, 1e-2)
    assert any(abs(value - alone[name]).max() > 0 for name, value in compressed.items())


def take_a_step(folder, **options):
    return fit(folder, Regression(optimizer="SGD", lr=0.1, dtype=torch.float64), max_steps=1, **options)[1]


def test_an_unknown_compression_is_refused():
    with pytest.raises(ConfigError, match="gradient_compression"):
        lumen.DDP(gradient_compression="int8")


# ---------------------------------------------------------------------- parameters without gradients


class Branching(Regression):
    """Task with a branch that only some ranks use: of two ranks, rank r has the batches with `batch_idx % 2 == r`."""

    def __init__(self, users):
        super().__init__(dtype=torch.float64)
        self.branch = nn.Linear(6, 1).double()
        self.users = users

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        return loss + self.branch(batch[0]).square().mean() if batch_idx % 2 in self.users else loss


def test_unused_parameters_are_named_before_a_hang(group, tmp_path):
    for message in group(2).run(catch_message, TrainingError, train_new, tmp_path, Branching, (), strategy="ddp"):
        assert "branch.weight, branch.bias" in message
        assert "find_unused_parameters" in message


def test_unused_parameter_on_one_rank_ends_the_job(tmp_path):
    """The other rank waits for the missing gradient, so both need separate processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "from pathlib import Path\nfrom tests.distributed.test_ddp import Branching, fit\n"
        f"fit(Path({str(tmp_path)!r}), Branching((0,)), strategy='ddp')\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=os.environ | {"PYTHONPATH": "."})
    assert done.returncode != 0
    assert "did not contribute to the loss of rank 1: branch.weight, branch.bias" in done.stderr


def test_ranks_may_use_different_parameters_if_asked(group, tmp_path):
    alone = fit(tmp_path, Branching((0,)), accumulate_grad_batches=2)[1]
    strategy = lumen.DDP(find_unused_parameters=True)
    assert_equal(run_on_ranks(group, 2, train_new, tmp_path, Branching, (0,), strategy=strategy), alone)
    assert np.abs(alone["branch.weight"] - read_state(Branching((0,)))["branch.weight"]).max() > 0.01


class Unfreezing(Regression):
    """Task that trains its last layer only, and all layers after some steps."""

    def on_train_start(self):
        self.net[0].requires_grad_(False)

    def on_step_end(self):
        self.net[0].requires_grad_(self.global_step >= 2)


def test_layers_can_be_unfrozen_at_any_step(group, tmp_path):
    kind = partial(Unfreezing, dtype=torch.float64)
    alone = train_new(tmp_path, kind, accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, train_new, tmp_path, kind, strategy="ddp"), alone)


# ---------------------------------------------------------------------- branches and skips on some ranks only


class Choosy(Regression):
    """Task that skips some micro-batches, by number."""

    def __init__(self, left_out, weigh):
        super().__init__(dtype=torch.float64)
        self.left_out, self.weigh = left_out, weigh

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch)
        if batch_idx in self.left_out:
            return None
        return (loss, float(batch_idx + 1)) if self.weigh else loss


@pytest.mark.parametrize("weigh", [False, True], ids=["samples", "weights"])
@pytest.mark.parametrize("left_out", [(0,), (1, 3), (2, 3)], ids=str)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_none_skips_micro_batch_of_that_rank_only(group, tmp_path, weigh, left_out, options):
    task = train_new, tmp_path, Choosy, left_out, weigh
    alone = train_new(*task[1:], accumulate_grad_batches=4)
    assert_equal(run_on_ranks(group, 2, *task, strategy=lumen.DDP(**options), accumulate_grad_batches=2), alone)


class Constantly(Choosy):
    def training_step(self, batch, batch_idx):
        found = super().training_step(batch, batch_idx)
        return (torch.zeros((), dtype=torch.float64), 0) if found is None else found


@pytest.mark.parametrize("left_out", [(0,), (1, 3), (2, 3)], ids=str)
def test_constant_with_weight_0_skips_micro_batch(group, tmp_path, left_out):
    alone = train_new(tmp_path, Choosy, left_out, True, accumulate_grad_batches=4)
    constantly = train_new, tmp_path, Constantly, left_out, True
    assert_equal(train_new(*constantly[1:], accumulate_grad_batches=4), alone)
    assert_equal(run_on_ranks(group, 2, *constantly, strategy="ddp", accumulate_grad_batches=2), alone)


class Wrong(Regression):
    """Task that does one of the refused things, on every rank."""

    def __init__(self, what):
        super().__init__(dtype=torch.float64)
        self.what = what

    def training_step(self, batch):
        loss = super().training_step(batch)
        if self.what == "steps":
            self.optimizers().step()
        elif self.what == "goes backward":
            loss.backward(retain_graph=True)
        elif self.what == "root":
            return (loss * 0).sqrt()
        return {"returns None": None, "detaches": loss.detach(), "logarithm": (loss * -1).log()}.get(self.what, loss)


WRONG = {
    "returns None": "epoch 0 made no optimizer step: training_step returned None",
    "detaches": "a loss without a gradient",
    "steps": "step was called in a training step",
    "goes backward": "called a backward itself",
    "logarithm": "The first NaN of its forward was made by aten.log.default here:\n",
    "root": "Its forward was called here:\n",
    "has no data": "there is no batch to train on: TensorDataset has 3 samples, fewer than the batch_size 4",
}


def test_errors_of_one_process_raise_on_every_rank(group, tmp_path):
    for each in group(2).run(catch_error, tmp_path):
        assert each.keys() == WRONG.keys()
        for what, message in each.items():
            assert WRONG[what] in message


def catch_error(folder):
    said = {}
    for what in WRONG:
        data = DataLoader(make_numbers(3), 4, drop_last=True) if what == "has no data" else loader(dtype=torch.float64)
        trainer = bare_trainer(folder, max_epochs=1, strategy="ddp", detect_anomaly=what in ("logarithm", "root"))
        with pytest.raises(LumenError) as caught:
            trainer.fit(Wrong(what), data)
        said[what] = str(caught.value)
    return said


class Buffered(Choosy):
    """Task with buffers, one of which is in no checkpoint."""

    def __init__(self, left_out):
        super().__init__(left_out, weigh=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mask", torch.ones(6, dtype=torch.float64), persistent=False)

    def forward(self, inputs):
        self.seen += 1
        return super().forward(inputs * self.mask)


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}], ids=str)
def test_none_from_one_rank_waits_for_no_buffers(group, tmp_path, options):
    alone = train_new(tmp_path, Buffered, (1, 3), accumulate_grad_batches=2)
    ranks = group(2).run(train_new, tmp_path, Buffered, (1, 3), strategy=lumen.DDP(**options))
    for rank, state in enumerate(ranks):
        seen, expected = state.pop("seen"), alone.get("seen")
        assert_equal(state, {name: value for name, value in alone.items() if name != "seen"})
        assert seen < expected
        assert rank == 0 or options or seen > 0


class Alternating(Regression):
    """Task that uses one of two branches in each epoch, in turn; the other one has no gradient and does not change."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        torch.manual_seed(1)
        self.branches = nn.ModuleList(nn.Linear(6, 1).double() for _ in range(2))

    def training_step(self, batch):
        return nn.functional.mse_loss(self.branches[self.current_epoch % 2](self.net[2](batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def test_unused_parameters_are_unchanged_with_idle_rank(group, tmp_path):
    options = {"data": loader(20, 4, dtype=torch.float64), "max_epochs": 3}
    alone = train_new(tmp_path, Alternating, accumulate_grad_batches=3, **options)
    options |= {"global_batch_size": 12, "strategy": lumen.DDP(find_unused_parameters=True)}
    assert_equal(run_on_ranks(group, 2, train_new, tmp_path, Alternating, **options), alone)


class Overflowing(Regression):
    """Task whose last micro-batch of an epoch has a gradient that, once scaled, barely fits into float32."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            return sum(parameter.sum() for parameter in self.net.parameters()) * (2.5e38 / 65536)
        return super().training_step(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-42)


def test_overflows_are_independent_of_world_size(group, tmp_path):
    steps = count_updates(tmp_path, "single", 2)
    assert group(2).run(count_updates, tmp_path, "ddp", 1) == [steps, steps]


def count_updates(folder, strategy, accumulate):
    trainer = bare_trainer(
        folder, max_epochs=1, strategy=strategy, accumulate_grad_batches=accumulate, precision="fp16"
    )
    trainer.fit(Overflowing(), loader())
    return trainer.global_step, trainer.run.precision.state_dict()["scale"]


def test_step_skipped_by_all_ranks_is_no_update(group, tmp_path):
    steps, alone = train_and_read_steps(tmp_path, Choosy, (0, 1), False, accumulate_grad_batches=2)
    for each, state in group(2).run(train_and_read_steps, tmp_path, Choosy, (0, 1), False, strategy="ddp"):
        assert_equal(state, alone)
        assert each == steps


def test_weights_from_one_rank_raise_on_all(group, tmp_path):
    assert group(2).run(weigh_on_one_rank, tmp_path) == [True, True]


def weigh_on_one_rank(folder):
    task = Choosy((), torch.distributed.get_rank() == 1)
    with pytest.raises(TrainingError, match="always or never"):
        fit(folder, task, strategy="ddp")
    return True


@pytest.mark.parametrize("samples", [1, 3, 7, 50])
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_with_nothing_to_do_takes_part(group, tmp_path, world, samples):
    alone = train_few(tmp_path, samples, world)
    assert_equal(run_on_ranks(group, world, train_few, tmp_path, samples, strategy="ddp"), alone)


def test_idle_rank_in_first_step_equals_single_process(group, tmp_path):
    alone = train_few(tmp_path, 1, {0: 2, 1: 4})
    assert_equal(run_on_ranks(group, 2, train_few, tmp_path, 1, {0: 1, 1: 2}, strategy="ddp"), alone)


def train_few(folder, samples, accumulate=1, **options):
    data = loader(samples, 2, dtype=torch.float64)
    return fit(folder, Regression(dtype=torch.float64), data, accumulate_grad_batches=accumulate, **options)[1]


class Clamping(Regression):
    """Task that writes its weights in a hook: one that a rank without a batch skips, or one that every rank calls."""

    def __init__(self, hook):
        super().__init__(dtype=torch.float64)
        setattr(self, hook, self.clamp)

    def clamp(self, *args):
        with torch.no_grad():
            self.net[0].weight.clamp_(-0.2, 0.2)


def test_unequal_parameter_writes_raise_at_next_evaluation(group, tmp_path):
    assert group(2).run(clamp_on_some_ranks, tmp_path) == [True, True]


def clamp_on_some_ranks(folder):
    trainer = bare_trainer(folder, max_epochs=1, strategy="ddp")
    data = [loader(samples, dtype=torch.float64) for samples in (50, 8)]
    with pytest.raises(TrainingError, match=r"net\.0\.weight differs between rank 0 and rank 1"):
        trainer.fit(Clamping("on_train_batch_end"), data[0], val_dataloaders=data[1])
    return True


def test_equal_parameter_writes_on_all_ranks_are_supported(group, tmp_path):
    alone = train_new(tmp_path, Clamping, "on_before_zero_grad", accumulate_grad_batches=2)
    assert_equal(run_on_ranks(group, 2, train_new, tmp_path, Clamping, "on_before_zero_grad", strategy="ddp"), alone)


class Leaving(Regression):
    """Task that ends the first epochs from a hook at a certain micro-batch."""

    def __init__(self, at):
        super().__init__(dropout=0.5, dtype=torch.float64)
        self.at = at

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == self.at and self.current_epoch < 2 else None


@pytest.mark.parametrize(("accumulate", "at"), [(1, 2), (1, 3), (2, 0), (2, 5)])
def test_hook_on_one_rank_ends_epoch_on_all(group, tmp_path, accumulate, at):
    steps, alone = train_and_read_steps(tmp_path, Leaving, at, max_epochs=3, accumulate_grad_batches=2 * accumulate)
    options = {"max_epochs": 3, "accumulate_grad_batches": accumulate, "strategy": "ddp"}
    for each, state in group(2).run(train_and_read_steps, tmp_path, Leaving, at, **options):
        assert each == steps
        assert_equal(state, alone)


class StoppingAlone(Regression):
    """Task that requests a stop on one rank only."""

    def __init__(self, hook, at):
        super().__init__(dtype=torch.float64)
        self.at, self.rank = at, 1
        setattr(self, hook, self.stop)

    def stop(self, *args):
        if self.trainer.global_rank == self.rank and self.global_step == self.at:
            self.trainer.should_stop = True


class StoppingSilently(StoppingAlone):
    def validation_step(self, batch):
        """Log nothing."""


@pytest.mark.parametrize("task", [StoppingAlone, StoppingSilently])
@pytest.mark.parametrize(
    ("hook", "steps", "interval"),
    [
        ("on_train_start", 0, 1.0),
        ("on_validation_end", 4, 1.0),
        ("on_validation_end", 2, 2),
        ("on_train_epoch_end", 4, 2),
    ],
)
def test_one_rank_stops_run_in_hooks_outside_steps(group, tmp_path, task, hook, steps, interval):
    assert group(2).run(stop_in_hook, tmp_path, task, hook, steps, interval) == [steps, steps]


def stop_in_hook(folder, task, hook, steps, interval):
    trainer = bare_trainer(folder, max_epochs=5, strategy="ddp", val_check_interval=interval)
    data = [loader(samples, dtype=torch.float64) for samples in (64, 8)]
    trainer.fit(task(hook, steps), data[0], val_dataloaders=data[1])
    return trainer.global_step


IN_A_STEP = ["on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_step_end"]


@pytest.mark.parametrize("hook", IN_A_STEP)
@pytest.mark.parametrize("who", ["task", "callback"])
@pytest.mark.parametrize("saved_every", [2, 3, 100])
def test_one_rank_stops_run_in_step_hooks(group, tmp_path, hook, who, saved_every):
    steps, *_ = alone = stop_anywhere(tmp_path / "alone", hook, who, saved_every)
    assert alone == (steps, True)
    assert group(2).run(stop_anywhere, tmp_path, hook, who, saved_every) == [alone] * 2


def stop_anywhere(folder, hook, who, saved_every):
    task = StoppingAlone(hook if who == "task" else "stop", at=2)
    callbacks = [lumen.ModelCheckpoint(every_n_train_steps=saved_every)]  # also at the end
    if who == "callback":
        callbacks.append(lumen.LambdaCallback(**{hook: task.stop}))
    trainer = quiet_trainer(folder, max_epochs=5, strategy="auto", callbacks=callbacks, logger=False)
    task.rank = trainer.world_size - 1
    trainer.fit(task, loader(64, dtype=torch.float64))
    saved = Checkpoint.open(find_checkpoints(folder / "runs/run/checkpoints")[-1]).state["progress"]
    assert saved["step"] == trainer.global_step
    return trainer.global_step, saved["should_stop"]


class Unheard(lumen.Callback):
    """Callback that claims never to stop in a step, and stops."""

    may_stop_at_steps = False

    def on_step_end(self, trainer, task):
        task.stop()


def test_stop_outside_hooks_takes_effect_in_next_step(group, tmp_path):
    assert group(2).run(stop_unheard, tmp_path) == [3, 3]


def stop_unheard(folder):
    trainer = bare_trainer(folder, max_epochs=5, strategy="ddp", callbacks=[Unheard()])
    trainer.fit(StoppingAlone("stop", at=2), loader(64, dtype=torch.float64))
    return trainer.global_step


class Stopping(Regression):
    """Task that requests a stop after three steps, on every rank."""

    def __init__(self, hook, weigh):
        super().__init__(dtype=torch.float64)
        self.register_buffer("constant", torch.ones((), dtype=torch.float64))
        self.weigh = weigh
        setattr(self, hook, self.stop)

    def stop(self, *args):
        self.trainer.should_stop = self.global_step == 3

    def training_step(self, batch):
        loss = super().training_step(batch)
        return (loss, len(batch[0])) if self.weigh else loss


@pytest.mark.parametrize("weigh", [False, True], ids=["samples", "weights"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}], ids=str)
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_step_end"])
def test_stop_between_steps_equals_single_process(group, tmp_path, weigh, options, hook):
    alone = stop_together(tmp_path, weigh, None, hook)
    assert_equal(run_on_ranks(group, 2, stop_together, tmp_path, weigh, options, hook), alone)


def stop_together(folder, weigh, options, hook):
    task = Stopping(hook, weigh)
    strategy = {"accumulate_grad_batches": 2} if options is None else {"strategy": lumen.DDP(**options)}
    trainer, state = fit(folder, task, loader(64, dtype=torch.float64), **strategy)
    gradients = {f"gradient of {name}": each.grad.numpy() for name, each in task.named_parameters()}
    return state | gradients | {"step": trainer.global_step}


# ---------------------------------------------------------------------- optimizers, names, process lifetimes


def test_closure_sees_loss_of_all_ranks(group, tmp_path):
    alone = train_with_closure(tmp_path, "single", 2)
    assert_equal(run_on_ranks(group, 2, train_with_closure, tmp_path, "ddp", 1), alone, 1e-10)


def train_with_closure(folder, strategy, accumulate):
    task = Regression(optimizer="LBFGS", lr=0.5, dtype=torch.float64)
    return fit(folder, task, max_steps=4, strategy=strategy, accumulate_grad_batches=accumulate)[1]


class Unwrapping(Regression):
    """Task that records what code for a wrapped model finds in a step: its names, class and forward."""

    def training_step(self, batch):
        raw_model = self.module if hasattr(self, "module") else self
        self.found = [*raw_model.state_dict()], type(raw_model), raw_model.forward.__func__, type(raw_model.net)
        return super().training_step(batch)


def test_names_have_no_prefix_under_ddp(group, tmp_path):
    plain = Unwrapping()
    names = [*plain.state_dict()]
    expected = names, Unwrapping, Unwrapping.forward, nn.Sequential
    assert group(2).run(look_at_names, tmp_path) == [(expected, expected)] * 2
    (saved,) = find_checkpoints(tmp_path / "runs/run/checkpoints")
    assert sorted(Checkpoint.open(saved).list_tensor_names("model")) == sorted(names)


def look_at_names(folder):
    task = Unwrapping()
    quiet_trainer(folder, max_steps=1, strategy="ddp").fit(task, loader())
    return task.found, ([*task.state_dict()], type(task), task.forward.__func__, type(task.net))


class Wide(lumen.TaskModule):
    """Task with several buckets of gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)), nn.Linear(64, 1))

    def training_step(self, batch):
        return self.net(batch[0].repeat(1, 16)[:, :64]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Restarting(lumen.Callback):
    """Callback that wraps the task again at one step, like a process that begins there."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, task):
        if trainer.global_step == self.step:
            trainer.strategy.setup(task)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_gradient_summation_order_is_deterministic(group, tmp_path, options):
    """Three ranks and several buckets are enough: the order of summation shows in the last bits."""
    undisturbed = run_on_ranks(group, 3, train_wide, tmp_path, None, options)
    assert_equal(run_on_ranks(group, 3, train_wide, tmp_path, 3, options), undisturbed, 0.0)


def train_wide(folder, restarts_at, options):
    strategy = lumen.DDP(bucket_cap_mb=0.02, **options)
    callbacks = [] if restarts_at is None else [Restarting(restarts_at)]
    return fit(folder, Wide(), loader(60, 4), max_steps=6, strategy=strategy, callbacks=callbacks)[1]


class Teaching(Regression):
    """Task whose step changes untrained parameters, like the moving average of a teacher."""

    def __init__(self):
        super().__init__(dtype=torch.float64)
        self.teacher = nn.Parameter(torch.zeros((), dtype=torch.float64), requires_grad=False)

    def training_step(self, batch):
        with torch.no_grad():
            self.teacher += 1
        return super().training_step(batch)


def test_training_step_runs_once_per_batch(group, tmp_path):
    assert group(2).run(teach, tmp_path) == [3.0, 3.0]


def teach(folder):
    task = Teaching()
    fit(folder, task, max_steps=3, strategy="ddp")
    return task.teacher.item()


def test_the_string_and_the_object_are_the_same(group, tmp_path):
    by_name = run_on_ranks(group, 2, train_new, tmp_path, partial(Regression, dtype=torch.float64), strategy="ddp")
    assert_equal(run_on_ranks(group, 2, train, tmp_path, {}), by_name, 0.0)


def test_one_process_can_use_ddp_too(tmp_path):
    data = DataLoader(TensorDataset(*regression_data(20)), 4)
    plain = fit(tmp_path, Regression(), data)[1]
    assert_equal(fit(tmp_path, Regression(), data, strategy="ddp")[1], plain, 0.0)
