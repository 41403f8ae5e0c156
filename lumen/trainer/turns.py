"""One run at a time in a process: threads take turns, and a run in a hook of another leaves that one as it was."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from lumen.console import logger
from lumen.errors import ConfigError
from lumen.random import preserved_generators
from lumen.task.data_module import DataModule
from lumen.task.inference import make_trainable
from lumen.task.task_module import TaskModule

_turn = threading.RLock()
_open: list[TaskModule] = []  # of the runs of that thread; each but the first is in a hook of the one before


def _begin_anew() -> None:
    """A forked child has no run: what was its parent's goes on there."""
    global _turn
    _turn = threading.RLock()
    _open.clear()


os.register_at_fork(after_in_child=_begin_anew)


@contextmanager
def turn(task: TaskModule, datamodule: DataModule | None, *, trains: bool) -> Iterator[None]:
    """The context of a run, in which no other thread of this process has one.

    The generators, torch's switches and the logs are those of the whole process, so that of two runs at once neither
    would be exact. One that is in a hook of another leaves the generators and the data module as that one had them.

    Args:
        task: The task that the run trains or evaluates.
        datamodule: Its data module, if it has one.
        trains: The run is one of `fit`, which needs gradients, also in a hook of an evaluation.

    Raises:
        ConfigError: The task is in a run already.
    """
    if not _turn.acquire(blocking=False):
        logger.warning(
            "the thread %s waits until the run of another thread of this process is over. Random numbers belong to the "
            "whole process: a model that is built beside a run in another thread draws from those of that run. For "
            "several runs at once start several processes.",
            threading.current_thread().name,
        )
        _turn.acquire()
    try:
        if any(each is task for each in _open):
            raise ConfigError(
                f"this {type(task).__name__} is in a run of another Trainer. Give the run inside it a copy: "
                "copy.deepcopy(task)."
            )
        attached = None if datamodule is None else datamodule._run
        with ExitStack() as closing:
            if _open:
                closing.enter_context(preserved_generators())
                if attached is not None and attached.stage and datamodule is not None:
                    closing.callback(setattr, datamodule, "_run", attached)
            if trains:
                closing.enter_context(torch.inference_mode(False))
                closing.enter_context(torch.enable_grad())
                make_trainable(task)
            _open.append(task)
            closing.callback(_open.pop)
            yield
    finally:
        _turn.release()
