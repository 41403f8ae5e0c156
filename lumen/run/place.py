"""Where a run stands when the user's code raises an error, in a note of that error."""

from __future__ import annotations

from lumen.errors import LumenError
from lumen.run.run import Run

_BEGIN = "This was in "


def note_place(run: Run, error: BaseException) -> None:
    """Say in an error of the user's code where the run stands, unless that is said; Lumen's own say what they need.

    Args:
        run: It may be in an evaluation within `fit`, which is told too.
        error: The exception that ends the run.
    """
    is_users = isinstance(error, Exception) and not isinstance(error, LumenError)
    if is_users and not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{_told(run)}.")


def _told(run: Run) -> str:
    log, progress = run.log, run.progress
    is_fit = run.trainer.state.fn == "fit"
    inside = [f"epoch {progress.epoch}"] if is_fit and (progress.step or progress.in_epoch) else []
    inside += [] if log.batch_index is None else [f"batch_idx {log.batch_index}"]
    inside += [f"rank {run.processes.rank}"] if run.processes.world_size > 1 else []
    inside += [f"loader {log.loader_suffix.lstrip('/')}"] if log.loader_suffix else []
    return _stage(run, is_fit=is_fit) + (f" ({', '.join(inside)})" if inside else "")


def _stage(run: Run, *, is_fit: bool) -> str:
    step = run.progress.step
    if run.stage == "fit":
        between = f"fit, after step {step}" if step else "fit, before its first step"
        return f"step {step + 1}" if run.log.in_train_step else between
    if run.stage == "sanity":
        return "the sanity check of the validation"
    return f"{_NAMES.get(run.stage, run.stage)}{f' after step {step}' if is_fit else ''}"


_NAMES = {"validate": "the validation", "test": "the test", "predict": "the prediction"}
