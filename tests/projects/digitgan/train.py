"""Train the GAN: python train.py --max-epochs 20."""

import argparse

import lightning as L
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint, RichProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger

from digitgan.callbacks import BalanceWatch, SampleGrid
from digitgan.data import DigitsDataModule
from digitgan.module import DigitGAN


def make_trainer(root: str, max_epochs: int, bar: bool = False, accelerator: str = "cpu") -> L.Trainer:
    callbacks = [
        ModelCheckpoint(
            monitor="val/distance",
            mode="min",
            filename="{epoch}-{step}",
            auto_insert_metric_name=False,
            save_top_k=2,
            save_last=True,
        ),
        SampleGrid(f"{root}/samples"),
        BalanceWatch(),
        LearningRateMonitor(logging_interval="epoch"),
        Timer(duration="00:01:00:00"),
    ]
    if bar:
        callbacks.append(RichProgressBar(refresh_rate=10, leave=True))
    return L.Trainer(
        default_root_dir=root,
        accelerator=accelerator,
        devices=1,
        max_epochs=max_epochs,
        logger=CSVLogger(root, name="gan"),
        callbacks=callbacks,
        log_every_n_steps=5,
        num_sanity_val_steps=1,
        enable_progress_bar=bar,
        enable_model_summary=False,
        use_distributed_sampler=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", default="out")
    parser.add_argument("--max-epochs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--accelerator", default="auto")
    arguments = parser.parse_args()

    L.seed_everything(arguments.seed, workers=True)
    trainer = make_trainer(arguments.root, arguments.max_epochs, bar=True, accelerator=arguments.accelerator)
    model, data = DigitGAN(), DigitsDataModule()
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, ckpt_path="best", verbose=True)
    print("best:", trainer.checkpoint_callback.best_model_path)


if __name__ == "__main__":
    main()
