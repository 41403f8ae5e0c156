"""Searches for a learning rate and a batch size: their results, and no side effects."""

import csv
import gc
import os
import random
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lumen
from lumen.cli import main
from lumen.errors import ConfigError, TrainingError
from tests.helpers.cli_tasks import Spy
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, regression_data, weights
from tests.helpers.working_directory import LINE as CONFIG  # noqa: F401 (of the fixture)

SEARCH = {"min_lr": 1e-4, "max_lr": 10.0, "num_training": 40}


class Falling(Regression):
    """Regression whose loss falls clearly at rates near 0.01; with dropout and changing buffers."""

    def __init__(self, lr=1e-5, dropout=0.1, dtype=torch.float32, optimizer="SGD"):
        super().__init__(lr, dropout, dtype, optimizer)
        self.norm = torch.nn.BatchNorm1d(6, dtype=dtype)

    def forward(self, inputs):
        return self.net(self.norm(inputs))

    def training_step(self, batch):
        return super().training_step((batch[0], 5 * batch[1] + 3))


def search(tmp_path, task, data, **options):
    return lumen.Tuner(bare_trainer(tmp_path, max_epochs=1)).lr_find(task, data, **{**SEARCH, **options})


# ---------------------------------------------------------------------- the learning rate


def test_tuner_takes_arguments_of_lightning_in_order(tmp_path):
    task, data = Falling(), loader(256, 8)
    tuner = lumen.Tuner(bare_trainer(tmp_path, max_epochs=1))
    curve = tuner.lr_find(task, data, loader(8), None, None, "fit", 1e-3, 1.0, 20, "linear", None, False)
    assert curve.results["lr"] == pytest.approx(np.linspace(1e-3, 1.0, 20))
    assert task.hparams.lr == 1e-5


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "validate"}, "has no method: Leave it out: a search trains"),
        ({"dataloaders": [1]}, "has no dataloaders: Pass the loaders as train_dataloaders"),
        ({"max_val": 8}, "has no max_val: The search ends at the memory limit"),
    ],
)
def test_arguments_that_only_lightning_has_raise(tmp_path, method, options, message):
    with pytest.raises(ConfigError, match=f"{method} {message}"):
        getattr(lumen.Tuner(bare_trainer(tmp_path, max_epochs=1)), method)(Falling(), loader(), **options)


@pytest.mark.parametrize(
    ("method", "finder"), [("lr_find", lumen.LearningRateFinder), ("scale_batch_size", lumen.BatchSizeFinder)]
)
def test_tuner_refuses_a_trainer_that_searches_again(tmp_path, method, finder):
    tuner = lumen.Tuner(bare_trainer(tmp_path, max_epochs=1, callbacks=[finder()]))
    with pytest.raises(ConfigError, match=f"{method}: the trainer has a {finder.__name__} in callbacks"):
        getattr(tuner, method)(Falling(), loader())


def test_rates_rise_and_losses_precede_their_update(tmp_path):
    task, data = Regression(optimizer="SGD"), loader(64, 8, shuffle=False)
    curve = search(tmp_path, task, data, update_attr=False, early_stop_threshold=None)
    rates = [1e-4 * 1e5 ** (step / 39) for step in range(40)]
    assert curve.results["lr"] == pytest.approx(rates, rel=1e-12)
    optimizer = torch.optim.SGD(task.parameters(), lr=0.0)
    average, losses, batches = 0.0, [], [*data] * 5
    for step, (rate, (inputs, targets)) in enumerate(zip(rates, batches, strict=True)):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(task(inputs), targets)
        loss.backward()
        optimizer.step()
        average = 0.98 * average + 0.02 * loss.item()
        losses.append(average / (1 - 0.98 ** (step + 1)))
    assert curve.results["loss"] == pytest.approx(losses, rel=1e-9)


