"""The command `lumen check`: checks a configuration before a long run."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout, suppress
from typing import Any, final

from lumen.cli import tell
from lumen.cli.command_line import CLI
from lumen.cli.commands import Words
from lumen.cli.users_error import show as show_error
from lumen.cli.words import Shown
from lumen.errors import ConfigError, LumenError
from lumen.tools.check import COMMAND
from lumen.tools.check.look import look
from lumen.tools.check.show import Report, show, show_json
from lumen.tools.check.trial import Trial
from lumen.tools.terminal import first_line
from lumen.trainer.logs import LogSettings, console_log

_MORE = (
    "Runs forward and backward of a few micro-batches. Takes what `lumen fit` takes, trains nothing and writes "
    "nothing: an update or two are made in memory and thrown away. Exit code: 0; 1: something is suspicious, with "
    "--strict; 2: the configuration is wrong, or a step fails. The settings are those of lumen fit --help."
)


def options() -> Words:
    """Return the parser of the options that `lumen fit` lacks."""
    parser = Words("check", COMMAND, "--config FILE [--KEY VALUE ...] [--json] [--strict] [--samples N]", _MORE)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    parser.add_argument("--strict", action="store_true", help="Exit with 1 if something is suspicious.")
    parser.add_argument("--samples", type=int, default=1000, metavar="N", help="Training and validation samples to "
                        "compare at most. Default: 1000; 0: none.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Check a training, print the findings, and return the exit code."""
    asked, words = options().parse_known_args(words)
    if asked.samples < 0:
        raise ConfigError(f"--samples: expected a number of at least 0, found {asked.samples}.")
    report = Report()
    try:
        with redirect_stdout(sys.stderr), suppress(Shown):  # Output of user code goes to stderr.
            _Look(report, asked.samples, words)
            if not report.title:  # --print_config has printed the config.
                return 0
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _failed(report, error, as_text=not asked.json)
    code = report.exit_code(strict=asked.strict)
    show_json(report, code) if asked.json else show(report)
    return code


def _failed(report: Report, error: BaseException, *, as_text: bool) -> int:
    """Print the findings before an error, and the error. Errors of user code have a traceback."""
    if not isinstance(error, LumenError):
        report.add("first steps", "wrong", "failed", f"it fails with {first_line(error)}", "Its traceback is below.")
    elif not report.all_of("wrong"):
        report.add("first steps", "wrong", "failed", str(error))
    if report.title:
        show(report) if as_text else show_json(report, 2)
    tell(error) if isinstance(error, LumenError) else show_error(error)
    return 2


@final
class _Look(CLI):
    """Command line of `fit` that checks the training instead of running it.

    Args:
        report: Report that receives the findings.
        samples: The most samples of training and validation to compare.
        words: The command line, without the options of `lumen check`.
    """

    _program = "lumen"

    def __init__(self, report: Report, samples: int, words: list[str]) -> None:
        self._report, self._samples = report, samples
        super().__init__(args=["fit", *words])

    def _build_and_run(self) -> None:
        config = self._own(self.config)
        wanted = self._processes(config.trainer)
        if wanted.world_size > 1 and not wanted.are_missing:
            said = "lumen check looks at a run with one process, but torchrun or SLURM has started"
            raise ConfigError(f"{said} {wanted.world_size}. Run it without them.")
        asked = config.trainer.strategy
        config.trainer.devices, config.trainer.num_nodes, config.trainer.strategy = 1, 1, "auto"
        with console_log(LogSettings("WARNING"), shown=False):
            self._build(self._processes(config.trainer))
            self._describe(wanted.world_size, asked)
            trial = Trial(self.trainer, self.model, self.datamodule, self._configure, wanted.world_size)
            look(self._report, trial, self._samples)

    def _describe(self, processes: int, strategy: Any) -> None:
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
            text = (
                f"the run has {processes} processes (strategy {name}); one was looked at, without what is between them"
            )
            report.add("configuration", "note", "processes", text)
