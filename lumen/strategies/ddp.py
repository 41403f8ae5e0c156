"""DistributedDataParallel: the whole model on every process, gradients averaged once per optimizer step."""

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
from lumen.errors.arguments import first_names
from lumen.internals.memory import count_reentrant_checkpoints
from lumen.internals.process_groups import end_backward, leave_out_expanded_buffers, need_reducer
from lumen.internals.tensors import norms, own_buffers
from lumen.strategies.step_module import Additions, Steps, describe_unused, refuse_sparse
from lumen.strategies.strategy import SAME, Alike, Strategy, sync_buffers

_NO_CONTEXT = nullcontext()
_BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel has them
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_KNOWN = signature(DistributedDataParallel).parameters
# The wrapper would communicate buffers in forwards, of which one rank may make more than another. Since torch 2.13 the
# argument has another name.
_NO_BUFFERS: dict[str, Any] = {
    "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers": False
}


@final
class DDP(Strategy):
    """Keeps the whole model on every process and averages gradients while the last backward of a step runs.

    The arguments are those of `torch.nn.parallel.DistributedDataParallel`.

    Args:
        find_unused_parameters: Allow steps that leave out parameters; walks over the graph of every backward.
        static_graph: Every step uses the same parameters in the same order; not with several micro-batches a process.
            The first step of a process is then rounded differently if there are three or more processes.
        gradient_as_bucket_view: Let gradients be views of the buckets that are communicated, which saves a copy of all.
        bucket_cap_mb: Size of a bucket, in MiB. Default: torch's, 25.
        broadcast_buffers: Buffers, such as BatchNorm's statistics, are those of rank 0 when a step begins.
        gradient_compression: Communicate gradients in 16 bits; they are then rounded.
        timeout_s: How long a step may stand still, or a process wait for others, before the job is ended, in seconds,
            > 0; infinite: for ever.
        startup_timeout_s: The same until the first step is done, while data is prepared and code compiled; and, if it
            is longer, in evaluations and between steps.
    """

    spans_processes = True

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
        self._settles = not (find_unused_parameters or static_graph)
        self._task: nn.Module
        self._by_hand = False
        self._ddp: DistributedDataParallel | None = None
        self._has_begun = False  # whether the step has a backward that does not communicate
        self._checkpoints = 0  # reentrant ones, before the forward in progress
        self._sums_later = False
        self._parameters: list[nn.Parameter] = []
        self._trained: list[bool] = []
        self._frozen: list[nn.Parameter] = []
        self._additions: Additions | None = None
        self._buffers: list[dict[str, torch.Tensor | None]] = []

    @property
    def numerics(self) -> dict[str, str | bool | None]:
        """See `Strategy.numerics`."""
        return {"gradient_compression": self._compression, "broadcast_buffers": self._broadcast_buffers and None}

    def connect(self) -> None:
        """See `Strategy.connect`."""
        self.processes.connect(self.device, **self._timeouts)

    def setup(self, task: nn.Module) -> None:
        """Move the task to the device; parameters and buffers become those of rank 0."""
        refuse_sparse(task, "DDP")
        self._task = task.to(self.device)
        self._by_hand = not getattr(task, "automatic_optimization", True)
        sync_buffers(self, self._task)
        self._wrap()
        self._additions = Additions()

    def _wrap(self) -> None:
        self._parameters = list(self._task.parameters())
        self._trained = [parameter.requires_grad for parameter in self._parameters]
        self._frozen = [parameter for parameter in self._parameters if not parameter.requires_grad]
        self._buffers = [own_buffers(module) for module in self._task.modules()]
        self._unwrap()
        if any(self._trained) and not self._by_hand:
            # a parameter that no rank has used must be without a gradient even where a rank had no batch
            steps = Steps(self._task, anchored=self._options["find_unused_parameters"]).to(self.device)
            leave_out_expanded_buffers(steps)  # `sync_buffers` can
            steps.register_forward_hook(self._postpone)
            self._ddp = DistributedDataParallel(
                steps, process_group=self.processes.gradient_group, **self._options, **_NO_BUFFERS
            )
            need_reducer(self._ddp)
            if self._compression is not None:
                self._ddp.register_comm_hook(None, _HOOKS[self._compression])
            if self._settles and self.processes.world_size > 1:
                self._settle(self._ddp)

    def _settle(self, ddp: DistributedDataParallel) -> None:
        """Make a backward of zeros, and drop it.

        DDP sums gradients in one order in its first backward, and in all later ones in that in which they came then.
        A process that goes on from a checkpoint would round one step differently from one that was not interrupted.
        """
        ddp(None).backward()
        for parameter in self._parameters:
            parameter.grad = None

    def _unwrap(self) -> None:
        """Remove the wrapper's hooks from the parameters now; else they stay until the garbage collector finds it."""
        if self._ddp is not None:
            del self._ddp.reducer, self._ddp.logger
            self._ddp = None

    def begin_step(self) -> None:
        """Wrap the task anew if parameters were frozen, unfrozen or added, which torch's wrapper does not notice."""
        self._has_begun = self._sums_later = False
        if self._ddp is not None:
            self._ddp.require_backward_grad_sync = True  # also after a step that has failed
        if self._broadcast_buffers and any(self._buffers):
            sync_buffers(self, self._task)
        if self._trained != [parameter.requires_grad for parameter in self._parameters] or self._finds_others():
            self._wrap()

    def _finds_others(self) -> bool:
        """Whether the task's trainable parameters are no longer those that were wrapped."""
        assert self._additions is not None
        if not self._additions.noticed:
            return False
        self._additions.noticed = False
        return [*map(id, self._task.parameters())] != [*map(id, self._parameters)]

    def communicates_in(self, part: Literal["forward", "backward", "evaluation"]) -> bool:
        """In the backward, on one process too: torch's wrapper wants one for each forward."""
        return part == "backward" and self._ddp is not None

    def call(self, step: str, *args: Any) -> Any:
        """Run a training step through DDP; any other on the task itself, without communication."""
        if step == "training_step" and self._ddp is not None:
            self._checkpoints = count_reentrant_checkpoints()
            return self._ddp(step, *args)
        return getattr(self._task, step)(*args)

    def _postpone(self, steps: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Sum the gradients after the backward if the forward had a reentrant checkpoint.

        The backward of the checkpoint is a backward of its own, after which torch's wrapper takes all gradients to be
        complete: a parameter that is used again outside of the checkpoint would differ between ranks.
        """
        if args[0] is None or self._ddp is None or self._options["static_graph"]:
            return
        if self._ddp.require_backward_grad_sync and self._checkpoints != count_reentrant_checkpoints():
            self._ddp.require_backward_grad_sync, self._sums_later = False, True

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """Communicate gradients in the last backward of a step only.

        Raises:
            ConfigError: There are several micro-batches, with `static_graph`.
        """
        if last or self._ddp is None:
            return _NO_CONTEXT
        self._has_begun = True
        if self._options["static_graph"]:
            raise ConfigError(
                "DDP: static_graph=True communicates in every backward, but a step has several micro-batches per "
                "process, or halve_on_oom may give it several. Set accumulate_grad_batches: 1 (or a smaller "
                "global_batch_size) and leave halve_on_oom out, or set static_graph: false."
            )
        return self._ddp.no_sync()

    def zero_loss(self) -> torch.Tensor:
        """A loss of 0 that depends on all parameters; where it ends a step of several, on those with a gradient."""
        assert self._ddp is not None
        used_only = self._has_begun and self._ddp.require_backward_grad_sync
        return self._ddp(None, used_only)  # type: ignore[no-any-return]

    def after_backward(self) -> None:
        """Refuse parameters that got no gradient: ranks whose loss does use them would wait for this one.

        Of a task that optimizes by hand, average the gradients there are now: torch's wrapper knows one backward a
        step, of all parameters.

        Raises:
            TrainingError: Names these parameters, or those whose gradients were not summed over the ranks.
        """
        if self._by_hand:
            self._average()
            return
        self._refuse_unsummed()
        if self._sums_later and self._ddp is not None:
            self._ddp.require_backward_grad_sync, self._sums_later, self._has_begun = True, False, True
            self.zero_loss().backward()  # type: ignore[no-untyped-call]
        if self._ddp is None or self._options["static_graph"]:
            return
        try:
            end_backward(self._ddp)
        except RuntimeError as error:
            if "finished reduction" not in str(error):
                raise
            raise TrainingError(self._name_unused(str(error))) from error

    def _average(self) -> None:
        """Average the gradients over the ranks, those of parameters that some rank has used. Collective."""
        parameters = list(self._task.parameters())
        if self.processes.world_size == 1:
            return
        counts = self.processes.sum([float(parameter.grad is not None) for parameter in parameters])
        used = [parameter for parameter, count in zip(parameters, counts, strict=True) if count]
        average(used, self.processes.world_size, self._compression, self.processes.gradient_group)

    def _refuse_unsummed(self) -> None:
        """Refuse parameters that were unfrozen in the middle of a step, after the task was wrapped for it."""
        assert self._additions is not None
        if not (self._additions.noticed or any(parameter.requires_grad for parameter in self._frozen)):
            return
        known = {id(each) for each, trained in zip(self._parameters, self._trained, strict=True) if trained}
        late = [name for name, each in self._task.named_parameters() if each.requires_grad and id(each) not in known]
        if late and self.processes.world_size > 1:
            raise TrainingError(
                f"{first_names(late)} began to be trained in the middle of a step, when the processes had agreed on "
                "whose gradients they sum. Unfreeze and add parameters between steps: in on_train_epoch_start, "
                "on_train_batch_end or on_before_zero_grad."
            )

    def _name_unused(self, message: str) -> str:
        named = zip(self._task.named_parameters(), self._trained, strict=True)
        trained = [name for (name, _), is_trained in named if is_trained]
        listed = re.search(r"indices which did not receive grad for rank \d+: ([\d ,]+)", message)
        names = [trained[int(number)] for number in re.findall(r"\d+", listed.group(1))] if listed else ["unknown"]
        return describe_unused(names, self.processes.rank, "DDP")

    def alike(self, grad_norm: torch.Tensor | None) -> dict[Alike, torch.Tensor]:
        """See `Strategy.alike`: gradients are averaged before they are clipped."""
        found: dict[Alike, torch.Tensor] = {} if grad_norm is None else {"gradient norm": grad_norm}
        if named := self._named():
            parts = norms([parameter for _, parameter in named])
            found["sum of the parameters' norms"] = torch.stack([part.double() for part in parts]).sum()
        return found

    def _named(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, each.detach()) for name, each in self._task.named_parameters() if each.requires_grad]

    @contextmanager
    def evaluation(self, *, inference_mode: bool) -> Iterator[None]:
        """Evaluate the bare task, after a check that it is the same on every rank.

        Raises:
            TrainingError: A trainable parameter differs between ranks; raised on every rank.
        """
        named = self._named()
        found = norms([parameter for _, parameter in named]) if named else []
        ranks = self.processes.gather(torch.stack([norm.float() for norm in found]).tolist() if named else [])
        for rank, theirs in enumerate(ranks):
            for (name, _), first, other in zip(named, ranks[0], theirs, strict=True):
                if abs(first - other) > SAME * max(abs(first), abs(other)):
                    raise TrainingError(
                        f"{name} is not the same on rank 0 and on rank {rank}: something has written it on one of them "
                        "only. A hook with a batch, such as on_train_batch_end, is not called on a rank that has no "
                        "batch left; write parameters in on_before_zero_grad, which every rank calls once a step."
                    )
        with super().evaluation(inference_mode=inference_mode):
            yield

    def teardown(self) -> None:
        """Remove the wrapper; the task stays on the device."""
        self._unwrap()
        self._parameters, self._frozen, self._buffers = [], [], []
        if self._additions is not None:
            self._additions.close()
            self._additions = None
            del self._task


def _to_bf16(state: Any, bucket: Any) -> Any:
    """Wrap torch's own hook, because torch allows that one with NCCL only; gloo sums bfloat16 too."""
    return default_hooks.bf16_compress_hook(state, bucket)


_to_bf16.__annotations__ = default_hooks.bf16_compress_hook.__annotations__  # torch looks at them
_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": _to_bf16}


# ---------------------------------------------------------------------- where no wrapper of torch's makes the mean


def average(parameters: Sequence[nn.Parameter], world: int, compression: str | None = None, group: Any = None) -> None:
    """Replace each gradient by its mean over all processes. Collective: every rank must call this.

    Args:
        parameters: The same on all ranks; one without a gradient here has zeros.
        world: Number of processes.
        compression: Communicate in `fp16` or `bf16`; None: in the gradients' own dtype.
        group: The process group that communicates; None: torch's default group.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        joined = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(world)
        wire = joined if compression is None else joined.to(_DTYPES[compression])
        torch.distributed.all_reduce(wire, group=group)
        parts = torch.split(wire.to(joined.dtype), [gradient.numel() for gradient in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def _buckets(gradients: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients that are communicated together: of one dtype, up to some size."""
    open_buckets: dict[torch.dtype, list[torch.Tensor]] = {}
    sizes: Counter[torch.dtype] = Counter()
    for gradient in gradients:
        open_buckets.setdefault(gradient.dtype, []).append(gradient)
        sizes[gradient.dtype] += gradient.numel() * gradient.element_size()
        if sizes[gradient.dtype] >= _BUCKET_BYTES:
            del sizes[gradient.dtype]
            yield open_buckets.pop(gradient.dtype)
    yield from open_buckets.values()
