"""Cost of the loop: that of the hand-written loop, in counted calls, since times on a busy machine vary.

`benchmarks/` measures times.
"""

import cProfile
import dis
import functools
import pstats
import sys
import types
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import lumen
from lumen.data.windows import AccumulationWindow, MicroBatch
from lumen.loop import fit, micro_batch, step
from lumen.run.optimization import Optimization
from lumen.run.plan import Progress
from lumen.run.records import RunRecords
from lumen.run.run import Run
from lumen.run.run_end import RunEnd
from lumen.run.step_context import StepContext, TaskCalls
from tests.helpers.tasks import Regression, bare_trainer, quiet_trainer

#: Path of the package whose calls a test counts: a clone is called lumen too, with all of its .venv.
PACKAGE = Path(lumen.__file__).parent


class Logging(Regression):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def training_step(self, batch):
        loss = super().training_step(batch)
        for number in range(self.names):
            self.log(f"loss_{number}", loss)
        return loss


def make_data(samples):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 1, generator=generator))


def count_calls_per_batch(run):
    """Return the calls of Lumen's Python functions for a batch, without the fixed calls of a run.

    Args:
        run: Function of a loader.
    """

    def count(batches):
        loader = DataLoader(make_data(4 * batches), batch_size=4)
        profile = cProfile.Profile()
        profile.runcall(run, loader)
        found = pstats.Stats(profile).stats.items()
        return sum(calls for (path, _, _), (calls, *_) in found if Path(path).is_relative_to(PACKAGE))

    count(1)  # the first run of a process calls some functions that later runs do not call
    return (count(240) - count(80)) / 160


def count_calls_per_step(tmp_path, task, **options):
    return count_calls_per_batch(lambda loader: bare_trainer(tmp_path, max_epochs=1, **options).fit(task, loader))


@pytest.mark.parametrize(("names", "most"), [(0, 71), (1, 74), (10, 101)])
def test_a_step_calls_few_functions_of_lumens_own(tmp_path, names, most):
    assert count_calls_per_step(tmp_path, Logging(names)) <= most


def test_clipping_and_accumulation_add_few_calls(tmp_path):
    plain = count_calls_per_step(tmp_path, Regression())
    assert count_calls_per_step(tmp_path, Regression(), gradient_clip_val=1.0) <= plain + 7
    assert count_calls_per_step(tmp_path, Regression(), accumulate_grad_batches=8) < 0.55 * plain


@pytest.mark.parametrize("options", [{"on_step": True, "on_epoch": True}, {"prog_bar": True}, {"reduce_fx": "max"}])
def test_logged_names_cost_linear_time(tmp_path, options):
    """Once, each new name was compared with all others, in every epoch and every validation."""

    class Named(Logging):
        def training_step(self, batch):
            self.log_dict({f"train_{number}": 0.5 for number in range(self.names)}, **options)
            return Regression.training_step(self, batch)

        def validation_step(self, batch):
            self.log_dict({f"val_{number}": 0.5 for number in range(self.names)}, **options)

    def calls(names):
        loaders, profile = [DataLoader(make_data(8), batch_size=4) for _ in range(2)], cProfile.Profile()
        trainer = quiet_trainer(tmp_path / str(names), max_epochs=2, log_every_n_steps=1, enable_checkpointing=False)
        profile.runcall(trainer.fit, Named(names), loaders[0], val_dataloaders=loaders[1])
        found = pstats.Stats(profile).stats.items()
        return sum(calls for (path, _, _), (calls, *_) in found if Path(path).is_relative_to(PACKAGE))

    none = calls(0)
    assert calls(500) - none <= 10.5 * (calls(50) - none)


def test_evaluation_makes_few_python_calls_per_batch(tmp_path):
    assert count_calls_per_batch(lambda loader: bare_trainer(tmp_path).validate(Regression(), loader)) <= 40


