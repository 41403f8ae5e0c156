"""Compare each public name of the installed PyTorch Lightning with Lumen, for the migration guide.

The verdict of a name comes from Lumen: the signature of its counterpart, or the error that using the name raises.
`lightning_api.toml` has the verdicts that Lumen cannot give: on names with another meaning, and on names without error.
"""

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import nn

import lumen
from lumen.errors import LumenError, lightning_names as names
from lumen.task import hooks
from lumen.tools.migrate.names import ELSEWHERE, find_new_name

#: Modules of `lightning.pytorch` whose names are public.
MODULES = (
    "", "callbacks", "loggers", "profilers", "cli", "tuner", "strategies", "plugins", "plugins.environments",
    "accelerators", "core.mixins", "core.optimizer", "trainer.states", "utilities", "utilities.data",
    "utilities.enums", "utilities.exceptions", "utilities.memory", "utilities.model_helpers",
    "utilities.model_summary", "utilities.parsing", "utilities.rank_zero", "utilities.seed", "utilities.types",
    "utilities.warnings",
)  # fmt: skip
DIFFERENCES = Path(__file__).with_name("lightning_api.toml")
#: Names of any version of Lightning that a class of Lumen answers with an error; an argument is in brackets.
ADVICE: Mapping[str, Mapping[str, str]] = {
    "Trainer": {**names.ATTRIBUTES, **{f"({name})": text for name, text in names.INSTEAD.items()}}
    | {f"save_checkpoint({name})": text for name, text in names.INSTEAD_IN_SAVE.items()},
    "LightningModule": {**hooks.NOT_CALLED["task"]}
    | {f"{log}({name})": text for name, text in names.INSTEAD_IN_LOG.items() for log in ("log", "log_dict")},
    "LightningDataModule": hooks.NOT_CALLED["data module"],
    "Callback": hooks.NOT_CALLED["callback"],
    **names.ATTRIBUTES_OF_CALLBACKS,
    "ModelCheckpoint": {
        **names.ATTRIBUTES_OF_CALLBACKS["ModelCheckpoint"],
        **{f"({name})": text for name, text in names.INSTEAD_IN_CHECKPOINTS.items()},
    },
    "Logger": {f"({name})": text for name, text in names.INSTEAD_IN_LOGGERS.items() if name != "*"},
    "names": {
        name: f"`{text}`" if name in {**names.RENAMED, **ELSEWHERE} else text
        for name, text in {**names.INSTEAD_OF_CLASSES, **names.RENAMED, **ELSEWHERE}.items()
    },
    "LightningCLI": {**names.NOT_IN_CLI, **{f"({name})": text for name, text in names.INSTEAD_IN_CLI.items()}},
}
BEGINNING = """# Lightning's names

The public names of Lightning {version}, and names of older versions, each with its counterpart in Lumen.
"Same" names have the same meaning. The tables list all other names: each is an error with this text,
or a difference. `(name)` is an argument of the class, and `method(name)` of a method.
"""


class Verdict(NamedTuple):
    """Relation of a name of Lightning to Lumen.

    Attributes:
        kind: "same", "renamed", "error" (using the name raises the text), "differs" (the text says how), or "unsorted".
        text: What to write or to know; empty for "same" and "unsorted".
    """

    kind: str
    text: str = ""


UNSORTED = Verdict("unsorted")


def walk() -> dict[str, dict[str, Any]]:
    """Return the public objects of the installed Lightning: members by class, and all objects under ""."""
    exported: dict[str, Any] = {}
    for suffix in MODULES:
        module = import_module(f"lightning.pytorch.{suffix}".rstrip("."))
        listed = getattr(module, "__all__", None)
        for name, value in vars(module).items():
            home = str(getattr(value, "__module__", ""))
            is_own = home.startswith(module.__name__) if listed is None else name in listed
            if suffix == "plugins.environments":
                is_own = home.startswith("lightning.fabric.plugins.environments")
            if is_own and not name.startswith("_") and callable(value):
                exported.setdefault(name, value)
    return {"": exported, **{name: _list_members(value, exported) for name, value in exported.items()}}


