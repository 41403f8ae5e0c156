"""Steps whose size depends on the epoch: `accumulate_grad_batches={0: 1, 4: 8}`."""

from pathlib import Path

import pytest
import torch
import yaml
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, WeightedRandomSampler

import lumen
from lumen.cli import main
from lumen.errors import ConfigError
from lumen.run.plan import EpochLengths
from tests.helpers.accumulation import (
    BATCH,
    SAMPLES,
    SCHEDULE,
    STEPS,
    RecordsWindows,
    loader,
    make_dataset,
    read_state,
    train_by_hand,
    train_with_schedule,
)
from tests.helpers.cli_tasks import Line
from tests.helpers.tasks import Regression, bare_trainer, loader as regression_loader, weights

# ---------------------------------------------------------------------- micro-batches of each step


class Stream(IterableDataset):
    """Stream with a position, like a resumable stream."""

    def __init__(self, samples):
        self.samples, self.read = samples, 0

    def __iter__(self):
        while self.read < self.samples:
            self.read += 1
            yield make_dataset(self.samples)[self.read - 1]
        self.read = 0

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.read = state["read"]


class Pair(RecordsWindows):
    """Task that trains on one of two loaders that are read together."""

    def training_step(self, batch):
        return super().training_step(batch[0])


def sampled(samples=SAMPLES):
    return DataLoader(make_dataset(samples), BATCH, sampler=WeightedRandomSampler([1.0] * samples, samples))


def batched(samples=SAMPLES):
    return DataLoader(make_dataset(samples), batch_sampler=BatchSampler([*range(samples)], BATCH, drop_last=False))


def streamed(samples=SAMPLES):
    return DataLoader(Stream(samples), BATCH)


LOADERS = {
    "shuffled": loader,
    "in order": lambda: loader(shuffle=False),
    "by a sampler": sampled,
    "by a batch sampler": batched,
    "a stream": streamed,
    "workers": lambda: loader(num_workers=1, persistent_workers=True),
}


def split_into_steps(sizes, number):
    """Split the micro-batches of an epoch into steps of given sizes."""
    return [sizes[first : first + number] for first in range(0, len(sizes), number)]


@pytest.mark.parametrize("kind", LOADERS)
def test_step_size_follows_the_schedule(tmp_path, kind):
    trainer, task = train_with_schedule(tmp_path, LOADERS[kind](), logger=False, enable_checkpointing=False)
    sizes = [BATCH] * 7 + [2]
    assert task.windows() == [split_into_steps(sizes, number) for number in (1, 3, 3, 8, 2)]
    assert [len(steps) for steps in task.windows()] == list(STEPS)
    assert trainer.global_step == sum(STEPS)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"limit_train_batches": 5}, [BATCH] * 5),
        ({"limit_train_batches": 0.5}, [BATCH] * 4),
        ({"overfit_batches": 3}, [BATCH] * 3),
        ({"reload_dataloaders_every_n_epochs": 2}, [BATCH] * 7 + [2]),
    ],
)
def test_of_the_batches_that_are_used(tmp_path, options, sizes):
    trainer, task = train_with_schedule(tmp_path, logger=False, enable_checkpointing=False, **options)
    assert task.windows() == [split_into_steps(sizes, number) for number in (1, 3, 3, 8, 2)]
    assert trainer.global_step == trainer.estimated_stepping_batches


def test_loaders_that_are_read_together(tmp_path):
    task = Pair()
    trainer = bare_trainer(tmp_path, max_epochs=3, accumulate_grad_batches={1: 3, 2: 2})
    trainer.fit(task, [loader(drop_last=True), loader(12)])
    assert task.windows() == [split_into_steps([BATCH] * 7, number) for number in (1, 3, 2)]


