"""Hooks: called in the order of the map in Callback, callbacks before the task, with complete batches."""

import dataclasses
import re
import sys
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader
from transformers.modeling_outputs import CausalLMOutput

import lumen
from lumen.callbacks import Callback
from lumen.data.nested import move_batch
from lumen.errors import ConfigError
from lumen.task.hooks import HOOKS, MODE_HOOKS
from tests.helpers import ROOT
from tests.helpers.hook_map import (
    OF_CALLBACKS,
    OF_DATA,
    OF_THE_TASK,
    ByHand,
    Data,
    Trained,
    automatic_or_not,
    list_map_names,
    make_epoch,
    make_recording_class,
    make_step,
    predict_calls,
    record_calls,
)
from tests.helpers.tasks import Regression, Saving, bare_trainer, loader, quiet_trainer


def fit(tmp_path, **options):
    def run(task, data, callbacks):
        clips = {} if not task.automatic_optimization else {"gradient_clip_val": 1.0}
        bare_trainer(tmp_path, callbacks=callbacks, **clips | options).fit(task, data)

    return run


EVERY_HALF = {"accumulate_grad_batches": 2, "val_check_interval": 0.5}  # five micro-batches: 2, 2 and 1
HALVES = [make_step(2), make_step(2, validating=True), make_step(1, validating=True, last=True)]
ANEW = {"resumed": False, "new": True, "saving": False, **automatic_or_not()}
GOING_ON = ANEW | {"resumed": True, "new": False}


def test_fit_follows_the_hook_order(tmp_path):
    steps = [*[make_step()] * 4, make_step(validating=True, last=True)]
    assert record_calls(fit(tmp_path, max_epochs=2)) == predict_calls("fit", **ANEW, epoch=[make_epoch(*steps)] * 2)


def test_fit_with_accumulation_follows_the_hook_order(tmp_path):
    """The epoch has validations inside."""
    assert record_calls(fit(tmp_path, max_epochs=2, **EVERY_HALF)) == predict_calls(
        "fit", **ANEW, epoch=[make_epoch(*HALVES)] * 2
    )


def test_manual_optimization_follows_the_hook_order(tmp_path):
    steps = [*[make_step()] * 4, make_step(validating=True, last=True)]
    expected = predict_calls("fit", **ANEW | automatic_or_not(manual=True), epoch=[make_epoch(*steps)] * 2)
    assert record_calls(fit(tmp_path, max_epochs=2), ByHand) == expected


def test_saving_fit_follows_the_hook_order(tmp_path):
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, every_n_epochs=None, train_time_interval=None, at_end=False)

    def run(task, data, callbacks):
        trainer = quiet_trainer(tmp_path, callbacks=[*callbacks, saver], max_epochs=1, gradient_clip_val=1.0)
        trainer.fit(task, data)

    steps = [*[make_step()] * 4, make_step(validating=True, last=True)]
    assert record_calls(run) == predict_calls("fit", **ANEW | {"saving": True}, epoch=[make_epoch(*steps)])


def save(tmp_path, number, **options):
    """Save a checkpoint of a step. Return its path."""
    path = tmp_path / "checkpoint"

    def run(task, data, callbacks):
        fit(tmp_path, seed=3, **options)(task, data, [*callbacks, Saving(number, path)])

    record_calls(run)
    return path


def test_fit_resumed_in_mid_epoch_follows_hook_order(tmp_path):
    path = save(tmp_path, 4, max_epochs=2, **EVERY_HALF)
    resumed = record_calls(fit(tmp_path, max_epochs=2, resume=path, **EVERY_HALF))
    assert resumed == predict_calls("fit", **GOING_ON, epoch=[make_epoch(*HALVES[1:], beginning=False)])


def test_fit_resumed_at_epoch_end_follows_hook_order(tmp_path):
    path = save(tmp_path, 3, max_epochs=2, **EVERY_HALF)
    resumed = record_calls(fit(tmp_path, max_epochs=2, resume=path, **EVERY_HALF))
    assert resumed == predict_calls("fit", **GOING_ON, epoch=[make_epoch(*HALVES)])


