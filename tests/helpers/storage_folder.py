"""Helper for the folder of checkpoints."""

import pytest

from lumen.checkpoint.format import manifest
from lumen.checkpoint.format.folder import open_newest_valid, remove_checkpoint
from lumen.distributed.processes import SINGLE_PROCESS
from tests.helpers.checkpoints import save_small


def verify(folder, processes=SINGLE_PROCESS, *, removes=True):
    """Find the newest of two checkpoints, which may be removed and replaced while it is verified."""
    digest = manifest.compute_sha256

    def removing(path, size):
        patch.undo()
        remove_checkpoint(folder / "step-2")
        save_small(folder / "step-3")
        return digest(path, size)

    with pytest.MonkeyPatch.context() as patch:
        if removes:
            patch.setattr(manifest, "compute_sha256", removing)
        return open_newest_valid(folder, pytest.fail, processes).path.name
