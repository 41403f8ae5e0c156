"""Checks of the data: loaders, first batches, labels, inputs, and samples shared by training and validation."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from lumen.console import size
from lumen.data.combined import loaders_in
from lumen.data.fingerprint import known_length
from lumen.run.run import Run
from lumen.task.hooks import overrides
from lumen.tools.check.show import Part, Report, leaves, rows_of
from lumen.tools.check.trial import LOOKED_INTO, Trial
from lumen.tools.terminal import counted, first_line

_SECTION = "data"
_FAR, _FLAT = 20.0, 1e-4


def look_at_data(report: Report, trial: Trial, run: Run) -> None:
    """Describe a batch of each loader, and report problems of the data."""
    witness = trial.witness
    training = loaders_in(run.loaders.sources.get("fit"))
    _describe(report, "training", training, witness.batch)
    _look_at_order(report, trial, training)
    _look_at_division(report, trial, training)
    validation = loaders_in(run.loaders.sources.get("validate"))
    for number, (name, loader) in enumerate(validation if run.loaders.evaluation else []):
        _describe(report, "validation", [(name, loader)], witness.validation.get(number))
    _look_at_validation(report, trial, run)
    _look_at_labels(report, trial)
    _look_at_inputs(report, trial)


def is_map_style(loader: Any) -> bool:
    """Return True if a loader is a `DataLoader` of a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _describe(report: Report, what: str, loaders: list[tuple[str, Any]], parts: list[Part] | None) -> None:
    words = "; ".join(f"{name}: {_in_words(loader)}" if name else _in_words(loader) for name, loader in loaders)
    if parts is None:
        report.add(_SECTION, "note", f"{what}.batch", f"{what}: {words or 'none'}; no batch of it was looked at")
        return
    size_bytes = sum(each.size_bytes for each in parts)
    text = f"{what}: {words}" + (f"; a batch takes {size(size_bytes)}" if size_bytes else "")
    report.add(_SECTION, "ok", f"{what}.batch", text, rows=rows_of(parts))
    report.facts.setdefault("batches", {})[what] = [vars(each) for each in parts]
    if bad := [each.path for each in parts if each.nan]:
        report.add(
            _SECTION, "suspicious", f"{what}.nan", f"{what}: NaN in {', '.join(bad)} of the first batch",
            "Look at where the data comes from; replace or leave out what is missing there.",
        )  # fmt: skip


