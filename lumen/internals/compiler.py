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

from lumen.internals.torch_versions import need

WRAPPED = "_orig_mod"
"""Name of the module inside the wrapper that `torch.compile(module)` returns."""


def need_to_compile() -> None:
    """Check that this torch has the private names that compiling in place uses.

    Raises:
        ConfigError: This version of torch lacks some of them.
    """
    need("compile", nn.Module(), "_compiled_call_impl", "_call_impl")
    need("compile", torch, "_dynamo")
    need("compile", torch._dynamo.config, "patch", "recompile_limit", "fail_on_recompile_limit_hit")
    need("compile", torch._dynamo.exc, "FailOnRecompileLimitHit", "TorchDynamoException", "TorchRuntimeError")


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled, in place or by a wrapper around it."""
    return getattr(module, "_compiled_call_impl", None) is not None or WRAPPED in module._modules


def compile_calls(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Make a module's calls compiled ones, where torch passes over the module because its code is torch's own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # code that belongs to this one module alone is compiled, and counts its versions alone
    own = FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)
    module._compiled_call_impl = torch.compile(own, **options)


def uncompile(module: nn.Module) -> None:
    """Undo what was compiled in place."""
    del module.__dict__["_compiled_call_impl"]


def limited_versions(most: int) -> AbstractContextManager[Any]:
    """The context in which more than `most` compiled versions of one function are an error, and none is out of date."""
    settings: dict[str, Any] = {"recompile_limit": most, "fail_on_recompile_limit_hit": True}
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):  # else what is unfrozen gets no gradient (#177158)
        settings["skip_tensor_guards_with_matching_dict_tags"] = False
    limits: AbstractContextManager[Any] = torch._dynamo.config.patch(**settings)
    return limits


def is_compilers(error: BaseException | None) -> Literal["versions", "other"] | None:
    """Whether an error is torch.compile's own: of too many compiled versions, or another; None: the model's own."""
    of_torch = torch._dynamo.exc
    if isinstance(error, of_torch.FailOnRecompileLimitHit):
        return "versions"
    if not isinstance(error, of_torch.TorchDynamoException) or isinstance(error, of_torch.TorchRuntimeError):
        return None
    return "other"


def import_compiler() -> None:
    """Import the compiler before process groups are opened: later it would keep the default one, and gloo's threads."""
    with suppress(ImportError):
        import_module("torch._dynamo")


def compiled_for_s() -> float:
    """Seconds that this process has spent compiling."""
    utils = sys.modules.get("torch._dynamo.utils")
    return 0.0 if utils is None else float(utils.calculate_time_spent()["total_wall_time"])
