"""The command `lumen init`: copies a template project that trains, under the name of the new project."""

from __future__ import annotations

import keyword
import re
import sys
import tomllib
from importlib.machinery import PathFinder
from pathlib import Path

from lumen.cli.commands import CommandParser
from lumen.console import stdout
from lumen.errors import ConfigError
from lumen.tools.init import COMMAND
from lumen.version import DISTRIBUTION

_TEMPLATES = Path(__file__).parent / "templates"
_TEMPLATE_NAME = "starter"  # name of the package, config and test in each template
_CACHES = {"__pycache__", ".pytest_cache", ".ruff_cache", "runs"}  # written when the template itself was run


def options() -> CommandParser:
    """Return the parser of the command's options."""
    names = [*_describe_templates()]
    usage = f"NAME [--template {'|'.join(names)}]"
    parser = CommandParser("init", COMMAND, usage, "The project needs no network and passes its own test.")
    parser.add_argument("directory", metavar="NAME", nargs="?", help="Directory to create; its end names the package.")
    parser.add_argument("--template", choices=names, default="gpt", help="Template to copy. Default: gpt.")
    parser.add_argument("--list", action="store_true", help="Describe the templates in a line each; create nothing.")
    return parser


def run(words: list[str]) -> int:
    """Create a directory with a project, or print the templates, and return 0."""
    parser = options()
    arguments = parser.read(words)
    if arguments.list:
        lines = [f"{name:<14}{text}" for name, text in _describe_templates().items()]
        print(*lines, "", "Create a project: lumen init mine --template NAME", sep="\n", file=stdout)
        return 0
    if arguments.directory is None:
        parser.error("the name of the new directory is missing: NAME")
    project = Path(arguments.directory).expanduser()
    name = make_package_name(project.resolve().name)
    _check_free(project)
    template = _TEMPLATES / arguments.template
    files = [path.relative_to(template) for path in sorted(template.rglob("*")) if path.is_file()]
    for path in (each for each in files if _CACHES.isdisjoint(each.parts)):
        target = project / str(path).replace(_TEMPLATE_NAME, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        text = (template / path).read_text(encoding="utf-8")
        target.write_text(text.replace(_TEMPLATE_NAME, name), encoding="utf-8")
    _, commands, _ = (project / "README.md").read_text(encoding="utf-8").split("```\n", 2)
    steps = [f"cd {project}", *(line for line in commands.splitlines() if not line.startswith("pip "))]
    print(f"Created {project} from template {arguments.template}, package {name}. Read README.md, or run:", file=stdout)
    print(*(f"  {step}" for step in steps), sep="\n", file=stdout)
    return 0


def _describe_templates() -> dict[str, str]:
    """Return by the names of the templates what they contain and need, from their pyproject files."""
    found = {}
    for path in sorted(_TEMPLATES.glob("*/pyproject.toml")):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        needed = [each for each in project["dependencies"] if each != DISTRIBUTION]
        found[path.parent.name] = project["description"] + (f" Needs {' and '.join(needed)}." if needed else "")
    return found


def make_package_name(name: str) -> str:
    """Return a package name similar to a text: an identifier that no other importable module has."""
    package = re.sub(r"\W+", "_", name).strip("_").lower()
    if not package:
        return "project"
    if not package.isidentifier() or keyword.iskeyword(package) or _is_taken(package):
        return f"my_{package}"
    return package


def _is_taken(name: str) -> bool:
    """Return True if another module has the name. Plain directories and files in the working directory do not count."""
    directories = [entry for entry in sys.path if entry and Path(entry).resolve() != Path.cwd()]
    found = PathFinder.find_spec(name, directories)
    return name in {"tests", *sys.stdlib_module_names} or (found is not None and found.loader is not None)


def _check_free(project: Path) -> None:
    if project.exists() and not project.is_dir():
        raise ConfigError(f"{project} is a file. Name a new or empty directory.")
    if project.is_dir() and (found := sorted(path.name for path in project.iterdir())):
        names = ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
        raise ConfigError(f"{project} is not empty: the directory contains {names}. Name a new or empty directory.")