EVERY_STEP = [
    step.train_step, step.begin_weighting, step.update_parameters, step.complete_gradients,
    micro_batch.accumulate_gradient, micro_batch.read_output, micro_batch.run_backward,
    fit.finish_step, fit.reach_boundary, StepContext.begin_step, StepContext.seed_micro_batch,
    TaskCalls.move_to_device, TaskCalls.get_arguments, Optimization.zero_grad, StepContext.check_loss,
    StepContext.count_window, RunEnd.read_clock, RunRecords.write_pending_row,
    RunEnd.decide_end, RunEnd.decide_validation, Progress.count_window, Run.resume_epoch_logging,
    AccumulationWindow.__init__, AccumulationWindow.__iter__, MicroBatch.__init__,
]  # fmt: skip
#: Instructions of Python 3.11 to 3.14 that make strings and dictionaries.
MAKING = {
    "BUILD_STRING", "FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "MAP_ADD",
}  # fmt: skip


def list_instructions(code):
    """Return the instructions of a function and of the functions that it defines."""
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return {each.opname for each in dis.get_instructions(code)}.union(*map(list_instructions, inner))


@pytest.mark.parametrize("function", EVERY_STEP, ids=lambda function: function.__qualname__)
def test_per_step_code_makes_no_strings_or_dictionaries(function):
    assert not list_instructions(function.__code__) & MAKING


# ---------------------------------------------------------------------- faster batches are equal batches


class Seen(Regression):
    """Task that keeps its batches."""

    def __init__(self):
        super().__init__()
        self.batches = []

    def training_step(self, batch):
        self.batches.append(batch)
        return super().training_step([part.float() for part in batch[:2]])


class Samples(Dataset):
    """Data set that returns samples of a user's class, one by one."""

    def __init__(self, make):
        self.make = make

    def __len__(self):
        return 30

    def __getitem__(self, index):
        return self.make(index)


SETS = {
    "tensors": lambda: TensorDataset(torch.randn(30, 6), torch.randn(30, 1)),
    "of other types": lambda: TensorDataset(torch.randint(9, (30, 6)), torch.randn(30, 1, dtype=torch.float64)),
    "strided": lambda: TensorDataset(torch.randn(6, 30).T, torch.randn(30, 2)[:, 1:]),
    "a subset": lambda: Subset(TensorDataset(torch.randn(50, 6), torch.randn(50, 1)), range(40, 10, -1)),
    "a subset of a subset": lambda: Subset(Subset(SETS["tensors"](), list(range(30))), list(range(29, -1, -1))),
    "tuples": lambda: Samples(lambda index: (torch.full((6,), float(index)), torch.ones(1), index)),
    "tuples of numbers": lambda: Samples(lambda index: (torch.full((6,), 0.5 * index), torch.ones(1), 0.1, "name")),
}


def plain_and_ours(tmp_path, dataset, indices, **options):
    torch.manual_seed(0)
    made = dataset()
    task = Seen()
    loader = DataLoader(made, batch_size=7, sampler=indices, **options)
    bare_trainer(tmp_path, max_epochs=1).fit(task, loader)
    plain = [default_collate([made[index] for index in indices[at : at + 7]]) for at in range(0, len(indices), 7)]
    return plain, task.batches


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", SETS)
def test_batches_equal_plain_dataloader(tmp_path, name, workers):
    indices = [5, 5, 29, 0, 11, *range(7, 20)]
    for plain, ours in zip(*plain_and_ours(tmp_path, SETS[name], indices, num_workers=workers), strict=True):
        assert type(plain) is type(ours)
        for theirs, part in zip(plain, ours, strict=True):
            assert type(theirs) is type(part)
            if isinstance(part, torch.Tensor):
                assert torch.equal(theirs, part)
                assert (theirs.dtype, theirs.stride()) == (part.dtype, part.stride())
            else:
                assert theirs == part


@pytest.mark.parametrize("dtype", [numpy.uint8, numpy.int16, numpy.uint64])
def test_subset_indices_may_have_any_integer_dtype(tmp_path, dtype):
    def dataset():
        return Subset(SETS["tensors"](), numpy.array([3, 0, 2, 1, 9], dtype=dtype))

    plain, ours = plain_and_ours(tmp_path, dataset, [4, 3, 2, 1])
    assert all(torch.equal(*parts) for parts in zip(plain[0], ours[0], strict=True))


