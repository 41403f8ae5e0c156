"""Callbacks of a task: they join the trainer's callbacks, replace callbacks of their class, and act like others."""

import logging

import pytest
import torch

import lumen
from lumen.errors import ConfigError
from tests.helpers.tasks import Regression, bare_trainer, loader, quiet_trainer, weights

F64 = torch.float64


def make_task_class(brings):
    """Return a class of tasks that configure the callbacks which `brings` makes."""
    return type("Bringing", (Regression,), {"configure_callbacks": lambda self: brings()})


def make_task(brings, **options):
    return make_task_class(brings)(**options)


class Counting(lumen.Callback):
    """Callback that lowers the learning rate by its number of steps, which is its state."""

    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.steps += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01 / (1 + self.steps)


class More(Counting):
    pass


def list_callback_types(trainer):
    return [type(each).__name__ for each in trainer.callbacks]


def test_configured_callbacks_join_before_savers_in_every_stage(tmp_path):
    for stage in ("fit", "validate", "test", "predict"):
        trainer = quiet_trainer(tmp_path, max_steps=1, callbacks=[lumen.Timer()])
        before = list_callback_types(trainer)
        getattr(trainer, stage)(make_task(Counting), loader())
        assert list_callback_types(trainer) == [*before[:-1], "Counting", "ModelCheckpoint"]


def test_configured_callback_replaces_its_class_and_bases(tmp_path, caplog):
    timer = lumen.Timer()
    mine = [Counting(), timer, lumen.Callback(), More(), Counting()]
    trainer = bare_trainer(tmp_path, max_steps=1, callbacks=mine, log_level="INFO")
    with caplog.at_level(logging.INFO, "lumen"):
        trainer.fit(make_task(lambda: [More()]), loader())
    assert list_callback_types(trainer) == ["Timer", "Callback", "More"]
    assert trainer.callbacks[0] is timer
    assert trainer.callbacks[2].steps == 1
    assert "Bringing.configure_callbacks replace: Counting, More, Counting" in caplog.text


def test_configured_base_keeps_derived_callback_of_trainer(tmp_path):
    trainer = bare_trainer(tmp_path, max_steps=1, callbacks=[More()])
    trainer.fit(make_task(lambda: [Counting()]), loader())
    assert list_callback_types(trainer) == ["More", "Counting"]


def test_a_second_fit_has_each_once_and_anew(tmp_path):
    trainer, task = bare_trainer(tmp_path, max_steps=3), make_task(lambda: (Counting(), lumen.Timer()))
    trainer.fit(task, loader())
    first = trainer.callbacks
    assert first[0].steps == 3
    trainer.fit(task, loader())
    assert list_callback_types(trainer) == ["Counting", "Timer"]
    assert not set(map(id, first)) & set(map(id, trainer.callbacks))
    assert trainer.callbacks[0].steps == 3


def test_the_same_one_given_twice_acts_once(tmp_path):
    one = Counting()
    trainer, task = bare_trainer(tmp_path, max_steps=3, callbacks=[one]), make_task(lambda: one)
    trainer.fit(task, loader())
    assert trainer.callbacks == [one]
    assert one.steps == 3


def test_they_replace_the_defaults(tmp_path):
    brought = [lumen.ModelSummary(max_depth=2), lumen.ProgressBar(), lumen.ModelCheckpoint(dirpath=tmp_path / "own")]
    trainer = lumen.Trainer(max_steps=1, default_root_dir=tmp_path, callbacks=[lumen.ModelCheckpoint(monitor="loss")])
    trainer.fit(make_task(lambda: brought), loader())
    assert [each for each in trainer.callbacks if isinstance(each, tuple(map(type, brought)))] == brought
    assert trainer.checkpoint_callback is brought[2]
    assert [each.name for each in (tmp_path / "own").glob("step-*")] == ["step-00000001"]
    assert not [*(trainer.run_directory / "checkpoints").glob("step-*")]


