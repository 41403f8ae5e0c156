"""Arguments and attributes of Lightning's classes, of any version, that Lumen lacks, with their replacements."""

from collections.abc import Mapping
from typing import Any


def _share(replacements: Mapping[str, str]) -> dict[str, str]:
    """Return the replacement of each name, from replacements with the names that share them."""
    return {name: text for text, names in replacements.items() for name in names.split()}


INSTEAD = {
    "amp_backend": "Use precision: bf16 or fp16, which are torch's own.",
    "amp_level": "Use precision: bf16 or fp16, which are torch's own.",
    "auto_lr_find": "Use lumen.Tuner(trainer).lr_find, or LearningRateFinder in callbacks.",
    "auto_scale_batch_size": "Use lumen.Tuner(trainer).scale_batch_size, or BatchSizeFinder in callbacks.",
    "auto_select_gpus": "Use accelerator and devices.",
    "barebones": (
        "Leave it out: the loop is as fast as a hand-written loop. To write nothing: logger=False, "
        "enable_checkpointing=False."
    ),
    "checkpoint_callback": "Use enable_checkpointing, or a ModelCheckpoint in callbacks.",
    "ckpt_path": "Use resume for fit; validate, test and predict take ckpt_path themselves.",
    "distributed_backend": "Use strategy.",
    "early_stop_callback": "Put an EarlyStopping into callbacks.",
    "enable_autolog_hparams": "Use self.save_hyperparameters(logger=False) in the task.",
    "flush_logs_every_n_steps": "Leave it out: Lumen writes every row at once.",
    "gpus": "Use accelerator and devices.",
    "ipus": "Lumen does not support IPUs.",
    "log_gpu_memory": "Leave it out: system.csv has the memory. For more put a DeviceStatsMonitor into callbacks.",
    "log_save_interval": "Use log_every_n_steps.",
    "max_nb_epochs": "Use max_epochs.",
    "model_registry": "Checkpoints go to a directory or an object store: ModelCheckpoint(dirpath=...).",
    "move_metrics_to_cpu": "Leave it out: epoch means are kept as one number each, on the device.",
    "multiple_trainloader_mode": "Use lumen.CombinedLoader(iterables, mode).",
    "num_processes": "Use accelerator: cpu and devices.",
    "overfit_pct": "Use overfit_batches.",
    "plugins": "Use strategy and precision, which accept objects; pass loggers as logger and callbacks as callbacks.",
    "prepare_data_per_node": "Leave it out: Lumen calls prepare_data once on each node.",
    "process_position": "Leave it out.",
    "progress_bar_refresh_rate": "Put ProgressBar(refresh_per_second=...) into callbacks.",
    "reload_dataloaders_every_epoch": "Use reload_dataloaders_every_n_epochs=1.",
    "replace_sampler_ddp": "Leave it out: Lumen divides the samples of any sampler among the processes.",
    "resume_from_checkpoint": "Use resume.",
    "row_log_interval": "Use log_every_n_steps.",
    "show_progress_bar": "Use enable_progress_bar.",
    "stochastic_weight_avg": "Put a lumen.SWA or a lumen.EMA into callbacks.",
    "terminate_on_nan": "Leave it out: a loss that is not finite is always an error.",
    "test_percent_check": "Use limit_test_batches.",
    "tpu_cores": "Lumen does not support TPUs.",
    "track_grad_norm": (
        "With gradient_clip_val Lumen logs the norm as grad_norm; otherwise call self.log in on_before_optimizer_step."
    ),
    "train_percent_check": "Use limit_train_batches.",
    "truncated_bptt_steps": "Cut sequences in the data set, and detach the hidden state in training_step.",
    "use_amp": "Use precision: bf16 or fp16.",
    "use_distributed_sampler": "Leave it out: Lumen divides the samples of any sampler among the processes.",
    "val_percent_check": "Use limit_val_batches.",
    "weights_save_path": "Use ModelCheckpoint(dirpath=...) in callbacks.",
    "weights_summary": "Use enable_model_summary, or a ModelSummary in callbacks.",
}