def test_a_subset_may_choose_others_for_every_epoch(tmp_path):
    class Choosing(Seen):
        def on_train_epoch_start(self):
            chosen.indices = list(range(7 * self.current_epoch, 7 * self.current_epoch + 7))

    chosen, task = Subset(TensorDataset(torch.arange(30.0).repeat(6, 1).T, torch.zeros(30, 1)), range(7)), Choosing()
    bare_trainer(tmp_path, max_epochs=3).fit(task, DataLoader(chosen, batch_size=7))
    assert [batch[0][:, 0].tolist() for batch in task.batches] == [
        list(range(start, start + 7)) for start in (0, 7, 14)
    ]


@pytest.mark.parametrize("dataset", [SETS["tensors"], SETS["tuples"]])
def test_functions_given_to_default_collate_are_used(tmp_path, monkeypatch, dataset):
    def halves(batch, *, collate_fn_map=None):
        return torch.stack(list(batch)).half()

    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, halves)
    _, ours = plain_and_ours(tmp_path, dataset, list(range(7)))
    assert ours[0][0].dtype is torch.float16


def test_accumulated_step_holds_one_batch(tmp_path):
    class Held(Regression):
        alive, most = weakref.WeakSet(), 0

        def training_step(self, batch):
            Held.alive.add(batch[0])
            Held.most = max(Held.most, len(Held.alive))
            return super().training_step(batch)

    bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=8).fit(Held(), DataLoader(make_data(64), batch_size=4))
    assert Held.most <= 2


def test_negative_indices_match_the_dataset(tmp_path):
    plain, ours = plain_and_ours(tmp_path, SETS["tensors"], [-1, -30, 3, -2])
    assert all(torch.equal(*parts) for parts in zip(plain[0], ours[0], strict=True))


def test_changing_batch_in_place_keeps_the_data(tmp_path):
    class Spoiling(Seen):
        def training_step(self, batch):
            batch[0].zero_()
            return super().training_step(batch)

    made = SETS["tensors"]()
    before = made.tensors[0].clone()
    bare_trainer(tmp_path, max_epochs=1).fit(Spoiling(), DataLoader(made, batch_size=7))
    assert torch.equal(made.tensors[0], before)


def test_mismatched_samples_raise_plain_dataloader_error(tmp_path):
    for make, message in (
        (lambda index: (torch.ones(6),) * (1 + index % 2), "each element in list of batch should be of equal size"),
        (lambda index: (torch.ones(3 + index), torch.ones(1)), "stack expects each tensor to be equal size"),
    ):
        with pytest.raises(RuntimeError, match=message):
            bare_trainer(tmp_path, max_epochs=1).fit(Seen(), DataLoader(Samples(make), batch_size=7))


def test_weighted_sampler_gives_rows_of_tensors(tmp_path):
    made, task = SETS["tensors"](), Seen()
    sampler = WeightedRandomSampler(torch.arange(30.0), 28)
    bare_trainer(tmp_path, max_epochs=1).fit(task, DataLoader(made, batch_size=7, sampler=sampler))
    rows = torch.cat([batch[0] for batch in task.batches])
    assert len(rows) == 28
    assert all((made.tensors[0] == row).all(1).any() for row in rows)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int4])
def test_rows_of_any_dtype_equal_plain_dataloader(tmp_path, dtype):
    generator = torch.Generator().manual_seed(0)
    size = 2 if dtype is torch.bool else 256
    raw = torch.randint(size, (30, 8), dtype=torch.uint8, generator=generator)
    made, task = TensorDataset(*make_data(30).tensors, raw.view(dtype)), Seen()
    bare_trainer(tmp_path, max_epochs=1).fit(task, DataLoader(made, batch_size=7))
    for ours, theirs in zip(task.batches, DataLoader(made, batch_size=7), strict=True):
        assert ours[2].dtype == theirs[2].dtype
        assert torch.equal(ours[2].view(torch.uint8), theirs[2].view(torch.uint8))


