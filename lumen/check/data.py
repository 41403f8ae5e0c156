"""What is found of the data: its loaders, their first batches, labels and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from lumen.check.describe import Part, counted, rows_of
from lumen.check.report import Report
from lumen.check.trial import Trial
from lumen.check.witness import LOOKED_INTO
from lumen.console import size
from lumen.data.combined import CombinedLoader
from lumen.data.fingerprint import known_length
from lumen.run.run import Run
from lumen.task.hooks import overrides

_SECTION = "data"
_FAR, _FLAT = 20.0, 1e-4


def look_at_data(report: Report, trial: Trial, run: Run) -> None:
    """Describe a batch of each loader, and find what is wrong with them."""
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


def loaders_in(given: Any, name: str = "") -> list[tuple[str, Any]]:
    """The loaders in lists, dictionaries and combinations of such, each with what it is called there."""
    return list(_loaders(given, name))


def _loaders(given: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(given, CombinedLoader):
        yield from _loaders(given.iterables, name)
    elif isinstance(given, Mapping):
        for key, each in given.items():
            yield from _loaders(each, f"{name}/{key}".lstrip("/"))
    elif isinstance(given, Sequence) and not isinstance(given, (str, bytes)):
        for number, each in enumerate(given):
            yield from _loaders(each, f"{name}/{number}".lstrip("/"))
    elif given is not None:
        yield name, given


def is_map_style(loader: Any) -> bool:
    """Whether it is a standard loader of samples that have numbers."""
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
    if trial.plan.same_batches:
        return
    for name, loader in loaders:
        if not is_map_style(loader) or type(loader.sampler) is not SequentialSampler:
            continue
        if (known_length(loader.dataset) or 0) > (loader.batch_size or 0) > 0:
            report.add(
                _SECTION, "suspicious", "training.order",
                f"training{f' {name}' if name else ''} is not shuffled: its samples come in one order in every epoch",
                "Write DataLoader(..., shuffle=True), or give a sampler.",
            )  # fmt: skip


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
        report.add(
            _SECTION, "suspicious", "validation.loader",
            f"{type(trial.task).__name__} has a validation_step, but there is no validation data: it is never called",
            "Define val_dataloader in the data module or the task, or set limit_val_batches: 0.",
        )  # fmt: skip
    elif has_loader:
        report.add(
            _SECTION, "suspicious", "validation.step",
            f"there is validation data, but {type(trial.task).__name__} has no validation_step: it is not used",
            "Define validation_step(self, batch), or set limit_val_batches: 0.",
        )  # fmt: skip


def _look_at_labels(report: Report, trial: Trial) -> None:
    seen = [each for each in trial.witness.seen if each.losses]
    everywhere = [loss for each in (*trial.witness.seen_in_validation, *seen) for loss in each.losses]
    if bad := next((loss for loss in everywhere if loss.is_out_of_range), None):
        report.add(
            _SECTION, "wrong", "labels.range",
            f"labels go from {bad.least} to {bad.most}, but the output has {bad.classes} classes: 0 to "
            f"{bad.classes - 1}",
            "Give the model as many outputs as there are classes, or number the labels from 0; those that are not to "
            "count are ignore_index.",
        )  # fmt: skip
    alone = [each.losses[0] for each in seen if len(each.losses) == 1 and each.losses[0].labels]
    labels: frozenset[int] = frozenset[int]().union(*(each.labels for each in alone))
    if len(alone) >= LOOKED_INTO and len(labels) == 1 and alone[0].classes > 1:
        report.add(
            _SECTION, "suspicious", "labels.constant",
            f"all labels of the first {len(alone)} batches are {next(iter(labels))}, of {alone[0].classes} classes",
            "Look at where labels come from; data that is sorted by class has to be shuffled.",
        )  # fmt: skip


def _look_at_inputs(report: Report, trial: Trial) -> None:
    firsts = [each.first for each in trial.witness.seen if each.first is not None]
    if not firsts:
        return
    first = firsts[0]
    report.facts["first_layer"] = first._asdict()
    if all(each.least == each.most == first.least for each in firsts) and len(firsts) >= LOOKED_INTO:
        report.add(
            _SECTION, "suspicious", "inputs.constant",
            f"the first layer, {first.name}, is given nothing but {first.least:.3g} in {len(firsts)} batches",
            "Look at what the data set gives, and at what is done to it before this layer.",
        )  # fmt: skip
    elif abs(first.mean) > _FAR or first.std > _FAR or 0 < max(first.std, abs(first.mean)) < _FLAT:
        report.add(
            _SECTION, "suspicious", "inputs.scale",
            f"the first layer, {first.name}, is given numbers from {first.least:.3g} to {first.most:.3g}, mean "
            f"{first.mean:.3g}, standard deviation {first.std:.3g}",
            "Normalise inputs to about mean 0 and standard deviation 1, in the data set or by a first norm.",
        )  # fmt: skip
