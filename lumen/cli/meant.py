"""What may have been meant by an option that there is not: it lacks its section, is Lightning's, or is mistyped."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterable

from lumen.callbacks import Callback
from lumen.cli.config_layers import Keys
from lumen.cli.find_class import classes_by_name
from lumen.errors.arguments import did_you_mean
from lumen.errors.lightning_names import INSTEAD, INSTEAD_OF_CLASSES, RENAMED
from lumen.trainer.trainer import Trainer

_OF_TRAINER = inspect.signature(Trainer).parameters.keys()
_A_TRAINERS = re.compile(rf"\b({'|'.join(_OF_TRAINER)})\b")
_ALSO_CALLED = {"lr": "learning_rate", "learning_rate": "lr", "epochs": "max_epochs", "steps": "max_steps"}


def option_hint(key: str, heads: Collection[str], options: Iterable[str], *, typed: bool) -> str:
    """What else may have been meant by `--lr 0.1`, as a sentence after a space; empty if nothing is near.

    Args:
        key: What was written where the sections are.
        heads: The sections, and the options that belong to none.
        options: The arguments that the sections have, each as `SECTION.NAME`.
        typed: It was written on the command line, where options begin with dashes.
    """
    dashes = "--" if typed else ""
    by_name: dict[str, list[str]] = {}
    for option in options:
        by_name.setdefault(option.rpartition(".")[2], []).append(f"{dashes}{option}")
    found = by_name.get(key) or by_name.get(_ALSO_CALLED.get(key, ""))
    if found:
        return f" Did you mean {' or '.join(found)}?"
    if key in INSTEAD:
        return " " + _A_TRAINERS.sub(rf"{dashes}trainer.\1", INSTEAD[key])
    if near := did_you_mean(key, heads, form=f"{dashes}{{}}".format):
        return near
    return did_you_mean(key, by_name, cutoff=0.7, form=lambda name: " or ".join(by_name[name]))


def callback_hint(path: Keys, value: str) -> str:
    """What else may have been meant by `--trainer.callbacks.patience 3`."""
    name = path[-1]
    if (
        path[:-1] != ("trainer", "callbacks")
        or name.isdigit()
        or "." in value
        or did_you_mean(value, {*classes_by_name([Callback]), *RENAMED, *INSTEAD_OF_CLASSES}, cutoff=0.75)
    ):
        return ""
    option = f"{name}={value}"
    return (
        f" For an option of a callback write which one, --trainer.callbacks.NAME.{option}, or add the callback first: "
        f"--trainer.callbacks+=CLASS --trainer.callbacks.{option}."
    )
