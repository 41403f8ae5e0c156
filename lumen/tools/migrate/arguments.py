"""Changes of the arguments of Lightning's classes and methods, for Python files and configs."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple, final

import lumen
from lumen.errors.arguments import is_neutral_argument
from lumen.errors.lightning_names import INSTEAD, INSTEAD_IN_LOG, INSTEAD_IN_SAVE, INSTEAD_OF_CLASSES, RENAMED
from lumen.tools.migrate.source import NOTES, TABLES, EditableSource, ItemEditor, SourceItem


@final
class ArgumentChange(NamedTuple):
    """Change of one argument.

    Attributes:
        arguments: The new arguments by name; empty to remove the argument, None to keep it.
        sentence: Note for the user, or "".
    """

    arguments: Mapping[str, Any] | None = None
    sentence: str = ""

    def format_values(self, kind: str, old: str) -> dict[str, str]:
        """Return the sources of the new values by name, where `old` is the source of the old value."""
        return {name: old if value is UNCHANGED else format_value(value, kind)
                for name, value in (self.arguments or {}).items()}  # fmt: skip


@final
class UnknownValue:
    """Value of an argument that is not a literal."""


@final
class _Expression(NamedTuple):
    """Python source of a new value."""

    text: str


UNKNOWN, UNCHANGED = UnknownValue(), object()
_GetClass = Callable[[ast.expr], str | None]
_SIMPLE = ast.Name | ast.Attribute | ast.Subscript | ast.Call
#: Classes that Lightning 1 also accepted as `checkpoint_callback` and `early_stop_callback`.
_CALLBACK_CLASSES = ("ModelCheckpoint", "EarlyStopping")
_REMOVED, _NO_CHANGE = ArgumentChange({}), ArgumentChange()


_KEPT_CLASSES = ("FSDP",)
_DDP_NAMES = ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp2", "ddp_find_unused_parameters_false")


def _make_flag_change(on: Mapping[str, Any]) -> Callable[[Any], ArgumentChange]:
    """Return a rule that replaces an argument that is on, and removes one that is off."""
    return lambda value: _NO_CHANGE if value is UNKNOWN else ArgumentChange(on if value else {})


def _change_strategy(value: Any) -> ArgumentChange:
    name = value.lower() if isinstance(value, str) else ""
    if name in ("ddp_find_unused_parameters_true", "ddp_notebook_find_unused_parameters_true"):
        return ArgumentChange(None, NOTES["unused"])
    if name == "ddp_cpu":
        return ArgumentChange({"strategy": "ddp", "accelerator": "cpu"})
    if name.startswith(_DDP_NAMES) or name in ("fsdp_native", "fsdp_cpu_offload"):
        return ArgumentChange({"strategy": name[: 4 if name.startswith("fsdp") else 3]})
    if name.startswith("deepspeed"):
        note = f"strategy: {name} is not supported. Use fsdp, which shards parameters and optimizer states too."
        return ArgumentChange(None, note)
    note = "strategy: dp is not supported. Use ddp, with a process for each device."
    return ArgumentChange(None, note) if name == "dp" else _NO_CHANGE


def _change_accelerator(value: Any) -> ArgumentChange:
    if isinstance(value, str) and value.startswith(("dp", "ddp")):  # in Lightning 1.0 to 1.4
        change = _change_strategy(value)
        return ArgumentChange({"strategy": UNCHANGED, **(change.arguments or {})}, change.sentence)
    known = value is UNKNOWN or value is None or value in ("auto", "cpu", "cuda", "gpu", "mps")
    return _NO_CHANGE if known else ArgumentChange(None, f"accelerator: {value} is not supported.")


def _change_gpus(value: Any) -> ArgumentChange:
    if value is UNKNOWN:
        return ArgumentChange({"accelerator": "gpu", "devices": UNCHANGED}, NOTES["gpus"])
    if value is None:
        return _REMOVED
    if value in (0, "0", []):
        return ArgumentChange({"accelerator": "cpu"})
    devices = _change_devices(value)
    return ArgumentChange({"accelerator": "gpu", **(devices.arguments or {"devices": value})}, devices.sentence)


def _change_devices(value: Any) -> ArgumentChange:
    several = [each for each in value.split(",") if each] if isinstance(value, str) and "," in value else value
    return (
        ArgumentChange({"devices": len(several)}, NOTES["devices"]) if isinstance(several, list | tuple) else _NO_CHANGE
    )


def _change_checkpoint_callback(value: Any) -> ArgumentChange:
    if isinstance(value, bool):
        return ArgumentChange({"enable_checkpointing": value})
    return ArgumentChange(None, f"checkpoint_callback: {INSTEAD['checkpoint_callback']}")


def _change_precision(value: Any) -> ArgumentChange:
    if value in ("16-true", "fp16-true"):
        return ArgumentChange(None, NOTES["precision"])
    if isinstance(value, str) and value.startswith("transformer-engine"):
        return ArgumentChange(None, "precision: the Transformer Engine is not supported. Use bf16.")
    return _NO_CHANGE


#: Rules for arguments whose change depends on their value.
_BY_VALUE: Mapping[tuple[str, str], Callable[[Any], ArgumentChange]] = {
    ("Trainer", "accelerator"): _change_accelerator,
    ("Trainer", "barebones"): _make_flag_change(
        {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    ),
    ("Trainer", "checkpoint_callback"): _change_checkpoint_callback,
    ("Trainer", "devices"): _change_devices,
    ("Trainer", "gpus"): _change_gpus,
    ("Trainer", "precision"): _change_precision,
    ("Trainer", "progress_bar_refresh_rate"): lambda value: (
        ArgumentChange({"enable_progress_bar": False}) if value == 0 else _NO_CHANGE
    ),
    ("Trainer", "reload_dataloaders_every_epoch"): _make_flag_change({"reload_dataloaders_every_n_epochs": 1}),
    ("Trainer", "resume_from_checkpoint"): lambda value: (
        ArgumentChange({"resume": UNCHANGED}, NOTES["resume"]) if value else _REMOVED
    ),
    ("Trainer", "strategy"): _change_strategy,
    ("Trainer", "val_check_interval"): lambda value: (
        ArgumentChange(None, NOTES["interval"]) if type(value) is int else _NO_CHANGE
    ),
    ("Trainer", "weights_summary"): lambda value: (
        ArgumentChange({"enable_model_summary": value is UNKNOWN}, NOTES["summary"] if value is UNKNOWN else "")
        if value in (None, UNKNOWN)
        else _REMOVED
        if value == "top"
        else _NO_CHANGE
    ),
}
#: Replacements for the arguments of methods.
METHODS: Mapping[str, Mapping[str, str]] = {
    "fit": {"train_dataloader": "Use train_dataloaders.", "val_dataloader": "Use val_dataloaders."},
    "log": INSTEAD_IN_LOG,
    "log_dict": INSTEAD_IN_LOG,
    "load_from_checkpoint": {"hparams_file": "Pass its values as keyword arguments."},
    "save_checkpoint": INSTEAD_IN_SAVE,
    "scale_batch_size": {"max_val": "Leave it out: the search ends at the largest size that fits."},
    "test": {"test_dataloaders": "Use dataloaders."},
    "validate": {"val_dataloaders": "Use dataloaders."},
}


def get_change(owner: str, name: str, value: Any = UNKNOWN) -> ArgumentChange:
    """Return the change of an argument of a constructor.

    Args:
        owner: Name of the class in `lumen`.
        name: Name of the argument in Lightning.
        value: Value of the argument, or `UNKNOWN` if it is not plain data.
    """
    if (rule := _BY_VALUE.get((owner, name))) is not None and (change := rule(value)) is not _NO_CHANGE:
        return change
    kind = getattr(lumen, owner)
    instead = getattr(kind, "INSTEAD", {})
    has_kwargs = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(kind).parameters.values())
    if name in _list_accepted(owner) or owner == "LambdaCallback" or (has_kwargs and name not in instead):
        return _NO_CHANGE
    note = instead.get(name) or ""
    new = TABLES["renamed"].get(owner, {}).get(name)
    if new is None and (use := _USE.fullmatch(note)) is not None and use[1] in _list_accepted(owner):
        new = use[1]
    if new is not None:
        change = get_change(owner, new, value)
        return change if change.arguments is not None else ArgumentChange({new: UNCHANGED}, change.sentence)
    neutral = getattr(kind, "NEUTRAL", {}).get(name, ())
    if is_neutral_argument(kind, name, value) or (
        (note or neutral) and _is_off(value) and (value is None or not neutral)
    ):
        return _REMOVED
    if not note or owner in _KEPT_CLASSES or name in TABLES["kept"].get(owner, "").split():
        return ArgumentChange(None, f"{name} of {owner}. {note or f'{owner} has no argument {name}.'}")
    return ArgumentChange({}, format_left_out(f"{name} of {owner}", note))


def get_changes(owner: str, values: Mapping[str, Any], given: Iterable[str] = ()) -> dict[str, ArgumentChange]:
    """Return the changes of all arguments of a constructor, which give no new argument twice.

    Args:
        owner: Name of the class in `lumen`.
        values: Values of the arguments by their names in Lightning, or `UNKNOWN`.
        given: Names of new arguments that other edits give.
    """
    changes = {name: get_change(owner, name, value) for name, value in values.items()}
    if owner == "Trainer" and values.get("gpus") not in (None, 0, "0", []) and "num_processes" in changes:
        changes["num_processes"] = _REMOVED  # Lightning reads num_processes only without GPUs.
    # A name that has a value in the source is kept, and a replacement overrides None.
    kept = {name for name, change in changes.items() if change.arguments is None or name in change.arguments}
    taken = {*given, *kept}
    taken -= {name for name, value in values.items() if value is None}
    for name, change in changes.items():
        if change.arguments is not None:
            added = {key: new for key, new in change.arguments.items() if key == name or key not in taken}
            changes[name] = change._replace(arguments=added)
            taken |= {*added}
    for name in [name for name, value in values.items() if value is None and name in taken]:
        if changes[name].arguments is None:
            changes[name] = _REMOVED
    return changes


def format_left_out(subject: str, note: str) -> str:
    """Return the note on code that the command leaves out."""
    reason = note.removeprefix("Leave it out").lstrip(":; .")
    return f"{subject} is left out. {reason[:1].upper()}{reason[1:]}".strip()


def get_method_change(method: str, name: str, value: Any = UNKNOWN) -> ArgumentChange:
    """Return the change of an argument of a method."""
    note = METHODS.get(method, {}).get(name)
    if note is None:
        return _NO_CHANGE
    if (use := _USE.fullmatch(note)) is not None:
        return ArgumentChange({use[1]: UNCHANGED})
    is_neutral = _is_off(value) or (name, value) in (("method", "fit"), ("max_val", 8192))
    return _REMOVED if is_neutral else ArgumentChange({}, format_left_out(f"{name} of {method}", note))


def list_positional_names(name: str, owner: str) -> tuple[list[str], list[str]]:
    """Return the positional argument names of Lightning's class `name` and of Lumen's class `owner`."""
    parameters = inspect.signature(getattr(lumen, owner)).parameters.values()
    ours = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    return TABLES["positions"][name].split() if name in TABLES["positions"] else ours, ours


@cache
def _list_accepted(owner: str) -> frozenset[str]:
    """Return the names of the arguments of a Lumen class that have an effect."""
    kind = getattr(lumen, owner)
    return frozenset(inspect.signature(kind).parameters) - {*getattr(kind, "INSTEAD", ())}


def _is_off(value: Any) -> bool:
    return value is None or value is False or (value in (0, -1, "", [], {}) and not isinstance(value, bool))


_USE = re.compile(r"Use (\w+)\.")  # sentences that name a new argument of the same meaning
_PLAIN = re.compile(r"[A-Za-z_][\w.-]*$")


def format_value(value: Any, kind: str) -> str:
    """Return plain data as Python or YAML source."""
    if isinstance(value, _Expression):
        return value.text
    if isinstance(value, str):
        return value if kind == "yaml" and _PLAIN.match(value) else f'"{value}"'
    return repr(value) if kind == "python" else str(value).lower()


_LIMITS = {"max_epochs", "max_steps", "max_time", "max_nb_epochs", "fast_dev_run"}
_ENDLESS = 1000  # Lightning's max_epochs if no argument limits a run


@final
class CallEditor:
    """Editor of the arguments of calls.

    Args:
        source: The text of the file.
        note: Function that records a note on a line.
        get_class: Function that returns the full name of the Lightning class of which a value is an object, or None.
        calls_fit: True if the project calls a trainer's `fit`.
    """

    def __init__(
        self, source: EditableSource, note: Callable[[int, str], None], get_class: _GetClass, *, calls_fit: bool
    ) -> None:
        self._source, self._note, self._get_class, self._calls_fit = source, note, get_class, calls_fit

    def edit_method(self, node: ast.Call, method: str) -> None:
        """Edit the arguments of a call of a method of the trainer, the tuner or the task."""
        items = ItemEditor(self._source, node)
        for item in items.all:
            if item.name is not None:
                self._apply_change(items, item, get_method_change(method, item.name, _parse_literal(item.value)))
        items.apply_edits()

    def edit_constructor(
        self, node: ast.Call | ast.Dict, lightning_name: str, owner: str, *, is_direct: bool = True
    ) -> None:
        """Edit the arguments of a class.

        Args:
            node: The call, or a dictionary of its arguments.
            lightning_name: Name of the Lightning class.
            owner: Name of the Lumen class.
            is_direct: False if the call receives the class as its first argument, as `functools.partial` does.
        """
        items, shifted = ItemEditor(self._source, node), False
        their_order, our_order = list_positional_names(lightning_name, owner)
        if not is_direct:  # The first argument is the class.
            their_order, our_order = ["", *their_order], ["", *our_order]
        objects = [item for item in items.all if owner == "Trainer" and self._is_callback(item)]
        done = self._edit_plugins(items) if owner == "Trainer" else set()
        names: dict[int, str] = {}
        for number, item in enumerate(items.all):
            positional = item.name is None and items.is_call and self._source.text[item.start] != "*"
            name = their_order[number] if positional and number < len(their_order) else item.name
            if name and item not in objects and name not in done:
                names[number] = name
        values = {name: _parse_literal(items.all[number].value) for number, name in names.items()}
        changes = get_changes(owner, values, done)
        for number, name in names.items():
            item, change = items.all[number], changes[name]
            positional = item.name is None
            moved = positional and (shifted or our_order[number : number + 1] != [name])
            self._apply_change(items, item, change)
            shifted = shifted or change.arguments is not None
            if moved and change.arguments is None and not change.sentence:
                self._source.replace(item.start, item.start, f"{name}=")
            if owner == "CLI" and name == "trainer_defaults" and isinstance(item.value, ast.Dict):
                self.edit_constructor(item.value, "Trainer", "Trainer")
        has_limit = not {*_LIMITS, None}.isdisjoint(item.name for item in items.all)
        if owner == "Trainer" and items.is_call and self._calls_fit and not has_limit:
            items.add(f"max_epochs={_ENDLESS}")
        self._join_callbacks(items, objects)
        items.apply_edits()

    def edit_defaults(self, node: ast.Dict, groups: Mapping[str, str]) -> None:
        """Edit the defaults of options, such as `"trainer.gpus"`.

        Args:
            node: Dictionary with the defaults by the name of the option.
            groups: Name of the Lumen class by the group of options.
        """
        items = ItemEditor(self._source, node)
        for item in items.all:
            group, _, name = (item.name or "").partition(".")
            if group not in groups or not name or "." in name:
                continue
            change = get_change(groups[group], name, _parse_literal(item.value))
            if change.arguments:
                change = change._replace(arguments={f"{group}.{key}": new for key, new in change.arguments.items()})
            self._apply_change(items, item, change)
        items.apply_edits()

    def _is_callback(self, item: SourceItem) -> bool:
        """Return True for an argument of Lightning 1.0 to 1.4 that is one callback."""
        names = ("checkpoint_callback", "early_stop_callback")
        return item.name in names and (self._get_class(item.value) or "").rpartition(".")[2] in _CALLBACK_CLASSES

    def _join_callbacks(self, items: ItemEditor, objects: list[SourceItem]) -> None:
        """Move callbacks that have arguments of their own into the argument `callbacks`."""
        moved = ", ".join(self._source.get_text(item.value) for item in objects)
        present = next((item for item in items.all if item.name == "callbacks"), None)
        if present is not None and moved:
            start, end = self._source.get_span(present.value)
            if isinstance(present.value, ast.List):
                self._source.replace(start, start + 1, f"[{moved}, " if present.value.elts else f"[{moved}")
            elif _parse_literal(present.value) is None:
                self._source.replace(start, end, f"[{moved}]")
            else:
                self._source.replace(start, end, f"[*{self._source.text[start:end]}, {moved}]")
        for item in objects[present is None :]:
            items.remove(item)
        if objects and present is None:
            self._source.replace(objects[0].start, objects[0].end, f"{items.format_name('callbacks')}[{moved}]")

    def _edit_plugins(self, items: ItemEditor) -> set[str]:
        """Remove plugins that Lumen does not need, and rename `plugins` if its value is a strategy.

        Returns:
            The names of the arguments that need no other edit.
        """
        item = next((each for each in items.all if each.name == "plugins"), None)
        if item is None:
            return set()
        plugins = item.value.elts if isinstance(item.value, ast.List | ast.Tuple) else [item.value]
        kinds = [(self._get_class(each) or "").rpartition(".")[2] for each in plugins]
        if len(kinds) == 1 and RENAMED.get(kinds[0]) in ("lumen.DDP", "lumen.FSDP"):
            start, end = self._source.get_span(item.value)
            inner, outer = self._source.get_span(plugins[0])
            self._source.replace(*item.named, items.format_name("strategy").removesuffix("=").removesuffix(": "))
            self._source.replace(start, inner, "")
            self._source.replace(outer, end, "")
            for each in items.all:
                if each.name == "strategy":
                    items.remove(each)
            return {"plugins", "strategy"}
        notes = [INSTEAD_OF_CLASSES.get(kind, "") for kind in kinds]
        if not notes or not all(note.startswith("Leave it out") for note in notes):
            return set()
        for kind, note in zip(kinds, notes, strict=True):
            self._note(self._source.get_line_number(item.start), format_left_out(kind, note))
        items.remove(item)
        return {"plugins"}

    def _apply_change(self, items: ItemEditor, item: SourceItem, change: ArgumentChange) -> None:
        if change.sentence == NOTES["gpus"] and change.arguments and "accelerator" in change.arguments:
            text = self._source.get_text(item.value)
            text = text if isinstance(item.value, _SIMPLE) else f"({text})"
            accelerator, devices = _Expression(f'"gpu" if {text} else "cpu"'), _Expression(f"{text} or 1")
            change = ArgumentChange({**change.arguments, "accelerator": accelerator, "devices": devices})
        if change.sentence:
            self._note(self._source.get_line_number(item.start), change.sentence)
        if change.arguments is None:
            return
        if not change.arguments:
            items.remove(item)
        elif [*change.arguments.values()] == [UNCHANGED]:
            items.rename(item, next(iter(change.arguments)))
        else:
            texts = change.format_values("python", self._source.get_text(item.value))
            parts = [f"{items.format_name(key)}{text}" for key, text in texts.items()]
            before = self._source.text[self._source.find_line_start(item.start) : item.start]
            between = ", " if before.strip() else f",{self._source.newline}{before}"
            self._source.replace(item.start, item.end, between.join(parts))


def _parse_literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return UNKNOWN
