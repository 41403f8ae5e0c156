"""Lightning's names: code that reads or calls them on trainer, task or data module gets the same meaning."""

import argparse
import inspect
import math
import os
import signal
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import lumen
from lumen.errors import CheckpointMismatch, ConfigError, TrainingError
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, regression_data, weights


class Task(Regression):
    """Task with every step that records the trainer's attributes in each hook."""

    def __init__(self, look=lambda trainer: None):
        super().__init__()
        self.save_hyperparameters(ignore="look")
        self.look, self.seen = look, {}

    def training_step(self, batch):
        self.seen.setdefault("training_step", []).append(self.look(self.trainer))
        return super().training_step(batch)

    def validation_step(self, batch):
        self.seen.setdefault(f"validation_step {self.trainer.state.stage}", []).append(self.look(self.trainer))
        super().validation_step(batch)

    def test_step(self, batch):
        self.seen.setdefault("test_step", []).append(self.look(self.trainer))
        super().test_step(batch)

    def predict_step(self, batch):
        self.seen.setdefault("predict_step", []).append(self.look(self.trainer))
        return super().predict_step(batch)


# ---------------------------------------------------------------------- the state of a trainer

FLAGS = ("training", "sanity_checking", "validating", "testing", "predicting", "evaluating")


def read_flags(trainer):
    return {name for name in FLAGS if getattr(trainer, name)}


def test_state_names_running_stage_and_final_status(tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=1)
    assert (trainer.state.status, trainer.state.fn, trainer.state.stage) == ("initializing", None, None)
    assert (trainer.state.stopped, trainer.interrupted) == (False, False)
    assert not read_flags(trainer)
    task = Task(lambda trainer: (trainer.state.status, trainer.state.fn, trainer.state.stage, read_flags(trainer)))
    trainer.fit(task, loader(), loader())
    assert trainer.state.finished
    assert (trainer.state.fn, trainer.state.stage) == ("fit", None)
    trainer.validate(task, loader())
    trainer.test(task, loader())
    trainer.predict(task, loader())
    expected = {
        "training_step": ("fit", "train", {"training"}),
        "validation_step sanity_check": ("fit", "sanity_check", {"sanity_checking", "evaluating"}),
        "test_step": ("test", "test", {"testing", "evaluating"}),
        "predict_step": ("predict", "predict", {"predicting"}),
    }
    for step, state in expected.items():
        assert all(seen == ("running", *state) for seen in task.seen[step]), step
    both = {seen[1] for seen in task.seen["validation_step validate"]}
    assert both == {"fit", "validate"}
    assert (trainer.state.fn, read_flags(trainer)) == ("predict", set())


@pytest.mark.parametrize("how", ["an error", "a signal"])
def test_run_ended_by_error_or_signal_is_interrupted(tmp_path, how):
    seen = []

    def fail(trainer, task, batch, batch_idx):
        if how == "an error":
            raise RuntimeError("mine")
        os.kill(os.getpid(), signal.SIGTERM)
        seen.append(trainer.received_sigterm)

    trainer = bare_trainer(tmp_path, max_epochs=1, callbacks=[lumen.LambdaCallback(on_train_batch_start=fail)])
    assert trainer.received_sigterm is False
    with pytest.raises((RuntimeError, SystemExit)):
        trainer.fit(Task(), loader())
    assert trainer.interrupted
    assert trainer.state.stopped
    assert not trainer.state.finished
    assert seen in ([], [True])
    trainer.validate(Task(), loader())
    assert not trainer.interrupted


def test_before_any_run_there_is_nothing_but_zeros(tmp_path):
    trainer = bare_trainer(tmp_path)
    assert (trainer.global_step, trainer.current_epoch, trainer.should_stop) == (0, 0, False)
    assert trainer.callback_metrics == trainer.logged_metrics == {}
    assert trainer.model is trainer.lightning_module is trainer.ckpt_path is trainer.train_dataloader is None
    assert trainer.num_val_batches == trainer.num_test_batches == []


