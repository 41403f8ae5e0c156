"""Tensors of a run by name: model tensors, and tensors of other sections with the run's sharding.

A tensor of the optimizer's state or of a callback may be sharded like a parameter. The state's entry "sharded" lists
the tensors that were sharded when they were saved. The entry is None if the saving run sharded no parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn

from lumen.checkpoint.format.codec import Tensors
from lumen.checkpoint.format.reader import Checkpoint
from lumen.distributed.dtensor import find_packed, get_packed_parts, is_sharded, is_split, make_dtensor, mark_packed
from lumen.internals.tensors import get_direct_parameters, get_direct_persistent_buffers


def get_model_tensors(model: nn.Module) -> tuple[Tensors, dict[str, str]]:
    """Return parameters and persistent buffers of a model by canonical name.

    Returns:
        The tensors, with tied tensors listed once; and the stored name of each further name of a tied tensor.
    """
    tensors: Tensors = {}
    aliases: dict[str, str] = {}
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        direct = {**get_direct_parameters(module), **get_direct_persistent_buffers(module)}
        for name, tensor in direct.items():
            if tensor is None:
                continue
            path = f"{prefix}.{name}" if prefix else name
            stored = first_name.setdefault(id(tensor), path)
            if stored == path:
                tensors[path] = mark_packed(tensor.detach(), get_packed_parts(tensor))
            else:
                aliases[path] = stored
    return tensors, aliases


def describe_sharding(sections: Mapping[str, Tensors]) -> dict[str, dict[str, bool]] | None:
    """Return the entry "sharded": names of DTensors by section, with True if sharded and False if replicated."""
    if not any(map(is_sharded, sections["model"].values())):
        return None
    return {
        section: {name: is_split(tensor) for name, tensor in sections[section].items() if is_sharded(tensor)}
        for section in ("optimizer", "extra")
    }


def make_state_reader(checkpoint: Checkpoint) -> Callable[[str, nn.Parameter], Mapping[str, torch.Tensor]]:
    """Return a function that reads the optimizer state of a parameter, given the parameter's name and the parameter.

    Tensors are read to the parameter's device. The state of a sharded parameter is sharded or replicated as it was
    saved. If the saving run sharded nothing, `_is_dtensor_entry` decides.
    """
    were_sharded = _get_sharded_names(checkpoint, "optimizer")
    plain = _find_single_shape_keys(checkpoint) if were_sharded is None else set()

    def get_state(owner: str, parameter: nn.Parameter) -> Mapping[str, torch.Tensor]:
        def read(name: str) -> torch.Tensor:
            _, shape = checkpoint.get_spec("optimizer", name)
            if were_sharded is None:
                is_dtensor = _is_dtensor_entry(name.removeprefix(owner), shape, plain)
                is_replicated = not is_split(parameter, shape)
            else:
                is_dtensor, is_replicated = name in were_sharded, not were_sharded.get(name)
            if is_sharded(parameter) and is_dtensor:
                return _read_shard_like(checkpoint, "optimizer", name, parameter, is_replicated=is_replicated)
            return checkpoint.read_tensor("optimizer", name).to(parameter.device)

        return checkpoint.as_mapping("optimizer", read)

    return get_state


def _is_dtensor_entry(key: str, shape: torch.Size, plain: set[str]) -> bool:
    """Guess if an optimizer creates a state entry of a sharded parameter as a DTensor.

    Torch's optimizers do not record this. In a checkpoint of a run that sharded nothing, `zeros_like(parameter)`, row
    sums and plain counters look alike. The function therefore takes every entry to be a DTensor, except scalars, and
    entries whose shape is equal for parameters of different shapes. Without this guess such checkpoints could not
    be resumed under FSDP.
    """
    return bool(shape) and key not in plain


def _find_single_shape_keys(checkpoint: Checkpoint) -> set[str]:
    """Return keys of optimizer state, such as `.norms`, with one shape for parameters of several shapes."""
    shapes, owners = defaultdict(set), defaultdict(set)
    for name in checkpoint.list_tensor_names("optimizer"):
        begins = [name[:dot] for dot, letter in enumerate(name) if letter == "."]
        owner = next((each for each in reversed(begins) if each in checkpoint.state["optimizer"]["state"]), None)
        if owner is not None:
            shapes[name.removeprefix(owner)].add(checkpoint.get_spec("optimizer", name)[1])
            owners[name.removeprefix(owner)].add(checkpoint.get_spec("model", owner)[1])
    return {key for key in shapes if len(shapes[key]) == 1 < len(owners[key])}


def read_as_saved(checkpoint: Checkpoint, section: str, name: str, like: torch.Tensor | None) -> torch.Tensor:
    """Read a saved DTensor as a DTensor if `like` is a DTensor; read any other tensor unsharded to the host."""
    were_sharded = _get_sharded_names(checkpoint, section) or {}
    if name not in were_sharded or like is None or not is_sharded(like):
        return checkpoint.read_tensor(section, name)
    return _read_shard_like(checkpoint, section, name, like, is_replicated=not were_sharded[name])


def get_tensors_as_saved(model: nn.Module, checkpoint: Checkpoint, section: str) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a section: sharded as they were saved if the model is sharded, otherwise on the host."""
    first = next(filter(is_sharded, model.parameters()), None)
    owners = _map_to_parameters(model, checkpoint, section)
    return checkpoint.as_mapping(
        section, lambda name: read_as_saved(checkpoint, section, name, owners.get(name, first))
    )


