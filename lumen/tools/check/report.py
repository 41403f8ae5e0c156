"""Report of a check: findings by subject, and descriptions of batches, for a terminal or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, Literal, final

import torch
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from lumen.console import format_bytes, stdout
from lumen.tools.terminal import make_table_console, print_json

_MAX_LEAVES = 16
_PLAIN = (str, bytes, int, float, type(None))


@final
@dataclass(frozen=True)
class BatchLeaf:
    """Leaf of a nested batch.

    Attributes:
        path: Path of the leaf in the batch: `[0]`, `image`, `[0].image`.
        kind: The dtype of a tensor, or the class of other leaves.
        shape: The tensor's shape, or None for other leaves.
        size_bytes: The tensor's memory in bytes.
        least: The smallest finite element, or None if no element is a finite real number.
        most: The largest finite element, or None if no element is a finite real number.
        mean: Mean of the finite elements, or None for dtypes that are not floating-point.
        std: Standard deviation of the finite elements, or None for dtypes that are not floating-point.
        nan: Number of NaN elements.
        infinite: Number of infinite elements.
    """

    path: str
    kind: str
    shape: tuple[int, ...] | None = None
    size_bytes: int = 0
    least: float | None = None
    most: float | None = None
    mean: float | None = None
    std: float | None = None
    nan: int = 0
    infinite: int = 0

    @property
    def cells(self) -> list[str]:
        """Cells of the leaf's row in the table."""
        shape = "" if self.shape is None else "x".join(map(str, self.shape)) or "scalar"
        bounds = "" if self.least is None or self.most is None else f"{self.least:.3g} .. {self.most:.3g}"
        spread = "" if self.mean is None or self.std is None else f"mean {self.mean:.3g} std {self.std:.3g}"
        odd = [f"{count} {label}" for count, label in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        memory = format_bytes(self.size_bytes) if self.size_bytes else ""
        return [self.path, self.kind, shape, bounds, ", ".join([*filter(None, [spread]), *odd]), memory]


def describe_leaves(batch: Any) -> list[BatchLeaf]:
    """Describe the leaves of a nested batch, depth first."""
    return [_describe_leaf(path, leaf) for path, leaf in iterate_leaves(batch)]


def format_rows(parts: list[BatchLeaf]) -> list[list[str]]:
    """Return parts as rows of a table, at most `_MAX_LEAVES`."""
    return shorten_rows([each.cells for each in parts], _MAX_LEAVES)


def shorten_rows(rows: list[list[str]], max_rows: int) -> list[list[str]]:
    """Return the first rows of a table, and a row with the number of rows left out."""
    return [*rows[:max_rows], *([[f"and {len(rows) - max_rows} more"]] if len(rows) > max_rows else [])]


def iterate_leaves(batch: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested batch with their paths, depth first. A list of strings or numbers is one leaf."""
    children: Iterator[tuple[str, Any]]
    if isinstance(batch, Mapping):
        children = ((_join_path(path, key), value) for key, value in batch.items())
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        children = ((f"{path}.{name}", value) for name, value in zip(batch._fields, batch, strict=True))
    elif isinstance(batch, (list, tuple)) and not all(isinstance(each, _PLAIN) for each in batch):
        children = ((f"{path}[{number}]", value) for number, value in enumerate(batch))
    elif is_dataclass(batch) and not isinstance(batch, type):
        children = ((f"{path}.{each.name}", getattr(batch, each.name)) for each in fields(batch))
    else:
        children = iter(())
        yield path or "batch", batch
    for child_path, value in children:
        yield from iterate_leaves(value, child_path)


def _join_path(path: str, key: Any) -> str:
    return f"{path}.{key}".lstrip(".") if isinstance(key, str) else f"{path}[{key!r}]"


def find_largest(batch: Any) -> tuple[str, torch.Tensor] | None:
    """Return the first of the largest tensors with two or more dimensions; None without such a tensor."""
    found = [(path, leaf) for path, leaf in iterate_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim() > 1]
    return max(found, key=lambda each: each[1].numel(), default=None)


def _describe_leaf(path: str, leaf: Any) -> BatchLeaf:
    if isinstance(leaf, (list, tuple)):
        kinds = {type(each).__name__: None for each in leaf}
        return BatchLeaf(path, f"{len(leaf)} {', '.join(kinds)}".rstrip())
    if not isinstance(leaf, torch.Tensor):
        return BatchLeaf(path, type(leaf).__name__)
    kind, shape = str(leaf.dtype).removeprefix("torch."), tuple(leaf.shape)
    size_bytes = leaf.numel() * leaf.element_size()
    if leaf.is_sparse or leaf.is_nested or leaf.is_complex() or leaf.is_quantized or not leaf.numel():
        return BatchLeaf(path, kind, shape, size_bytes)
    numbers = leaf.detach().float() if leaf.is_floating_point() else leaf.detach().long()
    part = BatchLeaf(path, kind, shape, size_bytes, nan=int(numbers.isnan().sum()), infinite=int(numbers.isinf().sum()))
    if not (finite := numbers[numbers.isfinite()]).numel():
        return part
    part = replace(part, least=float(finite.min()), most=float(finite.max()))
    is_float = leaf.is_floating_point()
    return replace(part, mean=float(finite.mean()), std=float(finite.std(correction=0))) if is_float else part


def format_rough_duration(seconds: float) -> str:
    """Return a duration in words: `40 ms`, `12 s`, `3 min`, `5.2 h`, `2.1 days`."""
    for limit, unit, name in ((1, 0.001, "ms"), (100, 1, "s"), (5400, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.2g} {name}" if seconds < 100 * unit else f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.3g} days"


def format_every(count: int, unit: str) -> str:
    """Return an interval in words: `every step`, `every 2 steps`."""
    return f"every {unit}" if count == 1 else f"every {count:,} {unit}s"


#: Advice on findings, by name.
ADVICE = {
    "training.order": "Write DataLoader(..., shuffle=True), or pass a sampler.",
    "validation.loader": "Define val_dataloader in the data module or the task, or set limit_val_batches: 0.",
    "validation.step": "Define validation_step(self, batch), or set limit_val_batches: 0.",
    "labels.range": "Give the model one output per class, or number the labels from 0. Labels that do not count must "
    "be ignore_index.",
    "labels.constant": "Check the source of the labels. Data that is sorted by class must be shuffled.",
    "inputs.constant": "Check the samples of the dataset, and the operations before this layer.",
    "inputs.scale": "Normalize the inputs to mean 0 and standard deviation 1, in the dataset or in a first norm layer.",
    "leak": "Split the data before it is augmented or cut, and keep related samples in one part.",
    "parameters.unheld": "Pass these parameters to the optimizer, or set their requires_grad to False.",
    "loss.finite": "Check the data for NaN, and the loss for divisions, logarithms and roots. trainer.detect_anomaly "
    "names the operation.",
    "loss.by_chance": "Check the scale of the inputs and of the last layer's weights. Is softmax missing, or applied "
    "twice?",
    "gradients.finite": "Check divisions, roots of 0 and logarithms. trainer.detect_anomaly names the operation.",
    "gradients.none": "If the loss need not depend on these parameters, set their requires_grad to False.",
    "gradients.zero": "Check the operations between parameters and loss for a dead activation, a detach or an argmax.",
    "gradients.explode": "Check the scale of inputs, targets and initial weights. gradient_clip_val limits the norm.",
    "loss.constant": "Check how training_step uses its batch.",
    "loss.input": "Check how training_step uses this part, the largest tensor of its batch.",
    "schedule.length": "Make the schedule as long as the run: self.trainer.estimated_stepping_batches steps, or "
    "max_epochs.",
    "validation.never": "Lower val_check_interval or check_val_every_n_epoch, or make the run longer.",
    "rates.idle": "Make the schedule as long as the run, or the run as short as the schedule.",
    "monitor": "Monitor one of these names, or log the missing name.",
    "checkpoints.writable": "Choose another trainer.default_root_dir or dirpath, or change its permissions.",
    "checkpoints.room": "Keep fewer checkpoints: keep_last, save_top_k and keep_every_n_steps of ModelCheckpoint.",
}
Mark = Literal["ok", "note", "suspicious", "wrong"]


@final
@dataclass(frozen=True)
class Finding:
    """Finding of a check.

    Attributes:
        mark: "ok"; "note" for information or a check that was not possible; "suspicious" for a probable mistake;
            "wrong" if a run would fail.
        name: Name of the finding for programs, such as `labels.range`.
        text: A sentence that describes the finding.
        advice: A sentence on what to do.
        rows: Rows of a table below the finding, or lines of one cell each.
    """

    mark: Mark
    name: str
    text: str
    advice: str = ""
    rows: Sequence[Sequence[str]] = ()


@final
@dataclass
class CheckReport:
    """Findings of a check.

    Attributes:
        title: Title with the name of the run.
        sections: Findings by subject, in order of display.
        facts: Values by name, as plain data for programs.
    """

    title: str = ""
    sections: dict[str, list[Finding]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(
        self, section: str, mark: Mark, name: str, text: str, advice: str = "", rows: Sequence[Sequence[str]] = ()
    ) -> None:
        """Add a finding. Suspicious and wrong findings get the advice in `ADVICE`, unless other advice is given."""
        if mark in ("suspicious", "wrong"):
            advice = advice or ADVICE.get(name, "")
        self.sections.setdefault(section, []).append(Finding(mark, name, text, advice, rows))

    def list_findings(self, mark: Mark) -> list[Finding]:
        """Return the findings with a mark."""
        return [each for section in self.sections.values() for each in section if each.mark == mark]

    def get_exit_code(self, *, strict: bool) -> int:
        """Return 2 if a finding is wrong, 1 if `strict` and a finding is suspicious, else 0."""
        return 2 if self.list_findings("wrong") else int(strict and bool(self.list_findings("suspicious")))


_MARKS = {"ok": ("✓", "green"), "note": ("·", "dim"), "suspicious": ("!", "yellow"), "wrong": ("✗", "bold red")}
_MAX_WIDTH = 120


def print_report(report: CheckReport) -> None:
    """Print a report as wide as the terminal, at most 120 columns, or 80 columns without a terminal."""
    console = make_table_console()
    console.width = min(console.width, _MAX_WIDTH) if console.is_terminal else 80
    with console.capture() as captured:
        console.print(Text(report.title, "bold"))
        for name, findings in report.sections.items():
            console.print("\n", Text(name, "bold"), sep="")
            for finding in findings:
                _print_finding(console, finding)
        console.print("\n", format_verdict(report), sep="")
    print(*map(str.rstrip, captured.get().splitlines()), sep="\n", file=stdout)


def _print_finding(console: Console, finding: Finding) -> None:
    sign, style = _MARKS[finding.mark]
    line = Table.grid(padding=(0, 1))
    line.add_column(width=1)
    line.add_column(overflow="fold")
    line.add_row(Text(sign, style), Text(finding.text, style if finding.mark in ("suspicious", "wrong") else ""))
    if finding.advice:
        line.add_row("", Text(finding.advice))
    console.print(line)
    if finding.rows:
        console.print(Padding(_make_table(finding.rows), (0, 0, 0, 4)))


def _make_table(rows: Sequence[Sequence[str]]) -> Table:
    table, columns = Table.grid(padding=(0, 2)), max(map(len, rows))
    for _ in range(columns):
        table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, "dim") for cell in row), *[""] * (columns - len(row)))
    return table


def format_verdict(report: CheckReport) -> Text:
    """Return a one-line summary of a report."""
    wrong, suspicious = (len(report.list_findings(mark)) for mark in ("wrong", "suspicious"))
    if wrong or suspicious:
        text = f"{f'{wrong} wrong, ' if wrong else ''}{suspicious} suspicious"
        return Text(text, "bold red" if wrong else "bold yellow")
    return Text("nothing suspicious was found", "bold green")


def print_json_report(report: CheckReport, exit_code: int) -> None:
    """Print a report as JSON. Non-finite numbers are strings."""
    sections = {name: [vars(each) for each in findings] for name, findings in report.sections.items()}
    print_json({"title": report.title, "exit_code": exit_code, "sections": sections, "facts": report.facts})
