"""`lumen.CLI`: the command line of a user's own script, and `lumen fit`, `validate`, `test` and `predict`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final

import yaml
from jsonargparse import Namespace, set_dumper, set_loader

from lumen.callbacks import Callback
from lumen.cli import print_error, strip_launcher_words
from lumen.cli.building import (
    build_objects,
    choose_seed,
    explain_missing_paths,
    is_plain_data,
    record_hyperparameters,
    take_from_data,
)
from lumen.cli.command_words import (
    HelpShown,
    find_default_files,
    get_script_command,
    list_summaries,
    read_words,
    refuse_lightning_cli_methods,
)
from lumen.cli.commands import LOOP_EXAMPLES, LOOPS
from lumen.cli.config_checks import SettingsChecker
from lumen.cli.config_layers import Settings, Tree, as_list
from lumen.cli.help import show_help
from lumen.cli.interpolation import resolve_references
from lumen.cli.optimization import configure_optimizers
from lumen.cli.options import CommandOptions, OptionParser
from lumen.cli.outputs import SaveConfigCallback, check_output, show_metrics, show_predictions, write_results
from lumen.cli.yaml_text import dump_yaml, load_yaml
from lumen.console import stdout
from lumen.distributed.launch import launch, relaunch
from lumen.distributed.processes import Processes
from lumen.distributed.restarts import needs_launcher
from lumen.errors import ConfigError, LumenError
from lumen.errors.arguments import LightningAttributeErrors, check_arguments, expand_path
from lumen.errors.lightning_names import ATTRIBUTES_OF_CLI, INSTEAD_IN_CLI
from lumen.random import seed_for_building
from lumen.strategies.factory import choose_device, choose_processes
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.logs import LogSettings, log_to_console
from lumen.trainer.trainer import Trainer

set_loader("yaml", load_yaml, (yaml.YAMLError,))
set_dumper("yaml", dump_yaml)  # jsonargparse reads what it has dumped, so both must quote and unquote alike


class CLI(LightningAttributeErrors):
    """Command line of a script: reads the settings, builds data, model and trainer from them, and runs a loop.

    `CLI(MyTask, MyData)` is a complete `train.py`: `python train.py fit --config mine.yaml --model.width 3`. The script
    has the commands `fit`, `validate`, `test` and `predict` of `lumen`, with the same settings, checks and errors. To
    add settings, derive a class and define `add_arguments_to_parser`. The loops are surrounded by calls of
    `before_fit`, `after_fit`, `before_validate` and so on, if the class defines them. A method `fit` of the class runs
    in place of the trainer's. A static method `configure_optimizers(lightning_module, optimizer, lr_scheduler=None)` of
    the class returns what a task's `configure_optimizers` returns, from the objects of the settings.

    Args:
        model_class: The task class. Default: any class, which the settings name as `model.class_path`.
        datamodule_class: The data module class. Default: any class or none; the settings name the class as
            `data.class_path`.
        save_config_callback: The callback class that saves the settings. None saves nothing. Default: Lumen writes the
            settings to `config.yaml` in the run directory.
        save_config_kwargs: Further arguments of `save_config_callback`.
        trainer_class: The class built from the settings of `trainer`.
        trainer_defaults: Default settings of `trainer`, which all other settings override. An object, such as a logger,
            is used if the settings have none; callbacks are always added.
        seed_everything_default: The seed if the settings have none; True, False or None: Lumen draws and records a
            seed.
        parser_kwargs: `{"default_config_files": [...]}`: config files that `--config` overrides, if they exist. They
            apply to all commands, or to one command as `{"fit": {...}}`.
        subclass_mode_model: True if the settings may name a class derived from `model_class`.
        subclass_mode_data: True if the settings may name a class derived from `datamodule_class`.
        args: The command-line arguments, or the settings as a dictionary or namespace. Default: the arguments of the
            process; an error then prints a message and exits with a code instead of raising an exception.
        run: False to parse no command and run no loop: use `cli.trainer`, `cli.model` and `cli.datamodule`.
        auto_configure_optimizers: True if the settings may have `optimizer` and `lr_scheduler`.

    Attributes:
        subcommand: The command: fit, validate, test, predict or a command of the script; None with `run=False`.
        parser: The parser of all options.
        config: The settings; with a command, its settings are in `config[subcommand]`.
        config_init: The settings in the same form as `config`, with objects built from them.
        model: The task, after it is built.
        datamodule: The data module, or None.
        trainer: The trainer, which keeps the results of the run.

    Raises:
        ConfigError: The settings are wrong; the message lists all errors.
        SystemExit: The options include `--help` or `--print_config`, or an error occurred and `args` is not given.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = INSTEAD_IN_CLI
    ATTRIBUTES = ATTRIBUTES_OF_CLI
    #: A static method of a subclass, which combines the objects of the settings; see above.
    configure_optimizers: ClassVar[Any] = None
    _runs_elsewhere = False  # True: ignore which devices this machine has
    _program: str | None = None  # first word of the command line; None: the name of the script

    @check_arguments
    def __init__(
        self,
        model_class: type[TaskModule] | None = None,
        datamodule_class: type[DataModule] | None = None,
        *,
        save_config_callback: type[Callback] | None = SaveConfigCallback,
        save_config_kwargs: dict[str, Any] | None = None,
        trainer_class: type[Trainer] = Trainer,
        trainer_defaults: dict[str, Any] | None = None,
        seed_everything_default: int | bool | None = None,
        parser_kwargs: dict[str, Any] | None = None,
        subclass_mode_model: bool = False,
        subclass_mode_data: bool = False,
        args: list[str] | dict[str, Any] | Namespace | None = None,
        run: bool = True,
        auto_configure_optimizers: bool = True,
    ) -> None:
        self._commands = list_summaries(self.subcommands(), type(self), trainer_class)
        refuse_lightning_cli_methods(type(self), self._commands)
        self.save_config_callback, self.save_config_kwargs = save_config_callback, save_config_kwargs or {}
        self.trainer_class, self.trainer_defaults = trainer_class, trainer_defaults or {}
        self.model_class, self.datamodule_class = model_class, datamodule_class
        self.subclass_mode_model, self.subclass_mode_data = subclass_mode_model, subclass_mode_data
        self.seed_everything_default, self.parser_kwargs = seed_everything_default, parser_kwargs or {}
        self.auto_configure_optimizers = auto_configure_optimizers
        self._command_options = CommandOptions(
            model_class or TaskModule,
            datamodule_class or DataModule,
            fixed_model=model_class is not None and not subclass_mode_model,
            fixed_data=datamodule_class is not None and not subclass_mode_data,
            optimizers=auto_configure_optimizers,
            trainer=trainer_class,
        )
        defaults = {name: value for name, value in self.trainer_defaults.items() if is_plain_data(value)}
        self._script: Tree = {"trainer": defaults} if defaults else {}
        if type(seed_everything_default) is int:
            self._script["seed_everything"] = seed_everything_default
        self._reads_words = args is None
        self._links: list[str] = []
        self.subcommand: str | None = None
        with _report_lumen_errors() if args is None else nullcontext():
            args = args.as_dict() if isinstance(args, Namespace) else args
            self._read_settings(strip_launcher_words(sys.argv[1:]) if args is None else args, run=run)
            with explain_missing_paths(self._command_words.files):
                self._build_and_run()

    # ------------------------------------------------------------------ what a script may define

    def add_arguments_to_parser(self, parser: OptionParser) -> None:
        """Add the script's own options, link arguments to others, and set defaults.

        Args:
            parser: A parser of jsonargparse: `parser.add_argument("--note", default="")`, `parser.link_arguments(
                "data.classes", "model.classes", apply_on="instantiate")`, `parser.set_defaults({"trainer.max_epochs":
                5})`, `parser.add_lightning_class_args(EarlyStopping, "stopping")`.
        """

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Return the commands: names of methods of the trainer, each with its arguments that are no options.

        A class may return fewer commands, or add methods of its `trainer_class`, whose other arguments are options.
        """
        evaluation = {"model", "dataloaders", "datamodule"}
        training = {"model", "train_dataloaders", "val_dataloaders", "datamodule"}
        return {"fit": training, **{name: {*evaluation} for name in ("validate", "test", "predict")}}

    def before_instantiate_classes(self) -> None:
        """Read or change `config` before anything is built."""

    def instantiate_classes(self) -> None:
        """Build `datamodule`, `model` and `trainer` from `config`."""
        settings = self._get_command_settings(self.config)
        built = build_objects(self.parser, settings)
        self.config_init = built if self.subcommand is None else Namespace(**{self.subcommand: built})  # type: ignore[no-untyped-call]
        self.model, self.datamodule = built.model, built.get("data")
        self._configure = None
        if settings.get("optimizer"):
            self._configure = partial(configure_optimizers, settings, self.model, self.configure_optimizers)
            if self.subcommand is None or self._has_own_command():
                self.model.configure_optimizers = self._configure
        self.trainer = self.instantiate_trainer()
        if self.save_config_callback is not None and not settings.trainer.fast_dev_run:
            saver = self.save_config_callback(self.parser, settings, **self.save_config_kwargs)  # type: ignore[call-arg]
            self.trainer.callbacks.insert(0, saver)

    def after_instantiate_classes(self) -> None:
        """Read or change `datamodule`, `model` and `trainer` before the command runs."""

    def instantiate_trainer(self, **overrides: Any) -> Trainer:
        """Build the trainer.

        Args:
            overrides: Arguments that override the settings.
        """
        built = self._get_command_settings(self.config_init)
        added = [built[key] for key in self.parser.callback_keys]
        arguments = {**built.trainer.as_dict(), **overrides}
        defaults = self.parser.get_defaults().trainer
        for name, value in self.trainer_defaults.items():
            if name == "callbacks" and not is_plain_data(value):
                added += as_list(value)
            elif not is_plain_data(value) and arguments.get(name) == defaults.get(name):
                arguments[name] = value
        if any(each is not None for each in added):
            arguments["callbacks"] = [*as_list(arguments.get("callbacks")), *as_list(added)]
        return self.trainer_class(**arguments)

    # ------------------------------------------------------------------ reading

    def _read_settings(self, args: list[str] | Mapping[str, Any], *, run: bool) -> None:
        """Parse the command and the settings, and check all settings."""
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        self._command_words = parsed = read_words(args, self._program_word, self._commands if run else None)
        self.subcommand = parsed.command
        self.parser = self._make_parser()
        settings = Settings(
            self.subcommand,
            self.parser.list_sections(),
            self.parser.classes,
            commands=self._commands,
            files=[*find_default_files(self.parser_kwargs, parsed.command, self._commands), *parsed.files],
            words=parsed.settings,
            script=self.parser.script,
            arguments=parsed.arguments,
        )
        if parsed.help:
            show_help(self.parser, settings, parsed.help)
            raise HelpShown
        if parsed.files and not settings.tree["trainer"].get("name"):
            settings.tree["trainer"]["name"] = _find_logger_name(settings.tree["trainer"]) or Path(parsed.files[0]).stem
        references = resolve_references(settings)
        if isinstance(several := settings.tree.get("lr_scheduler"), list):
            self.parser = self._make_parser(len(several))
        self.parser.references = references
        config = self._check_settings(settings)
        self.config = config if self.subcommand is None else Namespace(**{self.subcommand: config})  # type: ignore[no-untyped-call]
        if self.subcommand is not None:
            self.config.subcommand = self.subcommand
        if parsed.omitted_values is not None:
            record = self._make_config_record(skip_unset="unset" in parsed.omitted_values, of_call=True)
            if "default" in parsed.omitted_values:
                record = self.parser.drop_defaults(record)
            print(dump_yaml(record), end="", file=stdout)
            raise HelpShown

    def _check_settings(self, settings: Settings) -> Namespace:
        check = SettingsChecker(settings, self.parser, elsewhere=self._runs_elsewhere)
        self._links, inside = check.links, "" if "model" in self.parser.fixed else "init_args."
        for name in check.links:
            self.parser.link_arguments(
                "data", f"model.{inside}{name}", partial(take_from_data, name), apply_on="instantiate"
            )
        config = check.parse()
        if not config.get("optimizer") and self._command_options.optimizers and any(
            value is not None for value in (config.lookahead.k, *vars(config.parameter_groups).values())
        ):  # fmt: skip
            raise ConfigError("lookahead and parameter_groups need an optimizer. Set optimizer too.")
        return config

    def _make_parser(self, schedulers: int | None = None) -> OptionParser:
        """Return a parser with all options of the command.

        Args:
            schedulers: The number of learning-rate schedulers in a list; None if the settings have at most one, not in
                a list.
        """
        command, program = self.subcommand, self._program_word
        words = [program] if command is None else [program, command]
        variable = "_".join(["LUMEN", *([f"{command.upper()}_"] if command else []), "TRAINER__MAX_STEPS=9"])
        order = f"Precedence, highest first: command line, config files (later files first), environment ({variable})."
        parser = OptionParser(
            prog=program,
            usage=f"{' '.join(words)} --config FILE [--KEY VALUE ...]",
            description=f"{self._commands[command]} {order}".strip() if command else order,
            epilog=f"Example: {self._program or get_script_command(has_commands=False)} {command} "
            f"{LOOP_EXAMPLES[command]}"
            if command in LOOP_EXAMPLES
            else None,
            exit_on_error=False,
        )
        self._arguments = self._command_options.add_to(
            parser, command, schedulers, skip=self.subcommands()[command] if command else ()
        )
        parser.set_defaults(self._script)
        self.add_arguments_to_parser(parser)
        return parser

    @property
    def _program_word(self) -> str:
        return self._program or os.path.basename(sys.argv[0])

    def _get_fit_command(self) -> str:
        """Return the first words of a command that trains; empty if the script passes the arguments itself."""
        return get_script_command(has_commands=self.subcommand is not None) if self._reads_words else ""

    # ------------------------------------------------------------------ running

    def _get(self, config: Namespace, key: str, default: Any = None) -> Any:
        """Return a setting of the command, as the method of LightningCLI that scripts call."""
        return self._get_command_settings(config).get(key, default)

    def _get_command_settings(self, config: Namespace) -> Namespace:
        """Return the settings of the command."""
        return config if self.subcommand is None else config[self.subcommand]

    def _make_config_record(self, *, skip_unset: bool = False, of_call: bool = False) -> dict[str, Any]:
        """Return the settings of a run as plain data, from which `fit --config` repeats the run.

        Args:
            skip_unset: True to omit settings whose value is None.
            of_call: True to include `output`, `ckpt_path` and `average`, which apply to one call of the command.
        """
        record = self.parser.make_record(self._get_command_settings(self.config), skip_unset=skip_unset)
        once = {key: record.pop(key, None) for key in ("config", "output", "ckpt_path", "average")}
        return record | {key: value for key, value in once.items() if of_call and key != "config" and value is not None}

    def _build_and_run(self) -> None:
        command, config = self.subcommand, self._get_command_settings(self.config)
        if (output := config.get("output")) is not None:
            check_output(str(command), expand_path(output))
        self.before_instantiate_classes()
        processes = self._find_processes(config.trainer)
        max_restarts = config.trainer.max_restarts if command == "fit" and not config.trainer.fast_dev_run else 0
        if command is not None and needs_launcher(processes, max_restarts):
            self._start_workers(processes.world_size, max_restarts)
        log_settings = LogSettings(config.trainer.log_level, config.trainer.log_format)
        with log_to_console(log_settings, shown=processes.rank == 0), processes.explain_lost_ranks():
            self._build(processes)
            if command is None:
                return
            self._call_script_hook("before")
            results, built = None, self._get_command_settings(self.config_init)
            if self._has_own_command():
                names = self._arguments if command not in LOOPS else ["ckpt_path"] if command != "fit" else []
                method = getattr(self, command, None) or getattr(self.trainer, command)
                method(model=self.model, datamodule=self.datamodule, **{name: built[name] for name in names})
            elif command == "fit":
                self.trainer.fit(self.model, self.datamodule, configure_optimizers=self._configure)
            else:
                evaluate = getattr(self.trainer, command)
                results = evaluate(self.model, self.datamodule, ckpt_path=built.ckpt_path, average=built.average)
        if results is not None and processes.rank == 0:
            self._show_results(results, config)
        self._call_script_hook("after")

    def _build(self, processes: Processes) -> None:
        """Build everything with the run's seed."""
        config = self._get_command_settings(self.config)
        if processes.world_size > 1 and not processes.must_be_started:
            processes.connect(choose_device(config.trainer.accelerator, processes))
        checkpoint = config.get("ckpt_path") if self.subcommand not in ("fit", None) else config.trainer.resume
        name = config.trainer.name or self._get_model_class(config).rpartition(".")[2].lower()
        choose = partial(choose_seed, config, checkpoint, name, processes.launcher)
        seed = config.seed_everything = choose() if processes.must_be_started else processes.run_on_rank_zero(choose)
        seed_for_building(seed)
        self.instantiate_classes()
        self.trainer._use_config(seed, self._get_fit_command())
        self.parser.taken = record_hyperparameters(self._links, self.model, self.datamodule, self.parser.references)
        self.after_instantiate_classes()

    def _has_own_command(self) -> bool:
        """Return True if the script defines the method that the command runs."""
        return self.subcommand is not None and (self.subcommand not in LOOPS or hasattr(self, self.subcommand))

    def _get_model_class(self, config: Namespace) -> str:
        return self._command_options.model.__name__ if "model" in self.parser.fixed else str(config.model.class_path)

    def _find_processes(self, trainer: Namespace) -> Processes:
        """Return the processes of the run, before anything is built."""
        strategy = self.trainer_defaults.get("strategy", "auto") if trainer.strategy == "auto" else trainer.strategy
        name = "auto" if isinstance(strategy, Namespace) else strategy
        return choose_processes(trainer.devices, trainer.num_nodes, trainer.accelerator, name)

    def _start_workers(self, workers: int, max_restarts: int) -> None:
        """Run the script from its beginning in several processes, instead of in this process."""
        relaunch(workers, max_restarts)

    def _call_script_hook(self, when: str) -> None:
        getattr(self, f"{when}_{self.subcommand}", _do_nothing)()

    def _show_results(self, results: list[Any], config: Namespace) -> None:
        """Print the results of an evaluation, and write them to `--output`."""
        output, checkpoint = config.get("output"), config.ckpt_path
        if self.subcommand == "predict":
            results = [batch for loader in self.trainer.run.values.predictions for batch in loader]
            show_predictions(results, output)
        else:
            title = f"{self.subcommand}, {getattr(checkpoint, 'path', checkpoint) or 'no checkpoint'}"
            title += f", average {config.average}" if config.average else ""
            show_metrics(results, self.trainer.run.loaders, title)
        if output is not None:
            write_results(results, expand_path(output))


