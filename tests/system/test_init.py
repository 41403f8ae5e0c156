"""`lumen init`: its project trains, passes its test, and lints."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lumen.cli import main
from tests.helpers import ROOT

pytestmark = pytest.mark.usefixtures("program_directory")


def python(*words, cwd):
    return program("python", *words, cwd=cwd)


def program(name, *words, cwd):
    done = subprocess.run([Path(sys.executable).with_name(name), *words], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.time_limit(300)
@pytest.mark.parametrize("template", ["gpt", "images", "table", "transformers"])
def test_each_template_trains_passes_its_test_and_lints(template, monkeypatch):
    name = f"my_{template}"
    assert main(["init", name, "--template", template]) == 0
    program("ruff", "check", ".", cwd=name)
    program("ruff", "format", "--check", ".", cwd=name)
    assert " passed" in python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=name)
    assert not Path(name, "runs").exists()
    monkeypatch.chdir(name)
    monkeypatch.setattr(sys, "path", [*sys.path])
    quick = {
        "fit": [
            "--trainer.max_steps=2",
            "--trainer.max_epochs=null",
            "--trainer.limit_val_batches=1",
            "--trainer.val_check_interval=2",
        ],
        "test": ["--trainer.limit_test_batches=1"],
        "predict": ["--model.new_tokens=2"] if template == "gpt" else [],
        "export": [],
    }
    lines = Path("README.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("lumen ")]
    assert commands[0] == ["fit", "--config", f"{name}.yaml"]
    for words in commands:
        assert main([*words, *quick[words[0]]]) == 0
    assert Path(f"runs/{name}/metrics.csv").exists()


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