def test_run_ending_in_mid_epoch_ends_the_epoch(tmp_path):
    options = {"max_steps": 1, "num_sanity_val_steps": 0, "accumulate_grad_batches": 2}
    expected = predict_calls("fit", **ANEW | {"new": False}, epoch=[make_epoch(make_step(2), complete=False)])
    assert record_calls(fit(tmp_path, **options)) == expected


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_an_evaluation_calls_what_the_map_says(tmp_path, stage):
    def run(task, data, callbacks):
        getattr(bare_trainer(tmp_path, callbacks=callbacks), stage)(task, data)

    name = "validation" if stage == "validate" else stage
    assert record_calls(run) == predict_calls("validate", stage=name, **ANEW)


def test_the_map_has_every_hook_and_nothing_else():
    elsewhere = {"on_exception", *(name for name in (*HOOKS, *MODE_HOOKS) if re.match("on_(test|predict)", name))}
    evaluated = {"test_step", "predict_step", "test_dataloader", "predict_dataloader"}
    called = {*OF_CALLBACKS, *OF_THE_TASK, *OF_DATA}
    assert list_map_names() == called - elsewhere - evaluated


def test_error_calls_every_on_exception_and_teardown(tmp_path):
    class Failing(Callback):
        def on_train_start(self, trainer, task):
            raise ZeroDivisionError("a hook failed")

    def run(task, data, callbacks):
        with pytest.raises(ZeroDivisionError, match="a hook failed"):
            bare_trainer(tmp_path, callbacks=[*callbacks, Failing()], num_sanity_val_steps=0, max_steps=1).fit(
                task, data
            )

    events = []
    callback = make_recording_class(Callback, ["on_exception", "teardown"], "callback", events)
    task = make_recording_class(Trained, ["on_exception", "teardown"], "task", events)()
    run(task, make_recording_class(Data, ["teardown"], "data", events)(), [callback()])
    assert events == [
        ("callback", "on_exception"),
        ("task", "on_exception"),
        ("data", "teardown"),
        ("callback", "teardown"),
        ("task", "teardown"),
    ]


# ---------------------------------------------------------------------- Lightning's order

#: Hooks at the end of a step, callback hooks that only Lumen's tasks have, and Lightning's of validation and test.
ONLY_LUMENS = r"first\.on_step_.*|task\.on_(step|sanity_check)_.*|task\.on_predict_model_train"
#: Hooks that the guide lists as called at another place.
MOVED = {
    "fit": "(train|val)_dataloader|on_before_zero_grad|optimizer_zero_grad|optimizer_step|lr_scheduler_step",
    "fit by hand": "(train|val)_dataloader|on_before_zero_grad",
    "fit resumed": "(train|val)_dataloader|on_before_zero_grad|optimizer_zero_grad|optimizer_step|lr_scheduler_step|"
    "load_state_dict",
}


def read_lightning_order():
    text = (ROOT / "tests/helpers/lightning_order.txt").read_text()
    sections = re.findall(r"^([\w ]+):\n((?: .*\n)+)", text, re.M)
    return {name: calls.split() for name, calls in sections}


@pytest.mark.parametrize("what", ["fit", "fit by hand", "fit resumed", "validate", "test", "predict"])
def test_order_equals_lightning_except_documented_differences(tmp_path, what):
    few = {"limit_train_batches": 3, "limit_val_batches": 1, "limit_test_batches": 1, "limit_predict_batches": 1}

    def run(task, data, callbacks):
        getattr(bare_trainer(tmp_path, callbacks=callbacks, **few), what)(task, data)

    if what == "fit":
        run = fit(tmp_path, max_epochs=1, accumulate_grad_batches=2, **few)
    elif what == "fit by hand":
        run = fit(tmp_path, max_epochs=1, **few)
    elif what == "fit resumed":
        run = fit(tmp_path, max_epochs=1, resume=save(tmp_path, 2, max_epochs=1, **few), **few)
    recorded = record_calls(run, ByHand if what == "fit by hand" else Trained)
    ours = [f"{who}.{name}" for who, name in recorded if who != "second" and name != "state_dict"]
    ours = [call.replace("first.", "callback.") for call in ours if not re.fullmatch(ONLY_LUMENS, call)]
    theirs = read_lightning_order()[what]

    def apart(calls):
        moved = rf"\w+\.({MOVED.get(what, '')})"
        there = [call for call in calls if not re.fullmatch(moved, call)]
        return there, Counter(call for call in calls if re.fullmatch(moved, call))

    assert apart(ours)[0] == apart(theirs)[0]
    added = {"fit by hand": {"callback.on_before_zero_grad": 3, "task.on_before_zero_grad": 3}}
    added["fit resumed"] = {"data.load_state_dict": 1}  # Lightning calls it if the state is not empty
    assert apart(ours)[1] - apart(theirs)[1] == Counter(added.get(what, {}))
    assert not apart(theirs)[1] - apart(ours)[1]


