"""The settings of runs, and in what they differ."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from itertools import islice

import yaml

from lumen.data.nested import flat

MOST = 2000  # settings of a run
_ABSENT = "–"
_NAMES = ("trainer.name", "trainer.resume", "trainer.resume_parts")  # which never repeat a run's
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = 300
_BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxdict = 20


def settings_in(text: str) -> dict[str, str]:
    """The settings of a config by their paths, `model.init_args.lr`; empty if it cannot be read."""
    try:
        read = yaml.safe_load(text)
        found = islice(flat(read), MOST) if isinstance(read, dict) else ()
        return {path: value[:300] if isinstance(value, str) else _BRIEF.repr(value) for path, value in found}
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}


def differences(settings: Sequence[dict[str, str]]) -> dict[str, list[str]]:
    """What is not the same in all, by path: the value of each, or a dash."""
    paths = dict.fromkeys(path for each in settings for path in each if path not in _NAMES)
    found = {path: [each.get(path, _ABSENT) for each in settings] for path in paths}
    return {path: values for path, values in found.items() if len(set(values)) > 1}
