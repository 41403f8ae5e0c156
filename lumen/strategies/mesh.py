"""Data, sharded and tensor parallelism on one device mesh."""

from __future__ import annotations

from copy import copy
from typing import Any, final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lumen.console import logger as _log
from lumen.distributed.context import Context
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments
from lumen.strategies.fsdp import FSDP
from lumen.strategies.fsdp_task import ShardedTask
from lumen.strategies.sequence import cut_dropouts
from lumen.strategies.tensor_parallel import TensorParallel
from lumen.task.task_module import TaskModule

#: Options of FSDP that the sizes of a mesh replace: the default, and the sizes.
_REPLACED = {"sharding_strategy": ("full_shard", "replicate and shard"), "shard_size": (None, "shard")}


@final
class Mesh(FSDP):
    """Strategy that cuts matrices over `tensor` processes, and shards the parts over `shard` processes.

    The number of processes is `replicate * shard * context * tensor`. The processes of a `tensor` group have successive
    ranks, so that a group is in one node if its size divides the processes of a node. Otherwise a group spans nodes:
    the results are the same, each layer waits for the network, and Lumen warns. The processes of a group read the same
    batches, and compute each layer of the task's `parallel_plan` together. The processes of a `context` group read the
    same training batches, and each computes a part of every sequence; an evaluation divides samples among them instead.
    Over `replicate` and `shard`, the strategy is `FSDP`: `Mesh(shard=n)` and `FSDP()` on n processes are bitwise
    identical.

    `parallel_plan` is a dictionary of the task: names of modules, where `*` is one part of a name, and words. A module
    without an entry is computed by every process of a group.

    | word | module | cut | output |
    |---|---|---|---|
    | `colwise` | `nn.Linear` | output features | features of this process |
    | `colwise` | `nn.Dropout` of the last dimension | features, which are of this process | features of this process |
    | `colwise:1` | `nn.Dropout` of attention probabilities | heads, dimension 1 | heads of this process |
    | `packed_colwise` | `nn.Linear` of query, key and value | output features of each | features of this process |
    | `rowwise` | `nn.Linear` | input features, which are of this process | whole |
    | `colwise_gather_output` | `nn.Linear` | output features | whole |
    | `embedding_rowwise` | `nn.Embedding` | rows | whole |
    | `vocab` | `nn.Linear` or `nn.Embedding` | one of the last two | whole |

    These are words of transformers. Without `parallel_plan`, the plan of a model from transformers in the task is used.
    Between a `colwise` and a `rowwise` module, a process has its share of the features, so code there must not contain
    their number: `unflatten(-1, (-1, head_size))`, not `unflatten(-1, (heads, -1))`. The first training step compares
    each module around such layers with the same module on one process, and refuses a difference.

    `context` cuts each tensor of a training batch that has the dimension `sequence_dim` of the task. `lumen.attention`
    gathers keys and values, `lumen.position_ids` counts from the beginning of the whole sequence, and `nn.Dropout`
    draws the numbers of one process. A loss that is a mean over tokens has to return their number as its weight. The
    first training step compares the gradients with those of whole sequences, and refuses a difference. Keys and values
    of whole sequences are in memory for one layer at a time, unless autograd keeps them for the backward.

    Args:
        replicate: Number of groups that hold all parameters, >= 1.
        shard: Number of processes over which parameters are sharded, >= 1. Default: the remaining processes.
        tensor: Number of processes that compute a layer of the plan together, >= 1.
        context: Number of processes that share the sequences of a training batch, >= 1. Parameters are sharded over
            them too.
        **options: Arguments of `FSDP`, without `sharding_strategy` and `shard_size`.

    Raises:
        ConfigError: An argument is unknown or has a wrong value.
    """

    @check_arguments
    def __init__(
        self, /, *, replicate: int = 1, shard: int | None = None, tensor: int = 1, context: int = 1, **options: Any
    ) -> None:
        for name, value in {"replicate": replicate, "shard": shard, "tensor": tensor, "context": context}.items():
            if value is not None and value < 1:
                raise ConfigError(f"Mesh: {name} must be at least 1, found {value}.")
        for name, (default, sizes) in _REPLACED.items():
            if options.get(name, default) != default:
                raise ConfigError(f"Mesh: {name} is an option of FSDP. Set {sizes}.")
        super().__init__(**options)
        self._sizes = replicate, shard, tensor, context

    def resize(self, *, replicate: int = 1, shard: int | None = None, tensor: int = 1, context: int = 1) -> Mesh:
        """Return a strategy with the same options and these sizes, which places no task yet."""
        mesh = copy(self)
        mesh._sizes = replicate, shard, tensor, context
        return mesh

    @property
    def data_rank(self) -> int:
        """Number of this process among those that read data; equal in a `tensor` group."""
        return self.processes.rank // self._sizes[2]

    @property
    def data_world_size(self) -> int:
        """Number of processes that read data: `replicate * shard * context`."""
        return self.processes.world_size // self._sizes[2]

    def _choose_mesh(self) -> dict[str, int]:
        replicate, shard, tensor, context = self._sizes
        world = self.processes.world_size
        shard = shard or max(world // (replicate * tensor * context), 1)
        if (product := replicate * shard * tensor * context) != world:
            runs = f"{world} processes run" if world > 1 else "1 process runs"
            start = f"start {product} processes" if self.processes.started_by else f"set devices: {product}"
            raise ConfigError(
                f"Mesh: replicate * shard * tensor * context is {replicate} * {shard} * {tensor} * {context} = "
                f"{product}, but {runs}. Change a size, or {start}."
            )
        if self.processes.nodes > 1 and self.processes.local_world_size % tensor:
            _log.warning(
                "Mesh: tensor = %d does not divide the number of processes of a node, %d, so a tensor group spans "
                "nodes and is slow. Choose a divisor.", tensor, self.processes.local_world_size,
            )  # fmt: skip
        names = {"replicate": replicate, "shard": shard * context, "tensor": tensor}
        return {name: size for name, size in names.items() if name == "shard" or size > 1}

    def _open_context(self) -> Context | None:
        _, _, tensor, context = self._sizes
        if context == 1:
            return None
        sizes = {"data": self.data_world_size // context, "context": context, "tensor": tensor}
        return Context(self._open_mesh(sizes)["context"])

    @property
    def _shard_mesh(self) -> DeviceMesh:
        assert self.device_mesh is not None
        names = tuple(name for name in self.device_mesh.mesh_dim_names or () if name != "tensor")
        return self.device_mesh if self._sizes[2] == 1 else self.device_mesh[names]

    def _shard_task(self, task: nn.Module, mesh: DeviceMesh) -> ShardedTask:
        assert self.device_mesh is not None
        if self.context is not None:
            self._check_sequences(task, self.context)
        if self._sizes[2] == 1:
            return super()._shard_task(task, mesh)
        tensor_parallel = TensorParallel(task, self.device_mesh["tensor"], self.device)
        sharded = super()._shard_task(task, mesh)
        tensor_parallel.check_first_forward()
        return sharded

    def _check_sequences(self, task: nn.Module, context: Context) -> None:
        name = type(task).__name__
        dim = task.sequence_dim if isinstance(task, TaskModule) else None
        if not isinstance(dim, int) or dim < 0:
            raise ConfigError(
                f"Mesh: context = {context.size} cuts sequences, but sequence_dim of {name} is {dim!r}. Set the "
                "dimension of the sequence in tensors of a batch, from 0, such as sequence_dim = 1 for (batch, time)."
            )
        if not getattr(task, "automatic_optimization", True):
            raise ConfigError(f"Mesh: context = {context.size} needs automatic optimization in {name}.")
        cut_dropouts(task, dim, context)
