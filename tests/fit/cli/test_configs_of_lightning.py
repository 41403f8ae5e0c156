"""Configs for LightningCLI: one error lists every edit, and the edited config runs."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from lumen.cli import main

CONFIG = {}
OURS = "model: {class_path: tests.helpers.cli_tasks.Line, init_args: {width: 3, lr: 0.01}}\n"

#: Config that LightningCLI writes for each run: every argument of its trainer.
SAVED = f"""\
# lightning.pytorch==2.6.0
seed_everything: true
trainer:
  accelerator: auto
  strategy: auto
  devices: 1
  num_nodes: 1
  precision: null
  logger: null
  callbacks: null
  fast_dev_run: false
  max_epochs: 1
  min_epochs: null
  max_steps: -1
  min_steps: null
  max_time: null
  limit_train_batches: null
  limit_val_batches: null
  limit_test_batches: null
  limit_predict_batches: null
  overfit_batches: 0.0
  val_check_interval: null
  check_val_every_n_epoch: 1
  num_sanity_val_steps: null
  log_every_n_steps: null
  enable_checkpointing: null
  enable_progress_bar: false
  enable_model_summary: false
  accumulate_grad_batches: 1
  gradient_clip_val: null
  gradient_clip_algorithm: null
  deterministic: null
  benchmark: null
  inference_mode: true
  use_distributed_sampler: true
  profiler: null
  detect_anomaly: false
  barebones: false
  plugins: null
  sync_batchnorm: false
  reload_dataloaders_every_n_epochs: 0
  default_root_dir: null
  enable_autolog_hparams: true
  model_registry: null
{OURS}data: {{class_path: tests.helpers.cli_tasks.Points, init_args: {{batch_size: 4}}}}
optimizer: {{class_path: torch.optim.AdamW, init_args: {{lr: 0.01}}}}
lr_scheduler:
  class_path: lightning.pytorch.cli.ReduceLROnPlateau
  init_args: {{monitor: val_loss, patience: 3}}
