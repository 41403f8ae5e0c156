"""The class that a name in the settings stands for, or what is near it and where it was looked for."""

from __future__ import annotations

import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, final

import lumen
from lumen import __all__ as public
from lumen.errors import ConfigError
from lumen.errors.arguments import did_you_mean, local_path
from lumen.errors.lightning_names import INSTEAD_OF_CLASSES, LIGHTNINGS, RENAMED


@final
class Counterpart(NamedTuple):
    """What stands here for a class of Lightning's.

    Attributes:
        name: Full name of the class; None: there is none.
        instead: What to write, as a sentence.
    """

    name: str | None
    instead: str


def of_lightning(name: str) -> Counterpart | None:
    """What stands here for a class, by its full name; None if that is no class of Lightning's."""
    package, _, rest = name.partition(".")
    short = rest.rpartition(".")[2]
    if package not in LIGHTNINGS or not short:
        return None
    ours: str | None = f"lumen.{short}" if short in public else RENAMED.get(short)
    if ours is not None and ours.startswith("lumen.") and ours.rpartition(".")[2] not in public:
        ours = None
    return Counterpart(ours, f"Write {ours}." if ours else INSTEAD_OF_CLASSES.get(short, f"Lumen has no {short}."))


def find_class(name: str, bases: Sequence[type] = (), where: str = "", files: Sequence[str] = ()) -> Any:
    """Import a class by its full name, or find it by its short one among the imported classes of its bases.

    Args:
        name: Full or short name of the class.
        bases: Of which it must be derived from one, if any are given.
        where: Who names it, for errors.
        files: The config files, in whose directories its module may be.

    Returns:
        None for a short name without a base: jsonargparse finds it by the type of its parameter.

    Raises:
        ConfigError: There is none, or there are several.
    """
    module, _, short = name.rpartition(".")
    if not module and not bases and name:
        return None
    try:
        owner = import_module(module) if module else None
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # of what the user's module imports
        text = f"{where}: cannot import {name}: there is no module {error.name}.{_where_it_may_be(error.name, files)}"
        raise ConfigError(text) from error
    known = {key: [getattr(owner, key, None)] for key in dir(owner)} if owner else classes_by_name(bases)
    if short not in known:
        what = f"{module or 'lumen'} has no class {short}." if short else "no class is named."
        if not module and {short} & {*RENAMED, *INSTEAD_OF_CLASSES} and (there := of_lightning(f"lightning.{short}")):
            raise ConfigError(f"{where}: {what} {there.instead}")
        raise ConfigError(f"{where}: {what}{did_you_mean(short, known)} Write class_path: module.Class.")
    found, *others = known[short]
    if others:
        names = ", ".join(f"{each.__module__}.{short}" for each in known[short])
        raise ConfigError(f"{where}: several classes are called {short}: {names}. Write the name of one in full.")
    if bases and inspect.isclass(found) and not issubclass(found, tuple(bases)):
        kinds = " or ".join(base.__name__ for base in bases)
        raise ConfigError(f"{where}: {name} is no {kinds}. Name a class that is derived from it.")
    return found


def classes_by_name(bases: Iterable[type]) -> dict[str, list[type]]:
    """The imported classes that are derived from some, as short names may mean them; Lightning's have its full name."""
    for name, home in lumen._HOME.items():  # what only its name has imported is found by its short name too
        if home.startswith(("lumen.integrations", "lumen.tools")):
            getattr(lumen, name)
    found: dict[str, list[type]] = {}
    for kind in dict.fromkeys(chain.from_iterable(map(_derived, bases))):
        if "<locals>" not in kind.__qualname__ and kind.__module__.partition(".")[0] not in LIGHTNINGS:
            found.setdefault(kind.__name__, []).append(kind)
    for name, kinds in found.items():
        usable = [each for each in kinds if not inspect.isabstract(each) and "._" not in each.__module__]
        usable = [each for each in usable if _is_there(each)] or usable
        found[name] = usable if usable and len(kinds) > 1 else kinds
    return found


def _is_there(kind: type) -> bool:
    """Whether its full name means this class: not if its module is gone, or defines it anew, as a notebook does."""
    owner: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        owner = getattr(owner, name, None)
    return owner is kind


def _derived(base: type) -> Iterator[type]:
    kinds: list[type] = type.__subclasses__(base)
    yield from chain([base], *map(_derived, kinds))


def _where_it_may_be(missing: str, files: Sequence[str]) -> str:
    """Where a module was looked for, which has nearly its name, and which directory of a config file has it."""
    parent, _, short = missing.rpartition(".")
    looked_in = [*sys.modules[parent].__path__] if parent else [os.getcwd()]
    hint = did_you_mean(short, (module.name for module in pkgutil.iter_modules(looked_in)))
    if parent:
        return f"{hint} It was looked for in {', '.join(looked_in)}."
    around = [place for file in files for place in Path(os.path.abspath(local_path(file))).parents]
    found = next((place for place in around if (place / f"{short}.py").is_file() or (place / short).is_dir()), None)
    it_is = "Start lumen in the directory that it is in" if found is None else f"It is in {found}: start lumen there"
    others = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    everywhere = ", ".join([f"{os.getcwd()} (where lumen was started)", *others])
    return f"{hint} It was looked for in {everywhere} and among what is installed. {it_is}, or add that to PYTHONPATH."
