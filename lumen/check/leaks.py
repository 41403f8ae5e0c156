"""Samples of the training that are in the validation too."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from lumen.check.data import is_map_style, loaders_in
from lumen.check.describe import counted, leaves
from lumen.check.report import Report
from lumen.data.fingerprint import known_length
from lumen.run.run import Run

_BUDGET_S = 3.0
_FEW = 0.01


def look_for_leaks(report: Report, run: Run, most: int) -> None:
    """Compare samples of the training with samples of the validation.

    Args:
        report: Where it is said.
        run: An opened run, whose loaders are open.
        most: Samples of each to read at most.
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
    if (shared := _same_numbers(training, validation)) is not None:
        count, of = shared
        if count:
            _tell(report, count, of, "by their numbers in the data set")
        else:
            report.add("data", "ok", "leak", f"none of {of:,} validation samples is one of the training")
        return
    try:
        _compare_contents(report, training, validation, most)
    except Exception as error:  # a data set need not like to be read here
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        report.add("data", "note", "leak", f"training and validation could not be compared: {said}")


def _same_numbers(training: Any, validation: Any) -> tuple[int, int] | None:
    """How many samples two parts of one data set share, and of how many; None: they are no such parts."""
    (base, own), (other_base, others) = _within(training), _within(validation)
    if base is not other_base:
        return None
    return len(own & others), len(others)


def _within(dataset: Any) -> tuple[Any, set[int]]:
    """The data set in which a part lies, and the numbers of its samples there."""
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
    report.add(
        "data", "suspicious", "leak", f"{count:,} of {of:,} validation samples are in the training too ({how})",
        "Split the data before anything is copied or cut, by what must stay together.",
    )  # fmt: skip


def _digests(dataset: Any, most: int) -> list[bytes]:
    """Digests of samples from all over a data set, as many as a few seconds allow."""
    length, began_s, found = known_length(dataset) or 0, time.perf_counter(), list[bytes]()
    order = np.random.default_rng(0).permutation(length)[:most]
    for number in order.tolist():
        if time.perf_counter() - began_s > _BUDGET_S:
            break
        found.append(_digest(dataset[number]))
    return found


def _digest(sample: Any) -> bytes:
    digest = hashlib.blake2b(digest_size=12)
    for path, leaf in leaves(sample):
        digest.update(path.encode())
        if isinstance(leaf, torch.Tensor):
            digest.update(str(leaf.dtype).encode())
            digest.update(leaf.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray):
            digest.update(leaf.tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.digest()
