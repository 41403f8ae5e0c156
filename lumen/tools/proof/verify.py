"""The command `lumen verify`: proves Lumen's promises on the user's task and data."""

from __future__ import annotations

import json
import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, final

from rich.table import Table
from rich.text import Text

from lumen.cli.command_line import CLI, CheckedCommand
from lumen.cli.commands import CommandParser
from lumen.console import stderr, stdout
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError
from lumen.tools.proof import VERIFY
from lumen.tools.proof.causes import DifferenceCause
from lumen.tools.proof.certificate import (
    describe_changed_conditions,
    iterate_changed_results,
    make_certificate,
    read_certificate,
)
from lumen.tools.proof.prove import COMPARISONS, ProofRow, Prover, adapt_size_to_machine
from lumen.tools.proof.variants import VariantSize
from lumen.tools.proof.worker import BuiltTraining
from lumen.tools.terminal import make_table_console, print_json
from lumen.trainer.trainer import Trainer

_USAGE = "--config FILE [--KEY VALUE ...] [--steps N] [--against FILE]"
_DESCRIPTION = (
    "The command takes the settings of lumen fit. It trains some steps of each variant that this machine allows, in a "
    "temporary directory, and does not change your runs. Exit code: 0 if all is proven, 1 if a promise fails, 2 if "
    "the settings are wrong."
)
_PROMISES = {"P1": "same training", "P2": "exact resume", "P3": "exact evaluation", "P4": "any reader", "": "training"}
_STYLES = {"proven": "green", "failed": "bold red", "not promised": "yellow", "not shown": "dim"}
_MIN_STEPS, _MAX_LENGTH = 4, 600


@final
class _BuiltCLI(CLI):
    """Command line of `lumen fit` that builds all objects and runs nothing.

    Args:
        words: The command line.
        change: Function that takes the user's arguments of the trainer and returns the arguments to use.
        seed: The seed to set before building.
    """

    _runs_elsewhere, _program = True, "lumen"

    def __init__(self, words: list[str], change: Callable[[dict[str, Any]], dict[str, Any]], seed: int) -> None:
        self._change = change
        super().__init__(args=["fit", *words, "--seed_everything", str(seed)], save_config_callback=None)

    def _build_and_run(self) -> None:
        config = self._get_command_settings(self.config)
        config.trainer.resume = None
        config.trainer.accelerator = "auto"
        self.before_instantiate_classes()
        self._build(Processes.find())
        self.made = BuiltTraining(self.model, self.datamodule, self.trainer, self._configure)

    def instantiate_trainer(self, **arguments: Any) -> Trainer:
        """Build the trainer with the changed arguments."""
        return super().instantiate_trainer(**self._change(self.config_init.fit.trainer.as_dict()))


def build_from_words(words: list[str], change: Callable[[dict[str, Any]], dict[str, Any]], seed: int) -> BuiltTraining:
    """Build task, data and trainer of a command line of `lumen fit`."""
    return _BuiltCLI(words, change, seed).made


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("verify", VERIFY, _USAGE, _DESCRIPTION)
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="Optimizer steps of a variant. Default: 5.")
    parser.add_argument("--only", metavar="NAMES", help=f"Make only these comparisons: {', '.join(COMPARISONS)}.")
    parser.add_argument("--compile", action="store_true", help="Also compare eager with compiled.")
    parser.add_argument("--certificate", metavar="FILE", help="File of the results. Default: "
                        "certificate.json; with --against no file.")  # fmt: skip
    parser.add_argument("--against", metavar="FILE", help="Show the changes since this certificate. Exit code 1 if "
                        "numbers or verdicts changed.")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="Print the certificate in place of the table.")
    return parser


