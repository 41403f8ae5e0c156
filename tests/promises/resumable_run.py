"""Run of test_exact_resume: it may be killed at any moment and started again, on one or several processes.

    python -m tests.promises.resumable_run '{"devices": 2, "strategy": "fsdp", "workers": 2}'

The program works in the current directory and records every trained sample and every commit. An option says where it
kills itself.
"""

import json
import os
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import MeanAbsoluteError

import lumen
from lumen.optim import MultiOptimizer, WholeMatrices
from tests.helpers.loader_run import Forgetful, Sharded, Shuffling
from tests.helpers.object_server import make_environment
from tests.helpers.tasks import FEATURES, Drawing, loader
from tests.promises.lives import BUCKET
from tests.promises.strikes import Strike, Striker

SAMPLES = 50
ROLLS_BACK = {"window": 4, "warmup": 4, "rtol": 0.3, "action": "rollback", "before": 2, "after": 1, "max_rollbacks": 99}
EPOCHS = 3
STRATEGIES = {
    "single": lambda: "single",
    "ddp": lambda: lumen.DDP(bucket_cap_mb=0.0005),  # several buckets
    "fsdp": lambda: lumen.FSDP(wrap="Linear"),
    "hybrid": lambda: lumen.FSDP(sharding_strategy="hybrid_shard", shard_size=2),
    "mesh": lambda: lumen.Mesh(tensor=2),
}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Noisy(lumen.TaskModule):
    """Task with dropout, batch norm, draws of three libraries in the step, torchmetrics, a schedule and a plateau."""

    parallel_plan = {"net.0": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, striker, fits=SAMPLES):
        super().__init__()
        self.lr, self.fits = 1e-2, fits
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 1)
        )
        self.error = MeanAbsoluteError()
        self.striker = striker

    def training_step(self, batch, batch_idx):
        self.striker.happens("train")
        inputs, targets, indices = batch
        if len(indices) > self.fits:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB.")
        prediction = self.net(inputs + 0.01 * (np.random.randn() + random.random()))
        self.error(prediction.float(), targets)
        self.log("error", self.error)
        loss = nn.functional.mse_loss(prediction, targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss, float(len(indices)) * (1.0 + batch_idx % 2)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if not self.trainer.enable_checkpointing:  # a trial of a finder
            return
        strategy = self.trainer.strategy
        if strategy.data_rank * (self.trainer.world_size // strategy.data_world_size) != self.global_rank:
            return  # another rank trains the same samples
        part = batch_idx if self.automatic_optimization else f"{batch_idx} of rank {self.global_rank}"
        entry = [self.current_epoch, self.global_step, part, batch[2].tolist()]
        with open("samples.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")

    def validation_step(self, batch):
        self.striker.happens("validate")
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_train_end(self):
        self.striker.happens("ending")

    def on_fit_end(self):
        self.striker.happens("ending")
        state = {name: whole(each).tolist() for name, each in self.state_dict().items()}
        if self.global_rank == 0:
            Path("ended.json").write_text(json.dumps([state, self.trainer.newest_values], sort_keys=True))

    def teardown(self, stage):
        self.striker.happens("closing")

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.lr)
        step = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return [optimizer], [{"scheduler": step, "interval": "step"}, {"scheduler": plateau, "monitor": "val_loss"}]


class Cut(Noisy):
    """Noisy task without batch norm, with a region of cut layers, which trains equally on any mesh."""

    parallel_plan = {"net.0": "colwise_gather_output", "net.3.0": "colwise", "net.3.2": "rowwise"}  # noqa: RUF012

    def __init__(self, striker):
        super().__init__(striker)
        region = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 32))
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.LayerNorm(32), nn.Dropout(0.3), region, nn.Linear(32, 1))


class Sized(lumen.DataModule):
    """Data module with a searched batch size."""

    def __init__(self):
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self):
        return DataLoader(Drawing(SAMPLES), self.batch_size, shuffle=True)

    def val_dataloader(self):
        return loader(20, 5, shuffle=False)


class ByHand(Noisy):
    """Noisy task with two manual optimizers; one moves in every second batch by the gradients of two."""

    def __init__(self, striker):
        super().__init__(striker)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss, _ = super().training_step(batch, batch_idx)
        front, rear = self.optimizers()
        front.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.clip_gradients(front, gradient_clip_val=0.5)
        front.step()
        with self.toggled_optimizer(rear):
            inputs, targets, _ = batch
            self.manual_backward(nn.functional.l1_loss(self.net(inputs).float(), targets) / 2)
        if batch_idx % 2:
            rear.step()
            rear.zero_grad()
            self.lr_schedulers()[1].step()
        self.lr_schedulers()[0].step()

    def configure_optimizers(self):
        front = torch.optim.AdamW(self.net[:2].parameters(), lr=1e-2)
        rear = torch.optim.SGD(self.net[2:].parameters(), lr=1e-2, momentum=0.9)
        return [front, rear], [torch.optim.lr_scheduler.ExponentialLR(each, 0.97) for each in (front, rear)]


