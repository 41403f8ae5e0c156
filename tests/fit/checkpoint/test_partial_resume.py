"""New runs that take parts of another run, and reports of settings that changed in between."""

import itertools
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

import lumen
from lumen.checkpoint import PARTS, Checkpoint, find_checkpoints
from lumen.checkpoint.load.config_diff import find_changed_hyperparameters
from lumen.cli import main
from lumen.errors import CheckpointMismatch, ConfigError
from lumen.optim import Lookahead, Warmup, cosine
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Spy
from tests.helpers.tasks import Regression, loader, quiet_trainer

STEPS = 10  # of the source run, which has 7 in an epoch
COMBINATIONS = [
    set(parts)
    for count in range(1, 6)
    for parts in itertools.combinations(sorted(PARTS), count)
    if "progress" in parts or "data" not in parts
]


class Remembering(Regression):
    """Task with a schedule that records its batches and learning rates, and saves another value."""

    def __init__(self, lr=0.1, configure=None):
        super().__init__(lr)
        self.configure = configure or (lambda task: stepwise(AdamW(task.parameters(), lr), lambda o: StepLR(o, 1, 0.9)))
        self.hparams.pop("configure", None)
        self.batches, self.rates, self.memory = [], [], None

    def training_step(self, batch):
        self.batches.append(batch[0].clone())
        return super().training_step(batch)

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])

    def validation_step(self, batch):
        self.log("val_loss", 1.0)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["memory"] = "of the source"

    def on_load_checkpoint(self, checkpoint):
        self.memory = checkpoint["memory"]

    def configure_optimizers(self):
        return self.configure(self)


def stepwise(optimizer, schedule, interval="step", frequency=1, **options):
    given = {"scheduler": schedule(optimizer), "interval": interval, "frequency": frequency, **options}
    return {"optimizer": optimizer, "lr_scheduler": given}


class Data(lumen.DataModule):
    loaded = None

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return loader(16)

    def state_dict(self):
        return {"shard": 4}

    def load_state_dict(self, state):
        self.loaded = state


class Probe(lumen.Callback):
    """Callback that counts batches and records the state at the start of training."""

    batches = 0

    def on_train_start(self, trainer, task):
        optimizer = trainer.optimizers[0]
        self.weights = {name: tensor.clone() for name, tensor in task.state_dict().items()}
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        moments = {names[id(p)]: entries.get("exp_avg") for p, entries in optimizer.state.items()}
        self.moments = {name: moment.clone() for name, moment in moments.items() if moment is not None}
        self.lr = optimizer.param_groups[0]["lr"]
        self.schedules = [getattr(config.scheduler, "last_epoch", None) for config in trainer.lr_scheduler_configs]
        self.began = (trainer.global_step, trainer.current_epoch, self.batches)
        self.progress = dict(vars(trainer.run.progress))

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        self.batches += 1

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


def train(directory, task=None, data=None, probe=None, **options):
    options = {"max_steps": STEPS, "log_level": "WARNING"} | options
    trainer = quiet_trainer(directory, callbacks=[probe or Probe()], **options)
    trainer.fit(task or Remembering(), data or Data())
    return trainer


@pytest.fixture(scope="module")
def source_run(tmp_path_factory):
    """Run and stop within the second epoch; return its checkpoint, and the batches of a longer, equally seeded run."""
    directory = tmp_path_factory.mktemp("source")
    trainer = train(directory, Remembering(lr=0.1))
    longer = Remembering(lr=0.1)
    train(directory / "longer", longer, max_steps=STEPS + 5)
    (checkpoint,) = find_checkpoints(trainer.run_directory / "checkpoints")[-1:]
    return Checkpoint.open(checkpoint), longer.batches


# ---------------------------------------------------------------------- parts of a resume


