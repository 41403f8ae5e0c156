"""Comparison of a module whose layers are cut over processes with the same module on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lumen.data.nested import iterate_tensors, map_leaves
from lumen.distributed.dtensor import gather_full_tensor, mark_packed
from lumen.errors import ConfigError
from lumen.internals.attributes import replaced_attribute
from lumen.internals.tensors import get_direct_parameters, get_gradient_hooks, set_gradient_hooks
from lumen.random import preserve_generators
from lumen.task.modes import SavedModes

_Values = dict[str, torch.Tensor]


@final
class RegionCheck:
    """Check of a module's first training forward: outputs and gradients must not depend on the cut.

    The check finds code that counts features (`view(..., heads, size)`), fused layers that are cut as one, dropout of
    cut features, and parameters whose gradient is only the share of a process. It costs two forwards and two backwards
    of the module in the first step, in which the whole parameters of the module are in memory.

    Args:
        name: The name of the module in the task.
        region: The module that contains cut layers.
        mesh: The mesh of the processes that compute it together.
        bypass: Function that returns a context in which the layers compute with whole parameters.
        packed: The number of matrices in the weight of each layer that holds several.
    """

    def __init__(
        self,
        name: str,
        region: nn.Module,
        mesh: DeviceMesh,
        bypass: Callable[[], AbstractContextManager[None]],
        packed: Mapping[nn.Module, int],
    ) -> None:
        self._name, self._mesh, self._bypass, self._packed = name, mesh, bypass, packed
        self._is_active = False
        hook: Any = torch.compiler.disable(self._check)  # type: ignore[no-untyped-call]
        self._handle = region.register_forward_pre_hook(hook, with_kwargs=True)

    def _check(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare before the first forward that will have a backward. Collective.

        Raises:
            ConfigError: The forward fails with cut layers, or a result differs.
        """
        if self._is_active or not (torch.is_grad_enabled() and region.training):
            return
        self._is_active = True
        for module in region.modules():  # The marks of parameters are lost when they are gathered.
            for parameter in get_direct_parameters(module).values() if module in self._packed else ():
                if parameter is not None:
                    mark_packed(parameter, self._packed[module])
        try:
            self._compare(region, args, kwargs)
        finally:
            self._is_active = False
        self._handle.remove()

    def _compare(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(len(each.device_mesh.shape) > 1 for each in region.parameters() if isinstance(each, DTensor)):
            raise ConfigError(
                f"Mesh: {self._name} has cut layers, but only a part of {self._name} is a unit of FSDP. Set "
                f"wrap: {type(region).__name__}, or choose other units that contain {self._name}."
            )
        count = self._mesh.size()
        try:
            cut = self._compute(region, args, kwargs)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, ConfigError):  # of a module inside
                raise
            raise ConfigError(
                f"parallel_plan: {self._name} fails with layers cut over {count} processes: {error} Between a colwise "
                "and a rowwise layer a process has its share of the features: write -1 for the number of heads or "
                "features, as in unflatten(-1, (-1, head_size))."
            ) from error
        whole = self._compute_whole(region, args, kwargs)
        if not (different := _list_different(cut, whole)):
            return
        modes = SavedModes(region)
        region.eval()
        draws = not _list_different(self._compute(region, args, kwargs), self._compute_whole(region, args, kwargs))
        modes.restore()
        raise ConfigError(
            f"parallel_plan: {self._name} computes other values with layers cut over {count} processes: its "
            f"{', '.join(different[:3])} differ. " + (_DROPOUT if draws else _CAUSES)
        )

    def _compute_whole(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Values:
        """Return the results of the module with whole parameters. Collective."""
        cut = [
            (module, key, parameter)
            for module in region.modules()
            for key, parameter in get_direct_parameters(module).items()
            if parameter is not None and isinstance(parameter, DTensor)
        ]
        try:
            for module, key, parameter in cut:
                whole = gather_full_tensor(parameter.detach(), parameter)
                get_direct_parameters(module)[key] = nn.Parameter(whole, parameter.requires_grad)
                set_gradient_hooks(get_direct_parameters(module)[key], (get_gradient_hooks(parameter)[0], None))
            with self._bypass():
                return self._compute(region, args, kwargs)
        finally:
            for module, key, parameter in cut:
                get_direct_parameters(module)[key] = parameter

    def _compute(self, region: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Values:
        """Return outputs, and gradients of inputs and parameters, of one forward and backward without side effects."""
        names, parameters = zip(*region.named_parameters(), strict=True)
        dtype = next(each.dtype for each in parameters if each.is_floating_point())

        def detach(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                return each
            return each.detach().to(dtype).requires_grad_(each.requires_grad)

        with replaced_attribute(torch.Tensor, "__deepcopy__", lambda tensor, _: tensor):
            args, kwargs = map_leaves(deepcopy((args, kwargs)), detach)  # The forward may fill a cache.
        inputs = [each for each in iterate_tensors((args, kwargs)) if each.requires_grad]
        trained = {name: each for name, each in zip(names, parameters, strict=True) if each.requires_grad}
        sources = {f"gradient of input {index}": each for index, each in enumerate(inputs)}
        sources |= {f"gradient of {name}": each for name, each in trained.items()}
        buffers = [(buffer, buffer.clone()) for buffer in region.buffers()]
        gradients: Iterable[torch.Tensor | None] = ()
        # Rounding of 16-bit autocast would hide a difference. The hooks keep tensors from an outer checkpoint, which
        # would run its forward again.
        with (
            preserve_generators(),
            saved_tensors_hooks(_keep, _keep),
            torch.autocast(parameters[0].device.type, enabled=False),
        ):
            output = region.forward(*args, **kwargs)
            outputs = [each for each in iterate_tensors(output) if each.is_floating_point()]
            ends = [each for each in outputs if each.requires_grad]
            if ends and sources:
                # A sum of squares makes the gradient of each element different.
                total = torch.stack([each.double().square().sum() for each in ends]).sum()
                gradients = torch.autograd.grad(total, [*sources.values()], allow_unused=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        values = {f"output {index}": each.detach() for index, each in enumerate(outputs)}
        for (name, source), gradient in zip(sources.items(), gradients, strict=False):
            if gradient is not None:
                values[name] = gather_full_tensor(gradient, source)
        return values


_DROPOUT = (
    "The values are equal without dropout: dropout of cut features draws other numbers than on one process. Give each "
    "nn.Dropout between a colwise and a rowwise layer the word colwise, or colwise:1 if dimension 1 of its input is "
    "cut, as the heads of attention probabilities are, and no word if its input is whole. Dropout inside a function, "
    "such as scaled_dot_product_attention, has no word: set its probability to 0, or compute the probabilities with "
    "softmax and drop them with an nn.Dropout."
)
_CAUSES = (
    "Causes are: code that contains the number of heads or features, as in unflatten(-1, (heads, -1)), where a process "
    "has its share: write unflatten(-1, (-1, head_size)); query, key and value in one layer, whose word is "
    "packed_colwise; or a parameter that is used on cut features, such as a norm of heads, whose word is "
    "replicated_with_grad_allreduce."
)


def _keep(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _list_different(values: _Values, others: _Values) -> list[str]:
    """Return the names of values that differ by more than rounding."""
    scale = max((float(each.double().norm()) for each in others.values()), default=0.0)
    different = []
    for name, value in values.items():
        other, eps = others[name], torch.finfo(value.dtype).eps
        # A gradient that is zero without rounding, such as that of a key's bias, is noise of the others' scale.
        limit = eps**0.5 * float(other.double().norm()) + 100 * eps * scale
        if value.shape != other.shape or not float((value.double() - other.double()).norm()) <= limit:
            different.append(name)
    return different
