"""`TaskModule`: base class of the user's model, losses and optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from numbers import Real
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import torch
import torch.distributed as dist
from torch import nn

from lumen import console
from lumen.data.nested import as_device, as_tensors, iterate_tensors, map_leaves
from lumen.errors import ConfigError, TrainingError
from lumen.internals.tensors import get_reset_method
from lumen.metrics.log_call import Reduction, as_weight, check_name, check_unknown_options, iterate_items
from lumen.task.data_module import Attached, DataHooks
from lumen.task.hyperparameters import HyperparametersMixin, class_only_method
from lumen.task.model_hooks import ModelHooks
from lumen.task.optimizer_hooks import OptimizerHooks
from lumen.task.teacher import find_teachers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import Metric

    from lumen.task.running_trainer import AnyTrainer


class TaskModule(HyperparametersMixin, ModelHooks, OptimizerHooks, DataHooks, Attached, nn.Module):
    """Model with its losses and its optimizer.

    Subclass it and define `training_step` and `configure_optimizers`; all other methods are optional. Lumen calls a
    step with the arguments of its signature: `(batch)`, `(batch, batch_idx)` or `(batch, batch_idx, dataloader_idx)`. A
    batch is what the loader returns, on the device. `batch_idx` counts an epoch's micro-batches as a single process
    would.

    A task may have the loaders and transfer hooks of a `DataModule`. If the run has a data module, its loaders and
    hooks take precedence over the task's.

    A task is an ordinary `nn.Module`: its steps can be called without a trainer, and `self.log` then does nothing.
    """

    _is_filled = False  # True if the parameters come from training or a file
    _is_configured = False  # configure_model has been called
    _opener: AnyTrainer | None = None  # trainer that is calling `configure_callbacks`

    #: False: `training_step` itself calls backward and the optimizers' steps; see `OptimizerHooks`.
    automatic_optimization = True
    #: False: `load_from_checkpoint` only reports missing and unexpected names. A resumed run always loads all names.
    strict_loading = True
    #: Words by name of module, for `lumen.Mesh`: the layers that several processes compute together.
    parallel_plan: Mapping[str, str] | None = None
    #: Dimension of the sequence in tensors of training batches, for `lumen.Mesh(context=...)`: 1 for `(batch, time)`.
    sequence_dim: int | None = None
    #: Example batch, which a task may set for its own use and for callbacks.
    example_input_array: Any = None

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one micro-batch.

        Returns:
            A scalar loss: the mean over the micro-batch's samples; or `(loss, weight)`: the mean over `weight` units
            (tokens, boxes); or a dictionary with `"loss"` (and `"weight"`); or None to omit this micro-batch. The
            gradient of a step is that of the mean over all units of all its micro-batches. A weight is a number >= 0. A
            weight on an accelerator makes the host wait once per micro-batch, so return a number or define
            `batch_weight`.
        """
        raise ConfigError(f"{type(self).__name__} has no training_step. Define `training_step(self, batch)`.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch during `fit` or `validate`, without gradients and in eval mode."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch during `test`, without gradients and in eval mode."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict for one batch. Default: `self(batch)`, or `self(inputs)` for a batch `(inputs, ...)`."""
        batch = args[0]
        return self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    def batch_weight(self, batch: Any) -> float:
        """Return the units (tokens, boxes) in a batch from the loader, if the loss is a mean over units.

        This method is optional. With it, Lumen knows the total of a step before its first forward, so gradients need no
        second pass.
        """
        raise ConfigError("batch_weight is not defined")

    def configure_optimizers(self) -> Any:
        """Build the optimizer.

        Returns:
            An optimizer; or `([optimizer], [scheduler])`, each scheduler stepped per epoch or given as a dictionary; or
            `{"optimizer": optimizer, "lr_scheduler": scheduler or dictionary}`. The dictionary of a scheduler has
            `scheduler`, and optionally: `interval` ("epoch", the default, "step" or "token"); `frequency` (1);
            `monitor`, the logged name that `ReduceLROnPlateau` reads: it steps only if the name has a new value since
            its last step; `strict` (True: a monitor without a value is an error); `warmup_steps` or `warmup_epochs`
            (0), a warm-up before it; and `warmup_start` or `warmup_factor`, as in `lumen.optim.Warmup`. With "token"
            the lengths of a schedule of `lumen.optim` are units of weight, from `training_step` or `batch_weight`.

            If the optimizer's `step` needs a closure (LBFGS), the closure evaluates all micro-batches of the step
            again, with the same batches, random numbers, weighting and clipping; see `lumen.loop.step.Closure`.
        """
        raise ConfigError(
            f"{type(self).__name__} has no configure_optimizers and the config has no optimizer. "
            "Define `configure_optimizers(self)` or set `optimizer:` in the config."
        )

    def configure_callbacks(self) -> Any:
        """Return callbacks of this task: one, a list, or a dictionary.

        Lumen calls this first when it opens a run; `self.trainer` is set. The callbacks join the trainer's, and stay
        there. Each replaces the trainer's callbacks of its class or of a base class, including default callbacks.
        """
        return []

    def configure_model(self) -> None:
        """Build the layers here instead of in `__init__`, if no process has memory for all of them.

        Lumen calls this once, before the first stage. Parameters are built on the meta device, buffers on a real
        device. After the strategy has sharded the parameters, Lumen initializes them with `init_weights`, with equal
        values under every strategy. `self.device_mesh` is the mesh of the run's devices.
        """

    def init_weights(self, module: nn.Module, name: str) -> None:
        """Initialize the parameters of a module in place, if the module was built in `configure_model`.

        Lumen calls this without gradients, for every module of `configure_model` that has parameters or submodules. All
        generators are seeded by the run's seed and the module's name. The parameters are real, unsharded and on the
        CPU. A module may also write parameters of its submodules, which are initialized before it; these parameters are
        then in memory together.

        Args:
            module: The module to initialize. Without an override, its `reset_parameters()` is called, if it exists.
            name: The module's name in the task, such as "net.blocks.3.attention"; "" is the task.
        """
        if reset := get_reset_method(module):
            reset()

    def modules_to_shard(self) -> Iterable[nn.Module]:
        """Return the modules whose parameters `lumen.FSDP` gathers and frees together, such as a model's blocks.

        This method is optional: by default FSDP chooses the modules. Arguments of `lumen.FSDP` take precedence over
        this method.
        """
        raise ConfigError("modules_to_shard is not defined")

    # ------------------------------------------------------------------ logging

    def log(
        self,
        name: str,
        value: float | torch.Tensor | Metric,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction | Callable[..., Any] | None = None,
        *,
        weight: float | None = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        rank_zero_only: bool = False,
        sync_dist: bool = True,
        metric_attribute: str | None = None,
        **unknown: Any,
    ) -> None:
        """Log a value. Never waits for a device, never communicates: any ranks may call this, any number of times.

        Values of an epoch or evaluation cover all processes, and are equal on every rank, wherever they are read. The
        same holds for step values that Lumen writes. Values of the step in progress (`trainer.callback_metrics`) cover
        this process only.

        Args:
            name: Name of the value, unique within a stage; with `on_step` and `on_epoch` the two are named `x_step` and
                `x_epoch`.
            value: A number, a tensor of one element, or a `torchmetrics.Metric`, which Lumen computes over the epoch
                and resets at its end. Training and an evaluation within it may log the same metric object. (A metric of
                the task that is not logged also computes over all processes, if all of them call `compute`, as in
                `on_validation_epoch_end`; within a step it computes over this process's batches.)
            prog_bar: Show the value in the progress bar.
            logger: Pass the value to the loggers.
            on_step: Write the value at every `log_every_n_steps`-th step and at the last step of a run, averaged over
                the step's micro-batches. Default: True for numbers in training steps.
            on_epoch: Write the mean over the epoch. Default: True, except for numbers in training steps.
            weight: Number of samples (tokens, boxes) that the value represents in means, >= 0; 0 ignores the value. A
                tensor is read immediately, which waits for its device. Default: the samples of this batch.
            reduce_fx: Reduction over an epoch and over the processes: "mean" (the default), "sum", "min" or "max", or
                the equivalent function of torch or Python, such as `torch.sum`. In a hook without a batch, such as
                `on_validation_epoch_end`, the number of each process has the same weight. The mean is then correct only
                if the number is equal on all processes, as results of torchmetrics' `compute`, `all_gather` or
                `callback_metrics` are. For other numbers a warning asks once for `reduce_fx` ("sum" for counts; "mean"
                confirms the mean), a `weight`, or a torchmetrics object.
            add_dataloader_idx: Append `/dataloader_idx_N` if a stage has several loaders; `/NAME` for loaders
                in a dictionary. False: keep the name; if several loaders log it, the value covers all their samples.
            batch_size: Lightning's name of `weight`; pass only one of the two.
            rank_zero_only: Ignore the call on all ranks but 0.
            sync_dist: Accepted for compatibility with Lightning; values always cover all processes.
            metric_attribute: Accepted for compatibility with Lightning; Lumen finds the metric in the task.
            unknown: Other arguments of Lightning's method; each raises an error that names the replacement, except for
                the values None and False.

        Raises:
            ConfigError: No step or epoch is in progress, or an argument is invalid; the message says how to fix it.
        """
        run = self._run
        if run is None or not run.stage:
            return
        metrics = run.log.stage
        if metrics is None or metrics.closed:
            raise ConfigError(
                f"self.log({name!r}) was called outside of a training or evaluation epoch. Call self.log in a step, "
                "or in an epoch or batch hook, or use self.logger."
            )
        if unknown:
            check_unknown_options(unknown, inspect.signature(TaskModule.log).parameters)
        if rank_zero_only and not run.processes.is_global_zero:
            return
        if on_step and run.log.batch_index is None:
            raise ConfigError(
                f"self.log({name!r}, on_step=True) was called outside of a batch, where no step is in progress. Leave "
                "on_step out: the value belongs to the epoch."
            )
        loader, is_number = run.log.loader_suffix, isinstance(value, (torch.Tensor, Real))
        try:
            full_name = name + (loader if add_dataloader_idx else "")
        except TypeError:
            check_name(name)
            raise
        if weight is None and batch_size is None:
            counts: float = run.log.batch_samples
            hook = run.log.hook if reduce_fx is None and is_number else ""
        else:
            counts, hook = as_weight(name, weight, batch_size), ""
        call = (
            run.log.in_train_step and is_number, on_step, on_epoch, prog_bar, logger,
            "mean" if reduce_fx is None else reduce_fx, add_dataloader_idx, hook, loader,
        )  # fmt: skip
        metrics.log(full_name, value, counts, call)

    def log_dict(
        self,
        dictionary: Mapping[str, float | torch.Tensor | Metric],
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction | Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        """Call `log` for each entry of a mapping (also a `MetricCollection`), with the same options.

        Raises:
            ConfigError: The argument is not a mapping; or an error of `log`.
        """
        for name, value in iterate_items(dictionary):
            self.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, **options)

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print once, in the first process, above the progress bar."""
        if self._run is None or self._run.processes.is_global_zero:
            console.print_values(*values, sep=sep, end=end)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all processes. Collective: every rank must call this equally often.

        A step may therefore call this only if every rank has a batch, which can fail at the end of an epoch.

        Args:
            data: A tensor or number, or a collection of them, of equal shapes on all ranks.
            group: Not supported: all processes take part.
            sync_grads: Let gradients flow back to the ranks of the tensors, summed over all ranks.

        Returns:
            The same collection of tensors, each with a new first dimension: the rank. With a single process the tensors
            have no new dimension.

        Raises:
            ConfigError: `group` was given.
            TrainingError: Shapes or types differ between ranks; raised on every rank.
        """
        if group is not None:
            raise ConfigError(
                "all_gather: a group is given, but all processes take part. Leave group out, and index the result "
                "by the ranks of the group; or call torch.distributed.all_gather."
            )
        if self._run is None:
            return as_tensors(data, self.device)
        processes, prepared = self._run.processes, as_tensors(data, self._run.strategy.device)
        if processes.world_size == 1:
            return prepared
        descriptions = processes.for_user().all_gather(
            [f"{str(each.dtype)[6:]}{list(each.shape)}" for each in iterate_tensors(prepared)]
        )
        for rank, other in enumerate(descriptions):
            if other != descriptions[0]:
                raise TrainingError(
                    "all_gather: the ranks must give tensors of equal shapes and types, but rank 0 gives "
                    f"{', '.join(descriptions[0]) or 'none'} and rank {rank} gives {', '.join(other) or 'none'}. Pad "
                    "the tensors, or use trainer.strategy.all_gather, which accepts any plain data and tensors."
                )
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return map_leaves(prepared, _gather_part)

    # ------------------------------------------------------------------ its run

    @contextmanager
    def _opened_by(self, trainer: AnyTrainer) -> Iterator[None]:
        """Set `self.trainer` within the context, while a trainer asks the task for its callbacks."""
        self._opener = trainer
        try:
            yield
        finally:
            del self._opener

    @property
    def trainer(self) -> AnyTrainer:
        """Trainer of the run.

        Raises:
            ConfigError: The task is not in a run.
        """
        trainer = self._opener or self._trainer
        if trainer is None:
            raise ConfigError(f"{type(self).__name__} is not attached to a trainer; self.trainer exists during a run.")
        return trainer

    @trainer.setter
    def trainer(self, trainer: Any) -> NoReturn:
        raise ConfigError(
            f"{type(self).__name__}.trainer cannot be set: pass the task to fit, validate, test or predict."
        )

    @property
    def device(self) -> torch.device:
        """Device of the task's steps; outside of a run, the device of its parameters."""
        if self._run is not None and self._run.stage:
            return self._run.strategy.device
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), torch.device("cpu"))

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """Mesh of the run's devices, from `configure_model` on; None for a single device."""
        return None if self._run is None else self._run.strategy.device_mesh

    @property
    def global_step(self) -> int:
        """Optimizer updates completed by the newest `fit`; evaluations do not change the number."""
        return 0 if self._run is None else self.trainer.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed by the newest `fit`."""
        return 0 if self._run is None else self.trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """Rank of this process, from 0."""
        return 0 if self._run is None else self._run.processes.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its node, from 0."""
        return 0 if self._run is None else self._run.processes.local_rank

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def logger(self) -> Any:
        """First logger, or None."""
        return next(iter(self.loggers), None)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the first floating-point parameter or buffer; torch's default without one."""
        held = chain(self.parameters(), self.buffers())
        found = (tensor.dtype for tensor in held if tensor.is_floating_point())
        return next(found, torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """True if the task's steps run on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def fabric(self) -> None:
        """Always None: Lumen has no Fabric."""
        return None

    def to_onnx(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names the replacement, the export command of Lumen.

        Raises:
            ConfigError: Always, with the command to write instead.
        """
        raise ConfigError(
            "to_onnx: write lumen export RUN --format onnx --output FILE.onnx, or call torch.onnx.export."
        )

    def to_torchscript(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names the replacement: torch.export, which has replaced TorchScript.

        Raises:
            ConfigError: Always, with the command to write instead.
        """
        raise ConfigError(
            "to_torchscript: write lumen export RUN --format torch-export --output FILE.pt2, which torch.export.load "
            "reads, or call torch.export.export."
        )

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise an error that names the replacement: TensorRT reads files of torch.export.

        Raises:
            ConfigError: Always, with the command to write instead.
        """
        raise ConfigError(
            "to_tensorrt: write lumen export RUN --format torch-export --output FILE.pt2, and pass the result of "
            "torch.export.load to torch_tensorrt."
        )

    # ------------------------------------------------------------------ its parameters

    def freeze(self) -> Self:
        """Freeze every parameter and set eval mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Unfreeze every parameter, except for teachers' parameters, and set train mode."""
        self.requires_grad_(True)
        for teacher in find_teachers(self):
            teacher.requires_grad_(False)
        return self.train()

    @class_only_method
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | PurePath,
        map_location: torch.device | str | int | None = None,
        hparams_file: None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        *,
        average: str | Sequence[str | PurePath] | None = None,
        **overrides: Any,
    ) -> Self:
        """Build the task from the hyperparameters of a checkpoint and load its parameters.

        Args:
            checkpoint_path: A checkpoint directory, or a run directory (its newest valid checkpoint), or a URL of one.
            map_location: Device of the parameters and buffers. Default: the device on which the task builds them.
            hparams_file: Not supported: pass arguments that the checkpoint lacks as `overrides`.
            strict: Raise an error for missing and unexpected names; False: only report these names. A different shape
                or dtype is always an error. Default: `strict_loading` of the task.
            weights_only: Accepted for compatibility with Lightning; Lumen never unpickles a checkpoint.
            average: Weights to load. Default: the weights that validations evaluated; for a run with EMA or SWA these
                are the average. "parameters": the parameters of training. "EMA", "SWA", or a different callback whose
                state has tensors by parameter name, or "Lookahead" for its slow weights. Or the mean of several
                checkpoints: "last:5" of this one and the four before it, "best:3" of the three best in its folder, or
                paths.
            overrides: Constructor arguments that replace saved ones.

        Raises:
            ConfigError: The average does not exist, or an argument is invalid.
            CheckpointDamaged: Bytes of the checkpoint are missing or changed.
            CheckpointMismatch: The checkpoint belongs to a different model.
        """
        device = as_device("load_from_checkpoint", map_location)
        task = cls._build_from_checkpoint(
            checkpoint_path, hparams_file, overrides=overrides, strict=strict, average=average
        )
        return task if device is None else task.to(device)

    def _call_configure_model(self) -> None:
        """Call `configure_model`, so that the run does not call it again."""
        self.configure_model()
        self._is_configured = True

    def _mark_filled(self) -> None:
        """Record that the parameters come from training or a file."""
        self._is_filled = True

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the state, and turn off the warning of evaluations about untrained parameters."""
        self._is_filled = True
        return super().load_state_dict(*args, **kwargs)


def _gather_part(part: Any) -> Any:
    return _AllGather.apply(part) if isinstance(part, torch.Tensor) else part  # type: ignore[no-untyped-call]


@final
class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, tensor.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total[dist.get_rank()]
