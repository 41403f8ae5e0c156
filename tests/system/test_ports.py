"""Ports: a run on one host opens no port that another host can reach."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.sockets import filter_reachable, find_addresses

pytestmark = pytest.mark.usefixtures("program_directory")

SCRIPT = """
import json, os, sys
import torch.distributed as dist
import lumen
from tests.helpers.sockets import find_addresses
from tests.helpers.tasks import Regression, loader

launcher = os.environ.get("LUMEN_LAUNCHER")
seen = {}

def look(phase):
    # The launcher is the parent; under srun and torchrun the parent is theirs.
    processes = [os.getpid(), *([int(launcher)] if launcher else [])]
    seen[phase] = sorted({*seen.get(phase, []), *find_addresses(*processes)})

class Spy(lumen.Callback):
    def setup(self, trainer, task, stage): look(f"setup of {stage}")
    def on_train_batch_end(self, trainer, *_): look("training")
    def on_validation_batch_end(self, trainer, *_, **__): look("validation")
    def on_test_batch_end(self, trainer, *_, **__): look("test")
    def on_predict_batch_end(self, trainer, *_, **__): look("predict")
    def on_step_checkpoint(self, trainer, task): look("checkpoint")
    def teardown(self, trainer, task, stage): look(f"teardown of {stage}")

class Task(Regression):
    def test_step(self, batch): self.training_step(batch)
    def validation_step(self, batch): self.test_step(batch)
    def predict_step(self, batch): return batch[0]
    def on_train_batch_end(self, *_):
        if (self.trainer.global_step, os.environ.get("LUMEN_RESTART")) == (2, None) and "restart" in sys.argv:
            os._exit(3)

if __name__ == "__main__":
    look("start")
    if "own group" in sys.argv and "RANK" in os.environ:
        dist.init_process_group("gloo")
        look("own group")
    trainer = lumen.Trainer(
        max_steps=4, accelerator="cpu", callbacks=[Spy(), lumen.ModelCheckpoint(every_n_train_steps=1)], name="run",
        enable_progress_bar=False, enable_model_summary=False, resume="auto", **json.loads(sys.argv[1]),
    )
    data = loader(16, 4)
    trainer.fit(Task(), data, data)
    for stage in (trainer.validate, trainer.test, trainer.predict):
        stage(Task(), data)
    look("end")
    rank, world = trainer.global_rank, trainer.world_size
    names = {name: os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")}
    with open(f"seen-{rank}.json", "w") as file:
        json.dump({"world": world, "seen": seen, "names": names}, file)
"""
PHASES = {"start", "setup of fit", "training", "validation", "checkpoint", "teardown of fit", "test", "predict", "end"}
TWO = {"devices": 2}


def observe_ranks(settings, *words, environments=({},)):
    """Run the script, once for each environment, in parallel; return the observations of each rank."""
    Path("train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", json.dumps(settings), *words]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=os.environ | each, text=True)
        for each in environments
    ]
    said = [process.communicate(timeout=180)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(said)
    return [json.loads(path.read_text()) for path in sorted(Path().glob("seen-*.json"))]


def check(ranks, world, phases=PHASES):
    assert [each["world"] for each in ranks] == [world] * world
    for rank in ranks:
        assert phases <= rank["seen"].keys()
        assert {phase: found for phase, seen in rank["seen"].items() if (found := filter_reachable(seen))} == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({**TWO, "strategy": "ddp"}, ()),
        pytest.param({**TWO, "strategy": "fsdp"}, (), marks=pytest.mark.slow),
        pytest.param({**TWO, "max_restarts": 1}, ("restart",), marks=pytest.mark.slow),
        pytest.param({"max_restarts": 1}, (), marks=pytest.mark.slow),
        pytest.param(TWO, ("own group",), marks=pytest.mark.slow),
    ],
    ids=["ddp", "fsdp", "restart", "one-device", "own-group"],
)
def test_launched_run_listens_on_loopback_alone(settings, words):
    ranks = observe_ranks(settings, *words)
    check(ranks, settings.get("devices", 1), PHASES | {*words} - {"restart"})
    if len(ranks) > 1:  # The launcher holds the store, each rank the listeners of gloo.
        assert all(each["seen"]["training"] for each in ranks)
        assert all(set(each["names"].values()) == {"lo"} for each in ranks)


@pytest.mark.parametrize("by", ["hand", "slurm"])
def test_ranks_of_one_host_listen_on_loopback(by):
    """They start without torch's launcher, so rank 0 opens the store."""
    if by == "hand":
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        alike = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        environments = [{**alike, "RANK": str(rank)} for rank in range(2)]
    else:
        alike = {
            "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": socket.gethostname(), "SLURM_NODEID": "0",
            "MASTER_ADDR": socket.gethostname(),
        }  # fmt: skip
        environments = [{**alike, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    ranks = observe_ranks({}, environments=environments)
    check(ranks, 2)
    assert len(ranks[0]["seen"]["training"]) == 1


VERIFIED = """
import json, os
from tests.helpers.verified_tasks import Clean, Data
from tests.helpers.sockets import find_addresses

class Task(Clean):
    def on_train_batch_end(self, *_):
        with open(f"seen-{os.getpid()}.json", "w") as file:
            found = sorted(find_addresses(os.getpid()))
            json.dump([self.trainer.world_size, found, os.environ["GLOO_SOCKET_IFNAME"]], file)
"""


def test_variants_of_verify_listen_on_loopback_alone():
    Path("mine.py").write_text(VERIFIED)
    Path("mine.yaml").write_text("{seed_everything: 1, model: mine.Task, data: mine.Data, trainer: {max_epochs: 3}}")
    command = [sys.executable, "-m", "lumen", "verify", "--config", "mine.yaml", "--only", "processes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    seen = [json.loads(path.read_text()) for path in Path().glob("seen-*.json")]
    assert max(world for world, *_ in seen) > 1, done.stdout + done.stderr
    assert all(addresses for world, addresses, _ in seen if world > 1)
    assert {name for *_, name in seen} == {"lo"}
    assert {each for _, addresses, _ in seen for each in filter_reachable(addresses)} == set()


def test_one_process_listens_on_loopback_alone():
    check(observe_ranks({"strategy": "fsdp"}), 1)


def test_listeners_of_all_addresses_are_found():
    with subprocess.Popen(
        [sys.executable, "-c", "import socket; s = socket.create_server(('', 0)); print('here', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        process.stdout.readline()
        assert filter_reachable(find_addresses(process.pid)) == {"0.0.0.0"}
        process.communicate("\n")
