"""`lumen.CLI(Task, Data)`: the command line of a user's own script."""

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI

import lumen
from lumen.cli.classes import find_class
from lumen.errors import ConfigError
from tests.helpers import ROOT
from tests.helpers.cli_tasks import Line, Points, Slope, Spy

CONFIG = {"trainer": {"max_steps": 2, "enable_progress_bar": False, "enable_model_summary": False}}
QUIET = ["--config", "line.yaml", "--seed_everything", "7"]
SCRIPT = """\
import lumen
from tests.helpers.cli_tasks import Points, Line


class Mine(Line):
    pass


class Mineral(Mine):
    pass


"""

pytestmark = pytest.mark.usefixtures("config_directory")


def call_cli(*words, **options):
    """Call a script's command line for a line and its points, with arguments."""
    return lumen.CLI(Line, Points, args=[words[0], *QUIET, *words[1:]], **options)


def catch_error(*words, kind=lumen.CLI, **options):
    with pytest.raises(ConfigError) as error:
        kind(Line, Points, **{"args": ["fit", *QUIET, *words], **options})
    return str(error.value)


def read_saved_config(path="runs/line"):
    return yaml.safe_load((Path(path) / "config.yaml").read_text())


def run_script(text, *words, **environment):
    """Run a script in a separate process, with the environment of this one."""
    Path("train.py").write_text(SCRIPT + text)
    settings = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return subprocess.run([sys.executable, "train.py", *words], env=settings, capture_output=True, text=True)


# ---------------------------------------------------------------------- classes


def test_short_name_ignores_replaced_classes(monkeypatch):
    """A notebook cell that defines the class may have run twice."""
    module = types.ModuleType("redefined")
    monkeypatch.setitem(sys.modules, "redefined", module)
    definition = "import lumen\nclass Redefined(lumen.TaskModule):\n    def training_step(self, batch): ..."
    kept = []
    for _ in range(2):  # like a notebook cell that runs twice
        exec(definition, vars(module))
        kept.append(module.Redefined)
    assert find_class("Redefined", [lumen.TaskModule]) is kept[1] is not kept[0]


def test_class_arguments_are_settings():
    made = call_cli("fit", "--model.lr", "0.5", "--data.samples", "8", "--model.noise.scale", "2")
    assert (type(made.model), type(made.datamodule), type(made.trainer)) == (Line, Points, lumen.Trainer)
    assert (made.model.hparams.lr, made.model.noise.scale, made.datamodule.hparams.samples) == (0.5, 2.0, 8)
    assert made.trainer.global_step == 2
    # required, and linked from the data as in `lumen fit`
    assert (made.model.width, read_saved_config()["model"]["width"]) == (3, 3)
    assert read_saved_config()["model"]["lr"] == 0.5
    assert made.subcommand == "fit"
    assert made.config.fit.model.lr == made.config["fit"]["model"]["lr"] == 0.5


def test_saved_config_repeats_the_run():
    first = call_cli("fit", "--model.lr", "0.5").model
    second = lumen.CLI(Line, Points, args=["fit", "--config", "runs/line/config.yaml"]).model
    assert torch.equal(first.layer.weight, second.layer.weight)
    assert Path("runs/line-2/config.yaml").is_file()
    # read by every other command, and by `--ckpt_path` alone
    assert lumen.CLI(Line, Points, args=["validate", "--ckpt_path", "runs/line"]).model.hparams.lr == 0.5


def test_script_reads_configs_of_lumen_fit(print_config):
    Path("whole.yaml").write_text(
        "model: {class_path: tests.helpers.cli_tasks.Line, init_args: {lr: 0.25}}\n"
        "data: {class_path: tests.helpers.cli_tasks.Points}\n"
    )
    assert print_config(call_cli, "fit", "--config", "whole.yaml")["model"]["lr"] == 0.25


def test_another_class_than_the_scripts_is_refused():
    assert catch_error("--model", "tests.helpers.cli_tasks.Slope") == (
        "model (the command line): the script sets the class Line, found tests.helpers.cli_tasks.Slope. "
        "Leave class_path out."
    )


