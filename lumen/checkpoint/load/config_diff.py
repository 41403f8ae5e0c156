"""Comparison of a resumed run with its checkpoint; warns of differences, or refuses them, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lumen.checkpoint.format.codec import Tensors, decode, encode, name_objects
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.weights_source import Part, format_parts_without
from lumen.checkpoint.settings import STEP_SIZE_KEYS, Setting, get_data_fingerprints, get_trainer_settings
from lumen.console import logger as _log
from lumen.errors import DataError
from lumen.run.run import Run
from lumen.task.hyperparameters import get_recorded_hparams

_ABSENT = object()


def find_changed_settings(old: Mapping[str, Setting], new: Mapping[str, Setting]) -> dict[str, tuple[Setting, Setting]]:
    """Return settings that both dictionaries have with different values: (old, new) by path."""
    return {where: (old[where], new[where]) for where in new if where in old and old[where] != new[where]}


def find_changed_hyperparameters(run: Run, checkpoint: Checkpoint) -> dict[str, tuple[Any, Any]]:
    """Return hyperparameters of the task and the data module that differ from a checkpoint's.

    Args:
        run: The run, with its task and data module.
        checkpoint: The checkpoint that the run resumes from.

    Returns:
        The checkpoint's value and the run's value by name: `model.lr`, `data.batch_size`; None for a missing name.
    """
    owners = {"model": ("hyperparameters", run.task), "data": ("data_hyperparameters", run.loaders.datamodule)}
    changed: dict[str, tuple[Any, Any]] = {}
    for prefix, (entry, owner) in owners.items():
        old = decode(checkpoint.state[entry], checkpoint.as_mapping("extra"))
        new = {} if owner is None else name_objects(get_recorded_hparams(owner))
        for name in dict.fromkeys([*old, *new]):
            values = old.get(name, _ABSENT), new.get(name, _ABSENT)
            if _as_comparable(values[0]) != _as_comparable(values[1]):
                changed[f"{prefix}.{name}"] = old.get(name), new.get(name)
    return changed


def _as_comparable(value: Any) -> Any:
    """Return plain data in a form that is equal if its saved JSON is equal; also for NaN, tensors and arrays."""
    if value is _ABSENT:
        return value
    return encode(value, tensors := Tensors(), ""), [(tensor.dtype, tensor.tolist()) for tensor in tensors.values()]


_SETTINGS_WITHIN_STEP = {"processes", "accumulate_grad_batches"}  # may change although steps keep their size


def warn_of_differences(run: Run, checkpoint: Checkpoint, parts: frozenset[Part]) -> None:
    """Warn of settings and data that differ from the checkpoint's, once the loaders are known.

    Collective: every rank must call this.

    Raises:
        DataError: The run would resume in the middle of an epoch of different data.
    """
    if "progress" in parts:
        run.processes.run_on_all(partial(_warn_of_data, run, checkpoint, exact="data" in parts))
        _warn_of_settings(run, checkpoint)


def format_changes(changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Describe the saved and the current value of each changed setting."""
    shown = [f"{name} was {_shorten_value(old)}, is {_shorten_value(new)}" for name, (old, new) in changed.items()]
    return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")


def _shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _warn_of_settings(run: Run, checkpoint: Checkpoint) -> None:
    saved, current = checkpoint.state["settings"], get_trainer_settings(run)
    pairs = {name: (saved.get(name), current.get(name)) for name in saved | current if name != "strategy"}
    changed = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    if not any(name in changed for name in STEP_SIZE_KEYS):  # the steps have the same size
        _log_equivalent_settings(checkpoint, saved, current)
        changed = {name: values for name, values in changed.items() if name not in _SETTINGS_WITHIN_STEP}
    if changed:
        advice = (
            " Set global_batch_size: then the number of processes does not matter." if "processes" in changed else ""
        )
        _log.warning(
            "settings differ from %s: %s. The new settings apply from now on.%s",
            checkpoint.path, format_changes(changed), advice,
        )  # fmt: skip


