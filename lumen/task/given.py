"""What a trainer was given: whether it is a task, or something else in its place."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any

from lumen.errors import ConfigError
from lumen.errors.arguments import in_words
from lumen.task.data_module import DataModule
from lumen.task.task_module import TaskModule


def check_task(task: Any, data: Any = None) -> None:
    """Check that a task was given, and that it is one.

    Args:
        task: What stands in its place.
        data: What stands in the place of the data, for the advice.

    Raises:
        ConfigError: It is no `TaskModule`, or its `__init__` does not call that of `TaskModule`.
    """
    if not isinstance(task, TaskModule):
        advice = "Subclass lumen.TaskModule."
        if isinstance(data, TaskModule):
            advice = f"The task comes first, and then the data: ({type(data).__name__}, {in_words(task)})."
        elif inspect.isclass(task) and issubclass(task, TaskModule):
            advice = f"Make one: {task.__name__}(...)."
        raise ConfigError(f"expected a TaskModule, found {in_words(task)}. {advice}")
    if "training" not in vars(task):
        raise ConfigError(
            f"{type(task).__name__}.__init__ does not call super().__init__(), which makes it a torch.nn.Module. Call "
            "it first."
        )
    for name in ("configure_optimizers", "predict_step"):
        if getattr(task, name) is None:
            raise ConfigError(f"{type(task).__name__}.{name} is None. Define it, or delete the line that sets it.")


def check_loaders(where: str, loaders: Any) -> None:
    """Check that nothing but loaders stands where loaders belong.

    Args:
        where: The name of the argument.
        loaders: A loader, or several in lists and dictionaries.

    Raises:
        ConfigError: There is a data module, a task or a class.
    """
    if isinstance(loaders, (list, tuple, dict)):
        for each in loaders.values() if isinstance(loaders, dict) else loaders:
            check_loaders(where, each)
    elif isinstance(loaders, DataModule):
        raise ConfigError(f"{where}: found the data module {in_words(loaders)}. Give it alone, as datamodule=...")
    elif isinstance(loaders, TaskModule):
        raise ConfigError(f"{where}: found the task {in_words(loaders)}. A loader belongs there, or a data module.")
    elif inspect.isclass(loaders):
        raise ConfigError(f"{where}: found {in_words(loaders)}. Make one: {loaders.__name__}(...).")


def mentioned_in(task: TaskModule, stage: str, text: str) -> list[str]:
    """The methods of a task for a stage, "test" or "predict", whose code has a text, such as a name to log."""
    names = [f"{stage}_step", *(name for name in dir(TaskModule) if name.startswith(f"on_{stage}_"))]
    codes = {name: getattr(getattr(type(task), name, None), "__code__", None) for name in names}
    return [name for name, code in codes.items() if code is not None and text in texts_in(code)]


def texts_in(code: CodeType) -> Iterator[str]:
    """The strings that are written in code, and in the functions within it."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from texts_in(constant)
        elif isinstance(constant, (tuple, frozenset)):  # the keys of a dictionary, what `in` looks through
            yield from (each for each in constant if isinstance(each, str))


def texts_of(owners: Iterable[Any]) -> set[str]:
    """The strings in the code of objects' classes, but for Lumen's and torch's."""
    kinds = {kind for owner in owners for kind in type(owner).__mro__}
    own = [kind for kind in kinds if kind.__module__.partition(".")[0] not in ("lumen", "torch", "builtins", "abc")]
    methods = (getattr(value, "__func__", value) for kind in own for value in vars(kind).values())
    codes = (getattr(method, "__code__", None) for method in methods)
    return {text for code in codes if code is not None for text in texts_in(code)}
