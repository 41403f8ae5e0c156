"""Export of weights as plain safetensors with the names of `state_dict`, in one file or in shards with an index."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Literal, final

import torch

from lumen.checkpoint.format.folder import open_newest_valid
from lumen.checkpoint.format.manifest import STATE, create_hashed_file
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import is_supported_dtype, write_safetensors
from lumen.checkpoint.format.storage import (
    MANIFEST,
    as_path_or_url,
    explain_read_errors,
    explain_storage_errors,
    fsync_directory,
    is_dir,
    make_temporary_path,
    path_exists,
)
from lumen.checkpoint.load import weights_source
from lumen.checkpoint.load.weights_source import (
    INDEX,
    PICKLE_SUFFIXES,
    SINGLE,
    WEIGHTS,
    average_checkpoint,
    find_checkpoint,
    find_checkpoint_at,
    is_mean_of_checkpoints,
)
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointGone, CheckpointMismatch, ConfigError
from lumen.internals.compiler import WRAPPED_NAME
from lumen.tools.terminal import check_output_free

_ONE_FILE = ".safetensors"
_FILES = re.compile(rf"model(-[0-9]{{5}}-of-[0-9]{{5}})?\.safetensors|{re.escape(INDEX)}")
_PACKED = torch.float4_e2m1fn_x2  # two numbers per byte; torch cannot cast this dtype


@final
@dataclass(frozen=True)
class Exported:
    """Summary of an export.

    Attributes:
        source: Path of the checkpoint or weights that were exported.
        files: Names of the safetensors files.
        dtypes: Number of tensors of each dtype.
        tensor_bytes: Bytes of all tensors together.
        tied: Name of each tied tensor, and the name of the tensor that it equals. The files contain both tensors.
        averaged: Number of tensors that are averages.
    """

    source: str
    files: list[str]
    dtypes: Mapping[torch.dtype, int]
    tensor_bytes: int
    tied: Mapping[str, str]
    averaged: int


def export_weights(
    source: str, output: Path, *, which: Literal["last", "best"] = "last", module: str | None = None,
    average: str | Sequence[str] | None = None, dtype: torch.dtype | None = None, max_shard_bytes: int | None = None,
) -> Exported:  # fmt: skip
    """Write the parameters and buffers of a checkpoint, for `safetensors.torch.load_file` and `load_state_dict`.

    The export needs memory for one tensor and, if that tensor is cast, for its copy. A tied tensor is written under
    each of its names: safetensors files cannot share bytes, and `load_state_dict` expects all names.

    Args:
        source: A checkpoint, a run, or weights as in `Weights.path`.
        output: A path `*.safetensors`, or a directory in the layout of model hubs. The path must not exist. The output
            appears complete or not at all.
        which: Checkpoint of a run: "last" for the newest valid checkpoint, or "best".
        module: Name of a submodule of the task. Only its tensors are exported, by their names in the submodule.
        average: The average to write in place of the parameters, as in `average_checkpoint`.
        dtype: The dtype of the floating-point tensors. Default: as saved.
        max_shard_bytes: Most bytes of tensors in one file of a directory. A larger tensor gets its own file.

    Raises:
        ConfigError: The output exists or cannot be created, or the module or average does not exist.
        CheckpointError: The checkpoint does not exist, or the disk cannot be read or written.
        CheckpointDamaged: The checkpoint's bytes do not match its checksums. Nothing was written.
    """
    _check_output(output, max_shard_bytes)
    with (
        _make_temporary_directory(output) as temporary,
        _open_source(
            source, which, (*WEIGHTS, STATE) if average is None or is_mean_of_checkpoints(average) else None
        ) as checkpoint,
    ):
        _report_extra_state(checkpoint, module)
        read = average_checkpoint(checkpoint, average)
        stored = _map_stored_names(read, module)
        tensors = {name: _make_meta_tensor(read, source_name, dtype) for name, source_name in stored.items()}

        def value(name: str) -> torch.Tensor:
            return _cast_tensor(name, read.read_tensor("model", stored[name]), tensors[name].dtype)

        files = _write_files(temporary, output, tensors, value, max_shard_bytes)
        first: dict[str, str] = {}
        tied = {name: first[of] for name, of in stored.items() if first.setdefault(of, name) != name}
        dtypes, size = Counter(each.dtype for each in tensors.values()), sum(each.nbytes for each in tensors.values())
        path = str(checkpoint.path) if checkpoint.state else source
        return Exported(path, files, dtypes, size, tied, sum(of in read.averages for of in stored.values()))


# ---------------------------------------------------------------------- source


@contextmanager
def _open_source(source: str, which: str, sections: tuple[str, ...] | None) -> Iterator[Checkpoint]:
    """Open and verify the checkpoint or weights to export. `sections` limits the readable tensors; None means all."""
    weights_source.refuse_pickle(source)
    path = as_path_or_url(source)
    with explain_read_errors(path):
        is_files = weights_source.is_weights(source)
        is_checkpoint = not is_files and (
            path_exists(path / MANIFEST) or (path_exists(path / STATE) and is_dir(path / "model"))
        )
        is_run = is_dir(path) and not is_checkpoint and not is_files
        folder = path / "checkpoints" if is_dir(path / "checkpoints") else path
    if which == "best" and not is_run:
        raise ConfigError(f"--which best: {source} is not a run. Give the directory of a run.")
    if is_checkpoint:
        yield _open_checkpoint(path, sections)
    elif is_run:
        checkpoint = find_checkpoint("best", folder) if which == "best" else find_checkpoint_at(path)
        assert checkpoint is not None  # Only "auto" may return None.
        yield checkpoint
    elif sections is None:
        raise ConfigError(f"--average: {source} is not a checkpoint of Lumen. Only checkpoints of Lumen have averages.")
    else:
        with weights_source.open_weights(source, Processes()) as weights:
            yield weights


def _open_checkpoint(path: PurePath, sections: tuple[str, ...] | None) -> Checkpoint:
    try:
        return Checkpoint.open(path, sections=sections)
    except CheckpointDamaged as error:
        good = open_newest_valid(path.parent, lambda _: None)
        advice = f"{good.path} is valid." if good else "The directory has no other valid checkpoint."
        subject = "" if isinstance(error, CheckpointGone) else f"{path} is damaged, and nothing was written: "
        raise CheckpointDamaged(f"{subject}{error} {advice}") from error


def _report_extra_state(checkpoint: Checkpoint, module: str | None) -> None:
    prefix = "" if module is None else f"{module}."
    if found := [name for name in checkpoint.state.get("extra_state", ()) if f"{name}.".startswith(prefix)]:
        _log.warning(
            "%s: the value of get_extra_state is not a tensor and is left out; load_state_dict needs strict=False",
            ", ".join(name or "the task" for name in sorted(found)),
        )


def _map_stored_names(checkpoint: Checkpoint, module: str | None) -> dict[str, str]:
    """Return the stored name of each tensor to write, by its name in the output, as in a model without compilation."""
    saved = {name: name for name in checkpoint.list_tensor_names("model")} | checkpoint.aliases
    stored = {name.replace(f"{WRAPPED_NAME}.", ""): source for name, source in saved.items()}
    prefix = "" if module is None else f"{module}."
    chosen = {name.removeprefix(prefix): stored[name] for name in stored if name.startswith(prefix)}
    if module is not None and not chosen:
        modules = sorted({name.partition(".")[0] for name in stored if "." in name})
        known = ", ".join(modules)
        raise ConfigError(f"--module {module}: {checkpoint.path} has no such module. Modules there: {known}.")
    return chosen


# ---------------------------------------------------------------------- output


def _check_output(output: Path, max_shard_bytes: int | None) -> None:
    """Raise early if the output cannot be written."""
    if output.suffix in PICKLE_SUFFIXES:
        raise ConfigError(f"--output {output}: export writes no pickles. Name a .safetensors file or a directory.")
    if max_shard_bytes is not None and output.suffix == _ONE_FILE:
        raise ConfigError(f"--output {output}: --max_shard_size may make several files. Name a directory.")
    check_output_free(output, f"--output {output}")


@contextmanager
def _make_temporary_directory(output: Path) -> Iterator[Path]:
    """Create a temporary directory next to the output. A lock shows other exports that the directory is in use."""
    _remove_leftovers(output)
    temporary = make_temporary_path(output)
    try:
        temporary.mkdir()
        descriptor = os.open(temporary, os.O_DIRECTORY)
    except OSError as error:
        with suppress(OSError):
            temporary.rmdir()
        reason = f"{output.parent} is not writable: {error.strerror}. Choose another directory."
        raise ConfigError(f"--output {output}: {reason}") from error
    try:
        with suppress(OSError):  # Without locks, left-over directories stay.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def _remove_leftovers(output: Path) -> None:
    """Remove temporary directories of killed exports. Directories with any other content stay."""
    left_over = re.compile(rf"{re.escape(output.name)}\.tmp-[0-9a-f]{{8}}")
    with suppress(OSError):
        for path in [path for path in output.parent.iterdir() if left_over.fullmatch(path.name)]:
            with suppress(OSError):
                _remove_leftover(path, output.name)


def _remove_leftover(path: Path, name: str) -> None:
    descriptor = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another export writes to the directory
        files = [*path.iterdir()]
        known = (file.name == name or _FILES.fullmatch(file.name) for file in files)
        if files and all(known) and all(file.is_file() and not file.is_symlink() for file in files):
            for file in files:
                file.unlink()
            path.rmdir()
    finally:
        os.close(descriptor)


def _write_files(
    temporary: Path,
    output: Path,
    tensors: Mapping[str, torch.Tensor],
    value: Callable[[str], torch.Tensor],
    max_shard_bytes: int | None,
) -> list[str]:
    """Write all files to a temporary directory, rename them, and return the names of the safetensors files."""
    groups = _split_into_files(tensors, math.inf if max_shard_bytes is None else max_shard_bytes)
    files = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    if len(groups) == 1:
        files = [output.name if output.suffix == _ONE_FILE else SINGLE]
    for file, group in zip(files, groups, strict=True):
        write_safetensors(temporary / file, group, value)
    if len(groups) > 1:
        weight_map = {name: file for file, group in zip(files, groups, strict=True) for name in group}
        index = {
            "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
            "weight_map": weight_map,
        }
        with create_hashed_file(temporary / INDEX) as writer:
            writer.write(json.dumps(index, indent=2, sort_keys=True).encode() + b"\n")
    with explain_storage_errors("write", output):
        fsync_directory(temporary)
        _check_output(output, max_shard_bytes)  # Another process may have created the output meanwhile.
        os.rename(temporary / files[0] if output.suffix == _ONE_FILE else temporary, output)
        fsync_directory(output.parent)
    return files


def _split_into_files(tensors: Mapping[str, torch.Tensor], max_bytes: float) -> list[dict[str, torch.Tensor]]:
    """Return the tensors of each file, in order."""
    groups: list[dict[str, torch.Tensor]] = [{}]
    left = max_bytes
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > left:
            groups.append({})
            left = max_bytes
        groups[-1][name] = tensor
        left -= tensor.nbytes
    return groups


def _make_meta_tensor(checkpoint: Checkpoint, name: str, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a meta tensor of the dtype and shape to write."""
    saved, shape = checkpoint.get_spec("model", name)
    castable = saved.is_floating_point and saved != _PACKED
    written = dtype if dtype is not None and castable else saved
    if not is_supported_dtype(written):
        raise CheckpointMismatch(
            f"{checkpoint.path}: {name} is {written}, which safetensors files cannot store"
            + (". Set --dtype." if castable else ". Leave the tensor out with --module.")
        )
    return torch.empty(shape, dtype=written, device="meta")


def _cast_tensor(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a tensor, and log how many values overflow in the new dtype."""
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if cast.numel() and not torch.stack(cast.aminmax()).isfinite().all():
        exact = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 lacks some operators in torch
        if lost := int((exact.isfinite() & ~cast.isfinite()).sum()):
            _log.warning("%s: %d numbers are too large for %s and became infinite", name, lost, dtype)
    return cast
