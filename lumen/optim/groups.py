"""Parameter groups with and without weight decay, and with a learning rate for each layer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile
from typing import Any, Literal

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from lumen.errors import ConfigError

Group = dict[str, Any]
By = Literal["dimension", "module type"] | Sequence[str] | Mapping[str, Sequence[str]]
_ENDS = ("head", "embeddings")  # Names of the last and first layer. A block of such a name gets the prefix "block".


def decay_groups(module: nn.Module, weight_decay: float, *, by: By = "dimension") -> list[Group]:
    """Return two parameter groups, one with weight decay and one without.

    Args:
        module: The module whose trainable parameters are grouped, each once, tied parameters too.
        weight_decay: Weight decay of the first group. That of the second group is 0.
        by: The rule for parameters that do not decay. "dimension": parameters of less than two dimensions, as in
            nanoGPT. "module type": parameters with "bias" in their name, bare parameters, and the parameters of norms
            and embeddings. A tied parameter does not decay if any module that holds it is a norm or an embedding. A
            bare parameter, such as `pos_emb` of a transformer, has no "weight" in its name, and its module also holds
            layers. A class is a norm or an embedding if its name, or the name of a base class, ends like BatchNorm2d,
            RMSNorm, Embedding or PositionalEncoding. A list: names of parameters that do not decay, with the wildcards
            of `fnmatch`, such as `["*.bias", "embed.*"]`. A dictionary: names of classes for both groups, as in minGPT,
            such as `{"decay": ["Linear"], "no_decay": ["LayerNorm", "Embedding"]}`. The class, or a base class, of the
            module that holds a parameter then chooses the group. For a tied parameter, the first module with a named
            class decides. Parameters with "bias" in their name do not decay. Bare parameters do not decay if the class
            of their module is in neither list.

    Returns:
        The group that decays and the group that does not, by name "decay" and "no decay". A group may be empty.

    Raises:
        ConfigError: No parameter is trainable, a name matches no parameter, `by` is unknown, or with classes a
            parameter is in both groups or in neither.
    """
    return _split_by_decay(_get_trainable(module), _find_undecayed(module, by), weight_decay)


def layer_decay_groups(
    module: nn.Module,
    lr: float,
    decay: float,
    blocks: str | Sequence[str],
    *,
    weight_decay: float,
    by: By = "dimension",
    embeddings: Sequence[str] | None = None,
) -> list[Group]:
    """Return parameter groups whose learning rates fall from the head down to the embeddings.

    Of L blocks, block i (from 0) has the learning rate `lr * decay ** (L - i)`. The embeddings have
    `lr * decay ** (L + 1)`, and all other parameters, the head, have `lr`. Sources: Howard & Ruder, Universal Language
    Model Fine-tuning for Text Classification, 2018; in this form Clark et al., ELECTRA, 2020. Schedules keep the
    ratios. OneCycleLR needs the list of rates, `max_lr=[group["lr"] for group in groups]`.

    Args:
        module: The module whose trainable parameters are grouped, each once; a tied parameter in its lowest layer.
        lr: Learning rate of the head, the highest of all.
        decay: Factor from each layer to the next lower layer, in (0, 1].
        blocks: Name of the module that holds the blocks, such as "transformer.blocks"; or the names of the blocks, from
            the input upwards: `["stem", "layer1", "layer2"]`.
        weight_decay: Weight decay of the parameters that decay.
        by: The rule for parameters that do not decay; see `decay_groups`.
        embeddings: Names of modules or parameters below the blocks. Default: the parameters defined before the first
            block.

    Returns:
        For each depth, lowest first, the group that decays and the group that does not; without empty groups. A name is
        that of the block, "head" or "embeddings", with "decay" or "no decay": "transformer.blocks.0 decay".

    Raises:
        ConfigError: A name is unknown, no parameter is trainable, or `decay` is out of range.
    """
    if not 0 < decay <= 1:
        raise ConfigError(f"decay = {decay}: decay must be in (0, 1]. 1 gives all layers the same learning rate.")
    stack = _list_children(module, blocks) if isinstance(blocks, str) else blocks
    if not stack:
        raise ConfigError(f"blocks: {blocks} has no blocks. Name the module that has the blocks, or list the blocks.")
    distances = _compute_distances(module, stack, embeddings)
    layers = ["head", *(f"block {block}" if block in _ENDS else block for block in reversed(stack)), "embeddings"]
    trainable, undecayed = _get_trainable(module), _find_undecayed(module, by)
    groups: list[Group] = []
    for distance in sorted(set(distances.values()), reverse=True):
        layer = {name: each for name, each in trainable.items() if distances[id(each)] == distance}
        for group in _split_by_decay(layer, undecayed, weight_decay):
            name = f"{layers[distance]} {group['name']}"
            groups += [group | {"lr": lr * decay**distance, "name": name}] if group["params"] else []
    return groups


def check_groups(module: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that every trainable parameter of a module is in exactly one group.

    Args:
        module: The whole model, whose trainable parameters are counted.
        groups: Parameter groups, as for an optimizer, or its `param_groups`; the parameters of each group in a list.

    Raises:
        ConfigError: Parameters are missing, repeated or not of the module. The message names missing and repeated
            parameters, and counts the others.
    """
    counts = Counter(id(parameter) for group in groups for parameter in group["params"])
    trainable = _get_trainable(module)
    found = {
        "in no group": [name for name, parameter in trainable.items() if not counts[id(parameter)]],
        "in several groups": [name for name, parameter in trainable.items() if counts[id(parameter)] > 1],
    }
    problems = [f"{problem}: {', '.join(names)}" for problem, names in found.items() if names]
    if unknown_count := len(counts.keys() - {id(parameter) for parameter in module.parameters()}):
        problems.append(f"not of {type(module).__name__}: {unknown_count}")
    if problems:
        raise ConfigError(f"parameters {'; '.join(problems)}. Put each trainable parameter into exactly one group.")


