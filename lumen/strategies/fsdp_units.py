"""FSDP units: modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from lumen.distributed.dtensor import is_sharded
from lumen.errors import ConfigError
from lumen.task.task_module import TaskModule

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(
    task: nn.Module,
    classes: Sequence[str] = (),
    is_unit: Callable[[str, nn.Module], bool] | None = None,
    min_parameters: int | None = None,
) -> list[nn.Module]:
    """Return the units of a task, inner units first; parameters outside all units belong to the task.

    A module that shares a parameter with a module outside is no unit: the next larger module holds both.

    Args:
        task: The task whose modules are searched.
        classes: The names of classes; every module of these classes is a unit.
        is_unit: A function of a module's name and the module, which returns True if the module is a unit.
        min_parameters: The number of parameters, without the parameters of inner units, that makes a module a unit; the
            smallest such modules are units.

    Returns:
        The modules that the first given argument chooses; else the modules of the task's `modules_to_shard`; else the
        repeated blocks: modules of one class in the same list, dictionary or `nn.Sequential`, without single layers
        that are cut over processes.

    Raises:
        ConfigError: No module has such a class, or a module cannot be a unit.
    """
    named = {module: name for name, module in task.named_modules()}
    if classes:
        units = _find_by_class(task, classes)
    elif is_unit is not None:
        units = [module for module, name in named.items() if is_unit(name, module)]
    elif min_parameters is not None:
        units = _find_by_size(task, min_parameters)
    elif isinstance(task, TaskModule) and type(task).modules_to_shard is not TaskModule.modules_to_shard:
        units = list(task.modules_to_shard())
        if foreign := [type(unit).__name__ for unit in units if unit not in named]:
            raise ConfigError(
                f"modules_to_shard returned a {foreign[0]} that is not a module of {type(task).__name__}."
            )
    else:
        units = list(_find_blocks(task))
    attentions = (module for module in named if isinstance(module, nn.MultiheadAttention))
    # The forward of an attention reads parameters of its children.
    excluded = {task, *(part for attention in attentions for part in attention.children())}
    allowed = {
        unit for unit in units if unit not in excluded and _can_be_unit(unit) and not _has_shared_parameter(task, unit)
    }
    return [module for module in reversed(named) if module in allowed]


def list_outermost(task: nn.Module, strategy: str) -> list[nn.Module]:
    """Return the largest modules of a task that the task calls directly; together they hold all of its parameters.

    Args:
        task: The task whose children are searched.
        strategy: The class of the strategy, for errors.

    Raises:
        ConfigError: A parameter belongs to the task itself, or several of these modules share a parameter.
    """
    found: list[nn.Module] = []
    pending = [*task.children()][::-1]
    while pending:
        module = pending.pop()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            pending += [*module.children()][::-1]
        elif next(module.parameters(), None) is not None:
            found.append(module)
    direct = [name for name, _ in task.named_parameters(recurse=False)]
    shared = [name for name, module in task.named_modules() if module in found and _has_shared_parameter(task, module)]
    if direct or shared:
        raise ConfigError(
            f"{strategy}: {type(task).__name__} uses manual optimization, so each module is gathered when it is "
            f"called, but {', '.join([*direct, *shared][:8])} "
            f"{'is a parameter of the task itself' if direct else 'share parameters'}. Put these parameters into one "
            "module that the task calls, or use strategy: ddp."
        )
    return found


def find_modules(task: nn.Module, classes: Iterable[str], option: str) -> list[nn.Module]:
    """Return all modules of the given classes.

    Args:
        task: The task whose modules are searched.
        classes: The names of the classes.
        option: The option that gives the classes, for errors.

    Raises:
        ConfigError: The task has no module of a class.
    """
    found = {type(module).__name__ for module in task.modules()}
    if missing := [name for name in classes if name not in found]:
        raise ConfigError(
            f"{option}: no module of {type(task).__name__} is a {' or a '.join(missing)}; "
            f"its classes are {', '.join(sorted(found))}."
        )
    return [module for module in task.modules() if type(module).__name__ in classes]


def _find_by_class(task: nn.Module, classes: Sequence[str]) -> list[nn.Module]:
    units = find_modules(task, classes, "wrap")
    if unfit := [unit for unit in units if not _can_be_unit(unit)]:
        raise ConfigError(
            f"wrap: a {type(unfit[0]).__name__} has no forward or no parameters, so no call can gather parameters. "
            "Name the class of the modules inside."
        )
    return units


def _find_by_size(module: nn.Module, min_parameters: int) -> list[nn.Module]:
    units: list[nn.Module] = []

    def count(module: nn.Module) -> int:
        total = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        total += sum(count(child) for child in module.children())
        if total >= min_parameters and _can_be_unit(module):
            units.append(module)
            return 0
        return total

    count(module)
    return units


def _find_blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the repeated modules that are not part of other repeated modules."""
    children = list(module.children())
    kinds = Counter(type(child) for child in children if next(child.parameters(), None) is not None)
    for child in children:
        is_cut = any(map(is_sharded, child.parameters(recurse=False)))  # A unit must hold a region of cut layers.
        if isinstance(module, _CONTAINERS) and kinds[type(child)] > 1 and _can_be_unit(child) and not is_cut:
            yield child
        else:
            yield from _find_blocks(child)


def _can_be_unit(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None


def _has_shared_parameter(task: nn.Module, unit: nn.Module) -> bool:
    """Return True if a module shares a parameter with a module outside."""
    unit_parameters = {id(parameter) for parameter in unit.parameters()}
    unit_modules = set(unit.modules())
    return any(
        id(parameter) in unit_parameters
        for module in task.modules()
        if module not in unit_modules
        for parameter in module.parameters(recurse=False)
    )
