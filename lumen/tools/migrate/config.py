"""Edits of one YAML config of LightningCLI or Hydra, and notes on the places to edit by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, final

import yaml

from lumen.cli.classes import find_counterpart
from lumen.errors.lightning_names import INSTEAD_OF_CLASSES
from lumen.tools.migrate.arguments import UNKNOWN, ArgumentChange, format_left_out, get_changes
from lumen.tools.migrate.names import LIGHTNING_NAME, find_new_name, get_short_name
from lumen.tools.migrate.project import ProjectClasses
from lumen.tools.migrate.source import EditableSource, MigrationNote

_HYDRA_KEY, _TARGET = re.compile("_[a-z]+_"), "_target_"
#: Keys that name a class, and the keys of its arguments; `target` is of projects with a function of their own.
_CLASS_KEYS = {"class_path": "init_args", "target": "params"}
_COMMANDS = ("fit", "validate", "test", "predict")
_CKPT_PATH_NOTE = "For fit, set trainer.resume: auto, last, best, or the path of a run or checkpoint."
_SCHEDULE_KEY = "lr_schedule"


@final
class ConfigEditor:
    """Editor of one config.

    Args:
        text: Contents of the file.
        classes: The classes of the project.

    Raises:
        yaml.YAMLError: The text is not valid YAML.
    """

    def __init__(self, text: str, classes: ProjectClasses | None = None) -> None:
        self._source, self._classes = EditableSource(text), classes or ProjectClasses([])
        self._notes: dict[MigrationNote, None] = {}
        self._roots = [node for node in yaml.compose_all(text, yaml.SafeLoader) if isinstance(node, yaml.MappingNode)]

    def edit(
        self, groups: Mapping[str, str] = MappingProxyType({}), folder: str = ""
    ) -> tuple[str, list[MigrationNote]]:
        """Return the text with all edits, and the notes.

        Args:
            groups: The result of `find_config_groups`.
            folder: Name of the file's folder, which is a group of configs in Hydra.
        """
        for root in self._roots:
            if self._classes.uses_cli:
                self._edit_top(root)
            for node in _iterate_mappings(root):
                self._edit_class(node)
            for name, owner, node in _iterate_named_mappings(root, folder):
                edited_as_top = self._classes.uses_cli and name == "trainer" and owner is root
                if name in groups and not edited_as_top and not {_TARGET, "class_path"} & {*_get_entries(node)}:
                    self._edit_arguments(node, groups[name])
        return self._source.apply_edits(), sorted(self._notes)

    def _add_note(self, node: yaml.Node, sentence: str) -> None:
        self._notes[MigrationNote(node.start_mark.line + 1, sentence)] = None

    def _edit_top(self, root: yaml.MappingNode) -> None:
        """Edit a config of LightningCLI."""
        keys = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
        trainer = keys.get("trainer")
        if isinstance(trainer, yaml.MappingNode):
            self._edit_arguments(trainer, "Trainer")
            self._edit_cli_settings(root, keys)
        for group, owner in self._classes.option_groups.items():
            options = keys.get(group) if group != "trainer" else None
            if isinstance(options, yaml.MappingNode):
                self._edit_arguments(options, owner, (root, group))
        for command in _COMMANDS:
            if isinstance(keys.get(command), yaml.MappingNode):
                self._edit_top(keys[command])

    def _edit_cli_settings(self, root: yaml.MappingNode, keys: dict[str, yaml.Node]) -> None:
        """Edit the settings outside `trainer`."""
        removed = {"weights_only"} & {*keys}
        path = keys.get("ckpt_path")
        if path is not None and _as_plain(path) is None:
            removed.add("ckpt_path")
        elif path is not None:
            self._add_note(path, f"ckpt_path: {_CKPT_PATH_NOTE}")
        self._remove_entries(root, removed)
        schedule = keys.get("lr_scheduler")
        arguments = _get_entries(schedule).get("init_args")
        monitor = _get_entries(arguments).get("monitor")
        if monitor is not None and isinstance(arguments, yaml.MappingNode) and isinstance(schedule, yaml.MappingNode):
            self._remove_entries(arguments, {"monitor"}, owner=(schedule, "init_args"))
            column = " " * root.start_mark.column
            at = self._find_end(schedule)
            text = f"{column}{_SCHEDULE_KEY}: {{monitor: {self._get_text(monitor)}}}{self._source.newline}"
            before = "" if self._source.text[:at].endswith(("\n", "\r")) or at == 0 else self._source.newline
            self._source.replace(at, at, before + text)

    def _find_end(self, node: yaml.Node) -> int:
        """Return the offset of the line after the last line of a value."""
        last = _find_last_scalar(node)
        return self._source.find_line_end(max(last.start_mark.index, last.end_mark.index - 1))

    def _edit_class(self, node: yaml.MappingNode) -> None:
        """Rename the classes in a mapping, and edit their arguments."""
        for key, value in node.value:  # A config may name a callback without class_path.
            for each in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                new = self._rename_class(each) or self._get_constructed_class(each)
                arguments = _get_entries(node).get(_CLASS_KEYS.get(str(key.value), ""))
                if new.startswith("lumen.") and _HYDRA_KEY.fullmatch(str(key.value)):
                    self._edit_arguments(node, get_short_name(new))
                elif new.startswith("lumen.") and key.value in _CLASS_KEYS and isinstance(arguments, yaml.MappingNode):
                    self._edit_arguments(arguments, get_short_name(new), (node, _CLASS_KEYS[key.value]))

    def _rename_class(self, node: yaml.Node) -> str | None:
        """Replace the name of a Lightning class by the name of Lumen's class, and return that name, or None."""
        if not isinstance(node, yaml.ScalarNode) or not LIGHTNING_NAME.fullmatch(node.value):
            return None
        found = find_counterpart(node.value)
        if found is None or found.name is None:
            advice = found.advice if found is not None else "Lumen has no such module."
            is_removed = advice.startswith("Leave it out")
            short = get_short_name(node.value)
            self._add_note(node, format_left_out(short, advice) if is_removed else f"{node.value}: {advice}")
            return None
        self._replace_text(node, found.name)
        return found.name

    def _get_constructed_class(self, node: yaml.Node) -> str:
        """Return the full name of the Lumen class whose constructor a class of the project inherits, or ""."""
        short = get_short_name(node.value) if isinstance(node, yaml.ScalarNode) else ""
        full = self._classes.get_constructed_class(short)
        new = find_new_name(full) if full is not None else None
        is_task = new is not None and new.name in ("TaskModule", "DataModule", "Callback")
        return "" if new is None or is_task else f"{new.module}.{new.name}"

    def _edit_arguments(
        self, node: yaml.MappingNode, owner: str, within: tuple[yaml.MappingNode, str] | None = None
    ) -> None:
        """Edit the arguments of a class."""
        removed, entries = set(), list[tuple[yaml.Node, yaml.Node, str]]()
        for key, value in node.value:
            name = key.value.removesuffix("+")
            is_class = isinstance(value, yaml.ScalarNode) and LIGHTNING_NAME.fullmatch(value.value)
            if name in ("class_path", "defaults") or _HYDRA_KEY.fullmatch(name) or is_class:
                continue
            if owner == "Trainer" and name == "plugins" and _has_only_environments(value):
                removed.add(key.value)  # The notes on the classes give the reason.
                continue
            entries.append((key, value, name))
        changes = get_changes(owner, {name: _as_plain(value) for _, value, name in entries})
        for key, value, name in entries:
            change = changes[name]
            if change.sentence:
                self._add_note(key, change.sentence)
            if change.arguments:
                self._replace_entry(node, key, value, change)
            elif change.arguments is not None:
                removed.add(key.value)
        if within is None and node.value and len(removed) == len(node.value):
            last = node if node.flow_style else _find_last_scalar(node)
            self._source.replace(node.start_mark.index, last.end_mark.index, "{}")
        else:
            self._remove_entries(node, removed, owner=within)

    def _replace_entry(self, node: yaml.MappingNode, key: yaml.Node, value: yaml.Node, change: ArgumentChange) -> None:
        """Replace one entry by the new entries."""
        between = ", " if node.flow_style else f"{self._source.newline}{' ' * key.start_mark.column}"
        texts = change.format_values("yaml", self._get_text(value))
        if [*texts.values()] == [self._get_text(value)]:
            self._source.replace(key.start_mark.index, key.end_mark.index, next(iter(texts)))
            return
        entries = map("{}: {}".format, texts, texts.values())
        self._source.replace(key.start_mark.index, value.end_mark.index, between.join(entries))

    def _get_text(self, node: yaml.Node) -> str:
        return self._source.text[node.start_mark.index : node.end_mark.index]

    def _replace_text(self, node: yaml.ScalarNode, text: str) -> None:
        quote = node.style if node.style in ("'", '"') else ""
        self._source.replace(node.start_mark.index, node.end_mark.index, f"{quote}{text}{quote}")

    def _remove_entries(
        self, node: yaml.MappingNode, names: set[str], owner: tuple[yaml.MappingNode, str] | None = None
    ) -> None:
        """Remove entries. A mapping that would be empty is removed with its key in the owner, if given."""
        entries = node.value
        if names and owner is not None and all(key.value in names for key, _ in entries):
            self._remove_entries(owner[0], {owner[1]})
            return
        for number, (key, value) in enumerate(entries):
            if key.value not in names:
                continue
            start, end = key.start_mark.index, value.end_mark.index
            first = self._source.find_line_start(start)
            if number + 1 < len(entries) and (node.flow_style or self._source.text[first:start].strip() == "-"):
                self._source.replace(start, entries[number + 1][0].start_mark.index, "")
            elif not node.flow_style:
                self._source.replace(first, self._find_end(value), "")
            else:
                self._source.replace(entries[number - 1][1].end_mark.index if number else start, end, "")


