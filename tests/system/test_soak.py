"""Two runs of some minutes, and the same ones with constant faults: no growth, and equal results."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil
import pytest

from lumen.checkpoint import Checkpoint, find_checkpoints
from tests.helpers.jobs import find_processes

MINUTES, SEED = float(os.environ.get("LUMEN_SOAK_MINUTES", "30")), os.environ.get("LUMEN_TORTURE_SEED", "0")
SCRIPT = """
import sys
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lumen
from tests.helpers.loader_run import Shuffling

steps, minutes, by_hand = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "by hand"

class Task(lumen.TaskModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = not by_hand
        self.net = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 1))

    def training_step(self, batch):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        if by_hand:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_fit_end(self):
        values = [each.tolist() for each in self.parameters()]
        Path(f"ended-{self.global_rank}").write_text(f"{values} {self.trainer.newest_values}")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

class Shuffled(lumen.DataModule):
    def setup(self, stage):
        self.data = TensorDataset(torch.randn(2000, 6), torch.randn(2000, 1))

    def train_dataloader(self):
        if by_hand:
            return DataLoader(Shuffling(2000), 8)
        return DataLoader(self.data, 8, shuffle=True, num_workers=1, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.data, 100)

lumen.seed_everything(5)
limit = {"max_steps": steps} if steps else {"max_steps": 10**9, "max_time": {"minutes": minutes}}
lumen.Trainer(
    **limit, devices=2, strategy="ddp", accelerator="cpu", name="run", resume="auto", max_restarts=10**6,
    callbacks=[lumen.ModelCheckpoint(every_n_train_steps=100, keep_last=2), *[lumen.EMA(0.99)] * by_hand],
    log_every_n_steps=10, logger="tensorboard", enable_progress_bar=False, enable_model_summary=False,
).fit(Task(), Shuffled())
"""


def start(kind, steps, minutes=0.0):
    with open("output", "ab") as output:
        words = [sys.executable, "job.py", str(steps), str(minutes), kind]
        return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def measure_process(process):
    """Return the current use of a process: memory in MB, threads, open files."""
    return process.memory_info().rss / 2**20, process.num_threads(), process.num_fds()


def list_ranks(job):
    """Return the training processes: children of the launcher that know their rank."""
    found = []
    for each in psutil.Process(job.pid).children():
        with suppress(psutil.NoSuchProcess):
            found += [each] if "RANK" in each.environ() else []
    return found


def read_result():
    end = Checkpoint.open(find_checkpoints(Path("runs/run/checkpoints"))[-1])
    parts = [(part, name) for part in ("model", "optimizer") for name in sorted(end.list_tensor_names(part))]
    values = {each: end.read_tensor(*each).tolist() for each in parts}
    ended = [Path(f"ended-{rank}").read_text() for rank in range(2)]
    return end.info["step"], values, Path("runs/run/metrics.csv").read_bytes(), ended


def get_end(job, limit_s):
    code = job.wait(limit_s)
    time.sleep(1)
    left = {pid for pid in find_processes(".") if pid != os.getpid()}
    assert not left, (left, Path("output").read_text()[-3000:])
    return code


@pytest.mark.torture
@pytest.mark.time_limit(20_000)
@pytest.mark.parametrize("kind", ["shuffled", "by hand"], ids=["shuffled", "by hand, average, stream"])
def test_disturbed_soaks_grow_nothing_and_differ_nowhere(program_directory, kind):
    Path("job.py").write_text(SCRIPT)
    grown = train_uninterrupted(kind, 0.2 * MINUTES)
    expected = read_result()
    Path("runs").rename("undisturbed")
    Path("output").unlink()
    done = train_with_faults(kind, expected[0])
    assert read_result() == expected
    said = ", ".join(f"{count} x {name}" for name, count in sorted(done.items()))
    print(f"\n{kind}: {expected[0]} steps in {0.2 * MINUTES:.0f} minutes")
    print(f"{grown:+.1f} MB in the last half; {said}: same bits")


def train_uninterrupted(kind, minutes):
    """Train for some minutes, in which the processes must not grow. Return the growth in MB."""
    job, seen = start(kind, 0, minutes), {}
    while job.poll() is None:
        for process in [psutil.Process(job.pid), *list_ranks(job)]:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                seen.setdefault(process.pid, []).append(measure_process(process))
        time.sleep(minutes * 60 / 200)
    assert get_end(job, 60) == 0, Path("output").read_text()[-3000:]
    grown = []
    for rows in seen.values():
        rows = rows[len(rows) // 3 : -3]  # without start and end
        early, late = rows[: len(rows) // 4], rows[-(len(rows) // 4) :]
        memory, threads, files = ([median(row[k] for row in part) for part in (early, late)] for k in range(3))
        assert threads[1] <= threads[0] and files[1] <= files[0], (threads, files)  # noqa: PT018
        grown.append(memory[1] - memory[0])
    assert max(grown) < 8, seen
    return max(grown)


def train_with_faults(kind, steps):
    """Train the same steps; 40 times, kill, stop or suspend ranks. Return the faults."""
    draw, done, next_step = random.Random(SEED), Counter(), steps // 40
    job = start(kind, steps)
    while job.poll() is None:
        time.sleep(draw.uniform(0.1, 2))
        ranks = list_ranks(job)
        if newest_step() < next_step or not ranks:
            continue
        next_step = newest_step() + steps // 40
        how = draw.choice(["kill -9 of a rank", "kill -9 of a data worker", "SIGTERM", "SIGSTOP for 3 s"])
        rank = draw.choice(ranks)
        with suppress(psutil.NoSuchProcess):
            if how == "SIGTERM":
                job.send_signal(signal.SIGTERM)
                assert get_end(job, 120) in (0, 143), Path("output").read_text()[-3000:]
                job = start(kind, steps)
            elif how == "SIGSTOP for 3 s":
                rank.suspend()
                time.sleep(3)
                rank.resume()
            else:
                draw.choice([rank] if how.endswith("rank") else rank.children() or [rank]).kill()
            done[how] += 1
    assert get_end(job, 60) == 0, Path("output").read_text()[-3000:]
    restarts = len(re.findall(r"restart \d+ of", Path("output").read_text()))
    assert restarts >= done["kill -9 of a rank"] // 2  # a finished run is not started again
    return done


def newest_step():
    return max((int(each.name[5:]) for each in Path("runs/run/checkpoints").glob("step-????????")), default=0)
