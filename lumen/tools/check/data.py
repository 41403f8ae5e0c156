"""Checks of the data: loaders, first batches, labels, inputs, and samples shared by training and validation."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, SequentialSampler, Subset

from lumen.console import format_bytes
from lumen.data.combined import list_loaders
from lumen.data.fingerprint import get_length
from lumen.run.run import Run
from lumen.task.hooks import is_overridden
from lumen.tools.check.report import BatchLeaf, CheckReport, format_rows, iterate_leaves
from lumen.tools.check.trial import MAX_PROBED_BATCHES, CheckTrial
from lumen.tools.terminal import format_count, get_first_line

_SECTION = "data"
_FAR_FROM_ZERO, _FLAT_STD = 20.0, 1e-4


def check_data(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    """Describe a batch of each loader, and report problems of the data."""
    observer = trial.observer
    training = list_loaders(run.loaders.sources.get("fit"))
    _describe_batch(report, "training", training, observer.batch)
    _check_order(report, trial, training)
    _check_division(report, trial, training)
    validation = list_loaders(run.loaders.sources.get("validate"))
    for number, (name, loader) in enumerate(validation if run.loaders.evaluation else []):
        _describe_batch(report, "validation", [(name, loader)], observer.validation.get(number))
    _check_validation(report, trial, run)
    _check_labels(report, trial)
    _check_inputs(report, trial)


def is_map_style(loader: Any) -> bool:
    """Return True if a loader is a `DataLoader` of a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _describe_batch(
    report: CheckReport, role: str, loaders: list[tuple[str, Any]], parts: list[BatchLeaf] | None
) -> None:
    words = "; ".join(
        f"{name}: {_describe_loader(loader)}" if name else _describe_loader(loader) for name, loader in loaders
    )
    if parts is None:
        report.add(_SECTION, "note", f"{role}.batch", f"{role}: {words or 'none'}; no batch was checked")
        return
    size_bytes = sum(each.size_bytes for each in parts)
    text = f"{role}: {words}" + (f"; a batch takes {format_bytes(size_bytes)}" if size_bytes else "")
    report.add(_SECTION, "ok", f"{role}.batch", text, rows=format_rows(parts))
    report.facts.setdefault("batches", {})[role] = [vars(each) for each in parts]
    if bad := [each.path for each in parts if each.nan]:
        report.add(
            _SECTION, "suspicious", f"{role}.nan", f"{role}: NaN in {', '.join(bad)} of the first batch",
            "Check the source of the data, and replace or drop missing values.",
        )  # fmt: skip


