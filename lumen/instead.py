"""Arguments of Lightning's `Trainer`, of any version, that Lumen's does not have, and what serves in their place."""

_DEVICES = "Use accelerator and devices."
_BATCH = "Look for it by hand: a run of fast_dev_run or max_steps with another batch_size of the loader."

INSTEAD = {
    "amp_backend": "Use precision: bf16 or fp16, which are torch's own.",
    "amp_level": "Use precision: bf16 or fp16, which are torch's own.",
    "auto_lr_find": "Look for it by hand, or sweep over configurations.",
    "auto_scale_batch_size": _BATCH,
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
    "stochastic_weight_avg": "Use lumen.optim.Lookahead, or average in a callback.",
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