def _in_words(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = known_length(loader.dataset)
    of = "a stream" if samples is None else f"{samples:,} samples"
    cut = "" if loader.batch_size is None else f" in batches of {loader.batch_size}"
    workers = f", {counted(loader.num_workers, 'worker')}" if loader.num_workers else ""
    return f"{of} of {type(loader.dataset).__name__}{cut}{workers}"


def _look_at_order(report: Report, trial: Trial, loaders: list[tuple[str, Any]]) -> None:
    for name, loader in [] if trial.plan.same_batches else loaders:
        in_order = is_map_style(loader) and type(loader.sampler) is SequentialSampler
        if in_order and (known_length(loader.dataset) or 0) > (loader.batch_size or 0) > 0:
            text = f"training{f' {name}' if name else ''} is not shuffled: its samples come in one order in every epoch"
            report.add(_SECTION, "suspicious", "training.order", text)


def _look_at_division(report: Report, trial: Trial, loaders: list[tuple[str, Any]]) -> None:
    size, batch_sizes = trial.plan.global_batch_size, {getattr(loader, "batch_size", None) for _, loader in loaders}
    if size is None or len(batch_sizes) != 1 or not (batch := batch_sizes.pop()):
        return
    micro, rest = -(-size // batch), size % batch
    report.facts["micro_batches_per_step"] = micro
    if rest:
        report.add(
            _SECTION, "suspicious", "global_batch_size.divides",
            f"global_batch_size {size} is no multiple of batch_size {batch}: the last of the {micro} micro-batches of "
            f"each step has {counted(rest, 'sample')}",
            f"Choose a batch_size that divides {size}.",
        )  # fmt: skip
    elif micro % trial.processes:
        report.add(
            _SECTION, "suspicious", "global_batch_size.processes",
            f"global_batch_size {size} makes {micro} micro-batches of {batch} for {trial.processes} processes: some "
            "have nothing to do in the last round of each step",
            f"Choose a batch_size that makes it a multiple of {trial.processes} micro-batches.",
        )  # fmt: skip


def _look_at_validation(report: Report, trial: Trial, run: Run) -> None:
    has_step, off = overrides(trial.task, "validation_step"), trial.plan.limits.get("validate") == 0
    has_loader = run.loaders.datamodule is not None and overrides(run.loaders.datamodule, "val_dataloader")
    if off or (has_step and run.loaders.evaluation):
        return
    if has_step:
        text = f"{type(trial.task).__name__} has a validation_step, but there is no validation data: it is never called"
        report.add(_SECTION, "suspicious", "validation.loader", text)
    elif has_loader:
        text = f"there is validation data, but {type(trial.task).__name__} has no validation_step: it is not used"
        report.add(_SECTION, "suspicious", "validation.step", text)


def _look_at_labels(report: Report, trial: Trial) -> None:
    seen = [each for each in trial.witness.seen if each.losses]
    everywhere = [loss for each in (*trial.witness.seen_in_validation, *seen) for loss in each.losses]
    if bad := next((loss for loss in everywhere if loss.is_out_of_range), None):
        text = (
            f"labels go from {bad.least} to {bad.most}, but the output has {bad.classes} classes: 0 to "
            f"{bad.classes - 1}"
        )
        report.add(_SECTION, "wrong", "labels.range", text)
    alone = [each.losses[0] for each in seen if len(each.losses) == 1 and each.losses[0].labels]
    labels: frozenset[int] = frozenset[int]().union(*(each.labels for each in alone))
    if len(alone) >= LOOKED_INTO and len(labels) == 1 and alone[0].classes > 1:
        text = f"all labels of the first {len(alone)} batches are {next(iter(labels))}, of {alone[0].classes} classes"
        report.add(_SECTION, "suspicious", "labels.constant", text)


def _look_at_inputs(report: Report, trial: Trial) -> None:
    firsts = [each.first for each in trial.witness.seen if each.first is not None]
    if not firsts:
        return
    first = firsts[0]
    report.facts["first_layer"] = first._asdict()
    if all(each.least == each.most == first.least for each in firsts) and len(firsts) >= LOOKED_INTO:
        text = f"the first layer, {first.name}, is given nothing but {first.least:.3g} in {len(firsts)} batches"
        report.add(_SECTION, "suspicious", "inputs.constant", text)
    elif abs(first.mean) > _FAR or first.std > _FAR or 0 < max(first.std, abs(first.mean)) < _FLAT:
        text = (
            f"the first layer, {first.name}, is given numbers from {first.least:.3g} to {first.most:.3g}, mean "
            f"{first.mean:.3g}, standard deviation {first.std:.3g}"
        )
        report.add(_SECTION, "suspicious", "inputs.scale", text)


_BUDGET_S = 3.0
_FEW = 0.01


def look_for_leaks(report: Report, run: Run, most: int) -> None:
    """Compare training samples with validation samples.

    Args:
        report: Report that receives the findings.
        run: An opened run, whose loaders are open.
        most: The most samples of each dataset to read.
    """
    if not run.loaders.evaluation:
        return
    pairs = [
        (training.dataset, validation.dataset)
        for _, training in loaders_in(run.loaders.sources.get("fit"))
        for _, validation in loaders_in(run.loaders.sources.get("validate"))
        if is_map_style(training) and is_map_style(validation)
    ]
    if not pairs:
        report.add("data", "note", "leak", "training and validation were not compared: their samples have no numbers")
    for training, validation in pairs:
        _compare(report, training, validation, most)


def _compare(report: Report, training: Any, validation: Any, most: int) -> None:
    (base, own), (other_base, others) = _within(training), _within(validation)
    if base is other_base and own & others:
        _tell(report, len(own & others), len(others), "by their numbers in the data set")
    elif base is other_base:
        report.add("data", "ok", "leak", f"none of {len(others):,} validation samples is one of the training")
    else:
        try:
            _compare_contents(report, training, validation, most)
        except Exception as error:  # User code may fail when it is read here.
            report.add("data", "note", "leak", f"training and validation could not be compared: {first_line(error)}")


def _within(dataset: Any) -> tuple[Any, set[int]]:
    """Return the dataset below nested `Subset`s, and the indices of the samples in it."""
    indices: Sequence[int] | None = None
    while isinstance(dataset, Subset):
        own = [int(each) for each in dataset.indices]
        indices = own if indices is None else [own[number] for number in indices]
        dataset = dataset.dataset
    return dataset, set(range(known_length(dataset) or 0) if indices is None else indices)


def _compare_contents(report: Report, training: Dataset[Any], validation: Dataset[Any], most: int) -> None:
    if _digest(training[0]) != _digest(training[0]):
        report.add(
            "data", "note", "leak",
            "training samples are drawn anew each time, so they were not compared with those of the validation",
        )  # fmt: skip
        return
    own, others = _digests(training, most), _digests(validation, most)
    if not own or not others:
        return
    known = set(own)
    shared = sum(each in known for each in others)
    total = known_length(training) or len(own)
    read = f"{counted(len(others), 'validation sample')} compared with {len(own):,} of {total:,} of the training"
    report.facts["leak"] = {"validation": len(others), "training": len(own), "shared": shared}
    if shared > _FEW * len(others) * len(own) / total:
        _tell(report, shared, len(others), f"by their content; {read}")
    elif shared:
        report.add("data", "note", "leak", f"{read}: {shared} equal, as duplicates may be")
    else:
        report.add("data", "ok", "leak", f"{read}: none equal")


def _tell(report: Report, count: int, of: int, how: str) -> None:
    report.add("data", "suspicious", "leak", f"{count:,} of {of:,} validation samples are in the training too ({how})")


def _digests(dataset: Any, most: int) -> list[bytes]:
    """Return digests of random samples of a dataset, as many as `_BUDGET_S` seconds allow."""
    end_s, order = time.perf_counter() + _BUDGET_S, np.random.default_rng(0).permutation(known_length(dataset) or 0)
    numbers = takewhile(lambda _: time.perf_counter() <= end_s, order[:most].tolist())
    return [_digest(dataset[number]) for number in numbers]


def _digest(sample: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(sample):
        digest.update(f"{path}{getattr(leaf, 'dtype', '')}".encode())
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return digest.digest()
