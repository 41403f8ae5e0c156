"""Conventions of LightningCLI: arguments that its users type work, or the error shows what to type."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import lazy_instance
from torch import nn
from torch.optim import Optimizer

import lumen
from lumen.cli import main
from tests.helpers.cli_tasks import Slope, Spy
from tests.helpers.working_directory import LINE as CONFIG

EARLY = ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.patience=4", "--trainer.callbacks.monitor=val_loss"]
STOPPER = {"class_path": "lumen.EarlyStopping", "init_args": {"monitor": "val_loss", "patience": 4}}


pytestmark = pytest.mark.usefixtures("config_directory")


@pytest.fixture
def print_config(capsys):
    """Return the settings of arguments, without defaults."""

    def run(*words, config="line.yaml"):
        capsys.readouterr()
        assert main(["fit", "--config", config, *words, "--print_config=skip_default"]) == 0
        return yaml.safe_load(capsys.readouterr().out)

    return run


@pytest.fixture
def catch_error(capsys):
    def run(*words):
        capsys.readouterr()
        assert main(["fit", "--config", "line.yaml", *words]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ")
        assert not Path("runs").exists()
        return message.removeprefix("error: ").rstrip("\n")

    return run


@pytest.fixture
def print_help(capsys):
    """Return the help that is shown instead of a run."""

    def run(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main(["fit", *words])
        assert caught.value.code == 0
        return " ".join(capsys.readouterr().out.split())

    return run


# ---------------------------------------------------------------------- callbacks


def test_single_callback_replaces_all_of_a_config(print_config):
    """`=` replaces; `+=` appends, which test_cli.py shows."""
    assert print_config(*EARLY)["trainer"]["callbacks"] == [STOPPER]
    Path("one.yaml").write_text("trainer: {callbacks: {class_path: EarlyStopping, init_args: {monitor: val_loss}}}")
    assert print_config("--config", "one.yaml", "--trainer.callbacks.patience=4")["trainer"]["callbacks"] == [STOPPER]
    Path("list.yaml").write_text(CONFIG.replace("{spy: tests.helpers.cli_tasks.Spy}", "[tests.helpers.cli_tasks.Spy]"))
    assert print_config(*EARLY, config="list.yaml")["trainer"]["callbacks"] == [STOPPER]


def test_plus_key_in_config_extends_earlier_files(print_config):
    added = "[{class_path: EarlyStopping, init_args: {monitor: val_loss, patience: 4}}]"
    Path("more.yaml").write_text(f"trainer:\n  callbacks+: {added}\nmodel: {{init_args: {{widths+: [5]}}}}\n")
    found = print_config("--config", "more.yaml")
    assert found["trainer"]["callbacks"] == {
        "spy": {"class_path": "tests.helpers.cli_tasks.Spy"},
        "earlystopping": STOPPER,
    }
    assert found["model"]["init_args"]["widths"] == [1, 2, 5]
    Path("monitor.yaml").write_text("trainer: {callbacks+: LearningRateMonitor}")
    found = print_config("--config", "more.yaml", "--config", "monitor.yaml", "--trainer.callbacks+=ProgressBar")
    assert list(found["trainer"]["callbacks"]) == ["spy", "earlystopping", "learningratemonitor", "progressbar"]
    Path("both.yaml").write_text("trainer: {callbacks: [LearningRateMonitor], callbacks+: [ProgressBar]}")
    found = print_config("--config", "both.yaml")["trainer"]["callbacks"]
    assert [each["class_path"] for each in found] == ["lumen.LearningRateMonitor", "lumen.ProgressBar"]


def test_error_in_appended_value_names_the_file(catch_error):
    Path("more.yaml").write_text("trainer: {callbacks+: EarlyStoping}")
    said = "trainer.callbacks.earlystoping (more.yaml): lumen has no class EarlyStoping. Did you mean EarlyStopping"
    assert said in catch_error("--config", "more.yaml")


@pytest.mark.parametrize(("option", "value"), [("patience", "3"), ("monitor", "val_loss"), ("mode", "max")])
def test_option_without_callback_explains_the_syntax(catch_error, option, value):
    said = catch_error(f"--trainer.callbacks.{option}={value}")
    assert said.startswith(f"trainer.callbacks.{option} (the command line): lumen has no class {value}. ")
    assert f"name the callback, --trainer.callbacks.NAME.{option}={value}, or add the callback first: " in said
    assert said.endswith(f"--trainer.callbacks+=CLASS --trainer.callbacks.{option}={value}.")


@pytest.mark.parametrize(("name", "ours"), [("EMAWeightAveraging", "EMA"), ("TQDMProgressBar", "ProgressBar")])
def test_lightning_class_name_suggests_the_lumen_name(catch_error, name, ours):
    said = catch_error(f"--trainer.callbacks+={name}")
    assert (
        said == f"trainer.callbacks.{name.lower()} (the command line): lumen has no class {name}. Write lumen.{ours}."
    )


def test_misspelled_callback_is_no_option(catch_error):
    assert "--trainer.callbacks+" not in catch_error("--trainer.callbacks.early=EarlyStoping")
    assert "--trainer.callbacks+" not in catch_error("--trainer.callbacks.early=nowhere.EarlyStopping")


def test_option_for_a_list_explains_appending(catch_error):
    Path("list.yaml").write_text("trainer: {callbacks: [LearningRateMonitor]}")
    said = catch_error("--config", "list.yaml", "--trainer.callbacks.patience=3")
    assert "add an entry by --trainer.callbacks+, or give the entries names" in said


# ---------------------------------------------------------------------- help


def test_class_help_shows_the_named_or_configured_class(print_help):
    shown = print_help("--config", "line.yaml", "--model.help")
    assert "--model.lr" in shown
    assert "Fits a line" in shown
    assert "--model.steepness" in print_help("--config", "line.yaml", "--model.help", "tests.helpers.cli_tasks.Slope")
    assert "--model.steepness" in print_help(
        "--config", "line.yaml", "--model", "tests.helpers.cli_tasks.Slope", "--model.help"
    )
    shown = print_help("--optimizer.help=AdamW")
    assert "--optimizer.weight_decay" in shown
    assert "--optimizer.params" not in shown
    assert "--trainer.callbacks.patience" in print_help("--trainer.callbacks.help", "EarlyStopping")
    assert "--trainer.profiler.help" in print_help("--trainer.help")
    assert "--help all" in print_help("-h")


def test_help_for_a_class_inside_another_class(print_help):
    encoder = ["--model.encoder", "{class_path: torch.nn.CELU}"]
    assert "--model.encoder.alpha" in print_help(
        "--model.help=tests.helpers.cli_tasks.Line", "--model.encoder.help=torch.nn.CELU"
    )
    assert "--model.encoder.alpha" in print_help("--config=line.yaml", *encoder, "--model.help", "--model.encoder.help")


# ---------------------------------------------------------------------- files and classes


def test_short_c_option_and_later_files_win(print_config):
    Path("second.yaml").write_text("trainer: {max_steps: 5}\nmodel: {init_args: {lr: 0.3}}\n")
    for option in ("-c", "--config"):
        found = print_config(option, "second.yaml")
        assert (found["trainer"]["max_steps"], found["model"]["init_args"]) == (5, {"lr": 0.3})
        assert found["seed_everything"] == 7


@pytest.mark.parametrize("key", ["model", "data", "trainer", "optimizer", "lr_scheduler"])
def test_file_for_one_group_explains_config_files(catch_error, key):
    said = (
        f"--{key} {key}.yaml: expected a value, found a file. Write --config {key}.yaml, with the settings "
        f"below `{key}:` in this file."
    )
    assert catch_error(f"--{key}", f"{key}.yaml") == said


def test_short_class_names_and_both_argument_forms_work(print_config):
    words = ["--model=Slope", "--model.init_args.steepness=2", "--model.lr=0.5", "--optimizer=SGD"]
    words += ["--optimizer.init_args.momentum=0.9", "--lr_scheduler=StepLR", "--lr_scheduler.step_size=2"]
    found = print_config(*words, "--trainer.logger=CSVLogger", "--trainer.profiler=SimpleProfiler")
    assert found["model"] == {"class_path": "tests.helpers.cli_tasks.Slope", "init_args": {"lr": 0.5, "steepness": 2.0}}
    assert found["optimizer"] == {"class_path": "torch.optim.SGD", "init_args": {"momentum": 0.9}}
    assert found["lr_scheduler"]["init_args"]["step_size"] == 2
    assert found["trainer"]["logger"] == {"class_path": "lumen.CSVLogger"}
    assert found["trainer"]["profiler"] == {"class_path": "lumen.SimpleProfiler"}
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    assert isinstance(Spy.task, Slope)
    assert Spy.task.hparams.lr == 0.5


def test_injected_optimizer_needs_no_parameters_in_config():
    """The parameter has the type `Callable[[Iterable], Optimizer]`, like Lightning's `OptimizerCallable`."""
    Path("injected.py").write_text(
        "from collections.abc import Callable, Iterable\n\n"
        "from torch import nn\n"
        "from torch.optim import Optimizer\n\n"
        "import lumen\n\n\n"
        "class Injected(lumen.TaskModule):\n"
        "    def __init__(self, build: Callable[[Iterable], Optimizer]):\n"
        "        super().__init__()\n"
        "        self.layer, self.build = nn.Linear(3, 1), build\n\n"
        "    def training_step(self, batch):\n"
        "        return (self.layer(batch[0]) - batch[1]).square().mean()\n\n"
        "    def configure_optimizers(self):\n"
        "        return self.build(self.parameters())\n"
    )
    words = ["--model=injected.Injected", "--model.build=torch.optim.AdamW", "--model.build.lr=0.25"]
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    (optimizer,) = Spy.trainer.optimizers
    assert (type(optimizer), optimizer.param_groups[0]["lr"]) == (torch.optim.AdamW, 0.25)
    assert main(["fit", "--config", "runs/line/config.yaml"]) == 0
    assert type(Spy.trainer.optimizers[0]) is torch.optim.AdamW


