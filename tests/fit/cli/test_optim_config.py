"""Optimizers and schedules in configs: a config can express everything that code can."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from lumen.checkpoint import Checkpoint, find_checkpoints
from lumen.cli import main
from lumen.optim import Lookahead, layer_decay_groups
from tests.helpers import cli
from tests.helpers.cli_tasks import Line, Spy
from tests.helpers.tasks import weights

fit = partial(cli.fit, config="full.yaml")

FULL = """
seed_everything: 7
model: {class_path: tests.fit.cli.test_optim_config.Layered, init_args: {width: 3}}
data: {class_path: tests.helpers.cli_tasks.Points, init_args: {samples: 24}}
optimizer: {class_path: lumen.optim.adamw, init_args: {lr: 0.1, weight_decay: 0.3, betas: [0.8, 0.9]}}
parameter_groups: {no_decay: module type, layer_decay: 0.5, blocks: blocks, embeddings: [layer]}
lookahead: {k: 3}
lr_scheduler: {class_path: ReduceLROnPlateau, init_args: {factor: 0.5, patience: 0}}
lr_schedule: {monitor: rising, warmup_steps: 8, warmup_start: 0.25}
trainer:
  max_epochs: 4
  enable_progress_bar: false
  enable_model_summary: false
  num_sanity_val_steps: 0
  log_every_n_steps: 1
  callbacks: [tests.helpers.cli_tasks.Spy, lumen.LearningRateMonitor]
