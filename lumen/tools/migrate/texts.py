"""Edits of requirement files, shell scripts and other texts, and notes on the places to edit by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePath
from typing import Any

import yaml

from lumen.cli.classes import find_counterpart
from lumen.errors.lightning_names import LIGHTNING_PACKAGES
from lumen.tools.migrate.arguments import UNCHANGED, UNKNOWN, get_change
from lumen.tools.migrate.source import NOTES, EditableSource, MigrationNote
from lumen.version import DISTRIBUTION

ANY_LIGHTNING = re.compile(rf"\b({'|'.join(sorted(LIGHTNING_PACKAGES, reverse=True))})\b")
_CLASS = re.compile(rf"(?<![\w./-])({'|'.join(LIGHTNING_PACKAGES)})(\.\w+)+")
_NAME = r"(?:pytorch[-_]lightning|lightning)"
_VERSION = r"\s*(?:===?|[~!<>]=?)\s*[\w.*+!-]+"
_REQUIREMENT = re.compile(
    rf"(?<![\w/.-]){_NAME}(?P<extras>\[[\w, -]*\])?(?P<version>{_VERSION}(?:\s*,{_VERSION})*|\s*\([^)\n]*\))?"
    r"(?=$|[\s\"'<>=~!;,:\\])",
    re.M,
)
#: A dependency of Poetry, or of Pipenv: `lightning = "^2.0"`.
_KEY = re.compile(rf"{_NAME}\s*=\s*(?:\"[^\"\n]*\"|\{{[^}}\n]*\}})")
_OPTION = re.compile(r"--trainer\.(?P<name>\w+)(?P<separator>=|[ \t]+|$)(?P<value>(?!-)[^\s\\|;&)]+)?[ \t]*")
#: Texts that have another meaning in Lumen, with the note.
_MENTIONS = {
    re.compile(r"\.ckpt\b"): NOTES["checkpoint"],
    re.compile("lightning_logs"): NOTES["directory"],
    re.compile(r"\bPL_(TRAINER_|FIT__TRAINER__)\w+"): "{0}: write LUMEN_TRAINER__{1}.",
}
#: The text before and after a requirement without a version, which has a line of its own or is an item of a list.
_BEFORE, _AFTER = re.compile(r"(.*[\[,{=]|\s*-)?\s*([\w-]+::)?[\"']?"), re.compile(r"[\"']?\s*([],;}#=]|$)", re.M)
#: The end of a command: `&&`, `||`, or the end of a line without a backslash.
_COMMAND_END = re.compile(r"&&|\|\||(?<!\\)(?<!\\\r)\r?\n")
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.M | re.S)
_CODE_NOTE = "code for Lightning is not edited. Edit the code by hand, as in the diff."
_PACKAGE_NOTE = f"replace Lightning by {DISTRIBUTION}."
_CONDA_NOTE = f"{DISTRIBUTION} is on PyPI: list {DISTRIBUTION} under pip, in place of Lightning."
_METRICS_NOTE = "Lightning installs torchmetrics, and Lumen does not: add torchmetrics."
_SCRIPTS = (".sh", ".bash", ".slurm", ".sbatch", ".env")
_SCRIPT_NAMES = ("Makefile", "Dockerfile", "justfile", "Snakefile")


def edit_text(path: PurePath, text: str, *, uses_torchmetrics: bool) -> tuple[str, list[MigrationNote]]:
    """Return a text with all edits, and the notes.

    Args:
        path: Path of the file.
        text: Contents of the file.
        uses_torchmetrics: True if the project imports torchmetrics.
    """
    source, notes = EditableSource(text), set[MigrationNote]()

    def note(offset: int, sentence: str) -> None:
        notes.add(MigrationNote(source.get_line_number(offset), sentence))

    is_script = path.suffix in _SCRIPTS or path.name in _SCRIPT_NAMES
    for start, end in _iterate_spans(path, text):
        for offset, sentence in _edit_classes(source, start, end):
            note(offset, sentence)
        if is_script or path.suffix == ".md":
            for offset, sentence in _edit_commands(source, start, end):
                note(offset, sentence)
        if path.suffix == ".md":
            for found in re.finditer(r"^\s*(?:from|import) .*$", text[start:end], re.M):
                if ANY_LIGHTNING.search(found[0]):
                    note(start + found.start(), _CODE_NOTE)
        for offset, sentence in _edit_requirements(source, path, start, end):
            note(offset, sentence)
    text_after = source.apply_edits()
    is_list = not is_script and path.suffix != ".md"
    if is_list and DISTRIBUTION in text_after and uses_torchmetrics and "torchmetrics" not in text_after:
        note(text_after.index(DISTRIBUTION), _METRICS_NOTE)
    return text_after, sorted(notes)


def _edit_requirements(source: EditableSource, path: PurePath, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Replace the requirement of Lightning, and yield notes on the requirements that stay."""
    text, has_key = source.text, False
    is_command = path.suffix in (".md", *_SCRIPTS) or path.name in _SCRIPT_NAMES
    for found in _REQUIREMENT.finditer(text, start, end):
        line_start = source.find_line_start(found.start())
        before = text[line_start : found.start()]
        has_pip = "pip" in _COMMAND_END.split(text[: found.start()])[-1]
        is_item = found["version"] or found["extras"] or (
            _BEFORE.fullmatch(before) and _AFTER.match(text, found.end())
        )  # fmt: skip
        if "#" in before or (not has_pip and (is_command or not is_item)):
            continue
        key = _KEY.match(text, found.start()) if path.suffix == ".toml" or path.name == "Pipfile" else None
        if path.suffix in (".yaml", ".yml") and not _is_below_pip(text[: found.start()]):
            yield found.start(), _CONDA_NOTE
        elif key is not None and not before.strip() and not has_key:
            source.replace(*key.span(), f'{DISTRIBUTION} = "*"')
            has_key = True
        elif path.suffix != ".lock" and key is None and (
            is_command or path.suffix in (".yaml", ".yml") or found["extras"] or found["version"]
            or (path.suffix == ".txt" and not before.strip())
        ):  # fmt: skip
            source.replace(*found.span(), DISTRIBUTION)
        else:
            yield found.start(), _PACKAGE_NOTE