# ---------------------------------------------------------------------- arguments and attributes of the trainer


def test_arguments_are_read_under_their_names(tmp_path):
    given = {
        "max_steps": 7, "min_epochs": 2, "min_steps": 3, "gradient_clip_val": 0.5, "gradient_clip_algorithm": "value",
        "val_check_interval": 0.25, "check_val_every_n_epoch": 3, "num_sanity_val_steps": 4, "limit_train_batches": 0.5,
        "limit_val_batches": 6, "limit_test_batches": 0, "limit_predict_batches": 1.0, "log_every_n_steps": 9,
        "reload_dataloaders_every_n_epochs": 2, "overfit_batches": 0.0,
    }  # fmt: skip
    trainer = bare_trainer(tmp_path, **given)
    assert {name: getattr(trainer, name) for name in given} == given
    trainer = bare_trainer(tmp_path, num_sanity_val_steps=-1, overfit_batches=3, val_check_interval="00:00:01:30")
    defaults = {
        "max_steps": -1, "max_epochs": -1, "min_epochs": 0, "gradient_clip_val": None, "gradient_clip_algorithm": None,
        "num_sanity_val_steps": math.inf, "overfit_batches": 3, "limit_train_batches": 3, "limit_test_batches": 1.0,
        "val_check_interval": timedelta(seconds=90), "num_devices": 1, "device_ids": [0],
    }  # fmt: skip
    assert {name: getattr(trainer, name) for name in defaults} == defaults
    assert bare_trainer(tmp_path, gradient_clip_val=2.0).gradient_clip_algorithm == "norm"
    assert bare_trainer(tmp_path, val_check_interval=5).val_check_interval == 5


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("limit_val_batches", 0, r"limit_val_batches cannot be set. Write Trainer\(limit_val_batches=...\)"),
        ("max_epochs", 9, r"max_epochs cannot be set. Write Trainer\(max_epochs=...\)"),
        ("logger", None, r"logger cannot be set. Write Trainer\(logger=...\)"),
        ("callback_metrics", {}, "callback_metrics cannot be set. callback_metrics is read-only"),
        ("fit_loop", None, "fit_loop cannot be set. Read trainer.progress"),
    ],
)
def test_fixed_trainer_attributes_cannot_be_set(tmp_path, name, value, message):
    with pytest.raises(ConfigError, match=f"Trainer.{message}"):
        setattr(bare_trainer(tmp_path), name, value)


def test_stage_is_sanity_check_in_its_hooks(tmp_path):
    seen = []

    class Looking(lumen.Callback):
        def on_sanity_check_start(self, trainer, task):
            seen.append((trainer.sanity_checking, trainer.training, trainer.evaluating, trainer.state.stage))

        on_sanity_check_end = on_train_start = on_sanity_check_start

    trainer = quiet_trainer(tmp_path, max_steps=1, num_sanity_val_steps=1, callbacks=[Looking()])
    trainer.fit(Regression(), loader(16, 8), loader(16, 8))
    check = (True, False, True, "sanity_check")
    assert seen == [check, check, (False, True, False, "train")]


def test_fraction_of_epoch_needs_epochs(tmp_path):
    with pytest.raises(ConfigError, match=r"check_val_every_n_epoch is None, but val_check_interval is 0.5"):
        bare_trainer(tmp_path, val_check_interval=0.5, check_val_every_n_epoch=None)
    assert bare_trainer(tmp_path, val_check_interval=5, check_val_every_n_epoch=None).check_val_every_n_epoch == 1


def test_clipping_value_zero_is_off(tmp_path):
    assert bare_trainer(tmp_path, gradient_clip_val=0.0).plan == bare_trainer(tmp_path).plan


