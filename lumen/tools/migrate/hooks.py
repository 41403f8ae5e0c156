"""What becomes of the methods of a class: hooks that are called no more, are called otherwise, or have another name."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from typing import final

import lumen
from lumen.checkpoint.user_state import INSTEAD as INSTEAD_OF_KEYS
from lumen.errors.lightning_names import NOT_IN_CLI
from lumen.task.hooks import HOOKS, NOT_CALLED
from lumen.task.step_arguments import NOT_GIVEN
from lumen.tools.migrate.source import Source

_Function = ast.FunctionDef | ast.AsyncFunctionDef

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OWN_STATE = (
    "What it returns is not kept: write state_dict and load_state_dict, or put it into the checkpoint, which is a "
    "dictionary of this callback's own."
)
_BY_HAND = (
    "With automatic_optimization = False, max_steps, global_step and every_n_train_steps count the passes of "
    "training_step in which an optimizer has moved, however many have."
)
_OWN_OPTIMIZER_STEP = (
    "optimizer_step is called when the gradients are complete and clipped, with (epoch, batch_idx, optimizer, "
    "optimizer_closure)."
)


@final
class Methods:
    """Looks at the methods of classes, and edits those that only have to be called otherwise.

    Args:
        source: The text of the file.
        note: Is told a node and what has to be thought about.
    """

    def __init__(self, source: Source, note: Callable[[ast.AST, str], None]) -> None:
        self._source, self._note = source, note

    def look_at(self, owner: ast.ClassDef, kind: str) -> None:
        """Look at all methods of a class.

        Args:
            owner: The class, as it is defined.
            kind: What it is: "task", "data module", "callback" or "cli".
        """
        methods = {each.name: each for each in owner.body if isinstance(each, _Function)}
        not_called = NOT_IN_CLI if kind == "cli" else NOT_CALLED.get(kind, {})
        for name, method in methods.items():
            if name in not_called:
                self._note(method, f"{name} is not called. {not_called[name]}")
            elif kind in ("task", "callback"):
                self._signature(method, kind)
        for each in owner.body:
            if isinstance(each, ast.Assign) and kind == "task" and isinstance(each.targets[0], ast.Name):
                self.look_at_flag(each)

    def look_at_flag(self, node: ast.Assign) -> None:
        """Look at what an attribute of the task is set to."""
        for target in node.targets:
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if name == "automatic_optimization" and isinstance(node.value, ast.Constant) and node.value.value is False:
                self._note(node, _BY_HAND)
            if name == "truncated_bptt_steps":
                self._note(node, NOT_CALLED["task"]["truncated_bptt_steps"])

    def _signature(self, method: _Function, kind: str) -> None:
        arguments = method.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        if method.name in _STEPS and kind == "task":
            for name in names:
                if name in NOT_GIVEN:
                    self._note(method, f"{name} is not given. {NOT_GIVEN[name]}")
            return
        if method.name == "optimizer_step" and {"optimizer_idx", "on_tpu", "using_native_amp", "using_lbfgs"} & {
            *names
        }:
            self._note(method, _OWN_OPTIMIZER_STEP)
        if method.name not in HOOKS or arguments.vararg is not None:
            return
        if kind == "callback" and method.name == "on_save_checkpoint" and _returns_a_value(method):
            self._note(method, _OWN_STATE)
        given = len(
            inspect.signature(
                getattr(getattr(lumen, "Callback" if kind == "callback" else "TaskModule"), method.name)
            ).parameters
        )
        without_default = len(names) - len(arguments.defaults)
        if without_default > given:
            self._drop(method, names, given)

    def _drop(self, method: _Function, names: list[str], given: int) -> None:
        """Take out the last parameters, which no call fills, if nothing reads them."""
        extra = {*names[given:]}
        read = {node.id for each in method.body for node in ast.walk(each) if isinstance(node, ast.Name)}
        if extra & read or method.args.defaults:
            listed = ", ".join(names[given:])
            self._note(method, f"{method.name} is not given {listed}. It is called with ({', '.join(names[:given])}).")
            return
        last_kept, last = [*method.args.posonlyargs, *method.args.args][given - 1], method.args.args[-1]
        self._source.replace(self._source.span(last_kept)[1], self._source.span(last)[1], "")

    def look_at_key(self, node: ast.Subscript, function: _Function | None, steps_return: set[bool]) -> None:
        """Look at an entry that is read: of a checkpoint, or of what a training step returned."""
        if function is None or not isinstance(node.value, ast.Name) or not isinstance(node.slice, ast.Constant):
            return
        names = [each.arg for each in function.args.args]
        owner, key = node.value.id, str(node.slice.value)
        if function.name in ("on_save_checkpoint", "on_load_checkpoint") and owner in names and key in INSTEAD_OF_KEYS:
            self._note(node, f"checkpoint[{key!r}] is not there. {INSTEAD_OF_KEYS[key]}")
        if function.name == "on_train_batch_end" and owner in names and key == "loss":
            if True not in steps_return:
                self._source.replace_node(node, owner)
            elif False in steps_return:
                self._note(node, "outputs is what training_step returned: a loss alone is no dictionary.")


def _returns_a_value(method: _Function) -> bool:
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(method))
