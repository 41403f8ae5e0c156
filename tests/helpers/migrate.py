"""The command `lumen migrate`, called in this process."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

from lumen.cli import main
from lumen.tools.migrate.command import migrate_project


def run_migrate(*words):
    """Run the command; return exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(["migrate", *map(str, words)])
    return code, out.getvalue(), err.getvalue()


def run_migrate_write(path, *words):
    code, out, err = run_migrate(path, "--write", *words)
    assert out == ""
    return code, err


def migrate_text(tmp_path, text, name="a.py"):
    """Return a file's text with its edits, and the notes."""
    path = tmp_path / name
    path.write_bytes(text.encode())
    found = migrate_project(path)
    return (found[0].after, [note.sentence for note in found[0].notes]) if found else (text, [])


def make_notebook(*sources, **layout):
    cells = [
        {"cell_type": "code", "execution_count": 1, "metadata": {}, "outputs": [],
         "source": source.splitlines(keepends=True)} for source in sources
    ]  # fmt: skip
    content = {"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, **{"indent": 1, "ensure_ascii": False} | layout) + "\n"