def test_the_suggestion_is_where_the_loss_falls_fastest(tmp_path):
    curve = search(tmp_path, Falling(), loader(160, 16))
    losses, index = curve.results["loss"], curve.results["lr"].index(curve.suggestion())
    slopes = np.gradient(losses[10:-1])
    assert index == 10 + slopes.argmin()
    assert 1e-3 < curve.suggestion() < 1.0
    assert curve.suggestion(skip_begin=len(losses) - 2) is None
    curve.results["loss"][index] = float("nan")
    assert curve.suggestion() != curve.results["lr"][index]


@pytest.mark.parametrize(("threshold", "optimizer"), [(4.0, "SGD"), (None, "SGD")])
def test_a_loss_that_explodes_ends_the_search(tmp_path, threshold, optimizer):
    options = {"max_lr": 1e9, "early_stop_threshold": threshold, "num_training": 60}
    curve = search(tmp_path, Falling(optimizer=optimizer), loader(160, 16), **options)
    assert len(curve.results["lr"]) == len(curve.results["loss"]) < 60
    assert curve.suggestion() < 1.0


class Grouped(Regression):
    def configure_optimizers(self):
        parameters = [*self.parameters()]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": self.hparams.lr / 4}]
        optimizer = torch.optim.SGD(groups, lr=self.hparams.lr)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, [4.0, 1.0], 20), "interval": "step"}
        ]


def test_groups_keep_their_ratios_and_schedules_stand_still(tmp_path):
    task, data = Grouped(), loader(64, 8, shuffle=False)
    grouped = search(tmp_path, task, data, update_attr=False).results["loss"]
    seen = []
    step = torch.optim.SGD.step
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            torch.optim.SGD,
            "step",
            lambda self, closure=None: (seen.append([group["lr"] for group in self.param_groups]), step(self))[1],
        )
        assert search(tmp_path, Grouped(), data, update_attr=False, mode="linear").results["loss"] != grouped
    assert [first for first, _ in seen] == pytest.approx([1e-4 + (10 - 1e-4) * n / 39 for n in range(len(seen))])
    assert all(second == pytest.approx(first / 4) for first, second in seen)


class Named(Falling):
    """Task whose rate is an attribute of another name."""

    def __init__(self):
        super().__init__()
        self.hparams.pop("lr")
        self.rate = 1.0

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.rate)


def test_the_attribute_is_set_where_it_is(tmp_path):
    task, other = Falling(), Named()
    assert search(tmp_path, task, loader(160, 16)).suggestion() == task.hparams.lr
    assert search(tmp_path, other, loader(160, 16), attr_name="rate").suggestion() == other.rate != 1.0
    kept = Falling()
    search(tmp_path, kept, loader(160, 16), update_attr=False)
    assert kept.hparams.lr == 1e-5


class Manual(Regression):
    automatic_optimization = False


class Two(Regression):
    learning_rate = 0.1


@pytest.mark.parametrize(
    ("task", "options", "says"),
    [
        (Manual, {}, "Manual uses manual optimization"),
        (Two, {}, "Two has both"),
        (Named, {}, "Named has no attribute or hyperparameter lr or learning_rate"),
        (Regression, {"attr_name": "rate"}, "Regression has no attribute or hyperparameter rate"),
        (Regression, {"min_lr": 2.0, "max_lr": 1.0}, "expected 0 < min_lr < max_lr"),
        (Regression, {"num_training": 1}, "at least 2 steps"),
    ],
)
def test_what_cannot_be_searched_is_refused(tmp_path, task, options, says):
    with pytest.raises(ConfigError, match=says):
        search(tmp_path, task(), loader(), **options)


def test_search_on_several_processes_is_rejected(tmp_path):
    tuner = lumen.Tuner(bare_trainer(tmp_path, max_epochs=1, devices=2))
    for find in (tuner.lr_find, tuner.scale_batch_size):
        with pytest.raises(ConfigError, match="runs on one process, but the trainer has 2"):
            find(Regression(), loader())