"""


class Layered(Line):
    """Line task with two blocks."""

    def __init__(self, width: int):
        super().__init__(width)
        self.blocks = nn.Sequential(nn.Linear(1, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))
        self.head = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)

    def forward(self, x):
        return self.head(self.blocks(self.layer(x)))

    def validation_step(self, batch):
        super().validation_step(batch)
        self.log("rising", float(self.current_epoch))


class Counted(Layered):
    """Line task that returns the number of units in a batch."""

    def batch_weight(self, batch):
        return 10 * len(batch[0])


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full.yaml").write_text(FULL)
    (tmp_path / "plain.yaml").write_text("{lookahead: null, parameter_groups: null, lr_schedule: null}")
    (tmp_path / "several.yaml").write_text(SEVERAL)
    Spy.trainer = Spy.task = None


def catch_error(capsys, *words):
    assert main(["fit", "--config", "full.yaml", *words]) != 0
    return capsys.readouterr().err


def read_rates(path):
    rows = [row.split(",") for row in (path / "metrics.csv").read_text().splitlines()]
    column = rows[0].index("lr/head no decay" if "lr/head no decay" in rows[0] else "lr")
    return [float(row[column]) for row in rows[1:] if row[column]]


def test_config_sets_groups_lookahead_warmup_and_plateau(tmp_path):
    trainer, task = fit()
    (optimizer,) = trainer.optimizers
    assert (type(optimizer), type(optimizer.optimizer)) == (Lookahead, torch.optim.AdamW)
    assert (optimizer.k, optimizer.alpha) == (3, 0.5)
    expected = layer_decay_groups(task, 0.1, 0.5, "blocks", weight_decay=0.3, by="module type", embeddings=["layer"])
    assert len(optimizer.param_groups) == len(expected) == 8
    for ours, theirs in zip(optimizer.param_groups, expected, strict=True):
        assert ours["params"] == theirs["params"]
        assert ours["weight_decay"] == theirs["weight_decay"]
        assert ours["initial_lr"] == pytest.approx(theirs["lr"]) if "initial_lr" in ours else True
        assert (ours["fused"], ours["betas"]) == (True, (0.8, 0.9))
    top = [0.1 * min(1.0, 0.25 + 0.75 * step / 8) for step in range(8)] + [0.1] * 10
    plateau = [0.1] * 4 + [0.05] * 6  # watched from the first epoch on; acts after the warm-up
    found = read_rates(tmp_path / "runs/full")
    assert found[:8] == pytest.approx(top[:8])
    assert found[8:12] == pytest.approx(plateau[:4])
    assert found[12:18] == pytest.approx(plateau[4:])
    assert found[18:] == pytest.approx([0.025] * 6)


class Recorded(Layered):
    """Line task that records the gradients and the parameters of each step."""

    def __init__(self, width: int):
        super().__init__(width)
        self.gradients, self.moved = [], []

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append([each.grad.clone() for each in self.parameters() if each.requires_grad])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.moved.append([each.detach().clone() for each in self.parameters() if each.requires_grad])

    def on_train_start(self):
        self.on_train_batch_end(None, None, 0)


def test_nesterov_inside_lookahead_follows_both_formulas():
    options = [f"--optimizer.{pair}" for pair in ("lr=0.05", "momentum=0.9", "nesterov=true", "weight_decay=0.1")]
    _, task = fit(
        *PLAIN, f"--model={__name__}.Recorded", "--lr_scheduler=null", "--optimizer=SGD", *options,
        "--lookahead.k=3", "--lookahead.alpha=0.25",
    )  # fmt: skip
    found = [each.clone() for each in task.moved[0]]
    slow, velocity = [each.clone() for each in found], [torch.zeros_like(each) for each in found]
    for step, gradients in enumerate(task.gradients, 1):
        for place, gradient in enumerate(gradients):
            decayed = gradient + 0.1 * found[place]
            velocity[place] = 0.9 * velocity[place] + decayed
            found[place] = found[place] - 0.05 * (decayed + 0.9 * velocity[place])
            if step % 3 == 0:
                slow[place] = slow[place] + 0.25 * (found[place] - slow[place])
                found[place] = slow[place]
            torch.testing.assert_close(found[place], task.moved[step][place])
    assert len(task.gradients) > 6


@pytest.mark.slow
def test_saved_config_repeats_and_resumes_the_run(tmp_path):
    _, first = fit()
    saved = tmp_path / "runs/full/config.yaml"
    kept = yaml.safe_load(saved.read_text())
    assert kept["parameter_groups"] == {
        "no_decay": "module type", "decay": None, "layer_decay": 0.5, "blocks": "blocks", "embeddings": ["layer"]
    }  # fmt: skip
    assert kept["lookahead"] == {"k": 3, "alpha": 0.5}
    _, second = fit("--trainer.name=again", config=str(saved))
    assert torch.equal(weights(first), weights(second))
    for epochs in (2, 4):
        _, third = fit("--trainer.name=parts", "--trainer.resume=auto", f"--trainer.max_epochs={epochs}")
    assert torch.equal(weights(first), weights(third))
    assert main(["validate", "--config", str(saved), "--ckpt_path", "last"]) == 0


def test_the_command_line_changes_single_values(tmp_path):
    trainer, task = fit("--lookahead.k=2", "--lookahead.alpha", "0.8", "--parameter_groups.layer_decay=1.0",
                        "--parameter_groups.no_decay=[blocks.*]")  # fmt: skip
    (optimizer,) = trainer.optimizers
    assert (optimizer.k, optimizer.alpha) == (2, 0.8)
    assert len({group["lr"] for group in optimizer.param_groups}) == 1
    spared = {id(each) for group in optimizer.param_groups if not group["weight_decay"] for each in group["params"]}
    assert spared == {id(parameter) for parameter in task.blocks.parameters()}


def test_a_config_names_the_classes_whose_weights_decay(capsys):
    words = ["--parameter_groups.layer_decay=null", "--parameter_groups.blocks=null"]
    trainer, task = fit(*words, "--parameter_groups.decay=[Linear]", "--parameter_groups.no_decay=[LayerNorm]")
    spared = {
        id(each)
        for group in trainer.optimizers[0].param_groups
        if not group["weight_decay"]
        for each in group["params"]
    }
    norm = task.blocks[1][0]
    biases = {id(each) for name, each in task.named_parameters() if name.endswith("bias")}
    assert spared == biases | {id(norm.weight)}
    message = catch_error(
        capsys, *words, "--parameter_groups.decay=[Linear]", "--parameter_groups.no_decay=[Embedding]"
    )
    assert (
        "blocks.1.0.weight of LayerNorm is in neither. Add the class of its module to one of the two lists." in message
    )


def ramp(epoch):
    return 0.1 * (1 + epoch)


@pytest.mark.slow
def test_config_warms_up_before_a_function_or_plateau():
    off = ("lookahead.k", "parameter_groups.layer_decay", "parameter_groups.blocks", "parameter_groups.no_decay")
    words = [f"--{name}=null" for name in off]
    words += ["--lr_schedule.warmup_steps=0", "--lr_schedule.warmup_start=null", "--lr_schedule.warmup_epochs=2"]
    words += [f"--lr_schedule.warmup_factor={__name__}.ramp", "--trainer.max_epochs=6"]
    fit(*words, "--trainer.name=whole")
    whole = read_rates(Path("runs/whole"))
    assert [*dict.fromkeys(whole)] == pytest.approx([0.01, 0.02, 0.05, 0.025, 0.0125, 0.00625])
    for epochs in (1, 3, 6):
        fit(*words, "--trainer.name=parts", "--trainer.resume=auto", f"--trainer.max_epochs={epochs}")
    assert read_rates(Path("runs/parts")) == whole
    fit("--trainer.name=again", config="runs/whole/config.yaml")
    assert read_rates(Path("runs/again")) == whole


def test_what_is_set_to_null_is_off():
    off = ["parameter_groups.no_decay", "parameter_groups.layer_decay", "parameter_groups.blocks"]
    trainer, task = fit(*(f"--{name}=null" for name in (*off, "lookahead.k", "lr_scheduler")))
    (optimizer,) = trainer.optimizers
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert len(group["params"]) == len(list(task.parameters())) - 1  # without the frozen parameter


def test_any_torch_optimizer_can_be_split_into_groups():
    alone = ["--parameter_groups.layer_decay=null", "--parameter_groups.blocks=null", "--lr_scheduler=null"]
    trainer, task = fit("--optimizer=SGD", "--optimizer.lr=0.1", "--optimizer.weight_decay=0.2", *alone)
    (decaying, other) = trainer.optimizers[0].param_groups
    assert [decaying["weight_decay"], other["weight_decay"]] == [0.2, 0.0]
    assert {id(each) for each in decaying["params"]} == {
        id(each) for name, each in task.named_parameters() if each.ndim == 2
    }


@pytest.mark.parametrize("scheduler", ["lumen.optim.cosine", "StepLR", "OneCycleLR"])
def test_a_warm_up_comes_before_any_schedule(tmp_path, scheduler):
    words = {"lumen.optim.cosine": ["--lr_scheduler.steps=16", "--lr_schedule.interval=step"],
             "StepLR": ["--lr_scheduler.step_size=1", "--lr_scheduler.gamma=0.5"],
             "OneCycleLR": ["--lr_scheduler.total_steps=16", "--lr_schedule.interval=step",
                            "--lr_scheduler.max_lr=0.2"]}[scheduler]  # fmt: skip
    fit(f"--lr_scheduler={scheduler}", *words, "--lr_schedule.monitor=null", "--parameter_groups.layer_decay=null",
        "--parameter_groups.blocks=null")  # fmt: skip
    rows = [row.split(",") for row in (tmp_path / "runs/full/metrics.csv").read_text().splitlines()]
    column = rows[0].index("lr/decay")
    found = [float(row[column]) for row in rows[1:] if row[column]]
    top = 0.2 / 25 if scheduler == "OneCycleLR" else 0.1
    assert found[:9] == pytest.approx([top * (0.25 + 0.75 * step / 8) for step in range(9)])
    if scheduler == "StepLR":
        assert found[8:] == pytest.approx([0.1] * 4 + [0.05] * 6 + [0.025] * 6)
    if scheduler == "lumen.optim.cosine":
        assert found[8:] == pytest.approx([0.05 * (1 + math.cos(math.pi * step / 16)) for step in range(16)])


def test_a_schedule_counts_tokens(tmp_path):
    plain = [
        "--parameter_groups.layer_decay=null",
        "--parameter_groups.blocks=null",
        "--parameter_groups.no_decay=null",
    ]
    words = ["--lr_scheduler=lumen.optim.linear", "--lr_scheduler.steps=960", "--lr_schedule.interval=token"]
    words += [
        "--lr_schedule.warmup_steps=0",
        "--lr_schedule.monitor=null",
        "--model=tests.fit.cli.test_optim_config.Counted",
    ]
    fit(*plain, *words)
    assert read_rates(tmp_path / "runs/full") == pytest.approx([0.1 * (1 - 40 * step / 960) for step in range(24)])


def test_lbfgs_trains_from_a_configuration():
    off = ["parameter_groups.no_decay", "parameter_groups.layer_decay", "parameter_groups.blocks", "lookahead.k"]
    words = ["--optimizer=LBFGS", "--optimizer.max_iter=3", "--data.batch_size=24", "--lr_scheduler=null"]
    trainer, _ = fit(*words, *(f"--{name}=null" for name in off))
    assert next(iter(trainer.optimizers[0].state.values()))["func_evals"] == 3 * trainer.global_step == 12


def test_another_optimizer_inside_lookahead_is_found_when_resuming(tmp_path, capsys):
    words = ["--trainer.resume=auto", "--parameter_groups.layer_decay=null", "--parameter_groups.blocks=null"]
    fit(*words, "--trainer.max_epochs=1")
    (path,) = find_checkpoints(tmp_path / "runs/full/checkpoints")
    assert Checkpoint.open(path).state["optimizer"]["class"] == "Lookahead(AdamW)"
    other = [*words, "--optimizer=NAdam", "--optimizer.lr=0.1", "--optimizer.weight_decay=0.3"]
    message = catch_error(capsys, *other)
    assert "saved with Lookahead(AdamW) over [4, 6] parameters per group; this run has Lookahead(NAdam)" in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--parameter_groups.blocks=null"], "parameter_groups: layer_decay and blocks need each other."),
        (["--parameter_groups.blocks=layers"], "no parameter of Layered has a name below 'layers'. Layered has frozen"),
        (["--parameter_groups.no_decay=norms"], "parameter_groups.no_decay (the command line): expected"),
        (["--parameter_groups.decay=[Linear]"], "with decay, expected a list of class names, found 'module type'."),
        (["--parameter_groups.blockz=a"], "ParameterGroups has no option blockz. Did you mean blocks?"),
        (["--parameter_groups=3"], "parameter_groups (the command line): expected `name: value` lines"),
        (["--optimizer=Rprop"], "parameter_groups.no_decay: torch.optim.Rprop has no weight_decay."),
        (["--optimizer=null", "--lr_scheduler=null"], "lookahead and parameter_groups need an optimizer"),
        (["--lookahead.k=0"], "Lookahead: k = 0, alpha = 0.5; k must be at least 1"),
        (["--optimizer=LBFGS", "--parameter_groups.no_decay=null"], "LBFGS doesn't support per-parameter options"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_named(capsys, words, message):
    assert message in catch_error(capsys, *words)


# ---------------------------------------------------------------------- several schedulers

PLAIN = ["--config", "plain.yaml"]
SEVERAL = """
lr_scheduler:
- {scheduler: {class_path: ExponentialLR, init_args: {gamma: 0.5}}, interval: step, frequency: 4}
- {scheduler: {class_path: ReduceLROnPlateau, factor: 0.1, patience: 0}, monitor: rising}
- {class_path: StepLR, step_size: 3, gamma: 0.125}
"""


class SeveralInPython(Layered):
    """Task that changes its learning rate like `SEVERAL`."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.3, betas=(0.8, 0.9), fused=True)
        schedules = torch.optim.lr_scheduler
        return [optimizer], [
            {"scheduler": schedules.ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": 4},
            {"scheduler": schedules.ReduceLROnPlateau(optimizer, factor=0.1, patience=0), "monitor": "rising"},
            schedules.StepLR(optimizer, 3, 0.125),
        ]


def several(*words):
    return fit(*PLAIN, "--config", "several.yaml", *words)


def test_several_schedulers_in_config_equal_python():
    trainer, task = several("--trainer.name=yaml")
    kinds = [type(each.scheduler).__name__ for each in trainer.lr_scheduler_configs]
    assert kinds == ["ExponentialLR", "ReduceLROnPlateau", "StepLR"]
    _, other = fit(
        f"--model={__name__}.SeveralInPython", "--optimizer=null", "--lr_scheduler=null", *PLAIN, "--trainer.name=code"
    )
    assert read_rates(Path("runs/yaml")) == read_rates(Path("runs/code"))
    assert len(set(read_rates(Path("runs/yaml")))) > 6
    assert torch.equal(weights(task), weights(other))


@pytest.mark.slow
def test_several_schedulers_resume_exactly_and_are_saved(capsys):
    _, whole = several("--trainer.name=whole")
    saved = yaml.safe_load(Path("runs/whole/config.yaml").read_text())["lr_scheduler"]
    assert [(each["scheduler"]["class_path"], each["interval"]) for each in saved] == [
        ("torch.optim.lr_scheduler.ExponentialLR", "step"),
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", "epoch"),
        ("torch.optim.lr_scheduler.StepLR", "epoch"),
    ]
    _, again = fit("--trainer.name=again", config="runs/whole/config.yaml")
    assert torch.equal(weights(whole), weights(again))
    for epochs in (1, 3, 4):
        _, parts = several("--trainer.name=parts", "--trainer.resume=auto", f"--trainer.max_epochs={epochs}")
    assert torch.equal(weights(whole), weights(parts))
    assert read_rates(Path("runs/parts")) == read_rates(Path("runs/whole"))
    assert main(["validate", "--config", "runs/whole/config.yaml", "--ckpt_path", "last"]) == 0
    capsys.readouterr()
    assert main(["fit", "--config", "runs/whole/config.yaml", "--print_config=skip_default"]) == 0
    (short, *_) = yaml.safe_load(capsys.readouterr().out)["lr_scheduler"]
    assert short == {
        "scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.5}},
        "interval": "step", "frequency": 4,
    }  # fmt: skip


@pytest.mark.slow
def test_plus_appends_a_scheduler():
    words = ["--lr_scheduler+=StepLR", "--lr_scheduler.step_size=2"]
    trainer, _ = several(*words, "--lr_scheduler+={scheduler: {class_path: ExponentialLR, gamma: 0.9}, frequency: 2}")
    *_, step, exponential = trainer.lr_scheduler_configs
    assert (step.scheduler.step_size, exponential.scheduler.gamma, exponential.frequency) == (2, 0.9, 2)
    trainer, _ = fit(*PLAIN, "--lr_scheduler=StepLR", "--lr_scheduler.step_size=3", "--lr_scheduler+=ExponentialLR",
                     "--lr_scheduler.gamma=0.9")  # fmt: skip
    assert [type(each.scheduler).__name__ for each in trainer.lr_scheduler_configs] == ["StepLR", "ExponentialLR"]
    (only,) = several("--lr_scheduler=[{class_path: StepLR, step_size: 5}]")[0].lr_scheduler_configs
    assert only.scheduler.step_size == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr_scheduler=[StepLR]"],
         "lr_scheduler.0.scheduler (the command line): StepLR needs step_size. Set step_size."),
        (["--lr_scheduler+={scheduler: StepLR, intervall: step}"], "Schedule has no option intervall. Did you mean"),
        (["--lr_scheduler+={interval: step}"], "expected a class, or {scheduler: CLASS, interval: step}, found"),
        (["--lr_scheduler+=lumen.optim.cosine", "--lr_scheduler.steps=9"],
         "each move of the Schedule overwrites the learning rates that the ExponentialLR has set."),
        (["--lr_scheduler+=AdamW"], "has no class AdamW"),
        (["--lr_scheduler.gamma=3"],
         "lr_scheduler is a list. Write the whole list, or add an entry by --lr_scheduler+."),
        (["--lr_schedule.interval=step"], "lr_schedule applies to a single lr_scheduler, but there are several."),
        (["--optimizer=null"], "lr_scheduler needs an optimizer. Set optimizer too."),
        (["--lr_scheduler=[{scheduler: {class_path: StepLR, step_size: 1}, frequency: often}]"],
         "lr_scheduler.0.frequency (the command line): expected int, found 'often'."),
        (["--lr_scheduler=[{scheduler: {class_path: StepLR, step_size: few}}]"],
         "lr_scheduler.0.scheduler.step_size (the command line): expected int, found 'few'."),
    ],
)  # fmt: skip
def test_error_in_one_of_several_schedulers_is_named(capsys, words, message):
    assert message in catch_error(capsys, *PLAIN, "--config", "several.yaml", *words)