@pytest.mark.parametrize("stop", [2, 7])
def test_configured_callbacks_resume_exactly(tmp_path, stop):
    def bring():
        return [Counting(), lumen.EMA(decay=0.5), lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1)]

    def run(name, steps):
        task = make_task(bring, dtype=F64)
        trainer = quiet_trainer(tmp_path / name, max_steps=steps, resume="auto")
        trainer.fit(task, loader(dtype=F64), loader(dtype=F64))
        last = trainer.checkpoint_callback.last_model_path
        trained = make_task_class(bring).load_from_checkpoint(last, average="parameters")
        counting = next(each for each in trainer.callbacks if isinstance(each, Counting))
        return weights(task), weights(trained), list_callback_types(trainer), counting.steps

    straight = run("straight", 10)
    run("halves", stop)
    resumed = run("halves", 10)
    assert torch.equal(resumed[0], straight[0])
    assert torch.equal(resumed[1], straight[1])
    assert not torch.equal(straight[0], straight[1])
    assert resumed[2:] == straight[2:]
    assert straight[3] == 10


def test_one_that_stops_stops_the_run(tmp_path):
    trainer = bare_trainer(tmp_path, max_epochs=5)
    trainer.fit(make_task(lambda: lumen.EarlyStopping("val_loss", patience=1, min_delta=9.0)), loader(), loader())
    assert trainer.current_epoch == 2
    assert trainer.early_stopping_callback.stopped_epoch == 1


def test_accumulation_scheduler_of_task_replaces_that_of_trainer(tmp_path):
    def sizes(*given, twice=False):
        trainer = bare_trainer(tmp_path, max_epochs=1, callbacks=[*given])
        steps = []
        for micro_batches in (2, 3) if twice else (2,):
            brings = lambda: lumen.GradientAccumulationScheduler({0: micro_batches})  # noqa: B023, E731
            trainer.fit(make_task(brings), loader(48))
            steps.append(trainer.global_step)
        return steps

    assert sizes() == [3]
    assert sizes(lumen.GradientAccumulationScheduler({0: 6})) == [3]
    assert sizes(twice=True) == [3, 2]
    with pytest.raises(ConfigError, match="both set the size of a step"):
        bare_trainer(tmp_path, max_epochs=1, accumulate_grad_batches=6).fit(
            make_task(lambda: lumen.GradientAccumulationScheduler({0: 2})), loader()
        )


def test_evaluation_after_fit_knows_the_best_checkpoint(tmp_path):
    trainer = quiet_trainer(tmp_path, max_epochs=2)
    task = make_task(lambda: [Counting(), lumen.ModelCheckpoint(monitor="val_loss")])
    trainer.fit(task, loader(), loader())
    best = trainer.checkpoint_callback.best_model_path
    assert best
    for _ in range(2):
        trainer.test(task, loader(), ckpt_path="best")
        assert trainer.checkpoint_callback.best_model_path == best
    assert list_callback_types(trainer).count("Counting") == 1


def test_roll_back_keeps_configured_callbacks(tmp_path):
    made = []

    class Back(lumen.Callback):
        def __init__(self):
            made.append(self)
            self.asked = 0

        def on_before_optimizer_step(self, trainer, task, optimizer):
            if trainer.global_step == 3 and not self.asked:
                self.asked += 1
                trainer.roll_back(before=0, after=0)

    saver = lumen.ModelCheckpoint(every_n_train_steps=1, keep_last=-1)
    trainer = quiet_trainer(tmp_path, max_steps=5, callbacks=[saver])
    trainer.fit(make_task(lambda: Back()), loader())
    assert len(made) == 1
    assert made[0].asked == 1
    assert trainer.global_step == 5


def test_a_search_trains_without_them(tmp_path):
    made = []
    trainer = bare_trainer(tmp_path, max_steps=4)
    task = make_task(lambda: made.append(Counting()) or made[-1])
    lumen.Tuner(trainer).lr_find(task, loader(), num_training=40, min_lr=1e-4, early_stop_threshold=None)
    assert made == []


