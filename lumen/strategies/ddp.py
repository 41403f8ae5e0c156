"""DistributedDataParallel: every process holds the whole model, and gradients are averaged once per optimizer step."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from inspect import signature
from typing import Any, Literal, final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lumen.distributed.processes import STARTUP_TIMEOUT_S, TIMEOUT_S
from lumen.errors import ConfigError, TrainingError
from lumen.errors.arguments import check_arguments, format_first_names
from lumen.errors.lightning_names import INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES
from lumen.internals.memory import count_reentrant_checkpoints
from lumen.internals.process_groups import check_reducer_names, end_backward, exclude_expanded_buffers
from lumen.internals.tensors import compute_norms, get_direct_buffers
from lumen.strategies.ordered_sum import OrderedSum
from lumen.strategies.step_module import AdditionMonitor, StepModule, describe_unused, refuse_sparse
from lumen.strategies.strategy import NORM_TOLERANCE, RankInvariant, Strategy, make_exact_error, sync_buffers

_NO_CONTEXT = nullcontext()
_BUCKET_BYTES = 25 * 2**20  # the default of DistributedDataParallel
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_DDP_ARGUMENTS = signature(DistributedDataParallel).parameters
# The wrapper would communicate buffers in forwards, and ranks may run different numbers of forwards. The argument has a
# new name since torch 2.13.
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_ARGUMENTS else "broadcast_buffers": False
}


@final
class DDP(Strategy):
    """Strategy that keeps the whole model on every process, and averages gradients in the last backward of a step.

    The arguments are like the arguments of `torch.nn.parallel.DistributedDataParallel`.

    Args:
        find_unused_parameters: Allow steps that leave out parameters; each backward then traverses the autograd graph.
        static_graph: Assume that every step uses the same parameters in the same order; not with several micro-batches
            per process. With three or more processes, the first step of a process is then rounded differently.
        gradient_as_bucket_view: Let gradients be views of the communicated buckets, which saves a copy of all
            gradients.
        bucket_cap_mb: The size of a bucket, in MiB. Default: torch's, 25.
        broadcast_buffers: Broadcast buffers, such as BatchNorm's statistics, from rank 0 when a step begins.
        gradient_compression: Communicate gradients in 16 bits, which rounds them.
        timeout_s: The longest time of a step without progress, or of a wait for other processes, before Lumen ends the
            job; in seconds, > 0. Infinity disables the limit.
        startup_timeout_s: The limit until the first step ends, while data is prepared and code compiled; if it is
            longer than `timeout_s`, also in evaluations and between steps.
    """

    spans_processes = True
    is_exact = False
    INSTEAD, NEUTRAL = INSTEAD_IN_STRATEGIES, NEUTRAL_IN_STRATEGIES

    @check_arguments
    def __init__(
        self,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        bucket_cap_mb: float | None = None,
        broadcast_buffers: bool = True,
        gradient_compression: Literal["fp16", "bf16"] | None = None,
        timeout_s: float = TIMEOUT_S,
        startup_timeout_s: float = STARTUP_TIMEOUT_S,
    ) -> None:
        if gradient_compression not in (None, "fp16", "bf16"):
            raise ConfigError(f"gradient_compression: expected fp16, bf16 or null, found {gradient_compression!r}.")
        self._timeouts = {"timeout_s": timeout_s, "startup_timeout_s": startup_timeout_s}
        self._compression = gradient_compression
        self._options: dict[str, Any] = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self._broadcast_buffers = broadcast_buffers
        self._needs_zero_backward = not (find_unused_parameters or static_graph)
        self._task: nn.Module
        self._is_manual = False
        self._sums: OrderedSum | None = None
        self._ddp: DistributedDataParallel | None = None
        self._has_started = False  # True after a backward of the step that does not communicate
        self._checkpoint_count = 0  # reentrant checkpoints before the forward in progress
        self._is_reduction_deferred = False
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._frozen: list[nn.Parameter] = []
        self._additions: AdditionMonitor | None = None
        self._buffers: list[dict[str, torch.Tensor | None]] = []

    @property
    def numerics(self) -> dict[str, str | bool | None]:
        """Settings that change the computed values and differ from the default, by name."""
        return {"gradient_compression": self._compression, "broadcast_buffers": self._broadcast_buffers and None}

    def connect(self) -> None:
        """Open the process groups."""
        self.processes.connect(self.device, **self._timeouts)

    def setup(self, task: nn.Module) -> None:
        """Move the task to the device, with the parameters and buffers of rank 0."""
        refuse_sparse(task, "DDP")
        self._task = task.to(self.device)
        self._is_manual = not getattr(task, "automatic_optimization", True)
        sync_buffers(self, self._task)
        self._wrap_task()
        self._additions = AdditionMonitor()

    def _wrap_task(self) -> None:
        self._parameters = list(self._task.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        self._buffers = [get_direct_buffers(module) for module in self._task.modules()]
        self._unwrap_task()
        self._sums = OrderedSum(self.processes) if self.is_exact and self.processes.world_size > 1 else None
        if any(self._trained) and not self._is_manual:
            # A parameter that no rank uses must have no gradient, even on a rank without a batch.
            steps = StepModule(self._task, has_anchor=self._options["find_unused_parameters"]).to(self.device)
            exclude_expanded_buffers(steps)  # `sync_buffers` can broadcast these
            steps.register_forward_hook(self._defer_reduction)
            self._ddp = DistributedDataParallel(
                steps, process_group=self.processes.gradient_group, **self._options, **_NO_BUFFERS
            )
            check_reducer_names(self._ddp)
            if self._sums is not None:
                # Torch would check the annotations of a function that has any.
                self._ddp.register_comm_hook(self._sums, lambda sums, bucket: sums.sum_bucket(bucket))
            elif self._compression is not None:
                self._ddp.register_comm_hook(None, _COMM_HOOKS[self._compression])
            if self._needs_zero_backward and self.processes.world_size > 1:
                self._run_zero_backward(self._ddp)

    def _run_zero_backward(self, ddp: DistributedDataParallel) -> None:
        """Run a backward of zeros, and discard its gradients.

        DDP sums gradients in one order in its first backward; later backwards use the order in which gradients arrived
        in the first. Without this backward, a process that resumes from a checkpoint would round one step differently
        from an uninterrupted process.
        """
        ddp(None).backward()
        for parameter in self._parameters:
            parameter.grad = None

    def _unwrap_task(self) -> None:
        """Remove the wrapper's hooks from the parameters now, not when the garbage collector finds the wrapper."""
        if self._ddp is not None:
            del self._ddp.reducer, self._ddp.logger
            self._ddp = None

    def begin_step(self) -> None:
        """Wrap the task again if parameters were frozen, unfrozen or added, which torch's wrapper does not notice."""
        self._has_started = self._is_reduction_deferred = False
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = True  # also after a failed step
        if self._broadcast_buffers and any(self._buffers):
            sync_buffers(self, self._task)
        if (
            self._trained != [parameter.requires_grad for parameter in self._parameters]
            or self._have_parameters_changed()
        ):
            self._wrap_task()
        if self._sums is not None:
            self._sums.begin_step()

    def _have_parameters_changed(self) -> bool:
        """Return True if the task's parameters are no longer the wrapped parameters."""
        assert self._additions is not None
        if not self._additions.has_additions:
            return False
        self._additions.has_additions = False
        return [*map(id, self._task.parameters())] != [*map(id, self._parameters)]

    def has_collectives_in(self, part: Literal["forward", "backward", "evaluation"]) -> bool:
        """Return True for the backward, on one process too: torch's wrapper needs a backward for each forward."""
        return part == "backward" and self._ddp is not None

    def call(self, step: str, *args: Any) -> Any:
        """Run a training step through DDP, and any other step on the task itself, without communication."""
        if step == "training_step" and self._ddp is not None:
            self._checkpoint_count = count_reentrant_checkpoints()
            return self._ddp(step, *args)
        return getattr(self._task, step)(*args)

    def _defer_reduction(self, steps: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Sum the gradients after the backward if the forward had a reentrant checkpoint.

        The checkpoint runs its own backward, after which torch's wrapper treats all gradients as complete. A parameter
        that is also used outside of the checkpoint would then differ between ranks.
        """
        if args[0] is None or self._ddp is None or self._options["static_graph"]:
            return
        if self._ddp.require_backward_grad_sync and self._checkpoint_count != count_reentrant_checkpoints():
            if self._sums is not None:
                raise make_exact_error("torch.utils.checkpoint with use_reentrant=True. Use use_reentrant=False")
            self._ddp.require_backward_grad_sync, self._is_reduction_deferred = False, True

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Communicate gradients only in the last backward of a step; with exact sums in each.

        Raises:
            ConfigError: A step has several micro-batches, with `static_graph`.
        """
        if self._sums is not None and self._ddp is not None and (last or not self._options["static_graph"]):
            self._check_all_used()  # in the micro-batch before
            self._sums.begin_micro_batch(last=last)
            for parameter in self._parameters:  # the hook gets the gradient of this micro-batch alone
                if parameter.grad is not None:
                    self._sums.note_used(parameter)
                    parameter.grad = None
            return _NO_CONTEXT
        if last or self._ddp is None:
            return _NO_CONTEXT
        self._has_started = True
        if self._options["static_graph"]:
            raise ConfigError(
                "DDP: static_graph=True communicates in every backward, but a step has (or halve_on_oom may create) "
                "several micro-batches per process. Set accumulate_grad_batches: 1 (or a smaller global_batch_size) "
                "and remove halve_on_oom, or set static_graph: false."
            )
        return self._ddp.no_sync()

    def make_zero_loss(self) -> torch.Tensor:
        """Return a loss of 0 that depends on all parameters.

        If the loss ends a step of several backwards, it depends only on parameters with a gradient.
        """
        assert self._ddp is not None
        used_only = self._has_started and self._ddp.require_backward_grad_sync
        return self._ddp(None, used_only)  # type: ignore[no-any-return]

    def after_backward(self) -> None:
        """Refuse parameters without a gradient: ranks whose loss uses the parameters would wait for this rank.

        With manual optimization, average the gradients now: torch's wrapper supports one backward per step, over all
        parameters.

        Raises:
            TrainingError: Some parameters have no gradient, or their gradients were not summed over the ranks; the
                message names the parameters.
        """
        if self._is_manual:
            self._average_gradients()
            return
        self._refuse_unsummed()
        if self._is_reduction_deferred and self._ddp is not None:
            self._ddp.require_backward_grad_sync, self._is_reduction_deferred, self._has_started = True, False, True
            self.make_zero_loss().backward()  # type: ignore[no-untyped-call]
        self._check_all_used()
        if self._sums is not None:
            self._sums.write_missing()

    def _check_all_used(self) -> None:
        """Refuse parameters that the last backward with communication left without a gradient."""
        if self._ddp is None or self._options["static_graph"]:
            return
        try:
            end_backward(self._ddp)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise TrainingError(self._describe_unused(str(error))) from error

    def _average_gradients(self) -> None:
        """Average the gradients of parameters that any rank has used. Collective: every rank must call this."""
        parameters = list(self._task.parameters())
        if self.processes.world_size == 1:
            return
        counts = self.processes.all_reduce_sum([float(parameter.grad is not None) for parameter in parameters])
        used = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
        average_gradients(used, self.processes.world_size, self._compression, self.processes.gradient_group)

    def _refuse_unsummed(self) -> None:
        """Refuse parameters that were unfrozen or added within a step, after the task was wrapped for the step."""
        assert self._additions is not None
        if not (self._additions.has_additions or any(parameter.requires_grad for parameter in self._frozen)):
            return
        known = {id(each) for each, trained in zip(self._parameters, self._trained, strict=True) if trained}
        late = [name for name, each in self._task.named_parameters() if each.requires_grad and id(each) not in known]
        if late and self.processes.world_size > 1:
            raise TrainingError(
                f"{format_first_names(late)} became trainable in the middle of a step, after the processes had agreed "
                "which gradients to sum. Unfreeze and add parameters between steps: in on_train_epoch_start, "
                "on_train_batch_end or on_before_zero_grad."
            )

    def _describe_unused(self, message: str) -> str:
        named = zip(self._task.named_parameters(), self._trained, strict=True)
        trained = [name for (name, _), is_trained in named if is_trained]
        match = re.search(r"indices which did not receive grad for rank \d+: ([\d ,]+)", message)
        names = [trained[int(number)] for number in re.findall(r"\d+", match.group(1))] if match else ["unknown"]
        return describe_unused(names, self.processes.rank, "DDP")

    def collect_rank_invariants(self, grad_norm: torch.Tensor | None) -> dict[RankInvariant, torch.Tensor]:
        """Return the gradient norm and the sum of the parameters' norms: gradients are averaged before clipping."""
        found: dict[RankInvariant, torch.Tensor] = {} if grad_norm is None else {"gradient norm": grad_norm}
        if named := self._list_trainable_parameters():
            parts = compute_norms([parameter for _, parameter in named])
            found["sum of the parameters' norms"] = torch.stack([part.double() for part in parts]).sum()
        return found

    def _list_trainable_parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, each.detach()) for name, each in self._task.named_parameters() if each.requires_grad]

    @contextmanager
    def evaluation(self, *, inference_mode: bool) -> Iterator[None]:
        """Evaluate the unwrapped task, after a check that all ranks hold equal parameters.

        Raises:
            TrainingError: A trainable parameter differs between ranks; raised on every rank.
        """
        named = self._list_trainable_parameters()
        found = compute_norms([parameter for _, parameter in named]) if named else []
        ranks = self.processes.all_gather(torch.stack([norm.float() for norm in found]).tolist() if named else [])
        for rank, norms in enumerate(ranks):
            for (name, _), first, other in zip(named, ranks[0], norms, strict=True):
                if abs(first - other) > NORM_TOLERANCE * max(abs(first), abs(other)):
                    raise TrainingError(
                        f"{name} differs between rank 0 and rank {rank}: some code wrote the parameter on one rank "
                        "only. A hook with a batch, such as on_train_batch_end, is not called on a rank that has no "
                        "batch left. Write parameters in on_before_zero_grad, which every rank calls once per step."
                    )
        with super().evaluation(inference_mode=inference_mode):
            yield

    def teardown(self) -> None:
        """Remove the wrapper; the task stays on the device."""
        self._unwrap_task()
        self._parameters, self._frozen, self._buffers, self._sums = [], [], [], None
        if self._additions is not None:
            self._additions.close()
            self._additions = None
            del self._task


