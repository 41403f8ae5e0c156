"""Where a run stands when the user's code raises an error, in a note of that error."""

from __future__ import annotations

from lumen.errors import LumenError
from lumen.run.run import Run

_BEGIN = "This was in "
_INFERENCE = (
    "Evaluations run without gradients: compute what needs some inside `with torch.enable_grad():`, of tensors made "
    "there, with Trainer(inference_mode=False)."
)
#: What to do about errors of torch that users of a trainer meet, by a part of their text.
_ADVICE = {
    "does not require grad and does not have a grad_fn": _INFERENCE,
    "nference tensor": _INFERENCE,
    "nference mode": _INFERENCE,
    "InferenceMode": _INFERENCE,
    "tensors to be on the same device": "Create tensors on self.device, and register constants as buffers.",
    "backward through the graph a second time": "Detach what one step keeps for the next: hidden = hidden.detach().",
    "modified by an inplace operation": "Trainer(detect_anomaly=True) names the operation.",
    "have the same dtype": "Create tensors in self.dtype, or use precision='bf16', which converts where needed.",
    "expected scalar type": "Convert the input: x.to(self.dtype), or targets as the loss wants them.",
    "expected target dtype": "Convert targets as the loss wants them: target.long() for class indices.",
    "stack expects each tensor to be equal size": "Samples differ in size: give the DataLoader a collate_fn that pads.",
    "more than 1 value per channel when training": "BatchNorm needs two samples: give the DataLoader drop_last=True.",
    "exited unexpectedly": "A worker was killed, often for memory: num_workers=0 shows its error, fewer need less.",
    "received 0 items of ancdata": "Call torch.multiprocessing.set_sharing_strategy('file_system') first.",
    "device-side assert": "Train on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see the line: often a wrong label.",
    "Default process group has not been initialized": "One process has none: use self.all_gather, which works there.",
}


def note_place(run: Run, error: BaseException) -> None:
    """Say in an error of the user's code where the run stands, unless that is said; Lumen's own say what they need.

    Args:
        run: It may be in an evaluation within `fit`, which is told too.
        error: The exception that ends the run.
    """
    is_users = isinstance(error, Exception) and not isinstance(error, LumenError)
    if is_users and not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{_told(run)}.")
        if (found := next(filter(str(error).__contains__, _ADVICE), None)) is not None:
            error.add_note(_ADVICE[found])


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
