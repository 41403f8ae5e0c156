"""What a task knows of the run that it is in, and of where it lies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, final

import torch
import torch.distributed as dist

from lumen.data.nested import as_tensors, convert, tensors
from lumen.errors import ConfigError, TrainingError
from lumen.task.data_module import Attached

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lumen.distributed.processes import Processes
    from lumen.task.running_trainer import AnyTrainer


class OfRun(Attached):
    """Mixin of `TaskModule`: the run as a task reads it, where it lies, and what Lightning's exports are here."""

    _opener: AnyTrainer | None = None  # while it is asked for its callbacks

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
        return next((tensor.device for tensor in _tensors_of(self)), torch.device("cpu"))

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
        found = (tensor.dtype for tensor in _tensors_of(self) if tensor.is_floating_point())
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


def _tensors_of(task: Any) -> Iterator[torch.Tensor]:
    yield from task.parameters()
    yield from task.buffers()


def all_gather(data: Any, processes: Processes, device: torch.device, *, sync_grads: bool) -> Any:
    """See `TaskModule.all_gather`. Collective: every rank must call this."""
    prepared = as_tensors(data, device)
    if processes.world_size == 1:
        return prepared
    described = processes.for_user().gather([f"{str(each.dtype)[6:]}{list(each.shape)}" for each in tensors(prepared)])
    for rank, other in enumerate(described):
        if other != described[0]:
            raise TrainingError(
                f"all_gather: the ranks must give tensors of equal shapes and types, but rank 0 gives "
                f"{', '.join(described[0]) or 'none'} and rank {rank} gives {', '.join(other) or 'none'}. Pad them, or "
                "use trainer.strategy.gather, which takes any plain data and tensors."
            )
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        return convert(prepared, _gathered)


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