def test_the_task_knows_its_trainer_and_its_hyperparameters(tmp_path):
    seen = []

    class Looking(Regression):
        def configure_callbacks(self):
            seen.append((self.trainer, self.trainer.max_steps, self.hparams.lr))

    trainer, task = bare_trainer(tmp_path, max_steps=1), Looking()
    for _ in range(2):
        trainer.fit(task, loader())
    assert seen == [(trainer, 1, 0.01)] * 2


def test_savers_have_no_place_where_nothing_is_saved(tmp_path):
    task = make_task(lambda: [lumen.ModelCheckpoint(), Counting()])
    with pytest.raises(ConfigError, match=r"is False, but Bringing.configure_callbacks returned a ModelCheckpoint"):
        quiet_trainer(tmp_path, max_steps=1, enable_checkpointing=False).fit(task, loader())
    trainer = quiet_trainer(tmp_path, enable_checkpointing=False)
    trainer.test(task, loader())
    assert list_callback_types(trainer)[-1] == "Counting"
    assert trainer.checkpoint_callback is None
    trainer = quiet_trainer(tmp_path, max_steps=1, fast_dev_run=True)
    trainer.fit(task, loader())
    assert trainer.checkpoint_callback is None


def one_twice():
    return [Counting()] * 2


@pytest.mark.parametrize(
    ("brings", "message"),
    [
        (lambda: 3, "Bringing.configure_callbacks: int is not a lumen.Callback."),
        (lambda: [None, "timer"], "Bringing.configure_callbacks: str is not a lumen.Callback."),
        (lambda: Counting, r"the class Counting is not a lumen.Callback. Create an object: Counting\(\.\.\.\)\."),
        (lambda: [[Counting()]], "list is not a lumen.Callback."),
        (one_twice, "Bringing.configure_callbacks: the same Counting object appears twice"),
    ],
)
def test_invalid_configured_callbacks_raise_one_error(tmp_path, brings, message):
    trainer = bare_trainer(tmp_path, max_steps=1)
    with pytest.raises(ConfigError, match=message):
        trainer.fit(make_task(brings), loader())


def test_two_with_one_state_key_are_one_error(tmp_path):
    with pytest.raises(ConfigError, match="the same state_key: Counting"):
        quiet_trainer(tmp_path, max_steps=1).fit(make_task(lambda: [Counting(), Counting()]), loader())


class Property(Regression):
    @property
    def configure_callbacks(self):
        return []


class Generator(Regression):
    def configure_callbacks(self):
        yield Counting()


class Unfit(Regression):
    def configure_callbacks(self, trainer):
        return []


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Property, "is a property"), (Generator, "Write the method without `yield`"), (Unfit, "calls this method with")],
)
def test_uncallable_configure_callbacks_raises_one_error(tmp_path, kind, message):
    with pytest.raises(ConfigError, match=message):
        bare_trainer(tmp_path, max_steps=1).fit(kind(), loader())


def test_their_hooks_are_checked_as_those_of_others(tmp_path):
    class Old(lumen.Callback):
        def on_init_end(self, trainer):
            pass

    with pytest.raises(ConfigError, match="Old defines methods that Lumen does not call for a callback"):
        bare_trainer(tmp_path, max_steps=1).fit(make_task(Old), loader())


def test_nested_run_keeps_callbacks_of_the_trainer(tmp_path):
    class Nested(lumen.Callback):
        def on_train_start(self, trainer, task):
            with pytest.raises(ConfigError, match="this trainer is in a run"):
                trainer.validate(make_task(More), loader())

    trainer = bare_trainer(tmp_path, max_steps=1, callbacks=[Nested()])
    trainer.fit(make_task(Counting), loader())
    assert list_callback_types(trainer) == ["Nested", "Counting"]
