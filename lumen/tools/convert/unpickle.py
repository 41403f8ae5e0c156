"""Conversion of a pickle's tensors to safetensors, in a separate process.

No other module reads pickles. The subprocess uses torch's `weights_only` reader, which builds tensors and plain data
and calls nothing that the file names. The parent process reads the answer of the subprocess as JSON. The size of the
file bounds the memory, the CPU time and the output of the subprocess. The subprocess ends when its parent ends.
"""

from __future__ import annotations

import json
import re
import resource
import select
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, final

import torch

from lumen.checkpoint.format.safetensors_file import is_supported_dtype, write_safetensors
from lumen.checkpoint.format.storage import make_temporary_path
from lumen.checkpoint.load.weights_source import unwrap_names
from lumen.console import format_bytes
from lumen.distributed.worker import end_with_parent
from lumen.errors import CheckpointError, ConfigError
from lumen.internals.compiler import WRAPPED_NAME
from lumen.internals.interpreters import make_python_command
from lumen.internals.tensors import EXTRA_STATE
from lumen.tools.terminal import check_output_free

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")  # the keys in Lightning's checkpoints
_REFUSED_TYPES = re.compile(r"GLOBAL ([\w.]+)|Unsupported (?:class|type) ([\w.]+)")
_MIN_S, _MIN_BYTES = 60, 2**30  # for the smallest file; larger files may take more
_MAX_CHARACTERS, _MAX_DEPTH = 1_000_000, 50  # A small pickle can repeat hyperparameters endlessly.


@final
@dataclass(frozen=True)
class Request:
    """Selection of the tensors to convert from a pickle.

    Args:
        key: Key of the dictionary of tensors in the pickle, or None to search for the dictionary.
        module: Name of a submodule, or None. Only its tensors are taken, by their names in the submodule.
        rename: Regular expressions and the replacements of their matches in names, as in `Weights.rename`.
    """

    key: str | None = None
    module: str | None = None
    rename: dict[str, str] | None = None


@final
@dataclass(frozen=True)
class Converted:
    """Summary of a conversion.

    Attributes:
        key: Key of the dictionary of tensors in the pickle, or "" if the whole pickle is that dictionary.
        dtypes: Number of tensors by the name of their dtype.
        tensor_bytes: Bytes of all tensors together.
        unwrapped: The old and the new name of the first tensor that lost a wrapper's prefix; empty without such a
            tensor.
        left_out: Names in the dictionary whose values are not tensors.
        hyperparameters: The hyperparameters in a Lightning checkpoint that are plain data.
        not_plain: Names of the hyperparameters that are not plain data, or are too large.
    """

    key: str
    dtypes: dict[str, int]
    tensor_bytes: int
    unwrapped: list[str]
    left_out: list[str]
    hyperparameters: dict[str, Any]
    not_plain: list[str]


def convert_pickle(source: Path, output: Path, request: Request) -> Converted:
    """Write the tensors of a pickle as a safetensors file; another process reads the pickle.

    Args:
        source: A Lightning checkpoint, or a dictionary of tensors that `torch.save` has written.
        output: A path `*.safetensors` that does not exist. The file appears complete or not at all.
        request: The tensors to convert, and their new names.

    Raises:
        ConfigError: The output exists or cannot be created, or the pickle holds no such tensors.
        CheckpointError: Reading the pickle would run code that it names, or takes too much time or memory.
    """
    if not source.is_file():
        raise CheckpointError(f"there is no file {source}.")
    if output.suffix != ".safetensors":
        raise ConfigError(f"{output}: tensors are written as safetensors. Name a .safetensors file.")
    check_output_free(output, str(output))
    temporary = make_temporary_path(output)
    words = make_python_command(__name__, str(source), str(output), json.dumps(asdict(request)), str(temporary))
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    finally:
        temporary.unlink(missing_ok=True)  # The subprocess removes the file too, unless it was killed.
    answer = _read_answer(done.stdout)
    if "refused" in answer:
        raise CheckpointError(answer["refused"])
    if "wrong" in answer:
        raise ConfigError(answer["wrong"])
    if not answer:
        raise CheckpointError(f"{source} could not be read:\n{done.stderr.strip() or f'exit code {done.returncode}'}")
    return Converted(**answer)