# ---------------------------------------------------------------------- called hooks and their arguments


def test_a_hook_that_nobody_defines_is_not_called(tmp_path):
    functions = [getattr(kind, name) for kind in (Callback, lumen.TaskModule) for name in HOOKS]
    bodies, called = {function.__code__ for function in functions}, set()

    class Hookless(Regression):
        pass

    class Nothing(Callback):
        pass

    def watch(frame, event, argument):
        if event == "call" and frame.f_code in bodies:
            called.add(frame.f_code.co_name)

    sys.setprofile(watch)
    try:
        bare_trainer(tmp_path, max_epochs=1, callbacks=[Nothing()]).fit(
            Hookless(), loader(16, 8), val_dataloaders=loader(8, 8)
        )
    finally:
        sys.setprofile(None)
    assert called == set()


def test_hooks_may_be_inherited_mixed_in_or_decorated(tmp_path):
    class Mixin:
        def on_train_start(self):
            self.called.append("mixin")

    class Parent(Regression):
        def on_train_end(self):
            self.called.append("parent")

    class Child(Mixin, Parent):
        called = []  # noqa: RUF012 - one task

        @torch.no_grad()
        def on_train_batch_end(self, outputs, batch, batch_idx):
            assert not torch.is_grad_enabled()
            self.called.append("decorated")

    bare_trainer(tmp_path, max_steps=1).fit(Child(), loader())
    assert Child.called == ["mixin", "decorated", "parent"]


class Returning(Regression):
    """Task that returns its loss and other tensors, all with a graph."""

    def training_step(self, batch):
        loss = super().training_step(batch)
        hidden = self.net[0](batch[0])
        return {"loss": loss, "kept": [hidden, {"pair": Pair(hidden * 2, "name")}], "none": None}


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
@pytest.mark.parametrize("of_the_task", [False, True])
def test_outputs_of_a_training_batch_have_no_graph(tmp_path, options, of_the_task):
    """Keeping an output would otherwise keep every tensor that it was computed from."""
    seen = []
    task, keep = Returning(), lambda trainer, task, outputs, batch, batch_idx: seen.append(outputs)
    callbacks = [lumen.LambdaCallback(on_train_batch_end=keep)]
    if of_the_task:
        task.on_train_batch_end, callbacks = lambda outputs, batch, batch_idx: seen.append(outputs), []
    bare_trainer(tmp_path, max_steps=2, callbacks=callbacks, **options).fit(task, loader(shuffle=False))
    assert len(seen) == 2 * options.get("accumulate_grad_batches", 1)
    inputs, _ = next(iter(loader(shuffle=False)))
    with torch.no_grad():
        expected = Regression().net[0](inputs)
    for outputs in seen:
        hidden, more = outputs["kept"]
        assert not any(each.requires_grad for each in (outputs["loss"], hidden, more["pair"].left))
        assert (more["pair"].right, outputs["none"]) == ("name", None)
    assert torch.equal(seen[0]["kept"][0], expected)
    assert torch.equal(seen[0]["kept"][1]["pair"].left, 2 * expected)


def test_kept_output_does_not_keep_the_graph(tmp_path):
    freed, kept = [], []

    class Token:
        pass

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            ctx.token = Token()
            weakref.finalize(ctx.token, freed.append, 1)
            return inputs * 1

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    class Task(Regression):
        def training_step(self, batch):
            return Noting.apply(super().training_step(batch))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            kept.append(outputs)

    bare_trainer(tmp_path, max_steps=4).fit(Task(), loader())
    assert len(kept) == 4
    assert len(freed) >= 3  # the run itself knows the newest loss


