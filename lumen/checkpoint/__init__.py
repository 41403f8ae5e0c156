"""Checkpoints: what is saved and under which names (`state`), and its bytes on disk (`storage`)."""

from lumen.checkpoint.state import capture, find_checkpoint, load_model, load_run, load_task, load_user_state, save
from lumen.checkpoint.storage import Checkpoint, find_checkpoints, newest_valid

__all__ = [
    "Checkpoint",
    "capture",
    "find_checkpoint",
    "find_checkpoints",
    "load_model",
    "load_run",
    "load_task",
    "load_user_state",
    "newest_valid",
    "save",
]
