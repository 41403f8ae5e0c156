"""User methods: which of them a run calls, with which arguments, and checks of them before a run."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from types import CodeType
from typing import Any, final

from lumen.errors import ConfigError
from lumen.errors.arguments import describe_type
from lumen.errors.lightning_names import LIGHTNING_PACKAGES
from lumen.task.data_module import LOADERS, DataHooks, DataModule
from lumen.task.model_hooks import ModelHooks
from lumen.task.task_module import TaskModule

#: All hooks, in the order of `ModelHooks` and of `Callback`'s docstring.
HOOKS = tuple(name for name in vars(ModelHooks) if not name.startswith("_") and "model_" not in name)
#: Hooks around an evaluation that only the task has, and that set the modes of its modules.
MODE_HOOKS = tuple(name for name in vars(ModelHooks) if "model_" in name)
#: Parts of a step of automatic optimization that a task may override.
OPTIMIZATION_METHODS = (
    "backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "clip_gradients",
    "lr_scheduler_step",
)  # fmt: skip

_EPOCH_END = "Append the results of steps to a list, and read the list in {}. For means call self.log."
_BEFORE_TRAINING = "Write on_fit_start or on_train_start."
_EVERY_EPOCH = "Write {0} for each stage: on_train_{1}, on_validation_{1}, on_test_{1}."
_SHARED_HOOKS = {
    "on_epoch_start": _EVERY_EPOCH.format("on_*_epoch_start", "epoch_start"),
    "on_epoch_end": _EVERY_EPOCH.format("on_*_epoch_end", "epoch_end"),
    "on_batch_start": "Write on_train_batch_start(batch, batch_idx).",
    "on_batch_end": "Write on_train_batch_end(outputs, batch, batch_idx).",
    "on_pretrain_routine_start": _BEFORE_TRAINING,
    "on_pretrain_routine_end": _BEFORE_TRAINING,
}
_DATALOADER_HOOKS = {f"on_{loader}": f"Move the code into {loader}." for loader in LOADERS}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
#: Methods that were hooks in some version of Lightning 1 or 2, by owner, with their replacements.
NOT_CALLED: Mapping[str, Mapping[str, str]] = {
    "task": _SHARED_HOOKS | _DATALOADER_HOOKS | {
        "configure_sharded_model": "Write configure_model.",
        **{f"{step}_end": f"Every process has its own batch: compute the loss in {step}." for step in _STEPS},
        "training_epoch_end": _EPOCH_END.format("on_train_epoch_end"),
        "validation_epoch_end": _EPOCH_END.format("on_validation_epoch_end"),
        "test_epoch_end": _EPOCH_END.format("on_test_epoch_end"),
        "predict_epoch_end": _EPOCH_END.format("on_predict_epoch_end"),
        "tbptt_split_batch": "Split the sequence in the data, and keep the hidden state on the task, detached.",
        "truncated_bptt_steps": "Split the sequence in the data, and keep the hidden state on the task, detached.",
        "on_post_move_to_device": "Tie parameters in __init__ or configure_model: they stay tied.",
        "get_progress_bar_dict": "Log with prog_bar=True; Trainer(callbacks=[lumen.ProgressBar(...)]) has the rest.",
        "on_hpc_save": "Write on_save_checkpoint.",
        "on_hpc_load": "Write on_load_checkpoint.",
        "add_to_queue": "Lumen spawns no processes: fit trains the task object that it receives.",
        "get_from_queue": "Lumen spawns no processes: fit trains the task object that it receives.",
    },
    "data module": _DATALOADER_HOOKS | {
        "on_exception": "Write on_exception of the task or of a callback; teardown is always called.",
        "on_save_checkpoint": "Write state_dict.",
        "on_load_checkpoint": "Write load_state_dict.",
        "on_hpc_save": "Write state_dict.",
        "on_hpc_load": "Write load_state_dict.",
    },
    "callback": _SHARED_HOOKS | {
        "on_init_start": "Write setup.",
        "on_init_end": "Write setup.",
        "on_before_accelerator_backend_setup": "Write setup.",
        "on_configure_sharded_model": "Write on_fit_start; the task's configure_model builds its layers.",
        "on_keyboard_interrupt": "Write on_exception: the exception is a KeyboardInterrupt.",
    },
}  # fmt: skip
_DATA_HOOKS = tuple(name for name in vars(DataHooks) if not name.startswith("_"))
_LIBRARIES = ("torch", "torchmetrics", "lumen")
_STATES = ("state_dict", "load_state_dict")
#: Methods of each owner that Lumen calls with fixed arguments.
_CALLED: Mapping[str, tuple[str, ...]] = {
    "task": (*HOOKS, *MODE_HOOKS, *_DATA_HOOKS, "configure_model", "configure_optimizers", "configure_callbacks"),
    "data module": (*_DATA_HOOKS, "setup", "teardown", *_STATES),
    "callback": (*HOOKS, *_STATES),
}
#: More names that a misspelt method may have meant.
_ALSO_MEANT: Mapping[str, tuple[str, ...]] = {"task": _STEPS, "data module": (), "callback": ("validation_context",)}
_NAMES = {"pl_module": "task"}  # Lightning's names of arguments, with Lumen's
_AFTER_THE_BACKWARD = ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end", "on_step_end")
_MIN_SIMILARITY = 0.9  # ratio of difflib: one wrong letter in ten; `training_stage` differs more from `training_step`


@final
class Hooks:
    """Functions to call for each hook, found once: a hook without overrides costs an empty loop.

    Args:
        task: The task, whose hook is called last, without the arguments `trainer` and `task`.
        callbacks: The callbacks, whose hooks are called first, in order.
        trainer: The trainer, the first argument of every callback's hook.

    Attributes:
        callbacks: The callbacks, as given.
        validation_context: Functions that return the context of a validation in `fit`, one per callback that overrides
            it.
        may_stop_at_steps: True if a hook between the last backward of a step and its end may stop the run.
    """

    def __init__(self, task: TaskModule, callbacks: Sequence[Any], trainer: Any) -> None:
        self.callbacks = callbacks
        self._first_arguments = trainer, task
        stopping = [task, *(callback for callback in callbacks if callback.may_stop_at_steps)]
        self.may_stop_at_steps = any(is_overridden(owner, name) for owner in stopping for name in _AFTER_THE_BACKWARD)
        self.validation_context = [
            partial(callback.validation_context, trainer, task)
            for callback in callbacks
            if is_overridden(callback, "validation_context")
        ]
        for name in HOOKS:
            calls: list[Callable[..., Any]] = [
                partial(fit_to_signature(callback, name, 2), trainer, task)
                for callback in callbacks
                if is_overridden(callback, name)
            ]
            if is_overridden(task, name):
                calls.append(fit_to_signature(task, name))
            setattr(self, name, tuple(calls))

    def list_callback_hooks(self, name: str) -> list[tuple[Any, Callable[..., Any]]]:
        """Return the callbacks that override a hook, each with the hook to call."""
        found = (each for each in self.callbacks if is_overridden(each, name))
        return [(each, partial(getattr(each, name), *self._first_arguments)) for each in found]

    def add_last_call(self, name: str, call: Callable[..., Any]) -> None:
        """Add a function that is called last for a hook."""
        setattr(self, name, (*getattr(self, name), call))

    def __getattr__(self, name: str) -> tuple[Callable[..., Any], ...]:
        raise AttributeError(name)  # for type checkers: each hook is an attribute


def is_overridden(thing: Any, method: str) -> bool:
    """Return True if a user's class or object overrides a method that does nothing in Lumen's base class."""
    attributes = vars(thing)
    found = attributes[method] if method in attributes else getattr(type(thing), method, None)  # None: turned off
    return callable(found) and not str(found.__module__).startswith(_BASES)


_BASES = ("lumen.task.task_module", "lumen.task.model_hooks", "lumen.task.optimizer_hooks", "lumen.task.data_module",
          "lumen.callbacks.base")  # fmt: skip


def check_task(task: Any, data: Any = None, methods: Iterable[str] = ()) -> None:
    """Check that the object is a task.

    Args:
        task: The object that was given as the task.
        data: The object that was given as the data, for the advice.
        methods: The methods that the run calls, which must not be None.

    Raises:
        ConfigError: The object is not a `TaskModule`, its `__init__` does not call that of `TaskModule`, or a method
            is None.
    """
    if not isinstance(task, TaskModule):
        advice = "Subclass lumen.TaskModule."
        if isinstance(data, TaskModule):
            advice = f"Pass the task first, then the data: ({type(data).__name__}, {describe_type(task)})."
        elif inspect.isclass(task) and issubclass(task, TaskModule):
            advice = f"Create an object: {task.__name__}(...)."
        elif any(kind.__module__.partition(".")[0] in LIGHTNING_PACKAGES for kind in type(task).__mro__):
            advice = (
                "It is Lightning's: `lumen migrate` edits a class of your own. A model of a library becomes an "
                "attribute of a TaskModule, whose training_step calls model and loss (docs/guides/libraries.md)."
            )
        raise ConfigError(f"expected a TaskModule, found {describe_type(task)}. {advice}")
    if "training" not in vars(task):
        raise ConfigError(
            f"{type(task).__name__}.__init__ does not call super().__init__(), which initializes torch.nn.Module. "
            "Call super().__init__() first."
        )
    for name in methods:
        if getattr(task, name) is None:
            raise ConfigError(
                f"{type(task).__name__}.{name} is None. Define {name}, or delete the line that sets {name} to None."
            )


def check_loaders(where: str, loaders: Any) -> None:
    """Check that an argument for loaders has only loaders.

    Args:
        where: The name of the argument.
        loaders: A loader, or several in lists and dictionaries.

    Raises:
        ConfigError: The argument contains a data module, a task or a class.
    """
    if isinstance(loaders, (list, tuple, dict)):
        for each in loaders.values() if isinstance(loaders, dict) else loaders:
            check_loaders(where, each)
    elif isinstance(loaders, DataModule):
        raise ConfigError(
            f"{where}: found the data module {describe_type(loaders)}. Pass the data module alone, as datamodule=..."
        )
    elif isinstance(loaders, TaskModule):
        raise ConfigError(f"{where}: found the task {describe_type(loaders)}. Pass a loader or a data module.")
    elif inspect.isclass(loaders):
        raise ConfigError(f"{where}: found {describe_type(loaders)}. Create an object: {loaders.__name__}(...).")


def check_training(task: Any, data: Any, *, has_optimizer: bool) -> None:
    """Check that the object is a task, and that it defines the methods that training calls.

    Args:
        task: The object that was given as the task.
        data: The object that was given as the data.
        has_optimizer: True if the task needs no `configure_optimizers`.

    Raises:
        ConfigError: The object is not a task, or a method is missing.
    """
    check_task(task, data, ["training_step", *["configure_optimizers"] * (not has_optimizer)])
    if not is_overridden(task, "training_step"):
        TaskModule.training_step(task)  # raises the error
    if not has_optimizer and not is_overridden(task, "configure_optimizers"):
        task.configure_optimizers()


def check_hooks(task: TaskModule, datamodule: DataModule | None, callbacks: Iterable[Any]) -> None:
    """Raise an error for hooks of Lightning that Lumen does not call, and for hooks with a wrong signature.

    Raises:
        ConfigError: A class defines such methods; the message names the replacements.
    """
    for kind, owner in _iterate_owners(task, datamodule, callbacks):
        not_called = {**NOT_CALLED[kind], **(owner.ATTRIBUTES if kind == "callback" else {})}
        if uncalled := [name for name in not_called if _is_defined(owner, name)]:
            lines = "\n".join(f"  {name}: {not_called[name]}" for name in uncalled)
            raise ConfigError(
                f"{type(owner).__name__} defines methods that Lumen does not call for a {kind}. Replacements:\n{lines}"
            )
        for name in (*_CALLED[kind], *(_STEPS if kind == "task" else ())):
            _refuse_property(owner, name)
        for name in _CALLED[kind]:
            if is_overridden(owner, name):
                _check_signature(owner, name, 2 if kind == "callback" and name in HOOKS else 0)
    for name in _STEPS:
        if is_overridden(task, name):
            _refuse_generators(getattr(task, name))
    for name in OPTIMIZATION_METHODS:
        _refuse_property(task, name)
        if is_overridden(task, name):
            _check_signature(task, name, 0, requires_all=True)


def describe_misspelt_hooks(task: TaskModule, datamodule: DataModule | None, callbacks: Iterable[Any]) -> list[str]:
    """Return a warning for each method that is never called and has nearly the name of a missing hook."""
    found = []
    for kind, owner in _iterate_owners(task, datamodule, callbacks):
        undefined = [name for name in (*_CALLED[kind], *_ALSO_MEANT[kind]) if not is_overridden(owner, name)]
        for name in _list_added_methods(owner, kind):
            matches = difflib.get_close_matches(name, undefined, n=1, cutoff=_MIN_SIMILARITY)
            if matches and name[-1].isalpha():  # a name such as `train_dataloader_` is intended
                found.append(f"Lumen does not call {type(owner).__name__}.{name}. Did you mean {matches[0]}?")
    return found


def describe_overridden_state_dicts(task: TaskModule) -> list[str]:
    """Return a warning for each class in a task that overrides the `state_dict` of its library."""
    kinds = dict.fromkeys(type(module) for module in task.modules())
    return [
        (
            f"Lumen does not call {kind.__name__}.state_dict: checkpoints contain all parameters and buffers. To omit "
            "a buffer, use register_buffer(persistent=False). To omit a frozen module, keep the module in a plain list."
        )
        for kind in kinds
        if kind.state_dict.__module__.partition(".")[0] not in _LIBRARIES
    ]


def _iterate_owners(
    task: TaskModule, datamodule: DataModule | None, callbacks: Iterable[Any]
) -> Iterator[tuple[str, Any]]:
    yield "task", task
    if datamodule is not None:
        yield "data module", datamodule
    yield from (("callback", callback) for callback in callbacks)


def _is_defined(owner: Any, name: str) -> bool:
    """Return True if the user's class, a user's base class or mixin, or the object itself has a method of this name."""
    found = vars(owner).get(name)
    for each in type(owner).__mro__:
        found = vars(each).get(name) if found is None and not _is_foreign(each) else found
    return callable(found) or (name == "truncated_bptt_steps" and bool(found))


def _is_lumen_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "lumen"


def _is_foreign(kind: type) -> bool:
    """Return True if the class belongs to Lumen, torch or Python."""
    return _is_lumen_class(kind) or kind.__module__.partition(".")[0] in ("torch", "builtins", "abc", "typing")


def _list_added_methods(owner: Any, kind: str) -> list[str]:
    """Return names of methods that a user's classes add, without methods of mixins and overrides."""
    added: dict[str, Any] = {}
    excluded = set(NOT_CALLED[kind])
    for each in type(owner).__mro__:
        if not _is_foreign(each) and any(map(_is_lumen_class, each.__mro__)):
            added.update(vars(each))
        else:
            excluded.update(vars(each))
    methods = (name for name, value in added.items() if inspect.isfunction(value))
    return [name for name in methods if name not in excluded and not name.startswith("_")]