def test_missing_suggestion_raises_only_when_required(tmp_path):
    few = {"num_training": 8}
    assert search(tmp_path, Falling(), loader(), update_attr=False, **few).suggestion() is None
    with pytest.raises(TrainingError, match="found no rate to suggest"):
        search(tmp_path, Falling(), loader(), **few)


# ---------------------------------------------------------------------- no side effects


class Stream(IterableDataset):
    """Stream that resumes from its state."""

    def __init__(self):
        self.position, self.read = 0, 0

    def __iter__(self):
        inputs, targets = regression_data(96)
        while self.position < 96:
            self.position += 1
            self.read += 1
            yield inputs[self.position - 1], targets[self.position - 1]
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def draw_numbers():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def test_search_restores_task_data_trainer_and_generators(tmp_path):
    calls = lumen.LambdaCallback(setup=lambda *_: pytest.fail("a callback of the trainer was called"))
    trainer = quiet_trainer(tmp_path, max_epochs=1, callbacks=[calls])
    task, data = Falling(), loader(160, 16)
    task.norm.eval()
    before = {name: value.clone() for name, value in task.state_dict().items()}
    told, generators = {**vars(trainer)}, draw_numbers()
    lumen.Tuner(trainer).lr_find(task, data, **SEARCH, update_attr=False)
    assert draw_numbers() == generators
    assert vars(trainer) == told
    assert not os.listdir(tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert (task.norm.training, task.net.training, task.trainer if task._run else None) == (False, True, None)


def stream_loader():
    return DataLoader(Stream(), 8)


def dropping_loader():
    return loader(100, 8, drop_last=True)


@pytest.mark.parametrize("data", [stream_loader, dropping_loader])
def test_fit_after_rate_search_equals_fit_at_rate(tmp_path, data):
    finder = lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40)
    searched = Falling()
    trainer = quiet_trainer(tmp_path / "a", max_epochs=3, log_every_n_steps=1, callbacks=[finder])
    trainer.fit(searched, data())
    rate = finder.optimal_lr.suggestion()
    plain = Falling(lr=rate)
    without = quiet_trainer(tmp_path / "b", max_epochs=3, log_every_n_steps=1)
    without.fit(plain, data())
    assert searched.hparams == plain.hparams
    for name, value in searched.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name]), name
    rows = [(each.run_directory / "metrics.csv").read_bytes() for each in (trainer, without)]
    assert rows[0] == rows[1]
    assert trainer.progress.micro_batches == without.progress.micro_batches


def test_search_and_fit_read_stream_from_beginning(tmp_path):
    data = stream_loader()
    task = Falling()
    trainer = bare_trainer(tmp_path, max_steps=5)
    lumen.Tuner(trainer).lr_find(task, data, **{**SEARCH, "num_training": 21})
    trainer.fit(task, data)
    plain = Falling(lr=task.hparams.lr)
    bare_trainer(tmp_path, max_steps=5).fit(plain, stream_loader())
    assert torch.equal(weights(task), weights(plain))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_search_does_not_change_loss_scale_of_run(tmp_path, precision):
    finder = lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40)
    precision = precision if precision == "bf16" else lumen.precision.Float16(init_scale=1024.0, growth_interval=5)
    trainer = quiet_trainer(tmp_path, max_steps=4, precision=precision, callbacks=[finder])
    trainer.fit(Falling(), loader(160, 16))
    assert finder.optimal_lr is not None
    assert trainer.run.precision.state_dict().get("scale", 1024.0) == 1024.0


def test_resumed_run_keeps_the_found_rate(tmp_path):
    def fit(name, steps, **options):
        finder = lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40)
        task = Falling()
        saver = lumen.ModelCheckpoint(at_end=True)
        quiet_trainer(tmp_path / name, max_steps=steps, callbacks=[finder, saver], **options).fit(task, loader(100, 8))
        return task, finder

    straight, _ = fit("a", 9)
    _, first = fit("b", 4)
    resumed, second = fit("b", 9, resume="auto")
    assert second.optimal_lr is None
    assert resumed.hparams.lr == straight.hparams.lr == first.optimal_lr.suggestion()
    assert torch.equal(weights(resumed), weights(straight))