#: Values of these arguments that request nothing, as in the configs that LightningCLI writes.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "auto_lr_find": (False,), "auto_scale_batch_size": (False,), "auto_select_gpus": (False,), "barebones": (False,),
    "enable_autolog_hparams": (True,), "flush_logs_every_n_steps": (None,), "gpus": (None,), "ipus": (None,),
    "log_gpu_memory": (None,), "model_registry": (None,), "move_metrics_to_cpu": (False,),
    "multiple_trainloader_mode": ("max_size_cycle",), "num_processes": (None,), "plugins": (None, []),
    "prepare_data_per_node": (None, True), "process_position": (0,), "reload_dataloaders_every_epoch": (False,),
    "replace_sampler_ddp": (True,), "resume_from_checkpoint": (None,), "stochastic_weight_avg": (False,),
    "terminate_on_nan": (None, True), "tpu_cores": (None,), "track_grad_norm": (-1,), "truncated_bptt_steps": (None,),
    "use_distributed_sampler": (True,), "weights_save_path": (None,),
}  # fmt: skip

_NAMES = "Lumen names each checkpoint by its step, and never overwrites a checkpoint."
_PATHS = "Lumen names the directory by the step: read best_model_path, last_model_path or best_k_models."
#: Replacements and neutral values for `ModelCheckpoint`.
INSTEAD_IN_CHECKPOINTS = {
    "every_n_val_epochs": "Use every_n_epochs.",
    "filename": _NAMES,  # accepted, with a warning
    "period": "Use every_n_epochs.",
    "prefix": _NAMES,
    "save_on_exception": "Add lumen.OnExceptionCheckpoint() to the callbacks.",
    "save_on_train_epoch_end": (
        "Lumen saves an epoch's checkpoint after the epoch's last validation and end. To save after each validation "
        "within an epoch, set monitor and save_top_k=-1."
    ),
    "save_weights_only": "A checkpoint always has the full state. The weights are in model/, which init_from reads.",
}
NEUTRAL_IN_CHECKPOINTS: Mapping[str, tuple[Any, ...]] = {
    "auto_insert_metric_name": (True, False), "enable_version_counter": (True, False),
    "prefix": (None, ""), "save_on_exception": (False,), "save_on_train_epoch_end": (None, True),
    "save_weights_only": (False,),
}  # fmt: skip

#: Replacements for arguments of `self.log` and `self.log_dict`.
INSTEAD_IN_LOG = {
    "enable_graph": "Leave it out: logged values have no graph.",
    "sync_dist_group": "Leave it out: values always cover all processes.",
}

#: Replacements for arguments of `trainer.save_checkpoint`.
INSTEAD_IN_SAVE = {
    "storage_options": "fsspec writes to a URL, with the settings of fsspec's own configuration.",
    "weights_only": "A checkpoint always has the full state. The weights are in model/, which init_from reads.",
}

#: Replacements for arguments of loggers that write files.
INSTEAD_IN_LOGGERS = {"prefix": "Leave it out: Lumen does not change logged names."}
NEUTRAL_IN_LOGGERS: Mapping[str, tuple[Any, ...]] = {
    "add_file_policy": ("mutable",), "anonymous": (None, False), "checkpoint_name": (None,), "log_model": (False,),
    "default_hp_metric": (True, False), "prefix": ("", None), "sub_dir": (None,),
}  # fmt: skip

#: Replacements for arguments of `CLI`.
INSTEAD_IN_CLI = {
    "auto_registry": "Leave it out: Lumen finds every imported class by its short name.",
    "load_from_checkpoint_support": "Leave it out: checkpoints contain the hyperparameters of save_hyperparameters.",
    "parser_class": "Use add_arguments_to_parser, which receives the parser.",
    "save_config_filename": "Leave it out: Lumen saves the config as config.yaml in the run directory.",
    "save_config_overwrite": "Leave it out: Lumen keeps the old config of a resumed run if the new config differs.",
    "seed_everything_seed": "Use seed_everything_default.",
}