def _to_bf16(state: Any, bucket: Any) -> Any:
    """Wrap torch's bf16 hook, which torch allows with NCCL only, although gloo sums bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


_to_bf16.__annotations__ = default_hooks.bf16_compress_hook.__annotations__  # torch checks the annotations
_COMM_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": _to_bf16}


# ---------------------------------------------------------------------- averages without torch's wrapper


def average_gradients(
    parameters: Sequence[nn.Parameter], world: int, compression: str | None = None, group: Any = None
) -> None:
    """Replace each gradient by its mean over all processes. Collective: every rank must call this.

    Args:
        parameters: The same parameters on all ranks; a parameter without a gradient counts as zeros.
        world: The number of processes.
        compression: The dtype for communication, `fp16` or `bf16`; None uses the gradients' own dtype.
        group: The process group for communication; None uses torch's default group.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _iterate_buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        joined = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(world)
        communicated = joined if compression is None else joined.to(_DTYPES[compression])
        torch.distributed.all_reduce(communicated, group=group)
        parts = torch.split(communicated.to(joined.dtype), [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _iterate_buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients to communicate together: of one dtype, up to the size of a bucket."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for gradient in gradients:
        open_buckets.setdefault(gradient.dtype, []).append(gradient)
        sizes[gradient.dtype] += gradient.numel() * gradient.element_size()
        if sizes[gradient.dtype] >= _BUCKET_BYTES:
            del sizes[gradient.dtype]
            yield open_buckets.pop(gradient.dtype)
    yield from open_buckets.values()
