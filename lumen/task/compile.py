"""`torch.compile` for the duration of a run, in place: names of parameters and checkpoints do not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any, final

import torch
from torch import nn

from lumen.errors import ConfigError
from lumen.internals.attributes import replaced_attribute
from lumen.internals.compiler import (
    check_compile_names,
    classify_compiler_error,
    compile_call,
    is_compiled,
    limit_versions,
    uncompile,
)
from lumen.metrics.torchmetrics_states import find_metrics
from lumen.task.task_module import TaskModule

_OPTIONS = ("mode", "dynamic", "fullgraph", "backend", "options")
_GRAPH_MODES, _GRAPHS = ("reduce-overhead", "max-autotune"), "triton.cudagraphs"
_EXCLUDED_METHODS = ("log", "log_dict", "print")  # not compiled: these methods of a task run on the host, and change
_VERSIONS = 32  # per piece of code: for each shape, with and without gradients, in training and in evaluation


@final
class Compilation(AbstractContextManager["Compilation"]):
    """Context in which modules of a task are compiled; at its end they are restored.

    Shapes are static unless `dynamic` is set. By default torch compiles code for any shape once it meets a second
    shape, and this code rounds differently for the first shape too. A resumed run meets the shapes in a different
    order, and would not be bitwise identical to the uninterrupted run.

    Args:
        setting: False: no module. True: the task's `forward` and its direct child modules. A class name or a list of
            class names: every module of these classes. A dictionary: options of `torch.compile` (`mode`, `dynamic`,
            `fullgraph`, `backend`, `options`) and optionally `blocks`, the class names.

    Raises:
        ConfigError: `setting` has an unknown option.
    """

    def __init__(self, setting: bool | str | list[str] | dict[str, Any] | None) -> None:
        self.setting = setting or False
        self._is_enabled = setting is not None and setting is not False
        options = dict(setting) if isinstance(setting, Mapping) else {}
        blocks = options.pop("blocks", None) if isinstance(setting, (bool, Mapping, type(None))) else setting
        self._blocks: list[str] = [blocks] if isinstance(blocks, str) else list(blocks or ())
        if unknown := set(options) - set(_OPTIONS):
            raise ConfigError(
                f"compile: unknown option {', '.join(sorted(unknown))}. The options are blocks, {', '.join(_OPTIONS)}."
            )
        self._options = {"dynamic": False} | options
        self._compiled: list[nn.Module] = []
        self._patches = ExitStack()

    def replays_graphs(self, device: torch.device) -> bool:
        """Return True if compiled code is replayed as CUDA graphs, so that the next replay overwrites its outputs."""
        uses_graphs = self._options.get("mode") in _GRAPH_MODES or (self._options.get("options") or {}).get(_GRAPHS)
        return self._is_enabled and device.type == "cuda" and bool(uses_graphs)

    def pause(self) -> AbstractContextManager[Any]:
        """Return a context in which modules compile nothing, for a step with other shapes."""
        return torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()

    def check_graphs(self, device: torch.device, *, shards: bool, accumulates: bool) -> None:
        """Raise an error if CUDA graphs cannot be replayed; do nothing without CUDA graphs.

        Args:
            device: The device of the task.
            shards: True if the strategy moves parameters.
            accumulates: True if a step has several micro-batches in each process.

        Raises:
            ConfigError: The strategy moves parameters, or a step has several micro-batches.
        """
        if not self.replays_graphs(device):
            return
        if shards:
            raise ConfigError(
                f"compile: CUDA graphs ({self.setting}) read parameters at fixed addresses, but this strategy "
                "gathers parameters at new addresses. Use mode: max-autotune-no-cudagraphs, or strategy: ddp."
            )
        if accumulates:
            raise ConfigError(
                f"compile: with CUDA graphs ({self.setting}) each micro-batch overwrites the gradients of the "
                "previous micro-batch, so that gradients cannot be summed. Use mode: max-autotune-no-cudagraphs, or "
                "one micro-batch per step."
            )

    def check_task(self, task: nn.Module) -> None:
        """Check that the task can be compiled, before compiling it.

        Raises:
            ConfigError: No module has such a class, no module can be compiled, or torch refuses an option.
        """
        if not self._is_enabled:
            return
        check_compile_names()
        self._list_targets(task)
        try:
            torch.compile(nn.Identity(), **self._options)
        except RuntimeError as error:
            raise ConfigError(f"compile: torch.compile refuses its options: {_get_first_line(error)}") from error

    def compile_modules(self, task: nn.Module) -> None:
        """Compile the modules at their first call; modules that are already compiled stay unchanged.

        Raises:
            ConfigError: The task cannot be compiled; see `check_task`.
        """
        self.check_task(task)
        for module in self._list_targets(task) if self._is_enabled else ():
            if not is_compiled(module):
                _compile_module(module, self._options)
                self._compiled.append(module)

    def _list_targets(self, task: nn.Module) -> list[nn.Module]:
        if self._blocks:
            found = {type(module).__name__ for module in task.modules()}
            if missing := [name for name in self._blocks if name not in found]:
                raise ConfigError(
                    f"compile: no module of {type(task).__name__} is a {' or a '.join(missing)}. The classes of the "
                    f"modules are {', '.join(sorted(found))}."
                )
            return [module for module in task.modules() if type(module).__name__ in self._blocks]
        targets = [task] if type(task).forward is not nn.Module.forward else []
        targets += _iterate_callable_children(task, set(map(id, find_metrics(task).values())))
        if not targets:
            raise ConfigError(
                f"compile: {type(task).__name__} has no forward and no module with parameters that could be compiled. "
                "Make the model a module of the task, or set compile: false."
            )
        return targets

    def __enter__(self) -> Compilation:
        if self._is_enabled:
            self._patches.enter_context(limit_versions(_VERSIONS))
            # The compiler would follow a call of `log` into Lumen, and recompile that code in each step.
            for name in _EXCLUDED_METHODS:
                disabled = torch.compiler.disable(vars(TaskModule)[name])  # type: ignore[no-untyped-call]
                self._patches.enter_context(replaced_attribute(TaskModule, name, disabled))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patches.__exit__(kind, error, trace)
        if self._compiled:
            torch.compiler.reset()  # versions are counted per code, which the next run's task shares
        while self._compiled:
            uncompile(self._compiled.pop())
        if self._is_enabled:
            _explain_compile_error(error)


def _iterate_callable_children(module: nn.Module, metrics: set[int]) -> Iterator[nn.Module]:
    """Yield the child modules that have parameters; for a list or dictionary of modules, yield its entries."""
    for child in module.children():
        if isinstance(child, torch.jit.ScriptModule):
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _iterate_callable_children(child, metrics)
        elif id(child) not in metrics and next(child.parameters(), None) is not None:
            yield child


def _compile_module(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a module in place, without a wrapper around it."""
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**options)
    else:  # torch skips its own code: `nn.Sequential.compile()` does nothing
        compile_call(module, options)


def _explain_compile_error(error: BaseException | None) -> None:
    """Raise a clear error for an error of torch.compile; return for any other error."""
    if error is None or (topic := classify_compiler_error(error)) is None:
        return
    if topic == "versions":
        raise ConfigError(
            f"compile: one module needed more than {_VERSIONS} compiled versions. torch compiles a version for each "
            "shape, and for each value of a number that the code reads; torch's warning names the cause. Pad the "
            "batches to few shapes, or set compile: {dynamic: true} (a resumed run is then equal within "
            "rounding). Read a number that changes, such as self.global_step, in training_step, or store the number "
            "in a tensor."
        ) from error
    if "InvalidCxxCompiler" in str(error):
        raise ConfigError(
            f"compile: compiling for the CPU needs a C++ compiler, and none was found: {_get_first_line(error)}. "
            "Install g++ or clang++, name a compiler in the environment variable CXX, or set compile: false."
        ) from error
    raise ConfigError(
        f"compile: torch.compile failed: {type(error).__name__}: {_get_first_line(error)}. Try compile: false. If "
        "the run then works, name the classes of blocks to compile (compile: [Block]). Otherwise the model has an "
        "error."
    ) from error


def _get_first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")