def find_config_groups(configs: Iterable[tuple[PurePath, str]]) -> dict[str, str]:
    """Return names of Lumen's classes by the keys, or the folders, at which configs of Hydra have Lightning's classes.

    A config may set arguments at such a key, while a config that Hydra composes with it names the class.

    Args:
        configs: Paths and contents of YAML files; invalid files are ignored.
    """
    found: dict[str, set[str]] = {}
    for path, text in configs:
        with suppress(yaml.YAMLError):
            for name, _, node in _iterate_named_mappings(yaml.compose(text, yaml.SafeLoader), path.parent.name):
                target = _get_entries(node).get(_TARGET)
                if target is not None and LIGHTNING_NAME.fullmatch(str(target.value)):
                    counterpart = find_counterpart(target.value)
                    new = counterpart.name if counterpart is not None else None
                    found.setdefault(name, set()).add(get_short_name(new) if new is not None else "")
    return {name: owner for name, owners in found.items() if len(owners) == 1 and (owner := min(owners))}


def _iterate_named_mappings(
    node: yaml.Node | None, name: str, owner: yaml.MappingNode | None = None
) -> Iterator[tuple[str, yaml.MappingNode | None, yaml.MappingNode]]:
    """Yield each mapping with its key and its owner, which is None for the outermost mapping."""
    if isinstance(node, yaml.MappingNode):
        yield name, owner, node
        for key, value in node.value:
            yield from _iterate_named_mappings(value, str(key.value), node)


