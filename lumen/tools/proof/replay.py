"""`lumen replay`: repeats one step of a run."""

from __future__ import annotations

import code
from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, final

import torch

from lumen.callbacks import Callback
from lumen.checkpoint.format.reader import Checkpoint
from lumen.cli.commands import CommandParser
from lumen.console import stderr, stdout
from lumen.errors import ConfigError
from lumen.tools.check.report import describe_leaves
from lumen.tools.proof import REPLAY
from lumen.tools.proof.recorder import Key, Recorder
from lumen.tools.proof.rerun import Rerun, compute_relative_difference, run_with_exit_code
from lumen.tools.terminal import format_count

if TYPE_CHECKING:
    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer

_DESCRIPTION = (
    "The command trains the run again on this machine, from the newest checkpoint before the step or from the "
    "beginning. It does not change the run. Exit code: 0 if the step equals the record, 1 if it differs, 2 after an "
    "error."
)
_HELP = """\
Step {step}, micro-batch {micro}: the gradients are complete, nothing is updated yet.
  task     {task}
  batch    the batch of training_step
  loss     {loss}, as passed to the backward
  trainer  the Trainer
Ctrl-D ends this prompt. Nothing is saved."""
_ROUNDING = {"fp64": 1e-10, "fp32": 1e-5}  # relative tolerance; 1e-2 for other precisions
_MAX_SHOWN = 8


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("replay", REPLAY, "RUN --step N [--python]", _DESCRIPTION)
    parser.add_argument("run", metavar="RUN", help="The directory of a run.")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="Number of the step, from 1.")
    parser.add_argument("--python", action="store_true", help="Open Python inside the step, with task, batch, loss and "
                        "trainer.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Repeat the step, print it and its differences from the record, and return 0 or 1."""
    args = options().read(words)
    if args.step < 1:
        raise ConfigError(f"--step: steps are counted from 1, found {args.step}.")
    return run_with_exit_code(partial(_run_replay, args))


def _run_replay(args: Namespace) -> int:
    rerun = Rerun(args.run)
    if not rerun.is_run:
        raise ConfigError(f"{args.run} is a config file. Name the directory of a run.")
    begin, checkpoint = rerun.find_checkpoint_before(args.step)
    print(f"training again from step {begin} ...", file=stderr)
    step = _ReplayedStep(args.step, begin, prompts=args.python)
    trainer, step.logged = rerun.train([step, step.recorder], checkpoint)
    if not step.recorder.trace:
        raise ConfigError(
            f"--step {args.step}: the training ends at step {trainer.global_step}. Choose an earlier step."
        )
    if args.python:
        return 0
    differ = step.describe_differences(rerun, str((rerun.config.get("trainer") or {}).get("precision", "fp32")))
    print(*_iterate_lines(rerun, step, checkpoint, differ), sep="\n", file=stdout)
    return int(bool(differ))


@final
class _ReplayedStep(Callback):
    """Callback that observes the repeated step.

    Args:
        number: Number of the step, from 1.
        begin: Number of completed updates before the training resumes.
        prompts: True to open a Python prompt in the step, when its gradients are complete.

    Attributes:
        recorder: The recorder of the step.
        batches: Lines that describe each micro-batch of the step.
        logged: Values that the training logged from the checkpoint to the step.
    """

    may_stop_at_steps = False

    def __init__(self, number: int, begin: int, *, prompts: bool) -> None:
        self.number, self.begin, self._prompts = number, begin, prompts
        self._batch: Any = None
        self._loss: Any = None
        self.recorder = Recorder(number, first=number, keep=lambda key: key.kind in ("parameter", "gradient"))
        self.batches: list[list[str]] = []
        self.logged: dict[tuple[int, str], str] = {}

    def on_train_batch_start(self, trainer: Trainer, task: TaskModule, batch: Any, batch_idx: int) -> None:
        """Describe the micro-batch."""
        if trainer.global_step + 1 == self.number:
            self._batch = batch
            self.batches.append(["  ".join(filter(None, each.cells)) for each in describe_leaves(batch)])

    def on_before_backward(self, trainer: Trainer, task: TaskModule, loss: Any) -> None:
        """Keep the loss."""
        self._loss = loss

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: torch.optim.Optimizer) -> None:
        """Open a Python prompt in the step, if requested."""
        if trainer.global_step + 1 != self.number or not self._prompts:
            return
        names = {"task": task, "batch": self._batch, "loss": self._loss, "trainer": trainer, "torch": torch}
        banner = _HELP.format(**names | {"task": type(task).__name__, "loss": float(self._loss.detach())},
                            step=self.number, micro=len(self.batches) - 1)  # fmt: skip
        with suppress(ImportError):  # readline makes lines editable.
            import readline  # noqa: F401
        with torch.enable_grad():
            code.interact(banner, local=names, exitmsg="")

    @property
    def norm(self) -> float:
        """Norm of the complete gradients before clipping."""
        norms = [each.double().norm() for _, each in self._list_kept("gradient")]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def _list_kept(self, kind: str) -> list[tuple[Key, torch.Tensor]]:
        return [(key, value) for key, value in self.recorder.trace[-1].kept.items() if key.kind == kind]

    def describe_differences(self, run: Rerun, precision: str) -> list[str]:
        """Return one line for each difference from the record up to this step; empty if the step is as recorded."""
        bound, found = _ROUNDING.get(precision, 1e-2), list[str]()
        for (step, name), text in run.metrics.items():
            now = self.logged.get((step, name))
            if self.begin < step <= self.number and now != text and now is not None:
                comparison = _format_comparison(compute_relative_difference(text, now), bound)
                found.append(f"step {step}, {name}: recorded {text}, now {now}{comparison}")
        if self.number in run.checkpoints:
            saved = Checkpoint.open(run.checkpoints[self.number]).as_mapping("model")
            for key, value in self._list_kept("parameter"):
                if key.place in saved and not torch.equal(saved[key.place], value):
                    largest = (saved[key.place].double() - value.double()).abs().max() / value.double().abs().max()
                    comparison = _format_comparison(float(largest), bound)
                    found.append(f"{key.place} after the step differs from the checkpoint{comparison}")
        return found

    def describe_compared(self, run: Rerun) -> list[str]:
        """Return the names of the recorded values that the step is compared with."""
        names = [name for step, name in run.metrics if step == self.number and (step, name) in self.logged]
        return [*names, *(["the checkpoint's parameters"] if self.number in run.checkpoints else [])]


