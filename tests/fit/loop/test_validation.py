"""Validation: when it runs, its values, and its lack of side effects; test and predict too."""

import random
from datetime import timedelta

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError

import lumen
from lumen.errors import ConfigError, DataError
from tests.helpers.tasks import FEATURES, Drawing, Regression, bare_trainer, loader, quiet_trainer, weights
from tests.helpers.validation import full_loss


class When(lumen.Callback):
    """Callback that records (epoch, step) of every validation and its number of batches."""

    def __init__(self):
        self.starts, self.batches, self.sanity_batches = [], [], 0

    def on_validation_start(self, trainer, task):
        if not trainer.sanity_checking:
            assert trainer.validating
            self.starts.append((trainer.current_epoch, trainer.global_step))
            self.batches.append(0)

    def on_validation_batch_end(self, trainer, task, outputs, batch, batch_idx, dataloader_idx=0):
        if trainer.sanity_checking:
            self.sanity_batches += 1
        else:
            self.batches[-1] += 1


# ---------------------------------------------------------------------- evaluated parameters


def test_only_untrained_unloaded_parameters_warn(tmp_path, caplog):
    def warns(task, **options):
        caplog.clear()
        bare_trainer(tmp_path, log_level="WARNING").validate(task, loader(), **options)
        return "uses the initial parameters of" in caplog.text

    class Bare(lumen.TaskModule):
        def validation_step(self, batch):
            self.log("mean", batch[0].mean())

    trained, loaded = Regression(), Regression()
    assert warns(trained)
    assert warns(trained)  # an evaluation trains no parameter
    quiet_trainer(tmp_path, max_steps=1).fit(trained, loader())
    assert not warns(trained)
    run = tmp_path / "runs/run"
    assert not warns(Regression(), ckpt_path=run)
    assert not warns(Regression.load_from_checkpoint(run))
    loaded.load_state_dict(trained.state_dict())
    assert not warns(loaded)
    assert not warns(Bare())


# ---------------------------------------------------------------------- time of validations


@pytest.mark.parametrize(
    ("options", "validations"),
    [
        ({}, [(0, 5), (1, 10)]),
        ({"val_check_interval": 2}, [(0, 2), (0, 4), (1, 6), (1, 8), (1, 10)]),
        ({"val_check_interval": 7}, [(1, 7)]),
        ({"val_check_interval": 11}, []),
        ({"val_check_interval": 1.0}, [(0, 5), (1, 10)]),
        ({"val_check_interval": 0.5}, [(0, 3), (0, 5), (1, 8), (1, 10)]),
        ({"val_check_interval": 0.4, "limit_train_batches": 0.8}, [(0, 2), (0, 4), (1, 6), (1, 8)]),
        ({"val_check_interval": 0.5, "limit_train_batches": 4}, [(0, 2), (0, 4), (1, 6), (1, 8)]),
        ({"val_check_interval": 0.5, "check_val_every_n_epoch": 2}, [(1, 8), (1, 10)]),
        ({"check_val_every_n_epoch": 2}, [(1, 10)]),
        ({"check_val_every_n_epoch": 3}, []),
        ({"accumulate_grad_batches": 2}, [(0, 3), (1, 6)]),
        ({"accumulate_grad_batches": 2, "val_check_interval": 2}, [(0, 2), (1, 4), (1, 6)]),
        ({"accumulate_grad_batches": 2, "val_check_interval": 0.5}, [(0, 2), (0, 3), (1, 5), (1, 6)]),
        ({"val_check_interval": timedelta(0), "max_epochs": 1}, [(0, step) for step in range(1, 6)]),
        ({"val_check_interval": "01:00:00"}, []),
        ({"limit_val_batches": 0}, []),
        ({"limit_val_batches": 0.0}, []),
    ],
)
def test_a_validation_runs_when_it_is_due(tmp_path, options, validations):
    when = When()
    trainer = bare_trainer(tmp_path, callbacks=[when], **{"max_epochs": 2} | options)
    trainer.fit(Regression(), loader(40, 8), val_dataloaders=loader(16, 8))
    assert when.starts == validations
    assert when.batches == [2] * len(validations)


