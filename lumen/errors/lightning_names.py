"""Arguments and attributes of Lightning's `Trainer`, of any version, that Lumen's lacks, with what to use instead."""

_DEVICES = "Use accelerator and devices."

INSTEAD = {
    "amp_backend": "Use precision: bf16 or fp16, which are torch's own.",
    "amp_level": "Use precision: bf16 or fp16, which are torch's own.",
    "auto_lr_find": "Use lumen.Tuner(trainer).lr_find, or LearningRateFinder in callbacks.",
    "auto_scale_batch_size": "Use lumen.Tuner(trainer).scale_batch_size, or BatchSizeFinder in callbacks.",
    "auto_select_gpus": _DEVICES,
    "barebones": "Leave it out: the loop costs what one by hand costs. Without record and checkpoints: logger=False, "
    "enable_checkpointing=False.",
    "checkpoint_callback": "Use enable_checkpointing, or a ModelCheckpoint in callbacks.",
    "ckpt_path": "Use resume for fit; validate, test and predict take ckpt_path themselves.",
    "distributed_backend": "Use strategy.",
    "early_stop_callback": "Put an EarlyStopping into callbacks.",
    "enable_autolog_hparams": "Use self.save_hyperparameters(logger=False) in the task.",
    "flush_logs_every_n_steps": "Every row is written at once.",
    "gpus": _DEVICES,
    "ipus": "There is no support for IPUs.",
    "log_gpu_memory": "system.csv has the memory; see ThroughputMonitor.",
    "log_save_interval": "Use log_every_n_steps.",
    "max_nb_epochs": "Use max_epochs.",
    "model_registry": "Checkpoints go to a directory or an object store: ModelCheckpoint(dirpath=...).",
    "move_metrics_to_cpu": "Leave it out: epoch means are kept as one number each, on the device.",
    "multiple_trainloader_mode": "Use lumen.CombinedLoader(loaders, mode).",
    "num_processes": "Use accelerator: cpu and devices.",
    "overfit_pct": "Use overfit_batches.",
    "plugins": "Use strategy and precision, which take objects; loggers and callbacks are given as such.",
    "prepare_data_per_node": "Leave it out: prepare_data is called once on each node.",
    "process_position": "Leave it out.",
    "progress_bar_refresh_rate": "Put ProgressBar(refresh_per_second=...) into callbacks.",
    "reload_dataloaders_every_epoch": "Use reload_dataloaders_every_n_epochs=1.",
    "replace_sampler_ddp": "Leave it out: samplers are shared out exactly, a user's own too.",
    "resume_from_checkpoint": "Use resume.",
    "row_log_interval": "Use log_every_n_steps.",
    "show_progress_bar": "Use enable_progress_bar.",
    "stochastic_weight_avg": "Put a lumen.SWA or a lumen.EMA into callbacks.",
    "terminate_on_nan": "Leave it out: a loss that is not finite is always an error.",
    "test_percent_check": "Use limit_test_batches.",
    "tpu_cores": "There is no support for TPUs.",
    "track_grad_norm": "The norm is logged as grad_norm where gradient_clip_val is set; else self.log it in "
    "on_before_optimizer_step.",
    "train_percent_check": "Use limit_train_batches.",
    "truncated_bptt_steps": "Cut sequences in the data set, and detach the hidden state in training_step.",
    "use_amp": "Use precision: bf16 or fp16.",
    "use_distributed_sampler": "Leave it out: samplers are shared out exactly, a user's own too.",
    "val_percent_check": "Use limit_val_batches.",
    "weights_save_path": "Use ModelCheckpoint(dirpath=...) in callbacks.",
    "weights_summary": "Use enable_model_summary, or a ModelSummary in callbacks.",
}

#: The same for `self.log` and `self.log_dict`.
INSTEAD_IN_LOG = {
    "enable_graph": "Leave it out: what is logged has no graph.",
    "metric_attribute": "Leave it out: a metric of the task is found by itself.",
    "rank_zero_only": "Leave it out: any rank may log, also one alone.",
    "sync_dist_group": "Leave it out: values are those of all processes.",
}

#: The same for `CLI`.
INSTEAD_IN_CLI = {
    "load_from_checkpoint_support": "Leave it out: checkpoints have the hyperparameters of save_hyperparameters.",
    "multifile": "Leave it out: the config that is saved is one file.",
    "parser_class": "Use add_arguments_to_parser, which is given the parser.",
    "save_config_filename": "Leave it out: it is config.yaml in the run's directory.",
    "save_config_kwargs": "Leave it out: the config is written to the run's directory, and one that differs is kept.",
    "save_config_overwrite": "Leave it out: the config of a resumed run is kept beside the new one if they differ.",
    "seed_everything_seed": "Use seed_everything_default.",
}

#: Methods that a class derived from `LightningCLI` may define, and one derived from Lumen's `CLI` does not.
NOT_IN_CLI = {
    "add_core_arguments_to_parser": "Use add_arguments_to_parser.",
    "add_default_arguments_to_parser": "Use add_arguments_to_parser.",
    "configure_optimizers": "Define it in the task, or set optimizer and lr_scheduler.",
    "init_parser": "Use add_arguments_to_parser.",
    "link_optimizers_and_lr_schedulers": "Define configure_optimizers in the task.",
    "parse_arguments": "Use before_instantiate_classes, where the settings are self.config.",
    "setup_parser": "Use add_arguments_to_parser.",
    "subcommands": "The commands are fit, validate, test and predict; for others write a script with run=False.",
}