def test_strategies_answer_to_lightnings_names(tmp_path):
    finding = bare_trainer(tmp_path, strategy="ddp_find_unused_parameters_true", accelerator="cpu").strategy
    assert finding._options["find_unused_parameters"] is True
    assert finding.root_device == torch.device("cpu")
    with pytest.raises(AttributeError, match=r"DDP has no attribute lightning_module. Read trainer.lightning_module."):
        finding.lightning_module  # noqa: B018
    for kind in (lumen.DDP, lumen.FSDP, lumen.SingleDevice):
        with pytest.raises(ConfigError, match=r"has no argument precision_plugin. Use Trainer\(precision=...\)."):
            kind(precision_plugin=object())


def test_training_step_none_is_a_clear_error(tmp_path):
    task = Regression()
    task.training_step = None
    with pytest.raises(ConfigError, match=r"Regression\.training_step is None\. Define training_step"):
        quiet_trainer(tmp_path).fit(task, loader(16, 8))
    with pytest.raises(ConfigError, match=r"Regression.trainer cannot be set: pass the task to fit"):
        task.trainer = object()
    assert task.logger is None


def test_callbacks_are_found_by_their_kind(tmp_path):
    stops = [lumen.EarlyStopping("val_loss"), lumen.EarlyStopping("loss")]
    savers = [lumen.ModelCheckpoint(), lumen.ModelCheckpoint(monitor="val_loss", dirpath=tmp_path / "best")]
    bar = lumen.ProgressBar()
    trainer = quiet_trainer(tmp_path, callbacks=[*stops, *savers, bar], enable_progress_bar=True)
    assert trainer.early_stopping_callbacks == stops
    assert trainer.early_stopping_callback is stops[0]
    assert trainer.checkpoint_callbacks == savers[::-1]
    assert trainer.checkpoint_callback is savers[1]
    assert trainer.progress_bar_callback is bar
    bare = bare_trainer(tmp_path)
    assert (bare.early_stopping_callback, bare.progress_bar_callback, bare.checkpoint_callbacks) == (None, None, [])


def test_model_and_ckpt_path_are_those_in_use(tmp_path):
    trainer, task = quiet_trainer(tmp_path, max_epochs=1), Task(lambda trainer: (trainer.model, trainer.ckpt_path))
    trainer.fit(task, loader())
    assert all(seen == (task, None) for seen in task.seen["training_step"])
    newest = trainer.checkpoint_callback.last_model_path
    trainer.test(task, loader(), ckpt_path="last")
    assert all(seen == (task, newest) for seen in task.seen["test_step"])
    assert trainer.lightning_module is task
    again, task = quiet_trainer(tmp_path, max_epochs=2, resume="last"), Task(lambda trainer: trainer.ckpt_path)
    again.fit(task, loader())
    assert set(task.seen["training_step"]) == {newest}


def test_print_prints_once_as_print_does(tmp_path, capsys):
    class Printing(Task):
        def on_train_start(self):
            self.print("a", 1, sep="-", end="!\n")
            self.trainer.print("b", [2], sep="")

    bare_trainer(tmp_path, max_steps=1).fit(Printing(), loader())
    captured = capsys.readouterr()
    assert (captured.out + captured.err).splitlines()[-2:] == ["a-1!", "b[2]"]


@pytest.mark.parametrize("name", ["add_argparse_args", "from_argparse_args"])
def test_argparse_methods_of_lightning_1_suggest_cli(name):
    with pytest.raises(ConfigError, match=f"Trainer.{name} .*lumen.CLI"):
        getattr(lumen.Trainer, name)(None)


# ---------------------------------------------------------------------- calls of the trainer


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("verbose", [True, False])
def test_evaluation_prints_values_only_if_verbose(tmp_path, capsys, stage, verbose):
    trainer = bare_trainer(tmp_path, enable_progress_bar=True)
    (values,) = getattr(trainer, stage)(Task(), loader(), None, verbose, weights_only=True)
    captured = capsys.readouterr()
    assert len(values) == 1
    assert (next(iter(values)) in captured.out + captured.err) is verbose


