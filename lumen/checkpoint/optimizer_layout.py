"""Where an optimizer keeps its state: in `state` and `param_groups`, in attributes, in optimizers inside it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.checkpoint.format.codec import encode
from lumen.errors import CheckpointError
from lumen.internals.optimizers import attributes_of_all_optimizers, has_state_dict_hooks
from lumen.optim import Lookahead, MultiOptimizer, WholeMatrices

_TAG = "id of"
_ADDRESS = 2**32  # counters and indices are smaller, ids and addresses of tensors larger


def ids_as_names(value: Any, names: Mapping[int, str], where: str) -> Any:
    """Replace each id of a parameter in nested containers by `("id of", name)`; other values stay the same objects.

    Args:
        value: State of an optimizer.
        names: Names of parameters by their id.
        where: The place of the state, for the error.

    Raises:
        CheckpointError: A key is another address of this process, which no resumed run would find.
    """

    def translated(item: Any) -> Any:
        return (_TAG, names[item]) if type(item) is int and item in names else item

    def check_key(key: Any) -> None:
        if type(key) is int and key >= _ADDRESS and key not in names:
            raise CheckpointError(
                f"the optimizer's state ({where}) has the key {key}, which looks like an address of this process: a "
                "resumed run would not find it. Keep the state in self.state[parameter], or use as the key "
                "id(parameter), a name or an index."
            )

    return _replaced(value, translated, check_key)


def names_as_ids(value: Any, parameters: Mapping[str, Any]) -> Any:
    """Undo `ids_as_names` for the parameters of this process."""

    def translated(item: Any) -> Any:
        is_tagged = type(item) is tuple and len(item) == 2 and item[0] == _TAG and item[1] in parameters
        return id(parameters[item[1]]) if is_tagged else item

    return _replaced(value, translated, lambda key: None)


def _replaced(value: Any, translated: Callable[[Any], Any], check_key: Callable[[Any], None], depth: int = 0) -> Any:
    """Apply a function to each entry and key of nested plain containers."""
    if (new := translated(value)) is not value or depth > 100:  # containers in a cycle are refused where they are saved
        return new

    def inner(item: Any) -> Any:
        return _replaced(item, translated, check_key, depth + 1)

    if isinstance(value, dict):
        for key in value:
            check_key(key)
        pairs = [(key, inner(key), item, inner(item)) for key, item in value.items()]
        is_same = all(key is new_key and item is new_item for key, new_key, item, new_item in pairs)
        return value if is_same else {new_key: new_item for _, new_key, _, new_item in pairs}
    if type(value) in (list, tuple, set, frozenset):
        items = [(item, inner(item)) for item in value]
        return value if all(item is each for item, each in items) else type(value)(each for _, each in items)
    return value


SHARING = (Lookahead, MultiOptimizer, WholeMatrices)
"""Those whose groups and state are the same objects as the optimizers' inside."""
_OWNERS_OF_NOTHING = ("torch.optim", "lumen.optim")  # packages whose classes keep nothing in attributes that moves


def keeps_unknown_state(optimizer: Optimizer) -> bool:
    """Return True if an optimizer, or one inside it, is of a class that neither torch nor Lumen defines."""
    return any(not type(each).__module__.startswith(_OWNERS_OF_NOTHING) for each in optimizers_in(optimizer).values())


def kind_of(optimizer: Optimizer) -> str:
    """Name of an optimizer's class, with those of the optimizers inside it."""
    kinds = ", ".join(kind_of(each) for _, each in _inside(optimizer))
    return type(optimizer).__qualname__ + (f"({kinds})" if kinds else "")


def attributes_of(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Attributes that hold plain data or tensors, for the optimizer and each inside it, by place.

    Raises:
        CheckpointError: An attribute holds tensors in a way that cannot be saved.
    """
    found, parameters = {}, {*map(id, model.parameters())}
    for place, owner in optimizers_in(optimizer).items():
        if not has_own_state(owner) and not type(owner).__module__.startswith(_OWNERS_OF_NOTHING):
            own = {name: value for name, value in vars(owner).items() if name not in attributes_of_all_optimizers()}
            found[place] = {name: value for name, value in own.items() if _is_state(owner, name, value, parameters)}
    return found


def _inside(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers in attributes of one, with their places."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{number}]", each) for number, each in enumerate(value) if isinstance(each, Optimizer))
        elif isinstance(value, dict) and name != "state":
            yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if isinstance(each, Optimizer))


def optimizers_in(optimizer: Optimizer, place: str = "") -> dict[str, Optimizer]:
    """An optimizer and those inside it, by place; one with its own `state_dict` is not looked into."""
    found = {place: optimizer}
    if not _overrides(optimizer, "state_dict"):
        for name, each in _inside(optimizer):
            found |= optimizers_in(each, f"{place}.{name}".lstrip("."))
    return found


def has_own_state(optimizer: Optimizer) -> bool:
    """Whether an optimizer changes what torch would save or load, by a `state_dict` of its own or by hooks."""
    changed = _overrides(optimizer, "state_dict") or _overrides(optimizer, "load_state_dict")
    return changed or has_state_dict_hooks(optimizer)


def _overrides(optimizer: Optimizer, method: str) -> bool:
    kind = type(optimizer)
    own = getattr(kind, method) is not getattr(Optimizer, method) and kind not in SHARING
    return own or method in vars(optimizer)


def _is_state(owner: Optimizer, name: str, value: Any, parameters: Collection[int]) -> bool:
    """Whether an attribute is state: plain data or tensors, but no references to parameters or objects."""
    tensors = list(tensors_in(value))
    refers = any(id(each) in parameters for each in tensors)
    tensors = [each for each in tensors if id(each) not in parameters]
    try:
        encode(value, {}, name)
    except CheckpointError as error:
        if not tensors:
            return False
        raise _unsavable(owner, name) from error
    if refers and tensors:
        raise _unsavable(owner, name)
    return not refers


def _unsavable(owner: Optimizer, name: str) -> CheckpointError:
    return CheckpointError(
        f"{type(owner).__name__} keeps tensors in its attribute {name!r} in a way that cannot be saved, so that a "
        "resumed run would not have them. Keep them in self.state[parameter], or give the class a state_dict and a "
        "load_state_dict."
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers, keys too."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (*tensors_in(key), *tensors_in(each))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from tensors_in(each)
