"""Checks of the arguments of `self.log`, and errors for wrong arguments."""

from __future__ import annotations

import difflib
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, final, get_args

import torch

from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_column
from lumen.errors.lightning_names import INSTEAD_IN_LOG

if TYPE_CHECKING:  # The import takes longer than that of Lumen. A user who logs a metric has imported torchmetrics.
    from torchmetrics import Metric

_ROUNDING = 1e-6  # relative


class HookValue(NamedTuple):
    """The values that all processes have logged under one name outside of steps, without a weight or `reduce_fx`."""

    hook: str
    ranks: Sequence[float]
    is_tensor: bool


@final
class PartialValueWarnings:
    """Warnings, once per name, of values that probably cover only a part of the samples.

    Outside of steps a number has no weight. So its mean over the processes is right only if the number is by nature
    equal on all processes, such as a result of torchmetrics. If the numbers differ, the mean is doubtful. If the
    numbers are equal, mean, minimum and maximum are right, but a count or a sum is not. So a Python int, such as the
    length of a list, is doubtful even then.
    """

    def __init__(self) -> None:
        self._warned_names: set[str] = set()

    def warn_of_doubtful(self, values: Mapping[str, HookValue], known: Container[float]) -> None:
        """Warn of doubtful values of an epoch.

        Args:
            values: The values of all processes by name.
            known: Numbers that are by nature equal on all processes, such as computed metrics.
        """
        for name, value in values.items():
            if name not in self._warned_names and _is_doubtful(value, known):
                self._warned_names.add(name)
                _log.warning(
                    "%s logs %r as one number per process (%s). Lumen writes the mean of these numbers, which "
'ignores how many samples each represents. Set self.log(..., reduce_fx="sum"), "min" or "max"; '
'or "mean" if the mean is right. For a value over all samples log in the step, pass weight, log '
"a torchmetrics object, or combine the numbers by self.all_gather.",
                    value.hook, name, ", ".join(f"{each:g}" for each in value.ranks[:8]),
                )  # fmt: skip


def _is_doubtful(value: HookValue, known: Container[float]) -> bool:
    first, *other_values = value.ranks
    if not other_values:  # Only one process logs this name.
        return False
    if not all(_are_equal(first, other) for other in other_values):
        return True
    return not value.is_tensor and first != 0 and first.is_integer() and first not in known


def _are_equal(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_ROUNDING) or (math.isnan(one) and math.isnan(other))


Reduction = Literal["mean", "sum", "min", "max"]
#: Functions and other names for a reduction, as in Lightning.
_REDUCTION_NAMES: Mapping[Any, Reduction] = {
    torch.mean: "mean", "avg": "mean", torch.sum: "sum", sum: "sum", torch.min: "min", torch.amin: "min", min: "min",
    torch.max: "max", torch.amax: "max", max: "max",
}  # fmt: skip


class LogOptions(NamedTuple):
    """Options of a logged name. The first call of a stage sets them; a later call with other options is an error."""

    on_step: bool
    on_epoch: bool
    prog_bar: bool
    logger: bool
    reduce_fx: Reduction
    suffix: str = ""  # the suffix of the loader in the name, if several loaders log one name
    hook: str = ""  # name of the hook outside of steps, for a number of one process without weight and `reduce_fx`

    def get_variant_name(self, name: str, of: str) -> str:
        """Return `x_step` or `x_epoch` for the name `x`. The suffix stays at the end."""
        return f"{name.removesuffix(self.suffix)}_{of}{self.suffix}"

    def list_published_names(self, name: str) -> tuple[str, ...]:
        """Return the names under which the values of a logged name can be read."""
        if self.on_step and self.on_epoch:
            return self.get_variant_name(name, "step"), self.get_variant_name(name, "epoch")
        return (name,) if self.on_step or self.on_epoch else ()


#: Arguments of a call of `self.log`, with the place of the call; see `resolve_options`. A plain tuple is fast to build
#: and to compare with that of the last call, which every call does.
LogCall = tuple[bool, bool | None, bool | None, bool, bool | None, Any, bool, str, str]


