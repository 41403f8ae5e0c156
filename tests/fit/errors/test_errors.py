"""Bad input: one clear error before any training, without new files."""

import math
import os
import pickle
import signal
import time
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

import lumen
from lumen.errors import ConfigError, DataError, LumenError
from tests.helpers.tasks import FEATURES, Regression, loader, quiet_trainer


class NoTrainingStep(lumen.TaskModule):
    def configure_optimizers(self):
        return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)


class NoOptimizer(lumen.TaskModule):
    def training_step(self, batch):
        return batch[0].sum()


class Manual(Regression):
    automatic_optimization = False


class NoneForOptimizers(Regression):
    configure_optimizers = None


class NoneForPredictions(Regression):
    predict_step = None


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (NoneForOptimizers, {}, "NoneForOptimizers.configure_optimizers is None. Define "),
        (NoTrainingStep, {}, "NoTrainingStep has no training_step. Define"),
        (NoOptimizer, {}, "NoOptimizer has no configure_optimizers"),
        (Manual, {"accumulate_grad_batches": 2}, "automatic_optimization = False"),
        (Regression, {"max_epochs": None, "max_steps": -1}, "Set one of max_epochs, max_steps and max_time"),
    ],
)
def test_a_task_that_cannot_be_trained_is_refused(tmp_path, task, options, message):
    with pytest.raises(ConfigError, match=message):
        quiet_trainer(tmp_path, **{"max_epochs": 1, **options}).fit(task(), loader())
    assert not (tmp_path / "runs" / "run").exists()


def test_an_unknown_log_level_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="log_level"):
        quiet_trainer(tmp_path, max_epochs=1, log_level="LOUD").fit(Regression(), loader())


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden"])
def test_a_run_name_cannot_leave_its_directory(tmp_path, name):
    with pytest.raises(LumenError, match="name"):
        lumen.Trainer(max_epochs=1, default_root_dir=tmp_path, name=name, enable_progress_bar=False).fit(
            Regression(), loader()
        )
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_named(tmp_path):
    with pytest.raises(DataError, match="no training data"):
        quiet_trainer(tmp_path, max_epochs=1).fit(Regression(), lumen.DataModule())
    with pytest.raises(DataError, match="define test_dataloader"):
        quiet_trainer(tmp_path).test(Regression(), lumen.DataModule())
    with pytest.raises(DataError, match="a loader is an iterable of batches, found int"):
        quiet_trainer(tmp_path, max_epochs=1).fit(Regression(), 3)


def test_run_only_attributes_raise_outside_a_run():
    with pytest.raises(ConfigError, match="not attached to a trainer"):
        _ = Regression().trainer
    assert lumen.DataModule().trainer is None
    with pytest.raises(ConfigError, match="has not started a run"):
        _ = lumen.Trainer().run


def test_data_module_can_check_for_a_trainer(tmp_path):
    class Data(lumen.DataModule):
        def __init__(self):
            super().__init__()
            self.seen = [self.trainer]

        def train_dataloader(self):
            self.seen.append(self.trainer)
            return loader(batch_size=8 if self.trainer is None else 8 * self.trainer.world_size)

    data, trainer = Data(), quiet_trainer(tmp_path, max_steps=1)
    assert len(data.train_dataloader()) == 7
    trainer.fit(Regression(), data)
    assert data.seen == [None, None, trainer]


def test_user_error_keeps_traceback_and_closes_run(tmp_path):
    class Broken(Regression):
        def training_step(self, batch):
            raise ZeroDivisionError("mine")

    seen = []

    class Watching(lumen.Callback):
        def on_exception(self, trainer, task, exception):
            seen.append(exception)

        def teardown(self, trainer, task, stage):
            seen.append(stage)

    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        quiet_trainer(tmp_path, max_epochs=1, callbacks=[Watching()]).fit(Broken(), loader())
    assert "training_step" in [entry.name for entry in caught.traceback]
    assert seen == [caught.value, "fit"]
    quiet_trainer(tmp_path, max_epochs=1, resume="auto").fit(Regression(), loader())  # the lock was released


def test_calls_of_lightning_alone_say_what_to_write(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=1)
    with pytest.raises(AttributeError, match=r"Callback\.log was called outside of a run\. Call it in a hook"):
        lumen.Callback().log("value", 1.0)
    trainer.fit(Regression(), loader())
    with pytest.raises(ConfigError, match="a Trainer that has run cannot be pickled"):
        pickle.dumps(trainer)


def fail_in_place():
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.add_(1)
    y.sum().backward()


def change_a_leaf():
    torch.ones(2, requires_grad=True).add_(1)


