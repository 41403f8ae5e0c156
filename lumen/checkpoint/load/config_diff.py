"""Comparison of a resumed run with its checkpoint; warns of differences, or refuses them, before training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lumen.checkpoint.format.codec import Tensors, decode, encode
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.weights_source import Part, format_parts_without
from lumen.checkpoint.settings import STEP_SIZE_KEYS, Setting, get_data_fingerprints, get_trainer_settings
from lumen.console import logger as _log
from lumen.errors import CheckpointError, DataError
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
        new = {} if owner is None else get_recorded_hparams(owner)
        for name in dict.fromkeys([*old, *new]):
            values = old.get(name, _ABSENT), new.get(name, _ABSENT)
            if _as_comparable(values[0]) != _as_comparable(values[1]):
                changed[f"{prefix}.{name}"] = old.get(name), new.get(name)
    return changed


def _as_comparable(value: Any) -> Any:
    """Return plain data in a form that is equal if its saved JSON is equal; also for NaN, tensors and arrays."""
    try:
        return encode(value, tensors := Tensors(), ""), [(tensor.dtype, tensor.tolist()) for tensor in tensors.values()]
    except CheckpointError:  # a value that cannot be saved
        return value


_STEP_MEANS = {"processes", "accumulate_grad_batches"}  # settings that may change without a change of the step size


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
    shown = [f"{name} {_shorten_value(old)} there, {_shorten_value(new)} here" for name, (old, new) in changed.items()]
    return "; ".join(shown[:8]) + (f"; and {len(shown) - 8} more" if len(shown) > 8 else "")


def _shorten_value(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _warn_of_settings(run: Run, checkpoint: Checkpoint) -> None:
    saved, here = checkpoint.state["settings"], get_trainer_settings(run)
    pairs = {name: (saved.get(name), here.get(name)) for name in dict.fromkeys([*saved, *here]) if name != "strategy"}
    changed = {name: (old, new) for name, (old, new) in pairs.items() if old != new}
    if not any(name in changed for name in STEP_SIZE_KEYS):  # the steps have the same size
        _log_step_means(checkpoint, saved, here)
        changed = {name: values for name, values in changed.items() if name not in _STEP_MEANS}
    if changed:
        advice = " global_batch_size makes a step one size whatever the processes." if "processes" in changed else ""
        _log.warning(
            "settings are not those of %s: %s. Those here count from now on.%s",
            checkpoint.path, format_changes(changed), advice,
        )  # fmt: skip


def _log_step_means(checkpoint: Checkpoint, saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Log the changed settings of a run whose steps are still of the same size."""
    names = ("processes", "strategy", "batch_size", "precision")
    values = {name: (saved.get(name), here.get(name)) for name in names}
    values["micro-batches of a step on each process"] = _count_micro_batches(saved), _count_micro_batches(here)
    changed = [f"{name}: {old} there, {new} here" for name, (old, new) in values.items() if None not in (old, new)
               and old != new]  # fmt: skip
    if changed:
        _log.info("the same steps as %s by other means: %s", checkpoint.path.name, "; ".join(changed))


def _count_micro_batches(settings: Mapping[str, Any]) -> int | None:
    """Return the maximum number of micro-batches per process and step; None if the steps have no known fixed size."""
    size, batch, processes = (settings.get(name) for name in ("global_batch_size", "batch_size", "processes"))
    batches = -(-size // batch) if isinstance(size, int) and isinstance(batch, int) else settings.get(STEP_SIZE_KEYS[1])
    return -(-batches // processes) if isinstance(batches, int) and isinstance(processes, int) else None


def _warn_of_data(run: Run, checkpoint: Checkpoint, *, exact: bool) -> None:
    saved, here = checkpoint.state["data"], get_data_fingerprints(run)
    if saved["asked_in"] != here["asked_in"]:  # the loaders were opened for different epochs
        return
    training, validation = (_describe_first_difference(saved[of], here[of]) for of in ("training", "validation"))
    if training and exact and run.progress.batches:
        raise DataError(
            f"this run goes on in the middle of an epoch of other training data than {checkpoint.path} had: "
            f"{training}. Give it the data it had (random_split the seed of its generator). To train on other data, "
            f"{format_parts_without(checkpoint, 'data')}: its epoch begins anew."
        )
    for what, found in {"training": training, "validation": validation}.items():
        if found:
            _log.warning(
                "the %s data is not what %s had: %s. What was held out may have been trained on already, and the "
                "reverse; values before and after cannot be compared. If that is not meant, give it the data it had "
                "(random_split the seed of its generator).",
                what, checkpoint.path, found,
            )  # fmt: skip


def _describe_first_difference(saved: Sequence[str | None], here: Sequence[str | None]) -> str:
    """Describe the first fingerprint that differs; "" if there is no difference, or the numbers of loaders differ."""
    pairs = zip(saved, here, strict=True) if len(saved) == len(here) else ()
    return next((f"{old} there, {new} here" for old, new in pairs if None not in (old, new) and old != new), "")


def log_mode_differences(run: Run, checkpoint: Checkpoint) -> None:
    """Log parameters and modules whose frozen state or mode at construction differs from the checkpoint's run.

    The modes of the checkpoint take precedence. Call this before the modes are restored. A change by a callback since
    the start of the run cannot be distinguished from a change of code.
    """
    words = {"frozen": ("trainable", "frozen"), "evaluating": ("in train mode", "in eval mode")}
    changed: dict[str, tuple[str, str]] = {}
    for kind, word in words.items():
        began, here, goes_on = (
            set(of[kind]) for of in (checkpoint.state["built"], run.optim.built, checkpoint.state["modes"])
        )
        for name in sorted((began ^ here) & (here ^ goes_on)):
            changed[name or type(run.task).__name__] = word[name in goes_on], word[name in here]
    if changed:
        _log.warning(
            "the task is built otherwise than when the run of %s began: %s. The checkpoint's counts, so that it goes "
            "on exactly. For the task's own, %s",
            checkpoint.path, format_changes(changed), format_parts_without(checkpoint, "progress", "data"),
        )  # fmt: skip
    run.optim.record_saved_modes(checkpoint.state["built"])