# ---------------------------------------------------------------------- gradients are cleared as the optimizer says


def test_an_optimizers_own_zero_grad_is_called(tmp_path):
    class Own(torch.optim.SGD):
        calls = 0

        def zero_grad(self, set_to_none=True):
            Own.calls += 1
            super().zero_grad(set_to_none)

    class Task(Regression):
        def configure_optimizers(self):
            return Own(self.parameters(), 0.01)

    bare_trainer(tmp_path, max_steps=5).fit(Task(), DataLoader(make_data(40), batch_size=4))
    assert Own.calls == 5


def test_gradients_of_added_group_are_zeroed(tmp_path):
    class Task(Regression):
        def __init__(self):
            super().__init__()
            self.late = torch.nn.Parameter(torch.zeros(()))
            self.seen = []

        def training_step(self, batch):
            return super().training_step(batch) + self.late

        def configure_optimizers(self):
            return torch.optim.SGD([p for name, p in self.named_parameters() if name != "late"], 0.01)

        def on_train_batch_start(self, batch, batch_idx):
            if batch_idx == 2:
                self.optimizers().add_param_group({"params": [self.late]})

        def on_after_backward(self):
            self.seen.append(self.late.grad.item())

    task = Task()
    bare_trainer(tmp_path, max_steps=5).fit(task, DataLoader(make_data(40), batch_size=4))
    assert task.seen[2:] == [1.0] * 3


# ---------------------------------------------------------------------- hooks on the optimizer's step


class Sgd(torch.optim.SGD):
    """Subclass that a test may change."""

    def step(self, closure=None):
        return super().step(closure)


class Stepping(Regression):
    def configure_optimizers(self):
        return Sgd(self.parameters(), 0.01)


def fit_three_steps(tmp_path, task):
    bare_trainer(tmp_path, max_steps=3).fit(task, DataLoader(make_data(40), batch_size=4))


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("for_all", [False, True])
def test_step_hooks_of_an_optimizer_are_called(tmp_path, kind, for_all):
    seen = []

    torch_optimizer = sys.modules[torch.optim.Optimizer.__module__]

    def register(owner):
        name = f"register_optimizer_step_{kind}_hook" if for_all else f"register_step_{kind}_hook"
        return getattr(owner, name)(lambda optimizer, args, kwargs: seen.append(optimizer))

    class Task(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters())
            if not for_all:
                register(optimizer)
            return optimizer

    task = Task()
    handle = register(torch_optimizer) if for_all else None
    fit_three_steps(tmp_path, task)
    if handle is not None:
        handle.remove()
    assert len(seen) == 3


def test_a_profiler_sees_the_optimizers_steps(tmp_path):
    with torch.profiler.profile(acc_events=True) as profile:
        fit_three_steps(tmp_path, Stepping())
    assert [event.count for event in profile.key_averages() if event.key == "Optimizer.step#Sgd.step"] == [3]


@pytest.mark.parametrize("owner", ["class", "optimizer"])
def test_a_step_that_somebody_has_wrapped_is_called(tmp_path, monkeypatch, owner):
    calls = []

    def wrapped(step):
        @functools.wraps(step)
        def counting(*args, **options):
            calls.append(args)
            return step(*args, **options)

        return counting

    class Task(Stepping):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()  # torch has then wrapped the method of the class
            if owner == "class":
                monkeypatch.setattr(Sgd, "step", wrapped(Sgd.step))
            else:
                optimizer.step = wrapped(optimizer.step)
            return optimizer

    fit_three_steps(tmp_path, Task())
    assert len(calls) == 3


def test_without_listeners_a_step_calls_the_optimizer_alone(tmp_path):
    profile = cProfile.Profile()
    profile.runcall(fit_three_steps, tmp_path, Regression())
    called = {name: calls for (path, _, name), (calls, *_) in pstats.Stats(profile).stats.items()}
    assert "_optimizer_step_code" not in called