def _describe_loader(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = get_length(loader.dataset)
    size = "a stream" if samples is None else f"{samples:,} samples"
    batches = "" if loader.batch_size is None else f" in batches of {loader.batch_size}"
    workers = f", {format_count(loader.num_workers, 'worker')}" if loader.num_workers else ""
    return f"{size} of {type(loader.dataset).__name__}{batches}{workers}"


def _check_order(report: CheckReport, trial: CheckTrial, loaders: list[tuple[str, Any]]) -> None:
    for name, loader in [] if trial.plan.same_batches else loaders:
        in_order = is_map_style(loader) and type(loader.sampler) is SequentialSampler
        if in_order and (get_length(loader.dataset) or 0) > (loader.batch_size or 0) > 0:
            text = (
                f"training{f' {name}' if name else ''} is not shuffled: every epoch has its samples in the same order"
            )
            report.add(_SECTION, "suspicious", "training.order", text)


def _check_division(report: CheckReport, trial: CheckTrial, loaders: list[tuple[str, Any]]) -> None:
    size, batch_sizes = trial.plan.global_batch_size, {getattr(loader, "batch_size", None) for _, loader in loaders}
    if size is None or len(batch_sizes) != 1 or not (batch := batch_sizes.pop()):
        return
    micro, rest = -(-size // batch), size % batch
    report.facts["micro_batches_per_step"] = micro
    if rest:
        report.add(
            _SECTION, "suspicious", "global_batch_size.divides",
            f"global_batch_size {size} is not a multiple of batch_size {batch}: the last of the {micro} micro-batches "
            f"of each step has {format_count(rest, 'sample')}",
            f"Choose a batch_size that divides {size}.",
        )  # fmt: skip
    elif micro % trial.processes:
        report.add(
            _SECTION, "suspicious", "global_batch_size.processes",
            f"global_batch_size {size} makes {micro} micro-batches of {batch} for {trial.processes} processes: some "
            "processes are idle at the end of each step",
            f"Choose a batch_size that gives a multiple of {trial.processes} micro-batches.",
        )  # fmt: skip


def _check_validation(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    has_step, off = is_overridden(trial.task, "validation_step"), trial.plan.limits.get("validate") == 0
    has_loader = run.loaders.datamodule is not None and is_overridden(run.loaders.datamodule, "val_dataloader")
    if off or (has_step and run.loaders.evaluation):
        return
    if has_step:
        text = f"{type(trial.task).__name__} has a validation_step, but no validation data: the method is never called"
        report.add(_SECTION, "suspicious", "validation.loader", text)
    elif has_loader:
        text = f"there is validation data, but {type(trial.task).__name__} has no validation_step: the data is not used"
        report.add(_SECTION, "suspicious", "validation.step", text)


def _check_labels(report: CheckReport, trial: CheckTrial) -> None:
    forwards = [each for each in trial.observer.forwards if each.losses]
    losses = [loss for each in (*trial.observer.validation_forwards, *forwards) for loss in each.losses]
    if bad := next((loss for loss in losses if loss.is_out_of_range), None):
        text = (
            f"labels range from {bad.least} to {bad.most}, but the output has {bad.classes} classes: 0 to "
            f"{bad.classes - 1}"
        )
        report.add(_SECTION, "wrong", "labels.range", text)
    single = [each.losses[0] for each in forwards if len(each.losses) == 1 and each.losses[0].labels]
    labels: frozenset[int] = frozenset[int]().union(*(each.labels for each in single))
    if len(single) >= MAX_PROBED_BATCHES and len(labels) == 1 and single[0].classes > 1:
        text = f"all labels of the first {len(single)} batches are {next(iter(labels))}, of {single[0].classes} classes"
        report.add(_SECTION, "suspicious", "labels.constant", text)


def _check_inputs(report: CheckReport, trial: CheckTrial) -> None:
    inputs = [each.first for each in trial.observer.forwards if each.first is not None]
    if not inputs:
        return
    first = inputs[0]
    report.facts["first_layer"] = first._asdict()
    if all(each.least == each.most == first.least for each in inputs) and len(inputs) >= MAX_PROBED_BATCHES:
        text = f"the first layer, {first.name}, receives only the value {first.least:.3g} in {len(inputs)} batches"
        report.add(_SECTION, "suspicious", "inputs.constant", text)
    elif (
        abs(first.mean) > _FAR_FROM_ZERO
        or first.std > _FAR_FROM_ZERO
        or 0 < max(first.std, abs(first.mean)) < _FLAT_STD
    ):
        text = (
            f"the first layer, {first.name}, receives values from {first.least:.3g} to {first.most:.3g}, mean "
            f"{first.mean:.3g}, standard deviation {first.std:.3g}"
        )
        report.add(_SECTION, "suspicious", "inputs.scale", text)


_BUDGET_S = 3.0
_MIN_SHARED_FRACTION = 0.01


def check_leaks(report: CheckReport, run: Run, max_samples: int) -> None:
    """Compare training samples with validation samples.

    Args:
        report: Report that receives the findings.
        run: An opened run, whose loaders are open.
        max_samples: Largest number of samples to read from each dataset.
    """
    if not run.loaders.evaluation:
        return
    pairs = [
        (training.dataset, validation.dataset)
        for _, training in list_loaders(run.loaders.sources.get("fit"))
        for _, validation in list_loaders(run.loaders.sources.get("validate"))
        if is_map_style(training) and is_map_style(validation)
    ]
    if not pairs:
        report.add("data", "note", "leak", "training and validation were not compared: samples without index")
    for training, validation in pairs:
        _compare_datasets(report, training, validation, max_samples)


def _compare_datasets(report: CheckReport, training: Any, validation: Any, max_samples: int) -> None:
    (base, train_indices), (val_base, val_indices) = _unwrap_subset(training), _unwrap_subset(validation)
    if base is val_base and (shared := _count_shared(train_indices, val_indices)):
        _report_overlap(report, shared, len(val_indices), "by their index in the dataset")
    elif base is val_base:
        report.add("data", "ok", "leak", f"none of {len(val_indices):,} validation samples is a training sample")
    else:
        try:
            _compare_contents(report, training, validation, max_samples)
        except Exception as error:  # User code may fail when it is read here.
            report.add(
                "data", "note", "leak", f"training and validation could not be compared: {get_first_line(error)}"
            )


def _unwrap_subset(dataset: Any) -> tuple[Any, Sequence[int]]:
    """Return the dataset below nested `Subset`s, and the indices of the samples in it."""
    indices: Sequence[int] | None = None
    while isinstance(dataset, Subset):
        outer = [int(each) for each in dataset.indices]
        indices = outer if indices is None else [outer[number] for number in indices]
        dataset = dataset.dataset
    return dataset, range(get_length(dataset) or 0) if indices is None else indices


def _count_shared(indices: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of indices that occur in both, without a copy of a whole dataset's range."""
    if isinstance(indices, range) and isinstance(others, range):
        return min(len(indices), len(others))
    if isinstance(others, range):
        indices, others = others, indices
    known: Collection[int] = indices if isinstance(indices, range) else {*indices}
    return sum(each in known for each in {*others})


def _compare_contents(report: CheckReport, training: Dataset[Any], validation: Dataset[Any], max_samples: int) -> None:
    if _digest_sample(training[0]) != _digest_sample(training[0]):
        report.add(
            "data", "note", "leak",
            "training samples change at each read, so training and validation were not compared",
        )  # fmt: skip
        return
    trained, validated = _digest_samples(training, max_samples), _digest_samples(validation, max_samples)
    if not trained or not validated:
        return
    known = set(trained)
    shared = sum(each in known for each in validated)
    total, count = get_length(training) or len(trained), format_count(len(validated), "validation sample")
    read = f"{count} compared with {len(trained):,} of {total:,} training samples"
    report.facts["leak"] = {"validation": len(validated), "training": len(trained), "shared": shared}
    if shared > _MIN_SHARED_FRACTION * len(validated) * len(trained) / total:
        _report_overlap(report, shared, len(validated), f"by their content; {read}")
    elif shared:
        report.add("data", "note", "leak", f"{read}: {shared} equal, maybe duplicates")
    else:
        report.add("data", "ok", "leak", f"{read}: none equal")


def _report_overlap(report: CheckReport, count: int, total: int, method: str) -> None:
    text = f"{count:,} of {total:,} validation samples are also training samples ({method})"
    report.add("data", "suspicious", "leak", text)


def _digest_samples(dataset: Any, max_samples: int) -> list[bytes]:
    """Return digests of random samples of a dataset, as many as `_BUDGET_S` seconds allow."""
    end_s, length = time.perf_counter() + _BUDGET_S, get_length(dataset) or 0
    drawn = random.Random(0).sample(range(length), min(max_samples, length))
    numbers = takewhile(lambda _: time.perf_counter() <= end_s, drawn)
    return [_digest_sample(dataset[number]) for number in numbers]


def _digest_sample(sample: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for path, leaf in iterate_leaves(sample):
        digest.update(f"{path}{getattr(leaf, 'dtype', '')}".encode())
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return digest.digest()
