"""Private names of torch's DataLoader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from lumen.internals.torch_versions import check_attributes

try:
    from torch.utils.data._utils.collate import collate_int_fn, collate_tensor_fn, default_collate_fn_map

    _COLLATES: Any = default_collate_fn_map, collate_tensor_fn, collate_int_fn
except ImportError:
    _COLLATES = None


def has_default_collate() -> bool:
    """Return True if `default_collate` handles tensors and ints by torch's own functions; False if that is unknown."""
    if _COLLATES is None:
        return False
    functions, collate_tensors, collate_ints = _COLLATES
    return functions.get(torch.Tensor) is collate_tensors and functions.get(int) is collate_ints


def get_pin_function() -> Callable[[Any], Any]:
    """Return the function that copies a batch to pinned memory.

    Raises:
        ConfigError: The installed torch has no such function.
    """
    try:
        from torch.utils.data._utils.pin_memory import pin_memory
    except ImportError:
        check_attributes("pin_memory", torch.utils.data, "_utils.pin_memory.pin_memory")
        raise
    return pin_memory


def has_default_iter(kind: type[DataLoader[Any]]) -> bool:
    """Return True if a subclass of DataLoader has torch's own `__iter__`."""
    methods = [(each.__iter__, getattr(each, "_get_iterator", None)) for each in (kind, DataLoader)]
    return methods[0] == methods[1]


def end_workers(iterator: Any) -> None:
    """End the workers of a DataLoader's iterator now: garbage collection would wait 5 s for each after an error."""
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in getattr(iterator, "_workers", ()):
        if worker.is_alive():  # a sample took longer than torch's limit of 5 s
            worker.kill()
            worker.join()


def end_persistent_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps between passes; the next pass starts new workers."""
    end_workers(getattr(loader, "_iterator", None))
    loader._iterator = None
