"""Objects of Lumen that `hydra.utils.instantiate` builds, with the containers of OmegaConf as arguments."""

from pathlib import Path

import hydra
import pytest
import torch
from omegaconf import OmegaConf

import lumen
from tests.helpers.pages import run_programs
from tests.helpers.tasks import Regression, loader, quiet_trainer

TRAINER = OmegaConf.create("""
_target_: lumen.Trainer
max_epochs: 2
accelerator: cpu
accumulate_grad_batches: {1: 2}
max_time: {hours: 1}
log_level: {root: WARNING}
enable_progress_bar: false
enable_model_summary: false
num_sanity_val_steps: 0
""")
CALLBACKS = """
- {_target_: lumen.EarlyStopping, monitor: train_loss, check_finite: true, stopping_threshold: null}
- {_target_: lumen.ModelCheckpoint, monitor: train_loss, save_last: true, train_time_interval: null}
- {_target_: lumen.GradientAccumulationScheduler, scheduling: {1: 2}}
- {_target_: lumen.LearningRateMonitor, logging_interval: epoch}
- {_target_: lumen.ModelSummary, max_depth: -1}
"""


class Logged(Regression):
    def training_step(self, batch):
        self.log("train_loss", loss := super().training_step(batch), on_step=False, on_epoch=True)
        return loss


class Configured(Regression):
    """Task whose optimizer, and whose nested settings, come from a config."""

    def __init__(self, optimizer, layers, extra=None):
        super().__init__()
        self.save_hyperparameters()
        self.seen = type(layers)

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, self.hparams.layers["milestones"])]


TASK = OmegaConf.create(f"""
_target_: {__name__}.Configured
layers: {{milestones: [1, 2], names: [a, b]}}
optimizer: {{_target_: torch.optim.AdamW, _partial_: true, lr: 0.01, betas: [0.9, 0.99]}}
extra: {{width: "${{w}}"}}
""")


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_trainer_accepts_containers_of_every_conversion(tmp_path, convert):
    config = OmegaConf.merge(TRAINER, {"_convert_": convert, "default_root_dir": str(tmp_path)})
    callbacks = [hydra.utils.instantiate(each) for each in OmegaConf.create(CALLBACKS)]
    scheduled = hydra.utils.instantiate(config, callbacks=callbacks, accumulate_grad_batches=1)
    callbacks = [each for each in callbacks if not isinstance(each, lumen.GradientAccumulationScheduler)]
    trainer = hydra.utils.instantiate(config, callbacks=callbacks, logger=[lumen.CSVLogger()])
    assert trainer.plan.accumulate == scheduled.plan.accumulate == {0: 1, 1: 2}
    assert {type(each) for each in callbacks} <= {type(each) for each in trainer.callbacks}
    trainer.fit(Logged(), loader(32, 8))
    assert trainer.global_step == 4 + 2


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])
def test_configured_tasks_resume_and_load(tmp_path, convert):
    config = OmegaConf.create({"w": 3, "task": OmegaConf.merge(TASK, {"_convert_": convert})})

    def fit(folder, steps, **options):
        trainer, task = (
            quiet_trainer(tmp_path / folder, max_steps=steps, **options),
            hydra.utils.instantiate(config.task),
        )
        trainer.fit(task, loader(32, 8))
        return trainer, task

    whole = fit("whole", 6)[1]
    path = fit("first", 3)[0].checkpoint_callback.last_model_path
    trainer, task = fit("second", 6, resume=path)
    assert all(map(torch.equal, task.parameters(), whole.parameters()))
    with pytest.raises(
        lumen.errors.CheckpointMismatch, match=r"optimizer.*load_from_checkpoint\(PATH, optimizer=\.\.\."
    ):
        Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path)
    loaded = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, optimizer=None)
    assert loaded.seen is task.seen
    assert loaded.hparams.layers == {"milestones": [1, 2], "names": ["a", "b"]}
    assert loaded.hparams.extra == {"width": 3}


class Composed(lumen.TaskModule):
    """Task that has the whole config as its only argument, and reads entries as attributes."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.net, self.text = torch.nn.Linear(6, config.net.width), config.net.text

    def training_step(self, batch):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_whole_configs_load_with_their_attributes(tmp_path):
    config = OmegaConf.create({"width": 3, "net": {"width": "${width}", "text": "a"}})
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Composed(config), loader(32, 8))
    path = trainer.checkpoint_callback.last_model_path
    loaded = Composed.load_from_checkpoint(path)
    assert OmegaConf.is_config(loaded.hparams.net)
    assert torch.equal(loaded.net.weight, trainer.lightning_module.net.weight)


def test_loaded_configs_read_no_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("CITY", "Oslo")
    extra = OmegaConf.create({"text": r"\${oc.env:CITY}", "more": r"\\${oc.env:CITY}"})
    trainer = quiet_trainer(tmp_path, max_steps=1)
    trainer.fit(Configured(torch.optim.SGD, {"milestones": [1]}, extra), loader(32, 8))
    loaded = Configured.load_from_checkpoint(trainer.checkpoint_callback.last_model_path, optimizer=None)
    assert loaded.hparams.extra["text"] == "${oc.env:CITY}"


def test_programs_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *_, found = run_programs("docs/migration/hydra.md")
    assert Path(found["path"]).parent.parent == Path("out/classifier")
    assert torch.equal(found["loaded"].net.weight, found["task"].net.weight)