def _refuse_property(owner: Any, name: str) -> None:
    """Raise an error for a property with a hook's name: reading it would evaluate it, and Lumen would never call it."""
    found = inspect.getattr_static(type(owner), name, None)
    if isinstance(found, (property, cached_property)):
        raise ConfigError(f"{type(owner).__name__}.{name} is a property, but a hook is a method. Leave @property out.")


def _check_signature(owner: Any, name: str, leading: int, *, requires_all: bool = False) -> None:
    """Raise an error before the run for a hook that does not accept its arguments."""
    hook, arguments = getattr(owner, name), _list_arguments(name, leading)
    accepted = _count_accepted(hook, arguments)
    if accepted is None or (requires_all and accepted < len(arguments)):
        optional = "" if requires_all or not arguments else "; the last arguments may be omitted"
        raise ConfigError(f"{as_defined(hook)}: Lumen calls this method with ({', '.join(arguments)}){optional}.")
    if name in HOOKS or name in MODE_HOOKS or name == "configure_callbacks":
        _refuse_generators(hook)


def _refuse_generators(method: Callable[..., Any]) -> None:
    """Raise an error for a coroutine or generator function: calling it would not run its code."""
    if inspect.iscoroutinefunction(method) or inspect.isgeneratorfunction(method):
        word = "`async`" if inspect.iscoroutinefunction(method) else "`yield`"
        raise ConfigError(
            f"{as_defined(method)}: calling this method would not run its code. Write the method without {word}."
        )