@pytest.mark.parametrize("parts", COMBINATIONS, ids=lambda parts: "-".join(sorted(parts)))
def test_every_combination_of_parts_takes_over_exactly_these(tmp_path, source_run, parts):
    checkpoint, batches = source_run
    task, data, probe = Remembering(lr=0.2), Data(), Probe()
    fresh = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    progress = "progress" in parts
    trainer = train(
        tmp_path, task, data, probe, resume=checkpoint.path, resume_parts=sorted(parts),
        max_steps=STEPS + 1 if progress else 1, seed=None if progress else 5,
    )  # fmt: skip
    model = checkpoint.as_mapping("model") if "model" in parts else fresh
    assert all(torch.equal(tensor, model[name]) for name, tensor in probe.weights.items())
    assert task.memory == ("of the source" if "model" in parts else None)

    saved = (
        {name: checkpoint.read_tensor("optimizer", f"{name}.exp_avg") for name in fresh} if "optimizer" in parts else {}
    )
    assert probe.moments.keys() == saved.keys()
    assert all(torch.equal(probe.moments[name], saved[name]) for name in saved)

    configured, at = (0.1, STEPS) if "schedulers" in parts else (0.2, STEPS if progress else 0)
    assert probe.lr == pytest.approx(configured * 0.9**at, rel=1e-12)
    assert probe.schedules == [at]

    assert probe.began == ((STEPS, 1, STEPS) if progress else (0, 0, 0))
    assert (probe.progress["elapsed_s"] > 0.0) == progress
    assert trainer.run.seed == (3 if progress else 5)

    assert data.loaded == ({"shard": 4} if "data" in parts else None)
    assert (probe.progress["samples"], probe.progress["in_epoch"]) == ((24, True) if "data" in parts else (0, False))
    if progress:
        assert torch.equal(task.batches[0], batches[STEPS if "data" in parts else 7])


def test_restarted_epoch_forgets_its_logged_values(tmp_path, source_run):
    checkpoint, _ = source_run
    task = Remembering(lr=0.1)
    parts = ["model", "optimizer", "schedulers", "progress"]
    trainer = train(tmp_path, task, resume=checkpoint.path, resume_parts=parts, max_steps=None, max_epochs=2)
    assert trainer.global_step == STEPS + 7
    assert len(task.batches) == 7


SCHEDULES = {
    "steps": lambda o: stepwise(o, lambda o: ExponentialLR(o, 0.9)),
    "every third step": lambda o: stepwise(o, lambda o: CosineAnnealingLR(o, 5), frequency=3),
    "epochs": lambda o: stepwise(o, lambda o: StepLR(o, 1, 0.5), "epoch"),
    "every second epoch": lambda o: stepwise(o, lambda o: StepLR(o, 1, 0.5), "epoch", 2),
    "one cycle": lambda o: stepwise(o, lambda o: OneCycleLR(o, 0.4, total_steps=40)),
    "one after the other": lambda o: stepwise(
        o, lambda o: SequentialLR(o, [LinearLR(o, total_iters=3), ExponentialLR(o, 0.5)], [12])
    ),
    "function": lambda o: stepwise(o, lambda o: LambdaLR(o, lambda step: 1 / (step + 1))),
    "warm-up": lambda o: stepwise(o, lambda o: cosine(o, 30, warmup=18)),
    "warm-up before epochs": lambda o: stepwise(o, lambda o: StepLR(o, 1, 0.5), "epoch", warmup_steps=9),
    "tokens": lambda o: stepwise(o, lambda o: cosine(o, 3000, warmup=100), "token"),
}
IGNORED = pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR passes it


class Weighted(Remembering):
    """Task that returns weights, which schedules by tokens count."""

    def training_step(self, batch):
        return super().training_step(batch), 10.0 * len(batch[0])


@IGNORED
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_omitted_schedule_is_fast_forwarded(tmp_path, schedule):
    def configure(lr):
        return lambda task: SCHEDULES[schedule](SGD(task.parameters(), lr, momentum=0.9))

    train(tmp_path, Weighted(0.1, configure(0.1)), max_steps=17)
    whole, branch = Weighted(0.2, configure(0.2)), Weighted(0.2, configure(0.2))
    train(tmp_path / "whole", whole, max_steps=25)
    parts = ["model", "optimizer", "progress", "data"]
    train(tmp_path, branch, max_steps=25, resume=tmp_path / "runs/run", resume_parts=parts)
    assert branch.rates == pytest.approx(whole.rates[17:], rel=1e-12)


