"""What a value is, in a few characters: equal if and only if every bit of it is."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from lumen.data.nested import convert
from lumen.data.rank_checks import pieces
from lumen.distributed.dtensor import is_sharded, local_tensor


def digest(value: Any) -> str:
    """Numbers and texts as they are written, also those in tensors without dimensions; of all else a hash, in hex.

    Args:
        value: Tensors, arrays and plain data, nested in any way. Of a sharded tensor this process's part counts, of
            what cannot be read (inside `torch.func.vmap`, say) dtype and shape.
    """
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_complex():
        value = _number(value)
    if isinstance(value, str):
        return value
    if isinstance(value, (bool, int, float)):
        return repr(value)
    code = hashlib.blake2b(digest_size=8)
    try:
        for piece in pieces(convert(value, _local)):
            code.update(piece)
    except (RuntimeError, TypeError):
        return f"{getattr(value, 'dtype', type(value).__name__)}{tuple(getattr(value, 'shape', ()))}"
    return code.hexdigest()


def _number(tensor: torch.Tensor) -> Any:
    try:
        return _local(tensor.detach()).item()
    except RuntimeError:  # inside a transform of torch.func
        return tensor


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, torch.Tensor) and is_sharded(value) else value


def generators() -> dict[str, str]:
    """Digests of the states of the global generators: torch, its CUDA devices in use, numpy and `random`."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    states = {
        "torch": torch.get_rng_state(),
        "numpy": [name, np.asarray(keys), position, has_gauss, gauss],
        "random": repr(random.getstate()),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{number}": each.get_state() for number, each in enumerate(torch.cuda.default_generators)}
    return {name: digest([state]) for name, state in states.items()}
