"""Interactive shells in a new terminal, with the completion of `lumen`."""

import os
import pty
import re
import select
import shutil
import signal
import sys
import time

import pytest

_READY = "ready-for-words "
_BEGIN = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "PS1='ready-for-''words '; source {script}\n"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "unsetopt zle_bracketed_paste; autoload -Uz compinit; compinit -u -D; source {script}; "
        "PS1='ready-for-''words '\n",
    ),
    "fish": (
        ["fish", "--no-config", "-i"],
        "source {script}; function fish_prompt; echo -n 'ready-for-''words '; end; clear\n",
    ),
}
_SHOW = "\x01echo '<\x05>'\r"  # escape sequences around the line
_LIMIT_S = 30


def complete_line(shell, typed, folder, script):
    """Return the line after the keys of `typed`, TABs among them, as the shell shows it."""
    words, begin = _BEGIN[shell]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "lumen").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lumen "$@"\n')
    (programs / "lumen").chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "TERM": "xterm", "HOME": str(folder), "COLUMNS": "200",
    }  # fmt: skip
    process, ours = pty.fork()  # with a controlling terminal, which fish needs
    if process == 0:
        os.chdir(folder)
        os.execvpe(words[0], words, environment)
    try:
        os.write(ours, begin.format(script=script).encode())
        _read_until(ours, re.compile(re.escape(_READY)))
        os.write(ours, (typed + _SHOW).encode())
        return _read_until(ours, re.compile(r"<([^<>]*)>\r?\n"), ends=_READY)[1]
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(ours)


def _read_until(terminal, pattern, ends=""):
    """Read the terminal up to a pattern that is followed by some text; return its first match."""
    text, end = "", time.monotonic() + _LIMIT_S
    while time.monotonic() < end:
        if select.select([terminal], [], [], 1)[0]:
            text += os.read(terminal, 65536).decode(errors="replace")
        for match in pattern.finditer(text):
            if ends in text[match.end() :]:
                return match
    raise AssertionError(f"{pattern.pattern} did not come in {_LIMIT_S} s: {text!r}")
