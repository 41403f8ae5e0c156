"""Private names of torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from importlib import import_module
from types import FunctionType
from typing import Any, Literal

import torch
from torch import nn

from lumen.internals.torch_versions import check_attributes

WRAPPED_NAME = "_orig_mod"
"""Name of the module inside the wrapper that `torch.compile(module)` returns."""


def check_compile_names() -> None:
    """Check that torch has the private names that in-place compilation needs.

    Raises:
        ConfigError: The installed torch lacks a name.
    """
    check_attributes("compile", nn.Module(), "_compiled_call_impl", "_call_impl")
    check_attributes("compile", torch, "_dynamo")
    check_attributes("compile", torch._dynamo.config, "patch", "recompile_limit", "fail_on_recompile_limit_hit")
    check_attributes(
        "compile", torch._dynamo.exc, "FailOnRecompileLimitHit", "TorchDynamoException", "TorchRuntimeError"
    )


def is_compiled(module: nn.Module) -> bool:
    """Return True if a module is compiled, in place or by a wrapper around it."""
    return getattr(module, "_compiled_call_impl", None) is not None or WRAPPED_NAME in module._modules


def compile_call(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Compile a module's calls, for a module that torch skips because its code is torch's own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # This copy of the code belongs to one module, so torch compiles it and counts its versions separately.
    separate_call = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    module._compiled_call_impl = torch.compile(separate_call, **options)


def call_uncompiled(module: nn.Module, *args: Any) -> Any:
    """Call a module with its hooks, but not its compiled code."""
    return module._call_impl(*args)  # type: ignore[no-untyped-call]


def uncompile(module: nn.Module) -> None:
    """Undo the compilation of a module in place."""
    del module.__dict__["_compiled_call_impl"]


def unwrap_compiled(model: nn.Module) -> None:
    """Replace the wrappers of `torch.compile(module)` within a model by their modules."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            while child is not None and WRAPPED_NAME in child._modules:
                child = child._modules[WRAPPED_NAME]
            setattr(parent, name, child)


def limit_versions(max_versions: int) -> AbstractContextManager[Any]:
    """Return a context that limits the compiled versions of a function to `most`, and lets no version be outdated.

    One more version raises an error.
    """
    settings: dict[str, Any] = {"recompile_limit": max_versions, "fail_on_recompile_limit_hit": True}
    # Before torch 2.13, unfrozen parameters would get no gradient otherwise (#177158).
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    limits: AbstractContextManager[Any] = torch._dynamo.config.patch(**settings)
    return limits


def classify_compiler_error(error: BaseException | None) -> Literal["versions", "other"] | None:
    """Return the kind of an error of torch.compile: too many "versions", or "other"; None for the model's own error."""
    exceptions = torch._dynamo.exc
    if isinstance(error, exceptions.FailOnRecompileLimitHit):
        return "versions"
    if not isinstance(error, exceptions.TorchDynamoException) or isinstance(error, exceptions.TorchRuntimeError):
        return None
    return "other"


def import_compiler() -> None:
    """Import the compiler before process groups are opened.

    A later import would keep the default process group alive, with gloo's threads.
    """
    with suppress(ImportError):
        import_module("torch._dynamo")


def get_compile_time_s() -> float:
    """Return the seconds that this process has spent compiling."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0.0 if utils is None else float(utils.calculate_time_spent()["total_wall_time"])
