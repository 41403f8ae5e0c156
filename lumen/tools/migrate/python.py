"""Edits of one Python file, and notes on the places to edit by hand."""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeGuard, final

import lumen
from lumen.checkpoint.user_state import INSTEAD as INSTEAD_OF_KEYS
from lumen.cli.classes import find_counterpart
from lumen.errors.lightning_names import ATTRIBUTES, LIGHTNING_PACKAGES, NOT_IN_CLI
from lumen.task.hooks import HOOKS, NOT_CALLED, OPTIMIZATION_METHODS
from lumen.task.steps import REMOVED_ARGUMENTS
from lumen.tools.migrate.arguments import METHODS, CallEditor, format_left_out
from lumen.tools.migrate.epoch_ends import EpochEndEditor
from lumen.tools.migrate.names import (
    LIGHTNING_NAME,
    ImportEditor,
    find_new_name,
    find_replacement,
    get_short_name,
    is_module,
)
from lumen.tools.migrate.project import ParsedFile, ProjectClasses
from lumen.tools.migrate.source import NOTES, TABLES, AddNote, EditableSource, Function, MigrationNote, get_last_name
from lumen.tools.migrate.texts import replace_requirements

_REMOVED_ARGUMENTS = {"optimizer_idx", "on_tpu", "using_native_amp", "using_lbfgs"}
_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


@final
class MethodEditor:
    """Editor of the methods of classes: edits signatures where possible, and notes the other methods.

    Args:
        source: The text of the file.
        note: Function that records a note on a node.
        classes: The classes of the project.
        used: Names that the project uses.
    """

    def __init__(self, source: EditableSource, note: AddNote, classes: ProjectClasses, used: frozenset[str]) -> None:
        self._source, self._note, self._epoch_ends = source, note, EpochEndEditor(source, note, classes, used)

    def edit_methods(self, owner: ast.ClassDef, kind: str) -> None:
        """Edit or note all methods of a class.

        Args:
            owner: The definition of the class.
            kind: Kind of the class: "task", "data module", "callback" or "cli".
        """
        methods = {each.name: each for each in owner.body if isinstance(each, Function)}
        not_called = NOT_IN_CLI if kind == "cli" else NOT_CALLED.get(kind, {})
        for name, method in methods.items():
            if kind == "task" and self._epoch_ends.edit(method, owner):
                continue
            if name in not_called:
                self._note(method, f"Lumen does not call {name}. {not_called[name]}")
            elif kind in ("task", "callback"):
                self._edit_signature(method, kind)
        for each in owner.body:
            if isinstance(each, ast.Assign) and kind == "task" and isinstance(each.targets[0], ast.Name):
                self.check_flag(each)

    def check_flag(self, node: ast.Assign) -> None:
        """Note an assignment to an attribute of the task that has another meaning in Lumen."""
        for target in node.targets:
            name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
            if name == "automatic_optimization" and isinstance(node.value, ast.Constant) and node.value.value is False:
                self._note(node, NOTES["manual"])
            if name == "truncated_bptt_steps":
                self._note(node, NOT_CALLED["task"]["truncated_bptt_steps"])

    def _edit_signature(self, method: Function, kind: str) -> None:
        arguments = method.args
        names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
        if method.name in _STEPS and kind == "task":
            for name in names:
                if name in REMOVED_ARGUMENTS:
                    self._note(method, f"Lumen does not pass {name}. {REMOVED_ARGUMENTS[name]}")
            return
        if method.name == "optimizer_step" and not _REMOVED_ARGUMENTS.isdisjoint(names):
            self._note(method, NOTES["optimizer_step"])
        elif kind == "task" and method.name in OPTIMIZATION_METHODS and "optimizer_idx" in names:
            ours = inspect.signature(getattr(lumen.TaskModule, method.name)).parameters.values()
            kept = ", ".join(each.name for each in ours if each.kind is each.POSITIONAL_OR_KEYWORD)
            self._note(method, f"Lumen does not pass optimizer_idx to {method.name}: the arguments are ({kept}).")
        if method.name not in HOOKS or arguments.vararg is not None:
            return
        returned = [node.value for node in ast.walk(method) if isinstance(node, ast.Return)]
        if kind == "callback" and method.name == "on_save_checkpoint" and any(returned):
            self._note(method, NOTES["callback_state"])
        owner = lumen.Callback if kind == "callback" else lumen.TaskModule
        passed = len(inspect.signature(getattr(owner, method.name)).parameters)
        if len(names) - len(arguments.defaults) > passed:
            self._drop_parameters(method, names, passed)

    def _drop_parameters(self, method: Function, names: list[str], passed: int) -> None:
        """Remove the last parameters, which Lumen does not pass, if the method does not read them."""
        extra = {*names[passed:]}
        read = {node.id for each in method.body for node in ast.walk(each) if isinstance(node, ast.Name)}
        if extra & read or method.args.defaults:
            left_out, kept = ", ".join(names[passed:]), ", ".join(names[:passed])
            self._note(method, f"Lumen does not pass {left_out} to {method.name}: the arguments are ({kept}).")
            return
        last_kept, last = [*method.args.posonlyargs, *method.args.args][passed - 1], method.args.args[-1]
        self._source.replace(self._source.get_span(last_kept)[1], self._source.get_span(last)[1], "")

    def check_key(self, node: ast.Subscript, function: Function | None, steps_return: set[bool | None]) -> None:
        """Edit or note a subscript of a checkpoint or of the output of a training step."""
        if function is None or not isinstance(node.value, ast.Name) or not isinstance(node.slice, ast.Constant):
            return
        names = [each.arg for each in function.args.args]
        owner, key = node.value.id, str(node.slice.value)
        if function.name in ("on_save_checkpoint", "on_load_checkpoint") and owner in names and key in INSTEAD_OF_KEYS:
            self._note(node, f"checkpoint[{key!r}] does not exist. {INSTEAD_OF_KEYS[key]}")
        if function.name == "on_train_batch_end" and owner in names and key == "loss":
            if steps_return == {False}:
                self._source.replace_node(node, owner)
            elif steps_return != {True}:
                self._note(
                    node, "outputs is the value that training_step returned, which may be a loss and no dictionary."
                )


_LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")
_ARGPARSE_METHODS = ("from_argparse_args", "add_argparse_args", "parse_argparser", "match_env_arguments")
#: Attributes of Lightning's trainer that Lumen has under another name, which `ATTRIBUTES` gives.
_RENAMED_ATTRIBUTES = {
    "gpus", "lightning_optimizers", "num_gpus", "num_processes", "resume_from_checkpoint", "total_batch_idx",
    "training_type_plugin",
}  # fmt: skip
#: Names of objects that hold settings, and whose attribute `trainer` is no trainer.
_CONFIG_NAME = re.compile("cfg|conf|args|opt|param|setting|flags", re.I)
#: Packages with trainers of their own.
_OTHER_TRAINERS = ("accelerate", "ignite", "transformers", "trl")
#: Functions that receive a class and its arguments.
_CLASS_RECEIVERS = ("lazy_instance", "partial")
#: Arguments of setuptools that list requirements.
_REQUIREMENTS = ("extras_require", "install_requires", "setup_requires", "tests_require")
_TRAINER_METHODS = ("fit", "validate", "test", "predict", "save_checkpoint")
_SAME_ARGUMENTS = {"lumen.TaskModule", "lumen.DataModule", "lumen.Callback"}


@final
class _Owner(NamedTuple):
    """Class around a node: its kind, the full names of its bases in Lightning, and the names of its methods."""

    kind: str | None = None
    bases: tuple[str, ...] = ()
    methods: frozenset[str] = frozenset()


