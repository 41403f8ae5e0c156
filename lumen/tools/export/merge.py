"""Merging of what computes weights during training, such as LoRA and weight norm, into the weights of plain modules."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from torch import nn
from torch.nn.utils import parametrize, prune, remove_spectral_norm, remove_weight_norm

from lumen.errors import ConfigError
from lumen.internals.tensors import get_direct_parameters, get_pruned_name, list_forward_pre_hooks


def find_outermost(model: nn.Module, kind: type[nn.Module]) -> dict[str, Any]:
    """Return the modules of a class by name, without modules within others of the class."""
    found = {name: each for name, each in model.named_modules() if isinstance(each, kind)}
    above = [f"{name}." if name else "" for name in found]
    return {name: each for name, each in found.items() if sum(map(f"{name}.".startswith, above)) == 1}


def find_adapted(model: nn.Module) -> dict[str, Any]:
    """Return the outermost models of peft within a model, by name."""
    peft = sys.modules.get("peft")  # A task with an adapter has imported peft.
    return find_outermost(model, peft.PeftModel) if peft else {}


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the adapters of peft into the weights, in place, and return the model without them.

    A weight that is adapted and tied, such as GPT-2's head, is first copied: the adapter changes only one of its users.

    Raises:
        ConfigError: An adapter has no weights to merge into, such as a trained prompt.
    """
    users = Counter(id(each) for _, each in model.named_parameters(remove_duplicate=False))
    for name, adapted in find_adapted(model).items():
        if not hasattr(adapted, "merge_and_unload"):
            raise ConfigError(
                f"{name or type(model).__name__}: {adapted.active_peft_config.peft_type.value} of peft cannot be "
                "merged into the weights. Write only the adapter: --format peft."
            )
        for layer in adapted.modules():
            base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else nn.Identity()
            for key, weight in get_direct_parameters(base).items():
                if weight is not None and users[id(weight)] > 1:
                    setattr(base, key, nn.Parameter(weight.detach().clone(), requires_grad=False))
        merged = adapted.merge_and_unload()
        if not name:
            return merged  # type: ignore[no-any-return]
        parent, _, key = name.rpartition(".")
        setattr(model.get_submodule(parent), key, merged)
    return model


def merge_parametrizations(model: nn.Module) -> None:
    """Replace weight norm, spectral norm, pruning and other parametrizations by the weights that they compute."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name)
        for hook in list_forward_pre_hooks(module):
            if isinstance(hook, prune.BasePruningMethod):
                prune.remove(module, get_pruned_name(hook))  # type: ignore[no-untyped-call]
            elif type(hook).__module__ == "torch.nn.utils.weight_norm":
                remove_weight_norm(module, hook.name)  # type: ignore[attr-defined]
            elif type(hook).__module__ == "torch.nn.utils.spectral_norm":
                remove_spectral_norm(module, hook.name)  # type: ignore[attr-defined]
