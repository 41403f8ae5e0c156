"""Run that may be killed at its end, and started again: `main(**options)` in the current directory."""

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

import torch

import lumen
from tests.helpers.sharded import unshard
from tests.helpers.tasks import Regression, loader

HOOKS = ("on_fit_start", "on_train_start", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown")
LAST = 8  # step
KINDS = {
    "plain": dict,
    "average": lambda: {"callbacks": [lumen.EMA(0.8)]},
    "mean": lambda: {"callbacks": [lumen.SWA(1e-2, 0)]},
    "middle of an epoch": lambda: {"callbacks": [lumen.EMA(0.8)], "max_steps": LAST - 2},
    "stopped early": lambda: {
        "callbacks": [lumen.EarlyStopping("val_loss", patience=0, min_delta=100.0)],
        "max_epochs": 9,
    },
    "out of time": lambda: {"max_epochs": 99, "max_time": {"milliseconds": 300}},
    "by hand": dict,
}


class Ended(Regression):
    """Task that logs in every way, and saves in `on_train_end` like users."""

    def __init__(self, by_hand=False):
        super().__init__(dropout=0.1)
        self.automatic_optimization = not by_hand

    def training_step(self, batch):
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, on_epoch=True, prog_bar=True)
        self.log("of_steps", 2 * loss)
        self.log("of_epochs", 3 * loss, on_step=False, on_epoch=True, logger=False)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch):
        super().validation_step(batch)
        self.log("val_both", 2.0 * self.global_step, on_step=True, on_epoch=True, logger=False)

    def on_train_end(self):
        self.trainer.save_checkpoint(self.trainer.default_root_dir / "mine")


class Notes(lumen.Callback):
    """Callback that records its hooks, and kills the process in one of them."""

    def __init__(self, strike=None):
        self.called = []
        for name in HOOKS:
            setattr(self, name, partial(self._happens, name, strike))

    def _happens(self, name, strike, trainer, *_):
        if trainer.state.fn == "fit":
            self.called.append(name)
            if name == strike:
                os.kill(os.getpid(), signal.SIGKILL)


class Pruning(lumen.loggers.Logger):
    """ModelCheckpoint that kills the process after the last commit, before it removes old checkpoints."""

    def __init__(self, last):
        super().__init__()
        self.last = last

    def log_metrics(self, metrics, step):
        self.step = step

    def after_save_checkpoint(self, checkpoint_callback):
        if self.step == self.last and "validating" not in checkpoint_callback.last_model_path:
            os.kill(os.getpid(), signal.SIGKILL)


class Interrupted(lumen.Callback):
    """Callback that requests a stop in the last validation."""

    def on_validation_batch_start(self, trainer, task, batch, batch_idx, dataloader_idx=0):
        if trainer.global_step == LAST:
            os.kill(os.getpid(), signal.SIGTERM)


def train_run(folder, kind="plain", strike=None, dirpath=None, **options):
    """Train. Return the trainer, the task, and the called hooks."""
    task, notes = Ended(by_hand=kind == "by hand"), Notes(strike)
    given = {"max_epochs": 2, **KINDS[kind](), **options}
    if "max_steps" in given:
        del given["max_epochs"]
    saver = lumen.ModelCheckpoint(dirpath, monitor="val_loss", keep_last=1)
    given["callbacks"] = [notes, *given.get("callbacks", ()), saver, *[Interrupted()] * (strike == "validation")]
    trainer = lumen.Trainer(
        **given, default_root_dir=folder, name="run", resume="auto", accelerator="cpu", seed=3, log_level="ERROR",
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=3,
        logger=[Pruning(given.get("max_steps", LAST))] if strike == "pruning" else True,
    )  # fmt: skip
    trainer.fit(task, loader(32, 8 // trainer.world_size), val_dataloaders=loader(16, shuffle=False))
    return trainer, task, notes.called


def read_final_state(trainer, task, called):
    """Return the final state in the task, in the trainer and in the directory."""
    stopping, saver = trainer.early_stopping_callback, trainer.checkpoint_callback
    optimizers = [each.state_dict() for each in trainer.optimizers]
    end = {
        "task": [unshard(each).tolist() for each in task.state_dict().values()],
        "modes": [module.training for module in task.modules()],
        "callback_metrics": {name: float(each) for name, each in trainer.callback_metrics.items()},
        "logged_metrics": {name: float(each) for name, each in trainer.logged_metrics.items()},
        "counts": (trainer.global_step, trainer.current_epoch, trainer.should_stop, trainer.run.ending.limit_reached),
        "best": (Path(saver.best_model_path).name, float(saver.best_model_score), float(saver.current_score)),
        "ranked": {Path(name).name: float(each) for name, each in saver.best_k_models.items()},
        "stopping": stopping and (stopping.stopped_epoch, stopping.wait_count, stopping.stopping_reason),
        "rates": [group["lr"] for each in optimizers for group in each["param_groups"]],
        "moments": [str(each["state"]) for each in optimizers],
        "hooks": called[-2:],
    }
    root = trainer.default_root_dir
    end["files"] = sorted(str(path.relative_to(root)) for path in root.rglob("*") if "/logs" not in str(path))
    end["rows"] = (trainer.run_directory / "metrics.csv").read_text()
    end["test"] = trainer.test(task, loader(16, shuffle=False))
    return json.loads(json.dumps(end))


def main(**options):
    torch.set_num_threads(1)
    Path("runs").mkdir(exist_ok=True)
    end = read_final_state(*train_run(Path("runs"), **options))
    if os.environ.get("RANK", "0") == "0":
        Path("end.json").write_text(json.dumps(end))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