def test_fit_options_with_other_names_are_suggested(catch_error):
    assert catch_error("--ckpt_path=last") == (
        "ckpt_path (the command line): lumen has no option ckpt_path. For fit use trainer.resume."
    )
    Path("own.yaml").write_text("config: line.yaml")
    assert catch_error("--config", "own.yaml").endswith("Name config files by --config FILE only.")


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("text", ["x:", "3", "a: b", "[1", "15:00", "08", "7e10", "1e3"])
def test_text_stays_text(print_config, text):
    assert print_config("--model.label", text)["model"]["init_args"]["label"] == text


@pytest.mark.parametrize("key", ["val_check_interval", "max_steps"])
@pytest.mark.parametrize("by_file", [False, True])
def test_a_duration_is_never_read_as_a_number(catch_error, key, by_file):
    """YAML 1.1 reads 15:00 as 900, which would be optimizer steps."""
    Path("often.yaml").write_text(f"trainer: {{{key}: 15:00}}")
    words = ["--config", "often.yaml"] if by_file else [f"--trainer.{key}", "15:00"]
    source = "often.yaml" if by_file else "the command line"
    said = f"trainer.{key} ({source}): YAML reads 15:00 as 900. For a duration write 015:00."
    assert catch_error(*words) == said


def test_duration_with_leading_zero_is_accepted():
    assert main(["fit", "--config", "line.yaml", "--trainer.val_check_interval", "015:00"]) == 0
    assert Spy.trainer.plan.val_every_s == 900.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.logger=CSVLoger"], "found 'CSVLoger'. Did you mean CSVLogger or"),
        (["--trainer.logger.class_path=EarlyStopping"], "trainer.logger (the command line): lumen has no class Early"),
        (["--trainer.logger.class_path=lumen.EarlyStopping"], "lumen.EarlyStopping is not a subclass of Logger."),
        (["--model.noise.class_path=torch.nn.ReLU"], "torch.nn.ReLU is not a subclass of Noise."),
        (["--model.noise.scale=loud"], "model.noise.scale (the command line): expected float, found 'loud'."),
        (["--model.encoder=torch.nn.ReLUU"], "torch.nn has no class ReLUU. Did you mean ReLU"),
        (["--trainer.max_steps={class_path: torch.nn.ReLU}"], "trainer.max_steps (the command line): expected int"),
        (["--trainer.init_from.pth=x"], "trainer.init_from.pth (the command line): Weights has no option pth."),
    ],
)
def test_nested_errors_name_the_full_key(catch_error, words, said):
    assert said in catch_error(*words)


