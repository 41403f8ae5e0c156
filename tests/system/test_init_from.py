"""Memory of `init_from`."""

import pytest

from lumen.checkpoint import find_checkpoints
from tests.helpers.file_server import serve_folder
from tests.helpers.programs import run_and_read_numbers

MEMORY = """
import resource, sys, torch, torch._dynamo, lumen  # the compiler comes with the first optimizer
from pathlib import Path
from fsspec.implementations import http
from tests.helpers.tasks import loader, quiet_trainer
from torch import nn

class Big(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList(torch.zeros(1 << 20) for _ in range(50))  # 200 MiB

    def training_step(self, batch):
        return sum(layer[0] for layer in self.layers)

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

root, where = Path(sys.argv[1]), sys.argv[2]
task = Big()
if where == "save":
    raise SystemExit(quiet_trainer(root, max_steps=1).fit(task, loader()))
quiet_trainer(root, logger=False).validate(task, loader())  # whatever is imported late is there now
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if where == "resume":
    quiet_trainer(root, resume="auto", max_steps=1).fit(task, loader())
    assert task.optimizers().state[task.layers[0]]["momentum_buffer"][0] == 1
else:
    quiet_trainer(root, logger=False).validate(task, loader(), ckpt_path=lumen.Weights(where))
assert task.layers[0][0] != 0
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


SLACK_MIB = 48  # for the allocator, the libraries and the page cache; a second copy of the model would take 200


def measure_growth_mib(root, where):
    """Return the additional MiB of a process that loads a model of 200 MiB after building it."""
    return sum(run_and_read_numbers("-c", MEMORY, root, where))


@pytest.mark.slow
def test_loading_needs_the_memory_of_one_tensor_more(tmp_path):
    measure_growth_mib(tmp_path, "save")
    (checkpoint,) = find_checkpoints(tmp_path / "runs/run/checkpoints")
    assert measure_growth_mib(tmp_path, checkpoint) < 4 + SLACK_MIB
    assert measure_growth_mib(tmp_path, "resume") < 200 + 4 + SLACK_MIB  # with the optimizer's state
    with serve_folder(checkpoint) as (url, _):
        assert measure_growth_mib(tmp_path, url) < 4 + SLACK_MIB