def test_predict_takes_its_arguments_in_lightnings_order(tmp_path):
    class Data(lumen.DataModule):
        def predict_dataloader(self):
            return loader(16, 8)

    trainer, task = bare_trainer(tmp_path), Task()
    assert len(trainer.predict(task, None, Data())) == 2
    assert trainer.predict(task, None, Data(), False) is None
    assert len(trainer.predict(task, loader(16, 8), None, None, None)) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights_only": True}, "weights_only: .*always has the full state"),
        ({"storage_options": {}}, "storage_options: .*fsspec"),
    ],
)
def test_unsupported_save_options_raise(tmp_path, options, message):
    with pytest.raises(ConfigError, match=f"save_checkpoint has no {message}"):
        bare_trainer(tmp_path).save_checkpoint(tmp_path / "c", **options)


# ---------------------------------------------------------------------- loaders


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((torch.ones(6), torch.ones(1)) for _ in range(6))


def test_loaders_and_batch_counts_are_available(tmp_path):
    train, several = loader(48, 8), [loader(16, 8), DataLoader(Stream(), 2)]
    names = ("num_training_batches", "num_val_batches", "num_sanity_val_batches", "enable_validation")
    task = Task(lambda trainer: [getattr(trainer, name) for name in names])
    trainer = bare_trainer(tmp_path, max_epochs=1, limit_train_batches=0.5, num_sanity_val_steps=1)
    trainer.fit(task, train, several)
    assert all(seen == [3, [2, math.inf], [1, 1], True] for seen in task.seen["training_step"])
    assert trainer.train_dataloader is train
    assert trainer.val_dataloaders is several
    assert trainer.test_dataloaders is trainer.predict_dataloaders is None
    task.look = lambda trainer: (trainer.num_test_batches, trainer.num_val_batches, trainer.test_dataloaders)
    test = loader(16, 8)
    trainer.test(task, test)
    assert all(seen == ([2], [], test) for seen in task.seen["test_step"])
    task.look = lambda trainer: (trainer.num_predict_batches, trainer.predict_dataloaders)
    trainer.predict(task, test)
    assert all(seen == ([2], test) for seen in task.seen["predict_step"])


class Seen(Task):
    def on_train_epoch_end(self):
        self.at_end = self.look(self.trainer)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_is_last_batch_marks_end_of_epoch(tmp_path, accumulate):
    task = Seen(lambda trainer: trainer.is_last_batch)
    bare_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=accumulate).fit(task, loader(40, 8), loader(16, 8))
    assert task.seen["training_step"] == [False, False, False, False, True] * 2
    assert task.at_end is True


def test_manual_accumulation_may_use_is_last_batch(tmp_path):
    class ByHand(Seen):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.seen.setdefault("training_step", []).append(self.trainer.is_last_batch)
            self.manual_backward(nn.functional.mse_loss(self(batch[0]), batch[1]))
            if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
                self.optimizers().step()
                self.optimizers().zero_grad()

    trainer, task = bare_trainer(tmp_path, max_epochs=1), ByHand()
    trainer.fit(task, loader(40, 8))
    assert task.seen["training_step"] == [False, False, False, False, True]
    assert trainer.global_step == 3


def test_is_last_batch_needs_a_length(tmp_path):
    with pytest.raises(ConfigError, match="is_last_batch: the training loader has no length"):
        bare_trainer(tmp_path, max_steps=1).fit(Task(lambda trainer: trainer.is_last_batch), DataLoader(Stream(), 2))


# ---------------------------------------------------------------------- values


class Logging(Regression):
    def training_step(self, batch):
        loss = super().training_step(batch)
        self.log("both", float(self.global_step), on_step=True, on_epoch=True)
        self.log("secret", 1.0, logger=False)
        self.read = self.trainer.callback_metrics
        return loss

    def on_train_epoch_end(self):
        self.ended = self.trainer.callback_metrics