def _list_members(kind: Any, exported: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that a class adds to the exported classes from which it is derived."""
    if not inspect.isclass(kind):
        return {}
    bases = [each for each in kind.__mro__[1:] if each in exported.values() and find_new_name(_full(each.__name__))]
    known = {name for base in bases for name in _list_names(base)} | {*dir(nn.Module), *dir(dict), *dir(Exception)}
    found = {name: inspect.getattr_static(kind, name, None) for name in _list_names(kind) - known}
    return {name: getattr(value, "__func__", value) for name, value in sorted(found.items())}


def _full(name: str) -> str:
    return f"lightning.pytorch.{name}"


def _list_names(kind: type) -> set[str]:
    """Return the public names that a class and its bases define, annotate, or assign to `self`."""
    found: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.partition(".")[0] in ("lightning", "lumen"):
            found |= {*vars(each), *vars(each).get("__annotations__", ())}
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            functions = (node for node in ast.iter_child_nodes(body) if isinstance(node, ast.FunctionDef))
            used = (node for function in functions for node in _walk_function(function))
            found |= {use.attr for use in used if isinstance(use.ctx, ast.Store) and ast.unparse(use.value) == "self"}
    return {name for name in found if not name.startswith("_")}


def _walk_function(node: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that a function uses, without the classes that it defines."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Attribute):
            yield child
        if not isinstance(child, ast.ClassDef):
            yield from _walk_function(child)


def judge(written: Mapping[str, Mapping[str, str]] | None = None) -> dict[str, dict[str, Verdict]]:
    """Return the verdict of each public name of Lightning: by class its members, and under "names" all else.

    Args:
        written: The verdicts that a person wrote, which take precedence. Default: those of the file of differences.
    """
    api, verdicts = walk(), {"names": {}}
    for name, value in sorted(api[""].items()):
        here = verdicts["names"]
        here[name], counterpart = _judge_name(name)
        if counterpart is None or not counterpart.__module__.startswith("lumen"):
            continue
        if inspect.isclass(value):
            here, prefix = verdicts.setdefault(name, {}), ""
            for member, found in api[name].items():
                here |= _judge_member(name, counterpart, member, found)
        else:
            prefix = name
        here |= _judge_arguments(prefix, value, counterpart, counterpart)
    for owner, texts in (read_differences() if written is None else written).items():
        for name, text in texts.items():
            verdicts.setdefault(owner, {})[name] = UNSORTED if text == "unsorted" else Verdict("differs", text)
    return verdicts


def read_differences() -> dict[str, dict[str, str]]:
    """Return the verdicts that a person wrote."""
    return tomllib.loads(DIFFERENCES.read_text())


def _judge_name(name: str) -> tuple[Verdict, Any]:
    """Return the verdict of a class or function, and its counterpart or None."""
    new = find_new_name(_full(name))
    if new is not None:
        counterpart = getattr(import_module(new.module), new.name)
        is_same = new == ("lumen", name)
        return Verdict("same") if is_same else Verdict("renamed", f"`{'.'.join(new)}`"), counterpart
    try:
        getattr(lumen, name)
    except AttributeError as error:
        return _as_verdict(error, name), None
    return UNSORTED, None


def _judge_member(owner: str, kind: Any, name: str, found: Any) -> dict[str, Verdict]:
    """Return the verdict of a member, and of arguments that Lumen's method lacks."""
    own = inspect.getattr_static(kind, name, None)
    own = getattr(own, "__func__", own)
    if own is None and name not in (_list_names(kind) if inspect.isclass(kind) else ()):
        return {name: _probe(owner, kind, name)}
    if not callable(own) or not callable(found):
        return {name: Verdict("same")}
    if inspect.get_annotations(own, eval_str=False).get("return") in ("NoReturn", NoReturn):
        return {name: _call(name, own, kind, {})}
    differing = _judge_arguments(name, found, own, kind)
    return {name: Verdict("same"), **differing}


def _probe(owner: str, kind: Any, name: str) -> Verdict:
    """Return the verdict of an attribute that Lumen's class lacks: the error that reading it raises."""
    if name in ADVICE.get(owner, {}):
        return Verdict("error", ADVICE[owner][name])
    try:
        getattr(_make_probe(kind), name)
    except AttributeError as error:
        return _as_verdict(error, name)
    except LumenError as error:
        return Verdict("error", str(error))
    return UNSORTED


def _make_probe(kind: type) -> Any:
    """Return an object of a class, without calling its constructor."""
    probe = type(kind.__name__, (kind,), {})
    probe.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]
    return object.__new__(probe)


