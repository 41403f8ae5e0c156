"""Map of hooks in `Callback`: follow it, and record the calls of a real run."""

import inspect
import re

import torch
from torch import nn

import lumen
from lumen.callbacks import Callback
from lumen.task.hooks import HOOKS, MODE_HOOKS, OPTIMIZATION_METHODS
from tests.helpers.tasks import Regression, loader

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
STATES = ("state_dict", "load_state_dict")
OF_CALLBACKS = (*HOOKS, *STATES)
CONFIGURES = ("configure_callbacks", "configure_model", "configure_optimizers")
OF_THE_TASK = (*HOOKS, *MODE_HOOKS, *STEPS, *OPTIMIZATION_METHODS, "prepare_data", *CONFIGURES, *TRANSFERS)
OF_DATA = ("prepare_data", "setup", "teardown", *LOADERS, *TRANSFERS, *STATES)
_OWNERS = {"callbacks": ["first", "second"], "task": ["task"], "data module": ["data"], "data": ["data"]}


# ---------------------------------------------------------------------- the map


def parse_map():
    """Return each part of the map by name: a list of (line, lines below it)."""
    text = inspect.getdoc(Callback).split("where the data module\nlacks them.\n")[1].split("A **boundary** is")[0]
    lines = [re.sub(" *#.*", "", line) for line in text.splitlines()]
    tree, _ = _below([line for line in lines if line.strip()], 4)
    return {line.removesuffix(":"): children for line, children in tree}


def _below(lines, indent):
    """Return the tree of the first lines with equal indentation, and the remaining lines."""
    tree = []
    while lines and len(lines[0]) - len(lines[0].lstrip()) == indent:
        children, rest = _below(lines[1:], indent + 4)
        tree.append((lines[0].strip(), children))
        lines = rest
    return tree, lines


def list_map_names():
    """Return every called name of the map."""

    def names(tree):
        for line, children in tree:
            if children:
                yield from names(children)
            elif line not in parts:
                yield from re.findall(r"\w+", line.partition(" (")[0])

    parts = parse_map()
    return {name for tree in parts.values() for name in names(tree)}


def predict_calls(part, **scenario):
    """Return the calls that the map predicts, as (owner, name), in order.

    Args:
        part: The first part.
        scenario: The conditions by the words of the map, and for each loop a list of its iterations: dictionaries like
            this one. `stage`: the replacement of "validation".
    """
    parts = parse_map()

    def walk(tree, state):
        for line, children in tree:
            if line.startswith("for each "):
                for each in state[line.removeprefix("for each ").removesuffix(":")]:
                    yield from walk(children, state | each)
            elif line.startswith("if "):
                if state[line.removeprefix("if ").removesuffix(":")]:
                    yield from walk(children, state)
            elif line in parts:
                yield from walk(parts[line], state)
            else:
                names, _, owners = line.removesuffix(")").partition(" (")
                for name in names.split(", "):
                    for owner in (owners or "callbacks, task").split(", "):
                        for who in _OWNERS[owner]:
                            yield who, _of_stage(name, state.get("stage", "validation"))

    return list(walk(parts[part], {"batch": [{}] * 2} | scenario))


def _of_stage(name, stage):
    return name if stage == "validation" else name.replace("validation", stage).replace("val_", f"{stage}_")


def automatic_or_not(manual=False):
    return {"manual": manual, "automatic": not manual}


def make_step(micro_batches=1, *, validating=False, last=False):
    """Return an optimizer step for `follow`."""
    numbers = range(micro_batches)
    return {
        "micro-batch": [{"first": number == 0, "last": number == micro_batches - 1} for number in numbers],
        "validating": validating,
        "inside the epoch": not last,
    }


def make_epoch(*steps, beginning=True, complete=True):
    """Return an epoch for `follow`."""
    return {"beginning": beginning, "complete": complete, "step": steps}


# ---------------------------------------------------------------------- recorded calls


class Trained(Regression):
    """Task with schedules that count steps and epochs."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        of_steps, of_epochs = (torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2))
        return [optimizer], [{"scheduler": of_steps, "interval": "step"}, of_epochs]


class ByHand(Trained):
    """Task with one backward and one step in each training_step."""

    automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
        optimizer.step()

    def configure_optimizers(self):
        return Regression.configure_optimizers(self)


class Data(lumen.DataModule):
    """Data module with five batches for training and two for each evaluation."""

    def train_dataloader(self):
        return loader(40, 8)

    def val_dataloader(self):
        return loader(16, 8)

    test_dataloader = predict_dataloader = val_dataloader


class Stateful(Callback):
    """Callback with a state, under the name of its class."""

    def state_dict(self):
        return {"kept": 1}


def make_recording_class(base, names, who, events):
    """Return a subclass whose methods record their call and then do their usual work."""

    def noting(name):
        def method(self, *args, **options):
            events.append((who, name))
            return getattr(base, name)(self, *args, **options)

        if name in STEPS:  # Lumen calls a step with the arguments in its signature

            def step(self, batch, batch_idx):
                return method(self, batch)

            return step
        return method

    return type(f"Recording_{who}", (base,), {name: noting(name) for name in names})


def record_calls(run, task=Trained):
    """Return the calls during `run(task, data, callbacks)`, as (owner, name)."""
    events = []
    callbacks = [make_recording_class(Stateful, OF_CALLBACKS, who, events)() for who in _OWNERS["callbacks"]]
    run(
        make_recording_class(task, OF_THE_TASK, "task", events)(),
        make_recording_class(Data, OF_DATA, "data", events)(),
        callbacks,
    )
    return events