def test_scheduler_callback_equals_trainer_argument(tmp_path):
    """The callback may be added later, and the same trainer may run again."""
    runs = [train_with_schedule(tmp_path, logger=False, enable_checkpointing=False)]
    callback = lumen.GradientAccumulationScheduler(scheduling=SCHEDULE)
    runs.append(
        train_with_schedule(
            tmp_path, logger=False, enable_checkpointing=False, accumulate_grad_batches=1, callbacks=callback
        )
    )
    late = bare_trainer(tmp_path, max_epochs=len(STEPS))
    late.callbacks.append(lumen.GradientAccumulationScheduler({1: 3, 3: 8, 4: 2}))
    for _ in range(2):
        task = RecordsWindows()
        late.fit(task, loader())
        runs.append((late, task))
    for trainer, task in runs[1:]:
        assert task.seen == runs[0][1].seen
        assert read_state(trainer, task) == read_state(*runs[0])


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("kind", ["shuffled", "by a sampler", "a stream"])
def test_it_is_the_loop_by_hand(tmp_path, kind):
    _, task = train_with_schedule(tmp_path, LOADERS[kind](), logger=False, enable_checkpointing=False)
    assert torch.equal(weights(task.net), weights(train_by_hand(task)))


@pytest.mark.parametrize("kind", ["shuffled", "by a sampler", "by a batch sampler", "a stream"])
def test_resumed_run_equals_uninterrupted_run(tmp_path, kind):
    """The run resumes within an epoch, and at the end of one whose next epoch has steps of another size."""

    def part(name, **options):
        return read_state(
            *train_with_schedule(tmp_path / name, LOADERS[kind](18), dropout=0.3, resume="auto", **options)
        )

    whole = part("whole")
    for step in (3, 5, 6, 9, 11) if kind != "shuffled" else range(1, 13):  # of 5, 2, 2, 1 and 3 steps in an epoch
        part("parts", max_steps=step)
    assert part("parts") == whole
    assert whole[-2:] == [13, 5]


def test_stop_at_epoch_end_reports_no_changed_settings(tmp_path, caplog):
    """The steps of the next epoch have another size."""
    for epochs in range(1, len(STEPS) + 1):
        train_with_schedule(tmp_path, max_epochs=epochs, resume="auto", log_level="WARNING")
    assert [line for line in caplog.messages if "settings" in line] == []


# ---------------------------------------------------------------------- resumed with another schedule


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"accumulate_grad_batches": {1: 2}},
            "accumulate_grad_batches was '{0: 1, 1: 3, 3: 8, 4: 2}', is '{0: 1, 1: 2}'; global_batch_size "
            "was '{0: 4, 1: 12, 3: 32, 4: 8}', is '{0: 4, 1: 8}'",
        ),
        ({"accumulate_grad_batches": SCHEDULE | {9: 1}}, "; global_batch_size was '{0: 4, 1: 12, 3: 32, 4: 8}', "),
        (
            {"accumulate_grad_batches": 1},
            "accumulate_grad_batches was '{0: 1, 1: 3, 3: 8, 4: 2}', is 1; global_batch_size "
            "was '{0: 4, 1: 12, 3: 32, 4: 8}', is 4",
        ),
        ({"accumulate_grad_batches": 1, "global_batch_size": 8}, "was '{0: 4, 1: 12, 3: 32, 4: 8}', is 8"),
    ],
)
@pytest.mark.parametrize("step", [4, 8, 10])
def test_changed_schedule_warns_with_both_values(tmp_path, caplog, step, options, said):
    train_with_schedule(tmp_path, max_steps=step)
    caplog.clear()
    options = {"resume": "auto", "log_level": "WARNING"} | options
    _, task = train_with_schedule(tmp_path, **options)
    (notice,) = [line for line in caplog.messages if "settings" in line]
    assert said in notice
    if options["accumulate_grad_batches"] == {1: 2}:
        assert task.windows()[-1] == split_into_steps([BATCH] * 7 + [2], 2)


def test_equivalent_schedule_causes_no_warning(tmp_path, caplog):
    train_with_schedule(tmp_path, max_steps=9)
    said = {"accumulate_grad_batches": {4: 2, 0: 1, 1: 3, 2: 3, 3: 8}}
    train_with_schedule(tmp_path, max_steps=12, resume="auto", log_level="WARNING", **said)
    callback = {"accumulate_grad_batches": 1, "callbacks": lumen.GradientAccumulationScheduler(SCHEDULE)}
    train_with_schedule(tmp_path, resume="auto", log_level="WARNING", **callback)
    assert [line for line in caplog.messages if "settings" in line] == []


# ---------------------------------------------------------------------- length of a run


