"""python pretrain.py --epochs 30: learn without labels, watch by a probe, keep the encoder."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning import loggers as pl_loggers
from pytorch_lightning.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint

from selfsup.callbacks import LossHistory, MomentumTeacher
from selfsup.data import ViewsDataModule
from selfsup.module import BYOL


def trainer_for(root: Path, epochs: int, **more) -> pl.Trainer:
    settings = dict(
        default_root_dir=root,
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        precision="32-true",
        gradient_clip_val=1.0,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        strategy="auto",
    )
    settings.update(more)
    return pl.Trainer(
        logger=pl_loggers.CSVLogger(save_dir=str(root), name="byol"),
        callbacks=[
            MomentumTeacher(start=0.9),
            LossHistory(),
            LearningRateMonitor("step"),
            EarlyStopping("accuracy_held_out", 0.0, 50, mode="max"),
            ModelCheckpoint(monitor="accuracy_held_out", mode="max", filename="best", save_last="link"),
        ],
        **settings,
    )


def export_encoder(model: BYOL, path: Path) -> None:
    torch.save(model.student[0].state_dict(), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("out"))
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--resume", default=None)
    arguments = parser.parse_args()
    pl.seed_everything(7)
    model, data = BYOL(), ViewsDataModule()
    trainer = trainer_for(arguments.root, arguments.epochs, enable_progress_bar=True)
    trainer.fit(model, datamodule=data, ckpt_path=arguments.resume)
    export_encoder(model, arguments.root / "encoder.pt")


if __name__ == "__main__":
    main()
