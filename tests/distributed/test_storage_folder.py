"""Finding, setting aside and removing checkpoints in their folder."""

import pytest
import torch

from lumen.distributed.processes import Processes
from tests.helpers.checkpoints import small
from tests.helpers.storage_folder import verify


def verify_together(folder, removing):
    (processes := Processes.found()).connect(torch.device("cpu"))
    return verify(folder, processes, removes=processes.rank == removing)


@pytest.mark.parametrize("removing", [0, 1])
def test_what_is_removed_while_several_processes_verify_it_is_no_damage_for_any(group, tmp_path, removing):
    for step in (1, 2):
        small(tmp_path / f"step-{step}")
    assert group(2).run(verify_together, tmp_path, removing) == ["step-3"] * 2
