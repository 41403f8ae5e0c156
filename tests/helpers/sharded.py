"""Shards of tensors on each process."""

import gc

import torch
from torch.distributed.tensor import DTensor


def unshard(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()


def list_tensors(named):
    """Return each tensor of a dictionary, unsharded, as lists."""
    return {name: unshard(each).tolist() for name, each in named.items()}


def count_held_bytes():
    """Return the bytes of all tensors that this process holds, each storage counted once."""
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    tensors = [each for each in found if not each.is_meta and each.layout is torch.strided]  # sparse: several storages
    storages = [(each.to_local() if isinstance(each, DTensor) else each).untyped_storage() for each in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