def test_environment_variable_of_scripts_suggests_the_command_form(monkeypatch, capsys):
    monkeypatch.setenv("LUMEN_TRAINER__MAX_STEPS", "3")
    assert main(["fit", "--model", "tests.helpers.cli_tasks.Line"]) == 2
    said = capsys.readouterr().err
    assert (
        "variable LUMEN_TRAINER__MAX_STEPS. Set LUMEN_FIT__TRAINER__MAX_STEPS instead, or unset "
        "LUMEN_TRAINER__MAX_STEPS." in said
    )


@dataclass
class Augmentation:
    p: float = 0.5


class Built(lumen.TaskModule):
    def __init__(
        self,
        chosen: Callable[[Iterable[Any]], Optimizer] = torch.optim.Adam,
        called: Callable[[Iterable[Any]], Optimizer] = lambda params: torch.optim.SGD(params, lr=0.3),
        drop: nn.Module = lazy_instance(nn.Dropout, p=0.3),  # noqa: B008 (as LightningCLI's users write defaults)
        named: dict[str, Augmentation] = {},  # noqa: B006
        several: list[Augmentation] = [],  # noqa: B006
        perhaps: Augmentation | None = None,
        either: Augmentation | str = "none",
        mixed: Augmentation | dict[str, int] | None = None,
    ):
        self.given = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def build_model(**init_args):
    config = yaml.safe_load(CONFIG) | {"model": {"class_path": f"{__name__}.Built", "init_args": init_args}}
    Path("built.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "built.yaml"]) == 0
    return Spy.task.given


def test_another_class_starts_with_its_own_defaults():
    """jsonargparse keeps values of the replaced class if both classes have an argument of that name."""
    given = build_model(
        chosen={"class_path": "torch.optim.AdamW", "init_args": {"lr": 3e-4}},
        called="torch.optim.AdamW",
        drop={"class_path": "torch.nn.AlphaDropout"},
    )
    optimizers = [given[name]([nn.Parameter(torch.ones(1))]) for name in ("chosen", "called")]
    own = torch.optim.AdamW([nn.Parameter(torch.ones(1))]).defaults
    assert [each.defaults for each in optimizers] == [own | {"lr": 3e-4}, own]
    assert given["drop"].p == nn.AlphaDropout().p
    assert build_model(drop={"class_path": "torch.nn.Dropout", "init_args": {"inplace": True}})["drop"].p == 0.3


def test_dataclasses_are_read_inside_any_type(capsys):
    half, record = {"p": 0.25}, Augmentation(0.25)
    given = build_model(named={"a": half}, several=[half, half], perhaps=half, either=half, mixed=half)
    assert [given[name] for name in ("named", "several", "perhaps", "either", "mixed")] == [
        {"a": record}, [record, record], record, record, record,
    ]  # fmt: skip
    assert build_model(mixed={"q": 2}, either="more")["mixed"] == {"q": 2}
    capsys.readouterr()
    with pytest.raises(AssertionError):
        build_model(named={"a": {"q": 0.25}})
    assert "model.named.a.q (built.yaml): Augmentation has no option q." in capsys.readouterr().err
