"""Memory of saving and loading, measured in separate processes."""

import pytest

from tests.helpers.programs import run_and_read_numbers

CHILD = """
import re, sys
from pathlib import Path
import torch, lumen
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def memory(which):
    return int(re.search(which + r":\\s+([0-9]+) kB", Path("/proc/self/status").read_text())[1]) / 1024

def begin():
    global start
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    start = memory("VmRSS")

class Stack(lumen.TaskModule):
    def __init__(self, layers):
        super().__init__()
        self.net = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(layers)])

    def training_step(self, batch):
        return self.net(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-5)

class Watch(lumen.Callback):
    def setup(self, trainer, task, stage):
        begin()

    def on_fit_start(self, trainer, task):
        print(memory("VmHWM") - start)

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        if trainer.global_step == 1:
            begin()  # the optimizer's state is there, the first copy is not

    def on_train_end(self, trainer, task):
        print(memory("VmHWM") - start)

def fit(folder, layers, steps, asynchronous, *callbacks):
    saver = lumen.ModelCheckpoint(every_n_train_steps=1, asynchronous=asynchronous)
    lumen.Trainer(
        max_steps=steps, default_root_dir=folder, name="run", resume="auto", callbacks=[*callbacks, saver],
        enable_progress_bar=False, enable_model_summary=False, logger=False, log_level="ERROR",
    ).fit(Stack(layers), DataLoader(TensorDataset(torch.randn(64, 1024)), 8))

fit(sys.argv[1] + "/warm-up", 1, 2, True)  # whatever is imported or allocated once
fit(sys.argv[1], 16, int(sys.argv[2]), sys.argv[3] == "True", Watch())
"""
MODEL_MIB, STATE_MIB = 64, 192  # of 16 layers, without and with the two moments of Adam; a layer has 4 MiB


def measure_peaks(folder, steps, asynchronous):
    """Return peaks in MiB: of loading beyond the model, and of training and saving beyond the state."""
    return run_and_read_numbers("-c", CHILD, folder, steps, asynchronous)


def test_a_resumed_run_never_holds_its_state_twice(tmp_path):
    measure_peaks(tmp_path, 1, False)
    loaded, _ = measure_peaks(tmp_path, 2, False)
    moments = STATE_MIB - MODEL_MIB
    assert moments - 4 < loaded < moments + 16


@pytest.mark.slow
def test_asynchronous_save_takes_one_copy_synchronous_none(tmp_path):
    at_once, asynchronous = (measure_peaks(tmp_path / str(kind), 4, kind)[1] for kind in (False, True))
    assert at_once < 24
    assert STATE_MIB - 4 < asynchronous - at_once < STATE_MIB + 24
