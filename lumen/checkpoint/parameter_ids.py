"""Ids of parameters in the state of third-party optimizers, which are saved as names of parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lumen.errors import CheckpointError

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
