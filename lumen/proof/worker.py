"""What a process of a variant does: it builds everything, runs, and writes down what was computed."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol, final

import torch
import torch.distributed as dist

from lumen.callbacks import Callback
from lumen.distributed.cluster_environment import loopback_names
from lumen.distributed.processes import Processes
from lumen.errors import LumenError
from lumen.internals.interpreters import SAFE_PATH, SearchPath
from lumen.internals.whole_files import replaced
from lumen.proof.observer import Observer, Rows, Watch
from lumen.proof.outcome import Outcome
from lumen.proof.variants import Moment, Size, Variant
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule
from lumen.trainer.trainer import Trainer

PREFIX = "lumen-verify-"  # of the directory in which all runs lie
_HERE = str(Path(__file__).parent.parent)
_ELSEWHERE = ("site-packages", "/lib/python", "<frozen", "importlib")


@final
class Built(NamedTuple):
    """What a user's settings make.

    Attributes:
        task: The task that is trained.
        data: Where its batches come from; None: from the task.
        trainer: Trains it, as the settings have it.
        configure_optimizers: In place of the task's; None: the task's.
    """

    task: TaskModule
    data: DataModule | None
    trainer: Trainer
    configure_optimizers: Callable[[], Any] | None


class Maker(Protocol):
    """Builds everything anew: `change` is given the chosen arguments of the trainer, and returns those to use.

    It is called in processes of its own, with the global generators seeded by the run's seed.
    """

    def __call__(self, change: Callable[[dict[str, Any]], dict[str, Any]], seed: int) -> Built: ...  # noqa: D102


@final
class Killer(Callback):
    """Kills its process, as `kill -9` does, in the middle of something.

    Args:
        moment: What it is in the middle of: training, validation or save.
        step: After that many completed steps; of a save, of the checkpoint of the next one.
        folder: Where checkpoints are written.
    """

    stops_at_steps = False

    def __init__(self, moment: Moment, step: int, folder: Path) -> None:
        self._moment, self._step = moment, step
        if moment == "save":
            self._name = f"step-{step + 1:08d}."
            sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Of each file that is opened: the manifest comes when all else is written, and nothing is committed."""
        if event == "open" and self._name in str(arguments[0]) and "manifest" in str(arguments[0]):
            _kill()

    def on_after_backward(self, trainer: Trainer, task: TaskModule) -> None:
        """Gradients are there, the update is not."""
        if self._moment == "training" and trainer.global_step == self._step:
            _kill()

    def on_validation_batch_end(
        self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Some batches are evaluated, others are not."""
        if self._moment == "validation" and trainer.global_step == self._step + 1:
            _kill()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def work(
    path: SearchPath, make: Maker, variant: Variant, size: Size, precision: str | None, folder: str, rank: int
) -> None:
    """Run a variant in this process, which ends with it; writes `rank-N.json`."""
    place = Path(folder)
    _prepare(place, rank, variant, size)
    outcome, failure = Outcome(), None
    began_s = time.monotonic()
    try:
        if variant.world > 1:
            store = dist.FileStore(str(place / "store"), variant.world)  # type: ignore[attr-defined]
            backend = "cpu:gloo,cuda:nccl" if size.accelerator == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=variant.world, timeout=timedelta(seconds=2 * size.limit_s)
            )
        observe(make, variant, size, precision, place, outcome)
    except BaseException as error:
        failure = told(error)
    outcome.seconds = time.monotonic() - began_s
    answer = {"outcome": outcome.to_json(), "failure": failure}
    with replaced(place / f"rank-{rank}.json") as beside:
        beside.write_text(json.dumps(answer), encoding="utf-8")
    sys.stdout.flush()
    with suppress(Exception):
        Processes.found().close()
    os._exit(0)  # tidying up takes Python longer than the run took


def _prepare(place: Path, rank: int, variant: Variant, size: Size) -> None:
    """Let the process write to files of its own, and forget what started its parent."""
    output = os.open(place / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "LUMEN_"))]:
        del os.environ[name]
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", SAFE_PATH):
        os.environ.pop(name, None)
    os.environ.update(loopback_names())
    torch.set_num_threads(size.threads)
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)  # of data workers
    stacks = open(place / f"rank-{rank}.stacks", "w", encoding="utf-8")  # noqa: SIM115  # for as long as it lives
    faulthandler.register(signal.SIGUSR1, stacks)


def observe(make: Maker, variant: Variant, size: Size, precision: str | None, place: Path, outcome: Outcome) -> None:
    """Run a variant in this process, and write down what it computes. Collective: every rank must call this.

    Args:
        make: Builds task, data and trainer.
        variant: The one to run.
        size: How much it does.
        precision: Of variants that are not exact; None: the user's.
        place: An existing directory for its run.
        outcome: The record that it adds to.
    """
    observer = Observer(outcome, size.save_every, modules=not variant.compiles)

    def change(given: dict[str, Any]) -> dict[str, Any]:
        own = given.get("callbacks")
        listed = [*own.values()] if isinstance(own, dict) else own if isinstance(own, list) else [own]
        added: list[Callback] = [] if variant.evaluates else [observer]
        if variant.kill is not None:
            added.append(Killer(variant.kill, size.save_every * 2 - 1, place))
        callbacks = [*variant.callbacks(listed, size), *added]
        changed = variant.changes(size, place, given, precision)
        return {**given, **changed, "callbacks": callbacks, "logger": False if variant.evaluates else [Rows(outcome)]}

    built = make(change, size.seed)
    task, data, trainer = built.task, built.data, built.trainer
    outcome.by_hand = not task.automatic_optimization
    if outcome.by_hand:
        limits = {**trainer.plan.limits, "train": size.epoch_steps}
        trainer.plan = replace(trainer.plan, accumulate={0: 1}, limits=limits)
    if not variant.evaluates:
        observer.look_at(task, "built")
    Watch(task, outcome, lambda: observer.step).begin(trainer.callbacks)
    variant.adapt(task, data)
    if variant.evaluates:
        for number, values in enumerate(trainer.validate(task, data, ckpt_path=variant.resume)):
            outcome.values |= {f"{name}, loader {number}" if number else name: value for name, value in values.items()}
    else:
        trainer.fit(task, data, configure_optimizers=built.configure_optimizers)


def told(error: BaseException) -> dict[str, str]:
    """An error as plain data: its class, what it says, the line of the user's code that it came from, all of it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if not frame.filename.startswith(_HERE) and not any(part in frame.filename for part in _ELSEWHERE)
    ]
    place = f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
    if notes := getattr(error, "__notes__", None):  # where a run lies that is gone by then, and how it goes on
        notes[:] = [note for note in notes if PREFIX not in note]
    text = "".join(traceback.format_exception(error))
    said = str(error) or type(error).__name__
    kind = type(error).__name__
    return {"kind": kind, "message": said, "place": place, "text": text, "ours": str(isinstance(error, LumenError))}
