"""Loading of saved tensors by name into a model, in place, and building of tasks from checkpoints."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import PurePath
from typing import Any, TypeVar

import torch
from torch import nn

from lumen.checkpoint.format.codec import Tensors, decode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.storage import as_path_or_url
from lumen.checkpoint.load.weights_source import (
    WEIGHTS,
    Weights,
    average_checkpoint,
    find_checkpoint_at,
    open_weights,
    unwrap_names,
)
from lumen.checkpoint.named_tensors import get_extra_tensors, get_model_tensors
from lumen.checkpoint.user_state import HookAdditions
from lumen.console import logger as _log
from lumen.data.nested import fill_tensor
from lumen.distributed.dtensor import get_local_tensor
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import CheckpointMismatch
from lumen.errors.arguments import expand_path
from lumen.internals.masking import find_secret_placeholder, has_reference, lacks_object
from lumen.internals.omegaconf import is_omegaconf, make_omegaconf
from lumen.internals.tensors import call_load_hooks, has_load_hooks
from lumen.precision import convert_as_saved
from lumen.task.data_module import DataModule
from lumen.task.hyperparameters import Hyperparameters
from lumen.task.task_module import TaskModule

Owner = TypeVar("Owner", bound=TaskModule | DataModule)


@torch.no_grad()
def load_model(
    model: nn.Module, checkpoint: Checkpoint, *, strict: bool = True, processes: Processes = SINGLE_PROCESS
) -> None:
    """Copy a checkpoint's parameters and buffers into a model, in place; sharded tensors receive this process's shard.

    Collective: every one of `processes` must call this.

    Args:
        model: The model to fill.
        checkpoint: The checkpoint to read.
        strict: Refuse a checkpoint with unknown or missing names.
        processes: The processes that hold the model; default: only this process.

    Raises:
        CheckpointMismatch: Names (if strict), shapes or dtypes differ; nothing was changed.
    """
    weights = Weights(str(checkpoint.path), strict=strict)
    _fill_model(model, checkpoint, weights, processes, cast=False)


@torch.no_grad()
def load_weights(model: nn.Module, weights: Weights, processes: Processes) -> None:
    """Copy parameters and buffers into a model, in place; floating-point values are cast to the model's dtypes.

    The function needs extra memory for one tensor, or for this process's shard of one tensor. Collective: every rank
    must call this.

    Raises:
        CheckpointMismatch: Names (if strict), shapes or kinds of numbers differ; nothing was changed.
        CheckpointError: The weights do not exist, cannot be fetched or are incomplete; nothing was changed.
    """
    sections = WEIGHTS if weights.average is None else None
    with open_weights(str(weights.path), processes, sections) as checkpoint:
        _fill_model(model, average_checkpoint(checkpoint, weights.average, processes), weights, processes, cast=True)
        _log.info("parameters from %s", checkpoint.path if expand_path(weights.path).is_dir() else weights.path)


def _fill_model(
    model: nn.Module, checkpoint: Checkpoint, weights: Weights, processes: Processes, *, cast: bool
) -> None:
    """Find the source of every tensor, refuse mismatches, and only then copy. Collective."""
    tensors, aliases = get_model_tensors(model)
    try:
        sources = processes.run_on_all(lambda: _match_names(tensors, aliases, checkpoint, weights, cast=cast))
    except CheckpointMismatch:
        if not processes.run_on_all(lambda: _call_load_hooks(model, checkpoint)):
            raise
        tensors, aliases = get_model_tensors(model)
        sources = processes.run_on_all(lambda: _match_names(tensors, aliases, checkpoint, weights, cast=cast))
    processes.run_on_all(lambda: _copy_tensors(tensors, sources, checkpoint))
    dtypes = [(checkpoint.get_spec("model", source)[0], tensors[name].dtype) for name, source in sources.items()]
    if casts := Counter(f"{saved} to {current}" for saved, current in dtypes if saved != current):
        kinds = ", ".join(f"{count} tensors from {kind}" for kind, count in casts.items())
        _log.info("%s: cast %s", weights.path, kinds)


def _call_load_hooks(model: nn.Module, checkpoint: Checkpoint) -> bool:
    """Call `load_state_dict` hooks of modules that may resize their tensors; return True if any module has hooks."""
    hooked = {f"{name}." if name else "": module for name, module in model.named_modules() if has_load_hooks(module)}
    for prefix, module in hooked.items():
        device = next((each.device for each in chain(module.buffers(), module.parameters())), None)
        names = [name for name in checkpoint.list_tensor_names("model") if name.startswith(prefix)]
        state = {name: checkpoint.read_tensor("model", name).to(device) for name in names}
        call_load_hooks(module, state, prefix)
    return bool(hooked)


def _copy_tensors(tensors: Tensors, sources: dict[str, str], checkpoint: Checkpoint) -> None:
    for name, source in sources.items():
        if checkpoint.get_spec("model", source)[0] == tensors[name].dtype:
            checkpoint.copy_into("model", source, tensors[name])
        else:
            fill_tensor(get_local_tensor(tensors[name]), checkpoint.read_shard("model", source, tensors[name]))


def _match_names(
    tensors: Tensors, aliases: dict[str, str], checkpoint: Checkpoint, weights: Weights, *, cast: bool
) -> dict[str, str]:
    """Return the stored name of each tensor to fill, by its name in the model.

    Raises:
        CheckpointMismatch: Names, shapes or dtypes differ; the message lists the differences and gives advice.
    """
    names = {name: [name] for name in tensors}
    for alias, name in aliases.items():
        names[name].append(alias)
    offered, unused = _apply_renames(checkpoint, weights, [*tensors, *aliases])
    found = {name: list(dict.fromkeys(offered[n] for n in tied if n in offered)) for name, tied in names.items()}
    missing = [
        name for name, tied in names.items() if not (found[name] or any(_matches_any(weights.ignore, n) for n in tied))
    ]
    used = {source for each in found.values() for source in each}
    unexpected = sorted({source: name for name, source in reversed(offered.items()) if source not in used}.values())
    lists = {
        "not in the checkpoint": missing,
        "only in the checkpoint": unexpected,
        "patterns that match nothing": unused,
    }
    complaints = [f"{title}: {_format_some_names(some)}" for title, some in lists.items() if some]
    wrong = list(_describe_mismatches(checkpoint, tensors, found, cast=cast))
    if tensors and not used:
        wrong.append("the model and the checkpoint have no name in common")
    if wrong and not cast and not complaints and _differ_only_in_dtype(checkpoint, tensors, found):
        saved_with = checkpoint.state["precision"].get("name", "fp32, bf16 or fp16")
        raise CheckpointMismatch(
            f"{checkpoint.path} was saved by a run with precision: {saved_with}, whose parameters have other dtypes: "
            f"{'; '.join(wrong[:3])}. Set the same precision."
        )
    if wrong or (weights.strict and complaints):
        raise CheckpointMismatch(
            f"{weights.path} holds the weights of another model: {'; '.join([*complaints, *wrong[:8]])}. "
            f"{_format_advice(missing, unexpected, wrong, cast=cast)}"
        )
    for complaint in complaints:
        _log.warning("%s: %s", weights.path, complaint)
    return {name: each[0] for name, each in found.items() if each}


def _apply_renames(checkpoint: Checkpoint, weights: Weights, known: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return stored names by their renamed names, and the patterns without a match.

    Args:
        checkpoint: The checkpoint whose names are renamed, including names of tied tensors.
        weights: The patterns to rename and to ignore.
        known: Names of the model's tensors.
    """
    offered: dict[str, str] = {}
    hits = Counter[str]()
    seen = set(known)
    stored = [*checkpoint.list_tensor_names("model"), *checkpoint.aliases]
    plain = _match_without_wrappers(stored, weights, seen)
    for name in stored:
        renamed = plain.get(name, name)
        for pattern, replacement in weights.rename.items():
            renamed, count = re.subn(pattern, replacement, renamed)
            hits[pattern] += count
        seen.add(renamed)
        if _matches_any(weights.ignore, renamed):
            continue
        if renamed in offered:
            raise CheckpointMismatch(
                f"{weights.path}: rename makes {renamed!r} of {offered[renamed]!r} and of {name!r}. Make the patterns "
                "narrower, or rename one of the two differently and ignore that name."
            )
        offered[renamed] = checkpoint.aliases.get(name, name)
    unmatched = [pattern for pattern in weights.ignore if not any(_matches_any([pattern], name) for name in seen)]
    return offered, [*(pattern for pattern in weights.rename if not hits[pattern]), *unmatched]