def get_extra_tensors(task: nn.Module, checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """Return the section "extra": tensors in the states of callbacks, modules, the task and the data module.

    If the run shards its parameters, two kinds of tensors are DTensors:

    * A tensor that was a DTensor when it was saved, sharded or replicated as before.
    * If the saving run sharded nothing: a tensor with a parameter's shape, whose name contains that parameter's.
      Examples for `net.0.weight`: `average.net.0.weight`, `moments.net.0.weight.mean`.

    All other tensors are read unsharded to the host of every process.

    Args:
        task: The run's task, whose parameters the strategy has already sharded.
        checkpoint: The checkpoint to read from.
    """
    if _get_sharded_names(checkpoint, "extra") is not None or not any(map(is_sharded, task.parameters())):
        return get_tensors_as_saved(task, checkpoint, "extra")
    likes = _map_to_parameters(task, checkpoint, "extra")

    def read(name: str) -> torch.Tensor:
        like = likes.get(name)
        if like is None or not is_sharded(like):
            return checkpoint.read_tensor("extra", name)
        return _read_shard_like(checkpoint, "extra", name, like, is_replicated=False)

    return checkpoint.as_mapping("extra", read)


def _get_sharded_names(checkpoint: Checkpoint, section: str) -> dict[str, bool] | None:
    """Return the names of saved DTensors, with True if sharded; None if the saving run sharded no parameter."""
    sharded: dict[str, dict[str, bool]] | None = checkpoint.state["sharded"]
    return None if sharded is None else sharded[section]


def _map_to_parameters(task: nn.Module, checkpoint: Checkpoint, section: str) -> dict[str, torch.Tensor]:
    """Return, for tensors of a section, the parameter with the same name and shape."""
    owners = find_owners(checkpoint.list_tensor_names(section), dict(task.named_parameters(remove_duplicate=False)))
    return {name: each for name, each in owners.items() if each.shape == checkpoint.get_spec(section, name)[1]}


def find_owners(names: Iterable[str], parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return, for names of tensors in a checkpoint, the parameter whose name they contain.

    Examples for `net.0.weight`: `net.0.weight.exp_avg`, `average.net.0.weight`, `moments.net.0.weight.mean`.
    """
    found: dict[str, torch.Tensor] = {}
    for name in names:
        begins = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
        ends = [len(name), *(place for place, letter in enumerate(name) if letter in ".[")]
        inner = (name[begin:end] for begin in begins for end in ends)
        owner = next((parameters[each] for each in inner if each in parameters), None)
        if owner is not None:
            found[name] = owner
    return found


def mark_all_packed(sections: Mapping[str, Tensors]) -> None:
    """Mark tensors that were computed from a packed parameter, such as an average, as packed like the parameter."""
    packed = {name: each for name, each in sections["model"].items() if find_packed(each) is not None}
    for section in ("optimizer", "extra") if packed else ():
        for name, owner in find_owners(sections[section], packed).items():
            if is_sharded(tensor := sections[section][name]) and tensor.shape[:1] == owner.shape[:1]:
                mark_packed(tensor, get_packed_parts(owner))


def _read_shard_like(
    checkpoint: Checkpoint, section: str, name: str, like: torch.Tensor, *, is_replicated: bool
) -> torch.Tensor:
    """Read this process's shard of a tensor, with the mesh and placements of `like`."""
    _, shape = checkpoint.get_spec(section, name)
    shard = checkpoint.read_shard(section, name, like, is_replicated=is_replicated)
    return make_dtensor(shard.to(like.device), like, shape, is_replicated=is_replicated)
