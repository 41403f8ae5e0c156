"""Notes on errors of the user's code: the place in the run, and advice for known errors of torch."""

from __future__ import annotations

import re

from lumen.errors import LumenError
from lumen.run.run import Run

_BEGIN = "This was in "
_NO_GRADIENT = (
    "A detached tensor has no gradient, and an evaluation makes none: compute it inside `with torch.enable_grad():` of "
    "tensors made there, with Trainer(inference_mode=False)."
)
_DTYPE = "Create tensors in self.dtype and convert inputs, x.to(self.dtype), or use precision='bf16', which converts."
_INTEGERS = "Convert what the function wants as other numbers: target.long() for class indices and embeddings."
_FILES = "Call torch.multiprocessing.set_sharing_strategy('file_system') first, or raise the limit of `ulimit -n`."
_KILLED = (
    "A worker was killed, often for memory: num_workers=0 shows its error, fewer workers need less. A container may "
    "have too little shared memory: docker run --shm-size=8g."
)
_DEVICE = "Train on the CPU, or with CUDA_LAUNCH_BLOCKING=1, to see the line: often a label or an index is too large."
_LOGITS = "Give logits, without the sigmoid, to torch.nn.functional.binary_cross_entropy_with_logits."
_LENGTH = (
    "num_training_batches is infinite before the loader is open. For the steps of the run, read "
    "trainer.estimated_stepping_batches."
)
#: Advice for common errors of torch, by a pattern of their text.
_ADVICE = {
    "does not require grad and does not have a grad_fn|[Ii]nference tensor|[Ii]nference ?[Mm]ode": _NO_GRADIENT,
    "tensors to be on the same device": "Create tensors on self.device, and register constants as buffers.",
    "backward through the graph a second time": "Detach what one step keeps for the next: hidden = hidden.detach().",
    "support the deepcopy protocol": "Detach the tensors that a module keeps from one step to the next.",
    "modified by an inplace operation": "Trainer(detect_anomaly=True) names the operation.",
    "a leaf Variable that requires grad": "Change parameters by hand inside `with torch.no_grad():`.",
    "have the same dtype|^Input type .* should be the same": _DTYPE,
    "expected scalar type|target dtype|following scalar types|Expected dtype int|tensor of type Long": _INTEGERS,
    r"Target -?\d+ is out of bounds": "Labels go from 0 to the number of classes less 1, but for ignore_index.",
    "index out of range in self": "An index reaches nn.Embedding's num_embeddings, the size of the vocabulary.",
    "input should be between 0 and 1|unsafe to autocast": _LOGITS,
    "stack expects each tensor to be equal size": "Samples differ in size: give the DataLoader a collate_fn that pads.",
    "more than 1 value per channel when training": "BatchNorm needs two samples: give the DataLoader drop_last=True.",
    "exited unexpectedly|killed by signal": _KILLED,
    "DataLoader timed out": "A batch took longer than the DataLoader's timeout: num_workers=0 shows the slow line.",
    "received 0 items of ancdata|unable to open shared memory|Too many open files": _FILES,
    "[Cc]an't (pickle|get) (local|<)": "Spawned workers need classes and functions at the top of a module, no lambda.",
    "CUDA in forked subprocess": "Lumen moves batches: let workers return tensors of the CPU, or spawn them.",
    "device-side assert|CUBLAS_STATUS|illegal memory access": _DEVICE,
    "not have a deterministic implementation": "Trainer(deterministic='warn') makes a warning of this error.",
    "mixed torch.Tensor and DTensor": "FSDP shards parameters: use them in the forward of the module that owns them.",
    "NCCL [Ee]rror|ncclUnhandled|ncclSystem": "NCCL_DEBUG=INFO shows the reason; NCCL_SOCKET_IFNAME sets the network.",
    "float infinity to integer|integer .*, but got inf": _LENGTH,
    "Default process group has not been initialized": "One process has none: use self.all_gather, which works there.",
}


def note_place(run: Run, error: BaseException) -> None:
    """Add the place in the run to an error of the user's code, once, and advice if the error is known.

    Errors of Lumen get no note.

    Args:
        run: The run in progress, perhaps in an evaluation within `fit`.
        error: The exception that ends the run.
    """
    is_users = isinstance(error, Exception) and not isinstance(error, LumenError)
    if is_users and not any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_BEGIN}{_describe_location(run)}.")
        text = str(error)
        if (found := next((advice for known, advice in _ADVICE.items() if re.search(known, text)), None)) is not None:
            error.add_note(found)


def _describe_location(run: Run) -> str:
    log, progress, step = run.log, run.progress, run.progress.step
    inside = [f"epoch {progress.epoch}"] * bool(step or progress.in_epoch)
    inside += [f"batch_idx {log.batch_index}"] * (log.batch_index is not None)
    inside += [f"rank {run.processes.rank}"] * (run.processes.world_size > 1)
    inside += [f"loader {log.loader_suffix.lstrip('/')}"] * bool(log.loader_suffix)
    where = _NAMES.get(run.stage, run.stage)
    if run.stage == "fit":
        between = f"fit, after step {step}" if step else "fit, before its first step"
        where = f"step {step + 1}" if log.in_train_step else between
    elif run.stage != "sanity" and run.loaders.train is not None:
        where += f" after step {step}"
    return where + (f" ({', '.join(inside)})" if inside else "")


_NAMES = {"validate": "the validation", "test": "the test", "predict": "the prediction",
          "sanity": "the sanity check of the validation"}  # fmt: skip