def resolve_options(name: str, call: LogCall) -> LogOptions:
    """Return the options of a call of `self.log`. If `on_step` or `on_epoch` is None, the place of the call decides.

    Args:
        name: The name of the value, for errors.
        call: A tuple of a flag, which is True for a number in a training step; the options `on_step`, `on_epoch`,
            `prog_bar`, `logger`, `reduce_fx` (a `Reduction` or an equivalent) and `add_dataloader_idx`; the hook, as in
            `LogOptions`; and the suffix of the present loader.

    Raises:
        ConfigError: An option has a wrong type, or `reduce_fx` is unknown.
    """
    in_step, on_step, on_epoch, prog_bar, logger, reduce_fx, add_dataloader_idx, hook, loader = call
    logger = True if logger is None else logger
    switches = {"prog_bar": prog_bar, "logger": logger, "add_dataloader_idx": add_dataloader_idx}
    for option, given in {"on_step": on_step, "on_epoch": on_epoch, **switches}.items():
        if not isinstance(given, bool) and (given is not None or option in switches):
            raise ConfigError(f"self.log({name!r}, {option}={given!r}): expected True or False.")
    reduction = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
    with suppress(TypeError):  # `reduce_fx` may have no hash.
        reduction = _REDUCTION_NAMES.get(reduction, reduction)
    if not (isinstance(reduction, str) and reduction in get_args(Reduction)):
        raise ConfigError(
            f"self.log({name!r}, reduce_fx={reduce_fx!r}): expected one of {', '.join(get_args(Reduction))}, or "
            "torch.mean, torch.sum, torch.min or torch.max. Log a torchmetrics.Metric for any other reduction."
        )
    on_step = in_step if on_step is None else on_step
    on_epoch = not in_step if on_epoch is None else on_epoch
    if not (on_step or on_epoch):
        raise ConfigError(
            f"self.log({name!r}, on_step=False, on_epoch=False) records nothing. Set one of the two options to True, "
            "or remove the call."
        )
    return LogOptions(
        on_step=on_step,
        on_epoch=on_epoch,
        prog_bar=prog_bar,
        logger=logger,
        reduce_fx=cast("Reduction", reduction),
        suffix=loader if add_dataloader_idx else "",
        hook=hook,
    )


def make_conflict_error(name: str, options: LogOptions, earlier: LogOptions) -> ConfigError:
    """Return the error for a name that is logged with other options than before; it shows the options that differ."""

    def describe(one: LogOptions, other: LogOptions) -> str:
        differing = {key for key, value in one._asdict().items() if value != getattr(other, key)}
        words = [f"with {key}={getattr(one, key)!r}" for key in LogOptions._fields[:5] if key in differing]
        words += [f"with add_dataloader_idx={bool(one.suffix)}"] * ("suffix" in differing)
        words += [f"in {one.hook or 'a step, or with weight or reduce_fx'}"] * ("hook" in differing)
        return " and ".join(words)

    return ConfigError(
        f"self.log({name!r}) was called {describe(options, earlier)} after a call {describe(earlier, options)}. Log "
        "one name always with the same options, or use two names."
    )


def check_name(name: Any, suffix: str | None = None) -> None:
    """Refuse a name that is no string, is empty, is "step" or "epoch", or cannot be the name of a column.

    Args:
        name: The name of the value.
        suffix: The suffix of the loader that Lumen has appended to the name; None with `add_dataloader_idx=False`.

    Raises:
        ConfigError: The name is not allowed.
    """
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"self.log({name!r}, ...): the name of a value is a string that is not empty; found "
            f"{type(name).__name__}. Write self.log('loss', loss)."
        )
    if name in ("step", "epoch"):
        raise ConfigError(f"self.log({name!r}): every logged row already has a column {name}. Use a different name.")
    if suffix is not None and "/dataloader_idx_" in name.removesuffix(suffix):
        raise ConfigError(
            f"self.log({name.removesuffix(suffix)!r}): Lumen appends /dataloader_idx_N to the name if a stage has "
            "several loaders. Write the name without it, or add add_dataloader_idx=False."
        )
    check_column(name, f"self.log({name!r})")