@final
class LumenCommand(CLI):
    """Commands `lumen fit`, `validate`, `test` and `predict`, for any task and any data."""

    _program = "lumen"

    def _get_fit_command(self) -> str:
        return "lumen fit"

    def _start_workers(self, workers: int, max_restarts: int) -> None:
        raise SystemExit(
            launch(workers, ["-m", "lumen", str(self.subcommand), *self._command_words.words], max_restarts)
        )


@final
class CheckedCommand(CLI):
    """Command line of `lumen` that is read and checked only; Lumen builds nothing from it.

    Attributes:
        settings: The settings of the command.
    """

    _runs_elsewhere, _program = True, "lumen"

    def _build_and_run(self) -> None:
        self.settings = self._get_command_settings(self.config)


def run(command: str, words: list[str]) -> int:
    """Run one of the four loops and return 0."""
    with suppress(HelpShown):
        LumenCommand(args=[command, *words])
    return 0


@contextmanager
def _report_lumen_errors() -> Iterator[None]:
    """Turn an error of Lumen within the context into a message and an exit code, as the command `lumen` does."""
    try:
        yield
    except LumenError as error:
        raise SystemExit(print_error(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _do_nothing() -> None:
    """Do nothing, in place of a hook that the script does not define."""


def _find_logger_name(trainer: Mapping[str, Any]) -> Any:
    """Return the run's name that a logger in the settings of a trainer chooses, or None."""
    loggers = trainer.get("logger")
    for each in loggers if isinstance(loggers, list) else [loggers]:
        if isinstance(each, dict) and str(each.get("class_path")).endswith(("CSVLogger", "TensorBoardLogger")):
            arguments = each.get("init_args") or {}
            if arguments.get("name") and arguments.get("version") in (None, ""):
                return arguments["name"]
    return None
