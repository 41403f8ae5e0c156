"""Wrong or misplaced input: one error or one warning; a table of inputs and messages."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import lumen
from lumen.errors import LumenError
from tests.helpers.tasks import Regression, bare_trainer, loader


class Data(lumen.DataModule):
    def train_dataloader(self):
        return loader(16, 8)

    val_dataloader = train_dataloader


def make_task(base=Regression, **methods):
    """Return a task of a class `Mine` with these methods."""
    return type("Mine", (base,), methods)()


def fit(*given, task=None, options=(), **more):
    """Return a function that trains for two epochs in a directory."""

    def run(path):
        trainer = bare_trainer(path, **{"max_epochs": 2, "log_level": "WARNING"} | dict(options))
        trainer.fit(*(given or (task, Data())), **more)

    return run


def make_configured_task(configure, base=Regression, **methods):
    return fit(task=make_task(base, configure_optimizers=configure, **methods))


class ByHand(Regression):
    automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


class Uninitialised(lumen.TaskModule):
    def __init__(self):
        self.width = 3

    training_step = configure_optimizers = print


class Counting(lumen.Callback):
    def state_dict(self):
        return {"count": 1}


def sgd(module):
    return SGD(module.parameters(), lr=0.1)


def replace(self):
    self.net[0] = nn.Linear(6, 16)


def replace_later(self):
    if self.current_epoch == 1:
        self.net[0].weight = nn.Parameter(torch.zeros(16, 6))


def plateau(self):
    optimizer = sgd(self)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "test_loss"}}


def stepping(self, batch):
    loss = Regression.training_step(self, batch)
    self.optimizers().step()
    return loss


def logging_accuracy(self, batch):
    self.log_dict({"acc": 1.0})


def by_itself(self, batch):
    self.manual_backward(Regression.training_step(self, batch))


def validate(*given, **more):
    return lambda path: bare_trainer(path).validate(*given, **more)


_STRANGERS = (
    "the optimizer holds {} parameters that are not the task's. Build the optimizer in configure_optimizers, from "
    "self.parameters(). A parameter that a hook adds to the optimizer must be an attribute "
    "of the task, or of a module in the task."
)
_STEP_OF_ANOTHER = (
    "lr_scheduler: the StepLR sets the learning rates of a different optimizer than the SGD that trains. Build the "
    "scheduler with the optimizer that trains."
)
_CALLBACKS = "Trainer: callbacks: expected a list of a Callback, a dict of a Callback or None, a Callback or None"
_NO_STEP_TO_LOG_AT = (
    "self.log('a') was called outside of a training or evaluation epoch. Call self.log in a step, or in an "
    "epoch or batch hook, or use self.logger."
)
_WITHOUT_A_STEP = (
    "epoch 0 made no optimizer step: no optimizer has made a step in its 2 batches. With automatic_optimization = "
    "False, call self.manual_backward(loss) and step() of self.optimizers() in training_step."
)
ERRORS = {
    # ------------------------------------------------------------------ optimizers and schedules
    "another module's parameters": (make_configured_task(lambda self: sgd(nn.Linear(1, 1))), _STRANGERS.format(2)),
    "parameters that are replaced before training": (fit(task=make_task(on_train_start=replace)), _STRANGERS.format(2)),
    "parameters that are replaced in a later epoch": (
        fit(task=make_task(on_train_epoch_start=replace_later)),
        _STRANGERS.format(1),
    ),
    "the same by hand": (fit(task=make_task(ByHand, on_train_epoch_start=replace_later)), _STRANGERS.format(1)),
    "a schedule of another optimizer": (
        make_configured_task(lambda self: ([sgd(self)], [StepLR(sgd(self), 1)])),
        _STEP_OF_ANOTHER,
    ),
    "the same schedule by hand": (
        make_configured_task(lambda self: ([sgd(self)], [StepLR(sgd(self), 1)]), ByHand),
        _STEP_OF_ANOTHER,
    ),
    "the class of an optimizer": (
        make_configured_task(lambda self: SGD),
        "configure_optimizers returned the class SGD; expected a torch.optim.Optimizer, ([optimizer], [scheduler]), or "
        '{"optimizer": ..., "lr_scheduler": ...}.',
    ),
    "the class of a schedule": (
        make_configured_task(lambda self: ([sgd(self)], [StepLR])),
        "lr_scheduler: expected a scheduler, found the class StepLR. Create one: StepLR(optimizer, ...).",
    ),
    "manual_backward in automatic optimization": (
        fit(task=make_task(training_step=by_itself)),
        "manual_backward is for manual optimization, but Mine uses automatic optimization. Set "
        "self.automatic_optimization = False in __init__; or return the loss from training_step, and remove this "
        "call.",
    ),
    "a step by hand in automatic optimization": (
        fit(task=make_task(training_step=stepping)),
        "AdamW.step was called in a training step, but Lumen calls step once in each training step: the parameters "
        "would move twice. Remove step, zero_grad and backward from training_step and the hooks, and return the loss. "
        "To call step yourself, set automatic_optimization = False. To change gradients, use on_before_optimizer_step; "
        "for several micro-batches in one step, set accumulate_grad_batches; to change the update, write a subclass of "
        "the optimizer.",
    ),
    "no step in manual optimization": (
        fit(task=make_task(ByHand, training_step=Regression.training_step)),
        _WITHOUT_A_STEP,
    ),
    "a backward and no step": (fit(task=make_task(ByHand, training_step=by_itself)), _WITHOUT_A_STEP),
    # ------------------------------------------------------------------ monitors and states
    "a monitor of another stage": (
        fit(task=make_task(test_step=logging_accuracy), options={"callbacks": [lumen.EarlyStopping("acc")]}),
        "EarlyStopping: the monitor 'acc' was never logged; logged so far: val_loss. Use one of these names, or log "
        "'acc' once an epoch or in validation. test_step of Mine may log it, but fit does not call test_step.",
    ),
    "a plateau of another stage": (
        make_configured_task(plateau),
        "lr_scheduler: the monitor 'test_loss' has no value of an epoch or a validation; logged names: val_loss. Log "
        "it with on_epoch=True, set a frequency at which it has a value, or set strict: false. test_step of Mine may "
        "log it, but fit does not call test_step.",
    ),
    "two callbacks with one key": (
        lambda path: lumen.Trainer(
            default_root_dir=path, max_steps=1, accelerator="cpu", callbacks=[Counting(), Counting()]
        ).fit(Regression(), Data()),
        "several callbacks or loggers of this run have a state, and the same state_key: Counting. A checkpoint could "
        "not distinguish their states. Remove one of the objects, give them arguments that make the keys differ, or "
        "define the property state_key in the class.",
    ),
    "one callback twice": (
        lambda path: bare_trainer(path, callbacks=[lumen.Callback()] * 2),
        "callbacks: the same Callback object appears twice, so its hooks would run twice. Remove one, or create "
        "two objects.",
    ),
    # ------------------------------------------------------------------ misplaced objects
    "the class of a callback": (
        lambda path: bare_trainer(path, callbacks=[lumen.EarlyStopping]),
        f"{_CALLBACKS}, found the class EarlyStopping in a list. Create an object: EarlyStopping(...).",
    ),
    "a name of a callback": (
        lambda path: bare_trainer(path, callbacks=["EarlyStopping"]),
        f"{_CALLBACKS}, found ['EarlyStopping'].",
    ),
    "the class of a task": (
        fit(Regression, loader()),
        "expected a TaskModule, found the class Regression. Create an object: Regression(...).",
    ),
    "the class of a task to validate": (
        validate(Regression, loader()),
        "expected a TaskModule, found the class Regression. Create an object: Regression(...).",
    ),
    "a torch module": (
        fit(nn.Linear(6, 1), loader()),
        "expected a TaskModule, found Linear. Subclass lumen.TaskModule.",
    ),
    "a task without super().__init__()": (
        fit(task=Uninitialised()),
        "Uninitialised.__init__ does not call super().__init__(), which initializes torch.nn.Module. Call "
        "super().__init__() first.",
    ),
    "a data module and a task": (
        fit(Data(), Regression()),
        "expected a TaskModule, found Data. Pass the task first, then the data: (Regression, Data).",
    ),
    "a loader and a task": (
        fit(loader(), Regression()),
        "expected a TaskModule, found DataLoader. Pass the task first, then the data: (Regression, DataLoader).",
    ),
    "a data module and a task to validate": (
        validate(Data(), Regression()),
        "dataloaders: found the task Regression. Pass a loader or a data module.",
    ),
    "the class of a data module": (
        fit(Regression(), Data),
        "dataloaders: found the class Data. Create an object: Data(...).",
    ),
    "the same by its name": (
        fit(Regression(), datamodule=Data),
        "datamodule: expected a lumen.DataModule, found the class Data. Create an object: Data(...).",
    ),
    "a loader as a data module": (
        fit(Regression(), datamodule=loader()),
        "datamodule: expected a lumen.DataModule, found DataLoader. Pass loaders by position.",
    ),
    "a data module as a validation loader": (
        fit(Regression(), loader(), Data()),
        "val_dataloaders: found the data module Data. Pass the data module alone, as datamodule=...",
    ),
    "a data module in a list": (
        fit(Regression(), [Data()]),
        "dataloaders: found the data module Data. Pass the data module alone, as datamodule=...",
    ),
    "a data set": (
        fit(Regression(), loader().dataset),
        "a loader is an iterable of batches, found TensorDataset. Return a DataLoader of it, as in "
        "DataLoader(data_set, batch_size=32).",
    ),
}
#: Hooks without a step, or after its values are closed.
for _place in ("setup", "configure_optimizers", "on_fit_start", "on_sanity_check_start", "on_train_start",
               "on_validation_end", "on_step_end", "on_step_checkpoint", "on_train_end", "on_fit_end",
               "teardown", "train_dataloader"):  # fmt: skip
    _mine = make_task(**{_place: lambda self, *_: self.log("a", 1.0)})
    ERRORS[f"self.log in {_place}"] = (
        fit(_mine) if _place == "train_dataloader" else fit(task=_mine),
        _NO_STEP_TO_LOG_AT,
    )


@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_meant_is_one_error(tmp_path, what):
    run, message = ERRORS[what]
    with pytest.raises(LumenError) as caught:
        run(tmp_path)
    assert str(caught.value) == message


def moves_one_of_two(self, batch):
    first, _ = self.optimizers()
    first.zero_grad()
    self.manual_backward(Regression.training_step(self, batch))
    first.step()


WARNINGS = {
    "an optimizer that nobody moves": (
        make_configured_task(lambda self: [sgd(self.net[0]), sgd(self.net[3])], ByHand, training_step=moves_one_of_two),
        "optimizer 1 of configure_optimizers (SGD) made no step: training_step has not called its step()",
    ),
    "a step without a gradient": (
        fit(task=make_task(ByHand, training_step=lambda self, batch: self.optimizers().step())),
        "AdamW.step was called, but none of its parameters has a gradient: no parameter changes. Call "
        "zero_grad, then self.manual_backward(loss), then step",
    ),
}


@pytest.mark.parametrize("what", WARNINGS)
def test_what_does_nothing_is_one_warning(tmp_path, caplog, what):
    run, message = WARNINGS[what]
    run(tmp_path)
    assert [record.message for record in caplog.records] == [message]


def test_correct_input_causes_no_warnings(tmp_path, caplog):
    both = {"configure_optimizers": lambda self: [sgd(self.net[0]), sgd(self.net[3])]}

    def training_step(self, batch):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(Regression.training_step(self, batch))
        for optimizer in self.optimizers():
            optimizer.step()

    run = fit(task=make_task(ByHand, training_step=training_step, **both))
    run(tmp_path)
    fit(task=copy.deepcopy(Regression()))(tmp_path)
    assert caplog.records == []
