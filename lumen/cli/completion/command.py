"""`lumen completion`: a script that makes a shell complete the command line of `lumen`."""

from __future__ import annotations

from lumen.cli.parser import Words
from lumen.console import stdout
from lumen.errors.arguments import optional

_INSTALL = {
    "bash": "mkdir -p ~/.local/share/bash-completion/completions && lumen completion bash > "
    "~/.local/share/bash-completion/completions/lumen    # or source it in ~/.bashrc",
    "zsh": "lumen completion zsh > DIRECTORY/_lumen    # one of $fpath; or source it in ~/.zshrc, after compinit",
    "fish": "lumen completion fish > ~/.config/fish/completions/lumen.fish",
}
_MORE = (
    "Completed are commands, options, their values, config files, and directories of runs and checkpoints; of your own "
    "classes the arguments that their source names."
)


def options() -> Words:
    """The options of the command."""
    parser = Words("completion", "bash|zsh|fish", _MORE)
    parser.add_argument("shell", choices=(*_INSTALL,), help="Who is to complete.")
    return parser


def run(words: list[str]) -> int:
    """Print the script and return 0.

    Raises:
        ConfigError: There is no such shell, or argcomplete is not installed.
    """
    shell = options().read(words).shell
    script = optional("argcomplete", "lumen completion", "completion").shellcode(
        ["lumen"], shell=shell, use_defaults=False
    )
    first, _, rest = script.lstrip().partition("\n")  # zsh finds a script in $fpath by its first line
    print(first, f"# to install: {_INSTALL[shell]}", rest, sep="\n", end="", file=stdout)
    return 0