def test_step_and_epoch_values_have_suffixed_names(tmp_path):
    task, trainer = Logging(), bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, loader(24, 8), loader(16, 8))
    assert (task.read["both"], task.read["both_step"], task.read["both_epoch"]) == (5, 5, 1)
    assert (task.ended["both"], task.ended["both_epoch"]) == (4, 4)
    assert trainer.callback_metrics["both"] == 4
    assert {*trainer.callback_metrics} == {"loss", "val_loss", "both", "both_step", "both_epoch", "secret"}
    assert {*trainer.logged_metrics} == {"loss", "val_loss", "both_step", "both_epoch"}
    assert trainer.logged_metrics["both_epoch"] == 4


# ---------------------------------------------------------------------- the task


class Noting(Regression):
    def __init__(self, **options):
        super().__init__(**options)
        self.dtypes = []

    def training_step(self, batch):
        self.dtypes.append((self.dtype, self.on_gpu, self.fabric))
        return super().training_step(batch)


def test_task_has_dtype_and_neutral_lightning_attributes(tmp_path):
    task = Noting(dtype=torch.float64)
    assert (task.dtype, task.on_gpu, task.fabric, task.example_input_array) == (torch.float64, False, None, None)
    bare_trainer(tmp_path, max_steps=1, precision="bf16-true").fit(task, loader(dtype=torch.float64))
    assert task.dtypes == [(torch.bfloat16, False, None)]
    assert lumen.TaskModule().dtype is torch.float32
    assert task.freeze() is task.unfreeze() is task


def test_hyperparameters_as_they_were_saved(tmp_path):
    task = Regression(lr=0.5)
    task.hparams.lr = 0.25
    assert (task.hparams_initial.lr, task.hparams.lr) == (0.5, 0.25)


class Unsaved(lumen.TaskModule):
    def __init__(self, width=3):
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WithConfig(Unsaved):
    def __init__(self, config, more=1):
        super().__init__()
        self.save_hyperparameters(config)


class KeywordOnly(Unsaved):
    def __init__(self, first, *others, last=3):
        super().__init__()
        self.save_hyperparameters()


def test_hyperparameters_return_to_the_argument_that_had_them(tmp_path, caplog):
    def train(task, name):
        trainer = quiet_trainer(tmp_path / name, max_steps=1)
        trainer.fit(task, loader())
        return trainer.checkpoint_callback.last_model_path

    for number, config in enumerate(({"width": 3, "rate": 1}, argparse.Namespace(width=3, rate=1))):
        path = train(WithConfig(config), str(number))
        assert WithConfig.load_from_checkpoint(path).hparams == {"width": 3, "rate": 1}
        assert WithConfig.load_from_checkpoint(path, rate=2, more=3).hparams.rate == 2
        assert WithConfig.load_from_checkpoint(path, config={"rate": 4}).hparams == {"rate": 4}
    assert Unsaved.load_from_checkpoint(path).hparams == {}
    assert "ignoring hyperparameters that Unsaved does not accept: rate" in caplog.text
    assert KeywordOnly.load_from_checkpoint(train(KeywordOnly(1, 2, last=4), "last")).hparams == {"first": 1, "last": 4}
    with pytest.raises(ConfigError, match=r"Write WithConfig\.load_from_checkpoint"):
        WithConfig({}).load_from_checkpoint(path)


class Plain(nn.Module, lumen.HyperparametersMixin):
    def __init__(self, sizes, dropped=2):
        super().__init__()
        self.save_hyperparameters(ignore=["dropped"])


def test_any_class_saves_its_hyperparameters():
    plain = Plain([1])
    plain.hparams.sizes.append(2)
    assert (plain.hparams, plain.hparams_initial) == ({"sizes": [1, 2]}, {"sizes": [1]})
    del plain.hparams.sizes
    assert not plain.hparams


def save_from(frame, task):
    task.save_hyperparameters(frame=frame)


class FromAFunction(lumen.TaskModule):
    def __init__(self, width=3):
        super().__init__()
        save_from(inspect.currentframe(), self)


