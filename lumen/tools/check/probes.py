"""What is seen from inside a forward: the losses of classifiers, and what the first layer is given."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from lumen.errors import DataError

_BY_CLASSES = (functional.cross_entropy, functional.nll_loss)
_BINARY = (functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy)
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
@dataclass(frozen=True)
class ClassLoss:
    """A call of `cross_entropy`, or of one of its kin.

    Attributes:
        classes: How many there are; 2 for a binary one.
        is_plain: The mean of all targets, none weighed: with equal odds for all classes it is the logarithm of their
            number.
        value: The loss; None: not a single number.
        least: The smallest label, those aside that are ignored; None: there are no labels.
        most: The largest label.
        labels: Different labels, of the first 4096.
    """

    classes: int
    is_plain: bool
    value: float | None
    least: int | None = None
    most: int | None = None
    labels: frozenset[int] = frozenset()

    @property
    def is_out_of_range(self) -> bool:
        """A label is no number of a class."""
        return self.least is not None and self.most is not None and (self.least < 0 or self.most >= self.classes)

    @property
    def by_chance(self) -> float:
        """What it is for one that knows nothing."""
        return math.log(self.classes)


class FirstInput(NamedTuple):
    """What a task's first linear or convolutional layer was given.

    Attributes:
        name: Of the layer, with its class.
        mean: Over all elements.
        std: Standard deviation over all elements.
        least: The smallest element.
        most: The largest one.
    """

    name: str
    mean: float
    std: float
    least: float
    most: float


@final
@dataclass
class Seen:
    """What a forward has shown.

    Attributes:
        losses: Calls of losses of classifiers, in their order.
        first: What the first layer was given; None: it has none, or no numbers.
    """

    losses: list[ClassLoss] = field(default_factory=list)
    first: FirstInput | None = None


@final
class _Losses(TorchFunctionMode):
    """Sees calls of torch's losses."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _BY_CLASSES and func not in _BINARY:
            return func(*args, **kwargs)
        found = None
        with suppress(TypeError, ValueError, IndexError):  # the function itself refuses it, in its own words
            found = _look(func, dict(inspect.signature(func).bind(*args, **kwargs).arguments))
        if found is not None:
            self._seen.losses.append(found)
            if found.is_out_of_range and found.least is not None and args[0].device.type != "cpu":
                raise DataError(  # a GPU would fail for good, and far from here
                    f"labels from {found.least} to {found.most}, but {found.classes} classes: from 0 to "
                    f"{found.classes - 1}."
                )
        value = func(*args, **kwargs)
        if found is not None and value.numel() == 1:
            number = float(value.detach())
            self._seen.losses[-1] = ClassLoss(**(vars(found) | {"value": number}))
        return value


def _look(func: Callable[..., Any], given: dict[str, Any]) -> ClassLoss | None:
    outputs, target = given["input"], given["target"]
    is_mean = given.get("reduction", "mean") == "mean" and given.get("weight") is None
    if func in _BINARY:
        return ClassLoss(2, is_mean and given.get("pos_weight") is None, None)
    classes = outputs.shape[1 if outputs.dim() > 1 else 0]
    if target.is_floating_point():
        return ClassLoss(classes, is_mean, None)
    labels = target.detach()[target.detach() != given.get("ignore_index", -100)]
    if not labels.numel():
        return None
    some = frozenset(labels.flatten()[:4096].tolist())
    return ClassLoss(classes, is_mean, None, int(labels.min()), int(labels.max()), some)


@final
class _Layers:
    """Sees what the first layer of a task is given; a hook for all modules.

    Args:
        task: Only its modules are looked at.
        seen: Where it is kept.
    """

    def __init__(self, task: nn.Module, seen: Seen) -> None:
        self._names = {module: name for name, module in task.named_modules() if isinstance(module, _LAYERS)}
        self._seen = seen

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if self._seen.first is not None or module not in self._names or not args:
            return
        given = args[0]
        if not isinstance(given, torch.Tensor) or not given.is_floating_point() or given.numel() < 2:
            return
        numbers = given.detach().float()
        mean, std, least, most = (float(each) for each in (numbers.mean(), numbers.std(), numbers.min(), numbers.max()))
        self._seen.first = FirstInput(f"{self._names[module]} ({type(module).__name__})", mean, std, least, most)


@final
class Probes:
    """What looks into forwards, from `begin` to `end`.

    Args:
        task: The task whose forwards they are.
    """

    def __init__(self, task: nn.Module) -> None:
        self._task = task
        self._closing = ExitStack()

    def begin(self) -> Seen:
        """Look into what comes. Returns what will be seen."""
        self.end()
        seen = Seen()
        self._closing.enter_context(_Losses(seen))
        self._closing.callback(register_module_forward_pre_hook(_Layers(self._task, seen)).remove)
        return seen

    def end(self) -> None:
        """Look no more."""
        self._closing.close()
