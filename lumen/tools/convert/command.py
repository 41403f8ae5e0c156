"""`lumen convert`: writes the tensors of a Lightning checkpoint or a `torch.save` file as safetensors."""

from __future__ import annotations

import re

from lumen.cli.commands import CommandParser
from lumen.cli.yaml_text import dump_yaml
from lumen.console import format_bytes, stderr, stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.tools.convert import COMMAND
from lumen.tools.convert.unpickle import Converted, Request, convert_pickle

_DESCRIPTION = (
    "A separate process reads the pickle with torch's weights_only reader, which runs no code that the file names. "
    "Without --module and --rename, the prefixes of DDP (module.) and torch.compile (_orig_mod.) are removed from the "
    "names. Hyperparameters of Lightning's checkpoints are printed as YAML. trainer.init_from loads the output."
)


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("convert", COMMAND, "FILE OUTPUT [--KEY VALUE ...]", _DESCRIPTION)
    parser.add_argument("source", metavar="FILE", help="A .ckpt file of Lightning, or a .pt, .pth or .bin file.")
    parser.add_argument("output", metavar="OUTPUT", help="A .safetensors file that does not exist.")
    parser.add_argument(
        "--key", metavar="NAME", help="Key of the tensors in FILE. Default: state_dict, or the only key."
    )
    parser.add_argument("--module", metavar="NAME", help="Convert only this submodule, such as model.")
    parser.add_argument(
        "--rename",
        metavar="PATTERN=TEXT",
        action="append",
        default=[],
        help="Rename tensors as re.sub does; repeatable.",
    )
    return parser


def run(words: list[str]) -> int:
    """Convert the file, print a summary, and return 0."""
    arguments = options().read(words)
    output = expand_path(arguments.output)
    request = Request(arguments.key, arguments.module, dict(map(_parse_pair, arguments.rename)))
    _print_result(str(output), arguments.source, convert_pickle(expand_path(arguments.source), output, request))
    return 0


def _parse_pair(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.partition("=")
    if not equals:
        raise ConfigError(f"--rename {text}: write PATTERN=TEXT, such as ^model\\.=net.")
    try:
        re.sub(pattern, replacement, "")
    except re.error as error:
        raise ConfigError(f"--rename {text}: not a valid regular expression: {error}.") from error
    return pattern, replacement


def _print_result(output: str, source: str, found: Converted) -> None:
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.dtypes.items())
    origin = f"{source}, {found.key}" if found.key else source
    total = sum(found.dtypes.values())
    print(f"{output}: {total} tensors ({kinds}), {format_bytes(found.tensor_bytes)}, from {origin}", file=stderr)
    if found.unwrapped:
        name, short = found.unwrapped
        print(f"removed the prefixes of wrappers (DDP, torch.compile), such as {name} -> {short}", file=stderr)
    if found.left_out:
        print(f"left out, since they are no tensors: {', '.join(found.left_out)}", file=stderr)
    if found.not_plain:
        names = ", ".join(found.not_plain)
        print(f"hyperparameters not shown, since they are too large or no plain data: {names}", file=stderr)
    if found.hyperparameters:
        print(dump_yaml(found.hyperparameters), end="", file=stdout)