#: Methods that subclasses of `LightningCLI` may define, but subclasses of Lumen's `CLI` may not.
NOT_IN_CLI = {
    "add_core_arguments_to_parser": "Use add_arguments_to_parser.",
    "add_default_arguments_to_parser": "Use add_arguments_to_parser.",
    "init_parser": "Use add_arguments_to_parser.",
    "link_optimizers_and_lr_schedulers": "Define configure_optimizers in the task.",
    "parse_arguments": "Use before_instantiate_classes, where the settings are self.config.",
    "setup_parser": "Use add_arguments_to_parser.",
}

#: Attributes of Lightning's `LightningCLI` that Lumen's `CLI` lacks.
ATTRIBUTES_OF_CLI = {
    **NOT_IN_CLI,
    "parser_class": INSTEAD_IN_CLI["parser_class"],
    "config_dump": "Write yaml.safe_load(self.parser.dump(self.config))[self.subcommand].",
}

#: Packages of the classes in configs for Lightning.
LIGHTNING_PACKAGES = ("lightning", "lightning_fabric", "pytorch_lightning")

#: Lightning's classes whose counterpart in Lumen has a different name. Other counterparts have the same name.
RENAMED = {
    "BaseProfiler": "lumen.Profiler",
    "DDPFullyShardedNativeStrategy": "lumen.FSDP",
    "DDPPlugin": "lumen.DDP",
    "DDPSpawnPlugin": "lumen.DDP",
    "DDPSpawnStrategy": "lumen.DDP",
    "DDPStrategy": "lumen.DDP",
    "EMAWeightAveraging": "lumen.EMA",
    "FSDPStrategy": "lumen.FSDP",
    "GPUStatsMonitor": "lumen.DeviceStatsMonitor",
    "LightningCLI": "lumen.CLI",
    "LightningDataModule": "lumen.DataModule",
    "LightningLoggerBase": "lumen.Logger",
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


_WRITER = "ModelCheckpoint writes the checkpoints: its dirpath is a directory or a URL."
#: Lightning's classes and functions without a counterpart, with their replacements.
INSTEAD_OF_CLASSES = {
    "LRSchedulerConfig": 'Write a dictionary: {"scheduler": ..., "interval": "step"}.',
    "instantiate_class": "Annotate the argument as Callable[[Iterable], Optimizer]: the task then gets a function.",
    "save_hyperparameters": "Call self.save_hyperparameters, the method of lumen.HyperparametersMixin.",
    **_share(
        {
            "Call lumen.summarize(task).": "get_formatted_model_size get_human_readable_count parse_batch_shape",
            "Call lumen.summarize(task, max_depth).": "DeepSpeedSummary LayerSummary",
            "Lumen counts the samples of each batch: return (loss, weight) from training_step to set the weight.": (
                "extract_batch_size has_len_all_ranks"
            ),
            "Lumen does not support TPUs.": ("XLAAccelerator XLACheckpointIO XLAEnvironment XLAPrecision XLAProfiler"),
            "Leave it out: Lumen detects the environment of the processes.": (
                "KubeflowEnvironment LSFEnvironment LightningEnvironment MPIEnvironment TorchElasticEnvironment"
            ),
            "Start the processes with torchrun or srun: Lumen detects both.": "ClusterEnvironment",
            "Subclass lumen.Logger: docs/guides/loggers.md shows how.": (
                "CometLogger LitLogger NeptuneLogger TestTubeLogger"
            ),
            "Subclass lumen.Precision, and pass an object to Trainer(precision=...).": (
                "BitsandbytesPrecision TransformerEnginePrecision"
            ),
            "Use Trainer(accelerator=...).": "Accelerator CPUAccelerator CUDAAccelerator MPSAccelerator",
            "Use Trainer(precision=...) and lumen.FSDP.": "DeepSpeedPrecision FSDPPrecision",
            "Use lumen.DDP or lumen.FSDP, or subclass lumen.Strategy: docs/guides/custom-strategy.md shows how.": (
                "ModelParallelStrategy ParallelStrategy"
            ),
            "Use lumen.FSDP.": "DDPFullyShardedPlugin DDPShardedPlugin DeepSpeedStrategy",
            "Use Trainer(halve_on_oom=True), or catch torch.OutOfMemoryError.": (
                "is_cuda_out_of_memory is_cudnn_snafu is_oom_error is_out_of_cpu_memory"
            ),
            "Use trainer.sync_batchnorm.": "LayerSync TorchSyncBatchNorm",
            "Compare trainer.state.fn, state.stage and state.status with strings, such as 'fit'.": (
                "RunningStage TrainerFn TrainerState TrainerStatus"
            ),
            _WRITER: "CheckpointIO TorchCheckpointIO",
        }
    ),
    "DoublePrecision": "Use Trainer(precision='fp64').",
    "GradClipAlgorithmType": "Write 'norm' or 'value'.",
    "HalfPrecision": "Use Trainer(precision='bf16-true').",
    "SIGTERMException": "Read trainer.received_sigterm.",
    "disable_possible_user_warnings": "Call warnings.filterwarnings.",
    "find_usable_cuda_devices": "Set CUDA_VISIBLE_DEVICES.",
    "garbage_collection_cuda": "Call torch.cuda.empty_cache().",
    "get_torchvision_model": "Call torchvision.models.get_model.",
    "is_overridden": "Compare type(task).NAME with lumen.TaskModule.NAME.",
    "is_shared_filesystem": "Write a file on one node, and look for it on the others.",
    "recursive_detach": "Call detach() of each tensor.",
    "set_shared_parameters": "Tie the parameters in configure_model.",
    "suggested_max_num_workers": "Call len(os.sched_getaffinity(0)).",
    "AsyncCheckpointIO": "Leave it out: ModelCheckpoint(asynchronous=...) saves in the background if that is faster.",
    "AttributeDict": "Write a dictionary, or types.SimpleNamespace.",
    "Checkpoint": "Subclass lumen.Callback, and call trainer.save_checkpoint in on_step_checkpoint.",
    "LRSchedulerCallable": "Write Callable[[Optimizer], LRScheduler].",
    "MixedPrecision": "Use trainer.precision: bf16 or fp16.",
    "ModelPruning": "Call torch.nn.utils.prune in the task, in on_train_epoch_end: see docs/guides/smaller-models.md.",
    "OptimizerCallable": "Write Callable[[Iterable], Optimizer].",
    "QuantizationAwareTraining": "Call torchao's quantize_ with a QATConfig in the task's __init__: see "
    "docs/guides/smaller-models.md.",
    "RichProgressBarTheme": "Leave it out: the bar has the terminal's own colours.",
    "SLURMEnvironment": "Leave it out: Lumen detects SLURM. SIGUSR1 saves, and exits with code 75 to requeue.",
    "find_shared_parameters": "Write parameters(remove_duplicate=False).",
    "measure_flops": "Use torch.utils.flop_counter.FlopCounterMode, or ThroughputMonitor(measure_flops=True).",
    "rank_zero_deprecation": "Write logging.getLogger(__name__). Lumen shows a message once, from the first process.",
}

_PRIVATE = "Write a lumen.Callback with on_step_checkpoint, which calls trainer.save_checkpoint."
_STOP = "Write a lumen.Callback that sets trainer.should_stop in on_step_end."
_BAR = "Lumen draws one bar: define get_metrics(trainer, task), or set enable_progress_bar=False and write a Callback."
_COUNT = "Read the trainer: num_training_batches, num_val_batches, num_test_batches, num_predict_batches."
_OF_BARS = {
    **dict.fromkeys(
        (
            "configure_columns", "init_predict_tqdm", "init_sanity_tqdm", "init_test_tqdm", "init_train_tqdm",
            "init_validation_tqdm", "main_progress_bar", "predict_description", "predict_progress_bar", "progress",
            "refresh", "sanity_check_description", "test_description", "test_progress_bar", "theme",
            "train_description", "train_progress_bar", "val_progress_bar", "validation_description",
        ),
        _BAR,
    ),
    **dict.fromkeys(
        (
            "has_dataloader_changed", "reset_dataloader_idx_tracker", "total_predict_batches_current_dataloader",
            "total_test_batches_current_dataloader", "total_val_batches", "total_val_batches_current_dataloader",
        ),
        _COUNT,
    ),
    "refresh_rate": "Read refresh_per_second, which counts in time, not in batches.",
    "test_batch_idx": "Hooks receive batch_idx.",
    "train_batch_idx": "Hooks receive batch_idx.",
    "val_batch_idx": "Hooks receive batch_idx.",
}  # fmt: skip
_OWN_AVERAGE = "decay, warmup and update_* define the average. For a different average write a callback."
#: Replacements for arguments of the methods of `Tuner`.
INSTEAD_IN_TUNER = {
    "dataloaders": "Pass the loaders as train_dataloaders or datamodule.",
    "max_val": "The search ends at the memory limit, or after max_trials.",
    "method": "Leave it out: a search trains.",
}

_GRADIENT_COMPRESSION = "Use DDP(gradient_compression='bf16'), or 'fp16'."
_ENVIRONMENT = "Lumen detects the environment of the processes."
#: Replacements and neutral values for arguments of strategies.
INSTEAD_IN_STRATEGIES = {
    "accelerator": "Use Trainer(accelerator=...).",
    "activation_checkpointing_policy": "Use activation_checkpointing, which takes names of classes.",
    "auto_wrap_policy": "Use wrap with names of classes, or wrap_if or wrap_min_parameters.",
    "checkpoint_io": _WRITER,
    "cluster_environment": _ENVIRONMENT,
    "ddp_comm_hook": _GRADIENT_COMPRESSION,
    "ddp_comm_state": _GRADIENT_COMPRESSION,
    "ddp_comm_wrapper": _GRADIENT_COMPRESSION,
    "device_mesh": "Use shard_size, the number of processes that share one copy of the parameters.",
    "mixed_precision": "Use Trainer(precision=...), or param_dtype, reduce_dtype, buffer_dtype and output_dtype.",
    "model_averaging_period": "Lumen averages gradients in every step.",
    "parallel_devices": "Use Trainer(devices=...).",
    "precision_plugin": "Use Trainer(precision=...).",
    "process_group_backend": "Lumen uses NCCL for CUDA and Gloo for the CPU.",
    "start_method": "Lumen starts the script once for each device.",
    "state_dict_type": "Checkpoints are sharded. lumen export writes the weights as one file.",
    "timeout": "Set timeout_s, in seconds.",
}
NEUTRAL_IN_STRATEGIES: Mapping[str, tuple[Any, ...]] = dict.fromkeys(INSTEAD_IN_STRATEGIES, (None,)) | {
    "start_method": ("popen",), "state_dict_type": ("full", "sharded"),
}  # fmt: skip

#: Attributes of Lightning's strategies that Lumen's lack.
ATTRIBUTES_OF_STRATEGY = {
    **{
        name: f"Read trainer.{name}."
        for name in (
            "global_rank",
            "is_global_zero",
            "lightning_module",
            "local_rank",
            "lr_scheduler_configs",
            "model",
            "node_rank",
            "num_nodes",
            "optimizers",
            "world_size",
        )
    },
    "accelerator": "Read trainer.strategy.device.",
    "checkpoint_io": "Call trainer.save_checkpoint.",
    "cluster_environment": _ENVIRONMENT,
    "distributed_sampler_kwargs": "Lumen divides the samples of any sampler among the processes.",
    "is_distributed": "Read trainer.world_size > 1.",
    "launcher": "Lumen starts the script once for each device.",
    "lightning_module_state_dict": "Call task.state_dict().",
    "load_checkpoint": "Call load_from_checkpoint of the task, or use Trainer(resume=...).",
    "model_to_device": "Lumen moves the task in setup.",
    "num_processes": "Read trainer.num_devices.",
    "parallel_devices": "Read trainer.device_ids.",
    "precision_plugin": "Read trainer.run.precision.",
    "process_group_backend": INSTEAD_IN_STRATEGIES["process_group_backend"],
    "reduce_boolean_decision": "Call strategy.reduce(tensor, reduce_op='min') for all, or 'max' for any.",
    "remove_checkpoint": "ModelCheckpoint removes checkpoints: set save_top_k and keep_last.",
    "save_checkpoint": "Call trainer.save_checkpoint.",
    "setup_environment": "Define connect.",
}

#: Attributes and methods of Lightning's callbacks that Lumen's lack, by Lumen's class. A subclass may not define them.
ATTRIBUTES_OF_CALLBACKS: Mapping[str, Mapping[str, str]] = {
    "BaseFinetuning": {
        "filter_on_optimizer": "unfreeze_and_add_param_group omits parameters that the optimizer has.",
        "flatten_modules": "freeze, make_trainable and filter_params accept nested modules.",
        "freeze_module": "Call freeze(module).",
    },
    "BatchSizeFinder": {
        "scale_batch_size": "Call lumen.Tuner(trainer).scale_batch_size(task) before fit.",
    },
    "EMA": {
        "should_update": "Use update_every_n_steps, update_starting_at_step and update_starting_at_epoch.",
        "update_parameters": _OWN_AVERAGE,
    },
    "EarlyStopping": {
        "mode_dict": "Compare with best_score, by mode.",
        "monitor_op": "Compare with best_score, by mode.",
        "order_dict": "Read mode.",
        **dict.fromkeys(
            ("_evaluate_stopping_criteria", "_improvement_message", "_run_early_stopping_check", "_should_skip_check"),
            _STOP,
        ),
    },
    "GradientAccumulationScheduler": {
        "get_accumulate_grad_batches": "Read scheduling, or trainer.accumulate_grad_batches in a run.",
        "going_to_accumulate_grad_batches": "Read scheduling.",
    },
    "LearningRateFinder": {
        "lr_find": "Call lumen.Tuner(trainer).lr_find(task) before fit.",
    },
    "LearningRateMonitor": dict.fromkeys(
        ("_extract_lr", "_extract_momentum", "_extract_stats", "_get_optimizer_stats"),
        "Read lrs, or trainer.optimizers[0].param_groups.",
    ),
    "ModelCheckpoint": {
        "CHECKPOINT_EQUALS_CHAR": _PATHS,
        "CHECKPOINT_JOIN_CHAR": _PATHS,
        "CHECKPOINT_NAME_LAST": "Lumen writes no file of this name: read last_model_path.",
        "FILE_EXTENSION": "A checkpoint is a directory, without an extension.",
        "STARTING_VERSION": _PATHS,
        "auto_insert_metric_name": _PATHS,
        "check_monitor_top_k": "Compare with best_k_models.",
        "file_exists": _PATHS,
        "format_checkpoint_name": _PATHS,
        "save_on_exception": INSTEAD_IN_CHECKPOINTS["save_on_exception"],
        "save_weights_only": INSTEAD_IN_CHECKPOINTS["save_weights_only"],
        "to_yaml": "Write the dictionary best_k_models yourself.",
        **dict.fromkeys(
            (
                "_save_checkpoint", "_save_last_checkpoint", "_save_topk_checkpoint", "_should_save_on_train_epoch_end",
                "_should_skip_saving_checkpoint", "_update_best_and_save",
            ),
            _PRIVATE,
        ),
    },
    "ModelSummary": {"summarize": "Call lumen.summarize(task, max_depth)."},
    "OnExceptionCheckpoint": {"ckpt_path": "Lumen logs the path: exception-step-N in dirpath."},
    "ProgressBar": _OF_BARS,
    "SWA": dict.fromkeys(("avg_fn", "update_parameters"), "SWA is the plain mean. For a decay use lumen.EMA.")
    | {"n_averaged": "Read state_dict()['updates'].", "transfer_weights": "Read average, by name of parameter."},
    "SpikeDetection": dict.fromkeys(("bad_batches", "last_val", "running_mean"), "Read spikes, or state_dict()."),
}  # fmt: skip

_WANDB_CALL = "Write logger.experiment.log({{key: wandb.{}, 'trainer/global_step': self.global_step}}) in fit."
#: Attributes of Lightning's `WandbLogger` that Lumen's lacks.
ATTRIBUTES_OF_WANDB = {
    "download_artifact": "Call wandb.Api().artifact(name).download().",
    "log_audio": _WANDB_CALL.format("Audio(audio)"),
    "log_table": _WANDB_CALL.format("Table(columns=columns, data=data)"),
    "log_video": _WANDB_CALL.format("Video(video)"),
    "use_artifact": "Call logger.experiment.use_artifact(name).",
}

#: Replacements for setting properties of the trainer that Lightning's users may set.
INSTEAD_OF_SETTING = dict.fromkeys(
    ("lr_scheduler_configs", "optimizers"),
    "Change trainer.optimizers[0].param_groups, or return the optimizer from configure_optimizers.",
)


#: Attributes of Lightning's `Trainer`, of any version, that Lumen's lacks.
ATTRIBUTES = {
    **_share(
        {
            "Read trainer.num_devices.": "gpus num_gpus num_processes",
            "Read trainer.precision.": "amp_backend use_amp",
            "Read trainer.progress for counts, and trainer.plan for limits.": (
                "evaluation_loop fit_loop test_loop train_loop validate_loop"
            ),
            "Read trainer.strategy.": "accelerator_connector distributed_backend training_type_plugin",
            "Read trainer.strategy.device.": "accelerator root_gpu",
            "Use Trainer(reload_dataloaders_every_n_epochs=...).": "reset_train_dataloader reset_val_dataloader",
            "Use lumen.Tuner(trainer).": "tune tuner",
        }
    ),
    "barebones": INSTEAD["barebones"],
    "batch_idx": "Steps and batch hooks receive batch_idx.",
    "callback_connector": "Read trainer.callbacks.",
    "checkpoint_connector": "Read trainer.ckpt_path, or call trainer.save_checkpoint.",
    "data_connector": "Read trainer.train_dataloader, val_dataloaders, test_dataloaders or predict_dataloaders.",
    "data_parallel": "Read trainer.world_size.",
    "data_parallel_device_ids": "Read trainer.device_ids.",
    "disable_validation": "Read trainer.enable_validation.",
    "distributed_sampler_kwargs": "Lumen divides the samples of any sampler among the processes.",
    "enable_autolog_hparams": INSTEAD["enable_autolog_hparams"],
    "get_model": "Read trainer.model.",
    "init_module": "Build the layers in configure_model.",
    "lightning_optimizers": "Read trainer.optimizers.",
    "logger_connector": "Call self.log, and read trainer.callback_metrics.",
    "lr_schedulers": "Read trainer.lr_scheduler_configs, each of which has a scheduler.",
    "max_time": "Read trainer.plan.max_time_s.",
    "optimizer_frequencies": "Set automatic_optimization = False, and step each optimizer in training_step.",
    "precision_plugin": "Read trainer.run.precision.",
    "predict_loop": "trainer.predict returns the predictions.",
    "request_agreement": "Call trainer.request_stop_vote, its new name.",
    "request_dataloader": "Call the method of the data module or the task.",
    "resume_from_checkpoint": "Read trainer.ckpt_path.",
    "run_stage": "Call trainer.fit, validate, test or predict.",
    "save_hyperparameters": "Call save_hyperparameters of the task or the data module.",
    "scaler": "Read trainer.run.precision, which scales in fp16.",
    "total_batch_idx": "Read trainer.progress.micro_batches.",
    "tuning": "A search trains copies with separate trainers.",
    "val_check_batch": "Read trainer.val_check_interval.",
    "weights_save_path": "Read trainer.checkpoint_callback.dirpath.",
}
