"""`lumen init`: the README of each project works, and the project lints."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import ROOT

TEMPLATES = sorted(path.name for path in ROOT.glob("lumen/tools/init/templates/*"))
SHORT = [
    "--trainer.max_steps=2",
    "--trainer.max_epochs=null",
    "--trainer.limit_val_batches=1",
    "--trainer.val_check_interval=2",
]

pytestmark = pytest.mark.usefixtures("program_directory")


def python(*words, cwd):
    return program("python", *words, cwd=cwd)


def program(name, *words, cwd):
    done = subprocess.run([Path(sys.executable).with_name(name), *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft calls it
@pytest.mark.time_limit(300)
@pytest.mark.parametrize("template", TEMPLATES)
def test_readme_of_each_template_works(template, monkeypatch, capsys):
    """Run the commands of the README from top to bottom, then `longer:` of the fit; the code lints, `check` is content.

    A schedule as long as the run gets longer with it, so the longer run prints one warning.
    """
    name = f"my_{template}"
    assert main(["init", name, "--template", template]) == 0
    printed = [line.strip() for line in capsys.readouterr().out.splitlines()[2:]]
    program("ruff", "check", ".", cwd=name)
    program("ruff", "format", "--check", ".", cwd=name)
    monkeypatch.chdir(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    readme = Path("README.md").read_text()
    lines = re.findall(r"^(?:lumen|python) .*", readme, re.M)
    assert printed == lines[: len(printed)]
    for line in lines:
        run_line(line)
    assert [path.name for path in Path("runs").iterdir()] == [name]  # The tests of the project write elsewhere.
    files = [path.read_text().splitlines() for path in Path().glob("predictions.jsonl")]
    predicted = [json.loads(line) for lines in files for line in lines]
    assert len(predicted) == {"images": 179, "table": 30}.get(template, 0)  # the test samples
    assert all(0 < each["probability"] <= 1 for each in predicted)
    log = Path("runs", name, "run.log")
    run_line(re.search(r"longer: (.*)", log.read_text())[1])
    (changed,) = re.findall("(?<= WARNING ).*", log.read_text())
    assert "ends after 2 steps" in changed
    assert "after 4 in this run" in changed
    capsys.readouterr()
    assert main(["check", "--config", f"{name}.yaml"]) == 0
    report = capsys.readouterr().out
    assert report.endswith("nothing suspicious was found\n")
    notes = ["training samples change at each read, so training and validation were not"] * (template == "images")
    assert re.findall(r"^\N{MIDDLE DOT} (.*)", report, re.M) == notes


def run_line(line):
    """Run a command; `lumen` runs in this process and trains for two steps, or for as many as the command says."""
    words = shlex.split(line, comments=True)
    if words[0] == "python":
        python(*words[1:], cwd=".")
    elif words[1] == "fit" and "--trainer.max_steps" not in words:
        assert main([*words[1:], *SHORT]) == 0
    else:
        assert main(words[1:]) == 0


def test_listed_templates_are_those_of_the_option(capsys):
    assert main(["init", "--list"]) == 0
    listed, end = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in listed.splitlines()] == TEMPLATES
    assert all(line.count(".") >= 1 and len(line) <= 100 for line in listed.splitlines())
    assert end == "Create a project: lumen init mine --template NAME\n"
    assert not any(Path().iterdir())


def test_a_project_is_begun_without_torch():
    code = "import sys; from lumen.cli import main; sys.exit(main(['init', 'mine']) or 'torch' in sys.modules)"
    assert "Created mine from" in python("-c", code, cwd=".")


@pytest.mark.slow
def test_templates_are_part_of_what_is_installed(tmp_path):
    """Templates are installed as from a wheel, hidden files too."""
    build = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"
    source = tmp_path / "source"
    source.mkdir()
    for name in ("lumen", "pyproject.toml", "README.md", "LICENSE"):
        os.symlink(ROOT / name, source / name)
    wheel = python("-c", build, str(tmp_path), cwd=source).split()[-1]
    python("-m", "zipfile", "-e", str(tmp_path / wheel), str(tmp_path / "unpacked"), cwd=".")
    there, here = (root / "lumen/tools/init/templates" for root in (tmp_path / "unpacked", ROOT))
    files = {path.relative_to(here) for path in here.rglob("*") if path.is_file()}
    files = {path for path in files if not {"__pycache__", ".ruff_cache"} & {*path.parts}}
    assert {path.relative_to(there) for path in there.rglob("*") if path.is_file()} == files
