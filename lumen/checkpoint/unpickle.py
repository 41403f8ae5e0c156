"""Reads the tensors of a pickle and writes them as safetensors, in a process that does nothing else.

It is the one module that reads a pickle: by torch's `weights_only` reader, which builds tensors and plain data and
calls nothing that the file names. The process that asks for it reads its answer as JSON.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import torch

from lumen.checkpoint.safetensors_file import is_known, write_safetensors
from lumen.checkpoint.storage import temporary_name
from lumen.checkpoint.weights_source import unwrapped
from lumen.errors import CheckpointError, ConfigError
from lumen.internals.compiler import WRAPPED

_HYPERPARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")  # of Lightning
_EXTRA_STATE = "_extra_state"  # the name that torch gives to what a module's `get_extra_state` returns
_REFUSED = re.compile(r"GLOBAL ([\w.]+)|Unsupported (?:class|type) ([\w.]+)")


@final
@dataclass(frozen=True)
class Request:
    """What to take from a pickle.

    Args:
        key: Where in it the tensors are; None: they are looked for.
        module: Take those of this part alone, by their names in it.
        rename: Patterns and what replaces their matches in names, as `Weights.rename` has them.
    """

    key: str | None = None
    module: str | None = None
    rename: dict[str, str] | None = None


@final
@dataclass(frozen=True)
class Converted:
    """What was taken from a pickle.

    Attributes:
        key: Where in it the tensors were; "" for the whole.
        dtypes: Number of tensors of each dtype, by its name.
        tensor_bytes: Bytes of all tensors together.
        unwrapped: The first name from which a wrapper's was removed, and what became of the name; empty if none was.
        left_out: Names next to the tensors' that are no tensors.
        hyperparameters: What Lightning's checkpoints hold of them, as far as it is plain data.
        not_plain: Names of the hyperparameters that are not.
    """

    key: str
    dtypes: dict[str, int]
    tensor_bytes: int
    unwrapped: list[str]
    left_out: list[str]
    hyperparameters: dict[str, Any]
    not_plain: list[str]


def convert(source: Path, output: Path, request: Request) -> Converted:
    """Write the tensors of a pickle as a safetensors file; another process reads the pickle.

    Args:
        source: A checkpoint of Lightning's, or a dictionary of tensors that `torch.save` has written.
        output: A file `*.safetensors`. It must not exist; it is there completely or not at all.
        request: Which tensors, and how they are to be called.

    Raises:
        ConfigError: The output exists or cannot be created, or the pickle holds no such tensors.
        CheckpointError: The pickle cannot be read without running code that it names.
    """
    if not source.is_file():
        raise CheckpointError(f"there is no file {source}.")
    if output.suffix != ".safetensors":
        raise ConfigError(f"{output}: tensors are written as safetensors. Name a .safetensors file.")
    if not output.parent.is_dir():
        raise ConfigError(f"{output}: there is no directory {output.parent}. Create it.")
    if output.exists():
        raise ConfigError(f"{output}: it exists, and nothing is overwritten. Choose another name.")
    temporary = temporary_name(output)
    words = [sys.executable, "-m", __name__, str(source), str(temporary), json.dumps(asdict(request))]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        answer = _answer(done.stdout)
        if "refused" in answer:
            raise CheckpointError(answer["refused"])
        if "wrong" in answer:
            raise ConfigError(answer["wrong"])
        if not answer:
            raise CheckpointError(
                f"{source} could not be read:\n{done.stderr.strip() or f'exit code {done.returncode}'}"
            )
        output.hardlink_to(temporary)
    except FileExistsError:
        raise ConfigError(f"{output}: it exists, and nothing is overwritten. Choose another name.") from None
    finally:
        temporary.unlink(missing_ok=True)
    return Converted(**answer)


def _answer(text: str) -> dict[str, Any]:
    """What the other process has said, in its last line; nothing if it was killed."""
    try:
        found = json.loads(text.splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------- in the other process


def main(source: str, output: str, request: str) -> None:
    """Read, write, and say in one line of JSON what was done or what is wrong."""
    try:
        content = _read(Path(source))
        answer = asdict(_write(content, Path(source), Path(output), Request(**json.loads(request))))
    except CheckpointError as error:
        answer = {"refused": str(error)}
    except ConfigError as error:
        answer = {"wrong": str(error)}
    print(json.dumps(answer))


def _read(source: Path) -> Any:
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except Exception as error:
        said = str(error)
        if found := _REFUSED.search(said):
            raise CheckpointError(
                f"{source} asks for {found[1] or found[2]}, to make an object of its own, but no code that a file "
                "names is run. Where it is trusted, save its tensors alone: torch.save(model.state_dict(), FILE)."
            ) from error
        why = (said.splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{source} cannot be read as torch.save writes files: {why}") from error


def _write(content: Any, source: Path, output: Path, request: Request) -> Converted:
    key, found = _tensors(content, source, request.key)
    short = {name: name for name, value in found.items() if isinstance(value, torch.Tensor)}
    if not (request.module or request.rename):  # Both are written for the names that the file has.
        short = unwrapped(short)
    names = {name: _renamed(each, request) for name, each in short.items()}
    tensors = {new: found[name].detach() for name, new in names.items() if new is not None}
    if not tensors:
        parts = ", ".join(sorted({name.partition(".")[0] for name in names}))
        raise ConfigError(f"--module {request.module}: no tensor of {source} belongs to it. Its parts are {parts}.")
    if len(tensors) < sum(new is not None for new in names.values()):
        twice = [new for new, count in Counter(names.values()).items() if count > 1 and new is not None]
        raise ConfigError(f"--rename: several tensors would be called {twice[0]}.")
    for name, tensor in tensors.items():
        if not is_known(tensor.dtype) or tensor.layout != torch.strided or type(tensor) is not torch.Tensor:
            kind = f"{type(tensor).__name__} of {tensor.dtype}, {tensor.layout}"
            raise ConfigError(f"{source}: {name} is a {kind}, which safetensors files do not have. Leave it out.")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    write_safetensors(output, tensors)
    plain, not_plain = _hyperparameters(content)
    return Converted(
        key,
        dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values())),
        sum(tensor.nbytes for tensor in tensors.values()),
        next(([name, each] for name, each in short.items() if each != name), []),
        [name for name in found if name not in names],
        plain,
        not_plain,
    )


def _tensors(content: Any, source: Path, key: str | None) -> tuple[str, Mapping[str, Any]]:
    """The dictionary of tensors in a pickle, and where it is."""
    if not isinstance(content, Mapping):
        raise ConfigError(f"{source} holds a {type(content).__name__}, expected a dictionary of tensors.")
    inside = {
        name: value
        for name, value in content.items()
        if isinstance(value, Mapping) and _holds_tensors(value) and not str(name).endswith(_EXTRA_STATE)
    }
    if key is not None:
        if key not in inside:
            raise ConfigError(f"--key {key}: there are no tensors. {_there(inside)}")
        return key, inside[key]
    if not inside and _holds_tensors(content):
        return "", content
    if "state_dict" in inside or len(inside) == 1:
        key = "state_dict" if "state_dict" in inside else next(iter(inside))
        return key, inside[key]
    raise ConfigError(f"{source}: which tensors are meant is not clear. {_there(inside)}")


def _holds_tensors(value: Mapping[Any, Any]) -> bool:
    return all(isinstance(name, str) for name in value) and any(
        isinstance(each, torch.Tensor) for each in value.values()
    )


def _there(inside: Mapping[str, Any]) -> str:
    return f"Give --key, one of {', '.join(inside)}." if inside else "It holds no dictionary of names and tensors."


def _renamed(name: str, request: Request) -> str | None:
    """What a tensor is to be called; None: it is not asked for."""
    prefix = f"{request.module}." if request.module else ""
    name = name.replace(f"{WRAPPED}.", "")
    if not name.startswith(prefix):
        return None
    name = name.removeprefix(prefix)
    for pattern, replacement in (request.rename or {}).items():
        name = re.sub(pattern, replacement, name)
    return name


def _hyperparameters(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those that JSON can say, and the names of the others."""
    found = {name: value for key in _HYPERPARAMETERS for name, value in dict(content.get(key) or {}).items()}
    plain, others = {}, []
    for name, value in found.items():
        try:
            plain[str(name)] = json.loads(json.dumps(value, allow_nan=False))
        except (TypeError, ValueError):
            others.append(str(name))
    return plain, others


if __name__ == "__main__":
    main(*sys.argv[1:])
