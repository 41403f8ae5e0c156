"""What tells why two variants differ: which hooks write parameters, where values are logged, what a data set gives."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial, wraps
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, final

import torch
from torch.utils.data import DataLoader, IterableDataset

from lumen.callbacks import Callback
from lumen.data.fingerprint import known_length
from lumen.data.generators import OwnGenerators
from lumen.internals.tensors import writes_to
from lumen.proof.digests import digest
from lumen.proof.outcome import Outcome
from lumen.random import preserved_generators
from lumen.task.hooks import HOOKS, overrides
from lumen.task.task_module import TaskModule

_NOT_WATCHED = ("setup", "on_load_checkpoint", "on_save_checkpoint", "on_exception", "teardown")
_SMALL = 1 << 20
_SAMPLES, _ORDER, _KEY = 4, 16, 0x5EED
_LIBRARIES = ("site-packages", "dist-packages")
_HERE = str(Path(__file__).parent.parent)


def is_users(kind: type) -> bool:
    """Whether a class is the user's own: of no installed package, of Python's library or of Lumen."""
    top = kind.__module__.partition(".")[0]
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    known = top in sys.stdlib_module_names or top in ("lumen", "torch", "builtins")
    return not known and not any(part in file for part in _LIBRARIES)


def lines_of(thing: Any) -> tuple[str, int, int] | None:
    """File, first and last line of a user's class; None: it is nobody's, or not to be found."""
    kind = thing if isinstance(thing, type) else type(thing)
    if not is_users(kind):
        return None
    try:
        text, first = inspect.getsourcelines(kind)
        return str(inspect.getsourcefile(kind)), first, first + len(text) - 1
    except (OSError, TypeError):
        return None


@final
class Watch:
    """Notes which of the user's hooks write parameters or buffers, and from where values are logged.

    Args:
        task: The task that owns the parameters.
        outcome: The record that it adds to.
        step: Gives the number of the step in progress.
    """

    def __init__(self, task: TaskModule, outcome: Outcome, step: Callable[[], int]) -> None:
        self._task, self._outcome, self._step = task, outcome, step

    def begin(self, callbacks: list[Callback]) -> None:
        """Look at the hooks of these callbacks and of the task from now on; call it before the run begins."""
        for owner in (*(each for each in callbacks if is_users(type(each))), self._task):
            for name in HOOKS:
                if name not in _NOT_WATCHED and overrides(owner, name):
                    setattr(owner, name, self._watched(owner, name, getattr(owner, name)))
        object.__setattr__(self._task, "log", partial(self._log, self._task.log))

    def _watched(self, owner: Any, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(hook)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = self._state()
            result = hook(*args, **kwargs)
            after = self._state()
            place = f"{type(owner).__name__}.{name} ({_place(hook)})"
            changed = [each for each in after if after[each] != before.get(each)]
            self._outcome.written += [(self._step(), place, each) for each in changed]
            return result

        return watched

    def _state(self) -> dict[str, Any]:
        named = {**dict(self._task.named_parameters()), **dict(self._task.named_buffers())}
        quick = sum(tensor.numel() for tensor in named.values()) > _SMALL
        return {
            name: (id(tensor), writes_to(tensor), None if quick else digest(tensor.detach().clone()))
            for name, tensor in named.items()
            if not tensor.is_inference()
        }

    def _log(self, log: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        frame = inspect.currentframe()
        self._outcome.logged.setdefault(name, _function(frame.f_back if frame else None))
        return log(name, *args, **kwargs)


def _function(frame: FrameType | None) -> str:
    """The user's function that called, its file and line."""
    while frame is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _place(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else f"{code.co_filename}:{code.co_firstlineno}"


# ---------------------------------------------------------------------- data


def probe(loader: Any) -> dict[str, list[Any]]:
    """What a map-style data set and its sampler give when they are asked twice with the same keys; nothing of others.

    It is for the end of a run: a data set that keeps a state is another one afterwards.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return {}
    with preserved_generators():
        found: dict[str, list[Any]] = {"length": [known_length(loader.dataset)]}
        found["samples"] = [list(_samples(loader)) for _ in range(2)]
        found["order"] = [_order(loader) for _ in range(2)]
    return found


def _samples(loader: DataLoader[Any]) -> Iterator[str]:
    own = OwnGenerators({"dataset": loader.dataset})
    for index in islice(_order(loader, plain=True), _SAMPLES):
        own.seed_all(_KEY)
        try:
            yield digest(loader.dataset[index])
        except Exception as error:  # whatever the user's code raises is no finding of this one
            yield type(error).__name__


def _order(loader: DataLoader[Any], *, plain: bool = False) -> list[Any]:
    """The first numbers that the sampler gives, or those of the samples in their own order."""
    if plain:
        return list(range(min(_SAMPLES, known_length(loader.dataset) or 0)))
    sampler: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    own = OwnGenerators({"sampler": sampler, "loader": loader.generator}, by_seed=True)
    own.seed_all(_KEY)
    torch.default_generator.manual_seed(_KEY)
    first = [str(each) for each in islice(iter(sampler), _ORDER)]
    own.put_back()
    return first