# ---------------------------------------------------------------------- showing


def _iterate_lines(rerun: Rerun, step: _ReplayedStep, checkpoint: PurePath | None, differ: list[str]) -> Iterator[str]:
    trace = step.recorder.trace[-1]
    yield f"step {step.number} of {rerun.source}, epoch {trace.epoch}, from {checkpoint or 'the beginning'}"
    for note in rerun.notes:
        yield f"  {note}"
    losses = {key.micro: float(text) for key, text in trace.events.items() if key.kind == "loss"}
    for number, described in enumerate(step.batches):
        yield f"  batch{f' {number}' if len(step.batches) > 1 else ''}"
        if (samples := trace.events.get(Key(number, "order", "", 0))) is not None:
            few = samples.split()[:_MAX_SHOWN]
            count = len(samples.split())
            yield f"    samples {' '.join([*few, *([f'... {count} in all'] if count > _MAX_SHOWN else [])])}"
        yield from (f"    {line}" for line in described)
        if len(losses) > 1 and number in losses:
            yield f"    share of the loss {losses[number]!r}"
    if losses:
        yield f"  loss {sum(losses.values())!r}"
    yield f"  gradient norm {step.norm!r}"
    yield from (f"  {name} {text}" for (at, name), text in step.logged.items() if at == step.number)
    compared = step.describe_compared(rerun)
    if differ:
        yield f"the step differs from the record in {format_count(len(differ), 'value')}:"
        yield from (f"  {line}" for line in differ[:_MAX_SHOWN])
    elif compared:
        yield f"the step is bitwise identical to the record: {', '.join(compared)}"
    else:
        logged = sorted({at for at, _ in rerun.metrics})
        nearest = [*(at for at in logged if at < step.number)][-1:] + [at for at in logged if at > step.number][:1]
        known = f"; it has values of step {' and of step '.join(map(str, nearest))}" if nearest else ""
        yield f"the record has no values of this step{known}"


def _format_comparison(difference: float | None, bound: float) -> str:
    """Return a remark on whether a relative difference is rounding, or "" if it is None."""
    if difference is None:
        return ""
    return f" (relative difference {difference:.2g}: {'rounding' if difference <= bound else 'more than rounding'})"
