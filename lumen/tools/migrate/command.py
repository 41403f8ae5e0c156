"""The command `lumen migrate`: reads a project, shows or makes the edits, and lists the places to check by hand."""

from __future__ import annotations

import ast
import difflib
import io
import os
import re
import tokenize
import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, final

import yaml

from lumen.cli.commands import CommandParser
from lumen.console import console, stderr, stdout
from lumen.errors import ConfigError
from lumen.tools.migrate import COMMAND
from lumen.tools.migrate.config import ConfigEditor, find_config_groups
from lumen.tools.migrate.names import FileNames
from lumen.tools.migrate.notebook import Notebook
from lumen.tools.migrate.project import ParsedFile, ProjectClasses, find_unsaved, list_files
from lumen.tools.migrate.python import FileEditor, iterate_used_names
from lumen.tools.migrate.source import MigrationNote
from lumen.tools.migrate.texts import ANY_LIGHTNING, edit_commands_of_pip, edit_text
from lumen.tools.migrate.transformers import TrainerEditor, uses_trainer
from lumen.tools.terminal import format_count, make_table_console

_DESCRIPTION = (
    "The command prints the edits as a diff for `git apply`, and on stderr the places to check by hand, with file and "
    "line. Exit code: 0; 1 if some files could not be read; 2 if nothing was done, because the command line is wrong "
    "or git could not undo the edits. Only --check runs code of the project, in copies. Its exit code: 0 if all losses "
    "are equal; 1 if not; 2 if the projects cannot be compared."
)
_LOGGERS = re.compile(r"\b[A-Z]\w*Logger\b")
_COLOURS = {"+": "green", "-": "red", "@": "cyan"}


@final
class MigratedFile(NamedTuple):
    """Edits of one file.

    Attributes:
        path: Path of the file.
        before: The present text.
        after: The text with all edits.
        encoding: The encoding of the file.
        notes: Notes on lines that the user has to check.
        problem: Reason why the file could not be read, or None.
    """

    path: Path
    before: str = ""
    after: str = ""
    encoding: str = "utf-8"
    notes: tuple[MigrationNote, ...] = ()
    problem: str | None = None


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser("migrate", COMMAND, "PATH [--write | --check -- COMMAND ...]", _DESCRIPTION)
    parser.add_argument("path", metavar="PATH", help="A project's directory, or one file.")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--write", action="store_true", help="Write the edits. Git must be able to undo the edits.")
    parser.add_argument("--force", action="store_true", help="Write the edits even if git could not undo the edits.")
    actions.add_argument("--check", action="store_true", help="Compare the first steps of the project and of the "
                        "migrated project, which COMMAND trains in copies.")  # fmt: skip
    parser.add_argument("--original", metavar="PATH", help="The project before edits that you have written.")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="Optimizer steps to compare. Default: 10.")
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="Longest time of each training, "
                        "in seconds. Default: 600.")  # fmt: skip
    return parser


def run(words: list[str]) -> int:
    """Show, make or check the edits, and return the exit code."""
    words, *commands = [[*group] for is_end, group in groupby(words, "--".__eq__) if not is_end] or [[]]
    arguments = options().read(words)
    if arguments.check:
        from lumen.tools.migrate.check import check_project  # imported only here, because it imports torch

        return check_project(arguments, commands, _migrate_copy)
    if commands:
        raise ConfigError("the command after `--` is only for --check. Add --check, or leave the command out.")
    path = Path(os.path.expanduser(arguments.path))
    found = migrate_project(path)
    edited = [each for each in found if each.after != each.before]
    if arguments.write:
        _write_edits(edited, force=arguments.force)
    else:
        for each in edited:
            _print_diff(_iterate_diff(each, _format_path(each.path, path)))
    _print_report(found, edited, path, written=arguments.write)
    return int(any(each.problem for each in found))


def _migrate_copy(path: Path) -> list[str]:
    """Migrate a project in place, and return its notes."""
    found = migrate_project(path)
    _write_edits([each for each in found if each.after != each.before], force=True)
    return [f"{each.path.relative_to(path)}:{note.line}: {note.sentence}" for each in found for note in each.notes]


