"""Attention and positions in sequences of which each process may have only a part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lumen.distributed.context import Context, get_context
from lumen.errors import ConfigError


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Return `F.scaled_dot_product_attention` of whole sequences, also under `lumen.Mesh(context=...)`.

    In a training step of such a mesh, the processes of a context group gather keys and values: this function is then
    collective, and its gradients equal those of one process up to rounding. Elsewhere it calls torch's function with
    the same arguments.

    Args:
        query: The queries of this process's part, `(batch, heads, time, size)`.
        key: The keys of this process's part, `(batch, heads or groups, time, size)`.
        value: The values of this process's part, `(batch, heads or groups, time, size of values)`.
        attn_mask: A mask as in torch, which broadcasts to `(batch, heads, time, time of the whole sequence)`.
        dropout_p: The probability of dropout of attention weights; 0 in a context group.
        is_causal: True to attend to the same and earlier positions of the whole sequence only.
        scale: The factor of products of queries and keys. Default: 1 / sqrt(size).
        enable_gqa: True if several heads share a key and a value.
        document_ids: Integers of this process's part, `(batch, time)`: a position attends only to positions with the
            same number, as in packed documents.

    Returns:
        The attention output of this process's part, `(batch, heads, time, size of values)`.

    Raises:
        ConfigError: `dropout_p` is not 0 in a context group, a mask does not cover the whole sequence, or two kinds of
            masks are given that cannot be combined.
    """
    if attn_mask is not None and (is_causal or document_ids is not None):
        raise ConfigError("attention: attn_mask replaces is_causal and document_ids. Put all conditions into the mask.")
    context = get_context()
    length = query.shape[-2]
    bias: Tensor | None = attn_mask
    ids = document_ids
    if context is not None:
        gather: Any = torch.compiler.disable(_gather)  # type: ignore[no-untyped-call]
        key, value, ids = gather(context, query, key, value, attn_mask, dropout_p, document_ids)
        if is_causal:  # Later keys are not needed, which lets fused kernels run.
            end = (context.rank + 1) * length
            key, value, ids = key[..., :end, :], value[..., :end, :], None if ids is None else ids[:, :end]
            if document_ids is None and context.rank:
                from torch.nn.attention.bias import causal_lower_right  # It imports torch's compiler.

                bias, is_causal = causal_lower_right(length, end), False
    if document_ids is not None:
        assert ids is not None
        bias = document_ids[:, None, :, None] == ids[:, None, None, :]
        if is_causal:
            keys = torch.arange(ids.shape[1], device=ids.device)
            bias, is_causal = bias & (keys[None, :] <= keys[-length:, None]), False
    return F.scaled_dot_product_attention(
        query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def position_ids(length: int, device: torch.device | None = None) -> Tensor:
    """Return the positions of this process's part of a sequence, from 0, of shape `(length,)` and dtype int64.

    Args:
        length: The length of the part: `x.shape[dim]` of an activation in the training step.
        device: The device of the result.
    """
    context = get_context()
    return torch.arange(length, device=device) + (0 if context is None else context.rank * length)


def _gather(
    context: Context,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    document_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return keys, values and numbers of documents of whole sequences. Collective."""
    if dropout:
        raise ConfigError(
            f"attention: dropout_p is {dropout}, but a process of Mesh(context={context.size}) has only a part of the "
            "attention weights, and would draw other numbers than one process. Set it to 0."
        )
    whole = context.size * key.shape[-2]
    if mask is not None and mask.shape[-1] not in (1, whole):
        raise ConfigError(
            f"attention: attn_mask has the shape {tuple(mask.shape)}, but Mesh(context={context.size}) needs a mask "
            f"of this process's {query.shape[-2]} queries and all {whole} keys. Use is_causal and document_ids instead."
        )
    joined = context.gather(torch.cat([key, value], -1), key.ndim - 2)
    ids = None if document_ids is None else context.gather(document_ids, 1)
    return joined[..., : key.shape[-1]], joined[..., key.shape[-1] :], ids
