"""Finding, setting aside and removing checkpoints in their folder."""

import hashlib

import pytest

from lumen.checkpoint.format.folder import (
    newest_valid,
    remove_checkpoint,
)
from lumen.distributed.processes import ALONE
from tests.helpers.checkpoints import small


def verify(folder, processes=ALONE, *, removes=True):
    """Find the newest checkpoint of two; it may be removed, and another one saved, in the middle of verifying it."""
    digest = hashlib.file_digest

    def removing(file, algorithm):
        patch.undo()
        remove_checkpoint(folder / "step-2")
        small(folder / "step-3")
        return digest(file, algorithm)

    with pytest.MonkeyPatch.context() as patch:
        if removes:
            patch.setattr(hashlib, "file_digest", removing)
        return newest_valid(folder, pytest.fail, processes).path.name