def migrate_project(path: Path) -> list[MigratedFile]:
    """Return the edits of all files of a project that use Lightning.

    Args:
        path: Directory of the project, or one file.

    Raises:
        ConfigError: The path does not exist.
    """
    python: dict[Path, tuple[ParsedFile, str, Notebook | None]] = {}
    found: list[MigratedFile] = []
    rest: list[tuple[Path, str, str]] = []
    files = list_files(path)
    own = {file.relative_to(path).with_suffix("").parts[0] for file in files if file.suffix == ".py" and file != path}
    for file in files:
        try:
            text, encoding = _read_file(file)
            is_meant = file.suffix == ".ipynb" and (ANY_LIGHTNING.search(text) or "TrainingArguments" in text)
            notebook = Notebook(text) if is_meant else None
            if file.suffix in (".py", ".pyi") or notebook is not None:
                code = text if notebook is None else notebook.code
                tree = ast.parse(code)
                python[file] = (ParsedFile(code, tree, FileNames(tree, own)), encoding, notebook)
            elif file.suffix != ".ipynb":
                rest.append((file, text, encoding))
        except RecursionError:
            found.append(MigratedFile(file, problem="the file is nested too deeply."))
        except SyntaxError as error:
            found.append(MigratedFile(file, problem=f"line {error.lineno or 1}: not valid Python: {error.msg}."))
        except (OSError, UnicodeError, ValueError) as error:
            found.append(MigratedFile(file, problem=f"the file cannot be read: {error}."))
    modules = {part for file in python for part in file.with_suffix("").parts}
    classes = ProjectClasses((parsed for parsed, *_ in python.values()), modules)
    used = frozenset(name for parsed, *_ in python.values() for name in iterate_used_names(parsed.tree))
    used |= {name for _, text, _ in rest for name in _LOGGERS.findall(text)}
    for file, (parsed, encoding, notebook) in python.items():
        is_other = uses_trainer(parsed) and not parsed.names.all_bindings
        editor = TrainerEditor(parsed) if is_other else FileEditor(parsed, classes, used)
        after, notes = editor.edit()
        before, problem = parsed.text, _find_syntax_error(after)
        if problem is not None:
            found.append(MigratedFile(file, problem=f"the edits would not be valid Python: {problem}."))
            continue
        if notebook is not None:
            notes = [note._replace(line=notebook.find_cell(note.line)) for note in notes]
            before, after = notebook.write(before), edit_commands_of_pip(notebook.write(after))
        found.append(MigratedFile(file, before, after, encoding, tuple(notes)))
    groups = find_config_groups((file, text) for file, text, _ in rest if file.suffix in (".yaml", ".yml"))
    uses_lightning = bool(groups) or any(parsed.names.all_bindings for parsed, *_ in python.values())
    imported = {full.split(".")[0] for parsed, *_ in python.values() for full in parsed.names.imported.values()}
    for file, text, encoding in rest:
        if uses_lightning or ANY_LIGHTNING.search(text):
            edited = _migrate_other(file, text, classes, groups, uses_torchmetrics="torchmetrics" in imported)
            found.append(edited._replace(before=text, encoding=encoding))
    return sorted(each for each in found if each.problem or each.notes or each.after != each.before)