def _match_without_wrappers(stored: Iterable[str], weights: Weights, known: set[str]) -> dict[str, str]:
    """Return the model's name of each stored name that differs only by the name of a wrapper."""
    by_plain = {plain: name for name, plain in unwrap_names(known).items()}
    names = {name: by_plain.get(plain, name) for name, plain in unwrap_names(stored).items()}
    changed = {name: each for name, each in names.items() if each != name}
    if weights.rename or not changed or changed.keys() & known:
        return {}
    example = next(iter(changed.items()))
    _log.info("%s: names of wrappers (DDP, torch.compile) differ, such as %s -> %s", weights.path, *example)
    return changed


def _matches_any(patterns: Iterable[str], name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _describe_mismatches(
    checkpoint: Checkpoint, tensors: Tensors, sources: dict[str, list[str]], *, cast: bool
) -> Iterator[str]:
    """Describe tensors that cannot be copied: different shapes or dtypes, or different values for tied tensors."""
    for name, found in sources.items():
        tensor = tensors[name]
        for source in found:
            dtype, shape = checkpoint.get_spec("model", source)
            casts = cast or source in checkpoint.averages  # averages may have another dtype
            castable = casts and dtype.is_floating_point and tensor.is_floating_point() and not tensor.is_meta
            if shape != tensor.shape or not (dtype == tensor.dtype or castable):
                yield f"{name}: {tuple(shape)} {dtype} saved, {tuple(tensor.shape)} {tensor.dtype} in the model"
                break
        else:
            for source in found[1:]:
                one, other = (checkpoint.read_shard("model", each, tensor) for each in (found[0], source))
                if not torch.equal(one, other):
                    yield f"{name}: the model ties {found[0]} and {source}, which differ in the checkpoint"


def _differ_only_in_dtype(checkpoint: Checkpoint, tensors: Tensors, sources: dict[str, list[str]]) -> bool:
    pairs = [
        (checkpoint.get_spec("model", source), tensors[name]) for name, found in sources.items() for source in found
    ]
    same_shapes = all(shape == tensor.shape for (_, shape), tensor in pairs)
    return same_shapes and any(dtype != tensor.dtype for (dtype, _), tensor in pairs)


def _format_advice(missing: list[str], unexpected: list[str], wrong: list[str], *, cast: bool) -> str:
    if not cast:
        lenient = ", or load with strict=False to skip names that differ." if not wrong else "."
        return f"Build the model with the checkpoint's hyperparameters{lenient}"
    advice = "Map names of the weights to names of the model with `rename`, and skip names with `ignore`."
    return _suggest_rename(missing, unexpected) + advice


def _suggest_rename(missing: list[str], unexpected: list[str]) -> str:
    """Suggest the `rename` that matches most names, if the names differ by a prefix."""
    tails = {tail: name for name in unexpected for tail in _iterate_suffixes(name)}
    beginnings = Counter[tuple[str, str]]()
    for name in missing:
        if tail := next((tail for tail in _iterate_suffixes(name) if tail in tails), None):
            beginnings[tails[tail].removesuffix(tail), name.removesuffix(tail)] += 1
    if not beginnings:
        return ""
    (old, new), count = beginnings.most_common(1)[0]
    return f"rename={json.dumps({'^' + re.escape(old): new})} would match {count} names. "


def _iterate_suffixes(name: str) -> Iterator[str]:
    """Yield `a.b.c`, `b.c` and `c` for `a.b.c`."""
    words = name.split(".")
    return (".".join(words[start:]) for start in range(len(words)))


def _format_some_names(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


# ---------------------------------------------------------------------- tasks and data modules from a checkpoint


def build_from_checkpoint(
    kind: type[Owner],
    path: str | PurePath,
    overrides: Mapping[str, Any],
    *,
    strict: bool | None = None,
    average: str | Sequence[str | PurePath] | None = None,
) -> Owner:
    """Build a task or a data module from a checkpoint's hyperparameters, and load its parameters and state.

    Args:
        kind: The class of the object to build.
        path: A checkpoint or a run, or the URL of one.
        overrides: Constructor arguments that replace saved ones.
        strict: Refuse missing and unexpected names of parameters. Default: `strict_loading` of the task.
        average: The weights to load into a task, as in `TaskModule.load_from_checkpoint`.
    """
    checkpoint = find_checkpoint_at(as_path_or_url(path))
    if issubclass(kind, DataModule):
        built = _build_object(kind, checkpoint, "data_hyperparameters", overrides)
        built.load_state_dict(decode(checkpoint.state["datamodule"], checkpoint.as_mapping("extra")))
        return built
    checkpoint = average_checkpoint(checkpoint, average)
    task = _build_object(kind, checkpoint, "hyperparameters", overrides)
    task._call_configure_model()
    convert_as_saved(task, checkpoint.state["precision"])
    load_model(task, checkpoint, strict=task.strict_loading if strict is None else strict)
    load_task_states(task, checkpoint, get_extra_tensors(task, checkpoint))
    task._mark_filled()
    return task


def load_task_states(task: TaskModule, checkpoint: Checkpoint, extra: Mapping[str, torch.Tensor]) -> None:
    """Call `set_extra_state` of modules, and the task's `on_load_checkpoint`."""
    states = decode(checkpoint.state["extra_state"], extra)
    for name, module in task.named_modules():
        if name in states and type(module).set_extra_state is not nn.Module.set_extra_state:
            module.set_extra_state(states[name])
    task.on_load_checkpoint(HookAdditions(type(task).__name__, decode(checkpoint.state["task"], extra)))


def _build_object(kind: type[Owner], checkpoint: Checkpoint, entry: str, overrides: Mapping[str, Any]) -> Owner:
    """Build an object of a class from the hyperparameters of a checkpoint."""
    saved = decode(checkpoint.state[entry], checkpoint.as_mapping("extra"))
    for name in checkpoint.state.get("omegaconf", {}).get(entry, ()):
        if not has_reference(saved[name]):  # a third-party checkpoint must not read environment variables
            saved[name] = make_omegaconf(saved[name])
    hyperparameters = _choose_arguments(kind, saved, overrides)
    kept = {name: value for name, value in hyperparameters.items() if name not in overrides}
    for name, value in kept.items():  # a third-party checkpoint must not read environment variables
        if (placeholder := find_secret_placeholder(value)) is not None:
            raise CheckpointMismatch(
                f"{checkpoint.path} holds {placeholder} in place of the hyperparameter {name}, which may be a secret. "
                f"Pass the value: load_from_checkpoint(PATH, {name}=...)."
            )
    if absent := [name for name, value in kept.items() if lacks_object(value)]:
        arguments = ", ".join(f"{name}=..." for name in absent)
        raise CheckpointMismatch(
            f"{checkpoint.path} lacks the hyperparameters {', '.join(absent)}: objects that are not plain data. Pass "
            f"them: {kind.__name__}.load_from_checkpoint(PATH, {arguments})."
        )
    try:
        return kind(**hyperparameters)
    except TypeError as error:
        raise CheckpointMismatch(
            f"{kind.__name__} cannot be built from the hyperparameters of {checkpoint.path} "
            f"({', '.join(hyperparameters) or 'none saved'}): {error}. Call save_hyperparameters() in its __init__, or "
            "pass the missing arguments to load_from_checkpoint."
        ) from error


def _choose_arguments(kind: type[Any], saved: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return constructor arguments from saved hyperparameters and overrides.

    Hyperparameters that only a base class accepts are dropped, because the class itself passes them to its base. If the
    class has saved the entries of its only required argument, as `save_hyperparameters(config)` does, the argument
    gets all of them.
    """
    parameters = inspect.signature(kind).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return {**saved, **overrides}
    accepted = {name: each for name, each in parameters.items() if each.kind is not each.VAR_POSITIONAL}
    required = [name for name, each in accepted.items() if each.default is each.empty and name not in overrides]
    if len(required) == 1 and saved and not saved.keys() & accepted.keys():
        entries: Any = Hyperparameters({name: overrides.get(name, value) for name, value in saved.items()})
        if any(map(is_omegaconf, saved.values())):
            entries = make_omegaconf(dict(entries))
        return {required[0]: entries, **{name: value for name, value in overrides.items() if name not in saved}}
    constructors = [vars(base)["__init__"] for base in kind.__mro__[1:] if "__init__" in vars(base)]
    by_bases = {name for each in constructors for name in inspect.signature(each).parameters}
    if unknown := saved.keys() - accepted.keys() - by_bases:
        _log.warning("ignoring hyperparameters that %s does not accept: %s", kind.__name__, ", ".join(sorted(unknown)))
    return {name: value for name, value in saved.items() if name in accepted} | dict(overrides)
