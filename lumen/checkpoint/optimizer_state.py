"""Saves and restores the state of an optimizer, by names of parameters.

`state` and `param_groups` are saved as they are, not through `state_dict`, whose `load_state_dict` casts. What a class
of optimizers keeps beside them, in a `state_dict` of its own, in attributes or in optimizers inside it, is saved under
the place of that optimizer: "" is the run's own, "optimizers[1]" one inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.checkpoint.format.codec import JSON, Tensors, decode, encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.reshard import read_beside, states_of
from lumen.checkpoint.optimizer_layout import (
    SHARING,
    attributes_of,
    has_own_state,
    ids_as_names,
    keeps_unknown_state,
    kind_of,
    names_as_ids,
    optimizers_in,
    tensors_in,
)
from lumen.distributed.dtensor import is_sharded, local_tensor
from lumen.errors import CheckpointError, CheckpointMismatch
from lumen.internals.optimizers import torchs_state_dict

Groups = list[list[str]]


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Names of parameters by their id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def groups_of(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Names of the parameters in each group of an optimizer."""
    names = parameter_names(model)
    return [[_name(names, optimizer, each) for each in group["params"]] for group in optimizer.param_groups]


# ---------------------------------------------------------------------- saving


def capture_optimizer(model: nn.Module, optimizer: Optimizer, built: Groups, tensors: Tensors) -> dict[str, JSON]:
    """The whole state of an optimizer as JSON; absent state stays absent.

    Args:
        model: The model whose parameters' names are used.
        optimizer: An optimizer over parameters of `model`.
        built: Names of the parameters in each group when the run began; hooks may have changed the groups since.
        tensors: A dictionary to which the tensors of the state are added, by name.

    Raises:
        CheckpointError: Something cannot be saved; the message names it.
    """
    names, optimizers = parameter_names(model), optimizers_in(optimizer)
    groups = groups_of(model, optimizer)
    ids = names if keeps_unknown_state(optimizer) else {}
    captured = {
        "class": kind_of(optimizer),
        "groups": [
            values | {"params": own}
            for values, own in zip(_group_values(optimizer, "group ", tensors, ids), groups, strict=True)
        ],
        "state": _states(optimizer, names, tensors, ids),
    }
    inside = {
        place: _inside_state(each, optimizer, place, names, tensors, ids) for place, each in optimizers.items() if place
    }
    additions = {
        "built": built if built != groups else None,
        "shared": _encode(_shared(optimizer), tensors, "shared", ids),
        "inside": {place: found for place, found in inside.items() if found},
        "own": {
            place: _encode(_own_state(each), tensors, f"own[{place}]", ids)
            for place, each in optimizers.items()
            if has_own_state(each)
        },
        "attributes": {
            place: _encode(own, tensors, f"attributes[{place}]", ids)
            for place, own in attributes_of(model, optimizer).items()
            if own
        },
    }
    return captured | {key: value for key, value in additions.items() if value}


def _encode(value: Any, tensors: Tensors, where: str, ids: Mapping[int, str]) -> JSON:
    return encode(ids_as_names(value, ids, where) if ids else value, tensors, where)


def _group_values(optimizer: Optimizer, where: str, tensors: Tensors, ids: Mapping[int, str]) -> list[dict[str, JSON]]:
    return [
        {key: _encode(value, tensors, f"{where}{number}.{key}", ids) for key, value in group.items() if key != "params"}
        for number, group in enumerate(optimizer.param_groups)
    ]


def _states(
    optimizer: Optimizer,
    names: Mapping[int, str],
    tensors: Tensors,
    ids: Mapping[int, str],
    place: str = "",
    beside: Collection[int] = (),
) -> dict[str, JSON]:
    """State by names of parameters, without the entries whose id is in `beside`."""
    found = {}
    for parameter, entries in optimizer.state.items():
        if isinstance(parameter, torch.Tensor) and id(entries) not in beside:
            name = _name(names, optimizer, parameter)
            found[name] = _encode(entries, tensors, f"{name}.{place}" if place else name, ids)
            for key, value in entries.items() if isinstance(entries, Mapping) else ():
                if _is_shard(value, parameter):
                    raise _unknown_shard(optimizer, f"{key!r} of {name}")
    return found