@pytest.mark.parametrize(
    ("options", "steps"),
    [({}, 19), ({"max_epochs": 2}, 11), ({"max_epochs": 9}, 35), ({"max_steps": 12}, 12), ({"max_steps": 99}, 19)],
)
def test_estimated_stepping_batches_follow_the_schedule(tmp_path, options, steps):
    class Planned(Regression):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.planned = self.trainer.estimated_stepping_batches
            return [optimizer], [{"scheduler": OneCycleLR(optimizer, 0.1, self.planned), "interval": "step"}]

        def on_train_epoch_start(self):
            of_epochs.append(self.trainer.steps_per_epoch)

    of_epochs, task = [], Planned()
    trainer = bare_trainer(tmp_path, **{"max_epochs": 5, "accumulate_grad_batches": SCHEDULE} | options)
    trainer.fit(task, regression_loader(SAMPLES, BATCH))
    assert task.planned == trainer.global_step == trainer.estimated_stepping_batches == steps
    assert of_epochs == [8, 3, 3, 1, 4, 4, 4, 4, 4][: len(of_epochs)]


def test_steps_and_epochs_convert_both_ways():
    lengths = EpochLengths({0: 8, 1: 3, 3: 1, 4: 4})
    begins = [0, 8, 11, 14, 15, 19, 23]
    assert [lengths.count_steps_before(epoch) for epoch in range(7)] == begins
    assert [lengths.get_length(epoch) for epoch in range(6)] == [8, 3, 3, 1, 4, 4]
    for steps in range(23):
        assert lengths.count_complete_epochs(steps) == sum(begin <= steps for begin in begins) - 1