def as_defined(method: Callable[..., Any]) -> str:
    """Return the name and the signature of a method, for errors."""
    return f"{getattr(method, '__qualname__', method)}{inspect.signature(method)}"


def _list_arguments(name: str, before: int) -> list[str]:
    """Return the names of the arguments that a hook is called with."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    declared = getattr(DataModule if name in _STATES else TaskModule, name)
    parameters = list(inspect.signature(declared).parameters.values())[1:]
    return [*("trainer", "task")[:before], *(each.name for each in parameters if each.kind in positional)]


def _count_accepted(hook: Callable[..., Any], arguments: list[str]) -> int | None:
    """Return how many of its arguments, from the first on, a hook accepts; None if it cannot be called.

    A hook with fewer arguments must not have them at other positions. `(self, outputs, batch, batch_idx)` in a
    callback, whose first argument is the trainer, is a mistake.
    """
    try:
        signature = inspect.signature(hook)
    except ValueError:  # a function of C without a signature
        return len(arguments)
    for count in range(len(arguments), -1, -1):
        try:
            signature.bind(*arguments[:count])
        except TypeError:
            continue
        names = [_NAMES.get(name, name) for name in signature.parameters][: len(arguments)]
        known = [arguments.index(name) == place for place, name in enumerate(names) if name in arguments]
        return count if count == len(arguments) or all(known) else None
    return None


def fit_to_signature(owner: Any, name: str, before: int = 0) -> Callable[..., Any]:
    """Return a bound hook to call with all its arguments; arguments that its signature omits are dropped.

    Args:
        owner: A task, data module or callback.
        name: The name of the hook.
        before: Number of leading arguments from (trainer, task).
    """
    hook, arguments = getattr(owner, name), _list_arguments(name, before)
    accepted = _count_accepted(hook, arguments)
    return hook if accepted is None or accepted == len(arguments) else _TruncatedCall(hook, accepted)


@final
class _TruncatedCall:
    """Callable that passes only the first arguments to a hook.

    Args:
        hook: A method that is bound to its owner.
        taken: The number of arguments that it accepts.
    """

    def __init__(self, hook: Callable[..., Any], accepted: int) -> None:
        self._hook, self._taken, self.__self__ = hook, accepted, getattr(hook, "__self__", hook)

    def __call__(self, *arguments: Any) -> Any:
        """Call the hook and return its result."""
        return self._hook(*arguments[: self._taken])


def find_methods_mentioning(task: TaskModule, stage: str, text: str) -> list[str]:
    """Return the task's methods for "test" or "predict" whose code contains a string, such as a logged name."""
    names = [f"{stage}_step", *(name for name in dir(TaskModule) if name.startswith(f"on_{stage}_"))]
    codes = {name: getattr(getattr(type(task), name, None), "__code__", None) for name in names}
    return [name for name, code in codes.items() if code is not None and text in iterate_texts(code)]


def iterate_texts(code: CodeType) -> Iterator[str]:
    """Yield the string constants in code, including nested functions."""
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from iterate_texts(constant)
        elif isinstance(constant, (tuple, frozenset)):  # keys of a dictionary, or operands of `in`
            yield from (each for each in constant if isinstance(each, str))


def collect_texts(owners: Iterable[Any]) -> set[str]:
    """Return the strings in the code of the objects' classes, except for classes of Lumen and torch."""
    kinds = {kind for owner in owners for kind in type(owner).__mro__}
    user_kinds = [
        kind for kind in kinds if kind.__module__.partition(".")[0] not in ("lumen", "torch", "builtins", "abc")
    ]
    methods = (getattr(value, "__func__", value) for kind in user_kinds for value in vars(kind).values())
    codes = (getattr(method, "__code__", None) for method in methods)
    return {text for code in codes if code is not None for text in iterate_texts(code)}
