"""`lumen export`: writes the weights of a checkpoint as plain safetensors, or its model in other formats."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lumen.cli.commands import Words
from lumen.console import format_bytes, stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.tools.export import COMMAND
from lumen.tools.export.weights import Exported, export_weights
from lumen.trainer.logs import LogSettings, log_to_console

_MORE = (
    "The file has the names of the task's state_dict and is read by safetensors.torch.load_file alone; a tied tensor "
    "is in it under each of its names. Checksums are verified first; nothing that exists is overwritten."
)
FORMATS = ("torch-export", "onnx", "huggingface")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def options() -> Words:
    """Return the parser of the command's options."""
    parser = Words("export", COMMAND, "CHECKPOINT_OR_RUN --output FILE_OR_DIR [--KEY VALUE ...]", _MORE)
    parser.add_argument("source", metavar="CHECKPOINT_OR_RUN", nargs="+", help="A checkpoint, a run (its newest valid "
                        "one), or weights as trainer.init_from takes them; a URL too. Of several, the mean of their "
                        "floating-point tensors.")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE_OR_DIR", help="A .safetensors file, or a directory "
                        "with model.safetensors as model hubs have it. It must not exist.")  # fmt: skip
    parser.add_argument("--which", choices=("last", "best"), default="last", help="Of a run. Default: last.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="Of floating-point tensors. "
                        "Default: as saved.")  # fmt: skip
    parser.add_argument("--module", metavar="NAME", help="Only this part of the task, such as net, by the names that "
                        "it has in it.")  # fmt: skip
    parser.add_argument("--average", metavar="NAME", help="parameters; EMA, SWA or another callback whose state holds "
                        "tensors by the parameters' names; Lookahead for its slow weights; last:5 for the mean of the "
                        "newest five checkpoints, best:3 for that of the best three. Default: what validations "
                        "evaluated, the average of a run with EMA or SWA.")  # fmt: skip
    parser.add_argument("--max_shard_size", metavar="SIZE", help="Such as 5GB: several files in the directory, with "
                        "model.safetensors.index.json. Default: one file.")  # fmt: skip
    parser.add_argument("--format", choices=("safetensors", *FORMATS), default="safetensors", help="torch-export: a "
                        "program, FILE.pt2, for torch.export.load. onnx: FILE.onnx. huggingface: a directory that "
                        "from_pretrained reads. These build the model by the run's config and check what they have "
                        "written.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Export the weights or the model, print a summary, and return 0."""
    given = options().read(words)
    output = expand_path(given.output)
    *others, source = given.source
    if others and given.average:
        said = f"{len(given.source)} sources are one mean already. Give one of them."
        raise ConfigError(f"--average {given.average}: {said}")
    average: Any = given.source if others else given.average
    dtype = getattr(torch, given.dtype) if given.dtype else None
    settings: dict[str, Any] = {"which": given.which, "module": given.module, "average": average, "dtype": dtype}
    with log_to_console(LogSettings("INFO")):
        if given.format != "safetensors":
            return _export_model(given, source, output, partial(export_weights, source, **settings))
        shard = _parse_bytes(given.max_shard_size) if given.max_shard_size else None
        exported = export_weights(source, output, **settings, max_shard_bytes=shard)
    _print_result(output, exported, given.dtype, f"the {len(given.source)} sources" if others else given.average)
    return 0


def _export_model(given: Namespace, source: str, output: Path, weights: Callable[[Path], Exported]) -> int:
    from lumen.tools.export.formats import check_format, write_format  # a slow import

    if given.max_shard_size:
        raise ConfigError(f"--max_shard_size: it is for --format safetensors, found {given.format}. Leave it out.")
    check_format(given.format, output)
    checked = write_format(given.format, source, output, given.module, weights)
    print(f"{output}: {given.format}, from {source}; {checked}", file=stdout)
    return 0


def _parse_bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise ConfigError(f"--max_shard_size: expected a size such as 5GB or 500MB, found {text!r}.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _print_result(output: Path, exported: Exported, dtype: str | None, average: str | None) -> None:
    kinds = {str(kind).removeprefix("torch."): number for kind, number in exported.dtypes.items()}
    total, by_kind = sum(kinds.values()), ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    what = f"{total} tensors ({by_kind}), {format_bytes(exported.tensor_bytes)} in {len(exported.files)} files"
    print(f"{output}: {what.removesuffix(' in 1 files')}, from {exported.source}", file=stdout)
    if dtype and (others := total - kinds.get(dtype, 0)):
        print(f"{others} of them hold no floating-point numbers and are as saved", file=stdout)
    if exported.averaged:
        what = f"averages of {average}" if average else "averages, as validations evaluated them"
        print(f"{exported.averaged} of them are {what}, the others are as saved", file=stdout)
    for name, same in exported.tied.items():
        print(f"{name} is tied to {same} and is written under both names", file=stdout)