@final
class FileEditor:
    """Editor of one file.

    Args:
        file: The text and syntax tree of the file.
        classes: The classes of the whole project.
        used: All names that the project uses.
    """

    def __init__(self, file: ParsedFile, classes: ProjectClasses, used: frozenset[str]) -> None:
        self._file, self._names, self._classes, self._used = file, file.names, classes, used
        self._source = EditableSource(file.text)
        self._imports = ImportEditor(self._source, self._names, classes.reexported)
        self._methods = MethodEditor(self._source, self._add_note, classes, used)
        self._calls = CallEditor(self._source, self._add_line_note, self._get_object_class, calls_fit="fit" in used)
        self._notes: dict[MigrationNote, tuple[int, int] | None] = {}
        self._owners = [_Owner()]  # the classes around the present node
        self._functions: list[Function] = []
        #: Values that the file assigns to each name.
        self._assigned: defaultdict[str, list[ast.expr]] = defaultdict(list)
        for each in ast.walk(file.tree):
            if not isinstance(each, ast.Assign | ast.AnnAssign) or each.value is None:
                continue
            for target in each.targets if isinstance(each, ast.Assign) else [each.target]:
                if isinstance(target, ast.Name):
                    self._assigned[target.id].append(each.value)
        self._trainers, self._unpacked = self._find_trainers()

    def edit(self) -> tuple[str, list[MigrationNote]]:
        """Return the text with all edits, and the notes."""
        self._visit(self._file.tree)
        for local, full in self._names.imported.items():
            theirs = self._classes.reexported.get(local)
            if theirs is not None and is_module(theirs) and get_short_name(full) == local:
                line = next(n for n, text in enumerate(self._source.lines, 1) if re.search(rf"\b{local}\b", text))
                self._add_line_note(line, NOTES["reexport"].format(local=local, full=full))
        for full, star in self._names.star_imports.items():
            if self._names.is_of_lightning(full) or (
                self._classes.is_own(full) and self._names.read & self._classes.reexported.keys()
            ):
                self._add_note(star, NOTES["star"])
        for line, sentence in self._imports.write_imports(self._file.tree):
            if sentence not in {note.sentence for note in self._notes}:
                self._add_line_note(line, sentence)
        left = (note for note, span in self._notes.items() if span is None or not self._source.is_replaced(*span))
        return self._source.apply_edits(), sorted(left)

    def _add_note(self, node: ast.AST, sentence: str) -> None:
        span = self._source.get_span(node)
        self._notes.setdefault(MigrationNote(self._source.get_line_number(span[0]), sentence), span)

    def _add_line_note(self, line: int, sentence: str) -> None:
        self._notes[MigrationNote(line, sentence)] = None

    def _visit(self, node: ast.AST) -> None:
        """Visit a node, and its children unless the node's own visitor did."""
        visitor: Callable[[ast.AST], bool | None] | None = getattr(self, f"_visit_{type(node).__name__}", None)
        if visitor is None or not visitor(node):
            self._visit_children(node)

    def _visit_children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _find_trainers(self) -> tuple[set[str], set[ast.AST]]:
        """Return the names of trainer variables, and the dictionaries unpacked into arguments of `Trainer`."""
        trainers, unpacked = {"trainer"}, set()
        for node in ast.walk(self._file.tree):
            if self._is_trainer_call(node):
                values = [each.value for each in node.keywords if each.arg is None]
                unpacked |= {each.id for each in values if isinstance(each, ast.Name)}
                trainers |= {name for name, values in self._assigned.items() if node in values}
        for value in self._assigned.get("trainer", ()):
            full = self._names.get_full_name(value.func) if isinstance(value, ast.Call) else None
            if (full or "").split(".")[0] in _OTHER_TRAINERS:
                trainers.discard("trainer")
        return trainers, {value for name in unpacked for value in self._assigned.get(name, ())}

    def _is_trainer_call(self, node: ast.AST) -> TypeGuard[ast.Call]:
        return isinstance(node, ast.Call) and self._get_lumen_class(self._get_lightning_class(node.func)) == "Trainer"

    def _get_object_class(self, node: ast.expr) -> str | None:
        """Return the full name of the Lightning class of which a value is an object, or None."""
        values = self._assigned.get(node.id, []) if isinstance(node, ast.Name) else [node]
        found = (self._get_lightning_class(each.func) for each in values if isinstance(each, ast.Call))
        return next((each for each in found if each is not None), None)

    def _get_lightning_class(self, function: ast.expr) -> str | None:
        """Return the full name of the Lightning class whose constructor is called, or None."""
        return self._names.get_lightning_name(function) or self._classes.get_constructed_class(
            getattr(function, "id", "")
        )

    def _get_lumen_class(self, full: str | None) -> str | None:
        """Return the name of the public Lumen class that replaces a Lightning class, or None."""
        new = find_new_name(full) if full is not None and not is_module(full) else None
        return new.name if new is not None and new.module == "lumen" and new.name[:1].isupper() else None

    def _is_trainer(self, node: ast.expr) -> bool:
        is_variable = isinstance(node, ast.Name) and node.id in self._trainers
        return is_variable or (
            isinstance(node, ast.Attribute)
            and node.attr == "trainer"
            and not _CONFIG_NAME.search(get_last_name(node.value))
        )

    # ------------------------------------------------------------------ names

    def _visit_Name(self, node: ast.Name) -> None:
        if self._names.get_binding(node) is not None and isinstance(node.ctx, ast.Load):
            self._rename_use(node)

    def _visit_Attribute(self, node: ast.Attribute) -> bool:
        full, owner = self._names.get_lightning_name(node), self._names.get_lightning_name(node.value)
        if full is not None and owner is not None and is_module(owner):
            self._rename_use(node)
            return True
        inherits = self._classes.kinds.get(getattr(node.value, "id", "")) in ("data module", "trainer")
        if (full is not None or inherits) and node.attr in _ARGPARSE_METHODS:
            self._visit_children(node)
            self._add_note(node, NOTES["argparse"].format(self._source.get_text(node.value)))
            return True
        if self._is_trainer(node.value) and node.attr in ATTRIBUTES and not hasattr(lumen.Trainer, node.attr):
            self._edit_trainer_attribute(node)
        is_logger = getattr(node.value, "attr", "") == "logger"
        if node.attr == "experiment" and is_logger and not any(name.endswith("Logger") for name in self._used):
            self._add_note(node, NOTES["experiment"])
        is_of_task = (
            self._owners[-1].kind == "task"
            and getattr(node.value, "id", "") == "self"
            and node.attr in TABLES["task_attributes"]
        )
        if is_of_task and (node.attr.startswith("to_") or not hasattr(lumen.TaskModule, node.attr)):
            self._add_note(node, f"self.{node.attr}: {TABLES['task_attributes'][node.attr]}")
        return False

    def _rename_use(self, node: ast.Name | ast.Attribute) -> None:
        if (full := self._imports.rename_use(node)) is not None:
            self._add_note(node, f"{get_short_name(full)}: {find_replacement(full)}")

    def _edit_trainer_attribute(self, node: ast.Attribute) -> None:
        if node.attr in _RENAMED_ATTRIBUTES and isinstance(node.ctx, ast.Load):
            end, advice = self._source.get_span(node)[1], ATTRIBUTES[node.attr]
            self._source.replace(end - len(node.attr), end, advice.removeprefix("Read trainer.").removesuffix("."))
        else:
            self._add_note(node, f"trainer.{node.attr}: {ATTRIBUTES[node.attr]}")

    # ------------------------------------------------------------------ annotations, texts

    def _visit_arg(self, node: ast.arg | ast.AnnAssign) -> None:
        self._edit_annotation(node.annotation)

    _visit_AnnAssign = _visit_arg

    def _edit_annotation(self, node: ast.expr | None) -> None:
        """Visit the quoted parts of an annotation as expressions."""
        for each in ast.walk(node) if node is not None else ():
            if not isinstance(each, ast.Constant) or not isinstance(each.value, str) or not each.value:
                continue
            before, quoted, _ = self._source.get_text(each).partition(each.value)
            try:
                inner = ast.parse(each.value, mode="eval").body
            except (SyntaxError, ValueError):  # ValueError for a null byte
                continue
            for part in ast.walk(inner) if quoted else ():
                if isinstance(part, ast.expr) and part.end_col_offset is not None:
                    part.lineno = part.end_lineno = each.lineno
                    part.col_offset += each.col_offset + len(before)
                    part.end_col_offset += each.col_offset + len(before)
            if quoted and "\n" not in quoted:
                self._visit(inner)

    def _visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and "\n" not in node.value:
            if node.value.endswith(".ckpt"):
                self._add_note(node, NOTES["checkpoint"])
            if "lightning_logs" in node.value:
                self._add_note(node, NOTES["directory"])
            counterpart = find_counterpart(node.value) if LIGHTNING_NAME.fullmatch(node.value) else None
            if counterpart is not None and get_short_name(node.value)[:1].isupper():
                advice = f"{counterpart.name}: check the arguments that it receives."
                self._add_note(node, advice if counterpart.name else f"{node.value}: {counterpart.advice}")
                text = self._source.get_text(node)
                self._source.replace_node(node, text.replace(node.value, counterpart.name or node.value))

    def _visit_Expr(self, node: ast.Expr) -> bool:
        return isinstance(node.value, ast.Constant)  # Docstrings are not visited.

    # ------------------------------------------------------------------ classes, functions

    def _visit_ClassDef(self, node: ast.ClassDef) -> bool:
        kind = self._classes.get_kind(node, self._names)
        if kind in ("task", "data module", "callback", "cli"):
            self._methods.edit_methods(node, kind)
        names = map(self._names.get_lightning_name, node.bases)
        methods = {each.name for each in node.body if isinstance(each, Function)}
        self._owners.append(_Owner(kind, tuple(filter(None, names)), frozenset(methods)))
        self._visit_children(node)
        self._owners.pop()
        return True

    def _visit_FunctionDef(self, node: Function) -> bool:
        self._edit_annotation(node.returns)
        for each in node.decorator_list:
            short = get_short_name(self._names.get_lightning_name(each) or "")
            if short in TABLES["dropped_decorators"]:
                start, end = self._source.get_span(each)
                self._source.replace(self._source.find_line_start(start), self._source.find_line_end(end), "")
                note = format_left_out(f"@{short}", TABLES["dropped_decorators"][short])
                self._add_line_note(self._source.get_line_number(start), note)
        self._functions.append(node)
        self._visit_children(node)
        self._functions.pop()
        return True

    _visit_AsyncFunctionDef = _visit_FunctionDef

    def _visit_Assign(self, node: ast.Assign) -> None:
        if self._owners[-1].kind == "task" and any(isinstance(target, ast.Attribute) for target in node.targets):
            self._methods.check_flag(node)
        names = [self._source.get_text(target) for target in node.targets]
        if "self.hparams" in names and self._owners[-1].kind in ("task", "data module"):
            if len(names) > 1:
                self._add_note(node, NOTES["hparams"].format(self._source.get_text(node.value)))
            else:
                self._source.replace(self._source.get_span(node)[0], self._source.get_span(node.value)[0],
                                     "self.save_hyperparameters(")  # fmt: skip
                end = self._source.get_span(node)[1]
                self._source.replace(end, end, ")")
        if node.value in self._unpacked and isinstance(node.value, ast.Call | ast.Dict):
            self._calls.edit_constructor(node.value, "Trainer", "Trainer")

    def _visit_Dict(self, node: ast.Dict) -> None:
        entries = {getattr(key, "value", None): value for key, value in zip(node.keys, node.values, strict=True)}
        function = self._functions[-1].name if self._functions and self._owners[-1].kind == "task" else ""
        if function == "configure_optimizers" and "optimizer" in entries and "scheduler" in entries:
            self._add_note(node, NOTES["scheduler"])
        for key in ("log", "progress_bar") if function in _STEPS and "loss" in " ".join(map(str, entries)) else ():
            if key in entries:
                options = ", prog_bar=True, logger=False" if key == "progress_bar" else ""
                value = self._source.get_text(entries[key])
                self._add_note(node, NOTES["output"].format(key=key, value=value, options=options))

    def _visit_Subscript(self, node: ast.Subscript) -> None:
        function = self._functions[-1] if self._functions else None
        self._methods.check_key(node, function, self._classes.steps_return)
        values = self._assigned.get(node.value.id, []) if isinstance(node.value, ast.Name) else [node.value]
        loads = any(isinstance(each, ast.Call) and self._source.get_text(each.func) == "torch.load" for each in values)
        if loads and getattr(node.slice, "value", None) in INSTEAD_OF_KEYS:
            self._add_note(node, NOTES["checkpoint"])

    def _visit_Compare(self, node: ast.Compare) -> None:
        names = map(self._names.get_lightning_name, ast.walk(node))
        if any(get_short_name(name or "") == "__version__" for name in names):
            self._add_note(node, NOTES["version"])

    # ------------------------------------------------------------------ calls

    def _visit_Call(self, node: ast.Call) -> bool:
        self._visit_children(node)  # An argument may move, with the edits in it.
        short = get_last_name(node.func)
        receives = short in _CLASS_RECEIVERS and bool(node.args)
        function = node.args[0] if receives else node.func
        if short == "from_argparse_args" and isinstance(function, ast.Attribute):
            receives, function = True, function.value  # The first argument is the result of the parser.
        full = self._get_lightning_class(function)
        if (owner := self._get_lumen_class(full)) is not None and full is not None:
            if f"lumen.{owner}" not in _SAME_ARGUMENTS:
                self._calls.edit_constructor(node, get_short_name(full), owner, is_direct=not receives)
                self._note_unpacked(node, owner)
        elif _is_super_init(node):
            for base in self._owners[-1].bases:
                owner = self._get_lumen_class(base)
                if owner is not None and f"lumen.{owner}" not in _SAME_ARGUMENTS:
                    self._calls.edit_constructor(node, get_short_name(base), owner)
        elif isinstance(node.func, ast.Attribute) and self._is_method(node.func):
            self._calls.edit_method(node, node.func.attr)
        is_own = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "self"
        if is_own and short in _LOADERS and self._owners[-1].kind == "task" and short not in self._owners[-1].methods:
            self._add_note(node, NOTES["loader"].format(short, f"{short}s" if short != "train_dataloader" else short))
        if short == "setup":
            self._edit_requirements(node)
        if short == "set_defaults":
            for each in node.args:
                if isinstance(each, ast.Dict):
                    self._calls.edit_defaults(each, self._classes.option_groups)
        if short == "getLogger":
            self._edit_logger_name(node)
        return True

    def _edit_requirements(self, node: ast.Call) -> None:
        """Replace Lightning in the requirements that a call of setuptools receives."""
        for keyword in node.keywords:
            waiting: list[ast.AST] = [keyword.value] if keyword.arg in _REQUIREMENTS else []
            for each in waiting:
                if isinstance(each, ast.Constant) and isinstance(each.value, str):
                    self._source.replace_node(each, replace_requirements(self._source.get_text(each)))
                parts = each.values if isinstance(each, ast.Dict) else ast.iter_child_nodes(each)
                found = [*self._assigned.get(getattr(each, "id", ""), []), *parts]
                waiting += [part for part in found if part not in waiting]

    def _note_unpacked(self, node: ast.Call, owner: str) -> None:
        """Note arguments of which the names are not in the call."""
        for each in node.keywords:
            values = self._assigned.get(each.value.id, []) if isinstance(each.value, ast.Name) else [each.value]
            known = values and all(isinstance(value, ast.Dict) or _is_dict_call(value) for value in values)
            if each.arg is None and not known:
                text = self._source.get_text(each.value)
                self._add_note(
                    each.value, f"**{text}: check its keys. {owner} raises an error for an unknown argument."
                )

    def _is_method(self, function: ast.Attribute) -> bool:
        """Return True if a call is of a method of the task, the trainer or the tuner."""
        if function.attr in _TRAINER_METHODS:
            return self._is_trainer(function.value)
        if function.attr in ("log", "log_dict"):
            is_ours = self._owners[-1].kind in ("task", "callback")
            return is_ours and getattr(function.value, "id", "") in ("self", *self._list_task_names())
        return function.attr in METHODS

    def _list_task_names(self) -> tuple[str, ...]:
        """Return the name of the task parameter in a callback's hook, if any."""
        arguments = self._functions[-1].args.args if self._functions else []
        return tuple(each.arg for each in arguments[2:3]) if self._owners[-1].kind == "callback" else ()

    def _edit_logger_name(self, node: ast.Call) -> None:
        for value in node.args[:1]:
            if str(getattr(value, "value", "")).split(".")[0] in LIGHTNING_PACKAGES:
                self._source.replace_node(value, '"lumen"')


def _is_dict_call(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict"


def _is_super_init(node: ast.Call) -> bool:
    function = node.func
    of_super = isinstance(function, ast.Attribute) and function.attr == "__init__" and function.value
    return isinstance(of_super, ast.Call) and getattr(of_super.func, "id", "") == "super"


def iterate_used_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names that a file uses, including attributes and imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name | ast.alias):
            yield get_short_name(getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "name", ""))
