"""Finetuning: parts of a model are frozen before training and trained from a later epoch on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from torch import nn
from torch.optim import Optimizer

from lumen.callbacks.base import Callback
from lumen.console import logger as _log
from lumen.errors import ConfigError
from lumen.errors.arguments import check_arguments, check_at_least
from lumen.optim import MultiOptimizer

if TYPE_CHECKING:
    from lumen.task.running_trainer import AnyTrainer
    from lumen.task.task_module import TaskModule

Modules = nn.Module | Iterable["Modules"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BaseFinetuning(Callback, ABC):
    """Base class of callbacks that freeze modules before training and unfreeze them at later epochs.

    `freeze_before_training` freezes modules. `finetune_function` unfreezes them, epoch by epoch. In
    `configure_optimizers`, give the optimizer only the trained parameters:
    `[p for p in self.parameters() if p.requires_grad]`. Unfrozen modules get new parameter groups.

    Schedules with one rate per group (`LambdaLR`, `OneCycleLR`, the schedules of `lumen.optim`) leave the rate of a new
    group unchanged. Others, such as `StepLR`, change it too. A checkpoint contains the groups and the frozen state, so
    a resumed run continues exactly, under any strategy.
    """

    @abstractmethod
    def freeze_before_training(self, task: TaskModule) -> None:
        """Freeze modules with `freeze`, when `fit` begins, before `configure_model` and `configure_optimizers`."""

    @abstractmethod
    def finetune_function(self, task: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze modules with `unfreeze_and_add_param_group` at the epochs of your choice.

        Lumen calls this at the beginning of each epoch for each optimizer.

        Args:
            task: The task in training.
            epoch: The epoch that begins, from 0.
            optimizer: An optimizer returned by `configure_optimizers`.
        """

    def setup(self, trainer: AnyTrainer, task: TaskModule, stage: str) -> None:
        """Freeze modules before the optimizer is built."""
        if stage == "fit":
            self.freeze_before_training(task)

    def on_fit_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Let BatchNorm layers that a checkpoint has unfrozen update their running statistics again."""
        norms = (each for each in task.modules() if isinstance(each, _NORMS))
        _set_train_mode(each for each in norms if any(part.requires_grad for part in each.parameters(recurse=False)))

    def on_train_epoch_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Unfreeze the modules that are trained from this epoch on."""
        for optimizer in trainer.optimizers:
            self.finetune_function(task, trainer.current_epoch, optimizer)

    # ------------------------------------------------------------------ for subclasses to call

    @staticmethod
    def freeze(modules: Modules, train_bn: bool = True) -> None:
        """Freeze the parameters of modules.

        Args:
            modules: A module, or several, nested in any way.
            train_bn: True: keep training the BatchNorm layers; False: freeze their parameters and running statistics
                too.
        """
        for module in _iterate_modules(modules):
            if isinstance(module, _NORMS) and train_bn:
                _set_train_mode([module])
                continue
            if isinstance(module, _NORMS):
                module.track_running_stats = False
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)

    @staticmethod
    def make_trainable(modules: Modules) -> None:
        """Train the parameters of modules, and update the running statistics of BatchNorm layers."""
        _set_train_mode(_iterate_modules(modules))

    @staticmethod
    def filter_params(modules: Modules, train_bn: bool = True, requires_grad: bool = True) -> Iterator[nn.Parameter]:
        """Yield the trained (or frozen) parameters of modules, each once.

        Args:
            modules: A module, or several, nested in any way.
            train_bn: Include the parameters of BatchNorm layers.
            requires_grad: True: yield the trained parameters; False: the frozen parameters.
        """
        seen = set[int]()
        for module in _iterate_modules(modules):
            if train_bn or not isinstance(module, _NORMS):
                for parameter in module.parameters(recurse=False):
                    if parameter.requires_grad == requires_grad and id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield parameter

    @classmethod
    def unfreeze_and_add_param_group(
        cls,
        modules: Modules,
        optimizer: Optimizer,
        lr: float | None = None,
        initial_denom_lr: float = 10.0,
        train_bn: bool = True,
        name: str | None = None,
    ) -> None:
        """Train modules from now on, in a new parameter group.

        Parameters that the optimizer already has stay in their groups.

        Args:
            modules: A module, or several, nested in any way.
            optimizer: The optimizer that gets the new group.
            lr: Learning rate of the group; None: the rate of the first group, divided by `initial_denom_lr`.
            initial_denom_lr: Divisor of the first group's rate, > 0; used without `lr`.
            train_bn: Unfreeze BatchNorm layers too.
            name: Name of the group, shown by `LearningRateMonitor`.

        Raises:
            ConfigError: The optimizer already has all parameters of the modules.
        """
        _set_train_mode(each for each in _iterate_modules(modules) if train_bn or not isinstance(each, _NORMS))
        new = cls._find_untrained_parameters(modules, optimizer, train_bn=train_bn, requires_grad=True)
        rate = float(optimizer.param_groups[0]["lr"]) / initial_denom_lr if lr is None else lr
        optimizer.add_param_group({"params": new, "lr": rate} | ({} if name is None else {"name": name}))

    @classmethod
    def _find_untrained_parameters(
        cls, modules: Modules, optimizer: Optimizer, *, train_bn: bool, requires_grad: bool
    ) -> list[nn.Parameter]:
        """Return the parameters that the optimizer does not have yet; raise if the optimizer has all of them."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        found = [each for each in cls.filter_params(modules, train_bn, requires_grad) if id(each) not in held]
        if not found:
            raise ConfigError(
                f"{cls.__name__}: the optimizer already has all parameters of the modules to unfreeze. In "
                "configure_optimizers, pass only trained parameters: [p for p in self.parameters() if "
                "p.requires_grad]."
            )
        return found


@final
class BackboneFinetuning(BaseFinetuning):
    """Callback that trains the task's `backbone` from an epoch on, with a rate that rises in each epoch.

    In each epoch after the epoch of unfreezing, the callback multiplies the backbone's rate by a factor.
    `BaseFinetuning` says which parameters `configure_optimizers` must give to the optimizer.

    Args:
        unfreeze_backbone_at_epoch: The first epoch, from 0, in which the backbone is trained.
        lambda_func: Function of the epoch, counted from 1, that returns the factor of the backbone's rate; None: 2.
        backbone_initial_ratio_lr: The backbone's first rate, as a multiple of the rate of the first group.
        backbone_initial_lr: The backbone's first rate as a number, instead of a multiple.
        should_align: Limit the backbone's rate to the rate of the first group.
        train_bn: True: train BatchNorm layers of the backbone from the beginning; False: never train them.
        verbose: Log the rates of each epoch.
        rounding: Digits of the logged rates.

    Raises:
        ConfigError: The task has no module `backbone`, or several optimizers.
    """

    INSTEAD: ClassVar[Mapping[str, str]] = {
        "initial_denom_lr": "Leave it out: backbone_initial_ratio_lr sets the first rate.",
    }

    @check_arguments
    def __init__(
        self,
        unfreeze_backbone_at_epoch: int = 10,
        lambda_func: Callable[[int], float] | None = None,
        backbone_initial_ratio_lr: float = 0.1,
        backbone_initial_lr: float | None = None,
        should_align: bool = True,
        train_bn: bool = True,
        verbose: bool = False,
        rounding: int = 12,
    ) -> None:
        check_at_least(0, unfreeze_backbone_at_epoch=unfreeze_backbone_at_epoch)
        self.unfreeze_backbone_at_epoch = unfreeze_backbone_at_epoch
        self.lambda_func = lambda_func
        self.backbone_initial_ratio_lr, self.backbone_initial_lr = backbone_initial_ratio_lr, backbone_initial_lr
        self.should_align, self.train_bn = should_align, train_bn
        self.verbose, self.rounding = verbose, rounding
        self._rate: float | None = None  # the backbone's rate, before schedules changed it

    def state_dict(self) -> dict[str, Any]:
        """Return the backbone's rate, from which the next rate is computed."""
        return {"rate": self._rate}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the backbone's rate."""
        self._rate = state["rate"]

    def freeze_before_training(self, task: TaskModule) -> None:
        """Freeze the backbone."""
        backbone = getattr(task, "backbone", None)
        if not isinstance(backbone, nn.Module):
            raise ConfigError(
                f"BackboneFinetuning: {type(task).__name__} has no module named backbone after its __init__. Name "
                "the module backbone, or derive from BaseFinetuning."
            )
        self.freeze(backbone, self.train_bn)

    def on_train_start(self, trainer: AnyTrainer, task: TaskModule) -> None:
        """Raise if there are several optimizers, or if the optimizer already has the backbone."""
        optimizer, *others = trainer.optimizers
        if others or isinstance(optimizer, MultiOptimizer):
            raise ConfigError(
                "BackboneFinetuning: configure_optimizers returned several optimizers, but the backbone needs a "
                "single optimizer. Return a single optimizer; or, with automatic_optimization = False, derive from "
                "BaseFinetuning, whose finetune_function Lumen calls for each optimizer."
            )
        if not any(group.get("name") == "backbone" for group in optimizer.param_groups):
            self._find_untrained_parameters(task.backbone, optimizer, train_bn=self.train_bn, requires_grad=False)

    def finetune_function(self, task: TaskModule, epoch: int, optimizer: Optimizer) -> None:
        """Unfreeze the backbone, or raise its rate."""
        if epoch < self.unfreeze_backbone_at_epoch:
            return
        first_rate = float(optimizer.param_groups[0]["lr"])
        group = next((each for each in optimizer.param_groups if each.get("name") == "backbone"), None)
        if group is None or self._rate is None:
            initial_rate = self.backbone_initial_lr
            self._rate = first_rate * self.backbone_initial_ratio_lr if initial_rate is None else initial_rate
            self.unfreeze_and_add_param_group(
                task.backbone, optimizer, self._rate, train_bn=self.train_bn, name="backbone"
            )
        else:
            self._rate *= 2.0 if self.lambda_func is None else self.lambda_func(epoch + 1)
            if self.should_align:
                self._rate = min(self._rate, first_rate)
            group["lr"] = self._rate
        if self.verbose:
            _log.info(
                "epoch %d: learning rate %s, learning rate of the backbone %s",
                epoch, round(first_rate, self.rounding), round(self._rate, self.rounding),
            )  # fmt: skip


def _iterate_modules(modules: Modules) -> Iterator[nn.Module]:
    """Yield modules and all their submodules."""
    if isinstance(modules, nn.Module):
        yield from modules.modules()
        return
    for each in modules:
        yield from _iterate_modules(each)


def _set_train_mode(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, _NORMS):
            module.track_running_stats = module.running_mean is not None
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_()
