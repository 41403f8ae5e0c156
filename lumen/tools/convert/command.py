"""`lumen convert`: writes the tensors of a Lightning checkpoint or a `torch.save` file as safetensors."""

from __future__ import annotations

import re

from lumen.cli.commands import Words
from lumen.cli.yaml_text import dump_yaml
from lumen.console import format_bytes, stderr, stdout
from lumen.errors import ConfigError
from lumen.errors.arguments import expand_path
from lumen.tools.convert import COMMAND
from lumen.tools.convert.unpickle import Converted, Request, convert_pickle

_MORE = (
    "A process of its own reads the pickle with torch's weights_only reader, which runs no code that the file names. "
    "The names lose what DDP (module.) and torch.compile (_orig_mod.) put before them, unless --module or --rename is "
    "given. Hyperparameters in Lightning's checkpoints are printed as YAML. trainer.init_from begins with the file."
)


def options() -> Words:
    """Return the parser of the command's options."""
    parser = Words("convert", COMMAND, "FILE OUTPUT [--KEY VALUE ...]", _MORE)
    parser.add_argument("source", metavar="FILE", help="A .ckpt of Lightning's, or a .pt, .pth or .bin.")
    parser.add_argument("output", metavar="OUTPUT", help="A .safetensors file. It must not exist.")
    parser.add_argument("--key", metavar="NAME", help="Where in FILE the tensors are. Default: state_dict, or found.")
    parser.add_argument("--module", metavar="NAME", help="Only this part, such as model, by its names in it.")
    parser.add_argument(
        "--rename", metavar="PATTERN=TEXT", action="append", default=[], help="As re.sub has it; may be repeated."
    )
    return parser


def run(words: list[str]) -> int:
    """Convert the file, print a summary, and return 0."""
    given = options().read(words)
    output = expand_path(given.output)
    request = Request(given.key, given.module, dict(map(_parse_pair, given.rename)))
    _print_result(str(output), given.source, convert_pickle(expand_path(given.source), output, request))
    return 0


def _parse_pair(text: str) -> tuple[str, str]:
    pattern, equals, replacement = text.partition("=")
    if not equals:
        raise ConfigError(f"--rename {text}: write PATTERN=TEXT, such as ^model\\.=net.")
    try:
        re.sub(pattern, replacement, "")
    except re.error as error:
        raise ConfigError(f"--rename {text}: it cannot be used as a regular expression: {error}.") from error
    return pattern, replacement


def _print_result(output: str, source: str, found: Converted) -> None:
    kinds = ", ".join(f"{number} {kind}" for kind, number in found.dtypes.items())
    where = f"{source}, {found.key}" if found.key else source
    total = sum(found.dtypes.values())
    print(f"{output}: {total} tensors ({kinds}), {format_bytes(found.tensor_bytes)}, from {where}", file=stderr)
    if found.unwrapped:
        name, short = found.unwrapped
        print(f"removed the names of wrappers (DDP, torch.compile), such as {name} -> {short}", file=stderr)
    if found.left_out:
        print(f"{', '.join(found.left_out)}: no tensors, and left out", file=stderr)
    if found.not_plain:
        said = "hyperparameters that are no plain data or too large, and not shown:"
        print(said, ", ".join(found.not_plain), file=stderr)
    if found.hyperparameters:
        print(dump_yaml(found.hyperparameters), end="", file=stdout)
