"""Checkpoints that a run has left."""

from lumen.checkpoint import find_checkpoints


def list_checkpoints(tmp_path, run="run"):
    return [path.name for path in find_checkpoints(tmp_path / "runs" / run / "checkpoints")]
