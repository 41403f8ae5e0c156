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
    witness = trial.observer
    training = list_loaders(run.loaders.sources.get("fit"))
    _describe_batch(report, "training", training, witness.batch)
    _check_order(report, trial, training)
    _check_division(report, trial, training)
    validation = list_loaders(run.loaders.sources.get("validate"))
    for number, (name, loader) in enumerate(validation if run.loaders.evaluation else []):
        _describe_batch(report, "validation", [(name, loader)], witness.validation.get(number))
    _check_validation(report, trial, run)
    _check_labels(report, trial)
    _check_inputs(report, trial)


def is_map_style(loader: Any) -> bool:
    """Return True if a loader is a `DataLoader` of a map-style dataset."""
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _describe_batch(
    report: CheckReport, what: str, loaders: list[tuple[str, Any]], parts: list[BatchLeaf] | None
) -> None:
    words = "; ".join(
        f"{name}: {_describe_loader(loader)}" if name else _describe_loader(loader) for name, loader in loaders
    )
    if parts is None:
        report.add(_SECTION, "note", f"{what}.batch", f"{what}: {words or 'none'}; no batch of it was looked at")
        return
    size_bytes = sum(each.size_bytes for each in parts)
    text = f"{what}: {words}" + (f"; a batch takes {format_bytes(size_bytes)}" if size_bytes else "")
    report.add(_SECTION, "ok", f"{what}.batch", text, rows=format_rows(parts))
    report.facts.setdefault("batches", {})[what] = [vars(each) for each in parts]
    if bad := [each.path for each in parts if each.nan]:
        report.add(
            _SECTION, "suspicious", f"{what}.nan", f"{what}: NaN in {', '.join(bad)} of the first batch",
            "Look at where the data comes from; replace or leave out what is missing there.",
        )  # fmt: skip


def _describe_loader(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    samples = get_length(loader.dataset)
    of = "a stream" if samples is None else f"{samples:,} samples"
    cut = "" if loader.batch_size is None else f" in batches of {loader.batch_size}"
    workers = f", {format_count(loader.num_workers, 'worker')}" if loader.num_workers else ""
    return f"{of} of {type(loader.dataset).__name__}{cut}{workers}"


def _check_order(report: CheckReport, trial: CheckTrial, loaders: list[tuple[str, Any]]) -> None:
    for name, loader in [] if trial.plan.same_batches else loaders:
        in_order = is_map_style(loader) and type(loader.sampler) is SequentialSampler
        if in_order and (get_length(loader.dataset) or 0) > (loader.batch_size or 0) > 0:
            text = f"training{f' {name}' if name else ''} is not shuffled: its samples come in one order in every epoch"
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
            f"global_batch_size {size} is no multiple of batch_size {batch}: the last of the {micro} micro-batches of "
            f"each step has {format_count(rest, 'sample')}",
            f"Choose a batch_size that divides {size}.",
        )  # fmt: skip
    elif micro % trial.processes:
        report.add(
            _SECTION, "suspicious", "global_batch_size.processes",
            f"global_batch_size {size} makes {micro} micro-batches of {batch} for {trial.processes} processes: some "
            "have nothing to do in the last round of each step",
            f"Choose a batch_size that makes it a multiple of {trial.processes} micro-batches.",
        )  # fmt: skip


def _check_validation(report: CheckReport, trial: CheckTrial, run: Run) -> None:
    has_step, off = is_overridden(trial.task, "validation_step"), trial.plan.limits.get("validate") == 0
    has_loader = run.loaders.datamodule is not None and is_overridden(run.loaders.datamodule, "val_dataloader")
    if off or (has_step and run.loaders.evaluation):
        return
    if has_step:
        text = f"{type(trial.task).__name__} has a validation_step, but there is no validation data: it is never called"
        report.add(_SECTION, "suspicious", "validation.loader", text)
    elif has_loader:
        text = f"there is validation data, but {type(trial.task).__name__} has no validation_step: it is not used"
        report.add(_SECTION, "suspicious", "validation.step", text)


def _check_labels(report: CheckReport, trial: CheckTrial) -> None:
    seen = [each for each in trial.observer.seen if each.losses]
    everywhere = [loss for each in (*trial.observer.seen_in_validation, *seen) for loss in each.losses]
    if bad := next((loss for loss in everywhere if loss.is_out_of_range), None):
        text = (
            f"labels go from {bad.least} to {bad.most}, but the output has {bad.classes} classes: 0 to "
            f"{bad.classes - 1}"
        )
        report.add(_SECTION, "wrong", "labels.range", text)
    alone = [each.losses[0] for each in seen if len(each.losses) == 1 and each.losses[0].labels]
    labels: frozenset[int] = frozenset[int]().union(*(each.labels for each in alone))
    if len(alone) >= MAX_PROBED_BATCHES and len(labels) == 1 and alone[0].classes > 1:
        text = f"all labels of the first {len(alone)} batches are {next(iter(labels))}, of {alone[0].classes} classes"
        report.add(_SECTION, "suspicious", "labels.constant", text)