def go_back_twice():
    x = torch.ones(2, requires_grad=True).exp().sum()
    x.backward()
    x.backward()


TORCH_ERRORS = {
    "collate_fn that pads": lambda: default_collate([torch.ones(1), torch.ones(2)]),
    "detect_anomaly=True": fail_in_place,
    "deterministic='warn'": lambda: torch.ones(3).put_(torch.tensor([0]), torch.ones(1)),
    "Detach the tensors that a module keeps": lambda: deepcopy(torch.ones(1, requires_grad=True).exp()),
    "Detach what one step keeps": go_back_twice,
    "estimated_stepping_batches": lambda: int(math.inf),
    "For the steps of the run, read": lambda: torch.optim.lr_scheduler.OneCycleLR(
        torch.optim.SGD([nn.Parameter(torch.ones(1))]), 0.1, epochs=1, steps_per_epoch=math.inf
    ),
    "drop_last=True": lambda: nn.BatchNorm1d(2)(torch.ones(1, 2)),
    "Labels go from 0": lambda: nn.functional.cross_entropy(torch.ones(2, 2), torch.tensor([0, 5])),
    "logits": lambda: nn.functional.binary_cross_entropy(torch.full((2,), 3.0), torch.ones(2)),
    "num_embeddings": lambda: nn.Embedding(3, 2)(torch.tensor([7])),
    "self.dtype and": lambda: torch.ones(2, 2, dtype=torch.float64) @ torch.ones(2, 2),
    "convert inputs": lambda: nn.Conv1d(1, 1, 1)(torch.ones(1, 1, 3, dtype=torch.float64)),
    "target.long()": lambda: nn.functional.cross_entropy(torch.ones(2, 2), torch.ones(2, dtype=torch.int32)),
    "class indices and embeddings": lambda: nn.functional.embedding(torch.ones(1), torch.ones(2, 2)),
    "torch.enable_grad()": lambda: torch.autograd.grad(torch.ones(1).sum(), torch.ones(1)),
    "torch.no_grad()": change_a_leaf,
    "use self.all_gather": lambda: torch.distributed.all_reduce(torch.ones(1)),
}


@pytest.mark.parametrize("advice", TORCH_ERRORS)
def test_errors_of_torch_say_what_to_do(tmp_path, advice):
    task = Regression()
    task.training_step = lambda batch: TORCH_ERRORS[advice]()
    trainer = quiet_trainer(tmp_path, max_epochs=1, enable_checkpointing=False, deterministic=True)
    with pytest.raises((RuntimeError, ValueError, IndexError, OverflowError)) as caught:
        trainer.fit(task, loader())
    assert advice in "".join(caught.value.__notes__)


class Samples(Dataset):
    """Data set whose samples do the given action."""

    def __init__(self, do):
        self.do = do

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.do()
        return torch.ones(FEATURES), torch.ones(1)


WORKER_ERRORS = {
    "--shm-size": (lambda: os.kill(os.getpid(), signal.SIGBUS), {}),
    "fewer workers need less": (lambda: os.kill(os.getpid(), signal.SIGKILL), {}),
    "num_workers=0 shows the slow line": (lambda: time.sleep(5), {"timeout": 1}),
    "top of a module": (lambda: None, {"multiprocessing_context": "spawn"}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Got pickle error")
@pytest.mark.parametrize("advice", WORKER_ERRORS)
def test_errors_of_workers_say_what_to_do(tmp_path, advice):
    do, options = WORKER_ERRORS[advice]
    loaded = DataLoader(Samples(do), num_workers=1, **options)
    with pytest.raises((RuntimeError, AttributeError, pickle.PicklingError)) as caught:
        quiet_trainer(tmp_path, max_epochs=1, enable_checkpointing=False).fit(Regression(), loaded)
    assert advice in "".join(caught.value.__notes__)


def test_gradients_in_evaluations_say_what_to_do(tmp_path):
    task = Regression()
    task.validation_step = lambda batch: torch.autograd.grad(task(batch[0]).sum(), task.parameters())
    with pytest.raises(RuntimeError) as caught:
        quiet_trainer(tmp_path).validate(task, loader())
    assert "an evaluation makes none" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("kind", [lumen.Callback, lumen.CSVLogger])
def test_errors_inside_properties_are_not_hidden(kind):
    class Broken(kind):
        @property
        def shown(self):
            return self.never_made

    with pytest.raises(AttributeError, match="never_made"):
        _ = Broken().shown
    assert not hasattr(Broken(), "log_table" if kind is lumen.CSVLogger else "log")