def check_unknown_options(options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Refuse an unknown keyword argument of `self.log`, unless it is Lightning's and requests nothing.

    Raises:
        ConfigError: The argument is unknown; the message has the argument to use instead.
    """
    for name, value in options.items():
        if name in INSTEAD_IN_LOG and (value is None or value is False):
            continue
        close = difflib.get_close_matches(name, known)
        hint = INSTEAD_IN_LOG.get(name) or (f"Did you mean {' or '.join(close)}?" if close else "See help(self.log).")
        raise ConfigError(f"self.log has no argument {name}. {hint}")


def iterate_items(values: Any) -> Iterable[tuple[Any, Any]]:
    """Return the names and values in the argument of `self.log_dict`.

    Raises:
        ConfigError: `values` has no `items()`.
    """
    items = getattr(values, "items", None)
    if not callable(items) or isinstance(values, type):
        raise ConfigError(
            f"self.log_dict: expected a dictionary of names and values, found an object of type "
            f"{type(values).__name__}. Write self.log_dict({{'loss': loss}}), or self.log('loss', loss) for one value."
        )
    return items()  # type: ignore[no-any-return]


def as_weight(name: str, weight: Any, batch_size: Any) -> float:
    """Return the weight of a logged value as a float, because a tensor would sum weights in its dtype.

    Raises:
        ConfigError: The weight is negative, not finite or no number; or both arguments are set.
    """
    if weight is not None and batch_size is not None:
        raise ConfigError(
            f"self.log({name!r}, weight={weight!r}, batch_size={batch_size!r}): both arguments set the weight of the "
            "value. Pass one of the two."
        )
    option, given = ("batch_size", batch_size) if weight is None else ("weight", weight)
    try:
        number = math.nan if isinstance(given, (str, bytes)) else float(given)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(
            f"self.log({name!r}): expected a finite {option} >= 0, found {given!r}. The {option} is the number of "
            "samples (tokens, boxes) that the value represents; 0 ignores the value."
        )
    return number


def as_metric(name: str, value: Any) -> Metric | None:
    """Return the value if it is a `torchmetrics.Metric`; None if it is a number or a tensor.

    Raises:
        ConfigError: The value is of any other type, or complex.
    """
    if isinstance(value, (torch.Tensor, Real)):
        if isinstance(value, torch.Tensor) and value.is_complex():
            raise ConfigError(
                f"self.log({name!r}): expected a real number, found {value.dtype}. Log the real and imaginary parts."
            )
        return None
    from torchmetrics import Metric

    if isinstance(value, Metric):
        return value
    raise _make_value_error(name, value)


def as_number(name: str, value: Any) -> float | torch.Tensor:
    """Return a logged number as a float; on CUDA a float64 copy on the device, so that the host does not wait.

    Raises:
        ConfigError: The value is no number, a tensor of several elements, a `DTensor`, or too large for a float.
    """
    if type(value) is torch.Tensor and value.is_cpu and value.numel() == 1:  # the most frequent case
        return value.item()
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Real):
            raise _make_value_error(name, value)
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"self.log({name!r}): the number is too large for a float. Log its logarithm.") from None
    if value.numel() != 1:
        raise ConfigError(
            f"self.log({name!r}): expected one number, found a tensor of shape {tuple(value.shape)}. Log the mean of "
            "the tensor, or a different single number."
        )
    if hasattr(value, "full_tensor"):
        raise ConfigError(
            f"self.log({name!r}): this number is a sharded tensor, because it was computed from sharded parameters "
            "or gradients. Log value.full_tensor(), and call full_tensor() on every process."
        )
    if value.device.type in ("cpu", "mps"):  # MPS has no float64 for sums.
        return value.item()
    # The value is copied, because a buffer may change in place, and a CUDA graph reuses its memory.
    return value.detach().reshape(()).to(torch.float64, copy=True)


def _make_value_error(name: str, value: Any) -> ConfigError:
    if isinstance(value, str):
        advice = " For text call logger.log_text."
    elif hasattr(value, "items"):
        advice = " For several values call self.log_dict."
    else:
        advice = ""
    return ConfigError(
        f"self.log({name!r}): cannot log an object of type {type(value).__name__} here. Log a number, a tensor of "
        "one element or a torchmetrics.Metric, always of the same type under one name." + advice
    )