def edit_commands_of_pip(text: str) -> str:
    """Return a text whose commands of pip install Lumen in place of Lightning."""
    return re.sub(r"pip install.*", lambda line: replace_requirements(line[0]), text)


def replace_requirements(text: str) -> str:
    """Return a list of requirements with Lumen in place of Lightning."""
    return _REQUIREMENT.sub(DISTRIBUTION, text)


def _iterate_spans(path: PurePath, text: str) -> Iterator[tuple[int, int]]:
    """Yield the parts of a text to edit: the code blocks of Markdown, and the whole of other texts."""
    if path.suffix == ".md":
        yield from (found.span() for found in _FENCE.finditer(text))
    else:
        yield 0, len(text)


def _is_below_pip(before: str) -> bool:
    """Return True if the next entry of a conda environment is in the list `pip`."""
    lines = before.split("\n")
    indent = len(lines[-1]) - len(lines[-1].lstrip())
    for line in reversed(lines[:-1]):
        if line.strip() and len(line) - len(line.lstrip()) < indent:
            return line.strip().removeprefix("-").strip() == "pip:"
    return False


def _edit_classes(source: EditableSource, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Rename Lightning's classes, and yield notes on those without a counterpart."""
    for found in _CLASS.finditer(source.text, start, end):
        short = found[0].rpartition(".")[2]
        counterpart = find_counterpart(found[0])
        if not short[:1].isupper() or counterpart is None:
            continue
        if counterpart.name is None:
            yield found.start(), f"{found[0]}: {counterpart.advice}"
        else:
            source.replace(*found.span(), counterpart.name)


def _edit_commands(source: EditableSource, start: int, end: int) -> Iterator[tuple[int, str]]:
    """Edit the options of the trainer in commands, and yield notes."""
    text = source.text
    for found in _OPTION.finditer(text, start, end):
        value: Any = UNKNOWN
        if found["value"] is not None and "$" not in found["value"] and not found["value"].startswith(("'", '"')):
            with suppress(yaml.YAMLError):
                value = yaml.safe_load(found["value"])
        change = get_change("Trainer", found["name"], value)
        if change.sentence:
            yield found.start(), f"--trainer.{found['name']}: {change.sentence}"
        if change.arguments is None:
            continue
        if found["value"] is None and UNCHANGED in change.arguments.values():
            names = " and ".join(f"--trainer.{name}" for name in change.arguments)
            yield found.start(), f"--trainer.{found['name']}: write {names}."
            continue
        texts = change.format_values("yaml", found["value"] or "")
        options = [f"--trainer.{name}={text}" for name, text in texts.items()]
        behind = found[0][len(found[0].rstrip()) :]
        source.replace(*found.span(), " ".join(options) + behind if options else "")
    for pattern, sentence in _MENTIONS.items():
        for found in pattern.finditer(text, start, end):
            name = found[0].removeprefix("PL_TRAINER_").removeprefix("PL_FIT__TRAINER__")
            yield found.start(), sentence.format(found[0], name)