def _judge_arguments(method: str, found: Any, own: Any, kind: Any) -> dict[str, Verdict]:
    """Return the verdict of each argument that Lumen's function lacks or takes at a different place."""
    theirs, ours = _list_parameters(found), _list_parameters(own)
    verdicts, is_open = {}, inspect.Parameter.VAR_KEYWORD in ours.values()
    is_open_for_positions = inspect.Parameter.VAR_POSITIONAL in ours.values()
    for name, how in theirs.items():
        if how in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL):
            continue
        if name in ours:
            is_positional = how in _POSITIONAL and ours[name] in _POSITIONAL
            is_moved = is_positional and [*ours].index(name) != [*theirs].index(name)
            is_moved |= how in _POSITIONAL and not is_positional and not inspect.isclass(own)
            verdict = UNSORTED if is_moved else Verdict("same")
        elif is_open or inspect.isclass(own):
            verdict = _call(name, own, kind, {name: object()})
        else:
            verdict = Verdict("same") if is_open_for_positions else UNSORTED
        if not method or verdict.kind != "same":
            verdicts[f"{method}({name})"] = verdict
    return verdicts


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _list_parameters(function: Any) -> dict[str, Any]:
    """Return the kinds of a function's parameters by name, without `self`."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    renamed = {"pl_module": "task"}
    return {renamed.get(name, name): each.kind for name, each in parameters.items() if name not in ("self", "cls")}


def _call(name: str, function: Any, kind: Any, arguments: Mapping[str, Any]) -> Verdict:
    """Return the verdict of a call: the error that it raises."""
    try:
        if inspect.isclass(function):
            function(**arguments)
        else:
            first = [_make_probe(kind)] if inspect.isclass(kind) else []
            required = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
            needed = [None for each in required if each.kind in _POSITIONAL]
            function(*first, *needed[len(first) :], **arguments)
    except (LumenError, AttributeError) as error:
        return _as_verdict(error, name)
    except Exception:  # a bare error is no advice
        return UNSORTED
    return Verdict("same")


def _as_verdict(error: Exception, name: str) -> Verdict:
    """Return the advice in an error, or "unsorted" if it has no advice."""
    text = re.sub(
        rf"^.*?\bhas no (?:attribute|argument) '?{name}'?\.? ?|^\w+ has no {name}: |^{name}: ", "", str(error)
    )
    if "<object object" in text:  # the value is wrong, the argument is right
        return Verdict("same")
    is_advice = name in str(error) and text and not text.startswith(("Did you mean", "See help", "'", "module '"))
    return Verdict("error", text) if is_advice else UNSORTED


def page() -> str:
    """Return all verdicts as Markdown."""
    verdicts = judge()
    parts = [BEGINNING.format(version=version("lightning"))]
    for owner, found in verdicts.items():
        rows = {name: verdict for name, verdict in found.items() if verdict.kind != "same"}
        rows |= {
            name: Verdict("error", text)
            for name, text in ADVICE.get(owner, {}).items()
            if name not in found and name[0] != "_"
        }
        same = [f"`{name}`" for name in found if name not in rows]
        parts += [f"## {'Classes and functions' if owner == 'names' else owner}\n"]
        parts += [textwrap.fill(f"Same: {', '.join(same)}.", 100) + "\n"] if same else []
        lines = [f"| `{name}` | {_escape(verdict)} |" for name, verdict in sorted(rows.items())]
        parts += ["| in Lightning | in Lumen |", "|---|---|", *lines, ""] if lines else []
    return "\n".join(parts)


def _escape(verdict: Verdict) -> str:
    """Return a verdict as Markdown in a cell of a table; errors are plain text, and new names are in backticks."""
    is_plain = verdict.kind == "error" and not verdict.text.startswith("`")
    return re.sub(r"([_*|<])", r"\\\1", verdict.text) if is_plain else verdict.text or verdict.kind
