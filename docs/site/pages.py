"""Hooks of `make docs`: add pages from other folders and the reference, and rewrite links for the site."""

import json
import os
import posixpath
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import error_index
import lightning_api
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import lumen
from lumen import optim
from lumen.cli import commands

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing/index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "benchmarks/README.md": "benchmarks.md",
    "docs/tutorials/notebook.ipynb": "tutorials/notebook.md",
}
#: Title of each page of the reference, and the modules whose public names it describes; "tools" has all others.
REFERENCE = {
    "trainer": ("Trainer and task", ("lumen.trainer.", "lumen.task.")),
    "callbacks": ("Callbacks", ("lumen.callbacks", "lumen.integrations.ray", "lumen.tools.report")),
    "loggers": ("Loggers and profilers", ("lumen.loggers", "lumen.integrations", "lumen.profilers")),
    "devices": ("Devices and precision", ("lumen.strategies", "lumen.precision")),
    "tools": ("Tools", ("lumen.",)),
}
#: Pages that name many things once; the search ranks them below the guides.
LONG_LISTS = ("changelog.md", "reference/errors.md", "reference/config.md")
PICTURES = (".png", ".svg")
FIRST = ("Trainer", "TaskModule", "DataModule", "Callback", "Logger", "Strategy", "Precision", "CLI")
LINK = re.compile(r"\]\(([^)#\s]+)((?:#[^)]*)?)\)")
PICTURE = re.compile(r'<img [^>]*src="[^"]*pictures/([\w-]+\.svg)"[^>]*>')
STYLE = re.compile(r"<style>.*?</style>\n", re.S)
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.S | re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of other folders and of the reference, and turn links out of docs/ into links to source pages."""
    origins = {f"docs/{file.src_uri}": file for file in files.documentation_pages()}
    for origin, uri in ELSEWHERE.items():
        origins[origin] = File.generated(config, uri, content=_text(ROOT / origin))
        files.append(origins[origin])
    places = {origin: file.src_uri for origin, file in origins.items()}
    linked: set[str] = set()
    for origin, file in origins.items():
        file.content_string = _with_links(file.content_string, origin, places, linked)
    shown = {_place(path): _source(path) for path in linked}
    for uri, content in {**shown, **dict(_reference())}.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rank pages for contributors, and long lists, below the guides in the search."""
    if page.file.src_uri.startswith("contributing/") or page.file.src_uri in LONG_LISTS:
        page.meta.setdefault("search", {"boost": 0.2})
    return markdown


def on_page_content(html: str, *, page: Page, **_: Any) -> str:
    """Put the pictures of docs/pictures into the page, so that their colours follow the site's switch."""

    def inlined(image: re.Match[str]) -> str:
        drawn = (ROOT / "docs/pictures" / image[1]).read_text()
        return STYLE.sub("", drawn) if 'class="picture"' in drawn else image[0]

    return PICTURE.sub(inlined, html)


def _text(path: Path) -> str:
    """Return a file as Markdown; a notebook becomes its cells."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
    return "\n\n".join(text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells)


def _with_links(text: str, origin: str, places: dict[str, str], linked: set[str]) -> str:
    """Return a page with links that work in the site."""

    def there(link: re.Match[str]) -> str:
        target, anchor = link.groups()
        if "://" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        if (ROOT / path).is_dir():
            return f"](#folder:{path})"
        if path not in places:
            linked.add(path)
        uri = places.get(path, _place(path))
        return f"]({posixpath.relpath(uri, posixpath.dirname(places[origin]) or '.')}{anchor})"

    parts = FENCED.split(text)
    parts[::2] = [re.sub(r"\[([^\]]*)\]\(#folder:[^)]*\)", r"\1", LINK.sub(there, part)) for part in parts[::2]]
    return "".join(parts)


def _place(path: str) -> str:
    """Return the path of a file of the repository in the site: pictures stay files, other files become pages."""
    return f"source/{path}" if path.endswith(PICTURES) else f"source/{path}.md"


def _source(path: str) -> str | bytes:
    """Return a page that shows a file and that the search ignores; a picture is returned as bytes."""
    if path.endswith(PICTURES):
        return (ROOT / path).read_bytes()
    language = {".py": "python", ".yaml": "yaml"}.get(Path(path).suffix, "")
    text = (ROOT / path).read_text()
    return f"---\nsearch: {{exclude: true}}\nhide: [toc, navigation]\n---\n# {path}\n\n````{language}\n{text}````\n"


def _reference() -> Iterator[tuple[str, str]]:
    """Yield path and text of each generated page: exports, errors, config keys, Lightning's names, commands."""
    left = sorted(lumen.__all__, key=lambda name: (name not in FIRST, FIRST.index(name) if name in FIRST else 0, name))
    for page, (title, homes) in REFERENCE.items():
        names = [name for name in left if lumen._HOME[name].startswith(homes)]
        left = [name for name in left if name not in names]
        yield f"reference/{page}.md", _described(page, title, [f"lumen.{name}" for name in names])
    yield "reference/optim.md", _described("optim", "lumen.optim", [f"lumen.optim.{name}" for name in optim.__all__])
    yield "reference/errors.md", error_index.page((ROOT / "docs/site/errors.md").read_text())
    keys = _run_help("fit", "all")
    yield "reference/config.md", f"{(ROOT / 'docs/site/config.md').read_text()}\n```text\n{keys}\n```"
    yield "migration/lightning-names.md", lightning_api.page()
    helps = [_help(command) for command in ("", *commands.list_commands())]
    yield "reference/commands.md", "\n\n".join(["# The command line", *helps])


def _described(page: str, title: str, names: list[str]) -> str:
    """Return a page of the reference: its hand-written beginning, then each name."""
    beginning = (ROOT / f"docs/site/{page}.md").read_text().rstrip()
    for name in names:  # A name in the first column of a table links to its entry.
        beginning = beginning.replace(f"\n| `{name.split('.')[-1]}` |", f"\n| [`{name.split('.')[-1]}`][{name}] |")
    return "\n\n".join([f"# {title}", beginning, *(f"::: {name}" for name in names)])


def _help(command: str) -> str:
    """Return the section of a command: its help."""
    return f"## `lumen{' ' * bool(command)}{command}`\n\n```text\n{_run_help(command)}\n```"


def _run_help(command: str, *section: str) -> str:
    """Return the help that a command prints, at 90 columns."""
    words = [sys.executable, "-m", "lumen", *command.split(), "--help", *section]
    environment = {**os.environ, "COLUMNS": "90"}
    return subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout.rstrip()