def test_a_function_saves_the_hyperparameters_of_a_frame():
    assert FromAFunction(7).hparams == {"width": 7}


class Reduced(Regression):
    def __init__(self, how):
        super().__init__()
        self.save_hyperparameters(ignore="how")
        self.how = how

    def training_step(self, batch, batch_idx):
        self.log("number", float(batch_idx), on_step=False, on_epoch=True, reduce_fx=self.how, logger=None)
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        (torch.mean, 1.5), ("avg", 1.5), ("Mean", 1.5), (torch.sum, 6), (sum, 6), (torch.max, 3), (max, 3),
        (torch.min, 0), (min, 0),
    ],
)  # fmt: skip
def test_a_function_that_reduces_stands_for_its_name(tmp_path, how, value):
    trainer = bare_trainer(tmp_path, max_epochs=1)
    trainer.fit(Reduced(how), loader(32, 8))
    assert trainer.callback_metrics["number"] == trainer.logged_metrics["number"] == value


@pytest.mark.parametrize("how", [torch.median, [1], "median"])
def test_any_other_function_is_told_what_to_write(tmp_path, how):
    with pytest.raises(ConfigError, match=r"reduce_fx=.*expected one of mean, sum, min, max, or torch.mean.*Metric"):
        bare_trainer(tmp_path, max_epochs=1).fit(Reduced(how), loader(32, 8))


class OfAnIterator(Regression):
    """Task that takes its batches like some tasks of Lightning, `times` of them in a step."""

    times = 1

    def training_step(self, dataloader_iter):
        for _ in range(self.times):
            batch, self.batch_idx, dataloader_idx = next(dataloader_iter)
            assert dataloader_idx == 0
        return super().training_step(batch)

    def validation_step(self, dataloader_iter):
        return super().validation_step(next(dataloader_iter)[0])


def test_dataloader_iter_step_equals_plain_step(tmp_path):
    plain, task = Regression(), OfAnIterator()
    for each in (plain, task):
        bare_trainer(tmp_path, max_epochs=2, accumulate_grad_batches=2).fit(each, loader(40, 8), loader(16, 8))
    assert torch.equal(weights(task), weights(plain))
    assert task.batch_idx == 4


def test_taking_two_batches_suggests_accumulation(tmp_path):
    task = OfAnIterator()
    task.times = 2
    with pytest.raises(TrainingError, match=r"took two batches from dataloader_iter.*accumulate_grad_batches"):
        bare_trainer(tmp_path, max_epochs=1).fit(task, loader(40, 8))

    class Both(Regression):
        def training_step(self, dataloader_iter, batch_idx):
            return None

    with pytest.raises(ConfigError, match="dataloader_iter must be the only argument"):
        bare_trainer(tmp_path, max_epochs=1).fit(Both(), loader(40, 8))


def test_a_task_is_loaded_as_lightnings_is(tmp_path):
    trainer, task = quiet_trainer(tmp_path, max_steps=1), Regression(lr=0.5)
    trainer.fit(task, loader())
    path = trainer.checkpoint_callback.last_model_path
    again = Regression.load_from_checkpoint(
        checkpoint_path=path, map_location="cpu", hparams_file=None, strict=True, weights_only=True, lr=0.25
    )
    assert torch.equal(weights(again), weights(task))
    assert again.hparams.lr == 0.25
    assert Regression.load_from_checkpoint(path, torch.device("meta")).device.type == "meta"
    for options, message in (
        (
            {"map_location": lambda storage, place: storage},
            "map_location: expected a device, such as .*found <function",
        ),
        ({"hparams_file": "hparams.yaml"}, "hparams_file='hparams.yaml' is not supported"),
    ):
        with pytest.raises(ConfigError, match=message):
            Regression.load_from_checkpoint(path, **options)


