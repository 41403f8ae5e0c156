"""Proof of the promises: runs all variants, compares them, and reports a verdict for each comparison."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import final

import torch

from lumen.tools.proof.causes import (
    COUPLES,
    DifferenceCause,
    Verdict,
    explain_difference,
    explain_failure,
    explain_validation_change,
)
from lumen.tools.proof.outcome import CUT_LAYERS, FLOAT32, FLOAT64, compare_outcomes, compare_values, merge_outcomes
from lumen.tools.proof.variants import MOMENTS, NAME, STRATEGIES, Moment, Name, Variant, VariantSize
from lumen.tools.proof.worker import PREFIX, TrainingBuilder, VariantPool, VariantResult, list_libraries

FP64 = "fp64"
#: Names of the comparisons, in the order of the table.
COMPARISONS = ("accumulate", "processes", "validation", "again", "workers", "kills", "evaluation", "checkpoints")
_READERS: tuple[tuple[str, Name], ...] = (("one", "fsdp"), ("fsdp", "single"), ("ddp", "fsdp"))
#: Kinds of events that do not depend on the cut of layers over processes.
_WHOLE_KINDS = ("order", "batch", "loss", "start", "gradient", "parameter", "buffer", "optimizer")
_STATE_KINDS = ("start", "gradient", "parameter", "buffer", "optimizer")


@final
@dataclass
class ProofRow:
    """Result of one comparison.

    Attributes:
        promise: Name of the promise, P1 to P4, or "".
        what: Name of the comparison.
        demands: "bits" for bitwise identity, or the largest difference that counts as rounding.
        largest: The largest difference, or None if nothing was compared.
        seconds: Duration of the comparison's runs in seconds.
        cause: The reason why the promise is not proven, or None if it is.
    """

    promise: str
    what: str
    demands: str
    largest: float | None
    seconds: float
    cause: DifferenceCause | None = None

    @property
    def verdict(self) -> Verdict:
        """Verdict on the promise."""
        return "proven" if self.cause is None else self.cause.verdict


def adapt_size_to_machine(size: VariantSize, accelerator: str) -> VariantSize:
    """Return the size with this machine's accelerator and threads: half the cores, and CUDA only with two devices."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    on_cuda = accelerator in ("auto", "gpu", "cuda") and torch.cuda.device_count() > 1
    return replace(size, threads=max(1, cores // 2), accelerator="cuda" if on_cuda else "cpu")


@final
class Prover:
    """Prover that runs variants and compares them.

    Args:
        make: Function that builds task, data and trainer, picklable because subprocesses call it.
        size: Numbers of steps and batches of each variant.
        compiles: True to compare eager with compiled too.
        only: Names in `COMPARISONS`. Default: all.

    Attributes:
        size: Numbers of steps and batches of each variant, as given.
        report_progress: Function that is called with each row as soon as it exists.
        rows: All results, in the order of the promises.
        results: The runs, by the names of their variants.
        notes: Notes for the reader, in sentences.
        seconds: Duration of the whole proof in seconds.
    """

    def __init__(
        self, make: TrainingBuilder, size: VariantSize, *, compiles: bool = False, only: Collection[str] = ()
    ) -> None:
        self._make, self.size, self._compiles = make, size, compiles
        self.report_progress: Callable[[ProofRow], None] = lambda row: None
        self._only = {*(only or COMPARISONS)}
        self.rows, self.results, self.notes, self.seconds = (
            list[ProofRow](),
            dict[str, VariantResult](),
            list[str](),
            0.0,
        )
        self._again_lock = Lock()
        self._precision: str | None = FP64
        self._tolerance = FLOAT64

    @property
    def precision(self) -> str:
        """Precision of the comparisons that allow rounding."""
        return self._precision or "the user's own"

    @property
    def code(self) -> int:
        """Exit code: 0, or 1 if a promise failed."""
        return int(any(row.verdict == "failed" for row in self.rows))

    def run_proof(self) -> None:
        """Run all variants in a temporary directory, and compare them."""
        began_s = time.monotonic()
        with (
            TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as folder,
            closing(
                VariantPool(self._make, self.size, Path(folder), os.cpu_count() or 1, list_libraries())
            ) as self._pool,
        ):
            self.rows = self._make_rows()
        self.seconds = time.monotonic() - began_s

    def _run_variant(self, variant: Variant, *, resumes: bool = False) -> VariantResult:
        result = self._pool.run_variant(variant, self._precision, resumes=resumes)
        self.results[variant.name + ("-resumed" if resumes else "")] = result
        return result

    def _make_rows(self) -> list[ProofRow]:
        with ThreadPoolExecutor(16) as threads:
            base = threads.submit(self._run_variant, Variant("base", exact=True))
            one = threads.submit(self._run_variant, Variant("one"))
            if base.result().failure:
                cause = explain_failure(base.result())
                return [self._announce_row(ProofRow("", "the task trains", "", None, base.result().seconds, cause))]
            if failure := one.result().failure:
                self.notes.append(
                    f"the task does not train in float64 ({failure['message'].splitlines()[0]}), so the comparisons "
                    "that allow rounding used the task's own precision: a small fault would look like rounding."
                )
                self._precision, self._tolerance = None, FLOAT32
                shutil.rmtree(one.result().folder)
                one = threads.submit(self._run_variant, Variant("one"))
            elif "float32" in one.result().outcome.dtypes:
                self.notes.append(
                    "the loss is float32 although all else is float64, so differences up to 1e-5 are rounding."
                )
                self._tolerance = FLOAT32
            first = [self._prove_manual()] if base.result().outcome.by_hand else []
            jobs = [threads.submit(job) for job in self._list_jobs(base.result(), one.result(), threads)]
            found = [job.result() for job in jobs]
            return [*first, *(row for rows in found for row in (rows if isinstance(rows, list) else [rows]))]

    def _list_jobs(
        self, base: VariantResult, one: VariantResult, threads: ThreadPoolExecutor
    ) -> list[Callable[[], ProofRow | list[ProofRow]]]:
        """Return the comparisons in the order of the promises. A comparison may wait for runs that started earlier."""
        wanted = self._only
        names, readers = [*STRATEGIES], [*_READERS]
        if base.outcome.plan and not base.outcome.is_exact:
            names.append("mesh")
            readers.append(("mesh", "single"))
        elif "processes" in wanted:
            why = "the task has no parallel_plan" if not base.outcome.plan else "reduction: exact does not support one"
            self.notes.append(f"no mesh was tried, because {why}.")
        multi: dict[str, Future[VariantResult]] = {
            name: threads.submit(self._run_variant, Variant(name, 2, name))
            for name in names
            if {"processes", "checkpoints"} & wanted
        }
        joined = Variant("joined", joins=True)
        jobs: dict[str, list[Callable[[], ProofRow | list[ProofRow]]]] = {
            "accumulate": [
                lambda: self._make_row(
                    "P1",
                    "micro-batches joined in pairs",
                    one,
                    self._run_variant(joined),
                    _STATE_KINDS,
                    before=[run.result() for run in multi.values()][:1],
                )
            ],
            "processes": [
                partial(self._prove_two_processes, base, one, multi[name], name) for name in names if name in multi
            ],
            "compile": [partial(self._prove_compiled, base)] if self._compiles else [],
            "validation": [partial(self._prove_validation_neutral, base)],
            "again": [lambda: self._make_row("P2", "run again", base, self._again, tolerance=0.0)],
            "workers": [partial(self._prove_workers, base)],
            "kills": [partial(self._prove_resume, base, moment) for moment in MOMENTS],
            "evaluation": [partial(self._prove_evaluations, one, multi.get("mesh"))],
            "checkpoints": [
                partial(self._prove_checkpoint_reader, one, multi.get(writer), reader, multi)
                for writer, reader in readers
            ],
        }
        return [job for name, named in jobs.items() if name in {"compile", *wanted} for job in named]

    # ------------------------------------------------------------------ same training everywhere

    def _prove_manual(self) -> ProofRow:
        """Skip comparisons that manual optimization rules out, and return the row that explains why."""
        self._only -= {"accumulate", "processes", "checkpoints"}
        why = (
            "The task uses manual optimization: each batch is a step, so two processes make steps of twice the size, "
            "unless global_batch_size is set."
        )
        return self._make_unproven_row("P1", "two processes", "", 0.0, "not comparable", why)

    def _prove_two_processes(
        self, base: VariantResult, one: VariantResult, run: Future[VariantResult], name: Name
    ) -> ProofRow:
        other = run.result()
        what = f"two processes, {_format_strategy(other.variant.strategy)}"
        if other.variant.strategy != "mesh":
            if not base.outcome.is_exact:
                return self._make_row("P1", what, one, other)
            exact = self._run_variant(Variant(f"{name}-exact", 2, name, exact=True))
            return self._make_row("P1", f"{what}, exact", base, exact, tolerance=0.0)
        row = self._make_row("P1", what, one, other, _WHOLE_KINDS, self._cut_tolerance)
        is_refused = other.failure is not None and other.failure["ours"] == "True"
        if row.cause is not None and is_refused and base.outcome.plan == "model":
            row.cause.verdict = "not promised"  # the user did not write the plan, and need not use it
        return row

    def _prove_validation_neutral(self, base: VariantResult) -> ProofRow:
        """Compare parameters and buffers before and after a validation."""
        cause = explain_validation_change(base.outcome) if base.outcome.moved else None
        return self._announce_row(
            ProofRow("P1", "before and after a validation", "bits", float(cause is not None), 0.0, cause)
        )

    def _prove_compiled(self, base: VariantResult) -> ProofRow:
        other = self._run_variant(Variant("compiled", exact=True, compiles=True))
        row = self._make_row(
            "P1", "compiled", base, other, ("batch", "loss", "gradient", "parameter", "buffer"), FLOAT32
        )
        if row.cause is not None and row.verdict == "failed" and other.failure is None:
            row.cause.verdict = "not promised"  # compiled code sums in a different order
        return row

    # ------------------------------------------------------------------ exact resume

    def _prove_workers(self, base: VariantResult) -> ProofRow:
        workers = 0 if base.outcome.workers else 2
        other = self._run_variant(Variant("workers", exact=True, workers=workers))
        what = f"{base.outcome.workers} and {workers} workers"
        if other.failure is None and other.outcome.workers == base.outcome.workers:
            why = (
                "No DataLoader of the training data may have workers: its dataset follows the training, or the loader "
                "is of a different kind."
            )
            return self._make_unproven_row("P2", what, "bits", other.seconds, "nothing to compare", why)
        return self._make_row("P2", what, base, other, tolerance=0.0)

    def _prove_resume(self, base: VariantResult, moment: Moment) -> ProofRow:
        variant = Variant(f"killed-in-{moment}", exact=True, kill=moment)
        killed = self._run_variant(variant)
        what = f"killed in {'a save' if moment == 'save' else moment}"
        if killed.failure and not killed.killed:
            return self._make_row("P2", what, base, killed, tolerance=0.0)
        if not killed.killed:
            why = "the task does not validate." if moment == "validation" else "the run ended before."
            return self._make_unproven_row("P2", what, "bits", killed.seconds, "nothing was killed", why)
        resumed = self._run_variant(replace(variant, kill=None, resume="auto"), resumes=True)
        resumed.seconds += killed.seconds
        return self._make_row("P2", what, base, resumed, tolerance=0.0)

    # ------------------------------------------------------------------ exact evaluation

    def _prove_evaluations(self, one: VariantResult, mesh: Future[VariantResult] | None) -> list[ProofRow]:
        checkpoint = str(_find_checkpoint(one, self.size))
        first = self._run_variant(Variant("evaluation", resume=checkpoint, evaluates=True))
        if first.failure is None and not first.outcome.values:
            why = "the validation logs no value."
            return [self._make_unproven_row("P3", "evaluation", "", first.seconds, "nothing is evaluated", why)]
        rows = []
        names = STRATEGIES if mesh is None or mesh.result().failure else (*STRATEGIES, "mesh")
        for name in names:
            variant = Variant(f"evaluation-{name}", 2, name, resume=checkpoint, evaluates=True)
            other = first if first.failure else self._run_variant(variant)
            rows.append(self._make_row("P3", f"two processes, {_format_strategy(name)}", first, other))
        return rows

    # ------------------------------------------------------------------ one checkpoint, any reader

    def _prove_checkpoint_reader(
        self,
        one: VariantResult,
        run: Future[VariantResult] | None,
        reader: Name,
        multi: Mapping[str, Future[VariantResult]],
    ) -> ProofRow:
        written = one if run is None else run.result()
        what = f"{_format_strategy(written.variant.strategy)}'s, read by {_format_strategy(reader)}"
        if written.failure:
            why = "the run that should have written the checkpoint failed."
            return self._make_unproven_row("P4", what, "bits", 0.0, "nothing was written", why)
        variant = Variant(
            f"{reader}-reads-{written.variant.name}", 1 if reader == "single" else 2, reader,
            resume=str(_find_checkpoint(written, self.size)),
        )  # fmt: skip
        other = self._run_variant(variant)
        if other.failure:
            return self._make_row("P4", what, one, other)
        # If two processes do not train like one, the cause is not the checkpoint.
        before = [each.result() for each in dict.fromkeys((run, multi.get(reader))) if each is not None]
        first = compare_outcomes(written.outcome, other.outcome, 0.0, ("parameter", "optimizer")).at
        if first is not None and first.step == _get_last_save(self.size):
            text = f"the {first.kind} {first.name} differs after the checkpoint was read."
            cause = DifferenceCause("a checkpoint is read with different values", first.name, text)
            cause = self._find_earlier_cause(one, other) or cause
            return self._announce_row(ProofRow("P4", what, "bits", 1.0, other.seconds, cause))
        tolerance = self._cut_tolerance if written.variant.strategy == "mesh" else None
        return self._make_row("P4", what, one, other, tolerance=tolerance, before=before)

    # ------------------------------------------------------------------ judging

    def _make_row(
        self, promise: str, what: str, reference: VariantResult, other: VariantResult, about: Sequence[str] = (),
        tolerance: float | None = None, before: Sequence[VariantResult] = (),
    ) -> ProofRow:  # fmt: skip
        tolerance = self._tolerance if tolerance is None else tolerance
        demands = "bits" if tolerance == 0 else f"{tolerance:g}"
        largest, cause = self._compare(reference, other, about, tolerance)
        if cause is not None:
            if other.variant.joins and cause.kind != COUPLES:  # the only cause that is found by exclusion
                before = ()
            cause = (
                self._find_earlier_cause(reference, other, before)
                or self._compare(reference, other, about, tolerance)[1]
            )
        return self._announce_row(ProofRow(promise, what, demands, largest, other.seconds, cause))

    def _compare(
        self, reference: VariantResult, other: VariantResult, about: Sequence[str], tolerance: float
    ) -> tuple[float | None, DifferenceCause | None]:
        """Return the largest difference of two runs, None if one failed, and its cause, None if they are equal."""
        if other.failure:
            return None, explain_failure(other, reference)
        ours, theirs = merge_outcomes(reference.outcomes), merge_outcomes(other.outcomes)
        found = compare_outcomes(ours, theirs, tolerance, about)
        largest, wrong, rounded = compare_values(ours, theirs, tolerance)
        self._add_rounding_note(rounded)
        largest = max(found.largest, largest)
        if found.at is None and not wrong:
            return largest, None
        return largest, explain_difference(reference, other, found.at, wrong, exact=tolerance == 0)

    @property
    def _cut_tolerance(self) -> float:
        return max(CUT_LAYERS, self._tolerance)

    @property
    def _again(self) -> VariantResult:
        """The base, run again in a new interpreter."""
        with self._again_lock:
            if "again" not in self.results:
                self._run_variant(Variant("again", exact=True, fresh=True))
            return self.results["again"]

    def _find_earlier_cause(
        self, reference: VariantResult, other: VariantResult, before: Sequence[VariantResult] = ()
    ) -> DifferenceCause | None:
        """Return the cause of a simpler difference from which this one follows, or None.

        A run that is not the same when it is run again differs from all other runs too.

        Args:
            reference: The result that counts as correct.
            other: The result that differs.
            before: Results that must be equal to the reference before `other` can be.
        """
        if other.variant.name == "again" or (other.failure and " between rank " not in other.failure["message"]):
            return None
        if other.variant.evaluates:
            evaluated = replace(reference.variant, name=f"{other.variant.name}-again")
            if self._compare(reference, self._run_variant(evaluated), (), 0.0)[1] is None:
                return None
        base, again = self.results["base"], self._again
        if (cause := self._compare(base, again, (), 0.0)[1]) is not None and not again.failure:
            return cause
        reference.outcome.repeats = True
        found = (self._compare(reference, each, (), self._tolerance)[1] for each in before if not each.failure)
        return next(filter(None, found), None)

    def _add_rounding_note(self, names: Iterable[str]) -> None:
        """Add a note on each logged value that may differ by float32 rounding."""
        for name in sorted(names):
            note = f"{name} is computed in float32 in any precision, as torchmetrics does, and may differ by 1e-5."
            if note not in self.notes:
                self.notes.append(note)

    def _make_unproven_row(
        self, promise: str, what: str, demands: str, seconds: float, kind: str, why: str
    ) -> ProofRow:
        return self._announce_row(
            ProofRow(promise, what, demands, None, seconds, DifferenceCause(kind, "", why, "not shown"))
        )

    def _announce_row(self, row: ProofRow) -> ProofRow:
        if row.cause is not None:  # Certificates are shared, so paths are relative to the working directory.
            place, text = (each.replace(f"{os.getcwd()}{os.sep}", "") for each in (row.cause.place, row.cause.text))
            row.cause = replace(row.cause, place=place, text=text)
        self.report_progress(row)
        return row


def _format_strategy(strategy: Name) -> str:
    return {"single": "one device", "mesh": "Mesh"}.get(strategy, strategy.upper())


def _get_last_save(size: VariantSize) -> int:
    return (size.steps - 1) // size.save_every * size.save_every


def _find_checkpoint(result: VariantResult, size: VariantSize) -> Path:
    return result.folder / NAME / "checkpoints" / f"step-{_get_last_save(size):08d}"
