"""Saving and loading of optimizer state by parameter name.

`state` and `param_groups` are saved unchanged and not through `state_dict`, because `load_state_dict` casts tensors.
Optimizer classes may also keep state in their own `state_dict`, in attributes or in inner optimizers. Such state is
saved under the place of its optimizer: "" for the run's optimizer, "optimizers[1]" for an inner optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.optim import Optimizer

from lumen.checkpoint.format.codec import JSON, Tensors, decode, encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.named_tensors import get_tensors_as_saved, make_state_reader, read_as_saved
from lumen.distributed.dtensor import get_local_tensor, is_sharded
from lumen.errors import CheckpointError, CheckpointMismatch
from lumen.internals.optimizers import get_torch_state_dict, has_state_dict_hooks, list_common_attributes
from lumen.optim import Lookahead, MultiOptimizer, WholeMatrices

#: Options of parameter groups that do not change the update.
NEUTRAL_GROUP_KEYS = ("params", "fused", "foreach", "capturable", "differentiable")

Groups = list[list[str]]
STATE_SHARING_CLASSES = (Lookahead, MultiOptimizer, WholeMatrices)
"""Classes that share the group and state objects with their inner optimizers."""
_STATELESS_OWNERS = ("torch.optim", "lumen.optim")  # packages whose optimizers keep no changing state in attributes
_TAG = "id of"
_ADDRESS = 2**32  # counters and indices are smaller, ids and addresses of tensors larger


def map_parameter_names(model: nn.Module) -> dict[int, str]:
    """Return names of parameters by their id."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def get_group_names(model: nn.Module, optimizer: Optimizer) -> Groups:
    """Return names of the parameters in each group of an optimizer."""
    names = map_parameter_names(model)
    return [
        [_get_parameter_name(names, optimizer, each) for each in group["params"]] for group in optimizer.param_groups
    ]


# ---------------------------------------------------------------------- places of state


def ids_as_names(value: Any, names: Mapping[int, str], where: str) -> Any:
    """Replace each id of a parameter in nested containers by `("id of", name)`.

    Args:
        value: State of an optimizer.
        names: Names of parameters by their id.
        where: The place of the state, for the error.

    Raises:
        CheckpointError: A key is the address of another object of this process, which a resumed run could not find.
    """

    def translate(item: Any, *, is_key: bool) -> Any:
        if type(item) is not int:
            return item
        if is_key and item >= _ADDRESS and item not in names:
            raise CheckpointError(
                f"the optimizer's state ({where}) has the key {item}, which looks like a memory address of this "
                "process, and has no meaning in a resumed run. Keep the state in self.state[parameter], or use "
                "id(parameter), a name or an index as the key."
            )
        return (_TAG, names[item]) if item in names else item

    return _map_nested(value, translate)


def names_as_ids(value: Any, parameters: Mapping[str, Any]) -> Any:
    """Replace each `("id of", name)` by the id of the parameter in this process, as the inverse of `ids_as_names`."""

    def translate(item: Any, *, is_key: bool) -> Any:
        is_tagged = type(item) is tuple and len(item) == 2 and item[0] == _TAG and item[1] in parameters
        return id(parameters[item[1]]) if is_tagged else item

    return _map_nested(value, translate)


def _map_nested(value: Any, translated: Callable[..., Any], *, is_key: bool = False, depth: int = 0) -> Any:
    """Copy nested plain containers, and apply a function to each container, entry and key."""
    if (new := translated(value, is_key=is_key)) is not value or depth > 100:  # `encode` refuses cycles
        return new
    inner = partial(_map_nested, translated=translated, depth=depth + 1)
    if isinstance(value, dict):
        return {inner(key, is_key=True): inner(item) for key, item in value.items()}
    return type(value)(map(inner, value)) if type(value) in (list, tuple, set, frozenset) else value


def keeps_unknown_state(optimizer: Optimizer) -> bool:
    """Return True if an optimizer, or one inside it, is of a class that neither torch nor Lumen defines."""
    return any(not type(each).__module__.startswith(_STATELESS_OWNERS) for each in find_optimizers(optimizer).values())


