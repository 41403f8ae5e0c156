"""Edits of the hooks of Lightning 1 that receive the outputs of all steps of an epoch."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

from lumen.tools.migrate.project import ProjectClasses
from lumen.tools.migrate.source import NOTES, AddNote, EditableSource, Function, get_last_name

#: For each hook: the hook that Lumen calls at the same moment, and the step of which Lightning collects the outputs.
_COUNTERPARTS: Mapping[str, tuple[str, str]] = {
    "training_epoch_end": ("on_train_epoch_end", "training_step"),
    "validation_epoch_end": ("on_validation_epoch_end", "validation_step"),
    "test_epoch_end": ("on_test_epoch_end", "test_step"),
}
#: Options of `self.log` that have no effect in the step, or that the new call sets.
_DROPPED_OPTIONS = ("batch_size", "on_epoch", "on_step", "rank_zero_only", "sync_dist")
#: Calls that do not change the mean of scalars.
_CONVERSIONS = ("cpu", "detach", "double", "float", "item")


@final
class _LoggedMean(NamedTuple):
    """Mean of an entry of all outputs.

    Attributes:
        name: Source of the name under which the hook logs the mean.
        key: Key of the entry in each output, or None for the outputs themselves.
        options: Source of further options of `self.log`, beginning with a comma, or "".
    """

    name: str
    key: str | None
    options: str = ""


@final
class EpochEndEditor:
    """Editor of hooks with the outputs of an epoch.

    Args:
        source: The text of the file.
        note: Function that records a note on a node.
        classes: The classes of the project.
        used: Names that the project uses.
    """

    def __init__(self, source: EditableSource, note: AddNote, classes: ProjectClasses, used: frozenset[str]) -> None:
        self._source, self._note, self._classes, self._used = source, note, classes, used

    def edit(self, method: Function, owner: ast.ClassDef) -> bool:
        """Rename a hook that does not read the outputs; move logged means into the step.

        Args:
            method: The hook, whose second parameter has the outputs.
            owner: The definition of the class.

        Returns:
            False if the hook is not edited, because its outputs have a different use, code of the project calls it, or
            a derived class has a step of its own, which would not log.
        """
        if method.name not in _COUNTERPARTS:
            return False
        hook, step_name = _COUNTERPARTS[method.name]
        methods = {each.name: each for each in owner.body if isinstance(each, Function)}
        arguments = method.args
        is_plain = not (arguments.vararg or arguments.kwarg or arguments.kwonlyargs or arguments.posonlyargs)
        if hook in methods or method.name in self._used or not is_plain or len(arguments.args) != 2:
            return False
        outputs = arguments.args[1].arg
        if not any(isinstance(node, ast.Name) and node.id == outputs for node in _walk_body(method)):
            self._rename(method, hook)
            return True
        step = methods.get(step_name)
        logged = _MeanReader(self._source, outputs).read(method)
        has_own_step = self._classes.is_overridden(owner, step_name)
        return step is not None and bool(logged) and not has_own_step and self._log_in_step(method, step, logged)

    def _rename(self, method: Function, hook: str) -> None:
        start = self._source.text.index(method.name, self._source.get_span(method)[0])
        self._source.replace(start, start + len(method.name), hook)
        first, last = method.args.args
        end = self._source.get_span(method.args.defaults[-1] if method.args.defaults else last)[1]
        self._source.replace(self._source.get_span(first)[1], end, "")
        if any(isinstance(node, ast.Return) and node.value is not None for node in _walk_body(method)):
            self._note(method, NOTES["return"].format(hook))

    def _log_in_step(self, method: Function, step: Function, logged: list[_LoggedMean]) -> bool:
        """Log the means in the step, and remove the hook. Return False if the step does not allow that."""
        calls_of_log = [node for node in _walk_body(step) if isinstance(node, ast.Call) and _is_own_log(node)]
        own = {self._source.get_text(node.args[0]) for node in calls_of_log if node.args}
        returns = [node for node in _walk_body(step) if isinstance(node, ast.Return) and node.value is not None]
        if not returns or not own.isdisjoint(each.name for each in logged):
            return False
        calls: list[tuple[int, str]] = []
        for statement in returns:
            at = self._source.get_span(statement)[0]
            if self._source.text[self._source.find_line_start(at) : at].strip():
                return False  # The statement has no line of its own.
            for each in logged:
                value = _find_output(step, statement, each.key)
                if value is None:
                    return False
                on = ", on_step=False, on_epoch=True" if step.name == "training_step" else ""
                calls.append((at, f"self.log({each.name}, {self._source.get_text(value)}{on}{each.options})"))
        for at in dict.fromkeys(at for at, _ in calls):
            separator = self._source.newline + self._source.get_indent(at)
            self._source.replace(at, at, "".join(text + separator for place, text in calls if place == at))
        self._remove(method)
        names = ", ".join(each.name for each in logged)
        self._note(step, NOTES["mean"].format(step=step.name, names=names, hook=method.name))
        return True

    def _remove(self, method: Function) -> None:
        """Remove a method, with its decorators and the empty lines before it."""
        first = self._source.get_span(method.decorator_list[0] if method.decorator_list else method)[0]
        start, end = self._source.find_line_start(first), self._source.get_span(method)[1]
        while start and not self._source.lines[self._source.get_line_number(start) - 2].strip():
            start = self._source.find_line_start(start - 1)
        self._source.replace(start, self._source.find_line_end(end - 1), "")


@final
class _MeanReader:
    """Reader of the means that a hook logs.

    Args:
        source: The text of the file.
        outputs: Name of the parameter with all outputs.
    """

    def __init__(self, source: EditableSource, outputs: str) -> None:
        self._source, self._outputs = source, outputs
        self._means: dict[str, str | None] = {}
        self._records: dict[str, ast.Dict] = {}
        self._logged: dict[str, _LoggedMean] = {}

    def read(self, method: Function) -> list[_LoggedMean]:
        """Return the means, or an empty list if the hook does anything else."""
        return [*self._logged.values()] if all(map(self._read_statement, method.body)) else []

    def _read_statement(self, node: ast.stmt) -> bool:
        """Read a statement, and return False if the statement does not compute or log means."""
        if isinstance(node, ast.Pass) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return True
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if isinstance(node.value, ast.Dict):
                self._records[name] = node.value
                return all(map(self._is_mean, node.value.values))
            if not self._is_mean(node.value):
                return False
            self._means[name] = self._get_key(node.value)
            return True
        if isinstance(node, ast.Return):
            return node.value is None or self._read_returned(node.value)
        return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and self._read_call(node.value)

    def _read_call(self, node: ast.Call) -> bool:
        """Read `self.log`, `self.log_dict` or `self.logger.experiment.add_scalar`."""
        function = self._source.get_text(node.func)
        if function == "self.log_dict" and len(node.args) == 1:
            return self._read_record(node.args[0], self._get_options(node))
        is_log = function == "self.log" and len(node.args) == 2
        if not is_log and (function != "self.logger.experiment.add_scalar" or len(node.args) < 2):
            return False
        return self._add(node.args[0], node.args[1], self._get_options(node) if is_log else "")

    def _get_options(self, node: ast.Call) -> str:
        kept = (each for each in node.keywords if each.arg not in _DROPPED_OPTIONS)
        return "".join(f", {self._source.get_text(each)}" for each in kept)

    def _read_returned(self, node: ast.expr) -> bool:
        """Read the value that the hook returns: before Lightning 1.0, the entries of `log` were logged."""
        record = self._records.get(node.id) if isinstance(node, ast.Name) else node
        if not isinstance(record, ast.Dict):
            return False
        for key, value in zip(record.keys, record.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in ("log", "progress_bar"):
                if not self._read_record(value):
                    return False
            elif key is None or not self._add(key, value):
                return False
        return True

    def _read_record(self, node: ast.expr, options: str = "") -> bool:
        record = self._records.get(node.id) if isinstance(node, ast.Name) else node
        if not isinstance(record, ast.Dict):
            return False
        pairs = zip(record.keys, record.values, strict=True)
        return all(key is not None and self._add(key, value, options) for key, value in pairs)

    def _add(self, name: ast.expr, value: ast.expr, options: str = "") -> bool:
        """Record that the hook logs a value. Return False if the value is not a mean."""
        variables = {node.id for node in ast.walk(name) if isinstance(node, ast.Name)}
        if not self._is_mean(value) or not variables <= {"self"}:
            return False
        text = self._source.get_text(name)
        self._logged.setdefault(text, _LoggedMean(text, self._get_key(value), options))
        return True

    def _is_mean(self, node: ast.expr) -> bool:
        node = _strip_conversions(node)
        if isinstance(node, ast.Name):
            return node.id in self._means
        return self._find_item(node) is not None

    def _get_key(self, node: ast.expr) -> str | None:
        """Return the key of the entry of which a mean is computed, or None for the outputs themselves."""
        node = _strip_conversions(node)
        if isinstance(node, ast.Name):
            return self._means[node.id]
        item = self._find_item(node)
        return (
            str(item.slice.value) if isinstance(item, ast.Subscript) and isinstance(item.slice, ast.Constant) else None
        )

    def _find_item(self, node: ast.expr) -> ast.expr | None:
        """Return the entry of one output in an expression that computes the mean over all outputs, or None."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            count = self._source.get_text(node.right).replace(" ", "")
            is_sum = isinstance(node.left, ast.Call) and getattr(node.left.func, "id", "") == "sum"
            return self._find_entry(node.left) if is_sum and count == f"len({self._outputs})" else None
        if not isinstance(node, ast.Call):
            return None
        name = get_last_name(node.func)
        of_object = isinstance(node.func, ast.Attribute) and not node.args and isinstance(node.func.value, ast.Call)
        inner = node.func.value if of_object and isinstance(node.func, ast.Attribute) else node
        return self._find_entry(inner) if name in ("mean", "nanmean") else None

    def _find_entry(self, node: ast.expr) -> ast.expr | None:
        """Return `x["key"]` or `x` of `f([x["key"] for x in outputs])`, where f does not change the mean, or None."""
        while isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            name = get_last_name(node.func)
            if name not in ("array", "mean", "stack", "sum", "tensor", "Tensor", "FloatTensor"):
                return None
            node = node.args[0]
        if getattr(node, "id", "") == self._outputs:
            return node
        if not isinstance(node, ast.ListComp | ast.GeneratorExp) or len(node.generators) != 1:
            return None
        each = node.generators[0]
        if each.ifs or getattr(each.iter, "id", "") != self._outputs or not isinstance(each.target, ast.Name):
            return None
        item = _strip_conversions(node.elt)
        owner = item.value if isinstance(item, ast.Subscript) and isinstance(item.slice, ast.Constant) else item
        return item if getattr(owner, "id", "") == each.target.id else None


