"""Folder of checkpoints: find, set aside and remove them."""

import pytest
import torch

from lumen.distributed.processes import Processes
from tests.helpers.checkpoints import save_small
from tests.helpers.storage_folder import verify


def verify_together(folder, removing):
    (processes := Processes.find()).connect(torch.device("cpu"))
    return verify(folder, processes, removes=processes.rank == removing)


@pytest.mark.parametrize("removing", [0, 1])
def test_checkpoint_removed_during_verification_is_no_damage(group, tmp_path, removing):
    for step in (1, 2):
        save_small(tmp_path / f"step-{step}")
    assert group(2).run(verify_together, tmp_path, removing) == ["step-3"] * 2
