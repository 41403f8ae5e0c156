"""Names of callbacks' and loggers' states in a checkpoint: by what they are, not by their place in a list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any

from lumen.console import logger as _log
from lumen.errors import ConfigError


def key_of(thing: Any) -> str:
    """The name of a callback's or logger's state: its `state_key`, else that of its class."""
    return str(getattr(thing, "state_key", type(thing).__qualname__))


def states_of(things: Iterable[Any]) -> dict[str, Any]:
    """States of callbacks or loggers by their keys.

    Raises:
        ConfigError: Two that have a state have the same key.
    """
    found: dict[str, Any] = {}
    for thing in things:
        key, state = key_of(thing), thing.state_dict()
        if state and found.get(key):
            raise ambiguous(key)
        found[key] = state or found.get(key, state)
    return found


def load_states(things: Iterable[Any], saved: Mapping[str, Any], path: PurePath) -> None:
    """Give states back to their owners; one warning names states without an owner and owners without a state.

    Args:
        things: Callbacks or loggers.
        saved: States by key, as `states_of` returned them.
        path: Path of the checkpoint, for messages.

    Raises:
        ConfigError: Several of `things` have the key of one state.
    """
    owners: dict[str, list[Any]] = {}
    for thing in things:
        owners.setdefault(key_of(thing), []).append(thing)
    for key, them in owners.items():
        if len(them) == 1 and key in saved:
            them[0].load_state_dict(saved[key])
        elif saved.get(key):
            raise ambiguous(key)
    lost = [key for key, state in saved.items() if state and key not in owners]
    new = [key for key, them in owners.items() if not saved.get(key) and any(map(_has_state, them))]
    begin = f"{', '.join(new)} {'begin' if len(new) > 1 else 'begins'} anew"
    if lost:
        more = f"; {begin}" if new else ""
        _log.warning("%s holds the state of %s, which this run does not have%s", path, ", ".join(lost), more)
    elif new:
        _log.info("%s holds no state of all: %s", path, begin)


def _has_state(thing: Any) -> bool:
    try:
        return bool(thing.state_dict())
    except Exception:  # it may be made when training begins: who is asked for it now has one
        return True


def ambiguous(key: str) -> ConfigError:
    """The error for several objects that save under one key."""
    return ConfigError(
        f"several callbacks or loggers of this run have a state, and the same state_key: {key}. A checkpoint could not "
        "tell whose is whose. Leave one out, let them differ in what the key names, or define the property state_key "
        "in their class so that it does."
    )