def test_an_early_stop_does_not_add_a_validation(tmp_path):
    when = When()
    trainer = bare_trainer(
        tmp_path, max_epochs=9, val_check_interval=2, callbacks=[when, lumen.EarlyStopping("val_loss", patience=1)]
    )
    trainer.fit(Regression(lr=0.0), loader(40, 8), val_dataloaders=loader(16, 8))
    assert when.starts == [(0, 2), (0, 4)]
    assert trainer.global_step == 4


def test_fraction_of_unknown_length_needs_a_limit(tmp_path):
    class Endless:
        def __iter__(self):
            while True:
                yield torch.randn(8, FEATURES), torch.randn(8, 1)

    with pytest.raises(ConfigError, match=r"val_check_interval: 0.5 is a fraction .* no length"):
        bare_trainer(tmp_path, max_steps=4, val_check_interval=0.5).fit(
            Regression(), Endless(), val_dataloaders=loader(16, 8)
        )
    when = When()
    trainer = bare_trainer(tmp_path, max_steps=8, val_check_interval=0.5, limit_train_batches=4, callbacks=[when])
    trainer.fit(Regression(), Endless(), val_dataloaders=loader(16, 8))
    assert when.starts == [(0, 2), (0, 4), (1, 6), (1, 8)]


# ---------------------------------------------------------------------- the sanity check


@pytest.mark.parametrize(
    ("steps", "limit", "batches"),
    [(0, None, 0), (1, None, 1), (2, None, 2), (-1, None, 4), (2, 1, 1), (-1, 3, 3), (2, 0.25, 1)],
)
def test_the_sanity_check_tries_the_first_batches(tmp_path, steps, limit, batches):
    when = When()
    trainer = bare_trainer(tmp_path, max_steps=1, num_sanity_val_steps=steps, limit_val_batches=limit, callbacks=[when])
    trainer.fit(Regression(), loader(), val_dataloaders=loader(32, 8))
    assert when.sanity_batches == batches
    assert when.starts == []


class Measured(Regression):
    """Task that logs a metric object and draws in its hooks."""

    def __init__(self, **options):
        super().__init__(**options)
        self.error = MeanSquaredError()
        self.found = []

    def validation_step(self, batch):
        super().validation_step(batch)
        self.error(self(batch[0]), batch[1])
        self.log("val_error", self.error, on_step=True, on_epoch=True)

    def on_validation_epoch_start(self):
        torch.rand(3), np.random.rand(3), random.random()

    def on_train_start(self):
        self.found.append(
            (
                dict(self.trainer.callback_metrics),
                self.error.update_count,
                "val_loss" in self.trainer.run.values.updated,
            )
        )


def test_the_sanity_check_leaves_no_trace(tmp_path):
    rows, tasks = [], []
    for steps in (0, 2):
        task = Measured(dropout=0.5)
        trainer = quiet_trainer(
            tmp_path / str(steps),
            max_epochs=2,
            num_sanity_val_steps=steps,
            log_every_n_steps=1,
            enable_checkpointing=False,
        )
        trainer.fit(task, loader(), val_dataloaders=loader(20, 8))
        assert task.found == [({}, 0, False)]
        rows.append((trainer.run_directory / "metrics.csv").read_text())
        tasks.append(task)
    assert rows[0] == rows[1]
    assert torch.equal(weights(tasks[0]), weights(tasks[1]))


# ---------------------------------------------------------------------- no side effects


class Modes(Regression):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(1)).eval()
        self.while_evaluating = set()

    def forward(self, inputs):
        return self.frozen(super().forward(inputs))

    def modes(self):
        return {name: module.training for name, module in self.named_modules()}

    def validation_step(self, batch):
        self.while_evaluating |= set(self.modes().values())
        assert not torch.is_grad_enabled()

    def test_step(self, batch):
        self.validation_step(batch)


