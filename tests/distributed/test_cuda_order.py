"""Order, device and number of CUDA calls, shown without a device.

`test_cuda.py` tests the effect on a device.
"""

import multiprocessing
import os

import pytest
import torch

import lumen
from lumen.distributed import process_groups
from lumen.distributed.processes import Processes
from lumen.errors import ConfigError, TrainingError
from tests.helpers.cuda_order import Synced
from tests.helpers.tasks import Regression, bare_trainer, loader


def timeouts_of_parts(tmp_path):
    strategy = lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=2, timeout_s=33, startup_timeout_s=44)
    trainer = bare_trainer(tmp_path, strategy=strategy, max_steps=1)
    seen = []

    class Looking(Regression):
        def on_train_start(self):
            seen.append(limits(strategy))

        def on_train_batch_end(self, outputs, batch, batch_idx):
            seen.append(limits(strategy))

    trainer.fit(Looking(), loader())
    return seen


def limits(strategy):
    parts = strategy.device_mesh.get_all_groups()
    return {part._get_backend(torch.device("cpu")).options._timeout.total_seconds() for part in parts}


@pytest.mark.slow
def test_subgroups_have_timeouts_of_default_group(group, tmp_path):
    for seen in group(4).run(timeouts_of_parts, tmp_path):
        assert seen == [{74.0}, {63.0}]  # half a minute later than the hang watch


def train_synced(tmp_path):
    task = Synced()
    task.norm.requires_grad_(False)
    trainer = bare_trainer(tmp_path, strategy="fsdp", max_epochs=1)  # DDP refuses the norm on a CPU
    with pytest.raises(TrainingError, match="has no loss in step 2, but SyncBatchNorm needs a forward and a backward"):
        trainer.fit(task, loader())


def test_rank_without_loss_is_refused_with_sync_batchnorm(group, tmp_path):
    group(2).run(train_synced, tmp_path)


def leave_groups(rank, store, fails, later, answers):
    """Open the groups, close them as if NCCL held them, and return how they were closed."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    how = []
    process_groups._CLOSE_TIMEOUT_S = 2.0 if later else 50.0
    process_groups.dist.get_backend = lambda group=None: "nccl" if how == ["closing"] else "gloo"
    process_groups.abort_groups = lambda: how.append("aborted")
    torch.cuda.nccl.version = lambda: (2, 27)  # torch includes this text in its messages
    destroy = process_groups.dist.destroy_process_group
    process_groups.dist.destroy_process_group = lambda group=None: how.append("destroyed") or destroy(group)
    processes = Processes.find()
    processes.address = f"file://{store}"
    processes.connect(torch.device("cpu"))
    try:
        with processes.explain_lost_ranks():
            if rank in fails:
                raise fails[rank]
    except BaseException as error:
        how.append(type(error).__name__)
    how[:] = ["closing"]
    if rank not in later:
        processes.close()
    answers.put((rank, how[1:]))
    answers.close()
    answers.join_thread()
    os._exit(0)


@pytest.mark.parametrize(
    ("fails", "later", "left"),
    [
        ({}, (), {0: ["destroyed"], 1: ["destroyed"]}),
        ({1: ConfigError("a mistake")}, (), {0: ["aborted"], 1: ["aborted"]}),
        ({}, (1,), {0: ["aborted"], 1: []}),
    ],
    ids=["together", "an error", "one is gone"],
)
def test_exit_never_waits_for_nccl(tmp_path, fails, later, left):
    """Lumen destroys the groups if all ranks exit together, and aborts them otherwise."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    started = [
        context.Process(target=leave_groups, args=(rank, tmp_path / "store", fails, later, answers)) for rank in (0, 1)
    ]
    for process in started:
        process.start()
    try:
        assert dict(answers.get(timeout=60) for _ in started) == left
    finally:
        for process in started:
            process.kill()
            process.join()