def _find_last_scalar(node: yaml.Node) -> yaml.Node:
    """Return the last scalar in a value. The scalar ends where the value ends; YAML reports a later end for a block."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _get_entries(node: yaml.Node | None) -> dict[str, yaml.Node]:
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return {key.value: value for key, value in pairs if isinstance(key, yaml.ScalarNode)}


def _has_only_environments(node: yaml.Node) -> bool:
    """Return True for plugins that Lumen does not need."""
    plugins = node.value if isinstance(node, yaml.SequenceNode) else []
    names = [get_short_name(str(_get_entries(each).get("class_path", each).value)) for each in plugins]
    return bool(names) and all(INSTEAD_OF_CLASSES.get(name, "").startswith("Leave it out") for name in names)


def _iterate_mappings(node: yaml.Node, seen: frozenset[int] = frozenset()) -> Iterator[yaml.MappingNode]:
    """Yield every mapping in a node, without following cycles."""
    if id(node) in seen:
        return
    if isinstance(node, yaml.MappingNode):
        yield node
    children = [value for _, value in node.value] if isinstance(node, yaml.MappingNode) else node.value
    for child in children if isinstance(node, yaml.CollectionNode) else ():
        yield from _iterate_mappings(child, seen | {id(node)})


def _as_plain(node: yaml.Node) -> Any:
    """Return a value as plain data, or `UNKNOWN` if it contains an interpolation."""
    try:
        value = yaml.safe_load(yaml.serialize(node))
    except (yaml.YAMLError, ValueError, TypeError):
        return UNKNOWN
    return UNKNOWN if isinstance(value, str) and "${" in value else value
