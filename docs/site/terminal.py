"""Record a real session in a terminal as a picture: `python docs/site/terminal.py` writes docs/pictures/terminal.svg.

The session runs in tmux, on this machine, with the example of the digits.
"""

import re
import shlex
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs/pictures/terminal.svg"
COLUMNS, LINES = 96, 34
LIMIT_S = 600
SESSION = (
    "lumen fit --config models/digits.yaml --trainer.max_epochs 3",
    "lumen runs",
)
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34), (88, 166, 255), (188, 140, 255), (57, 197, 207),
     (177, 186, 196)],
)  # fmt: skip


def tmux(*words: str) -> str:
    """Run a command of tmux on a server of its own, and return its output."""
    command = ["tmux", "-L", "lumen-picture", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def record(directory: str) -> str:
    """Run the session in a directory, and return the screen with its escape sequences."""
    for name in ("models", "datamodules"):
        (Path(directory) / name).symlink_to(ROOT / name)
    python = shlex.quote(sys.executable)
    shell = f"cd {shlex.quote(directory)}; lumen() {{ {python} -m lumen \"$@\"; }}; PS1='$ '; clear"
    tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(LINES), "env", "-u", "NO_COLOR", f"PYTHONPATH={ROOT}",
         "bash", "--norc")  # fmt: skip
    try:
        tmux("send-keys", shell, "Enter")
        for command in SESSION:
            tmux("send-keys", f"{command}; tmux wait-for -S done", "Enter")
            subprocess.run(["tmux", "-L", "lumen-picture", "wait-for", "done"], check=True, timeout=LIMIT_S)
            time.sleep(0.5)  # The prompt is drawn after the command has ended.
        return tmux("capture-pane", "-p", "-e", "-J")
    finally:
        tmux("kill-server")


def draw(screen: str) -> str:
    """Return the picture of a screen, without fonts from the network."""
    lines = [line.replace("; tmux wait-for -S done", "") for line in screen.rstrip().splitlines()]
    if lines and lines[-1].strip() == "$":
        lines.pop()
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text.from_ansi(line), overflow="crop", no_wrap=True)
    picture = console.export_svg(title="lumen", theme=THEME)
    picture = re.sub(r"@font-face \{.*?\}\n?", "", picture, flags=re.S)
    return picture.replace("Fira Code", "ui-monospace")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PICTURE.write_text(draw(record(place)))