def test_schedule_too_short_for_progress_raises(tmp_path):
    train(tmp_path, max_steps=17)

    def configure(task):
        return stepwise(SGD(task.parameters(), 0.1), lambda o: OneCycleLR(o, 0.1, total_steps=12))

    with pytest.raises(ConfigError, match="ends before step 17"):
        train(
            tmp_path, Remembering(0.1, configure), max_steps=25, resume=tmp_path / "runs/run",
            resume_parts=["model", "progress"],
        )  # fmt: skip


def test_optimizer_part_restores_counters_but_not_settings(tmp_path):
    def configure(weight_decay, eps):
        return lambda task: Lookahead(AdamW(task.parameters(), task.hparams.lr, weight_decay=weight_decay, eps=eps), 3)

    train(tmp_path, Remembering(0.1, configure(0.5, 1e-8)))
    seen = {}

    class Look(lumen.Callback):
        def on_fit_start(self, trainer, task):
            seen.update(trainer.optimizers[0].param_groups[0], state=len(trainer.optimizers[0].state))

    trainer = quiet_trainer(
        tmp_path, max_steps=1, resume=tmp_path / "runs/run", resume_parts=["model", "optimizer"], callbacks=[Look()]
    )
    trainer.fit(Remembering(0.2, configure(0.25, 1e-6)), Data())
    assert (seen["lookahead_step"], seen["state"]) == (STEPS % 3, 4)
    assert (seen["lr"], seen["weight_decay"], seen["eps"]) == (0.2, 0.25, 1e-6)


def test_a_schedule_goes_on_with_another_optimizer(tmp_path, source_run):
    checkpoint, _ = source_run

    def configure(task):
        return stepwise(SGD(task.parameters(), 0.5, momentum=0.3), lambda o: StepLR(o, 1, 0.9))

    task = Remembering(0.5, configure)
    parts = ["model", "schedulers", "progress", "data"]
    trainer = quiet_trainer(
        tmp_path, max_steps=STEPS + 2, seed=3, resume=checkpoint.path, resume_parts=parts, callbacks=[Probe.__base__()]
    )
    trainer.fit(task, Data())
    assert task.rates == pytest.approx([0.1 * 0.9**STEPS, 0.1 * 0.9 ** (STEPS + 1)])
    assert trainer.optimizers[0].param_groups[0]["momentum"] == 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "auto", "resume_parts": ["model"]}, "but resume is auto"),
        ({"resume": "last", "resume_parts": ["model"]}, "but resume is last"),
        ({"resume_parts": ["model"]}, "but resume is None"),
        (
            {"resume": "best", "resume_parts": ["modle"]},
            "'model' or 'optimizer' or 'schedulers' or 'progress' or 'data' or None, found",
        ),
        ({"resume": "best", "resume_parts": []}, "expected some of model"),
        ({"resume": "best", "resume_parts": ["model", "data"]}, "Add progress, or remove data"),
    ],
)
def test_invalid_resume_parts_raise_immediately(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        quiet_trainer(tmp_path, max_steps=1, **options)


def test_other_optimizer_or_schedule_names_part_to_omit(tmp_path, source_run):
    checkpoint, _ = source_run

    def plain(task):
        return SGD(task.parameters(), 0.1)

    def other(task):
        return stepwise(AdamW(task.parameters(), 0.1), lambda o: ExponentialLR(o, 0.9))

    def groups(task):
        first, *rest = task.parameters()
        return AdamW([{"params": [first]}, {"params": rest}], 0.1)

    for configure, parts, message in (
        (plain, None, r"saved with AdamW .*has SGD.*resume_parts: \[model, schedulers, progress, data\]"),
        (
            other,
            None,
            r"schedulers \['StepLR every step'\], but the run has \['ExponentialLR every step'\].*\[model, optimizer",
        ),
        (groups, ["schedulers"], r"learning rates of 1 parameter groups, but the run has 2"),
    ):
        with pytest.raises(CheckpointMismatch, match=message):
            train(tmp_path, Remembering(0.1, configure), seed=3, resume=checkpoint.path, resume_parts=parts)
    assert not (tmp_path / "runs/run").exists()


def test_config_record_omits_resume_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT)
    config = {
        "seed_everything": 7,
        "model": "tests.helpers.cli_tasks.Line",
        "data": "tests.helpers.cli_tasks.Points",
        "trainer": {"max_steps": 2, "callbacks": {"spy": "tests.helpers.cli_tasks.Spy"}},
    }
    Path("line.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "line.yaml"]) == 0
    words = ["--trainer.resume", "runs/line", "--trainer.resume_parts", "[model]", "--seed_everything", "null"]
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    assert Spy.trainer.global_step == 2
    assert Spy.trainer.run.seed != 7
    record = Path("runs/line-2/config.yaml")
    assert yaml.safe_load(record.read_text())["trainer"]["resume_parts"] is None
    assert main(["fit", "--config", str(record), "--trainer.max_steps", "3", "--trainer.resume", "auto"]) == 0
    assert Spy.trainer.global_step == 3


# ---------------------------------------------------------------------- changed settings


def collect_warnings(caplog, directory, task, **options):
    caplog.clear()
    train(directory, task, resume="auto", **options)
    said = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in said if not message.startswith("lr_scheduler: ")]  # too long for a short test