def _log_equivalent_settings(checkpoint: Checkpoint, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Log the changed settings of a run whose steps are still of the same size."""
    names = ("processes", "strategy", "batch_size", "precision")
    values = {name: (saved.get(name), current.get(name)) for name in names}
    values["micro-batches of a step on each process"] = _count_micro_batches(saved), _count_micro_batches(current)
    changed = [f"{name}: was {old}, is {new}" for name, (old, new) in values.items() if None not in (old, new)
               and old != new]  # fmt: skip
    if changed:
        _log.info("steps are the same as in %s, with different settings: %s", checkpoint.path.name, "; ".join(changed))


def _count_micro_batches(settings: Mapping[str, Any]) -> int | None:
    """Return the maximum number of micro-batches per process and step; None if the steps have no known fixed size."""
    size, batch, processes = (settings.get(name) for name in ("global_batch_size", "batch_size", "processes"))
    batches = -(-size // batch) if isinstance(size, int) and isinstance(batch, int) else settings.get(STEP_SIZE_KEYS[1])
    return -(-batches // processes) if isinstance(batches, int) and isinstance(processes, int) else None


def _warn_of_data(run: Run, checkpoint: Checkpoint, *, exact: bool) -> None:
    saved, current = checkpoint.state["data"], get_data_fingerprints(run)
    if saved["asked_in"] != current["asked_in"]:  # the loaders were opened for different epochs
        return
    training, validation = (_describe_first_difference(saved[key], current[key]) for key in ("training", "validation"))
    if training and exact and run.progress.batches:
        raise DataError(
            f"this run would resume in the middle of an epoch, but its training data differ from {checkpoint.path}: "
            f"{training}. Use the same data (for random_split: the same seed of the generator). To train on different "
            f"data, {format_parts_without(checkpoint, 'data')}, which starts a new epoch."
        )
    for kind, found in {"training": training, "validation": validation}.items():
        if found:
            _log.warning(
                "the %s data differ from %s: %s. Samples may have moved between training and validation, so values "
                "before and after cannot be compared. Unless you intend this, use the same data (for random_split: the "
                "same seed of the generator).",
                kind, checkpoint.path, found,
            )  # fmt: skip


def _describe_first_difference(saved: Sequence[str | None], current: Sequence[str | None]) -> str:
    """Describe the first fingerprint that differs; "" if there is no difference, or the numbers of loaders differ."""
    pairs = zip(saved, current, strict=True) if len(saved) == len(current) else ()
    return next((f"was {old}, is {new}" for old, new in pairs if None not in (old, new) and old != new), "")


def log_mode_differences(run: Run, checkpoint: Checkpoint) -> None:
    """Log parameters and modules whose frozen state or mode at construction differs from the checkpoint's run.

    The modes of the checkpoint take precedence. Call this before the modes are restored. A change by a callback since
    the start of the run cannot be distinguished from a change of code.
    """
    words = {"frozen": ("trainable", "frozen"), "evaluating": ("in train mode", "in eval mode")}
    changed: dict[str, tuple[str, str]] = {}
    for kind, word in words.items():
        began, current, saved = (
            set(modes[kind]) for modes in (checkpoint.state["built"], run.optim.built, checkpoint.state["modes"])
        )
        for name in sorted((began ^ current) & (current ^ saved)):
            changed[name or type(run.task).__name__] = word[name in saved], word[name in current]
    if changed:
        _log.warning(
            "the task differs from the task at the start of the run of %s: %s. The checkpoint's values apply, so that "
            "the run resumes exactly. To use the task's values, %s",
            checkpoint.path, format_changes(changed), format_parts_without(checkpoint, "progress", "data"),
        )  # fmt: skip
    run.optim.record_saved_modes(checkpoint.state["built"])