def _shared(optimizer: Optimizer) -> dict[Any, Any]:
    """Entries of `state` whose key is no parameter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def _inside_state(
    inner: Optimizer, outer: Optimizer, place: str, names: Mapping[int, str], tensors: Tensors, ids: Mapping[int, str]
) -> dict[str, JSON]:
    """State of an optimizer inside another one that the outer one does not share."""
    found: dict[str, JSON] = {}
    known = {*map(id, outer.state.values())}
    if states := _states(inner, names, tensors, ids, place, known):
        found["state"] = states
    shared = {key: value for key, value in _shared(inner).items() if key not in outer.state}
    if shared:
        found["shared"] = _encode(shared, tensors, f"shared[{place}]", ids)
    if not {*map(id, inner.param_groups)} <= {*map(id, outer.param_groups)}:
        found["groups"] = _group_values(inner, f"{place}.group ", tensors, ids)
    return found


def _own_state(optimizer: Optimizer) -> dict[str, Any]:
    """Entries of an optimizer's own `state_dict` that differ from torch's, and the keys of those that do not."""
    given, plain = optimizer.state_dict(), torchs_state_dict(optimizer)
    if not isinstance(given, dict):
        raise CheckpointError(
            f"state_dict of {type(optimizer).__name__} returns a {type(given).__name__}. Let it return a dictionary of "
            "plain data and tensors."
        )
    as_torch = [key for key in given if key in plain and _is_same(given[key], plain[key])]
    rest = {key: value for key, value in given.items() if key not in as_torch}
    tensors = [each for each in tensors_in(rest) if not is_sharded(each) and each.numel() > 1]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [local_tensor(parameter).shape for parameter in held if is_sharded(parameter)]
    if any(each.shape in shards for each in tensors):
        raise _unknown_shard(optimizer, "a tensor in its own state_dict")
    return {"as torch": as_torch, "rest": rest}


def _is_same(one: Any, other: Any) -> bool:
    """Whether two nested structures hold the same tensors and equal values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return one is other or bool(type(one) is type(other) and one == other)


def _is_shard(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a value is a plain tensor of the shape of this process's shard of a sharded parameter."""
    if not (is_sharded(parameter) and isinstance(value, torch.Tensor)) or is_sharded(value) or value.numel() <= 1:
        return False
    return value.shape == local_tensor(parameter).shape != parameter.shape


def _unknown_shard(optimizer: Optimizer, what: str) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {what} as this process's shard alone, so that nobody knows what it is a "
        "shard of. Make it with torch.zeros_like(parameter), or as another DTensor."
    )


def _name(names: Mapping[int, str], optimizer: Optimizer, parameter: torch.Tensor) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is no parameter of the "
            "task, so that it has no name to be saved under. Where a hook replaces a parameter, give the optimizer the "
            "new one; where it adds one, make it an attribute of the task."
        )
    return names[id(parameter)]


# ---------------------------------------------------------------------- loading