#: Packages whose classes a config that was written for Lightning names.
LIGHTNINGS = ("lightning", "lightning_fabric", "pytorch_lightning")

#: Classes of Lightning's that have another name here, if it is there; others of the same purpose have the same name.
RENAMED = {
    "AdvancedProfiler": "lumen.SimpleProfiler",
    "DDPStrategy": "lumen.DDP",
    "DeviceStatsMonitor": "lumen.ThroughputMonitor",
    "EMAWeightAveraging": "lumen.EMA",
    "FSDPStrategy": "lumen.FSDP",
    "LightningDataModule": "lumen.DataModule",
    "LightningModule": "lumen.TaskModule",
    "PyTorchProfiler": "lumen.TorchProfiler",
    "ReduceLROnPlateau": "torch.optim.lr_scheduler.ReduceLROnPlateau",
    "RichModelSummary": "lumen.ModelSummary",
    "RichProgressBar": "lumen.ProgressBar",
    "SingleDeviceStrategy": "lumen.SingleDevice",
    "StochasticWeightAveraging": "lumen.SWA",
    "TQDMProgressBar": "lumen.ProgressBar",
    "WeightAveraging": "lumen.EMA",
}

#: Those that have no counterpart, with what serves in their place.
INSTEAD_OF_CLASSES = {
    "AsyncCheckpointIO": "Leave it out: ModelCheckpoint(asynchronous=...) saves in the background where it pays.",
    "DeepSpeedStrategy": "Use lumen.FSDP.",
    "LightningEnvironment": "Leave it out: the environment of the processes is found.",
    "MixedPrecision": "Use trainer.precision: bf16 or fp16.",
    "SLURMEnvironment": "Leave it out: SLURM is found by its variables.",
    "TorchSyncBatchNorm": "Use trainer.sync_batchnorm.",
}

_LOADERS = "Keep the loader, or its data set, where it is made: in the data module or the task."
_PLAN = "Read trainer.plan.{}."
_CALLBACK = "Keep the callback that you give to Trainer(callbacks=...), or look for its class in trainer.callbacks."

#: Attributes of Lightning's `Trainer` that Lumen's does not have.
ATTRIBUTES = {
    "accelerator": "Read trainer.strategy.device.",
    "accumulate_grad_batches": _PLAN.format("accumulate"),
    "checkpoint_callbacks": _CALLBACK,
    "ckpt_path": "Read trainer.run.checkpoint, whose path it is.",
    "device_ids": "Read trainer.strategy.device, that of this process.",
    "early_stopping_callback": _CALLBACK,
    "early_stopping_callbacks": _CALLBACK,
    "enable_validation": "Read trainer.validation_due or trainer.validating.",
    "evaluating": "Read trainer.validating or trainer.testing.",
    "fit_loop": "Read trainer.run.progress for counts, and trainer.plan for limits.",
    "gradient_clip_algorithm": _PLAN.format("clip_norm and trainer.plan.clip_value"),
    "gradient_clip_val": _PLAN.format("clip_norm or trainer.plan.clip_value"),
    "interrupted": "Write on_exception: the exception is a KeyboardInterrupt or a SystemExit.",
    "is_last_batch": "Write on_train_epoch_end, which follows it.",
    "lightning_module": "Hooks of callbacks are given the task; elsewhere it is trainer.run.task.",
    "limit_predict_batches": _PLAN.format('limits["predict"]'),
    "limit_test_batches": _PLAN.format('limits["test"]'),
    "limit_train_batches": _PLAN.format('limits["train"]'),
    "limit_val_batches": _PLAN.format('limits["validate"]'),
    "log_every_n_steps": _PLAN.format("log_every_n_steps"),
    "logged_metrics": "Read trainer.callback_metrics: the newest value of every name.",
    "max_time": _PLAN.format("max_time_s"),
    "min_epochs": _PLAN.format("min_epochs"),
    "min_steps": _PLAN.format("min_steps"),
    "model": "Hooks of callbacks are given the task; elsewhere it is trainer.run.task.",
    "num_devices": "Read trainer.world_size, the processes of all nodes.",
    "num_sanity_val_steps": _PLAN.format("sanity_batches"),
    "num_val_batches": "Read the lengths of trainer.run.loaders.evaluation.",
    "overfit_batches": _PLAN.format("same_batches"),
    "predict_dataloaders": _LOADERS,
    "predict_loop": "trainer.predict returns the predictions.",
    "progress_bar_callback": _CALLBACK,
    "received_sigterm": "Read trainer.is_ending in on_step_checkpoint, or write on_exception.",
    "reload_dataloaders_every_n_epochs": _PLAN.format("reload_every_n_epochs"),
    "save_hyperparameters": "The task and the data module have it.",
    "state": "Read trainer.training, validating, testing, predicting or sanity_checking.",
    "test_dataloaders": _LOADERS,
    "train_dataloader": _LOADERS,
    "tune": "Use lumen.Tuner(trainer).",
    "val_check_interval": _PLAN.format("val_every_n_steps, val_every_epoch_fraction or val_every_s"),
    "val_dataloaders": _LOADERS,
    "validate_loop": "Read trainer.run.progress for counts, and trainer.plan for limits.",
}
