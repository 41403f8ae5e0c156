"""python main.py fit --config configs/base.yaml --config configs/plateau.yaml."""

from __future__ import annotations

import json
from pathlib import Path

from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from wine.data import WineData
from wine.model import WineModel


class WineCLI(LightningCLI):
    """Command line that links the model to the data, and writes a summary after a fit."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.n_features", "model.n_features", apply_on="instantiate")
        parser.link_arguments("data.n_classes", "model.n_classes", apply_on="instantiate")
        parser.add_lightning_class_args(EarlyStopping, "early_stopping")
        parser.set_defaults({"early_stopping.monitor": "val_loss", "early_stopping.patience": 20})
        parser.add_argument("--summary", default=None, help="Where the last metrics are written, as JSON.")

    def after_fit(self) -> None:
        path = self.config["fit"]["summary"]
        if path is not None and self.trainer.is_global_zero:
            metrics = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
            Path(path).write_text(json.dumps({"epochs": self.trainer.current_epoch, **metrics}))


def cli_main(args: ArgsType = None) -> WineCLI:
    return WineCLI(
        WineModel,
        WineData,
        save_config_kwargs={"overwrite": True},
        trainer_defaults={"max_epochs": 30, "accelerator": "cpu", "devices": 1, "use_distributed_sampler": False},
        seed_everything_default=11,
        args=args,
    )


if __name__ == "__main__":
    cli_main()
