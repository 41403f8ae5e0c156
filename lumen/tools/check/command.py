"""The command `lumen check`: checks a configuration before a long run."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from typing import Any, final

from lumen.cli import print_error
from lumen.cli.command_line import CLI
from lumen.cli.command_words import HelpShown
from lumen.cli.commands import CommandParser
from lumen.cli.user_errors import print_user_error as show_error
from lumen.errors import ConfigError, LumenError
from lumen.strategies import make_strategy
from lumen.tools.check import COMMAND
from lumen.tools.check.checks import check_training
from lumen.tools.check.placement import check_placement, count_data_ranks
from lumen.tools.check.report import CheckReport, print_json_report, print_report
from lumen.tools.check.trial import CheckTrial
from lumen.tools.terminal import get_first_line
from lumen.trainer.logs import LogSettings, log_to_console
from lumen.trainer.trainer import Trainer

_DESCRIPTION = (
    "The command runs forward and backward of a few micro-batches and writes nothing. It makes one or two updates in "
    "memory and discards them. All options of `lumen fit` are allowed (see `lumen fit --help`). Exit code: 0; 1 with "
    "--strict if something is suspicious; 2 if the config is wrong or a step fails."
)


def options() -> CommandParser:
    """Return the parser of the options that `lumen fit` lacks."""
    parser = CommandParser("check", COMMAND, "--config FILE [--KEY VALUE ...] [--strict] [--json]", _DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--strict", action="store_true", help="Exit with 1 if something is suspicious.")
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="Largest number of training "
                        "and validation samples to compare. Default: 1000; 0: none.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Check a training, print the findings, and return the exit code."""
    arguments, words = options().parse_known_args(words)
    if arguments.samples < 0:
        raise ConfigError(f"--samples: expected a number of at least 0, found {arguments.samples}.")
    report = CheckReport()
    try:
        with redirect_stdout(sys.stderr), suppress(HelpShown):  # Output of user code goes to stderr.
            _CheckCLI(report, arguments.samples, words)
            if not report.title:  # --print_config has printed the config.
                return 0
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _show_failure(report, error, as_text=not arguments.json)
    code = report.get_exit_code(strict=arguments.strict)
    print_json_report(report, code) if arguments.json else print_report(report)
    return code


def _show_failure(report: CheckReport, error: BaseException, *, as_text: bool) -> int:
    """Print the findings before an error, and the error. Errors of user code have a traceback."""
    if not isinstance(error, LumenError):
        text = f"a step failed with {get_first_line(error)}"
        report.add("first steps", "wrong", "failed", text, "The traceback is below.")
    elif not report.list_findings("wrong"):
        report.add("first steps", "wrong", "failed", str(error))
    if report.title:
        print_report(report) if as_text else print_json_report(report, 2)
    print_error(error) if isinstance(error, LumenError) else show_error(error)
    return 2


@final
class _CheckCLI(CLI):
    """Command line of `fit` that checks the training instead of running it.

    Args:
        report: Report that receives the findings.
        samples: Largest number of training and validation samples to compare.
        words: The command line, without the options of `lumen check`.
    """

    _program = "lumen"

    def __init__(self, report: CheckReport, samples: int, words: list[str]) -> None:
        self._report, self._samples = report, samples
        super().__init__(args=["fit", *words], save_config_callback=None)

    def _build_and_run(self) -> None:
        config = self._get_command_settings(self.config)
        processes = self._find_processes(config.trainer)
        if processes.world_size > 1 and not processes.must_be_started:
            started = f"torchrun or SLURM has started {processes.world_size} processes"
            raise ConfigError(f"lumen check needs a single process, but {started}. Run lumen check without a launcher.")
        with log_to_console(LogSettings("WARNING"), shown=False):
            self._build(processes)
            self._add_description(processes.world_size, config.trainer.strategy)
            data_ranks = count_data_ranks(self._strategy)
            trial = CheckTrial(self.trainer, self.model, self.datamodule, self._configure, data_ranks)
            check_training(self._report, trial, self._samples)
            check_placement(self._report, trial, self._strategy)

    def instantiate_trainer(self, **overrides: Any) -> Trainer:
        """Build the strategy of the run, and a trainer of one process."""
        processes = self._find_processes(self._get_command_settings(self.config).trainer)
        strategy = self._get_command_settings(self.config_init).trainer.strategy
        # The placement is the same on every device.
        self._strategy = make_strategy(strategy, "cpu", processes.world_size)
        return super().instantiate_trainer(**overrides, devices=1, num_nodes=1, strategy="auto")

    def _add_description(self, processes: int, strategy: Any) -> None:
        report, trainer = self._report, self.trainer
        data = "" if self.datamodule is None else f" on {type(self.datamodule).__name__}"
        report.title = f"lumen check: {trainer.name or type(self.model).__name__.lower()}"
        precision = trainer.precision if isinstance(trainer.precision, (str, int)) else type(trainer.precision).__name__
        model, device = type(self.model).__name__, str(trainer.strategy.device)
        report.facts |= {"model": model, "device": device, "precision": str(precision)}
        report.facts |= {"seed": trainer.seed, "processes": processes}
        text = f"{model}{data}; seed {trainer.seed}, {device}, {precision}"
        report.add("configuration", "ok", "configuration", text)
        if processes > 1:
            name = strategy if isinstance(strategy, str) else strategy.class_path
            text = f"the run has {processes} processes (strategy {name}); the check used one, without communication"
            report.add("configuration", "note", "processes", text)