def test_hooks_get_what_they_are_promised(tmp_path):
    class Look(Callback):
        seen = ()

        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            self.seen += (("start", len(batch[0]), batch_idx),)

        def on_before_backward(self, trainer, task, loss):
            assert loss.requires_grad
            assert loss.dim() == 0

        def on_before_optimizer_step(self, trainer, task, optimizer):
            assert optimizer is trainer.optimizers[0]
            self.seen += (("step", trainer.global_step),)

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.seen += (("end", sorted(outputs), len(batch[0]), batch_idx, trainer.global_step),)

        def on_test_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
            self.seen += ((outputs, len(batch[0]), batch_idx, dataloader_idx),)

    class Returning(Regression):
        def training_step(self, batch):
            return {"loss": super().training_step(batch), "extra": 1}

        def test_step(self, batch, batch_idx, dataloader_idx):
            return f"{dataloader_idx}.{batch_idx}"

    look, task = Look(), Returning()
    trainer = bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=2, callbacks=[look])
    trainer.fit(task, loader(18, 8))
    assert look.seen == (
        ("start", 8, 0),
        ("end", ["extra", "loss"], 8, 0, 0),
        ("start", 8, 1),
        ("step", 0),
        ("end", ["extra", "loss"], 8, 1, 1),
        ("start", 2, 2),
        ("step", 1),
        ("end", ["extra", "loss"], 2, 2, 2),
    )
    look.seen = ()
    trainer.test(task, [loader(8, 8), loader(10, 8)])
    assert look.seen == (("0.0", 8, 0, 0), ("1.0", 8, 0, 1), ("1.1", 2, 1, 1))


# ---------------------------------------------------------------------- batches


Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Record:
    tensor: torch.Tensor
    name: str
    size: int = dataclasses.field(init=False, default=7)


@dataclasses.dataclass(frozen=True)
class Frozen:
    parts: list


class Movable:
    device = "cpu"

    def to(self, device):
        moved = Movable()
        moved.device = device.type
        return moved


def make_nested_batch():
    tensor = torch.arange(6.0).reshape(3, 2)
    return {
        "tensor": tensor,
        "list": [tensor, "text", None, 3],
        "tuple": (tensor, (tensor,)),
        "pair": Pair(tensor, {"deep": tensor}),
        "ordered": OrderedDict(a=tensor, b=None),
        "record": Record(tensor, "name"),
        "frozen": Frozen([tensor]),
        "packed": pack_sequence([torch.ones(2), torch.ones(1)]),
        "movable": Movable(),
        "none": None,
    }


