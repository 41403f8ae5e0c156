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
import runpy
import sys
import traceback
from collections.abc import Callable
from functools import partial, wraps
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
_HINT = "If the edits are written, name the project before them by --original."


def install() -> None:
    """Prepare this interpreter: protect the project's directory, refuse network, and change modules on their import."""
    settings = json.loads(os.environ[VARIABLE])
    source, folder = settings["source"], settings["folder"]
    # An editable installation of the project names the project's directory: the process imports from the copy.
    sys.path[:] = [settings["copy"] + each[len(source) :] if f"{each}/".startswith(f"{source}/") else each
                   for each in sys.path if each != folder]  # fmt: skip
    sys.addaudithook(partial(_on_audit_event, source, folder))
    changes = {name: partial(_change_trainer, library, settings) for name, library in _TRAINERS.items()}
    seeds = {"torch": lambda _: _seed_generators(0),
             "lumen.random": lambda module: setattr(module, "seed_for_building", _seed_generators)}  # fmt: skip
    sys.meta_path.insert(0, _ChangingFinder(changes | seeds))
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.origin is not None:
        runpy.run_path(hidden.origin)


def _on_audit_event(source: str, folder: str, event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse writes in the project's directory, and connections to other machines."""
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = arguments[event == "socket.connect"]  # the path of a socket of this machine, a host, or host and port
        host = address[0] if isinstance(address, tuple) else address if event == "socket.getaddrinfo" else None
        if host not in (None, "", "localhost", "127.0.0.1", "::1", os.uname().nodename):
            raise ConnectionRefusedError(f"`lumen migrate --check` has no network, but the project asks {host}.")
    if event not in ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir"):
        return
    path, mode, flags = arguments if event == "open" else (arguments[0], "w", 0)
    writes = {*mode} & {*"wax+"} if mode else flags & (os.O_WRONLY | os.O_RDWR)
    if writes and isinstance(path, str | os.PathLike):
        place = f"{os.path.realpath(path)}/"
        if place.startswith(f"{source}/") and not place.startswith(f"{folder}/"):
            raise PermissionError(f"`lumen migrate --check` writes nothing in {source}, but the project writes {path}.")


def _seed_generators(seed: int) -> None:
    """Seed the global generators of torch, numpy and `random` like `seed_everything` of Lightning."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
            _end(settings, problem=f"the command for {settings['library']} trains with {library}. {_HINT}")
        if given.get("ckpt_path") is not None:
            _end(settings, problem="the command resumes a training. Give a command that starts a new training.")
        observer = StepObserver(trainer, self, given["model"], settings)
        try:
            fit(self, *args, **kwargs)
        except BaseException as error:
            if not observer.is_over:
                traceback.print_exc()
                _end(settings, problem=f"fit of {library} failed: {type(error).__name__}: {error}")
        observer.finish(given)
        _end(settings, record=observer.describe())

    for method in (make_for_one_process, record_fit):
        setattr(trainer, method.__name__, method)  # `wraps` has set the names.


def _end(settings: dict[str, Any], **answer: Any) -> NoReturn:
    """Write the answer of this process, and end the process before the project runs more code."""
    sys.stdout.flush()
    sys.stderr.flush()
    file = Path(settings["folder"], f"{settings['library']}.json")
    temporary = file.with_suffix(".part")
    temporary.write_text(json.dumps(answer), encoding="utf-8")
    temporary.replace(file)
    os._exit(0)
