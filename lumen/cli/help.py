"""`lumen COMMAND --help`."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lumen.cli import COMMANDS
from lumen.cli.components import Component, describe, is_plain, is_required
from lumen.cli.settings import Settings

_OPTIONS = {
    "--config FILE": "A YAML file of settings; several are merged, the later one wins.",
    "--print_config": "Print the resolved configuration and leave.",
    "--output FILE": "validate, test: also write the values, as .json; predict: write all predictions, as .jsonl or "
    ".safetensors.",
    "--help": "Print this; with --config or --model also the options of the classes that are named.",
}
_CLASSES = {
    "--model CLASS": "A TaskModule, as module.Class, found from the working directory. --model.NAME VALUE sets an "
    "argument.",
    "--data CLASS": "A DataModule; likewise.",
    "--optimizer CLASS": "A torch optimizer, such as AdamW; it replaces the task's configure_optimizers.",
    "--lr_scheduler CLASS": "A torch scheduler, for --optimizer. Next to its class_path stand interval (epoch, the "
    "default, or step), frequency, monitor and strict.",
}
_RULES = (
    "Settings come from the command line, which wins; then from the config files, the last one first; then from "
    "environment variables (LUMEN_{command}__TRAINER__MAX_STEPS=100); then from the defaults. Mappings are merged. A "
    "class that is named anew starts without the arguments of the old one.\n\n"
    "In files a class is written as class_path: module.Class and init_args:. Callbacks may have names, so that a later "
    "layer can change them: callbacks: {{early: {{class_path: EarlyStopping, init_args: {{monitor: val_loss}}}}}}, "
    "then --trainer.callbacks.early.patience 5, or --trainer.callbacks.early=null to remove it."
)


def print_help(command: str, settings: Settings) -> None:
    """Print the options of a command, and of the classes that its configuration names."""
    console = Console()
    _, summary = COMMANDS[command]
    console.print(f"lumen {command} --config FILE [--KEY VALUE ...]\n\n{summary}\n", markup=False, highlight=False)
    options = {name: text for name, text in _OPTIONS.items() if command != "fit" or name != "--output FILE"}
    _print_table(console, "Options", options)
    _print_table(console, "Classes", _CLASSES)
    _print_component(console, "Keys", settings.top)
    for key, component in settings.classes.items():
        _print_component(console, f"{key}: {component.name}", component)
    _print_component(console, "Trainer", settings.trainer)
    console.print(_RULES.format(command=command.upper()), markup=False, highlight=False)


def _print_component(console: Console, title: str, component: Component) -> None:
    documented = _documented(component.target)
    rows: dict[str, str | Text] = {}
    for name, parameter in component.parameters.items():
        facts = describe(parameter.annotation) if parameter.annotation is not inspect.Parameter.empty else ""
        if name in component.given:
            facts += f", set to {json.dumps(component.given[name].plain(), default=str)}"
        elif is_required(parameter):
            facts += ", required"
        elif is_plain(parameter.default) and parameter.default is not None:
            facts += f", default {json.dumps(parameter.default)}"
        key = f"{component.key}.{name}" if component.key else name
        rows[f"--{key}"] = Text.assemble(
            documented.get(name, ""), " " if name in documented else "", (f"({facts})", "dim")
        )
    _print_table(console, title, rows)


def _print_table(console: Console, title: str, rows: Mapping[str, str | Text]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for name, text in rows.items():
        table.add_row(Text(f"  {name}"), text if isinstance(text, Text) else Text(text))
    console.print(Text(title, style="bold"))
    console.print(table)
    console.print()


def _documented(target: Any) -> dict[str, str]:
    """What the `Args:` of a class and of its bases, or of a function, say about each parameter."""
    found: dict[str, str] = {}
    for owner in reversed(inspect.getmro(target) if inspect.isclass(target) else [target]):
        section = re.search(r"^( *)Args:\n((?:\1 +.*\n|\s*\n)*)", f"{owner.__doc__ or ''}\n", re.MULTILINE)
        if section is None or owner is object:
            continue
        for entry in re.split(r"^(?=\w)", textwrap.dedent(section.group(2)), flags=re.MULTILINE):
            named = re.match(r"(\w+)\s*(?:\(.*?\))?:\s*(.*)", entry, re.DOTALL)
            if named:
                found[named.group(1)] = " ".join(named.group(2).split())
    return found