def test_changed_learning_rate_warns_with_both_values(tmp_path, caplog):
    def configure(lr, betas=(0.9, 0.999), weight_decay=0.01, gamma=0.9):
        def build(task):
            optimizer = AdamW(task.parameters(), lr, betas, weight_decay=weight_decay)
            return stepwise(optimizer, lambda o: StepLR(o, 1, gamma))

        return build

    def resumed(steps, *settings, **more):
        task = Remembering(0.1, configure(*settings, **more))
        return task, collect_warnings(caplog, tmp_path, task, max_steps=steps)

    train(tmp_path, Remembering(0.1, configure(0.1)))
    task, said = resumed(12, 0.2)
    assert len(said) == 1
    assert "groups[0].initial_lr was 0.1, is 0.2." in said[0]
    assert "The checkpoint's values apply" in said[0]
    assert task.rates[0] == pytest.approx(0.1 * 0.9**STEPS)
    advised = said[0].partition("resume: ")[2]
    path, _, parts = advised.partition(" and resume_parts: ")
    branch = Remembering(0.1, configure(0.2))
    train(tmp_path, branch, resume=path, resume_parts=yaml.safe_load(parts), max_steps=12)
    assert branch.rates[0] == pytest.approx(0.2 * 0.9**STEPS)

    assert resumed(14, 0.1)[1] == []  # the learning rate of the first start still counts
    (said,) = resumed(16, 0.1, betas=(0.8, 0.999), weight_decay=0.02, gamma=0.5)[1]
    for change in (
        "betas[0] was 0.9, is 0.8",
        "weight_decay was 0.01, is 0.02",
        "schedulers[0].gamma was 0.9, is 0.5",
    ):
        assert change in said


def test_changed_rate_without_schedule_warns_too(tmp_path, caplog):
    train(tmp_path, Remembering(0.1, lambda task: SGD(task.parameters(), 0.1)))
    (said,) = collect_warnings(
        caplog, tmp_path, Remembering(0.1, lambda task: SGD(task.parameters(), 0.3)), max_steps=12
    )
    assert "groups[0].lr was 0.1, is 0.3" in said


