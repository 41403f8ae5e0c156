"""`lumen export`: writes the weights of a checkpoint as plain safetensors, or its model in other formats."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lumen.cli.commands import CommandParser
from lumen.console import format_bytes, stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.tools.export import COMMAND
from lumen.tools.export.weights import Exported, export_weights
from lumen.trainer.logs import LogSettings, log_to_console

_DESCRIPTION = (
    "The file has the names of the task's state_dict, without the _orig_mod of compiled modules. Read the file by "
    "safetensors.torch.load_file. A tied tensor is written under each of its names. Checksums are verified first, and "
    "existing files are not overwritten."
)
FORMATS = ("torch-export", "onnx", "huggingface", "peft")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("export", COMMAND, "CHECKPOINT_OR_RUN --output FILE_OR_DIR [--KEY VALUE ...]", _DESCRIPTION)
    parser.add_argument("source", metavar="CHECKPOINT_OR_RUN", nargs="+", help="A checkpoint, a run (for its newest "
                        "valid checkpoint), weights as for trainer.init_from, or a URL. Several sources give the mean "
                        "of their floating-point tensors.")  # fmt: skip
    parser.add_argument("--output", required=True, metavar="FILE_OR_DIR", help="A .safetensors file, or a directory "
                        "with model.safetensors, as for model hubs. The output must not exist.")  # fmt: skip
    parser.add_argument("--which", choices=("last", "best"), default="last", help="Checkpoint of a run. Default: last.")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="Dtype of floating-point tensors. "
                        "Default: as saved.")  # fmt: skip
    parser.add_argument("--module", metavar="NAME", help="Export only this submodule of the task, such as net.")
    parser.add_argument("--average", metavar="NAME", help="Weights to export: parameters; EMA, SWA or another callback "
                        "that saves tensors by the parameters' names; Lookahead for the slow weights; last:5 or best:3 "
                        "for the mean of the newest five or best three checkpoints. Default: the weights that "
                        "validations evaluated, which are the average in a run with EMA or SWA.")  # fmt: skip
    parser.add_argument("--max_shard_size", metavar="SIZE", help="Largest size of a file, such as 5GB: write several "
                        "files and model.safetensors.index.json. Default: one file.")  # fmt: skip
    parser.add_argument("--format", choices=("safetensors", *FORMATS), default="safetensors", help="torch-export: a "
                        "program, FILE.pt2, for torch.export.load. onnx: FILE.onnx. huggingface: a directory that "
                        "from_pretrained reads. peft: only the adapter, for PeftModel.from_pretrained. These formats "
                        "build the model from the run's config and check the output.")  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="Merge adapters (LoRA), weight norm, spectral norm and "
                        "pruning masks into the weights, for a model without them. Builds the model from the run's "
                        "config. The format huggingface merges always.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Export the weights or the model, print a summary, and return 0."""
    arguments = options().read(words)
    output = expand_path(arguments.output)
    *more_sources, source = arguments.source
    if more_sources and arguments.average:
        count = len(arguments.source)
        raise ConfigError(f"--average {arguments.average}: expected one source, found {count}. Leave --average out.")
    if more_sources and arguments.which != "last":
        raise ConfigError(
            "--which best: expected one source. To average the best checkpoints of several runs, write the paths of "
            "the checkpoints. --average best:3 averages the best three checkpoints of one run."
        )
    average: Any = arguments.source if more_sources else arguments.average
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    settings: dict[str, Any] = {
        "which": arguments.which,
        "module": arguments.module,
        "average": average,
        "dtype": dtype,
    }
    with log_to_console(LogSettings("INFO")):
        if arguments.format != "safetensors" or arguments.merge:
            return _export_model(arguments, source, output, partial(export_weights, source, **settings))
        shard = _parse_bytes(arguments.max_shard_size) if arguments.max_shard_size else None
        exported = export_weights(source, output, **settings, max_shard_bytes=shard)
    _print_result(
        output, exported, arguments.dtype, f"the {len(arguments.source)} sources" if more_sources else arguments.average
    )
    return 0


def _export_model(arguments: Namespace, source: str, output: Path, weights: Callable[[Path], Exported]) -> int:
    from lumen.tools.export.formats import check_format, write_format  # a slow import

    if arguments.max_shard_size:
        raise ConfigError(
            f"--max_shard_size: only for --format safetensors without --merge, found {arguments.format}. Leave "
            "--max_shard_size out."
        )
    if arguments.merge and arguments.format == "peft":
        raise ConfigError("--format peft writes the adapter, not merged weights. Leave --merge out.")
    check_format(arguments.format, output)
    checked = write_format(arguments.format, source, output, arguments.module, weights, merge=arguments.merge)
    print(f"{output}: {arguments.format}, from {source}; {checked}", file=stdout)
    return 0


def _parse_bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) *([A-Za-z]*)", text)
    if found is None or found[2].upper() not in _UNITS or float(found[1]) == 0:
        raise ConfigError(f"--max_shard_size: expected a size such as 5GB or 500MB, found {text!r}.")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _print_result(output: Path, exported: Exported, dtype: str | None, average: str | None) -> None:
    kinds = {str(kind).removeprefix("torch."): number for kind, number in exported.dtypes.items()}
    total, by_kind = sum(kinds.values()), ", ".join(f"{number} {kind}" for kind, number in kinds.items())
    text = f"{total} tensors ({by_kind}), {format_bytes(exported.tensor_bytes)} in {len(exported.files)} files"
    print(f"{output}: {text.removesuffix(' in 1 files')}, from {exported.source}", file=stdout)
    if dtype and (unchanged := total - kinds.get(dtype, 0)):
        print(f"{unchanged} tensors without floating-point numbers are as saved", file=stdout)
    if exported.averaged:
        text = f"averages of {average}" if average else "averages, as validations evaluated"
        print(f"{exported.averaged} tensors are {text}; the others are as saved", file=stdout)
    for name, same in exported.tied.items():
        print(f"{name} is tied to {same} and is written under both names", file=stdout)
