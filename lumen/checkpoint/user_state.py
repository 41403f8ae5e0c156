"""States of the task, callbacks and loggers in a checkpoint, by the key of their owner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Any, NoReturn, final

from lumen.console import logger as _log
from lumen.errors import CheckpointError, ConfigError


def collect_states(objects: Iterable[Any]) -> dict[str, Any]:
    """Return states of callbacks or loggers by their keys.

    Raises:
        ConfigError: Two objects with a state have the same key.
    """
    found: dict[str, Any] = {}
    for each in objects:
        key, state = each.state_key, each.state_dict()
        if state and found.get(key):
            raise make_ambiguous_key_error(key)
        found[key] = state or found.get(key, state)
    return found


def load_states(objects: Iterable[Any], saved: Mapping[str, Any], path: PurePath) -> None:
    """Restore the states of callbacks or loggers; one log message names states without owner and owners without state.

    Args:
        objects: Callbacks or loggers.
        saved: States by key, as `collect_states` returned them.
        path: Path of the checkpoint, for messages.

    Raises:
        ConfigError: Several of `objects` have the key of one state.
    """
    owners: dict[str, list[Any]] = {}
    for each in objects:
        owners.setdefault(each.state_key, []).append(each)
    for key, same_key in owners.items():
        if len(same_key) == 1 and key in saved:
            same_key[0].load_state_dict(saved[key])
        elif saved.get(key):
            raise make_ambiguous_key_error(key)
    lost = [key for key, state in saved.items() if state and key not in owners]
    new = [key for key, same_key in owners.items() if not saved.get(key) and any(map(_has_state, same_key))]
    begin = f"{', '.join(new)} {'start' if len(new) > 1 else 'starts'} with a new state"
    if lost:
        suffix = f"; {begin}" if new else ""
        _log.warning("%s holds the state of %s, which this run does not have%s", path, ", ".join(lost), suffix)
    elif new:
        _log.info("%s does not hold all states: %s", path, begin)


def _has_state(each: Any) -> bool:
    try:
        return bool(each.state_dict())
    except Exception:  # the state may not exist before training begins: the object counts as one with a state
        return True


def make_ambiguous_key_error(key: str) -> ConfigError:
    """Return the error for several objects that save under one key."""
    return ConfigError(
        f"several callbacks or loggers of this run have a state, and the same state_key: {key}. A checkpoint could not "
        "distinguish their states. Remove one of the objects, give them arguments that make the keys differ, or define "
        "the property state_key in the class."
    )


_PROGRESS = "Lumen saves and restores this counter: read trainer.{} (in a resumed run from on_fit_start on)."
_LOADERS = "Lumen saves and restores the positions of the loaders."
_SCALE = "Lumen saves and restores the scale of fp16."
_HYPERPARAMETERS = "Lumen saves and restores hyperparameters: read task.hparams or datamodule.hparams."

#: Keys of Lightning's checkpoints, each with the place of the same data in Lumen.
INSTEAD: Mapping[str, str] = {
    "state_dict": "Lumen saves and restores parameters and buffers. Read and write the task's parameters directly, and "
    "keep an average or a copy under another name. To start with renamed or fewer parameters, use "
    "Trainer(init_from=lumen.Weights(path, rename=..., ignore=...)). For an adapter of peft alone, remove the lines, "
    "and call save_pretrained(DIR) of the model after fit.",
    "optimizer_states": "Lumen saves and restores the optimizer's state: read trainer.optimizers[0].state_dict(), and "
    "skip the state with Trainer(resume_parts=...).",
    "lr_schedulers": "Lumen saves and restores the schedulers: read trainer.lr_scheduler_configs, and skip the "
    "schedulers with Trainer(resume_parts=...).",
    "callbacks": "Every callback has its own state: define state_dict and load_state_dict in the callback.",
    "epoch": _PROGRESS.format("current_epoch"),
    "global_step": _PROGRESS.format("global_step"),
    "loops": _LOADERS,
    "fit_loop": _LOADERS,
    "hyper_parameters": _HYPERPARAMETERS,
    "hparams_name": _HYPERPARAMETERS,
    "hparams_type": _HYPERPARAMETERS,
    "datamodule_hyper_parameters": _HYPERPARAMETERS,
    "datamodule_hparams_name": _HYPERPARAMETERS,
    "native_amp_scaling_state": _SCALE,
    "amp_scaling_state": _SCALE,
    "MixedPrecision": _SCALE,
    "MixedPrecisionPlugin": _SCALE,
    "pytorch-lightning_version": "The versions of a run are in its environment.json.",
}


@final
class HookAdditions(dict[str, Any]):
    """Dictionary of one task or callback; a lookup of a Lightning key raises an error that names Lumen's replacement.

    Args:
        owner: Name of the task or callback, for messages.
        values: Initial entries; in a resumed run, the saved entries.
    """

    def __init__(self, owner: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._owner = owner

    def __missing__(self, key: Any) -> NoReturn:
        self.check(key)
        raise KeyError(f"{self._owner} added no {key!r} to this checkpoint; it added {sorted(map(str, self))}")

    def __delitem__(self, key: Any) -> None:
        self.check(key)
        super().__delitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the value of a key as `dict.get` does, after `check`."""
        self.check(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove a key as `dict.pop` does, after `check`."""
        self.check(key)
        return super().pop(key, *default)

    def check(self, key: Any) -> None:
        """Refuse a key of Lightning's checkpoints.

        Raises:
            CheckpointError: `key` is a key of Lightning's checkpoints; the message names Lumen's replacement.
        """
        if key in INSTEAD:
            raise CheckpointError(f"{self._owner}: checkpoint[{key!r}] does not exist. {INSTEAD[key]}")