def test_a_task_says_itself_whether_names_may_differ(tmp_path):
    class Larger(Regression):
        def __init__(self, **options):
            super().__init__(**options)
            self.head, self.strict_loading = nn.Linear(1, 1), False

    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Regression(), loader())
    path = trainer.checkpoint_callback.last_model_path
    assert Larger.load_from_checkpoint(path).head.weight.shape == (1, 1)
    with pytest.raises(CheckpointMismatch, match=r"head\.weight"):
        Larger.load_from_checkpoint(path, strict=True)


def test_unsupported_task_calls_raise():
    with pytest.raises(ConfigError, match="all_gather: a group is given, but all processes take part"):
        Regression().all_gather(torch.ones(1), group=object())
    with pytest.raises(ConfigError, match="to_tensorrt: write lumen export"):
        Regression().to_tensorrt("model.ts")


# ---------------------------------------------------------------------- the data module


class Numbers(Dataset):
    def __init__(self, samples):
        self.inputs, self.targets = regression_data(samples)

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Sized(lumen.DataModule):
    def __init__(self, batch_size=1, name=""):
        super().__init__()
        self.save_hyperparameters()
        self.seen = 0

    def train_dataloader(self):
        return loader(24, self.hparams.batch_size)

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def test_from_datasets_equals_explicit_loaders(tmp_path):
    data = lumen.DataModule.from_datasets(
        Numbers(48), [Numbers(16), Numbers(8)], {"x": Numbers(8)}, Stream(), batch_size=8
    )
    task, plain = Task(), Task()
    trainer = bare_trainer(tmp_path, max_epochs=2)
    trainer.fit(task, datamodule=data)
    bare_trainer(tmp_path, max_epochs=2).fit(plain, DataLoader(Numbers(48), 8, shuffle=True), loader(16))
    assert torch.equal(weights(task), weights(plain))
    assert trainer.num_val_batches == [2, 1]
    assert len(trainer.test(task, datamodule=data)) == 1
    assert len(trainer.predict(task, datamodule=data)) == 1
    made = Sized.from_datasets(Numbers(4), batch_size=2, name="small")
    assert made.hparams == {"batch_size": 2, "name": "small"}
    assert len(made.train_dataloader()) == 2
    assert made.val_dataloader() is None


def test_a_data_module_is_readable():
    data = lumen.DataModule.from_datasets(Numbers(48), [Numbers(16), Stream()], {"x": Numbers(8)}, batch_size=8)
    assert str(data).splitlines() == [
        "DataModule",
        "  train_dataloader: 48 samples in batches of 8",
        "  val_dataloader: 16 samples in batches of 8; a Stream without a length in batches of 8",
        "  test_dataloader: x: 8 samples in batches of 8",
        "  predict_dataloader: none",
    ]

    class Late(lumen.DataModule):
        def train_dataloader(self):
            return DataLoader(self.samples)

    assert "train_dataloader: not available yet (AttributeError: " in str(Late())


def test_a_data_module_is_built_from_a_checkpoint(tmp_path):
    data = Sized(batch_size=8, name="mine")
    data.seen = 5
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Regression(), datamodule=data)
    again = Sized.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, name="other")
    assert (again.hparams, again.seen) == ({"batch_size": 8, "name": "other"}, 5)
    with pytest.raises(ConfigError, match="hparams_file"):
        Sized.load_from_checkpoint(trainer.run_directory, hparams_file="x.yaml")


@pytest.mark.parametrize(("node", "per_node", "calls"), [(0, False, 1), (1, True, 1), (1, False, 0)])
def test_prepare_data_per_node_is_respected(tmp_path, monkeypatch, node, per_node, calls):
    class Preparing(Sized):
        prepared = 0

        def prepare_data(self):
            self.prepared += 1

    data, trainer = Preparing(8), bare_trainer(tmp_path, max_steps=1)
    data.prepare_data_per_node = per_node
    monkeypatch.setattr(trainer.processes, "node", node)
    trainer.fit(Regression(), datamodule=data)
    assert data.prepared == calls