ckpt_path: null
weights_only: null
"""
#: Config for a run on several devices.
WRITTEN = f"""\
seed_everything: 42
trainer:
  accelerator: cpu
  devices: 1
  strategy: ddp_find_unused_parameters_true
  precision: 16-mixedd
  max_epochs: 1
  gradient_clip_val: 1.0
  enable_progress_bar: false
  enable_model_summary: false
  limit_val_batches: 1.5
  profiler: nosuch
  logger:
    - class_path: lightning.pytorch.loggers.TensorBoardLogger
    - class_path: lightning.pytorch.loggers.CSVLogger
      init_args: {{flush_logs_every_n_steps: 10}}
    - class_path: lightning.pytorch.loggers.CometishLogger
  callbacks:
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
      init_args: {{monitor: val_loss, mode: min, save_top_k: 2, prefix: best}}
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {{monitor: val_loss, patience: 5, mode: least}}
    - class_path: lightning.pytorch.callbacks.RichProgressBar
      init_args: {{leave: true}}
    - lightning.pytorch.callbacks.RichModelSummary
{OURS}data: {{class_path: tests.helpers.cli_tasks.Points}}
"""
#: Config for an old version.
OLD = f"""\
trainer:
  gpus: 1
  auto_lr_find: true
  checkpoint_callback: true
  progress_bar_refresh_rate: 20
  resume_from_checkpoint: last.ckpt
  terminate_on_nan: true
  max_epochs: 1
  enable_progress_bar: false
  strategy: {{class_path: pytorch_lightning.strategies.DDPStrategy, init_args: {{find_unused_parameters: true}}}}
  plugins: [{{class_path: pytorch_lightning.plugins.environments.SLURMEnvironment}}]
  callbacks:
    lr: {{class_path: pytorch_lightning.callbacks.LearningRateMonitor, init_args: {{logging_intervall: step}}}}
    bar: {{class_path: pytorch_lightning.callbacks.TQDMProgressBar}}
{OURS}data: {{class_path: tests.helpers.cli_tasks.Points}}
"""

#: Callbacks that LightningCLI prints: every argument of each.
PRINTED = f"""\
seed_everything: true
trainer:
  accelerator: cpu
  devices: 1
  precision: bf16-mixed
  profiler:
    class_path: lightning.pytorch.profilers.AdvancedProfiler
    init_args: {{dirpath: null, filename: perf, line_count_restriction: 1.0, dump_stats: false}}
  logger: null
  callbacks:
  - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    init_args:
      dirpath: null
      filename: '{{epoch}}-{{val_loss:.3f}}'
      monitor: val_loss
      verbose: false
      save_last: true
      save_top_k: 1
      save_on_exception: false
      save_weights_only: false
      mode: min
      auto_insert_metric_name: true
      every_n_train_steps: null
      train_time_interval: null
      every_n_epochs: null
      save_on_train_epoch_end: null
      enable_version_counter: true
  - class_path: lightning.pytorch.callbacks.EarlyStopping
    init_args:
      monitor: val_loss
      min_delta: 0.0
      patience: 3
      verbose: false
      mode: min
      strict: true
      check_finite: true
      stopping_threshold: null
      divergence_threshold: null
      check_on_train_epoch_end: null
      log_rank_zero_only: false
  - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    init_args: {{logging_interval: null, log_momentum: false, log_weight_decay: false}}
  - class_path: lightning.pytorch.callbacks.RichProgressBar
    init_args: {{refresh_rate: 1, leave: false, theme: {{description: '', metrics: italic}}, console_kwargs: null}}
  - class_path: lightning.pytorch.callbacks.Timer
    init_args: {{duration: 00:01:00:00, interval: step, verbose: true}}
  - class_path: lightning.pytorch.callbacks.EMAWeightAveraging
    init_args:
      device: null
      use_buffers: true
      decay: 0.999
      update_every_n_steps: 1
      update_starting_at_step: null
      update_starting_at_epoch: null
      multi_avg_fn: null
  - class_path: lightning.pytorch.callbacks.OnExceptionCheckpoint
    init_args: {{dirpath: crash, filename: on_exception}}
  - class_path: lightning.pytorch.callbacks.BatchSizeFinder
    init_args:
      mode: power
      steps_per_trial: 3
      init_val: 2
      max_trials: 25
      batch_arg_name: batch_size
      margin: 0.05
      max_val: 8192
  max_epochs: 1
  enable_model_summary: false
  use_distributed_sampler: true
  plugins: null
{OURS}data: {{class_path: tests.helpers.cli_tasks.Points, init_args: {{batch_size: 4}}}}
ckpt_path: null
"""

pytestmark = pytest.mark.usefixtures("config_directory")


def list_problems(config, capsys):
    """Return the problems that `lumen fit` reports for a config, each with its key."""
    Path("lightning.yaml").write_text(config)
    capsys.readouterr()
    assert main(["fit", "--config", "lightning.yaml"]) == 2
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert not Path("runs").exists()
    found = [re.fullmatch(r"([\w.]+) \(lightning.yaml\): (.*)", line) for line in lines]
    assert all(found), lines
    return {each[1]: each[2] for each in found}


def run_edited(config):
    Path("edited.yaml").write_text(yaml.safe_dump(config))
    assert main(["fit", "--config", "edited.yaml"]) == 0
    assert Path("runs/edited/config.yaml").is_file()


def test_the_config_that_lightning_saves(capsys):
    said = list_problems(SAVED, capsys)
    assert said.keys() == {"lr_scheduler", "lr_scheduler.monitor"}  # a default value is not a problem
    assert said["lr_scheduler"] == (
        "lightning.pytorch.cli.ReduceLROnPlateau is a class of Lightning. Write "
        "torch.optim.lr_scheduler.ReduceLROnPlateau."
    )
    assert said["lr_scheduler.monitor"].endswith("Use lr_schedule.monitor.")
    config = yaml.safe_load(SAVED)
    config["lr_scheduler"] = {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau", "init_args": {"patience": 3}}
    config["lr_schedule"] = {"monitor": "val_loss"}
    run_edited(config)
    saved = yaml.safe_load(Path("runs/edited/config.yaml").read_text())
    assert type(saved["seed_everything"]) is int  # a random seed
    assert saved["trainer"]["log_every_n_steps"] == 50  # null means the default of Lumen


def test_a_config_of_callbacks_loggers_and_names(capsys):
    said = list_problems(WRITTEN, capsys)
    lightnings = {
        "trainer.logger.0": "lumen.TensorBoardLogger",
        "trainer.logger.1": "lumen.CSVLogger",
        "trainer.callbacks.0": "lumen.ModelCheckpoint",
        "trainer.callbacks.1": "lumen.EarlyStopping",
        "trainer.callbacks.2": "lumen.ProgressBar",
        "trainer.callbacks.3": "lumen.ModelSummary",
    }
    for key, ours in lightnings.items():
        assert said.pop(key).endswith(f" is a class of Lightning. Write {ours}."), key
    assert said.pop("trainer.logger.2").endswith("is a class of Lightning. Lumen has no CometishLogger.")
    assert "'16-mixedd'" in said.pop("trainer.precision")
    assert "found 1.5" in said.pop("trainer.limit_val_batches")
    assert "found 'nosuch'" in said.pop("trainer.profiler")
    assert "found 'least'" in said.pop("trainer.callbacks.1.mode")
    for key in ("trainer.callbacks.0.prefix",):
        assert f"has no option {key.rpartition('.')[2]}." in said.pop(key)
    assert not said
    config = yaml.safe_load(WRITTEN)
    trainer = config["trainer"]
    trainer |= {"strategy": "auto", "precision": "bf16-mixed", "limit_val_batches": 1.0, "profiler": None}
    trainer["logger"] = [{"class_path": "lumen.CSVLogger"}]
    for callback, (_, ours) in zip(trainer["callbacks"], list(lightnings.items())[2:], strict=False):
        if isinstance(callback, dict):
            callback["class_path"] = ours
    trainer["callbacks"][0]["init_args"].pop("prefix")
    trainer["callbacks"][1]["init_args"]["mode"] = "min"
    trainer["callbacks"][2:] = ["lumen.ModelSummary"]
    run_edited(config)


def test_a_config_of_an_old_version(capsys):
    said = list_problems(OLD, capsys)
    gone = (
        "gpus", "auto_lr_find", "checkpoint_callback", "progress_bar_refresh_rate", "resume_from_checkpoint",
        "plugins",
    )  # fmt: skip
    for name in gone:
        assert f"Trainer has no option {name}. " in said.pop(f"trainer.{name}")
    assert said.pop("trainer.strategy").endswith("DDPStrategy is a class of Lightning. Write lumen.DDP.")
    assert said.pop("trainer.callbacks.lr").endswith("Write lumen.LearningRateMonitor.")
    assert "Did you mean logging_interval?" in said.pop("trainer.callbacks.lr.logging_intervall")
    assert said.pop("trainer.callbacks.bar").endswith("Write lumen.ProgressBar.")
    assert not said
    config = yaml.safe_load(OLD)
    for name in gone:
        del config["trainer"][name]
    config["trainer"]["strategy"]["class_path"] = "lumen.DDP"
    config["trainer"]["callbacks"] = {"lr": "lumen.LearningRateMonitor"}
    run_edited(config)


@pytest.mark.slow
def test_a_config_with_every_argument_of_its_callbacks(capsys):
    said = list_problems(PRINTED, capsys)
    lightnings = {key: text for key, text in said.items() if " is a class of Lightning. Write lumen." in text}
    assert len(lightnings) == 9
    others = {key: text for key, text in said.items() if key not in lightnings}
    callbacks = "trainer.callbacks"
    assert others.keys() == {f"{callbacks}.3.theme", f"{callbacks}.7.max_val"}
    assert all(re.search(r"has no option \w+\. [A-Z].+", text) for text in others.values())
    config = yaml.safe_load(PRINTED)
    trainer = config["trainer"]
    for key, text in lightnings.items():
        *_, number = key.split(".")
        node = trainer["callbacks"][int(number)] if number.isdigit() else trainer["profiler"]
        node["class_path"] = text.rpartition("Write ")[2].removesuffix(".")
    for key in others:
        _, _, number, name = key.split(".")
        del trainer["callbacks"][int(number)]["init_args"][name]
    del trainer["callbacks"][7]  # a search, which this test leaves out
    run_edited(config)
    assert (Path("runs/edited") / "fit-perf.txt").is_file()


def test_short_name_never_means_a_lightning_class():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    lightnings = type("ReduceLROnPlateau", (plateau,), {"__module__": "lightning.pytorch.cli"})
    assert lightnings in plateau.__subclasses__()
    Path("line.yaml").write_text(OURS + "lr_scheduler: {class_path: ReduceLROnPlateau, init_args: {patience: 0}}\n")
    words = ["--optimizer=SGD", "--optimizer.lr=0.1", "--lr_schedule.monitor=val_loss", "--trainer.name=run"]
    words += ["--trainer.max_epochs=1", "--data=tests.helpers.cli_tasks.Points"]
    assert main(["fit", "--config", "line.yaml", *words]) == 0
    saved = yaml.safe_load(Path("runs/run/config.yaml").read_text())
    assert saved["optimizer"]["class_path"] == "torch.optim.SGD"
    assert saved["lr_scheduler"]["class_path"] == "torch.optim.lr_scheduler.ReduceLROnPlateau"
