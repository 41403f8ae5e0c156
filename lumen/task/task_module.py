"""TaskModule: the part of a training that is the user's own."""

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
from lumen.data.nested import as_tensors, convert, device_of, tensors
from lumen.errors import ConfigError, TrainingError
from lumen.internals.tensors import own_reset
from lumen.metrics.log_call import Reduction, as_weight, check_name, items_of, unknown_option
from lumen.task.data_module import Attached, DataHooks
from lumen.task.hyperparameters import HasHyperparameters
from lumen.task.model_hooks import ModelHooks
from lumen.task.optimizer_hooks import OptimizerHooks
from lumen.task.teacher import teachers_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchmetrics import Metric

    from lumen.task.running_trainer import AnyTrainer


class TaskModule(HasHyperparameters, ModelHooks, OptimizerHooks, DataHooks, Attached, nn.Module):
    """A model, its losses and its optimizer.

    Subclass it and define `training_step` and `configure_optimizers`; everything else is optional. A step is called
    with what its signature has: `(batch)`, `(batch, batch_idx)` or `(batch, batch_idx, dataloader_idx)`. A batch is
    what the loader gives, on the device; `batch_idx` counts an epoch's micro-batches as one process would.

    A task may bring its own data: it has the loaders and transfer hooks of a `DataModule`, which go first.

    A task is an ordinary `nn.Module`: its steps can be called without a trainer, `self.log` then does nothing.
    """

    _is_filled = False  # training or a file has given it its parameters
    _is_configured = False  # configure_model has been called
    _opener: AnyTrainer | None = None  # while it is asked for its callbacks

    #: False: `training_step` calls backward and the optimizers' steps itself; see `OptimizerHooks`.
    automatic_optimization = True
    #: False: `load_from_checkpoint` reports names that differ, and leaves them alone. A run is always resumed whole.
    strict_loading = True
    #: A batch, to be set by the task for its own use and that of callbacks.
    example_input_array: Any = None

    # ------------------------------------------------------------------ steps

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss of one micro-batch.

        Returns:
            A scalar loss: the mean over the micro-batch's samples; or `(loss, weight)`: the mean over `weight` units
            (tokens, boxes); or a dictionary with `"loss"` (and `"weight"`); or None to leave this micro-batch out.
            The gradient of a step is that of the mean over all units of all its micro-batches. A weight is a number
            >= 0; as a tensor on an accelerator it makes the host wait once a micro-batch, so return a number or
            define `batch_weight`.
        """
        raise ConfigError(f"{type(self).__name__} has no training_step. Define `training_step(self, batch)`.")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch during `fit` or `validate`: no gradients, eval mode."""

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one batch during `test`."""

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Predict for one batch. Default: `self(batch)`, or `self(inputs)` for a batch `(inputs, ...)`."""
        batch = args[0]
        return self(batch[0] if isinstance(batch, (list, tuple)) else batch)

    def batch_weight(self, batch: Any) -> float:
        """Units (tokens, boxes) in a batch as it comes from the loader, when the loss is a mean over units.

        Defining it is optional: it makes the total of a step known before its first forward, so gradients need no
        second pass.
        """
        raise ConfigError("batch_weight is not defined")

    def configure_optimizers(self) -> Any:
        """Build the optimizer.

        Returns:
            An optimizer; or `([optimizer], [scheduler])`, each scheduler stepped per epoch or given as a dictionary;
            or `{"optimizer": optimizer, "lr_scheduler": scheduler or dictionary}`. The dictionary of a scheduler has
            `scheduler`, and optionally `interval` ("epoch", the default, "step" or "token"), `frequency` (1), `monitor`
            (the logged name that `ReduceLROnPlateau` reads; it moves only if that has a new value since it moved last),
            `strict` (True: a monitor without a value yet is an error), `warmup_steps` or `warmup_epochs` (0), a warm-up
            before it, and `warmup_start` or `warmup_factor`, as in `lumen.optim.Warmup`. With "token" the lengths of a
            schedule of `lumen.optim` are units of weight: what `training_step` returns or `batch_weight` gives.

            An optimizer whose `step` needs a closure (LBFGS) gets one that evaluates all micro-batches of the step
            anew: the same batches, random numbers, weighting and clipping; see `lumen.loop.step.Closure`.
        """
        raise ConfigError(
            f"{type(self).__name__} has no configure_optimizers and the config has no optimizer. "
            "Define `configure_optimizers(self)` or set `optimizer:` in the config."
        )

    def configure_callbacks(self) -> Any:
        """Callbacks of this task: one, a list, or a dictionary.

        Called first of all whenever a run is opened; `self.trainer` is there. They join the trainer's, and stay with
        it. One takes the place of all that are of its class or of a base of it, so of a default one too.
        """
        return []

    def configure_model(self) -> None:
        """Build the layers here instead of in `__init__`, if no process can hold all of them.

        It is called once, before the first stage. Parameters are built on the meta device, buffers really. When the
        strategy has cut them up, Lumen gives the parameters their values by `init_weights`; the same ones under every
        strategy. `self.device_mesh` is the grid of processes.
        """

    def init_weights(self, module: nn.Module, name: str) -> None:
        """Give the parameters of a module their first values, in place, if it was built in `configure_model`.

        It is called for every module that has such parameters or holds modules that have, without gradients, with all
        generators keyed by the seed and the name; the parameters are real, whole and on the CPU. A module may also
        write parameters of the modules in it, which get their own values before; they are then held whole together.

        Args:
            module: Default: its `reset_parameters()` is called, if it has one.
            name: Its name in the task, such as "net.blocks.3.attention"; "" is the task.
        """
        if reset := own_reset(module):
            reset()

    def modules_to_shard(self) -> Iterable[nn.Module]:
        """The modules whose parameters `lumen.FSDP` gathers and frees together, best the blocks of a deep model.

        Defining it is optional; FSDP chooses by itself otherwise, and its arguments go first.
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
        *,
        weight: float | None = None,
        reduce_fx: Reduction | Callable[..., Any] | None = None,
        add_dataloader_idx: bool = True,
        batch_size: float | None = None,
        sync_dist: bool = True,
        **unknown: Any,
    ) -> None:
        """Record a number. Never waits for a device, never communicates: any ranks may call it, any number of times.

        Values of an epoch or evaluation are those of all processes together, the same on every rank, wherever they can
        be read; so are the step values that are written. Those of the step in progress (`trainer.callback_metrics`)
        are this process's own.

        Args:
            name: Unique within a stage; with `on_step` and `on_epoch` the two are named `x_step` and `x_epoch`.
            value: A number, a tensor of one element, or a `torchmetrics.Metric`, which is computed over the epoch and
                reset at its end; training and an evaluation within it may feed the same one. (A metric of the task that
                is not logged computes over all processes too, where all call `compute`, as in
                `on_validation_epoch_end`; within a step, over this process's batches.)
            prog_bar: Show it in the progress bar.
            logger: Pass it to the loggers.
            on_step: Write it at every `log_every_n_steps`-th step and at the last of a run, averaged over the step's
                micro-batches. Default: True for numbers in training steps.
            on_epoch: Write its mean over the epoch. Default: True everywhere else.
            weight: Samples (tokens, boxes) the value stands for in means, >= 0; with 0 it has no part. A tensor is read
                at once, which waits where it lies on a device. Default: the samples of this batch.
            reduce_fx: How values become one over an epoch and over the processes: "mean" (the default), "sum", "min"
                or "max", or the function of torch or Python that does so, such as `torch.sum`. In a hook around
                steps, as `on_validation_epoch_end`, a number stands for no samples: of several processes the mean of
                theirs is right where it is the same on all, as what torchmetrics' `compute`, `all_gather` or
                `callback_metrics` gave. Any other needs a word, and one warning asks for it: `reduce_fx` ("sum" for
                counts; "mean" means it), a `weight`, or a torchmetrics object.
            add_dataloader_idx: With several evaluation loaders, append `/dataloader_idx_N`, or `/NAME` where they are
                in a dictionary. False: the name as it is; one that several of them log is of the samples of all these.
            batch_size: Lightning's name of `weight`; give one of the two.
            sync_dist: Accepted for users of Lightning; values are always those of all processes.
            unknown: What else Lightning's takes: an error that says what serves instead.

        Raises:
            ConfigError: There is no step or epoch to log at, or an argument is none: says which and what to write.
        """
        run = self._run
        if run is None or not run.stage:
            return
        metrics = run.log.stage
        if metrics is None or metrics.closed:
            raise ConfigError(
                f"self.log({name!r}) was called outside of a training or evaluation epoch, where there is no step to "
                "log it at. Call it in a step or in an epoch or batch hook, or use self.logger."
            )
        if unknown:
            raise unknown_option(unknown, inspect.signature(TaskModule.log).parameters)
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
        how = (
            run.log.in_train_step and is_number, on_step, on_epoch, prog_bar, logger,
            "mean" if reduce_fx is None else reduce_fx, add_dataloader_idx, hook, loader,
        )  # fmt: skip
        metrics.log(full_name, value, counts, how)

    def log_dict(
        self,
        dictionary: Mapping[str, float | torch.Tensor | Metric],
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        **options: Any,
    ) -> None:
        """`log` each entry of a mapping (a `MetricCollection` too) with the same options.

        Raises:
            ConfigError: It is no mapping; or as of `log`.
        """
        for name, value in items_of(dictionary):
            self.log(name, value, prog_bar, logger, on_step, on_epoch, **options)

    def print(self, *values: Any, sep: str = " ", end: str = "\n") -> None:
        """Print once, in the first process, above the progress bar."""
        if self._run is None or self._run.processes.is_global_zero:
            console.print_values(*values, sep=sep, end=end)

    def all_gather(self, data: Any, group: None = None, sync_grads: bool = False) -> Any:
        """The tensors of all processes. Collective: every rank must call this, as often as the others.

        So a step may do this only where every rank has a batch, which in the last one of an epoch may not be so.

        Args:
            data: A tensor or number, or a collection of them, of equal shapes on all ranks.
            group: Not here: all processes take part.
            sync_grads: Let gradients flow back to the ranks that gave the tensors, summed over all ranks.

        Returns:
            The same with tensors, each of a first dimension more: the ranks. With one process they are as given.

        Raises:
            ConfigError: A group is given.
            TrainingError: Shapes or types differ; raised on every rank.
        """
        if group is not None:
            raise ConfigError(
                "all_gather: a group is given, but all processes take part. Leave it out, and index the result by the "
                "ranks of the group; or call torch.distributed.all_gather."
            )
        if self._run is None:
            return as_tensors(data, self.device)
        processes, prepared = self._run.processes, as_tensors(data, self._run.strategy.device)
        if processes.world_size == 1:
            return prepared
        described = processes.for_user().gather(
            [f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors(prepared)]
        )
        for rank, other in enumerate(described):
            if other != described[0]:
                raise TrainingError(
                    f"all_gather: the ranks must give tensors of equal shapes and types, but rank 0 gives "
                    f"{', '.join(described[0]) or 'none'} and rank {rank} gives {', '.join(other) or 'none'}. Pad "
                    "them, or use trainer.strategy.gather, which takes any plain data and tensors."
                )
        with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
            return convert(prepared, _gathered)

    # ------------------------------------------------------------------ its run

    @contextmanager
    def _opened_by(self, trainer: AnyTrainer) -> Iterator[None]:
        """The context in which a trainer asks the task for its callbacks."""
        self._opener = trainer
        try:
            yield
        finally:
            del self._opener

    @property
    def trainer(self) -> AnyTrainer:
        """The trainer of the run.

        Raises:
            ConfigError: The task is not in a run.
        """
        trainer = self._opener or self._trainer
        if trainer is None:
            raise ConfigError(f"{type(self).__name__} is not attached to a trainer; self.trainer exists during a run.")
        return trainer

    @property
    def device(self) -> torch.device:
        """Where its steps run; outside of a run, where the parameters are."""
        if self._run is not None and self._run.stage:
            return self._run.strategy.device
        return next((tensor.device for tensor in chain(self.parameters(), self.buffers())), torch.device("cpu"))

    @property
    def device_mesh(self) -> DeviceMesh | None:
        """The devices of the run as a grid, from `configure_model` on; None where there is one device."""
        return None if self._run is None else self._run.strategy.device_mesh

    @property
    def global_step(self) -> int:
        """Optimizer updates completed; after `fit`, in an evaluation too, those of it."""
        return 0 if self._run is None else self.trainer.global_step

    @property
    def current_epoch(self) -> int:
        """Epochs completed, likewise."""
        return 0 if self._run is None else self.trainer.current_epoch

    @property
    def global_rank(self) -> int:
        """Number of this process."""
        return 0 if self._run is None else self._run.processes.rank

    @property
    def local_rank(self) -> int:
        """Number of this process on its node."""
        return 0 if self._run is None else self._run.processes.local_rank

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return [] if self._trainer is None else self._trainer.loggers

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return self.trainer.logger

    @property
    def dtype(self) -> torch.dtype:
        """Of its floating-point parameters and buffers, the first that there is; else torch's default."""
        held = chain(self.parameters(), self.buffers())
        found = (tensor.dtype for tensor in held if tensor.is_floating_point())
        return next(found, torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """Its steps run on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def fabric(self) -> None:
        """None: there is no Fabric."""
        return None

    def to_onnx(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here: the file is written from a run, by the command line.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError(
            "to_onnx: write lumen export RUN --format onnx --output FILE.onnx, or call torch.onnx.export."
        )

    def to_torchscript(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here: torch.export has taken the place of TorchScript.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError(
            "to_torchscript: write lumen export RUN --format torch-export --output FILE.pt2, which torch.export.load "
            "reads, or call torch.export.export."
        )

    def to_tensorrt(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not here: TensorRT reads what torch.export writes.

        Raises:
            ConfigError: Always; it says what to write.
        """
        raise ConfigError(
            "to_tensorrt: write lumen export RUN --format torch-export --output FILE.pt2, and give what "
            "torch.export.load reads to torch_tensorrt."
        )

    # ------------------------------------------------------------------ its parameters

    def freeze(self) -> Self:
        """Take every parameter out of training and set eval mode."""
        self.requires_grad_(False)
        return self.eval()

    def unfreeze(self) -> Self:
        """Put every parameter into training, but for those of teachers, and set train mode."""
        self.requires_grad_(True)
        for teacher in teachers_of(self):
            teacher.requires_grad_(False)
        return self.train()

    @classmethod
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
            map_location: Where its parameters and buffers go. Default: where the task builds them.
            hparams_file: Not here: give what a checkpoint does not have as `overrides`.
            strict: Missing and unexpected names are errors; otherwise they are reported and left alone. A shape or
                dtype that differs is an error always. Default: `strict_loading` of the task.
            weights_only: Accepted for users of Lightning; nothing is ever unpickled.
            average: Default: the weights that validations evaluated, which of a run with EMA or SWA are the average.
                "parameters": the parameters of training; "EMA", "SWA", another callback whose state holds tensors by
                the parameters' names, or "Lookahead" for its slow weights; or the mean of several checkpoints:
                "last:5" of this one and the four before it, "best:3" of the three best in its folder, or paths.
            overrides: Constructor arguments that replace saved ones.

        Raises:
            ConfigError: There is no such average; or an argument cannot be taken.
            CheckpointDamaged: Bytes of the checkpoint are missing or changed.
            CheckpointMismatch: The checkpoint is of another model.
        """
        device = device_of("load_from_checkpoint", map_location)
        task = cls._built_from(checkpoint_path, hparams_file, overrides=overrides, strict=strict, average=average)
        return task if device is None else task.to(device)

    def _configure(self) -> None:
        """Call `configure_model` before a run does."""
        self.configure_model()
        self._is_configured = True

    def _note_filled(self) -> None:
        """Note that training or a file gives the task its parameters."""
        self._is_filled = True

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module; an evaluation then no longer warns of parameters that nobody has trained."""
        self._is_filled = True
        return super().load_state_dict(*args, **kwargs)


def _gathered(part: Any) -> Any:
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
