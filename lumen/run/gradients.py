"""Scaling and clipping of a step's gradients: dense, sparse, and sharded over processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lumen.distributed.dtensor import get_local_tensor, is_sharded
from lumen.errors import ConfigError
from lumen.internals.tensors import add_to_all, clamp_all, compute_max_abs, multiply_all


def list_parameters(optimizer: Any) -> list[nn.Parameter]:
    """Return the parameters that an optimizer moves now."""
    held: list[nn.Parameter] = []
    for group in optimizer.param_groups:
        held += group["params"]
    return held


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients by a factor, in a few kernels."""
    if gradients := _list_local_gradients(parameters):
        multiply_all(gradients, factor)  # In a sparse gradient torch multiplies the rows.


def remove_negative_zeros(parameters: Iterable[nn.Parameter]) -> None:
    """Replace -0.0 in all gradients by 0.0: a sum that some process begins with zeros is never -0.0."""
    if gradients := [each for each in _list_local_gradients(parameters) if not each.is_sparse]:
        add_to_all(gradients, 0.0)


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, *, exact: bool = False) -> torch.Tensor:
    """Clip the gradients by their norm over all parameters.

    Collective if gradients are sharded (`DTensor`): every rank must call this.

    Args:
        parameters: The parameters whose gradients are clipped.
        max_norm: The largest norm that is left unchanged.
        exact: True to compute the norm from unsharded gradients, so that it is bitwise identical for any sharding.

    Returns:
        The norm before clipping: a scalar tensor on the device of the gradients.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and (exact or _are_sharded(gradients)):
        norm = _compute_exact_norm(gradients) if exact else _compute_norm_over_meshes(gradients)
        multiply_all(list(map(get_local_tensor, gradients)), (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
    try:
        return nn.utils.clip_grad_norm_(parameters, max_norm)
    except NotImplementedError:  # Some gradients are sparse.
        return nn.utils.clip_grad_norm_(_replace_sparse(parameters), max_norm)


def compute_total_norm(parameters: Iterable[nn.Parameter], *, exact: bool = False) -> torch.Tensor:
    """Return the norm of the gradients over all parameters: a scalar tensor; see `clip_grad_norm`.

    Collective if gradients are sharded (`DTensor`): every rank must call this.
    """
    if exact:
        return _compute_exact_norm([each.grad for each in parameters if each.grad is not None])
    return _compute_norm_over_meshes([each.grad for each in _replace_sparse(parameters) if each.grad is not None])


def _compute_exact_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients, from the norm of each."""
    norms = _compute_whole_norms([*gradients], 2.0)
    return torch.linalg.vector_norm(_move_to_one_device(norms)) if norms else torch.zeros(())


def _compute_whole_norms(gradients: Sequence[Any], kind: float) -> list[torch.Tensor]:
    """Return the p-norm of each gradient, which is whole and contiguous on some process: its sum has one order."""
    norms: dict[int, torch.Tensor] = {}
    by_mesh: dict[Any, dict[int, Any]] = {}
    for index, gradient in enumerate(gradients):
        if not is_sharded(gradient) or gradient.device_mesh.size() == 1:
            local = get_local_tensor(gradient)
            values = local.coalesce().values() if local.is_sparse else local
            norms[index] = torch.linalg.vector_norm(values.reshape(-1), kind)
        elif gradient.placements[-1].is_shard(0) and all(each.is_replicate() for each in gradient.placements[:-1]):
            by_mesh.setdefault((gradient.device_mesh, gradient.dtype), {})[index] = gradient
        else:  # tensor parallelism
            norms[index] = torch.linalg.vector_norm(gradient.full_tensor(), kind)
    for (mesh, _), sharded in by_mesh.items():
        norms |= zip(sharded, _compute_norms_of_shards([*sharded.values()], mesh, kind), strict=True)
    return [norms[index] for index in range(len(gradients))]