def test_curve_is_written_and_plotted_on_request(tmp_path):
    for plot in (False, True):
        finder = lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40, plot=plot)
        trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[finder])
        trainer.fit(Falling(), loader(160, 16))
        assert {each.name for each in trainer.run_directory.glob("lr_find*")} == (
            {"lr_find.csv", "lr_find.png"} if plot else set()
        )
    with (trainer.run_directory / "lr_find.csv").open() as file:
        rows = [*csv.reader(file)]
    assert rows[0] == ["lr", "loss"]
    results = finder.optimal_lr.results
    assert [[float(each) for each in row] for row in rows[1:]] == [
        [*each] for each in zip(*results.values(), strict=True)
    ]
    assert (trainer.run_directory / "lr_find.png").read_bytes().startswith(b"\x89PNG")


def test_log_contains_only_the_result_of_search(tmp_path):
    finder = lumen.LearningRateFinder(min_lr=1e-4, max_lr=10.0, num_training_steps=40)
    trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[finder], log_level="INFO")
    trainer.fit(Falling(), loader(160, 16))
    said = [line.split(" INFO ")[-1] for line in (trainer.run_directory / "run.log").read_text().splitlines()]
    assert said == [
        f"the run is in {trainer.run_directory}",
        f"learning rate: {finder.optimal_lr.suggestion():g}, set as Falling.hparams.lr",
        said[2],
        "finished: max_steps=1 reached at step 1, epoch 1",
        *said[4:],
    ]
    assert [line.split(":")[0] for line in said[4:]] == ["newest checkpoint", "longer", "curves", "weights"]


@pytest.mark.usefixtures("config_directory")
def test_finders_are_named_on_the_command_line():
    words = ["--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=30"]
    assert main(["fit", "--config", "line.yaml", *words, "--trainer.callbacks.min_lr=1e-4"]) == 0
    (finder,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == "LearningRateFinder")
    assert finder.optimal_lr.suggestion() == Spy.task.hparams.lr


@pytest.mark.usefixtures("config_directory")
def test_rate_of_configured_optimizer_is_only_suggested(capsys):
    words = ["fit", "--config", "line.yaml", "--optimizer=torch.optim.SGD", "--optimizer.lr=1e-6"]
    words += ["--trainer.callbacks+=LearningRateFinder", "--trainer.callbacks.num_training_steps=30"]
    assert main([*words, "--trainer.callbacks.min_lr=1e-4"]) == 2
    assert "Set update_attr: false, and write the" in capsys.readouterr().err
    assert main([*words, "--trainer.callbacks.min_lr=1e-4", "--trainer.callbacks.update_attr=false"]) == 0
    (finder,) = (each for each in Spy.trainer.callbacks if type(each).__name__ == "LearningRateFinder")
    assert f"suggested learning rate: {finder.optimal_lr.suggestion():g}" in capsys.readouterr().err
    assert finder.optimal_lr.results["loss"][-1] < finder.optimal_lr.results["loss"][0]


def test_function_bound_to_the_task_is_rejected(tmp_path):
    task, finder = Falling(), lumen.LearningRateFinder(num_training_steps=20, update_attr=False)
    trainer = bare_trainer(tmp_path, max_steps=1, callbacks=[finder])
    with pytest.raises(ConfigError, match=r"Pass functools\.partial"):
        trainer.fit(task, loader(), configure_optimizers=lambda: torch.optim.SGD(task.parameters(), lr=1.0))
    trainer.fit(task, loader(), configure_optimizers=partial(Falling.configure_optimizers, task))
    assert len(finder.optimal_lr.results["lr"]) > 5


# ---------------------------------------------------------------------- the batch size