def _strip_conversions(node: ast.expr) -> ast.expr:
    """Return a value without calls such as `.item()` and `float(...)`."""
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CONVERSIONS and not node.args:
            node = node.func.value
        elif getattr(node.func, "id", "") == "float" and len(node.args) == 1:
            node = node.args[0]
        else:
            break
    return node


def _find_output(step: Function, statement: ast.Return, key: str | None) -> ast.expr | None:
    """Return the expression of an entry of the output that a step returns, or None if it is not a plain name."""
    value: ast.expr | None = statement.value
    record = _read_dictionary(value)
    if isinstance(value, ast.Name) and key is not None:
        assigned = [node for node in _walk_body(step) if isinstance(node, ast.Assign)]
        found = [each.value for each in assigned if value.id in {getattr(target, "id", "") for target in each.targets}]
        record = _read_dictionary(found[0]) if len(found) == 1 else None
    if record is not None:
        value = record.get(key)
    elif key is not None and (step.name, key) != ("training_step", "loss"):
        return None
    plain = _strip_conversions(value) if value is not None else None
    return plain if isinstance(plain, ast.Name) else None


def _read_dictionary(node: ast.expr | None) -> dict[object, ast.expr] | None:
    """Return the entries of a dictionary literal, or of a call of `dict`; None for other expressions."""
    if isinstance(node, ast.Dict):
        return dict(zip((getattr(key, "value", None) for key in node.keys), node.values, strict=True))
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") not in ("dict", "OrderedDict"):
        return None
    inner = _read_dictionary(node.args[0]) if node.args else {}
    return None if inner is None else {**inner, **{each.arg: each.value for each in node.keywords}}


def _is_own_log(node: ast.Call) -> bool:
    owner = getattr(node.func, "value", None)
    return getattr(owner, "id", "") == "self" and getattr(node.func, "attr", "") == "log"


def _walk_body(function: Function) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body, without those of functions and classes inside."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting.extend(ast.iter_child_nodes(node))