def run(words: list[str]) -> int:
    """Run the proof, write the certificate, print the results, and return the exit code."""
    args, rest = options().parse_known_args(words)
    if args.steps < _MIN_STEPS:
        raise ConfigError(f"--steps: must be at least {_MIN_STEPS}, for a checkpoint and a later step, found "
                          f"{args.steps}.")  # fmt: skip
    only = args.only.split(",") if args.only else []
    for name in only:
        if name not in COMPARISONS:
            raise ConfigError(f"--only: expected some of {','.join(COMPARISONS)}, found {name}.")
    before = read_certificate(Path(args.against)) if args.against else None
    target = args.certificate or (None if before else "certificate.json")
    config = CheckedCommand(args=["fit", *rest]).settings
    seed = config.seed_everything if type(config.seed_everything) is int else secrets.randbits(31)
    compiles = args.compile or bool(config.trainer.compile)
    size = adapt_size_to_machine(VariantSize(steps=args.steps, seed=seed), config.trainer.accelerator)
    proof = Prover(partial(build_from_words, rest), size, compiles=compiles, only=only)
    _prove_with_progress(proof)
    certificate = make_certificate(proof, shlex.join(["lumen", "verify", *rest]))
    if target is not None:
        try:
            Path(target).write_text(json.dumps(certificate, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            reason = f"{error.strerror}. Name a different file."
            raise ConfigError(f"--certificate {target}: cannot be written: {reason}") from error
    print_json(certificate) if args.json else _print_proof(proof, target)
    if before is None:
        return proof.code
    conditions = describe_changed_conditions(before, certificate)
    results = [*iterate_changed_results(before, certificate)]
    head = f"nothing has changed since {args.against}"
    if lines := [*conditions, *results]:
        head = f"since {args.against}, made {before.get('made')}:"
        lines += [] if results else ["verdicts are the same, and numbers are bitwise identical."]
    print(head, *(f"  {each}" for each in lines), sep="\n", file=stderr if args.json else stdout)
    return max(proof.code, int(bool(results)))


def _prove_with_progress(prover: Prover) -> None:
    """Run the comparisons, and show their number as a status line on a terminal."""
    if not stderr.isatty():
        prover.run_proof()
        return
    from lumen.console import console

    done = count(1)
    with console.status("running the first variants") as status:
        prover.report_progress = lambda row: status.update(f"{next(done)} compared, last: {row.what}")
        prover.run_proof()


def _print_proof(proof: Prover, target: str | None) -> None:
    """Print the table of results, and below it the reasons for promises that are not proven."""
    console = make_table_console()
    table = Table("promise", "compared", "allowed", "largest", "verdict", "s", title=f"{proof.size.steps} steps each")
    last = None
    for row in proof.rows:
        largest = "" if row.largest is None else "0" if row.largest == 0 else f"{row.largest:.1e}"
        name = _PROMISES[row.promise] if row.promise != last else ""
        last = row.promise
        verdict = Text(row.verdict, style=_STYLES[row.verdict])
        table.add_row(name, row.what, row.demands, largest, verdict, f"{row.seconds:.1f}")
    console.print(table)
    console.print()
    for head, body in _group_causes(proof.rows):
        console.print(head)
        for line in body.wrap(console, console.width - 2):
            line.rstrip()
            console.print(Text("  ") + line)
        console.print()
    for note in proof.notes:
        console.print(f"note: {note}")
    counts = Counter[str](row.verdict for row in proof.rows)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _STYLES if counts[verdict])
    written = f"; written: {target}" if target else ""
    console.print(f"{summary} in {proof.seconds:.0f} s{written}", soft_wrap=True)


def _group_causes(rows: Sequence[ProofRow]) -> Iterator[tuple[Text, Text]]:
    """Yield each distinct cause of unproven rows once, with its rows."""
    seen: dict[tuple[str, str], tuple[DifferenceCause, list[str]]] = {}
    for row in rows:
        if (cause := row.cause) is not None:
            _, where = seen.setdefault((cause.kind, cause.place), (cause, []))
            where.append(f"{_PROMISES[row.promise]}: {row.what}")
    for words, (cause, where) in seen.items():
        body = cause.text if len(cause.text) <= _MAX_LENGTH else f"{cause.text[:_MAX_LENGTH]} ..."
        head = Text(f"{cause.verdict}: {', '.join(filter(None, words))}", style=_STYLES[cause.verdict])
        yield head, Text(f"seen in: {'; '.join(where)}\n{body}")