class Cramped(Regression):
    """Task that runs out of memory if batches are too large."""

    def __init__(self, fits=20, lr=1e-2, dtype=torch.float32, error=torch.OutOfMemoryError):
        super().__init__(lr, 0.0, dtype)
        self.fits, self.error = fits, self.hparams.pop("error", error)

    def training_step(self, batch):
        if len(batch[0]) > self.fits:
            self.held = torch.zeros(1000)
            raise self.error("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().training_step(batch)


class Sized(lumen.DataModule):
    def __init__(self, batch_size=4, samples=200, dtype=torch.float32, drop_last=False):
        super().__init__()
        self.save_hyperparameters(ignore="dtype")
        self.dtype = dtype

    def train_dataloader(self):
        given = self.hparams
        return loader(given.samples, given.batch_size, dtype=self.dtype, drop_last=given.drop_last)


def scale_batch_size(tmp_path, task, data, trainer=None, **options):
    tuner = lumen.Tuner(bare_trainer(tmp_path, max_epochs=1, **trainer or {}))
    size = tuner.scale_batch_size(task, datamodule=data, **options)
    assert data.hparams.batch_size == size
    return size


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 16),
        ({"init_val": 5}, 20),
        ({"init_val": 100}, 12),  # 100, 50, 25
        ({"max_trials": 3}, 8),
        ({"mode": "binsearch"}, 19),
        ({"mode": "binsearch", "margin": 0.0}, 20),
        ({"mode": "binsearch", "margin": 0.0, "max_trials": 7}, 20),  # 2, 4, 8, 16; not 32, not 24
    ],
)
def test_the_largest_batch_that_fits_is_found(tmp_path, options, size):
    assert scale_batch_size(tmp_path, Cramped(), Sized(), **options) == size


def test_memory_ends_by_other_errors_too(tmp_path):
    assert scale_batch_size(tmp_path, Cramped(error=RuntimeError), Sized(), init_val=16) == 16


def test_no_more_is_tried_than_there_is(tmp_path):
    assert scale_batch_size(tmp_path, Cramped(1000), Sized(samples=50), init_val=16) == 50
    assert scale_batch_size(tmp_path, Cramped(1000), Sized(samples=50, drop_last=True), init_val=16) == 32


@pytest.mark.parametrize(
    ("fits", "options", "size"),
    [(1000, {}, 24), (10, {}, 8), (10, {"mode": "binsearch", "margin": 0.0}, 8), (13, {"init_val": 13}, 12)],
)
def test_batch_size_divides_the_global_batch_size(tmp_path, fits, options, size):
    assert scale_batch_size(tmp_path, Cramped(fits), Sized(), {"global_batch_size": 24}, **options) == size


class WithGradients(Cramped):
    """Task with less memory while the gradients of an earlier micro-batch exist."""

    def training_step(self, batch):
        self.fits = 6 if self.net[0].weight.grad is not None else 20
        return super().training_step(batch)


@pytest.mark.parametrize(
    ("options", "size"), [({"global_batch_size": 24}, 6), ({"accumulate_grad_batches": 4}, 6), ({}, 20)]
)
def test_a_trial_accumulates_where_the_run_does(tmp_path, options, size):
    assert scale_batch_size(tmp_path, WithGradients(), Sized(), options, mode="binsearch", margin=0.0) == size


def test_found_micro_batch_does_not_change_training(tmp_path):
    def fit(name, callbacks):
        task, data = Cramped(10, dtype=torch.float64), Sized(3, dtype=torch.float64)
        trainer = quiet_trainer(tmp_path / name, max_epochs=2, global_batch_size=24, callbacks=callbacks)
        trainer.fit(task, datamodule=data)
        return weights(task), data.hparams.batch_size

    finder = lumen.BatchSizeFinder()
    (found, size), (plain, _) = fit("a", [finder]), fit("b", [])
    assert size == finder.optimal_batch_size == 8
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-10)