def test_subclass_mode_accepts_derived_classes():
    words = ["--model", "tests.helpers.cli_tasks.Slope", "--model.steepness", "3", "--data", "Points"]
    made = call_cli("fit", *words, subclass_mode_model=True, subclass_mode_data=True)
    assert type(made.model) is Slope
    assert read_saved_config()["model"]["class_path"] == "tests.helpers.cli_tasks.Slope"
    assert read_saved_config()["model"]["init_args"]["steepness"] == 3.0
    assert "is not a subclass of Line" in catch_error(
        "--model", "lumen.TaskModule", "--data", "Points", subclass_mode_model=True
    )


def test_without_classes_any_may_be_named():
    words = ["fit", *QUIET, "--model", "tests.helpers.cli_tasks.Slope", "--data", "tests.helpers.cli_tasks.Points"]
    assert type(lumen.CLI(args=words).model) is Slope
    assert type(lumen.CLI(Line, args=["fit", *QUIET, *words[-2:]]).datamodule) is Points


# ---------------------------------------------------------------------- a script's own options


class Linked(lumen.CLI):
    """Command line from the documentation of LightningCLI."""

    def add_arguments_to_parser(self, parser):
        parser.add_argument("--note", default="none", help="What this run is for.")
        parser.add_argument("--tries", type=int, default=1)
        parser.add_lightning_class_args(lumen.Timer, "timer")
        parser.set_defaults({"timer.duration": "00:01:00:00", "trainer.max_steps": 9, "model.lr": 0.125})
        parser.link_arguments("data.batch_size", "model.label", compute_fn=lambda size: f"of {size}")
        parser.link_arguments("data.width", "model.width", apply_on="instantiate")


@pytest.fixture
def print_config(capsys):
    """Return the settings that a script prints."""

    def run(make, *words, **options):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            make(*words, "--print_config", **options)
        assert not ended.value.code
        return yaml.safe_load(capsys.readouterr().out)

    return run


def test_arguments_can_be_linked_added_and_defaulted():
    made = Linked(Line, Points, args=["fit", "--trainer.max_steps", "1", "--data.batch_size", "6", "--note", "a: b"])
    assert (made.model.hparams.label, made.model.width, made.model.hparams.lr) == ("of 6", 3, 0.125)
    assert (made.config.fit.note, made.config.fit.tries) == ("a: b", 1)
    (timer,) = [each for each in made.trainer.callbacks if isinstance(each, lumen.Timer)]
    assert made.config_init.fit.timer is timer
    kept = read_saved_config("runs/line")
    assert (kept["note"], kept["timer"]["duration"], kept["trainer"]["max_steps"]) == ("a: b", "00:01:00:00", 1)
    assert kept["model"].keys().isdisjoint({"width", "label"})  # linked a second time
    again = Linked(Line, Points, args=["fit", "--config", "runs/line/config.yaml"])
    assert (again.model.hparams.label, again.config.fit.note) == ("of 6", "a: b")


def test_links_and_defaults_apply_to_configured_classes():
    words = ["fit", "--trainer.max_steps=1", "--model=tests.helpers.cli_tasks.Line", "--data=Points"]
    made = Linked(args=[*words, "--data.batch_size=6"])
    assert (made.model.hparams.label, made.model.width, made.model.hparams.lr) == ("of 6", 3, 0.125)
    assert read_saved_config("runs/line")["model"]["init_args"].keys().isdisjoint({"width", "label"})


def test_files_and_environment_override_script_defaults(print_config, monkeypatch):
    monkeypatch.setenv("LUMEN_FIT__TRAINER__MAX_STEPS", "5")

    def make(*words):
        return Linked(Line, Points, args=["fit", *words])

    assert print_config(make)["trainer"]["max_steps"] == 5
    assert print_config(make, *QUIET)["trainer"]["max_steps"] == 2
    monkeypatch.delenv("LUMEN_FIT__TRAINER__MAX_STEPS")
    assert print_config(make)["trainer"]["max_steps"] == 9