def _read_answer(text: str) -> dict[str, Any]:
    """Return the answer in the last line of the subprocess's output; empty if the subprocess was killed."""
    with suppress(ValueError, IndexError):
        found = json.loads(text.splitlines()[-1])
        return found if isinstance(found, dict) else {}
    return {}


# ---------------------------------------------------------------------- in the subprocess


def main(source: str, output: str, request: str, temporary: str) -> None:
    """Convert a pickle, and print the summary or the error as one line of JSON.

    Args:
        source: Path of the pickle to read.
        output: Path of the safetensors file to create.
        request: A `Request` as JSON.
        temporary: An unused path in the same directory. The file is removed on return and on SIGTERM.
    """
    try:
        content = _read_pickle(Path(source))
        answer = asdict(_write_tensors(content, Path(source), Path(temporary), Request(**json.loads(request))))
        Path(output).hardlink_to(temporary)
    except FileExistsError:
        answer = {"wrong": f"{output}: the output exists, and Lumen overwrites nothing. Choose another name."}
    except (CheckpointError, ConfigError) as error:
        answer = {"wrong" if isinstance(error, ConfigError) else "refused": str(error)}
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError if memory is short.
        reason = str(error).partition("\n")[0] or type(error).__name__
        answer = {"refused": f"{source} cannot be converted: {reason}"}
    finally:
        Path(temporary).unlink(missing_ok=True)
    print(json.dumps(answer))


