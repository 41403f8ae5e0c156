"""Tensor parallelism: layers of a task's plan, cut over a group of processes that compute each layer together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, cast, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module
from torch.nn import functional as F

from lumen.distributed.dtensor import mark_packed
from lumen.errors import ConfigError
from lumen.errors.arguments import suggest_names
from lumen.internals.fully_shard import allow_anomaly_checks
from lumen.internals.tensors import get_direct_parameters, get_gradient_hooks, set_gradient_hooks
from lumen.strategies.cut_dropout import Cut, cut_dropout
from lumen.strategies.region_check import RegionCheck
from lumen.task.materialize import redirect_references
from lumen.task.task_module import TaskModule
from lumen.task.teacher import name_students

_Cut = tuple[Placement, int]  # placement of a parameter, and number of matrices in it that are cut


class Style(NamedTuple):
    """Cut of a layer.

    Attributes:
        kind: The class of the layer.
        weight: The dimension in which the weight is cut; None replicates it.
        bias: The dimension in which the bias is cut; None replicates it.
        cut_ends: The ends that are this process's share of the features: "input", "output" or none. The other end is
            whole.
        parts: The number of matrices in the weight, each of which is cut.
        dim: The dimension of the features in the input, for dropout.
    """

    kind: type[nn.Module]
    weight: int | None
    bias: int | None
    cut_ends: tuple[Literal["input", "output"], ...] = ()
    parts: int = 1
    dim: int = -1


_COLWISE_GATHER, _EMBEDDING = Style(nn.Linear, 0, 0), Style(nn.Embedding, 0, None)
#: Styles of layers by the words of a plan, as transformers uses them.
STYLES: Mapping[str, tuple[Style, ...]] = {
    "colwise": (Style(nn.Linear, 0, 0, ("output",)), Style(nn.Dropout, None, None, ("input", "output"))),
    "packed_colwise": (Style(nn.Linear, 0, 0, ("output",), parts=3),),
    "rowwise": (Style(nn.Linear, 1, None, ("input",)),),
    "colwise_gather_output": (_COLWISE_GATHER,),
    "colwise_rep": (_COLWISE_GATHER,),
    "embedding_rowwise": (_EMBEDDING,),
    "vocab": (_COLWISE_GATHER, _EMBEDDING),
}
_SHARED_WORD = "replicated_with_grad_allreduce"
_REFUSED = {
    "sequence": "Lumen does not cut activations between layers. Leave the module out: every process computes it.",
    "sequence_parallel": "Lumen does not cut activations between layers. Leave the module out.",
}


allow_anomaly_checks()


@final
class TensorParallel:
    """Layers of a task, cut over the processes of a mesh.

    The constructor replaces the parameters of these layers by DTensors. Parameters and buffers that are not on the meta
    device first get the values of rank 0.

    Args:
        task: The task with a plan.
        mesh: The mesh of the processes that compute a layer together, of one dimension.
        device: The device of this process.

    Raises:
        ConfigError: The task has no plan, the plan names modules or words that do not exist, or a module cannot be cut;
            the message names it.
    """

    def __init__(self, task: nn.Module, mesh: DeviceMesh, device: torch.device) -> None:
        self._task, self._mesh = task, mesh
        self._is_bypassed = False
        words = match_plan(task, find_plan(task))
        styles = {name: _choose_style(task, name, word) for name, word in words.items() if word != _SHARED_WORD}
        self._names = {name: task.get_submodule(name) for name in styles}
        self._places: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in task.modules():
            for key, parameter in get_direct_parameters(module).items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), []).append((module, key))
        check_sizes(task, styles, mesh.size())
        self._regions = find_regions(task, styles)
        self._share_values(device)
        cuts: dict[int, tuple[str, _Cut]] = {}
        for name, style in styles.items():
            if style.kind is nn.Dropout:
                cut_dropout(cast(nn.Dropout, self._names[name]), partial(self._get_cut, name, style.dim))
            else:
                self._cut_layer(name, style, cuts)
        self._packed = {self._names[name]: style.parts for name, style in styles.items() if style.parts > 1}
        for name in (name for name, word in words.items() if word == _SHARED_WORD):
            for parameter in task.get_submodule(name).parameters():
                is_trained = parameter.requires_grad
                parameter.requires_grad_(True)  # A frozen parameter takes no hook, and may be trained later.
                parameter.register_hook(self._sum_gradient)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(is_trained)

    def check_first_forward(self) -> None:
        """Let the first training forward check each region; call this after the hooks of other code are registered."""
        for name in self._regions:
            RegionCheck(name, self._task.get_submodule(name), self._mesh, self._bypass, self._packed)

    def _share_values(self, device: torch.device) -> None:
        """Move parameters and buffers to the device, with rank 0's values. Collective."""
        for tensor in (*self._task.parameters(), *self._task.buffers()):
            tensor.data = tensor.data.contiguous()
            if not tensor.is_meta:
                tensor.data = tensor.data.to(device)
                dist.broadcast(tensor.data, 0)

    def _cut_layer(self, name: str, style: Style, cuts: dict[int, tuple[str, _Cut]]) -> None:
        """Replace the parameters of a layer, also where other modules hold them, and convert its input and output.

        Args:
            name: The name of the layer in the task.
            style: The cut of the layer.
            cuts: The layer and the placement of each parameter that has been cut, by id; this layer's are added.
        """
        layer, mesh = self._names[name], self._mesh
        for key, dim in (("weight", style.weight), ("bias", style.bias)):
            parameter = get_direct_parameters(layer).get(key)
            if parameter is None:
                continue
            cut = Replicate() if dim is None else Shard(dim), style.parts
            first, earlier = cuts.setdefault(id(parameter), (name, cut))
            if earlier != cut:
                raise ConfigError(
                    f"parallel_plan: {first} and {name} share {key}, but cut it in different ways. Give both the same "
                    "word, such as vocab."
                )
            if isinstance(parameter, DTensor):
                continue
            self._replace(parameter, self._make_part(parameter, *cut), style.parts, f"{name}.{key}")
            cuts[id(get_direct_parameters(layer)[key])] = name, cut
        convert_input = partial(self._convert_input, Shard(-1) if "input" in style.cut_ends else Replicate())
        convert_output = self._give_share if "output" in style.cut_ends else self._give_whole
        if isinstance(layer, nn.Embedding):
            layer.forward = partial(self._look_up, layer)  # type: ignore[method-assign]
            distribute_module(layer, mesh, None, None, convert_output)
        else:
            distribute_module(layer, mesh, None, convert_input, convert_output)

    def _make_part(self, parameter: nn.Parameter, placement: Placement, parts: int) -> nn.Parameter:
        """Return a new parameter with this process's part of the values of `parameter`."""
        values = parameter.detach()
        if isinstance(placement, Shard):
            dim = placement.dim
            of_each: Any = values.unflatten(dim, (parts, self._mesh.size(), -1))  # type: ignore[no-untyped-call]
            values = of_each.select(dim + 1, self._mesh.get_local_rank()).flatten(dim, dim + 1).contiguous().clone()
        part = DTensor.from_local(values, self._mesh, [placement], run_check=False)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def _replace(self, parameter: nn.Parameter, part: nn.Parameter, parts: int, name: str) -> None:
        """Replace a parameter in all modules that hold it, and redirect other references to it."""
        vars(part).update(vars(parameter))
        if parts > 1:
            mark_packed(part, parts)
        set_gradient_hooks(part, get_gradient_hooks(parameter))
        places = self._places[id(parameter)]
        for module, key in places:
            if module not in self._names.values():
                holder = next(holder for holder, each in self._task.named_modules() if each is module)
                raise ConfigError(
                    f"parallel_plan: {holder or type(self._task).__name__}.{key} is the parameter {name}, which the "
                    f"plan cuts. Give {holder} a word too."
                )
            get_direct_parameters(module)[key] = part
        module, key = places[0]
        redirect_references(parameter, lambda: get_direct_parameters(module)[key], name)

    def _convert_input(self, placement: Placement, layer: nn.Module, args: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        if self._is_bypassed:
            return args
        return (DTensor.from_local(args[0], mesh, [placement], run_check=False), *args[1:])

    def _look_up(self, layer: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of an embedding, as a DTensor that is the sum of each process's rows.

        DTensor's own embedding fails under torch.compile, and gives zeros for ids outside of the embedding.
        """
        if self._is_bypassed:
            return nn.Embedding.forward(layer, ids)
        weight: Any = layer.weight
        rows, rank = weight.to_local(), self._mesh.get_local_rank()
        count, first = len(rows), rank * len(rows)
        below, above = ids < first, ids >= first + count
        # An id outside of the whole embedding stays, so that torch raises an error.
        other = above if rank == 0 else below if rank == self._mesh.size() - 1 else below | above
        padding = layer.padding_idx
        padding = None if padding is None or not first <= padding < first + count else padding - first
        values = F.embedding((ids - first).masked_fill(other, 0), rows, padding).masked_fill(other.unsqueeze(-1), 0)
        return DTensor.from_local(values, self._mesh, [Partial()], run_check=False)

    def _give_share(self, layer: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output if self._is_bypassed else output.to_local()

    def _give_whole(self, layer: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
        return output if self._is_bypassed else output.redistribute(mesh, [Replicate()]).to_local()

    def _get_cut(self, name: str, dim: int, part: torch.Tensor) -> Cut | None:
        if dim >= part.ndim:
            raise ConfigError(
                f"parallel_plan: {name}: colwise:{dim} names dimension {dim}, but the input has {part.ndim} "
                "dimensions, counted from 0."
            )
        return None if self._is_bypassed else Cut(dim, self._mesh.get_local_rank(), self._mesh.size())

    def _sum_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of a gradient over the processes that compute a layer together. Collective."""
        if not self._is_bypassed:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=self._mesh.get_group())
        return gradient

    @contextmanager
    def _bypass(self) -> Iterator[None]:
        """Compute layers within the context with whole parameters."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False


def find_plan(task: nn.Module) -> dict[str, str]:
    """Return the plan of a task, or of the models from transformers in it: words by name of module.

    Raises:
        ConfigError: Neither the task nor a model in it has a plan.
    """
    plan = task.parallel_plan if isinstance(task, TaskModule) else None
    if plan:
        return dict(plan)
    found: dict[str, str] = {}
    for name, module in task.named_modules():
        prefix = f"{name}." if name else ""
        if not any(each.startswith(prefix) for each in found):
            hub = getattr(module, "tp_plan", None) if hasattr(type(module), "tp_plan") else None
            found |= {prefix + each: word for each, word in hub.items()} if isinstance(hub, Mapping) else {}
    if not found:
        raise ConfigError(
            f"Mesh: tensor = 2 or more cuts the layers of a plan, and {type(task).__name__} has none. "
            'Set parallel_plan in the task, such as {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or set '
            "tensor: 1."
        )
    return found


def match_plan(task: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """Return the word of each module that a plan names; `*` is one part of a name.

    A teacher has the words of its student.

    Raises:
        ConfigError: A name matches no module, or a word is unknown.
    """
    names = [name for name, _ in task.named_modules()][1:]
    words: dict[str, str] = {}
    for pattern, word in plan.items():
        known = [*STYLES, _SHARED_WORD]
        if word.partition(":")[0] not in known:
            hint = _REFUSED.get(word) or f"Words are {', '.join(known)}.{suggest_names(word, known)}"
            raise ConfigError(f"parallel_plan: {pattern}: {word!r} is not supported. {hint}")
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        matched = [name for name in names if matches(name)]
        if not matched:
            general = {re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names}
            raise ConfigError(
                f"parallel_plan: {pattern} is no module of {type(task).__name__}.{suggest_names(pattern, general)}"
            )
        words |= dict.fromkeys(matched, word)
    for copied, student in name_students(task).items():
        of_student = {name: word for name, word in words.items() if f"{name}.".startswith(f"{student}.")}
        words |= {copied + name.removeprefix(student): word for name, word in of_student.items()}
    return words


def _choose_style(task: nn.Module, name: str, word: str) -> Style:
    """Return the cut of a layer.

    Raises:
        ConfigError: The word does not fit the class of the module, or has a wrong number of parts.
    """
    module, (word, _, number) = task.get_submodule(name), word.partition(":")
    is_dropout = word == "colwise" and type(module) is nn.Dropout
    if number and not (number.isdecimal() and (is_dropout or (word == "packed_colwise" and int(number) > 1))):
        raise ConfigError(
            f"parallel_plan: {name}: {word}:{number} is not a word. A number follows packed_colwise, as the number of "
            "parts, 2 or more, or colwise of an nn.Dropout, as the dimension that is cut."
        )
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq):
        raise ConfigError(
            f"parallel_plan: {name}: an embedding with max_norm or scale_grad_by_freq cannot be cut. Leave {name} out."
        )
    for style in STYLES[word]:
        if type(module) is style.kind:
            style = style._replace(dim=int(number)) if number and is_dropout else style
            return style._replace(parts=int(number)) if number and not is_dropout else style
    is_torchs = type(module).__module__.startswith("torch.")
    kind = f"{'nn' if is_torchs else type(module).__module__}.{type(module).__qualname__}"  # peft has a Linear too
    kinds = " or ".join(f"nn.{style.kind.__name__}" for style in STYLES[word])
    raise ConfigError(f"parallel_plan: {name}: {word} cuts an {kinds}, but {name} is a {kind}.")


def check_sizes(task: nn.Module, styles: Mapping[str, Style], processes: int) -> None:
    """Refuse layers whose cut dimension is not divisible by the number of processes.

    Raises:
        ConfigError: The size of a layer is not divisible; the message names the layer.
    """
    for name, style in styles.items():
        if style.weight is None:
            continue
        weight: Any = task.get_submodule(name).weight
        size = weight.shape[style.weight]
        if size % (processes * style.parts):
            of_parts = f" of {style.parts} matrices" if style.parts > 1 else ""
            raise ConfigError(
                f"parallel_plan: {name} has {size} features{of_parts} in its cut dimension, which {processes} "
                "processes cannot share equally. Change the size of the layer or tensor, or leave the layer out."
            )


def find_regions(task: nn.Module, styles: Mapping[str, Style]) -> list[str]:
    """Return the names of the smallest modules in which features are cut and made whole again.

    Raises:
        ConfigError: A layer gives or takes cut features outside such a module.
    """
    givers = [name for name, style in styles.items() if style.cut_ends == ("output",)]
    takers = [name for name, style in styles.items() if style.cut_ends == ("input",)]
    found: dict[str, None] = {}
    for name in (name for name, style in styles.items() if style.cut_ends):
        needed = [others for others in (givers, takers) if name not in others]
        region = name
        while region and not all(any(other.startswith(f"{region}.") for other in others) for others in needed):
            region = region.rpartition(".")[0]
        if not region:
            verb, word = ("gives", "rowwise") if name in givers else ("takes", "colwise")
            raise ConfigError(
                f"parallel_plan: {name} {verb} cut features, but no module of the task holds {name} and a "
                f"{word} layer. Put both into one module, or use colwise_gather_output or vocab for a layer with a "
                "whole output."
            )
        found[region] = None
    return [*found]