@pytest.mark.parametrize(
    ("schedule", "interval", "message"),
    [
        (lambda o: OneCycleLR(o, 0.1, total_steps=18), "step", "Set its total_steps to 19"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=19), "step", None),
        (lambda o: OneCycleLR(o, 0.1, total_steps=4), "epoch", "once every epoch, 5 times in all"),
        (lambda o: OneCycleLR(o, 0.1, total_steps=5), "epoch", None),
        (lambda o: MultiStepLR(o, [19]), "step", None),
        (
            lambda o: StepLR(o, 40),
            "step",
            "StepLR changes first after 40 moves, but moves once every step, 19",
        ),
    ],
)
def test_schedules_are_compared_with_the_steps_there_are(tmp_path, caplog, schedule, interval, message):
    class Planned(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return [optimizer], [{"scheduler": schedule(optimizer), "interval": interval}]

    trainer = bare_trainer(tmp_path, max_epochs=5, accumulate_grad_batches=SCHEDULE, log_level="WARNING")
    if message is not None and "changes first" not in message:
        with pytest.raises(ConfigError, match=message):
            trainer.fit(Planned(), regression_loader(SAMPLES, BATCH))
        return
    trainer.fit(Planned(), regression_loader(SAMPLES, BATCH))
    assert [message in line for line in caplog.messages if "lr_scheduler" in line] == [True] * (message is not None)


@pytest.mark.parametrize(
    ("options", "batches"),
    [({}, [8, 8, 8]), ({"val_check_interval": 0.5}, [4, 8, 6, 8, 8]), ({"val_check_interval": 5}, [5, 6])],
)
def test_validations_follow_fraction_or_step_interval(tmp_path, options, batches):
    """The steps have 1, 3 and 8 micro-batches: one step of 8 is an epoch, and both halves of it end at once."""

    class Validated(RecordsWindows):
        def on_validation_start(self):
            seen.append(self.trainer.progress.batches)

        def validation_step(self, batch):
            self.log("val_loss", nn_loss(self, batch))

    seen = []
    trainer = bare_trainer(
        tmp_path, max_epochs=3, accumulate_grad_batches={1: 3, 2: 8}, num_sanity_val_steps=0, **options
    )
    trainer.fit(Validated(), loader(), loader())
    assert seen == batches


def nn_loss(task, batch):
    return torch.nn.functional.mse_loss(task(batch[0]), batch[1])


# ---------------------------------------------------------------------- refused schedules

SCHEDULER = lumen.GradientAccumulationScheduler


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({-1: 2}, "an epoch is an int of at least 0, found -1"),
        ({"4": 2}, "an epoch is an int of at least 0, found '4'"),
        ({4.0: 2}, "an epoch is an int of at least 0, found 4.0"),
        ({0: 2, 4: 0}, "must be at least 1, found 0"),
        ({4: 1.5}, r"expected .*a dict of an int, found \{4: 1.5\}"),
        ({}, r"the dictionary is empty. Write first epochs and numbers of micro-batches: \{0: 1, 4: 8\}"),
        ([1, 2], r"expected .*a dict of an int, found \[1, 2\]"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(given, message):
    with pytest.raises(ConfigError, match=f"accumulate_grad_batches: {message}"):
        lumen.Trainer(accumulate_grad_batches=given)
    with pytest.raises(ConfigError, match=f"^GradientAccumulationScheduler: scheduling: {message}"):
        SCHEDULER(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate_grad_batches": {0: 1}, "global_batch_size": 8}, "both set the size of a step. Set only one"),
        (
            {"callbacks": SCHEDULER({4: 8}), "global_batch_size": 8},
            r"Scheduler\(\{4: 8\}\) both set the size of a step",
        ),
        ({"callbacks": SCHEDULER({0: 2}), "accumulate_grad_batches": 2}, "both set the size of a step"),
        ({"callbacks": SCHEDULER({4: 8}), "accumulate_grad_batches": 2}, r"2 and GradientAccum.*\(\{4: 8\}\) both set"),
        ({"callbacks": SCHEDULER({4: 8}), "accumulate_grad_batches": {4: 9}}, r"\{0: 1, 4: 9\} and Gradient"),
        ({"callbacks": [SCHEDULER({4: 8}), SCHEDULER({4: 8})]}, "there are two GradientAccumulationSchedulers"),
    ],
)
def test_conflicting_step_sizes_are_rejected(options, message):
    with pytest.raises(ConfigError, match=message):
        lumen.Trainer(max_epochs=1, **options)


def test_manual_optimization_rejects_accumulation_schedule(tmp_path):
    class ByHand(Regression):
        automatic_optimization = False

    for options in ({"accumulate_grad_batches": {4: 8}}, {"callbacks": SCHEDULER({4: 8})}):
        with pytest.raises(
            ConfigError, match=r"accumulate_grad_batches: \{0: 1, 4: 8\}, but ByHand has automatic_optimization"
        ):
            bare_trainer(tmp_path, max_epochs=1, **options).fit(ByHand(), regression_loader())


# ---------------------------------------------------------------------- the command line


class Counted(Line):
    """Task that records the epoch of each step."""

    steps: list

    def on_train_start(self):
        Counted.steps = []

    def on_before_optimizer_step(self, optimizer):
        Counted.steps.append(self.current_epoch)


CONFIG = f"""
model: {{class_path: {__name__}.Counted, init_args: {{width: 2}}}}
data: {{class_path: tests.helpers.cli_tasks.Points, init_args: {{width: 2, samples: 16}}}}
trainer:
  max_epochs: 3
  enable_progress_bar: false
"""
OF_TRAINER = "  accumulate_grad_batches: {1: 2, 2: 4}\n"
OF_CALLBACK = """  callbacks:
    growth: {class_path: GradientAccumulationScheduler, init_args: {scheduling: {1: 2, 2: 4}}}
"""


@pytest.mark.parametrize(
    ("text", "words", "steps"),
    [
        (OF_TRAINER, [], [4, 2, 1]),
        (OF_CALLBACK, [], [4, 2, 1]),
        ("", ["--trainer.accumulate_grad_batches={1: 2, 2: 4}"], [4, 2, 1]),
        ("", ['--trainer.accumulate_grad_batches={"1": 2, "2": 4}'], [4, 2, 1]),  # keys in JSON's form
        (OF_TRAINER, ["--trainer.accumulate_grad_batches.2=1"], [4, 2, 4]),
        (OF_TRAINER, ["--trainer.accumulate_grad_batches=2"], [2, 2, 2]),
        (OF_CALLBACK, ["--trainer.callbacks.growth.scheduling={2: 1}"], [4, 2, 4]),
    ],
)
def test_config_and_command_line_accept_a_schedule(tmp_path, monkeypatch, text, words, steps):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG + text)
    assert main(["fit", "--config", "run.yaml", *words]) == 0
    assert [Counted.steps.count(epoch) for epoch in range(3)] == steps
    saved = Path("runs/run/config.yaml")
    assert main(["fit", "--config", str(saved), "--trainer.name=again"]) == 0
    assert [Counted.steps.count(epoch) for epoch in range(3)] == steps
    assert isinstance(yaml.safe_load(saved.read_text()), dict)