def _check_inputs(report: CheckReport, trial: CheckTrial) -> None:
    firsts = [each.first for each in trial.observer.seen if each.first is not None]
    if not firsts:
        return
    first = firsts[0]
    report.facts["first_layer"] = first._asdict()
    if all(each.least == each.most == first.least for each in firsts) and len(firsts) >= MAX_PROBED_BATCHES:
        text = f"the first layer, {first.name}, is given nothing but {first.least:.3g} in {len(firsts)} batches"
        report.add(_SECTION, "suspicious", "inputs.constant", text)
    elif (
        abs(first.mean) > _FAR_FROM_ZERO
        or first.std > _FAR_FROM_ZERO
        or 0 < max(first.std, abs(first.mean)) < _FLAT_STD
    ):
        text = (
            f"the first layer, {first.name}, is given numbers from {first.least:.3g} to {first.most:.3g}, mean "
            f"{first.mean:.3g}, standard deviation {first.std:.3g}"
        )
        report.add(_SECTION, "suspicious", "inputs.scale", text)


_BUDGET_S = 3.0
_MIN_SAMPLES = 0.01


def check_leaks(report: CheckReport, run: Run, most: int) -> None:
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
        for _, training in list_loaders(run.loaders.sources.get("fit"))
        for _, validation in list_loaders(run.loaders.sources.get("validate"))
        if is_map_style(training) and is_map_style(validation)
    ]
    if not pairs:
        report.add("data", "note", "leak", "training and validation were not compared: their samples have no numbers")
    for training, validation in pairs:
        _compare_datasets(report, training, validation, most)


def _compare_datasets(report: CheckReport, training: Any, validation: Any, most: int) -> None:
    (base, own), (other_base, others) = _unwrap_subset(training), _unwrap_subset(validation)
    if base is other_base and own & others:
        _report_overlap(report, len(own & others), len(others), "by their numbers in the data set")
    elif base is other_base:
        report.add("data", "ok", "leak", f"none of {len(others):,} validation samples is one of the training")
    else:
        try:
            _compare_contents(report, training, validation, most)
        except Exception as error:  # User code may fail when it is read here.
            report.add(
                "data", "note", "leak", f"training and validation could not be compared: {get_first_line(error)}"
            )


def _unwrap_subset(dataset: Any) -> tuple[Any, set[int]]:
    """Return the dataset below nested `Subset`s, and the indices of the samples in it."""
    indices: Sequence[int] | None = None
    while isinstance(dataset, Subset):
        own = [int(each) for each in dataset.indices]
        indices = own if indices is None else [own[number] for number in indices]
        dataset = dataset.dataset
    return dataset, set(range(get_length(dataset) or 0) if indices is None else indices)


def _compare_contents(report: CheckReport, training: Dataset[Any], validation: Dataset[Any], most: int) -> None:
    if _digest_sample(training[0]) != _digest_sample(training[0]):
        report.add(
            "data", "note", "leak",
            "training samples are drawn anew each time, so they were not compared with those of the validation",
        )  # fmt: skip
        return
    own, others = _digest_samples(training, most), _digest_samples(validation, most)
    if not own or not others:
        return
    known = set(own)
    shared = sum(each in known for each in others)
    total = get_length(training) or len(own)
    read = f"{format_count(len(others), 'validation sample')} compared with {len(own):,} of {total:,} of the training"
    report.facts["leak"] = {"validation": len(others), "training": len(own), "shared": shared}
    if shared > _MIN_SAMPLES * len(others) * len(own) / total:
        _report_overlap(report, shared, len(others), f"by their content; {read}")
    elif shared:
        report.add("data", "note", "leak", f"{read}: {shared} equal, as duplicates may be")
    else:
        report.add("data", "ok", "leak", f"{read}: none equal")


def _report_overlap(report: CheckReport, count: int, of: int, how: str) -> None:
    report.add("data", "suspicious", "leak", f"{count:,} of {of:,} validation samples are in the training too ({how})")


def _digest_samples(dataset: Any, most: int) -> list[bytes]:
    """Return digests of random samples of a dataset, as many as `_BUDGET_S` seconds allow."""
    end_s, order = time.perf_counter() + _BUDGET_S, np.random.default_rng(0).permutation(get_length(dataset) or 0)
    numbers = takewhile(lambda _: time.perf_counter() <= end_s, order[:most].tolist())
    return [_digest_sample(dataset[number]) for number in numbers]


def _digest_sample(sample: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for path, leaf in iterate_leaves(sample):
        digest.update(f"{path}{getattr(leaf, 'dtype', '')}".encode())
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(leaf.tobytes() if isinstance(leaf, np.ndarray) else repr(leaf).encode())
    return digest.digest()
