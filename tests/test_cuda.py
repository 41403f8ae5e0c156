"""What only a CUDA device can show about the loop."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import lumen
from tests.tasks import quiet_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="not proven here: there is no CUDA device")


class Classifier(lumen.TaskModule):
    """Forbids the host to wait for the device from step 5 to step 105."""

    def __init__(self, *, logs=False, weighs=False):
        super().__init__()
        self.logs, self.weighs = logs, weighs
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.losses = []

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.cross_entropy(self.net(inputs), targets)
        self.losses.append(loss.detach())
        if self.logs:
            self.log("loss", loss, on_epoch=True)
            self.log("most", loss, on_step=False, on_epoch=True, reduce_fx="max")
        return (loss, float(len(inputs))) if self.weighs else loss

    def on_before_zero_grad(self, optimizer):
        if self.global_step in (5, 105):
            torch.cuda.set_sync_debug_mode("error" if self.global_step == 5 else "default")

    def on_exception(self, exception):
        torch.cuda.set_sync_debug_mode("default")

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)


def batches(*, pin_memory):
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(7200, 16, generator=generator), torch.randint(4, (7200,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=32, pin_memory=pin_memory)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("task", "options"),
    [
        ({}, {}),
        ({"logs": True}, {}),
        ({"logs": True}, {"log_every_n_steps": 1, "logger": lumen.CSVLogger()}),
        ({"weighs": True}, {}),
        ({}, {"gradient_clip_val": 0.1}),
        ({}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
        ({}, {"accumulate_grad_batches": 2}),
        ({"logs": True, "weighs": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    ],
    ids=str,
)
def test_no_step_waits_for_what_it_has_queued(tmp_path, precision, task, options):
    options = {"max_steps": 110, "precision": precision, "log_every_n_steps": 1000} | options
    trainer = quiet_trainer(tmp_path, accelerator="cuda", **options)
    trainer.fit(Classifier(**task), batches(pin_memory=True))  # no epoch ends, where it may wait
    assert trainer.global_step == 110


def test_batches_copied_on_a_stream_of_their_own_are_the_same(tmp_path):
    losses = []
    for device, pin_memory in (("cpu", False), ("cuda", False), ("cuda", True)):
        torch.manual_seed(0)
        task = Classifier()
        quiet_trainer(tmp_path, accelerator=device, max_steps=4).fit(task, batches(pin_memory=pin_memory))
        losses.append(torch.stack(task.losses).cpu())
    torch.testing.assert_close(losses[1], losses[0])
    assert torch.equal(losses[1], losses[2])