def describe_shape(batch):
    """Return the structure of a batch with its tensors replaced by (device, shape)."""
    if isinstance(batch, torch.Tensor):
        return batch.device.type, tuple(batch.shape)
    if isinstance(batch, PackedSequence):
        return type(batch), describe_shape(batch.data)
    if isinstance(batch, dict):
        return type(batch), {key: describe_shape(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch), [describe_shape(value) for value in batch]
    if dataclasses.is_dataclass(batch):
        return type(batch), {
            field.name: describe_shape(getattr(batch, field.name)) for field in dataclasses.fields(batch)
        }
    return batch.device if isinstance(batch, Movable) else batch


def make_expected_shape(device):
    tensor = (device, (3, 2))
    return (
        dict,
        {
            "tensor": tensor,
            "list": (list, [tensor, "text", None, 3]),
            "tuple": (tuple, [tensor, (tuple, [tensor])]),
            "pair": (Pair, [tensor, (dict, {"deep": tensor})]),
            "ordered": (OrderedDict, {"a": tensor, "b": None}),
            "record": (Record, {"tensor": tensor, "name": "name", "size": 7}),
            "frozen": (Frozen, {"parts": (list, [tensor])}),
            "packed": (PackedSequence, (device, (3,))),
            "movable": device,
            "none": None,
        },
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_tensors_of_a_nested_batch_are_moved(device):
    batch = make_nested_batch()
    assert describe_shape(move_batch(batch, torch.device(device))) == make_expected_shape(device)
    assert describe_shape(batch) == make_expected_shape("cpu")


class Encoding(UserDict):
    """Mapping that moves itself to a device, as tokenizers return."""

    def __init__(self, data=None, lengths=None):
        super().__init__(data)
        self.lengths = lengths

    def to(self, device):
        return Encoding({key: value.to(device) for key, value in self.items()}, self.lengths)


@dataclasses.dataclass
class Counted:
    tokens: torch.Tensor

    def __post_init__(self):
        self.samples = len(self.tokens)


def test_moved_outputs_and_dataclasses_keep_their_attributes():
    moved = move_batch(CausalLMOutput(logits=torch.ones(2)), torch.device("meta"))
    assert moved.logits is moved["logits"]
    assert moved.logits.device.type == "meta"
    counted = move_batch(Counted(torch.ones(2)), torch.device("meta"))
    assert (counted.tokens.device.type, counted.samples) == ("meta", 2)


@pytest.mark.parametrize(
    "batch", [defaultdict(list, tokens=torch.ones(2)), Encoding({"tokens": torch.ones(2)}, lengths=[2])]
)
def test_moved_mappings_keep_their_class_and_attributes(batch):
    moved = move_batch(batch, torch.device("meta"))
    assert moved["tokens"].device.type == "meta"
    assert type(moved) is type(batch)
    assert vars(moved).get("lengths") == [2] if isinstance(batch, Encoding) else moved.default_factory is list


def make_batch(samples):
    return make_nested_batch()


class Keeping(Regression):
    received = None

    def training_step(self, batch):
        self.received = batch
        return self.net(torch.ones(1, 6)).sum()

    def predict_step(self, batch):
        self.received = batch


@pytest.mark.parametrize("workers", [0, 1])
def test_nested_batch_reaches_the_step_unchanged(tmp_path, workers):
    task = Keeping()
    bare_trainer(tmp_path, max_steps=1).fit(task, DataLoader(range(3), 3, collate_fn=make_batch, num_workers=workers))
    assert describe_shape(task.received) == make_expected_shape("cpu")


def test_batch_is_moved_to_the_device_of_task(tmp_path):
    task = Keeping()
    trainer = bare_trainer(tmp_path, strategy=lumen.SingleDevice("meta"))
    trainer.predict(task, DataLoader(range(3), 3, collate_fn=make_batch))
    assert task.device.type == "meta"
    assert describe_shape(task.received) == make_expected_shape("meta")


class Transferring:
    """Base class whose transfer hooks record their owner and their order."""

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return [*batch, f"{type(self).__name__} before {dataloader_idx}"]

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        assert isinstance(device, torch.device)
        return [*batch, f"{type(self).__name__} transfer {dataloader_idx}"]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [*batch, f"{type(self).__name__} after {dataloader_idx}"]


class TransferringTask(Transferring, lumen.TaskModule):
    def predict_step(self, batch):
        return batch[1:]


class TransferringData(Transferring, lumen.DataModule):
    def predict_dataloader(self):
        return [DataLoader(torch.zeros(1)), DataLoader(torch.zeros(1))]


class HalfTransferringData(lumen.DataModule):
    def predict_dataloader(self):
        return [DataLoader(torch.zeros(1)), DataLoader(torch.zeros(1))]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [*batch, f"HalfTransferringData after {dataloader_idx}"]


@pytest.mark.parametrize(
    ("data", "owners"),
    [
        (None, ["TransferringTask"] * 3),
        (TransferringData, ["TransferringData"] * 3),
        (HalfTransferringData, ["TransferringTask", "TransferringTask", "HalfTransferringData"]),
    ],
)
def test_a_batch_passes_the_transfer_hooks_in_order(tmp_path, data, owners):
    source = HalfTransferringData().predict_dataloader() if data is None else data()
    predictions = bare_trainer(tmp_path).predict(TransferringTask(), source)
    stages = ("before", "transfer", "after")
    for number, (batch,) in enumerate(predictions):
        assert batch == [f"{owner} {stage} {number}" for owner, stage in zip(owners, stages, strict=True)]


def test_training_step_sees_batch_after_transfer_hooks(tmp_path):
    class Doubling(lumen.DataModule):
        def train_dataloader(self):
            return loader(8, 8, shuffle=False)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [2 * part for part in batch]

    class Sums(Regression):
        def training_step(self, batch):
            self.sums = [part.sum().item() for part in batch]
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    task = Sums()
    bare_trainer(tmp_path, max_steps=1).fit(task, Doubling())
    (batch,) = loader(8, 8, shuffle=False)
    assert task.sums == [(2 * part).sum().item() for part in batch]


def test_steps_and_loaders_set_to_none_are_missing(tmp_path):
    task = Regression()
    task.validation_step = None
    task.train_dataloader = None
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    trainer.fit(task, loader(), val_dataloaders=loader())
    assert "val_loss" not in trainer.callback_metrics
    with pytest.raises(ConfigError, match="has no validation_step"):
        trainer.validate(task, loader())