def _compute_norms_of_shards(gradients: list[Any], mesh: Any, kind: float) -> Iterable[torch.Tensor]:
    """Return the norm of each gradient, which one process computes from the shards of all. Collective.

    Args:
        gradients: Gradients of one dtype, whose rows are sharded over the last dimension of the mesh.
        mesh: The device mesh of the gradients.
        kind: The p of the p-norm.
    """
    world, rank, group = mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1), mesh.get_group(mesh.ndim - 1)
    loads, owned = [0] * world, [list[int]() for _ in range(world)]
    for index, gradient in enumerate(gradients):
        owner = loads.index(min(loads))
        loads[owner] += gradient.numel()
        owned[owner].append(index)
    locals_ = [gradient.to_local().reshape(-1) for gradient in gradients]
    sent = [locals_[index] for indices in owned for index in indices]
    mine = [gradients[index] for index in owned[rank]]
    sizes = [
        [
            max(min(rows := -(-len(each) // world), len(each) - part * rows), 0) * (each.numel() // len(each))
            for each in mine
        ]
        for part in range(world)
    ]
    received = locals_[0].new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(
        received, torch.cat(sent), [sum(each) for each in sizes],
        [sum(locals_[index].numel() for index in indices) for indices in owned], group=group,
    )  # fmt: skip
    parts = torch.split(received, [size for each in sizes for size in each])
    norms = received.new_zeros(len(gradients))
    for place, index in enumerate(owned[rank]):
        norms[index] = torch.linalg.vector_norm(torch.cat(parts[place :: len(mine)]), kind)
    dist.all_reduce(norms, group=group)  # Each norm is 0 on all processes but one.
    return list(norms)


def _compute_norm_over_meshes(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of gradients that may be on several meshes; one call of torch works with one mesh."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for gradient in gradients:
        by_mesh.setdefault(getattr(gradient, "device_mesh", None), []).append(gradient)
    norms: list[Any] = list(map(nn.utils.get_total_norm, by_mesh.values() or [[]]))
    norms = [_sum_norm(norm) for norm in norms]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(_move_to_one_device(norms))  # type: ignore[no-any-return]


def grad_norm(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, torch.Tensor]:
    """Return the norm of each parameter's gradient, and of all gradients together, by names that can be logged.

    Call `self.log_dict(lumen.grad_norm(self, norm_type=2))` in `on_before_optimizer_step`, where gradients are
    complete, unscaled and not clipped.

    Collective if gradients are sharded (`DTensor`): every rank must call this.

    Args:
        module: The task, or any module; parameters without a gradient are left out.
        norm_type: The p of the p-norm, > 0; "inf" for the largest absolute element.
        group_separator: The text before the name of a parameter.

    Returns:
        Scalars: `grad_2.0_norm/NAME` of each parameter, and `grad_2.0_norm_total`; empty without gradients.

    Raises:
        ConfigError: The `norm_type` is not more than 0.
    """
    kind = float(norm_type)
    if not kind > 0:
        raise ConfigError(f"grad_norm: norm_type must be more than 0, or 'inf', found {norm_type!r}.")
    gradients = {name: each.grad.detach() for name, each in module.named_parameters() if each.grad is not None}
    found = _compute_whole_norms([*gradients.values()], kind)
    norms = {f"grad_{kind}_norm{group_separator}{name}": norm for name, norm in zip(gradients, found, strict=True)}
    if norms:
        norms[f"grad_{kind}_norm_total"] = torch.linalg.vector_norm(_move_to_one_device(norms.values()), kind)
    return norms


def _sum_norm(norm: Any) -> torch.Tensor:
    """Return the norm over all processes from the norms of their shards. Collective if the norm is a DTensor."""
    if not is_sharded(norm):
        return norm  # type: ignore[no-any-return]
    partial = [dim for dim, placement in enumerate(norm.placements) if placement.is_partial()]
    if len(partial) < 2:
        return norm.full_tensor()  # type: ignore[no-any-return]
    # Torch warns of its reductions over several dimensions, which could differ between processes. Each of these sums is
    # equal on all processes that the next one adds.
    total = norm.to_local() ** 2
    for dim in partial:
        dist.all_reduce(total, group=norm.device_mesh.get_group(dim))
    return total.sqrt()  # type: ignore[no-any-return]


def _move_to_one_device(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *others = norms
    return torch.stack([first, *(norm.to(first) for norm in others)])


def clip_grad_value(parameters: Iterable[nn.Parameter], max_value: float) -> None:
    """Clamp every gradient element to [-max_value, max_value]."""
    if gradients := _list_local_gradients(_replace_sparse(parameters)):
        clamp_all(gradients, max_value)


def compute_max_abs_gradient(parameters: Iterable[nn.Parameter]) -> torch.Tensor | None:
    """Return the largest absolute value in the gradients on this process; None if there is no gradient.

    Returns:
        A scalar tensor on the device of the gradients; NaN or infinite if a gradient is. Sharded gradients count with
        this process's shards.
    """
    gradients = [each for each in _list_local_gradients(_replace_sparse(parameters)) if each.numel()]
    return torch.stack(list(compute_max_abs(gradients))).max() if gradients else None


def _list_local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of parameters; of sharded ones this process's shards."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return list(map(get_local_tensor, gradients)) if _are_sharded(gradients) else gradients


def _are_sharded(gradients: list[torch.Tensor]) -> bool:
    """Return True if some gradients are sharded. The check of types is fast for most models."""
    return not {*map(type, gradients)} <= {torch.Tensor} and any(map(is_sharded, gradients))


def _replace_sparse(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    """Return the parameters. A tensor whose gradient has the coalesced rows replaces each with a sparse gradient."""
    found: list[torch.Tensor] = []
    for parameter in parameters:
        if parameter.grad is None or not parameter.grad.is_sparse:
            found.append(parameter)
            continue
        parameter.grad = parameter.grad.coalesce()
        rows = parameter.grad.values()
        found.append(torch.empty_like(rows))
        found[-1].grad = rows
    return found