def test_skip_default_omits_what_the_script_sets(capsys):
    def left(*words):
        capsys.readouterr()
        with pytest.raises(SystemExit):
            Linked(Line, Points, args=["fit", "--print_config=skip_default", *words])
        return yaml.safe_load(capsys.readouterr().out)

    assert left() == {}
    assert left("--trainer.max_steps=null", "--model.lr=0.01", "--tries=3") == {
        "trainer": {"max_steps": None}, "model": {"lr": 0.01}, "tries": 3,
    }  # fmt: skip


def test_a_linked_argument_is_no_setting():
    assert catch_error("--model.label", "mine", kind=Linked) == (
        "model.label (the command line): Lumen takes label from data.batch_size. Leave label out."
    )


def test_errors_include_arguments_added_by_script():
    said = catch_error("--tries", "two", "--timer.duratoin", "3", "--model.lr", "high", "--note2", "x", kind=Linked)
    assert "tries (the command line): expected int, found 'two'." in said
    assert "timer.duratoin (the command line): Timer has no option duratoin. Did you mean duration?" in said
    assert "model.lr (the command line): expected float, found 'high'." in said
    assert "has no option note2. Did you mean --note?" in said
    assert len(said.splitlines()) == 4


class Nested(lumen.CLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--sizes.small", type=int, default=3)
        parser.add_class_arguments(lumen.ModelCheckpoint, "saver")
        parser.add_subclass_arguments(lumen.Callback, "extra")
        parser.set_defaults({"sizes.small": 4, "model": {"lr": 0.25}, "trainer.max_steps": 1})


def test_added_arguments_may_be_nested_and_name_classes():
    made = Nested(Line, Points, args=["fit", "--extra=Timer", "--extra.duration=00:00:01:00"])
    assert (made.config.fit.sizes.small, made.model.hparams.lr) == (4, 0.25)
    assert type(made.config_init.fit.extra) is lumen.Timer
    assert made.config_init.fit.saver not in made.trainer.callbacks  # add_lightning_class_args puts the argument there
    said = catch_error("--sizes.small=few", "--extra=Tmer", "--saver.mode=mean", kind=Nested)
    assert "sizes.small (the command line): expected int, found 'few'." in said
    assert "extra (the command line): lumen has no class Tmer. Did you mean Timer?" in said
    assert "saver.mode (the command line): expected one of min, max" in said
    assert len(said.splitlines()) == 3


def test_invalid_script_defaults_are_reported_as_such():
    said = catch_error(trainer_defaults={"gpus": 2, "max_steps": "many", "precision": "fp17"}, args=["fit"])
    assert "trainer.gpus (the script): Trainer has no option gpus. Use accelerator and devices." in said
    assert "trainer.precision (the script): " in said
    assert "trainer.max_steps (the script): expected int, found 'many'." in said


def test_script_help_has_its_arguments_and_name(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    for words in (["fit", "--help"], ["fit", "--model.help"]):
        with pytest.raises(SystemExit) as ended:
            Linked(Line, Points, args=words)
        out = capsys.readouterr().out
        assert ended.value.code == 0
        assert "train.py fit --config FILE" in out
        for option in ("--note", "What this run is for.", "--timer.duration", "--model.lr", "default: 0.125"):
            assert option in out
        assert "--model.width WIDTH" not in out
    with pytest.raises(SystemExit) as ended:
        Linked(Line, Points, args=[])
    assert not ended.value.code
    assert "train.py COMMAND --config FILE" in capsys.readouterr().out


class Wrong(lumen.CLI):
    def add_arguments_to_parser(self, parser):
        parser.link_arguments("data.batchsize", "model.label")


def test_invalid_link_is_an_error():
    assert catch_error(kind=Wrong).startswith("link_arguments('data.batchsize', 'model.label'): No action for key")


class Optimized(lumen.CLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.AdamW)
        parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
        parser.set_defaults({"optimizer.lr": 0.5, "lr_scheduler.gamma": 0.5})


def test_script_sets_optimizer_and_settings_its_arguments():
    made = Optimized(Line, Points, args=["fit", *QUIET, "--optimizer.weight_decay", "0.25", "--trainer.max_steps=4"])
    (optimizer,) = made.trainer.optimizers
    group = optimizer.param_groups[0]
    assert (type(optimizer), group["lr"], group["weight_decay"]) == (torch.optim.AdamW, 0.25, 0.25)
    made = Optimized(Line, Points, args=["fit", *QUIET, "--optimizer", "SGD", "--optimizer.lr", "1"])
    assert type(made.trainer.optimizers[0]) is torch.optim.SGD


def test_without_automatic_optimizers_there_is_no_such_setting():
    said = catch_error("--optimizer", "SGD", auto_configure_optimizers=False)
    assert "has no option optimizer" in said
    assert type(call_cli("fit", auto_configure_optimizers=False).trainer.optimizers[0]) is torch.optim.SGD


class Two(lumen.CLI):
    def add_arguments_to_parser(self, parser):
        parser.add_optimizer_args(torch.optim.AdamW, nested_key="generator", link_to="model.generator")


class Stepping(lumen.CLI):
    @staticmethod
    def configure_optimizers(lightning_module, optimizer, lr_scheduler=None):
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}


def test_script_combines_optimizer_and_scheduler_of_settings():
    words = [*QUIET, "--optimizer=SGD", "--optimizer.lr=1", "--lr_scheduler=ExponentialLR", "--lr_scheduler.gamma=0.5"]
    made = Stepping(Line, Points, args=["fit", *words])
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == 0.25
    assert "decides the interval" in catch_error(*words[4:], "--lr_schedule.frequency=2", kind=Stepping)
    built = lumen.CLI(Line, Points, run=False, args=words)
    built.config["model"]["lr"] = 0.5
    built.instantiate_classes()
    built.trainer.fit(built.model, built.datamodule)
    assert (built.model.hparams.lr, built.trainer.optimizers[0].param_groups[0]["lr"]) == (0.5, 1.0)


class Flagged(lumen.CLI):
    def add_arguments_to_parser(self, parser):
        parser.add_argument("--loud", action="store_true")
        parser.add_lightning_class_args(lumen.Callback, "extra", subclass_mode=True, required=False)
        parser.add_lightning_class_args(lumen.Callback, "other", subclass_mode=True, required=False)


def test_switches_and_optional_classes_of_a_script():
    made = Flagged(Line, Points, args=["fit", *QUIET, "--loud", "--extra=Timer"])
    assert made.config.fit.loud is True
    assert lumen.Timer in map(type, made.trainer.callbacks)
    assert Flagged(Line, Points, args=QUIET, run=False).config.loud is False
    with pytest.raises(ConfigError, match="Write type=bool, default=True"):
        made.parser.add_argument("--quiet", action="store_false")


def test_several_optimizers_belong_into_the_task():
    assert catch_error(kind=Two) == (
        "add_optimizer_args('generator'): Lumen configures a single optimizer, named optimizer. Return "
        "several from configure_optimizers of the task."
    )


# ---------------------------------------------------------------------- hooks and the trainer


class Noting(lumen.CLI):
    noted = ()

    def before_instantiate_classes(self):
        self.noted = [("classes", hasattr(self, "model"))]
        self.config[self.subcommand].model.lr = 0.75

    def instantiate_trainer(self, **given):
        return super().instantiate_trainer(log_every_n_steps=1, **given)

    def before_fit(self):
        self.noted.append(("before", self.trainer.plan.max_steps, self.model.hparams.lr))

    def after_fit(self):
        self.noted.append(("after", self.trainer.global_step, self.trainer.plan.log_every_n_steps))

    def after_validate(self):
        self.noted.append(("validated", set(self.trainer.callback_metrics)))


def test_hooks_are_called_around_what_is_run():
    assert Noting(Line, Points, args=["fit", *QUIET]).noted == [
        ("classes", False),
        ("before", 2, 0.75),
        ("after", 2, 1),
    ]
    assert read_saved_config()["model"]["lr"] == 0.75
    assert Noting(Line, Points, args=["validate", *QUIET]).noted[1:] == [("validated", {"val_loss"})]


class Misspelt(lumen.CLI):
    def parse_arguments(self, parser, args):
        pass

    def before_fti(self):
        pass


def test_a_method_that_nothing_calls_is_an_error():
    assert catch_error(kind=Misspelt) == (
        "Misspelt.parse_arguments: Lumen does not call this method. Use before_instantiate_classes, where "
        "the settings are self.config.\nMisspelt.before_fti: Lumen does not call this method. Did you mean before_fit?"
    )


def test_trainer_defaults_may_be_settings_or_objects():
    logger = lumen.CSVLogger()
    defaults = {"log_every_n_steps": 1, "logger": logger, "callbacks": [Spy()], "max_steps": 8}
    made = call_cli("fit", "--trainer.callbacks+=lumen.LearningRateMonitor", trainer_defaults=defaults)
    assert (made.trainer.plan.log_every_n_steps, made.trainer.plan.max_steps) == (1, 2)
    assert logger in made.trainer.loggers
    assert {Spy, lumen.LearningRateMonitor} <= {type(each) for each in made.trainer.callbacks}
    without = call_cli("fit", "--trainer.logger=false", trainer_defaults=defaults)
    assert without.trainer.loggers == []


class Defaults(lumen.CLI):
    """Command line with defaults of its own."""

    def add_arguments_to_parser(self, parser):
        parser.set_defaults({"trainer.max_steps": 3, "seed_everything": 7})


def test_set_defaults_override_the_arguments_of_cli():
    options = {"trainer_defaults": {"max_steps": 2}, "seed_everything_default": 1}
    made = Defaults(Line, Points, args=["fit", "--trainer.enable_progress_bar=false"], **options)
    assert made.trainer.global_step == 3
    assert read_saved_config()["seed_everything"] == 7


class Mine(lumen.Trainer):
    """Trainer of a script with another argument."""

    def __init__(self, room: str = "here", **settings: Any):
        super().__init__(**settings)
        self.room = room


def test_trainer_class_can_be_replaced():
    made = call_cli("fit", "--trainer.room", "there", trainer_class=Mine)
    assert (type(made.trainer), made.trainer.room, made.trainer.plan.max_steps) == (Mine, "there", 2)


def test_seeds_of_scripts():
    assert call_cli("fit").trainer.seed == 7
    words = ["fit", *QUIET[:2]]
    assert lumen.CLI(Line, Points, args=words, seed_everything_default=11).trainer.seed == 11
    assert isinstance(lumen.CLI(Line, Points, args=words, seed_everything_default=True).trainer.seed, int)
    drawn = lumen.CLI(Line, Points, args=[*words, "--seed_everything=false"], seed_everything_default=False)
    assert isinstance(drawn.config.fit.seed_everything, int)
    assert read_saved_config(drawn.trainer.run_directory)["seed_everything"] == drawn.trainer.seed


class Keeping(lumen.SaveConfigCallback):
    def __init__(self, *args, note="", **kwargs):
        super().__init__(*args, **kwargs)
        self.note, self.kept = note, []

    def save_config(self, trainer, pl_module, stage):
        config = self.parser.dump(self.config, skip_none=False)
        trainer.logger.log_hyperparams({"config": config})
        self.kept.append((stage, self.note, config, self.config.model.lr))
        self.parser.save(self.config, "mine.yaml", skip_none=False, overwrite=self.overwrite, multifile=self.multifile)


def test_save_config_callback_may_log_the_settings():
    options = {"save_config_callback": Keeping, "trainer_defaults": {"logger": lumen.CSVLogger()}}
    made = call_cli("fit", save_config_kwargs={"overwrite": True, "note": "x"}, **options)
    ((stage, note, text, lr),) = made.trainer.callbacks[0].kept
    assert (stage, note, lr, yaml.safe_load(text)["seed_everything"]) == ("fit", "x", 0.01, 7)
    assert yaml.safe_load(text)["model"] == read_saved_config()["model"]
    again = lumen.CLI(Line, Points, args=["fit", "--config", "mine.yaml"]).model
    assert torch.equal(again.layer.weight, made.model.layer.weight)
    made = call_cli("test", save_config_kwargs={"overwrite": True}, **options)
    assert [kept[0] for kept in made.trainer.callbacks[0].kept] == ["test"]
    with pytest.raises(FileExistsError, match=r"mine\.yaml exists"):
        call_cli("fit", save_config_kwargs={"save_to_log_dir": False}, **options)
    assert not Path("runs/line-3/config.yaml").exists()


def test_save_config_callback_can_be_disabled():
    call_cli("fit", save_config_callback=None)
    assert Path("runs/line").exists()
    assert not Path("runs/line/config.yaml").exists()
    assert "reads the settings of a run from config.yaml" in catch_error(
        save_config_kwargs={"config_filename": "x.yaml"}
    )


class Dumping(lumen.CLI):
    def before_instantiate_classes(self):
        self.record = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
        self.save_config_callback = None

    def after_instantiate_classes(self):
        self.model.seen = self.trainer_defaults


def test_hooks_read_settings_and_arguments_of_the_class():
    made = Dumping(Line, Points, args=["fit", *QUIET], trainer_defaults={"max_steps": 1})
    assert (made.record["fit"]["model"]["lr"], made.record["fit"]["trainer"]["max_epochs"]) == (0.01, None)
    assert made.model.seen == {"max_steps": 1}
    assert not Path("runs/line/config.yaml").exists()
    assert made._get(made.config_init, "model") is made.config_init.fit.model is made.model
    with pytest.raises(AttributeError, match=r"Write yaml\.safe_load"):
        made.config_dump  # noqa: B018


def test_secrets_are_masked_in_dumped_settings():
    class Secret(Line):
        def __init__(self, width: int, api_key: str = "abc"):
            super().__init__(width)

    made = lumen.CLI(Secret, Points, args=QUIET, run=False)
    assert yaml.safe_load(made.parser.dump(made.config))["model"]["api_key"] == "<masked>"


class Trainable(lumen.Trainer):
    def fit_twice(self, model, datamodule=None, times: int = 2, quiet: bool = False):
        """Train several times."""
        self.lengths = [self.fit(model, datamodule) or self.global_step for _ in range(times)]


class Commands(lumen.CLI):
    called = ()

    @staticmethod
    def subcommands():
        return {"fit": lumen.CLI.subcommands()["fit"], "fit_twice": {"model", "datamodule"}, "show": {"model"}}

    def before_fit_twice(self):
        self.called = (*self.called, "before")

    def fit(self, model, datamodule):
        self.called = (*self.called, type(model.configure_optimizers()).__name__)

    def show(self, model, **options):
        self.called = (*self.called, sorted(options))


def test_script_adds_and_removes_commands(capsys):
    assert lumen.CLI.subcommands() == LightningCLI.subcommands()
    made = Commands(Line, Points, args=["fit_twice", *QUIET, "--times=3", "--quiet"], trainer_class=Trainable)
    assert (made.trainer.lengths, made.called, made.config.fit_twice.quiet) == ([2, 2, 2], ("before",), True)
    for command, called in (("fit", "tuple"), ("show", ["datamodule"])):
        words = [command, *QUIET, *["--optimizer=SGD"] * (command == "fit"), *["--optimizer.lr=1"] * (command == "fit")]
        assert Commands(Line, Points, args=words, trainer_class=Trainable).called == (called,)
    with pytest.raises(ConfigError, match="has no command test"):
        Commands(Line, Points, args=["test"], trainer_class=Trainable)
    with pytest.raises(SystemExit):
        Commands(Line, Points, args=["--help"], trainer_class=Trainable)
    assert "fit_twice  Train several times." in capsys.readouterr().out
    assert "Trainer has no method fit_twice" in catch_error(kind=Commands)


def test_default_config_files_have_lowest_priority():
    Path("own.yaml").write_text("model: {lr: 0.5, widths: [7]}")
    Path("mine.yaml").write_text("model: {lr: 0.25}")
    for files in ({"default_config_files": ["own.yaml", "none.yaml"]}, {"fit": {"default_config_files": ["own.yaml"]}}):
        made = call_cli("fit", "--config", "mine.yaml", parser_kwargs={**files, "parser_mode": "omegaconf"})
        assert (made.model.hparams.lr, made.model.hparams.widths) == (0.25, (7,))
    Path("both.yaml").write_text("fit:\n  model: {lr: 0.5, widths: [7]}\ntest:\n  model: {lr: 9}\n")
    assert call_cli("fit", parser_kwargs={"default_config_files": ["both.yaml"]}).model.hparams.widths == (7,)
    words = ["--config", "both.yaml", "fit", *QUIET, "--model.lr=2"]
    assert lumen.CLI(Line, Points, args=words).model.hparams == {"lr": 2.0, "width": 3, "widths": (7,), "label": None}
    assert "found env_prefix='MY'" in catch_error(parser_kwargs={"env_prefix": "MY"})


def test_unsupported_lightning_argument_names_its_replacement():
    with pytest.raises(ConfigError, match="CLI has no argument parser_class"):
        lumen.CLI(Line, parser_class=object, args=["fit"])


# ---------------------------------------------------------------------- run=False, arguments of other programs


def test_run_false_builds_without_fitting():
    words = ["--config", "line.yaml", "--seed_everything=7", "--optimizer=AdamW", "--optimizer.lr=0.5"]
    made = lumen.CLI(Line, Points, run=False, args=words)
    assert (made.subcommand, made.config.optimizer.init_args.lr) == (None, 0.5)
    assert not Path("runs").exists()
    made.trainer.fit(made.model, datamodule=made.datamodule)
    assert type(made.trainer.optimizers[0]) is torch.optim.AdamW
    assert (read_saved_config()["optimizer"]["init_args"]["lr"], read_saved_config()["seed_everything"]) == (0.5, 7)
    told = lumen.CLI(Line, Points, args=["fit", *words])
    assert torch.equal(told.model.layer.weight, made.model.layer.weight)


def test_run_false_reads_environment_without_subcommand(monkeypatch):
    monkeypatch.setenv("LUMEN_MODEL__LR", "0.5")
    monkeypatch.setenv("LUMEN_FIT__MODEL__LR", "0.25")
    assert lumen.CLI(Line, Points, run=False, args=[]).model.hparams.lr == 0.5


def test_arguments_may_be_settings():
    given = {"model": {"lr": 0.5}, "trainer": {"fast_dev_run": True}}
    assert lumen.CLI(Line, Points, run=False, args=given).model.hparams.lr == 0.5
    made = lumen.CLI(Line, Points, args={"subcommand": "fit", "fit": given})
    assert (made.model.hparams.lr, made.trainer.global_step) == (0.5, 1)
    with pytest.raises(ConfigError, match=r"model.lrr \(the arguments\): Line has no option lrr"):
        lumen.CLI(Line, Points, run=False, args={"model": {"lrr": 1}})


@pytest.mark.parametrize("run", [True, False])
def test_lightning_environment_variables_raise(monkeypatch, run):
    middle = "FIT__" if run else ""
    monkeypatch.setenv(f"PL_{middle}TRAINER__MAX_STEPS", "3")
    monkeypatch.setenv("PL_GLOBAL_SEED", "3")  # Lightning sets this argument itself
    with pytest.raises(ConfigError) as error:
        lumen.CLI(Line, Points, args=["fit"] if run else [], run=run)
    assert str(error.value) == (
        f"Lumen does not read the environment variable PL_{middle}TRAINER__MAX_STEPS. Set "
        f"LUMEN_{middle}TRAINER__MAX_STEPS instead, or unset PL_{middle}TRAINER__MAX_STEPS."
    )


# ---------------------------------------------------------------------- scripts


def test_script_needs_one_line_and_errors_are_one():
    done = run_script("lumen.CLI(Mine, Points)\nprint('goes on')\n", "fit", *QUIET)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "goes on\n"
    assert read_saved_config()["model"]["width"] == 3
    done = run_script("lumen.CLI(Mine, Points)\nprint('goes on')\n", "fit", "--model.lrr", "3")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("error: model.lrr (the command line): Mine has no option lrr. Did you mean lr?\n")


@pytest.mark.slow
def test_a_scripts_processes_run_the_script():
    text = "cli = lumen.CLI(Mine, Points, subclass_mode_model=True)\nprint(cli.trainer.world_size, cli.model.width)\n"
    words = ["fit", *QUIET, "--trainer.accelerator=cpu", "--model", "Mineral"]
    done = run_script(text, *words, "--trainer.devices=2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 3"
    assert read_saved_config()["model"]["class_path"] == "__main__.Mineral"
    assert read_saved_config()["trainer"]["devices"] == 2
