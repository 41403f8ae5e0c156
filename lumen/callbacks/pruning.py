"""Sets parameters to zero in the course of training, and keeps them there."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import is_parametrized

from lumen.callbacks.base import Callback
from lumen.callbacks.parameter_average import ParameterAverage
from lumen.console import logger as _log
from lumen.data.nested import fill
from lumen.distributed.dtensor import is_sharded, local_tensor, placed_like
from lumen.errors import ConfigError
from lumen.errors.arguments import at_least, checked
from lumen.internals.tensors import own_parameters
from lumen.random import Domain, make_key, preserved_generators, seed_generators
from lumen.task.teacher import teachers_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from lumen.task.task_module import TaskModule
    from lumen.trainer.trainer import Trainer

Method = type[prune.BasePruningMethod]

_METHODS: dict[str, Method] = {
    "l1_unstructured": prune.L1Unstructured,
    "ln_structured": prune.LnStructured,
    "random_structured": prune.RandomStructured,
    "random_unstructured": prune.RandomUnstructured,
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NAMES = ("weight", "bias")
_PLACE = 3  # of what is drawn here, among the hooks of an epoch


@final
class ModelPruning(Callback):
    """Prunes the model at the end of each epoch, by the methods of `torch.nn.utils.prune`.

    What is pruned is 0 from then on: after each update, in averages that callbacks keep, and in checkpoints, whose
    parameters have the names that they always have and can be read by anyone. The others move as by hand with
    `torch.nn.utils.prune`: gradients of what is pruned are 0 before they are clipped. The masks are in the callback's
    state, so that a resumed run goes on exactly, under any strategy.

    Args:
        pruning_fn: `l1_unstructured`, `random_unstructured`, `ln_structured`, `random_structured`, or a class derived
            from `torch.nn.utils.prune.BasePruningMethod`.
        parameters_to_prune: Pairs of a module and the name of its parameter, or names in the task, such as
            `net.0.weight`. Default: all called as in `parameter_names`, but for those of the task itself and of a
            `Teacher`, which follows what is pruned.
        parameter_names: Of `weight` and `bias`, what is pruned where `parameters_to_prune` does not say it.
        use_global_unstructured: Compare the elements of all parameters with each other; False: of each parameter.
        amount: Share of the elements, or with structured pruning of the channels, that are left, from 0.0 to 1.0; an
            int: how many; a function of the epoch, from 0.
        apply_pruning: Whether to prune at all; or a function of the epoch.
        make_pruning_permanent: There is nothing else here; see the text above.
        use_lottery_ticket_hypothesis: Set what is left to what it was when training began (Frankle and Carbin, The
            Lottery Ticket Hypothesis, 2019, step 4 of page 2); or a function of the epoch.
        resample_parameters: Set it to new values instead, by the modules' `reset_parameters`, where they have one.
        pruning_dim: The dimension whose channels structured pruning leaves out.
        pruning_norm: By which norm `ln_structured` compares them: 1, 2, ... or `inf`.
        verbose: 1: log how much is pruned; 2: of each parameter.
        prune_on_train_epoch_end: False: prune after each validation instead.

    Attributes:
        masks: By name of parameter: False where it is pruned; under FSDP in shards. Empty until there are any.

    Raises:
        ConfigError: There is no such method, parameter or value; or the method cannot prune what it is to.
    """

    stops_at_steps = False

    @checked
    def __init__(
        self,
        pruning_fn: str | Method,
        parameters_to_prune: Sequence[tuple[nn.Module, str] | str] = (),
        parameter_names: list[str] | None = None,
        use_global_unstructured: bool = True,
        amount: int | float | Callable[[int], int | float] = 0.5,
        apply_pruning: bool | Callable[[int], bool] = True,
        make_pruning_permanent: bool = True,
        use_lottery_ticket_hypothesis: bool | Callable[[int], bool] = True,
        resample_parameters: bool = False,
        pruning_dim: int | None = None,
        pruning_norm: int | float | None = None,
        verbose: int = 0,
        prune_on_train_epoch_end: bool = True,
    ) -> None:
        at_least(0, verbose=verbose)
        self.method, self._options = _method_of(pruning_fn, pruning_dim, pruning_norm)
        if use_global_unstructured and self.method.PRUNING_TYPE != "unstructured":  # type: ignore[attr-defined]
            raise ConfigError(
                f"ModelPruning: {self.method.__name__} prunes whole channels, which are not compared between "
                "parameters. Set use_global_unstructured=False."
            )
        if not make_pruning_permanent:
            raise ConfigError(
                "ModelPruning: the parameters themselves are 0 where they are pruned, at any time. Leave out "
                "make_pruning_permanent; the masks are in trainer.callbacks[...].masks."
            )
        if unknown := [name for name in parameter_names or () if name not in _NAMES]:
            raise ConfigError(
                f"ModelPruning: parameter_names are of {' and '.join(_NAMES)}, found {unknown[0]}. Others are given by "
                "parameters_to_prune."
            )
        self.parameters_to_prune = parameters_to_prune
        self.parameter_names = parameter_names or list(_NAMES)
        self.use_global_unstructured = use_global_unstructured
        self.amount, self.apply_pruning = amount, apply_pruning
        self.use_lottery_ticket_hypothesis = use_lottery_ticket_hypothesis
        self.resample_parameters = resample_parameters
        self.verbose, self.prune_on_train_epoch_end = verbose, prune_on_train_epoch_end
        self._forget()

    def _forget(self) -> None:
        self.masks: dict[str, torch.Tensor] = {}
        self._first: dict[str, torch.Tensor] = {}  # the parameters when training began
        self._pruned: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        self._due_epoch: int | None = None
        self._seed = 0

    def setup(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Start anew."""
        if stage == "fit":
            self._forget()
            with preserved_generators():  # they are equal on all ranks here, and of the run's seed
                self._seed = int(torch.randint(1 << 31, ()))

    def state_dict(self) -> dict[str, Any]:
        """The masks, and what parameters are set to again."""
        return {"masks": self.masks, "first": self._first, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the masks of a checkpoint."""
        self.masks, self._first, self._seed = state["masks"], state["first"], state["seed"]

    def on_fit_start(self, trainer: Trainer, task: TaskModule) -> None:
        """Find the parameters, and see that they stay pruned."""
        self._pruned = self._find(task)
        if self.resample_parameters and any(map(is_sharded, self._pruned.values())):
            raise ConfigError(
                "ModelPruning: what a module draws by reset_parameters is for whole parameters, and FSDP cuts them up. "
                "Leave out resample_parameters, or use strategy: ddp."
            )
        for held, what in ((self.masks, "masks"), (self._first, "first values")):
            if held and (others := held.keys() ^ self._pruned.keys()):
                raise ConfigError(
                    f"ModelPruning: the {what} of the checkpoint are not of the same parameters: "
                    f"{', '.join(sorted(others)[:8])}. Resume with what was pruned when it was saved."
                )
        if self.use_lottery_ticket_hypothesis and not self.resample_parameters and not self._first:
            self._first = {name: each.detach().clone() for name, each in self._pruned.items()}
        for held in (self.masks, self._first):
            held.update({name: each.to(self._pruned[name].device) for name, each in held.items()})
        self._hooks = [each.register_step_post_hook(self._after_update) for each in trainer.optimizers]

    def teardown(self, trainer: Trainer, task: TaskModule, stage: str) -> None:
        """Leave the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_before_optimizer_step(self, trainer: Trainer, task: TaskModule, optimizer: Optimizer) -> None:
        """What is pruned has no gradient."""
        for name, mask in self.masks.items():
            if (gradient := self._pruned[name].grad) is not None:
                local_tensor(gradient).mul_(local_tensor(mask))

    def _after_update(self, *_: Any) -> None:
        """What is pruned stays 0, whatever an optimizer remembers of it."""
        self._apply_to(self._pruned)

    @torch.no_grad()
    def _apply_to(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, mask in self.masks.items():
            if name in tensors:
                local_tensor(tensors[name]).mul_(local_tensor(mask))

    def on_train_epoch_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Prune, if that is to be done here."""
        if self.prune_on_train_epoch_end and trainer.is_epoch_end:
            self._prune(trainer, task, trainer.current_epoch)

    def on_validation_end(self, trainer: Trainer, task: TaskModule) -> None:
        """An average may stand in the task: prune when the step ends."""
        if not (self.prune_on_train_epoch_end or trainer.sanity_checking):
            self._due_epoch = trainer.current_epoch

    def on_step_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Prune after a validation."""
        if self._due_epoch is not None:
            self._prune(trainer, task, self._due_epoch)
            self._due_epoch = None

    def _prune(self, trainer: Trainer, task: TaskModule, epoch: int) -> None:
        def said(given: Any) -> Any:
            return given(epoch) if callable(given) else given

        amount = said(self.amount)
        if not (said(self.apply_pruning) and amount):
            return
        averages = [each for each in trainer.callbacks if isinstance(each, ParameterAverage)]
        for each in averages:
            each.update(trainer, task)  # by what training has made, not by what is left of it
        before = {name: _zeros(mask) for name, mask in self.masks.items()}
        with preserved_generators(), torch.no_grad():  # the same on all processes
            seed_generators(make_key(self._seed, Domain.HOOK, trainer.global_step, _PLACE))
            self.masks = self._computed(amount)
            if said(self.use_lottery_ticket_hypothesis):
                self._set_back(task)
        self._apply_to(self._pruned)
        for each in averages:
            self._apply_to(each.average)
        if self.verbose:
            self._say(before)

    def _computed(self, amount: int | float) -> dict[str, torch.Tensor]:
        """Masks for what is left of the parameters, as `torch.nn.utils.prune` finds them. Collective under FSDP."""
        holders: dict[str, tuple[nn.Module, str]] = {}
        for name, parameter in self._pruned.items():
            holder = nn.Module()
            holder.register_parameter("value", nn.Parameter(_whole(parameter), requires_grad=False))
            if name in self.masks:
                prune.custom_from_mask(holder, "value", _whole(self.masks[name]))  # type: ignore[no-untyped-call]
            holders[name] = holder, "value"
        where = ""
        try:
            if self.use_global_unstructured:
                prune.global_unstructured([*holders.values()], self.method, amount=amount, **self._options)
            else:
                for where, given in holders.items():  # noqa: B007 - for the error
                    self.method.apply(*given, amount=amount, **self._options)  # type: ignore[no-untyped-call]
        except (ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ConfigError(
                f"ModelPruning: {self.method.__name__} cannot prune {where or 'the parameters'} by {amount}: {error}. "
                "Say which it can prune by parameter_names or parameters_to_prune, and an amount that is left of them."
            ) from error
        masks = {name: holder.get_buffer("value_mask").bool() for name, (holder, _) in holders.items()}
        return {name: placed_like(mask, self._pruned[name]) for name, mask in masks.items()}

    def _set_back(self, task: TaskModule) -> None:
        """Set parameters to what they were, or to new values."""
        if not self.resample_parameters:
            for name, parameter in self._pruned.items():
                fill(parameter, self._first[name])
            return
        pruned = {id(each) for each in self._pruned.values()}
        for module in task.modules():
            reset: Any = getattr(module, "reset_parameters", None)
            if reset is not None and any(id(each) in pruned for each in module.parameters(recurse=False)):
                others = [(each, each.clone()) for each in module.parameters() if id(each) not in pruned]
                reset()
                for parameter, value in others:
                    fill(parameter, value)

    def _find(self, task: TaskModule) -> dict[str, nn.Parameter]:
        """The parameters to prune, by name, each once."""
        names = {id(parameter): name for name, parameter in task.named_parameters()}
        found: dict[str, nn.Parameter] = {}
        following = {id(each) for teacher in teachers_of(task) for each in teacher.parameters()}
        for parameter in self._given(task, following):
            if id(parameter) not in names or id(parameter) in following:
                raise ConfigError(
                    f"ModelPruning: parameters_to_prune has what is no parameter of {type(task).__name__}, or one of a "
                    "Teacher. Give pairs of a module of the task and the name of its parameter, or names such as "
                    "net.0.weight."
                )
            found[names[id(parameter)]] = parameter
        if not found:
            raise ConfigError(
                f"ModelPruning: no layer of {type(task).__name__} has a {' or '.join(self.parameter_names)}. Say which "
                "parameters are pruned by parameters_to_prune."
            )
        return found

    def _given(self, task: TaskModule, following: set[int]) -> Iterator[Any]:
        named = dict(task.named_parameters(remove_duplicate=False))
        for given in self.parameters_to_prune:
            yield named.get(given) if isinstance(given, str) else getattr(*given, None)
        if not self.parameters_to_prune:
            layers = [each for each in task.modules() if each is not task and not isinstance(each, _CONTAINERS)]
            for name, layer in product(self.parameter_names, layers):
                held = own_parameters(layer).get(name)
                if is_parametrized(layer, name) or isinstance(vars(layer).get(name), torch.Tensor):
                    raise ConfigError(
                        f"ModelPruning: {name} of a {type(layer).__name__} is computed, as by weight_norm, and is no "
                        "parameter that can be 0. Name others by parameters_to_prune."
                    )
                if held is not None and id(held) not in following:
                    yield held

    def _say(self, before: Mapping[str, int]) -> None:
        """Log how much is pruned; `before`: how many elements of each parameter were. Collective under FSDP."""
        now = {name: _zeros(mask) for name, mask in self.masks.items()}
        sizes = {name: mask.numel() for name, mask in self.masks.items()}
        said = "%s: %s: %d of %d pruned (%.2f %%), %d before"
        method, total = self.method.__name__, sum(now.values())
        rows = [("all", total, sum(sizes.values()), sum(before.values()))]
        rows += [(name, now[name], sizes[name], before.get(name, 0)) for name in now if self.verbose > 1]
        for name, zeros, size, earlier in rows:
            _log.info(said, method, name, zeros, size, 100 * zeros / size, earlier)


def _method_of(given: str | Method, dim: int | None, norm: int | float | None) -> tuple[Method, dict[str, Any]]:
    """A method of pruning, and what it needs beside an amount."""
    if not isinstance(given, str):
        return given, {}
    method = _METHODS.get(given.lower())
    if method is None:
        raise ConfigError(f"ModelPruning: pruning_fn is one of {', '.join(_METHODS)}, or a class; found {given}.")
    options: dict[str, Any] = {}
    for name, argument, value in (("dim", "pruning_dim", dim), ("n", "pruning_norm", norm)):
        if name in inspect.signature(method).parameters:
            if value is None:
                raise ConfigError(f"ModelPruning: {given} needs {argument}, which says how channels are compared.")
            options[name] = value
    return method, options


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor, of all its elements. Collective if it is sharded."""
    held: Any = tensor.detach()
    whole: torch.Tensor = held.full_tensor() if is_sharded(tensor) else held
    return whole.clone()


def _zeros(mask: torch.Tensor) -> int:
    return int((~_whole(mask)).sum())
