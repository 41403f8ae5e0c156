"""FSDP units: modules whose parameters FSDP gathers and frees together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import nn

from lumen.errors import ConfigError
from lumen.task.task_module import TaskModule

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_units(
    task: nn.Module,
    classes: Sequence[str] = (),
    chosen: Callable[[str, nn.Module], bool] | None = None,
    min_parameters: int | None = None,
) -> list[nn.Module]:
    """Return the units of a task, inner units first; parameters outside all units belong to the task.

    A module that shares a parameter with a module outside is no unit: the next larger module holds both.

    Args:
        task: The task whose modules are chosen from.
        classes: The names of classes; every module of these classes is a unit.
        chosen: A function of a module's name and the module, which returns True if the module is a unit.
        min_parameters: The number of parameters, without the parameters of inner units, that makes a module a unit; the
            smallest such modules are units.

    Returns:
        The modules that the first given argument chooses; else the modules of the task's `modules_to_shard`; else the
        repeated blocks: modules of one class in the same list, dictionary or `nn.Sequential`.

    Raises:
        ConfigError: No module has such a class, or a module cannot be a unit.
    """
    named = {module: name for name, module in task.named_modules()}
    if classes:
        units = _find_by_class(task, classes)
    elif chosen is not None:
        units = [module for module, name in named.items() if chosen(name, module)]
    elif min_parameters is not None:
        units = _find_by_size(task, min_parameters)
    elif isinstance(task, TaskModule) and type(task).modules_to_shard is not TaskModule.modules_to_shard:
        units = list(task.modules_to_shard())
        if strangers := [type(unit).__name__ for unit in units if unit not in named]:
            raise ConfigError(f"modules_to_shard gives {strangers[0]}, which is no module of {type(task).__name__}.")
    else:
        units = list(_find_blocks(task))
    attentions = (module for module in named if isinstance(module, nn.MultiheadAttention))
    # The forward of an attention reads parameters of its children.
    never = {task, *(part for attention in attentions for part in attention.children())}
    possible = {
        unit for unit in units if unit not in never and _can_be_unit(unit) and not _has_shared_parameter(task, unit)
    }
    return [module for module in reversed(named) if module in possible]


def list_outermost(task: nn.Module) -> list[nn.Module]:
    """Return the largest modules of a task that the task calls directly; together they hold all of its parameters.

    Raises:
        ConfigError: A parameter belongs to the task itself, or several of these modules share a parameter.
    """
    found: list[nn.Module] = []
    waiting = [*task.children()][::-1]
    while waiting:
        module = waiting.pop()
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            waiting += [*module.children()][::-1]
        elif next(module.parameters(), None) is not None:
            found.append(module)
    own = [name for name, _ in task.named_parameters(recurse=False)]
    shared = [name for name, module in task.named_modules() if module in found and _has_shared_parameter(task, module)]
    if own or shared:
        raise ConfigError(
            f"FSDP: {type(task).__name__} optimizes by hand, so each of its modules is gathered when it is called, but "
            f"{', '.join([*own, *shared][:8])} {'is a parameter of the task itself' if own else 'share parameters'}. "
            "Put what belongs together into one module that is called; or use strategy: ddp."
        )
    return found


def find_modules(task: nn.Module, classes: Iterable[str], option: str) -> list[nn.Module]:
    """Return all modules of the given classes.

    Args:
        task: The task whose modules are chosen from.
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
            f"wrap: a {type(unfit[0]).__name__} has no forward or no parameters, so there is no moment to gather them. "
            "Name the class of the modules in it."
        )
    return units


def _find_by_size(module: nn.Module, least: int) -> list[nn.Module]:
    units: list[nn.Module] = []

    def count(module: nn.Module) -> int:
        held = sum(parameter.numel() for parameter in module.parameters(recurse=False))
        held += sum(count(child) for child in module.children())
        if held >= least and _can_be_unit(module):
            units.append(module)
            return 0
        return held

    count(module)
    return units


def _find_blocks(module: nn.Module) -> Iterable[nn.Module]:
    """Yield the repeated modules that are not part of other repeated modules."""
    children = list(module.children())
    kinds = Counter(type(child) for child in children if next(child.parameters(), None) is not None)
    for child in children:
        if isinstance(module, _CONTAINERS) and kinds[type(child)] > 1 and _can_be_unit(child):
            yield child
        else:
            yield from _find_blocks(child)


def _can_be_unit(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward and next(module.parameters(), None) is not None


def _has_shared_parameter(task: nn.Module, unit: nn.Module) -> bool:
    """Return True if a module shares a parameter with a module outside."""
    inside = {id(parameter) for parameter in unit.parameters()}
    within = set(unit.modules())
    return any(
        id(parameter) in inside
        for module in task.modules()
        if module not in within
        for parameter in module.parameters(recurse=False)
    )