class Part(Shuffling):
    """Self-sharding stream whose parts are equally long, each in its order."""

    shards_itself = True

    def __init__(self, samples):
        super().__init__(samples // int(os.environ.get("WORLD_SIZE", "1")))


#: Loaders of streams, by batch size.
STREAMS = {
    "buffer": lambda size: DataLoader(Shuffling(SAMPLES), size),
    "places of workers": lambda size: StatefulDataLoader(Sharded(SAMPLES), size, num_workers=2, drop_last=True),
    "no state": lambda size: DataLoader(Forgetful(SAMPLES), size),
    "parts": lambda size: DataLoader(Part(SAMPLES), size, drop_last=True),
}


class Taught(Noisy):
    """Noisy task with a teacher, and Muon for the matrices."""

    def __init__(self, striker):
        super().__init__(striker)
        self.teacher = lumen.Teacher(self.net, 0.8, final_decay=1.0, steps=15)

    def training_step(self, batch, batch_idx):
        loss, weight = super().training_step(batch, batch_idx)
        return loss + nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0])), weight

    def configure_optimizers(self):
        trained = [each for each in self.parameters() if each.requires_grad]
        muon = torch.optim.Muon([each for each in trained if each.ndim == 2], lr=1e-2)
        adamw = torch.optim.AdamW([each for each in trained if each.ndim < 2], lr=1e-2)
        return MultiOptimizer([WholeMatrices(muon), adamw])


class Thawing(lumen.BaseFinetuning):
    """Callback that trains the first layer from the second epoch on."""

    def freeze_before_training(self, task):
        self.freeze(task.net[:2], train_bn=False)

    def finetune_function(self, task, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(task.net[:2], optimizer)


def main(
    strategy="single", devices=1, workers=0, precision="fp32", asynchronous=False, accumulate=3,
    max_epochs=EPOCHS, max_steps=None, spikes=False, rolls_back=False, by_hand=False, thaws=False,
    averages=False, finds=False, moves=False, reduction=None, stream=None, s3=None, strike=None,
):  # fmt: skip
    torch.set_num_threads(1)
    lumen.seed_everything(7)
    os.environ |= make_environment(s3) if s3 else {}
    trainer = lumen.Trainer(
        strategy=STRATEGIES[strategy](), devices=devices, accelerator="cpu", max_epochs=max_epochs, max_steps=max_steps,
        accumulate_grad_batches=1 if by_hand or moves else accumulate, precision=precision,
        global_batch_size=16 if moves else None, reduction=reduction,
        gradient_clip_val=None if by_hand else 1.0, seed=7, val_check_interval=2 if stream else 0.5,
        log_every_n_steps=1, default_root_dir=".", name="run", resume="auto", enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            lumen.ModelCheckpoint(
                f"{BUCKET}{Path.cwd()}" if s3 else None, monitor="val_loss", every_n_train_steps=1,
                asynchronous=asynchronous, keep_last=8 if rolls_back else 2,
            ),
            lumen.EarlyStopping("val_loss", patience=100),
            lumen.LearningRateMonitor(),
            *[lumen.SpikeDetection(window=4, warmup=2, rtol=0.15, max_in_a_row=99)] * spikes,
            *[lumen.SpikeDetection(**ROLLS_BACK)] * rolls_back,
            *[Thawing(), lumen.SWA(5e-3, 1, 1)] * thaws,
            *[lumen.EMA(0.9)] * averages,
            *[lumen.BatchSizeFinder(init_val=2)] * finds,
            *[lumen.LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_training_steps=20)] * finds,
        ],
    )  # fmt: skip
    meant = strike is not None and strike[0] == trainer.global_rank
    striker = Striker("run/checkpoints", Strike(*strike)[1:] if meant else None)
    (striker.watch_the_store if s3 else striker.watch_the_disk)()
    if devices == 1 or "RANK" in os.environ:  # but not a process that becomes the launcher
        Path(f"rank-{trainer.global_rank}-{os.getpid()}").touch()
    if finds:
        trainer.fit(Noisy(striker, fits=4), datamodule=Sized())
        return
    kind, batch_size = ByHand if by_hand else Taught if averages else Cut if moves else Noisy, 5 if by_hand else 4
    data = STREAMS[stream](batch_size) if stream else DataLoader(
        Drawing(SAMPLES), batch_size, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )  # fmt: skip
    trainer.fit(kind(striker), data, val_dataloaders=loader(20, 5, shuffle=False))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