def limit_resources(source: Path) -> None:
    """Limit the memory and CPU time of this process by the size of a file, and end it with its parent."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # sys.exit makes `finally` blocks run.
    end_with_parent()
    answer = select.poll()
    answer.register(sys.stdout, 0)
    if answer.poll(0):  # The parent has ended already and reads no answer.
        sys.exit(128 + signal.SIGTERM)
    torch.set_num_threads(1)  # Each thread would reserve memory that it does not use.
    seconds = _MIN_S + source.stat().st_size // (10 * 2**20)
    signal.signal(signal.SIGXCPU, partial(_exit_with_error, source, seconds))
    _set_limit(resource.RLIMIT_CPU, seconds, seconds + 10)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        # Twice, because the tensors that were read and their copies exist at the same time.
        max_bytes = pages * resource.getpagesize() + 2 * _estimate_max_bytes(source)
        _set_limit(resource.RLIMIT_AS, max_bytes, max_bytes)


def _set_limit(kind: int, soft: int, hard: int) -> None:
    present = resource.getrlimit(kind)[1]
    hard = hard if present == resource.RLIM_INFINITY else min(hard, present)
    resource.setrlimit(kind, (min(soft, hard), hard))


def _exit_with_error(source: Path, seconds: int, number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # SIGXCPU is sent each second until the hard limit.
    raise CheckpointError(
        f"reading {source} takes more than {seconds} s of CPU time, too much for the size of the file. If you trust "
        "the file, save only the tensors: torch.save(model.state_dict(), FILE)."
    )


def _estimate_max_bytes(source: Path) -> int:
    """Return the most bytes of tensors to write. Tensors may share memory in a pickle, but not in safetensors."""
    return 4 * source.stat().st_size + _MIN_BYTES


def _read_pickle(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except CheckpointError:  # raised by `_exit_with_error`
        raise
    except Exception as error:
        message = str(error)
        if found := _REFUSED_TYPES.search(message):
            raise CheckpointError(
                f"{source} contains an object of {found[1] or found[2]}, but Lumen runs no code that a file names. If "
                "you trust the file, save only the tensors: torch.save(model.state_dict(), FILE)."
            ) from error
        reason = (message.splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{source} is not a readable file of torch.save: {reason}") from error


def _write_tensors(content: Any, source: Path, output: Path, request: Request) -> Converted:
    key, found = _find_tensors(content, source, request.key)
    short = {name: name for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not (request.module or request.rename):  # Both refer to the names in the file.
        short = unwrap_names(short)
    names = {name: _rename_tensor(each, request) for name, each in short.items()}
    tensors = {new: found[name].detach() for name, new in names.items() if new is not None}
    if not tensors:
        parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise ConfigError(f"--module {request.module}: {source} has no such module. Modules in the file: {parts}.")
    if len(tensors) < sum(new is not None for new in names.values()):
        repeated = [new for new, count in Counter(names.values()).items() if count > 1 and new is not None]
        raise ConfigError(f"--rename: several tensors would be called {repeated[0]}. Change the pattern.")
    for name, tensor in tensors.items():
        if not is_supported_dtype(tensor.dtype) or tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
            kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            raise ConfigError(
                f"{source}: {name} is a {kind}, which safetensors files cannot store. Leave the tensor out."
            )
    if (total := sum(tensor.nbytes for tensor in tensors.values())) > _estimate_max_bytes(source):
        widest = max(tensors, key=lambda name: tensors[name].nbytes)
        raise CheckpointError(
            f"{source} has {format_bytes(source.stat().st_size)}, but its tensors have {format_bytes(total)} without "
            f"shared memory ({widest}: {format_bytes(tensors[widest].nbytes)}). Lumen writes at most "
            f"{format_bytes(_estimate_max_bytes(source))}. Choose fewer tensors by --module, or save the file without "
            "expanded and repeated tensors."
        )
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_safetensors(output, tensors)
    plain, not_plain = _get_plain_hyperparameters(content)
    dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()))
    changed = next(([name, each] for name, each in short.items() if each != name), [])
    return Converted(key, dtypes, total, changed, [name for name in found if name not in names], plain, not_plain)


def _find_tensors(content: Any, source: Path, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the key of the dictionary of tensors in a pickle, and the dictionary."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds a {type(content).__name__}, expected a dictionary of tensors.")
    parts = {name: value for name, value in content.items() if not str(name).endswith(EXTRA_STATE)}
    inside = {name: value for name, value in parts.items() if isinstance(value, Mapping) and _holds_tensors(value)}
    if key is not None:
        if key not in inside:
            raise ConfigError(f"--key {key}: no tensors found. {_describe_location(inside)}")
        return key, inside[key]
    if not inside and _holds_tensors(content):
        return "", content
    if "state_dict" in inside or len(inside) == 1:
        key = "state_dict" if "state_dict" in inside else next(iter(inside))
        return key, inside[key]
    raise ConfigError(f"{source}: the choice of tensors is ambiguous. {_describe_location(inside)}")


def _holds_tensors(value: Mapping[Any, Any]) -> bool:
    has_names = all(isinstance(name, str) for name in value)
    return has_names and any(isinstance(each, torch.Tensor) for each in value.values())


def _describe_location(inside: Mapping[str, Any]) -> str:
    return f"Set --key to one of {', '.join(inside)}." if inside else "The file has no dictionary of tensors."


def _rename_tensor(name: str, request: Request) -> str | None:
    """Return the new name of a tensor, or None if the tensor is not requested."""
    prefix = f"{request.module}." if request.module else ""
    name = name.replace(f"{WRAPPED_NAME}.", "")
    if not name.startswith(prefix):
        return None
    name = name.removeprefix(prefix)
    for pattern, replacement in (request.rename or {}).items():
        name = re.sub(pattern, replacement, name)
    return name


def _get_plain_hyperparameters(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the hyperparameters that JSON can hold, and the names of the others."""
    parts = {key: content[key] for key in _HYPERPARAMETERS if content.get(key)}
    not_plain = [key for key, part in parts.items() if not isinstance(part, Mapping)]
    found = {name: value for key, part in parts.items() if key not in not_plain for name, value in part.items()}
    plain, left = {}, _MAX_CHARACTERS
    for name, value in found.items():
        try:
            left = _count_left_characters(value, left)
            plain[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            not_plain.append(str(name))
    return plain, not_plain


def _count_left_characters(value: Any, left: int, depth: int = 0) -> int:
    """Return the characters left of a budget after a value. A pickle may repeat one part of a value many times.

    Raises:
        ValueError: The value exceeds the budget, or is nested too deeply.
    """
    left -= len(value) if isinstance(value, str) else 1
    if left < 0 or depth > _MAX_DEPTH:
        raise ValueError
    inside = [*value, *value.values()] if isinstance(value, Mapping) else value
    for each in inside if isinstance(inside, list | tuple) else ():
        left = _count_left_characters(each, left, depth + 1)
    return left


if __name__ == "__main__":
    limit_resources(Path(sys.argv[1]))
    main(*sys.argv[1:])