def _find_syntax_error(text: str) -> str | None:
    """Return the error in a Python text, or None."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "edited", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno or 1}: {error.msg}"
    return None


def _migrate_other(
    file: Path, text: str, classes: ProjectClasses, groups: Mapping[str, str], *, uses_torchmetrics: bool
) -> MigratedFile:
    """Return the edits of a file that is not Python."""
    if file.suffix in (".yaml", ".yml"):
        try:
            after, notes = ConfigEditor(text, classes).edit(groups, file.parent.name)
        except yaml.YAMLError as error:
            problem = f"not valid YAML: {getattr(error, 'problem', None) or error}."
            return MigratedFile(file, after=text, problem=problem if ANY_LIGHTNING.search(text) else None)
        if notes or after != text:
            return MigratedFile(file, after=after, notes=tuple(notes))
    after, notes = edit_text(file, text, uses_torchmetrics=uses_torchmetrics)
    return MigratedFile(file, after=after, notes=tuple(notes))


def _read_file(file: Path) -> tuple[str, str]:
    """Return the text of a file, with its line endings unchanged, and its encoding."""
    content, encoding = file.read_bytes(), "utf-8"
    if file.suffix in (".py", ".pyi"):
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
    elif content.startswith(b"\xef\xbb\xbf"):
        encoding = "utf-8-sig"
    return content.decode(encoding), encoding


def _write_edits(edited: list[MigratedFile], *, force: bool) -> None:
    """Write the edited files.

    Raises:
        ConfigError: Git could not undo the edits, and `force` is False; or a file cannot be written.
    """
    lost = {} if force else find_unsaved(each.path for each in edited)
    if lost:
        lines = "\n".join(f"  {file} {reason}" for file, reason in lost.items())
        raise ConfigError(
            f"nothing was written, because git could not undo the edits:\n{lines}\nCommit first, or add --force."
        )
    for each in edited:
        try:
            each.path.open("r+b").close()
        except OSError as error:
            raise ConfigError(f"nothing was written: {error}. Make the file writable.") from None
    for each in edited:
        each.path.write_bytes(each.after.encode(each.encoding))


def _format_path(file: Path, path: Path) -> str:
    """Return the path of a file for messages and diffs, relative to the working directory or to the project."""
    relative = os.path.relpath(file)
    inside = not relative.startswith("..")
    return Path(relative if inside else os.path.relpath(file, path if path.is_dir() else path.parent)).as_posix()


def _iterate_diff(each: MigratedFile, name: str) -> Iterator[str]:
    """Yield the lines of a unified diff for `git apply`."""
    before, after = (io.StringIO(text, newline="\n").readlines() for text in (each.before, each.after))
    for line in difflib.unified_diff(before, after, f"a/{name}", f"b/{name}"):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _print_diff(lines: Iterable[str]) -> None:
    if not stdout.isatty():
        for line in lines:
            print(line, end="", file=stdout)
        return
    from rich.text import Text

    terminal = make_table_console()
    for line in lines:
        style = "bold" if line.startswith(("---", "+++")) else _COLOURS.get(line[0], "")
        terminal.print(Text(line, style), end="", soft_wrap=True)


def _print_report(found: list[MigratedFile], edited: list[MigratedFile], path: Path, *, written: bool) -> None:
    """Print the notes, the problems and a summary to stderr."""
    places: dict[str, list[str]] = {}
    for each in found:
        for note in each.notes:
            number = f"cell {note.line}" if each.path.suffix == ".ipynb" else note.line
            places.setdefault(note.sentence, []).append(f"{_format_path(each.path, path)}:{number}")
    if stdout.isatty() and stderr.isatty() and edited and not written:
        print(file=stderr)
    if places:
        print("To check by hand:", file=stderr)
    for sentence, where in places.items():
        _print_sentence(where[0], sentence)
        if where[1:]:
            _print_sentence("    also", ", ".join(where[1:]), style="")
    for each in found:
        if each.problem:
            _print_sentence(_format_path(each.path, path), f"not edited: {each.problem}", style="bold red")
    lines = sum(line.startswith(("+", "-")) and not line.startswith(("+++", "---"))
                for each in edited for line in _iterate_diff(each, ""))  # fmt: skip
    summary = (
        f"{format_count(len(edited), 'file')}, {format_count(lines, 'line')} of the diff; "
        if edited
        else "nothing to edit"
    )
    end = "" if not edited else "written" if written else "`--write` makes these edits"
    print(f"{summary}{end}; {format_count(sum(map(len, places.values())), 'place')} to check by hand", file=stderr)


def _print_sentence(where: str, sentence: str, style: str = "bold") -> None:
    from rich.text import Text

    console.print(Text.assemble((f"{where}: ", style), sentence), soft_wrap=True)
