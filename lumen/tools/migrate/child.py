"""Record of the first steps of a training, by Lightning or Lumen, in a process of `lumen migrate --check`.

`install` runs at the start of the interpreter. It changes the class `Trainer` once the project imports the class: `fit`
then records, stops after some steps, and ends the process. A training with Lumen also receives the initial weights and
the batches of the training with Lightning.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, final

VARIABLE = "LUMEN_MIGRATE_CHECK"  # environment variable with the settings of a process, as JSON
LIGHTNING, LUMEN = "Lightning", "Lumen"
_TRAINERS = {
    "lightning.pytorch.trainer.trainer": LIGHTNING,
    "pytorch_lightning.trainer.trainer": LIGHTNING,
    "lumen.trainer.trainer": LUMEN,
}
_LOCAL = (None, "", "localhost", "127.0.0.1", "::1")


def install() -> None:
    """Prepare this interpreter: protect the project's directory, refuse network, and wait for the trainer's import."""
    settings = json.loads(os.environ[VARIABLE])
    source, copy = settings["source"], settings["copy"]
    sys.path[:] = [_move_path(each, source, copy) for each in sys.path if each != settings["folder"]]
    del sys.modules["sitecustomize"]
    with suppress(ImportError):
        import_module("sitecustomize")  # the module of the environment, which the one of the check hides
    sys.addaudithook(partial(_on_audit_event, source, settings["folder"]))
    sys.meta_path.insert(0, _ChangingFinder({
        "torch": lambda _: _seed_generators(0),
        "lumen.random": lambda module: setattr(module, "seed_for_building", _seed_generators),
        **{name: partial(_change_trainer, library, settings) for name, library in _TRAINERS.items()},
    }))  # fmt: skip


def _seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random` like `seed_everything` of Lightning."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _move_path(path: str, source: str, copy: str) -> str:
    """Return the path in the copy of the project, for a directory that an editable installation names."""
    return copy + path[len(source) :] if f"{path}/".startswith(f"{source}/") else path


def _on_audit_event(source: str, folder: str, event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse writes in the project's directory, and connections to other machines."""
    if event in ("socket.connect", "socket.getaddrinfo"):
        host = arguments[0] if event == "socket.getaddrinfo" else arguments[1][0]
        if not (event == "socket.connect" and isinstance(arguments[1], str | bytes)) and host not in _LOCAL:
            raise ConnectionRefusedError(
                f"`lumen migrate --check` has no network, but the project asks {host}. Download the data first."
            )
        return
    if event == "open":
        path, mode, flags = arguments
        writes = any(each in mode for each in "wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
    else:
        path, writes = arguments[0] if arguments else None, event in ("os.mkdir", "os.remove", "os.rename", "os.rmdir")
    if not writes or not isinstance(path, str | os.PathLike):
        return
    place = os.path.realpath(path)
    if place.startswith(f"{source}/") and not place.startswith(f"{folder}/"):
        raise PermissionError(f"`lumen migrate --check` changes nothing in {source}, but the project writes {place}.")


@final
class _ChangingFinder:
    """Finder that changes modules right after they were executed.

    Args:
        changes: The function that changes a module, by the module's name.
    """

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self._changes = changes

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the specification of a module to change, or None for all other modules."""
        spec = PathFinder.find_spec(name, path, target) if name in self._changes else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: ModuleType) -> None:
                execute(module)
                self._changes[name](module)

            spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def _change_trainer(library: str, settings: dict[str, Any], module: ModuleType) -> None:
    """Change the class `Trainer` of a module: one process, and a `fit` that records and ends the process."""
    from lumen.tools.migrate.recording import StepObserver

    trainer: Any = module.Trainer
    make, fit = trainer.__init__, trainer.fit

    @wraps(make)
    def make_for_one_process(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs |= {name: 1 for name in ("devices", "num_nodes") if name in kwargs}
        if str(kwargs.get("strategy", "")).startswith(("ddp", "fsdp", "deepspeed")):
            kwargs["strategy"] = "auto"
        make(self, *args, **kwargs)

    @wraps(fit)
    def record_fit(self: Any, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(fit).bind(self, *args, **kwargs).arguments
        if library != settings["library"]:
            _end(settings, problem=f"the command trains with {library}, not with {settings['library']}")
        if given.get("ckpt_path") is not None:
            _end(settings, problem="the command resumes a training, but only a new training can be compared")
        observer = StepObserver(trainer, self, given["model"], settings)
        try:
            fit(self, *args, **kwargs)
        except BaseException as error:
            if not observer.is_over:
                traceback.print_exc()
                _end(settings, problem=f"{type(error).__name__}: {error}")
        observer.finish(given)
        _end(settings, record=observer.describe())

    trainer.__init__, trainer.fit = make_for_one_process, record_fit


def _end(settings: dict[str, Any], **answer: Any) -> NoReturn:
    """Write the answer of this process, and end the process before the project runs more code."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = Path(settings["folder"], f"{settings['library']}.json")
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(file)
    os._exit(0)