def _get_trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not found:
        raise ConfigError(
            f"{type(module).__name__} has no trainable parameter. Unfreeze some, or build its layers first."
        )
    return found


def _split_by_decay(parameters: Mapping[str, nn.Parameter], undecayed: set[int], weight_decay: float) -> list[Group]:
    return [
        {
            "params": [each for each in parameters.values() if (id(each) in undecayed) == is_undecayed],
            "weight_decay": 0.0 if is_undecayed else weight_decay,
            "name": "no decay" if is_undecayed else "decay",
        }
        for is_undecayed in (False, True)
    ]


def _find_undecayed(module: nn.Module, by: By) -> set[int]:
    if by == "dimension":
        return {id(parameter) for parameter in module.parameters() if parameter.ndim < 2}
    if by == "module type":
        return {
            id(parameter)
            for part in module.modules()
            for name, parameter in part.named_parameters(recurse=False)
            if "bias" in name or _is_norm_or_embedding(part) or _is_direct_parameter(part, name)
        }
    if isinstance(by, Mapping):
        return _find_undecayed_by_class(module, by)
    if isinstance(by, str):
        raise ConfigError(f'by = {by!r}: expected "dimension", "module type" or a list of names of parameters.')
    named = list(module.named_parameters(remove_duplicate=False))
    for pattern in by:
        if not any(fnmatchcase(name, pattern) for name, _ in named):
            raise ConfigError(
                f"by: no parameter of {type(module).__name__} is named {pattern!r}. "
                f"Its parameters are {', '.join(name for name, _ in named)}."
            )
    return {id(parameter) for name, parameter in named if any(fnmatchcase(name, pattern) for pattern in by)}


def _find_undecayed_by_class(module: nn.Module, classes: Mapping[str, Sequence[str]]) -> set[int]:
    if classes.keys() - {"decay", "no_decay"} or any(isinstance(names, str) for names in classes.values()):
        raise ConfigError(f"by = {dict(classes)}: expected a list of class names for decay, and one for no_decay.")
    undecayed, problems = set[int](), []
    for name, parameter in _get_trainable(module).items():
        owner, _, leaf = name.rpartition(".")
        holder = module.get_submodule(owner)
        kind = type(holder)
        lines = {base.__name__ for base in kind.__mro__}
        found = [group for group in ("decay", "no_decay") if lines & {*classes.get(group, ())}]
        if "bias" in leaf or found == ["no_decay"] or (not found and _is_direct_parameter(holder, leaf)):
            undecayed.add(id(parameter))
        elif found != ["decay"]:
            problems.append(f"{name} of {kind.__name__} is in {'both' if found else 'neither'}")
    if problems:
        raise ConfigError(
            f"by: every trainable parameter must be in one group, decay or no_decay: {'; '.join(problems)}. "
            "Add the class of its module to one of the two lists."
        )
    return undecayed


def _is_norm_or_embedding(module: nn.Module) -> bool:
    ends = re.compile(r"(Norm(\dd)?|Embeddings?|PositionalEncoding)$")
    return isinstance(module, nn.EmbeddingBag) or any(ends.search(base.__name__) for base in type(module).__mro__)


def _is_direct_parameter(module: nn.Module, name: str) -> bool:
    """Return True if a module with layers holds this parameter next to them, as a transformer holds its `pos_emb`."""
    if "weight" in name or isinstance(module, ParametrizationList):  # Its "original" is the weight of a layer.
        return False
    return any(True for child in module.children() for _ in child.parameters())


def _compute_distances(module: nn.Module, stack: Sequence[str], embeddings: Sequence[str] | None) -> dict[int, int]:
    """Return the number of layers above each parameter, by the id of the parameter: 0 for the head."""
    inside = [_list_ids_below(module, block) for block in stack]
    order = [id(parameter) for parameter in module.parameters()]
    if embeddings is None:
        lowest = list(takewhile(lambda each: not any(each in block for block in inside), order))
    else:
        lowest = [each for name in embeddings for each in _list_ids_below(module, name)]
    distances = dict.fromkeys(order, 0)
    for distance, layer in enumerate((*reversed(inside), lowest), 1):
        distances |= dict.fromkeys(layer, distance)
    return distances


def _list_children(module: nn.Module, path: str) -> list[str]:
    """Return the names of the direct children of a module that have parameters."""
    _list_ids_below(module, path)
    children = module.get_submodule(path).named_children()
    return [f"{path}.{name}" for name, child in children if any(True for _ in child.parameters())]


def _list_ids_below(module: nn.Module, path: str) -> list[int]:
    """Return the ids of the parameters of a module, or the id of one parameter, by its name."""
    named = list(module.named_parameters(remove_duplicate=False))
    if found := [id(parameter) for name, parameter in named if f"{name}.".startswith(f"{path}.")]:
        return found
    names = [name for name, _ in named]
    known = path
    while known and not any(name.startswith(f"{known}.") for name in names):
        known = known.rpartition(".")[0]
    prefix = f"{known}." if known else ""
    children = dict.fromkeys(name.removeprefix(prefix).split(".")[0] for name in names if name.startswith(prefix))
    raise ConfigError(
        f"no parameter of {type(module).__name__} has a name below {path!r}. "
        f"{known or type(module).__name__} has {', '.join(children)}."
    )