def describe_class(optimizer: Optimizer) -> str:
    """Return the class name of an optimizer, followed by the class names of its inner optimizers."""
    kinds = ", ".join(describe_class(each) for _, each in _iterate_inner_optimizers(optimizer))
    return type(optimizer).__qualname__ + (f"({kinds})" if kinds else "")


def get_extra_attributes(model: nn.Module, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
    """Return attributes with plain data or tensors, for the optimizer and each inner optimizer, by place.

    Raises:
        CheckpointError: An attribute holds tensors in a way that cannot be saved.
    """
    found, parameters = {}, {*map(id, model.parameters())}
    for place, owner in find_optimizers(optimizer).items():
        if not has_custom_state(owner) and not type(owner).__module__.startswith(_STATELESS_OWNERS):
            unusual = {name: value for name, value in vars(owner).items() if name not in list_common_attributes()}
            found[place] = {name: value for name, value in unusual.items() if _is_state(owner, name, value, parameters)}
    return found


def _iterate_inner_optimizers(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers in attributes of an optimizer, with their places."""
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}[{number}]", each) for number, each in enumerate(value) if isinstance(each, Optimizer))
        elif isinstance(value, dict) and name != "state":
            yield from ((f"{name}[{key!r}]", each) for key, each in value.items() if isinstance(each, Optimizer))


def find_optimizers(optimizer: Optimizer, place: str = "") -> dict[str, Optimizer]:
    """Return an optimizer and its inner optimizers by place; an optimizer with its own `state_dict` is not searched."""
    found = {place: optimizer}
    if not _overrides_method(optimizer, "state_dict"):
        for name, each in _iterate_inner_optimizers(optimizer):
            found |= find_optimizers(each, f"{place}.{name}".lstrip("."))
    return found


def has_custom_state(optimizer: Optimizer) -> bool:
    """Return True if an optimizer overrides `state_dict` or `load_state_dict`, or has hooks for these methods."""
    changed = _overrides_method(optimizer, "state_dict") or _overrides_method(optimizer, "load_state_dict")
    return changed or has_state_dict_hooks(optimizer)


def _overrides_method(optimizer: Optimizer, method: str) -> bool:
    kind = type(optimizer)
    is_overridden = getattr(kind, method) is not getattr(Optimizer, method) and kind not in STATE_SHARING_CLASSES
    return is_overridden or method in vars(optimizer)


def _is_state(owner: Optimizer, name: str, value: Any, parameters: Collection[int]) -> bool:
    """Return True if an attribute is state: plain data or tensors, without references to parameters or objects."""
    tensors = list(iterate_tensors(value))
    refers = any(id(each) in parameters for each in tensors)
    tensors = [each for each in tensors if id(each) not in parameters]
    try:
        encode(value, {}, name)
    except CheckpointError as error:
        if not tensors:
            return False
        raise _make_unsavable_error(owner, name) from error
    if refers and tensors:
        raise _make_unsavable_error(owner, name)
    return not refers


def _make_unsavable_error(owner: Optimizer, name: str) -> CheckpointError:
    return CheckpointError(
        f"{type(owner).__name__} keeps tensors in its attribute {name!r} in a way that cannot be saved, so a resumed "
        "run would lose these tensors. Keep the tensors in self.state[parameter], or define state_dict and "
        "load_state_dict."
    )


def iterate_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield every tensor in nested containers, including keys."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from (*iterate_tensors(key), *iterate_tensors(each))
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in value:
            yield from iterate_tensors(each)


# ---------------------------------------------------------------------- saving


def capture_optimizer(model: nn.Module, optimizer: Optimizer, built: Groups, tensors: Tensors) -> dict[str, JSON]:
    """Return the complete state of an optimizer as JSON; a parameter without state has no entry.

    Args:
        model: The model whose parameters' names are used.
        optimizer: An optimizer over parameters of `model`.
        built: Names of the parameters in each group when the run began; hooks may have changed the groups since.
        tensors: A dictionary to which the tensors of the state are added, by name.

    Raises:
        CheckpointError: An entry cannot be saved; the message names the entry.
        ConfigError: A group was added to one of several optimizers.
    """
    names, optimizers, groups = (
        map_parameter_names(model),
        find_optimizers(optimizer),
        get_group_names(model, optimizer),
    )
    for each in optimizers.values():
        if isinstance(each, MultiOptimizer):
            each.check_groups()
    capture = _StateEncoder(names, names if keeps_unknown_state(optimizer) else {}, tensors)
    values = capture.encode_groups(optimizer, "group ")
    captured = {
        "class": describe_class(optimizer),
        "groups": [each | {"params": held} for each, held in zip(values, groups, strict=True)],
        "state": capture.encode_states(optimizer),
    }
    inside = {place: capture.encode_inner(each, optimizer, place) for place, each in optimizers.items() if place}
    custom = {place: each for place, each in optimizers.items() if has_custom_state(each)}
    kept = {place: each for place, each in get_extra_attributes(model, optimizer).items() if each}
    additions = {
        "built": built if built != groups else None,
        "shared": capture.encode(_get_shared_state(optimizer), "shared"),
        "inside": {place: found for place, found in inside.items() if found},
        "own": {place: capture.encode(_get_custom_state(each), f"own[{place}]") for place, each in custom.items()},
        "attributes": {place: capture.encode(each, f"attributes[{place}]") for place, each in kept.items()},
    }
    return captured | {key: value for key, value in additions.items() if value}


@final
class _StateEncoder(NamedTuple):
    """Encoder of the state of an optimizer and its inner optimizers.

    Attributes:
        names: Names of parameters by their id.
        ids: Ids that are replaced by names in the state; empty for optimizers of torch and Lumen, whose state has no
            ids.
        tensors: A dictionary to which the tensors of the state are added, by name.
    """

    names: Mapping[int, str]
    ids: Mapping[int, str]
    tensors: Tensors

    def encode(self, value: Any, where: str) -> JSON:
        return encode(ids_as_names(value, self.ids, where) if self.ids else value, self.tensors, where)

    def encode_groups(self, optimizer: Optimizer, where: str) -> list[dict[str, JSON]]:
        return [
            {key: self.encode(value, f"{where}{number}.{key}") for key, value in group.items() if key != "params"}
            for number, group in enumerate(optimizer.param_groups)
        ]

    def encode_states(self, optimizer: Optimizer, place: str = "", known: Collection[int] = ()) -> dict[str, JSON]:
        """Return state by parameter name, without entries whose id is in `known`."""
        found = {}
        for parameter, entries in optimizer.state.items():
            if isinstance(parameter, torch.Tensor) and id(entries) not in known:
                name = _get_parameter_name(self.names, optimizer, parameter)
                found[name] = self.encode(entries, f"{name}.{place}" if place else name)
                for key, value in entries.items() if isinstance(entries, Mapping) else ():
                    if _is_shard(value, parameter):
                        raise _make_shard_error(optimizer, f"{key!r} of {name}")
        return found

    def encode_inner(self, inner: Optimizer, outer: Optimizer, place: str) -> dict[str, JSON]:
        """Return the state of an inner optimizer that the outer optimizer does not share."""
        found: dict[str, JSON] = {}
        if states := self.encode_states(inner, place, {*map(id, outer.state.values())}):
            found["state"] = states
        if shared := {key: value for key, value in _get_shared_state(inner).items() if key not in outer.state}:
            found["shared"] = self.encode(shared, f"shared[{place}]")
        if not {*map(id, inner.param_groups)} <= {*map(id, outer.param_groups)}:
            found["groups"] = self.encode_groups(inner, f"{place}.group ")
        return found


def _get_shared_state(optimizer: Optimizer) -> dict[Any, Any]:
    """Return entries of `state` whose key is not a parameter."""
    return {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}


def _get_custom_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return entries of an optimizer's own `state_dict` that differ from torch's, and the keys of equal entries."""
    state, plain = optimizer.state_dict(), get_torch_state_dict(optimizer)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"state_dict of {type(optimizer).__name__} returns a {type(state).__name__}. Return a dictionary of plain "
            "data and tensors."
        )
    as_torch = [key for key in state if key in plain and _is_equal_state(state[key], plain[key])]
    rest = {key: value for key, value in state.items() if key not in as_torch}
    tensors = [each for each in iterate_tensors(rest) if not is_sharded(each) and each.numel() > 1]
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = [get_local_tensor(parameter).shape for parameter in held if is_sharded(parameter)]
    if any(each.shape in shards for each in tensors):
        raise _make_shard_error(optimizer, "a tensor in its own state_dict")
    return {"as torch": as_torch, "rest": rest}


def _is_equal_state(one: Any, other: Any) -> bool:
    """Return True if two nested structures hold the same tensor objects and equal values."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal_state(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_is_equal_state, one, other))
    return one is other or bool(type(one) is type(other) and one == other)


def _is_shard(value: Any, parameter: torch.Tensor) -> bool:
    """Return True if a value is a plain tensor with the shape of this process's shard of a sharded parameter."""
    if not (is_sharded(parameter) and isinstance(value, torch.Tensor)) or is_sharded(value) or value.numel() <= 1:
        return False
    return value.shape == get_local_tensor(parameter).shape != parameter.shape


def _make_shard_error(optimizer: Optimizer, entry: str) -> CheckpointError:
    return CheckpointError(
        f"{type(optimizer).__name__} keeps {entry} as a plain tensor with this process's shard, so its sharding is "
        "unknown. Create the tensor with torch.zeros_like(parameter), or as a DTensor."
    )


def _get_parameter_name(names: Mapping[int, str], optimizer: Optimizer, parameter: torch.Tensor) -> str:
    if id(parameter) not in names:
        raise CheckpointError(
            f"{type(optimizer).__name__} holds a tensor of shape {tuple(parameter.shape)} that is not a parameter of "
            "the task, so the tensor has no name in a checkpoint. If a hook replaces a parameter, give the optimizer "
            "the new parameter. If a hook adds a parameter, make the parameter an attribute of the task."
        )
    return names[id(parameter)]


# ---------------------------------------------------------------------- loading


def restore_groups(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Give a new optimizer the groups of the checkpoint, if hooks had changed the groups after they were built."""
    saved = checkpoint.state["optimizer"]
    if saved.get("built") != get_group_names(model, optimizer):
        return
    parameters, tensors = dict(model.named_parameters()), checkpoint.as_mapping("optimizer")
    del optimizer.param_groups[len(saved["groups"]) :]
    saved_parameters = [[parameters[name] for name in group["params"]] for group in saved["groups"]]
    for group, held in zip(optimizer.param_groups, saved_parameters, strict=False):
        group["params"] = held
    for values, held in [*zip(saved["groups"], saved_parameters, strict=True)][len(optimizer.param_groups) :]:
        options = {key: decode(value, tensors) for key, value in values.items() if key not in NEUTRAL_GROUP_KEYS}
        optimizer.add_param_group({**names_as_ids(options, parameters), "params": held})


def load_optimizer_states(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Restore the state of parameters, and entries of `state` that belong to no parameter."""
    saved, tensors = checkpoint.state["optimizer"], checkpoint.as_mapping("optimizer")
    optimizer.state.clear()
    optimizers, parameters = find_optimizers(optimizer), dict(model.named_parameters())
    inside = {place: found for place, found in saved.get("inside", {}).items() if place in optimizers}
    moving = [group for group in optimizer.param_groups if True in (group.get("fused"), group.get("capturable"))]
    on_device = {parameter for group in moving for parameter in group["params"]}
    get_state, shared_tensors = make_state_reader(checkpoint), get_tensors_as_saved(model, checkpoint, "optimizer")
    for place, found in {"": saved, **inside}.items():
        state = optimizers[place].state
        for name, entries in found.get("state", {}).items():
            parameter = parameters[name]
            placed = get_state(name, parameter)
            if isinstance(entries, dict) and "step" in entries and parameter not in on_device:
                places = {key: tensors if key == "step" else placed for key in entries}  # the counter stays on the host
                decoded = {key: decode(entry, places[key]) for key, entry in entries.items()}
            else:
                decoded = decode(entries, placed)
            state[parameter] = names_as_ids(decoded, parameters)
        state.update(names_as_ids(decode(found.get("shared", {}), shared_tensors), parameters))


def load_gradients(model: nn.Module, checkpoint: Checkpoint) -> dict[nn.Parameter, torch.Tensor]:
    """Return the gradients accumulated by a task with manual optimization, sharded as their parameters are."""
    parameters, get_state = dict(model.named_parameters()), make_state_reader(checkpoint)
    saved = checkpoint.state["optimizer"].get("gradients", {})
    return {parameters[name]: decode(entry, get_state(name, parameters[name]))["grad"] for name, entry in saved.items()}


def load_remaining_state(model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint) -> None:
    """Restore optimizer data outside of `state` and `param_groups`; call this after both are restored.

    Raises:
        CheckpointMismatch: The sharding of a tensor that was saved unsharded is unknown.
    """
    saved, optimizers = checkpoint.state["optimizer"], find_optimizers(optimizer)
    parameters, fresh, names = dict(model.named_parameters()), Tensors(), map_parameter_names(model)
    for place, attributes in get_extra_attributes(model, optimizer).items():
        _StateEncoder(names, names, fresh).encode(attributes, f"attributes[{place}]")
    read = checkpoint.as_mapping("optimizer", _make_tensor_reader(optimizer, checkpoint, fresh))
    for place, found in saved.get("inside", {}).items():
        for group, values in zip(optimizers[place].param_groups, found.get("groups", ()), strict=False):
            group.update(names_as_ids(decode(values, read), parameters))
    for place, attributes in saved.get("attributes", {}).items():
        vars(optimizers[place]).update(names_as_ids(decode(attributes, read), parameters))
    if custom := saved.get("own"):
        _load_custom_states(
            optimizers, {place: names_as_ids(decode(each, read), parameters) for place, each in custom.items()}
        )


def _make_tensor_reader(
    optimizer: Optimizer, checkpoint: Checkpoint, fresh: Mapping[str, torch.Tensor]
) -> Callable[[str], torch.Tensor]:
    """Return a function that reads a tensor that belongs to no parameter.

    The tensor keeps its saved sharding. An unsharded tensor is moved to the device of its namesake in `fresh`, or else
    of the parameters.
    """
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    like = next(filter(is_sharded, held), held[0])

    def read(name: str) -> torch.Tensor:
        tensor = read_as_saved(checkpoint, "optimizer", name, like)
        if is_sharded(tensor):
            return tensor
        if checkpoint.state["sharded"] is None and is_sharded(like) and tensor.numel() > 1:
            raise CheckpointMismatch(
                f"{checkpoint.path} was saved by a run without sharding, and the sharding of {name} is unknown, "
                f"because {type(optimizer).__name__} does not keep the tensor by parameter. Resume with the strategy "
                "of the run that saved the checkpoint."
            )
        return tensor.to(fresh[name].device if name in fresh else like.device)

    return read


def _load_custom_states(optimizers: Mapping[str, Optimizer], custom: Mapping[str, Mapping[str, Any]]) -> None:
    """Call each optimizer's own `load_state_dict`, then restore groups and `state` exactly.

    The method may call `Optimizer.load_state_dict`, which casts states and creates new dictionaries for groups.
    """
    exact = {
        place: ([dict(group) for group in each.param_groups],
                {key: dict(kept) if isinstance(kept, Mapping) else kept for key, kept in each.state.items()})
        for place, each in optimizers.items()
    }  # fmt: skip
    for place, saved in custom.items():
        plain = get_torch_state_dict(optimizers[place])
        optimizers[place].load_state_dict({key: plain[key] for key in saved["as torch"]} | saved["rest"])
    for optimizer in reversed([*optimizers.values()]):
        if isinstance(optimizer, STATE_SHARING_CLASSES):
            optimizer.share()
    for place, (groups, states) in exact.items():
        optimizer = optimizers[place]
        for group, values in zip(optimizer.param_groups, groups, strict=True):
            group.update(values)
        optimizer.state.clear()
        optimizer.state.update(states)