def test_fit_after_batch_size_search_equals_plain_fit(tmp_path):
    searched, plain = Cramped(), Cramped()
    quiet_trainer(tmp_path, max_epochs=2, callbacks=[lumen.BatchSizeFinder()]).fit(searched, datamodule=Sized())
    quiet_trainer(tmp_path, max_epochs=2).fit(plain, datamodule=Sized(16))
    assert torch.equal(weights(searched), weights(plain))


def test_resumed_run_keeps_the_found_batch_size(tmp_path):
    def fit(name, steps, **options):
        task, finder = Cramped(), lumen.BatchSizeFinder()
        callbacks = [finder, lumen.ModelCheckpoint(at_end=True)]
        quiet_trainer(tmp_path / name, max_steps=steps, callbacks=callbacks, **options).fit(task, datamodule=Sized())
        return weights(task), finder.optimal_batch_size

    straight, size = fit("a", 9)
    fit("b", 4)
    resumed, again = fit("b", 9, resume="auto")
    assert (size, again) == (16, 16)
    assert torch.equal(resumed, straight)


@pytest.mark.parametrize("finder", [lumen.LearningRateFinder, lumen.BatchSizeFinder])
def test_finder_of_a_resumed_run_does_not_search(tmp_path, finder):
    for steps, callbacks in ((2, []), (4, [finder()])):
        trainer = quiet_trainer(tmp_path, max_steps=steps, callbacks=callbacks, resume="auto")
        trainer.fit(Cramped(), datamodule=Sized())
    assert trainer.global_step == 4


def test_memory_of_failed_attempts_is_freed(tmp_path):
    task = Cramped()
    scale_batch_size(tmp_path, task, Sized(), mode="binsearch")
    assert [each for each in gc.get_objects() if type(each) is Cramped] == [task]


class Elsewhere(Cramped):
    """Task that makes its loader with a size that is not an attribute."""

    def train_dataloader(self):
        return loader(50, 8)


class Fixed(Elsewhere):
    batch_size = 4


class Owning(Cramped):
    def __init__(self):
        super().__init__()
        self.batch_size = 1

    def train_dataloader(self):
        return loader(200, self.batch_size)


def test_the_size_may_be_the_tasks(tmp_path):
    task = Owning()
    assert lumen.Tuner(bare_trainer(tmp_path, max_epochs=1)).scale_batch_size(task) == task.batch_size == 16


class Broken(Cramped):
    def training_step(self, batch):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize(
    ("task", "options", "error", "says"),
    [
        (Elsewhere, {}, ConfigError, "Elsewhere has no attribute or hyperparameter batch_size"),
        (Fixed, {}, ConfigError, "batches have 8 samples: the loader does not use"),
        (lambda: Owning(), {"mode": "linear"}, ConfigError, "expected the mode power or binsearch"),
        (lambda: Owning(), {"init_val": 0}, ConfigError, "init_val"),
    ],
)
def test_unsearchable_batch_size_is_one_error(tmp_path, task, options, error, says):
    with pytest.raises(error, match=says):
        lumen.Tuner(bare_trainer(tmp_path, max_epochs=1)).scale_batch_size(task(), **options)


def test_other_errors_pass_through_and_one_sample_fits(tmp_path):
    with pytest.raises(RuntimeError, match="of another kind"):
        scale_batch_size(tmp_path, Broken(), Sized())
    with pytest.raises(TrainingError, match="a batch of one sample does not fit"):
        scale_batch_size(tmp_path, Cramped(0), Sized())


def test_data_of_a_single_tensor_is_enough(tmp_path):
    task = Falling()
    data = DataLoader(TensorDataset(*regression_data(6)), 6)
    assert len(search(tmp_path, task, data, update_attr=False).results["lr"]) > 10


class ByHand(Owning):
    automatic_optimization = False

    def training_step(self, batch):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()


def test_batch_size_search_supports_manual_optimization(tmp_path):
    assert lumen.Tuner(bare_trainer(tmp_path, max_epochs=1)).scale_batch_size(ByHand(), init_val=8) == 16