def regroup(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Give an optimizer just built the groups of the checkpoint, into which hooks had changed the original ones."""
    saved = checkpoint.state["optimizer"]
    if saved.get("built") != groups_of(model, optimizer):
        return
    parameters, tensors = dict(model.named_parameters()), checkpoint.tensors("optimizer")
    del optimizer.param_groups[len(saved["groups"]) :]
    wanted = [[parameters[name] for name in group["params"]] for group in saved["groups"]]
    for group, held in zip(optimizer.param_groups, wanted, strict=False):
        group["params"] = held
    for values, held in [*zip(saved["groups"], wanted, strict=True)][len(optimizer.param_groups) :]:
        options = names_as_ids(
            {key: decode(value, tensors) for key, value in values.items() if key != "params"}, parameters
        )
        optimizer.add_param_group({**options, "params": held})


def load_optimizer_states(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Restore the state of parameters, and entries of `state` that belong to none."""
    saved, tensors = checkpoint.state["optimizer"], checkpoint.tensors("optimizer")
    optimizer.state.clear()
    optimizers, parameters = optimizers_in(optimizer), dict(model.named_parameters())
    inside = {place: found for place, found in saved.get("inside", {}).items() if place in optimizers}
    moving = [group for group in optimizer.param_groups if True in (group.get("fused"), group.get("capturable"))]
    moves_with_it = {parameter for group in moving for parameter in group["params"]}
    state_of, of_none = states_of(checkpoint), tensors_of_no_parameter(model, checkpoint)
    for place, found in {"": saved, **inside}.items():
        state = optimizers[place].state
        for name, entries in found.get("state", {}).items():
            parameter = parameters[name]
            own = state_of(name, parameter)
            if isinstance(entries, dict) and "step" in entries and parameter not in moves_with_it:
                places = {key: tensors if key == "step" else own for key in entries}  # it counts on the host
                decoded = {key: decode(entry, places[key]) for key, entry in entries.items()}
            else:
                decoded = decode(entries, own)
            state[parameter] = names_as_ids(decoded, parameters)
        for key, value in names_as_ids(decode(found.get("shared", {}), of_none), parameters).items():
            state[key] = value


def tensors_of_no_parameter(model: nn.Module, checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The tensors of the optimizer, sharded as they were saved if the model is sharded, else on the host."""
    like = next(filter(is_sharded, model.parameters()), None)

    def read(name: str) -> torch.Tensor:
        found = None if like is None else read_beside(checkpoint, "optimizer", name, like)
        return checkpoint.tensor("optimizer", name) if found is None else found

    return checkpoint.tensors("optimizer", read)


def load_gradients(model: nn.Module, checkpoint: Checkpoint) -> dict[nn.Parameter, torch.Tensor]:
    """The gradients that a task that optimizes by hand had accumulated, sharded as their parameters are."""
    parameters, state_of = dict(model.named_parameters()), states_of(checkpoint)
    saved = checkpoint.state["optimizer"].get("gradients", {})
    return {parameters[name]: decode(entry, state_of(name, parameters[name]))["grad"] for name, entry in saved.items()}


def load_rest(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Restore what optimizers keep outside of `state` and `param_groups`, which must be restored before.

    Raises:
        CheckpointMismatch: It is not known how to shard a tensor that was not sharded when it was saved.
    """
    saved, optimizers = checkpoint.state["optimizer"], optimizers_in(optimizer)
    parameters, fresh = dict(model.named_parameters()), Tensors()
    for place, attributes in attributes_of(model, optimizer).items():
        _encode(attributes, fresh, f"attributes[{place}]", parameter_names(model))
    read = checkpoint.tensors("optimizer", _reader(optimizer, checkpoint, fresh))
    for place, found in saved.get("inside", {}).items():
        for group, values in zip(optimizers[place].param_groups, found.get("groups", ()), strict=False):
            group.update(names_as_ids(decode(values, read), parameters))
    for place, attributes in saved.get("attributes", {}).items():
        vars(optimizers[place]).update(names_as_ids(decode(attributes, read), parameters))
    if own := saved.get("own"):
        given = {place: names_as_ids(decode(each, read), parameters) for place, each in own.items()}
        _load_own(optimizers, given)


def _reader(
    optimizer: Optimizer, checkpoint: Checkpoint, fresh: Mapping[str, torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    """A function that reads a tensor of no parameter, sharded as it was saved, to the device of its counterpart."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = next(filter(is_sharded, held), held[0])

    def read(name: str) -> torch.Tensor:
        beside = read_beside(checkpoint, "optimizer", name, like)
        if beside is not None:
            return beside
        tensor = checkpoint.tensor("optimizer", name)
        if checkpoint.state["sharded"] is None and is_sharded(like) and tensor.numel() > 1:
            raise CheckpointMismatch(
                f"{checkpoint.path} was saved by a run that cut nothing up, and of {name} nobody knows how it is to be "
                f"cut: {type(optimizer).__name__} does not keep it by parameter. Resume under the strategy it was "
                "saved with."
            )
        return tensor.to(fresh[name].device if name in fresh else like.device)

    return read


def _load_own(optimizers: Mapping[str, Optimizer], own: Mapping[str, Mapping[str, Any]]) -> None:
    """Call every optimizer's own `load_state_dict`; groups and `state` are put back afterwards.

    For `Optimizer.load_state_dict`, which it may call, casts states and makes new dictionaries of groups.
    """
    exact = {place: _groups_and_states(optimizer) for place, optimizer in optimizers.items()}
    for place, given in own.items():
        plain = torchs_state_dict(optimizers[place])
        optimizers[place].load_state_dict({key: plain[key] for key in given["as torch"]} | given["rest"])
    for optimizer in reversed([*optimizers.values()]):
        if isinstance(optimizer, SHARING):
            optimizer.share()
    for place, (groups, states) in exact.items():
        optimizer = optimizers[place]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.state.clear()
        optimizer.state.update(states)


def _groups_and_states(optimizer: Optimizer) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    """Copies of `param_groups` and `state`, as deep as `Optimizer.load_state_dict` changes them."""
    states = {key: dict(each) if isinstance(each, Mapping) else each for key, each in optimizer.state.items()}
    return [dict(group) for group in optimizer.param_groups], states