def test_each_submodule_gets_its_own_mode_back(tmp_path):
    task = Modes()
    task.net[2].eval()
    before = task.modules_modes = task.modes()
    assert set(before.values()) == {True, False}

    class Watch(lumen.Callback):
        def on_train_batch_start(self, trainer, task, batch, batch_idx):
            assert task.modes() == before

    trainer = bare_trainer(tmp_path, max_epochs=2, val_check_interval=2, callbacks=[Watch()])
    trainer.fit(task, loader(), val_dataloaders=loader(8, 8))
    trainer.test(task, loader(8, 8))
    trainer.predict(task, loader(8, 8))
    assert task.while_evaluating == {False}
    assert task.modes() == before


def test_training_is_in_train_mode_between_evaluations(tmp_path):
    """BatchNorm's numbers equal a loop with `model.train()` before epochs and `model.eval()` before validations."""

    def normed():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))

    class Normed(Regression):
        def __init__(self):
            super().__init__(optimizer="SGD")
            self.net = normed()

    task, net = Normed(), normed()
    data = loader(48, shuffle=False)
    bare_trainer(tmp_path, max_epochs=2, val_check_interval=2).fit(task, data, val_dataloaders=loader(8, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for inputs, targets in [*data] * 2:
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()
    state = net.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in task.net.state_dict().items())


class Hooked(Modes):
    """Task that calls a function in one of its hooks, once, and records the modes in training."""

    def __init__(self, hook, act):
        super().__init__()
        self.then = None
        setattr(self, hook, self.once)
        self.act = act

    def once(self):
        act, self.act = self.act, lambda task: None
        act(self)

    def on_train_batch_start(self, batch, batch_idx):
        self.then = self.modes()

    def trained_modes(self, tmp_path, callbacks=()):
        trainer = bare_trainer(
            tmp_path, max_steps=2, val_check_interval=1, num_sanity_val_steps=0, callbacks=list(callbacks)
        )
        trainer.fit(self, loader(16, 8), val_dataloaders=loader(8, 8))
        return self.then


def thaw(task):
    task.unfreeze()


def rest(task):
    task.net[3].eval()
    task.net[3].requires_grad_(False)


def by_hand(task):
    task.frozen[1].training = True


END_HOOKS = ["on_validation_epoch_end", "on_validation_end"]


@pytest.mark.parametrize("hook", END_HOOKS)
@pytest.mark.parametrize(
    ("act", "changed"),
    [
        (thaw, {"frozen", "frozen.0", "frozen.1"}),
        (lambda task: task.frozen[1].train(), {"frozen.1"}),
        (by_hand, {"frozen.1"}),
        (rest, {"net.3"}),
        (lambda task: task.freeze().net[0].requires_grad_(True), {"", "net", "net.0", "net.1", "net.2", "net.3"}),
        (lambda task: task.eval() and task.train(), {"frozen", "frozen.0", "frozen.1"}),
    ],
)
def test_modes_set_in_evaluation_end_hooks_persist(tmp_path, hook, act, changed):
    task = Hooked(hook, act)
    before = task.modes()
    then = task.trained_modes(tmp_path)
    assert {name for name, mode in then.items() if mode != before[name]} == changed
    assert task.while_evaluating == {False}


def test_callbacks_choose_modes_too_and_in_a_test(tmp_path):
    class Thawing(lumen.Callback):
        def on_validation_end(self, trainer, task):
            task.frozen.requires_grad_(True).train()

        def on_test_epoch_end(self, trainer, task):
            task.net[2].eval()

        def on_test_end(self, trainer, task):
            task.frozen.eval()

    task = Hooked("on_fit_start", lambda task: None)
    assert set(task.trained_modes(tmp_path, [Thawing()]).values()) == {True}
    bare_trainer(tmp_path, callbacks=[Thawing()]).test(task, loader(8, 8))
    resting = {name for name, mode in task.modes().items() if not mode}
    assert resting == {"net.2", "frozen", "frozen.0", "frozen.1"}


@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_epoch_start"])
def test_modes_set_for_an_evaluation_end_with_it(tmp_path, hook):
    """Dropout may be active in an evaluation; a step may set modes too."""
    task = Hooked(hook, lambda task: task.train())
    before = task.modes()
    assert task.trained_modes(tmp_path) == before
    assert task.while_evaluating == {True, False}  # of the validation with that mode, and of the next one


def test_a_mode_chosen_before_an_error_stays(tmp_path):
    def fail(task):
        task.frozen.train()
        raise ZeroDivisionError

    task = Hooked("on_validation_end", fail)
    before = task.modes()
    with pytest.raises(ZeroDivisionError):
        task.trained_modes(tmp_path)
    assert task.modes() == {name: mode or name.startswith("frozen") for name, mode in before.items()}
    assert "choosing" not in nn.Module.train.__qualname__


def test_modules_left_in_eval_mode_warn(tmp_path, caplog):
    task = Hooked("on_validation_epoch_end", lambda task: task.net[0].eval())
    bare = {"max_steps": 2, "val_check_interval": 1, "num_sanity_val_steps": 0, "log_level": "WARNING"}
    bare_trainer(tmp_path, **bare).fit(task, loader(16, 8), val_dataloaders=loader(8, 8))
    (record,) = [record for record in caplog.records if "modules stay in eval mode" in record.message]
    assert "stay in eval mode, in training too: net.0. A hook" in record.message
    caplog.clear()
    task = Hooked("on_validation_epoch_end", rest)
    bare_trainer(tmp_path, **bare).fit(task, loader(16, 8), val_dataloaders=loader(8, 8))
    assert "modules stay in eval mode" not in caplog.text


def test_modes_come_back_after_an_error_too(tmp_path):
    class Failing(Modes):
        def test_step(self, batch):
            raise ZeroDivisionError

    task = Failing()
    before = task.modes()
    with pytest.raises(ZeroDivisionError):
        bare_trainer(tmp_path).test(task, loader())
    assert task.modes() == before


def test_validation_disturbs_neither_gradients_nor_generators(tmp_path):
    class Watch(lumen.Callback):
        def state(self, task):
            gradients = [parameter.grad.clone() for parameter in task.parameters()]
            return [
                *gradients,
                torch.get_rng_state(),
                torch.tensor(np.random.get_state()[1].astype(np.int64)),
                random.getstate(),
            ]

        def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
            self.before = self.state(task)

        def on_step_end(self, trainer, task):
            for before, after in zip(self.before, self.state(task), strict=True):
                assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after

    when = When()
    trainer = bare_trainer(tmp_path, max_steps=6, val_check_interval=1, callbacks=[Watch(), when])
    trainer.fit(Measured(dropout=0.5), loader(100, 8), val_dataloaders=loader(20, 8))
    assert len(when.starts) == 6


def test_what_an_evaluation_draws_belongs_to_its_batch(tmp_path):
    """The draws repeat after any earlier draws, with or without workers, for the first batches or for all."""

    class Noisy(Regression):
        def predict_step(self, batch):
            return [torch.rand(()).item(), np.random.rand(), random.random(), batch[0].sum().item()]

    results = []
    for workers, limit in [(0, None), (2, None), (0, 2)]:
        torch.rand(workers + 1)
        trainer = bare_trainer(tmp_path, limit_predict_batches=limit)
        results.append(trainer.predict(Noisy(), DataLoader(Drawing(20), 5, num_workers=workers)))
    assert results[0] == results[1]
    assert results[0][:2] == results[2]
    assert len({str(batch) for batch in results[0]}) == 4


class Averaged(Regression):
    """Task that is evaluated with averages of its parameters, swapped in by one hook and out by another."""

    def __init__(self, ins="on_validation_start", outs="on_validation_end", *, swaps=True):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.cache, self.average, self.swaps = None, None, swaps
        setattr(self, ins, self.swap_in)
        setattr(self, outs, self.swap_out)

    def forward(self, inputs):
        if self.cache is None or len(self.cache) < len(inputs):
            self.cache = torch.ones(len(inputs), 1) * self.scale
        return super().forward(inputs) * self.cache[: len(inputs)] * self.scale

    def swap_in(self):
        if self.average is None:
            self.average = [parameter.detach().clone() for parameter in self.parameters()]
        if self.swaps:
            self.own = [parameter.data for parameter in self.parameters()]
            for parameter, average in zip(self.parameters(), self.average, strict=True):
                parameter.data = average.lerp(parameter.data, 0.5)
            self.scale = self.scale * 1.0

    def swap_out(self):
        if self.swaps:
            for parameter, own in zip(self.parameters(), self.own, strict=True):
                parameter.data = own.clone()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for parameter, average in zip(self.parameters(), self.average or (), strict=False):
            average.lerp_(parameter.data, 0.1)


OUTER, INNER = ("on_validation_start", "on_validation_end"), ("on_validation_epoch_start", "on_validation_epoch_end")


@pytest.mark.parametrize("hooks", [OUTER, INNER, (INNER[0], OUTER[1]), (OUTER[0], INNER[1])])
def test_tensors_set_in_evaluation_can_be_trained(tmp_path, hooks):
    """Hooks set the parameters and steps set the buffers."""

    def trained(**options):
        task = Averaged(*hooks, **options)
        if hooks[0] in INNER:
            task.average = [parameter.detach().clone() for parameter in task.parameters()]
        bare_trainer(tmp_path, max_epochs=2).fit(task, loader(), val_dataloaders=loader())
        assert not any(tensor.is_inference() for tensor in (*task.state_dict().values(), task.cache))
        return [parameter.detach() for parameter in task.parameters()]

    for swapped, plain in zip(trained(), trained(swaps=False), strict=True):
        assert torch.equal(swapped, plain)


@pytest.mark.parametrize("inference_mode", [True, False])
def test_evaluation_runs_without_gradients(tmp_path, inference_mode):
    class Look(Regression):
        seen = ()

        def validation_step(self, batch):
            self.seen = (*self.seen, (torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    task = Look()
    bare_trainer(tmp_path, inference_mode=inference_mode).validate(task, loader(8, 8))
    assert task.seen == ((False, inference_mode),)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("samples", "batch_size", "workers"), [(50, 8, 0), (50, 8, 2), (7, 3, 0), (5, 100, 0), (9, 8, 0)]
)
def test_mean_covers_all_samples_whatever_the_batches(tmp_path, samples, batch_size, workers):
    task = Regression(dtype=torch.float64)
    data = loader(samples, batch_size, dtype=torch.float64, num_workers=workers)
    (values,) = bare_trainer(tmp_path).validate(task, data)
    assert values.keys() == {"val_loss"}
    assert values["val_loss"] == pytest.approx(full_loss(task, samples), rel=1e-12)


def test_each_stage_returns_its_own_values(tmp_path):
    task = Regression(dtype=torch.float64)
    trainer = bare_trainer(tmp_path)
    for stage, name in ((trainer.validate, "val_loss"), (trainer.test, "test_loss")):
        (values,) = stage(task, loader(50, 8, dtype=torch.float64))
        assert values == {name: pytest.approx(full_loss(task, 50), rel=1e-12)}
        assert {key: value.item() for key, value in trainer.callback_metrics.items()} == values


class Several(Regression):
    """Task that logs in every way, in a step with a loader index."""

    def validation_step(self, batch, batch_idx, dataloader_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log("both", loss, on_step=True, on_epoch=True)
        self.log("joint", loss, add_dataloader_idx=False)
        self.log("number", float(dataloader_idx))

    def on_validation_epoch_end(self):
        self.log("at_the_end", 3.0)


def test_several_loaders_have_a_value_each(tmp_path):
    task = Several(dtype=torch.float64)
    loaders = [loader(samples, 8, dtype=torch.float64) for samples in (20, 50)]
    trainer = bare_trainer(tmp_path)
    values = trainer.validate(task, loaders)
    losses = [full_loss(task, 20), full_loss(task, 50)]
    joint = (20 * losses[0] + 50 * losses[1]) / 70
    for number, (found, loss) in enumerate(zip(values, losses, strict=True)):
        suffix = f"/dataloader_idx_{number}"
        assert found == {
            f"val_loss{suffix}": pytest.approx(loss, rel=1e-12),
            f"both_epoch{suffix}": pytest.approx(loss, rel=1e-12),
            f"number{suffix}": number,
            "joint": pytest.approx(joint, rel=1e-12),
            "at_the_end": 3.0,
        }


def test_predict_calls_forward_by_default(tmp_path):
    class Plain(lumen.TaskModule):
        def forward(self, inputs):
            return inputs * 2

    inputs = torch.arange(6.0)
    for data in (DataLoader(inputs, 4), DataLoader(TensorDataset(inputs, -inputs), 4)):
        predictions = bare_trainer(tmp_path).predict(Plain(), data)
        assert torch.equal(torch.cat(predictions), inputs * 2)


@pytest.mark.parametrize(("limit", "batches"), [(None, 4), (2, 2), (0.5, 2), (9, 4), (0, 0)])
def test_limits_hold_for_every_evaluation(tmp_path, limit, batches):
    class Counted(Regression):
        counts = (0, 0, 0)

        def count(self, place):
            self.counts = tuple(count + (number == place) for number, count in enumerate(self.counts))

        def validation_step(self, batch):
            self.count(0)

        def test_step(self, batch):
            self.count(1)

        def predict_step(self, batch):
            self.count(2)

    task = Counted()
    trainer = bare_trainer(tmp_path, limit_val_batches=limit, limit_test_batches=limit, limit_predict_batches=limit)
    trainer.validate(task, loader(32, 8))
    trainer.test(task, loader(32, 8))
    assert len(trainer.predict(task, loader(32, 8))) == batches
    assert task.counts == (batches,) * 3


def test_an_evaluation_that_cannot_run_is_refused(tmp_path):
    trainer = bare_trainer(tmp_path)
    with pytest.raises(ConfigError, match="Plain has no test_step"):
        trainer.test(type("Plain", (lumen.TaskModule,), {})(), loader())
    with pytest.raises(DataError, match=r"no data to predict.*predict_dataloader"):
        trainer.predict(Regression())
    with pytest.raises(ConfigError, match=r"limit_test_batches: 0.1 of 5 batches"):
        bare_trainer(tmp_path, limit_test_batches=0.1).test(Regression(), loader(40, 8))


def test_validation_data_that_nobody_looks_at_is_reported(tmp_path, caplog):
    class Blind(Regression):
        validation_step = lumen.TaskModule.validation_step

    trainer = bare_trainer(tmp_path, max_steps=1, log_level="WARNING")
    trainer.fit(Blind(), loader(), val_dataloaders=loader())
    assert "Blind has no validation_step: the validation data is not used" in caplog.text


def test_an_empty_evaluation_gives_nothing(tmp_path):
    empty = DataLoader(TensorDataset(torch.empty(0, FEATURES), torch.empty(0, 1)), 8)
    trainer = bare_trainer(tmp_path)
    assert trainer.validate(Regression(), empty) == [{}]
    assert trainer.predict(Regression(), empty) == trainer.predict(Regression(), []) == []


def test_evaluation_keeps_the_counts_of_fit(tmp_path):
    seen = []

    class Seeing(Regression):
        def validation_step(self, batch):
            seen.append((self.global_step, self.trainer.global_step, self.current_epoch))
            super().validation_step(batch)

    trainer, task = quiet_trainer(tmp_path, max_epochs=2, num_sanity_val_steps=0), Seeing()
    trainer.validate(task, loader())
    assert set(seen) == {(0, 0, 0)}
    assert trainer.global_step == 0
    trainer.fit(task, loader())
    steps = trainer.global_step
    assert (steps > 0, trainer.current_epoch) == (True, 2)
    for evaluation in (trainer.validate, trainer.test, trainer.predict):
        seen.clear()
        evaluation(task, loader())
        assert (trainer.global_step, trainer.current_epoch, task.global_step) == (steps, 2, steps)
        assert set(seen) <= {(steps, steps, 2)}
    trainer.fit(Seeing(), loader(), ckpt_path=None)
    assert trainer.global_step == steps