UNCHANGED = SCHEDULES | {
    "none": lambda o: o,
    "plateau": lambda o: stepwise(o, lambda o: ReduceLROnPlateau(o, patience=0), "epoch", monitor="val_loss"),
    "plateau after warm-up": lambda o: stepwise(
        o, lambda o: Warmup(ReduceLROnPlateau(o, patience=0), 4), monitor="val_loss"
    ),
    "cycling momentum": lambda o: stepwise(o, lambda o: OneCycleLR(o, 0.4, total_steps=40, cycle_momentum=True)),
}
OPTIMIZERS = {
    "SGD": lambda parameters: SGD(parameters, 0.1, momentum=0.9),
    "AdamW with a tensor as rate": lambda parameters: AdamW(parameters, torch.tensor(0.1)),
    "Lookahead": lambda parameters: Lookahead(AdamW(parameters, 0.1), 3),
}


@IGNORED
@pytest.mark.parametrize("schedule", UNCHANGED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_ordinary_resume_raises_no_alarm(tmp_path, caplog, schedule, optimizer):
    def task():
        return Weighted(0.1, lambda task: UNCHANGED[schedule](OPTIMIZERS[optimizer](task.parameters())))

    whole = task()
    train(tmp_path / "whole", whole, max_steps=17, max_epochs=3)
    train(tmp_path, task(), max_epochs=3)
    resumed = task()
    assert collect_warnings(caplog, tmp_path, resumed, max_steps=17, max_epochs=3) == []
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


class Described(lumen.TaskModule):
    """Task with hyperparameters of many kinds."""

    def __init__(self, width=1, rates=(0.1, 0.2), table=None, bias=None, limit=float("nan"), **rest):
        super().__init__()
        table, bias = np.arange(3) if table is None else table, torch.ones(2) if bias is None else bias
        self.save_hyperparameters()
        self.net = Regression().net

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return SGD(self.parameters(), 0.1)


class Shards(lumen.DataModule):
    def __init__(self, size=8):
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader(batch_size=8)


def test_changed_hyperparameters_are_one_line(tmp_path, caplog):
    def fit(task, data, **options):
        caplog.clear()
        trainer = quiet_trainer(tmp_path, resume="auto", log_level="WARNING", **options)
        trainer.fit(task, data)
        return trainer, [record.message for record in caplog.records if "hyperparameters" in record.message]

    _, said = fit(Described(old=1), Shards(), max_steps=2)
    assert said == []
    trainer, said = fit(Described(old=1), Shards(), max_steps=3)
    assert said == []
    trainer, said = fit(Described(width=2, rates=(0.1, 0.3), bias=torch.zeros(2), new="x"), Shards(16), max_steps=4)
    assert len(said) == 1
    assert "model.width was 1, is 2; model.rates was (0.1, 0.2), is (0.1, 0.3); model.bias" in said[0]
    assert "model.old was 1, is None; model.new was None, is 'x'; data.size was 8, is 16" in said[0]
    changed = find_changed_hyperparameters(trainer.run, trainer.run.checkpoint)
    assert list(changed) == ["model.width", "model.rates", "model.bias", "model.old", "model.new", "data.size"]
    assert changed["data.size"] == (8, 16)


BEFORE = {"precision": "fp32", "gradient_clip_val": 1.0}
CHANGED = {
    "precision": ({"precision": "bf16"}, "precision was 'fp32', is 'bf16'"),
    "clipping": ({"gradient_clip_val": 2.0}, "gradient_clip_val was 1.0, is 2.0"),
    "no clipping": ({"gradient_clip_val": None}, "gradient_clip_val was 1.0, is None"),
    "clipping values": ({"gradient_clip_algorithm": "value"}, "gradient_clip_algorithm was 'norm', is 'value'"),
    "accumulation": (
        {"accumulate_grad_batches": 2},
        "accumulate_grad_batches was 1, is 2; global_batch_size was 8, is 16",
    ),
    "global batch": ({"global_batch_size": 24}, "global_batch_size was 8, is 24"),
    "fewer batches": ({"limit_train_batches": 0.75}, "limit_train_batches was None, is 0.75"),
    "overfitting": (
        {"overfit_batches": 5},
        "limit_train_batches was None, is 5; limit_val_batches was None, is 5; overfit_batches was False, is True",
    ),
    "deterministic": ({"deterministic": True}, "deterministic was False, is True"),
    "matmul": ({"matmul_precision": "medium"}, "matmul_precision was None, is 'medium'"),
    "validation": (
        {"val_check_interval": 3, "check_val_every_n_epoch": 2},
        "val_check_interval was 1.0, is 3; check_val_every_n_epoch was 1, is 2",
    ),
}


@pytest.mark.parametrize(("after", "said"), CHANGED.values(), ids=CHANGED)
def test_changed_setting_warns_with_both_values(tmp_path, caplog, after, said):
    train(tmp_path, **BEFORE)
    (notice,) = collect_warnings(caplog, tmp_path, Remembering(), max_steps=STEPS + 1, **BEFORE | after)
    assert f"settings differ from {tmp_path / 'runs'}" in notice
    assert notice.endswith(f": {said}. The new settings apply from now on.")


def test_changed_batch_size_warns(tmp_path, caplog):
    def fit(batch_size, **options):
        caplog.clear()
        trainer = quiet_trainer(
            tmp_path, max_steps=options.pop("max_steps"), resume="auto", log_level="WARNING", **options
        )
        trainer.fit(Regression(), loader(batch_size=batch_size))
        return [line for line in caplog.messages if "settings" in line]

    assert fit(8, max_steps=3) == []
    (said,) = fit(4, max_steps=4)
    assert "batch_size was 8, is 4; global_batch_size was 8, is 4" in said
    assert fit(4, max_steps=5) == []
    assert fit(4, max_steps=6, global_batch_size=4) == []  # the same step in another notation
    (said,) = fit(2, max_steps=7, global_batch_size=4)
    assert ": batch_size was 4, is 2. The new" in said


def test_length_and_display_changes_do_not_warn(tmp_path, caplog):
    train(tmp_path)
    more = {"max_steps": 12, "max_epochs": 3, "log_every_n_steps": 1, "precision": 32, "accumulate_grad_batches": 1}
    assert collect_warnings(caplog, tmp_path, Remembering(), **more) == []


class Freezing(Regression):
    """Task that freezes its first layer and unfreezes it in epoch 1; a test may change the built layers."""

    def __init__(self, frozen=("net.0.weight",), evaluating=()):
        super().__init__(dropout=0.5)
        self.hparams.pop("frozen", None), self.hparams.pop("evaluating", None)
        for name in frozen:
            self.get_parameter(name).requires_grad_(False)
        for name in evaluating:
            self.get_submodule(name).eval()

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.net[0].weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("built", "said"),
    [
        ({}, None),
        ({"frozen": []}, None),  # in its changed form
        ({"frozen": ["net.0.weight", "net.3.bias"]}, "net.3.bias was 'trainable', is 'frozen'."),
        ({"frozen": ["net.3.bias"]}, "net.3.bias was 'trainable', is 'frozen'."),
        ({"evaluating": ["net.2"]}, "net.2 was 'in train mode', is 'in eval mode'."),
    ],
)
def test_frozen_state_of_checkpoint_wins_with_a_warning(tmp_path, caplog, built, said):
    train(tmp_path, Freezing())
    for steps in (11, 12):  # each time
        task = Freezing(**built)
        notices = collect_warnings(caplog, tmp_path, task, max_steps=steps)
        assert all(parameter.requires_grad for parameter in task.parameters())
        assert all(module.training for module in task.modules())
        assert len(notices) == bool(said)
        assert all(f": {said} The checkpoint's values apply" in notice for notice in notices)
    task = Freezing(**built)
    train(
        tmp_path, task, max_steps=1, resume=tmp_path / "runs" / "run", resume_parts=["model", "optimizer", "schedulers"]
    )
    frozen = {name for name, parameter in task.named_parameters() if not parameter.requires_grad}
    assert frozen == set(built.get("frozen", ["net.0.weight"]))
