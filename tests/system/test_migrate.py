"""Projects for Lightning: they pass their tests before `lumen migrate --write`, and after it."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.helpers import ROOT
from tests.helpers.migrate import run_migrate, run_migrate_write
from tests.helpers.projects import LIGHTNING, PROJECTS, copy_project, git, lumen

PAGE = ROOT / "docs/migration/move-a-project.md"


def start_project_tests(directory, *without):
    """Start the project's tests; modules in `without` cannot be imported."""
    barrier = directory.with_name(f"{directory.name}-without")
    barrier.mkdir()
    for name in without:
        (barrier / f"{name}.py").write_text(f"raise ImportError('{name} is not to be used')\n")
    path = os.pathsep.join(map(str, (barrier, directory, ROOT)))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-c", os.devnull,
               "--rootdir", ".", "tests"]  # fmt: skip
    return subprocess.Popen(
        command, cwd=directory, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.time_limit(500)
@pytest.mark.parametrize("name", ["digitgan", "winecli", "selfsup"])
def test_a_projects_own_tests_pass_before_and_after(tmp_path, name):
    before, after = copy_project(name, tmp_path / "before"), copy_project(name, tmp_path / "after")
    sources = [each for each in (PROJECTS / name).rglob("*") if each.suffix in (".py", ".yaml")]
    assert sum(len(each.read_text().splitlines()) for each in sources) > 300
    assert lumen(after, "migrate", ".", "--write").returncode == 0
    left = [each for each in after.rglob("*") if each.suffix in (".py", ".yaml") and LIGHTNING.search(_code(each))]
    assert left == []
    running = [
        start_project_tests(before, "lumen"),
        start_project_tests(after, "lightning", "pytorch_lightning", "lightning_fabric"),
    ]
    (told_before, _), (told_after, _) = (each.communicate() for each in running)
    assert [each.returncode for each in running] == [0, 0], told_before + told_after
    assert _passed(told_before) == _passed(told_after) >= 5


def _code(path):
    return "\n".join(line.split("#")[0] for line in path.read_text().splitlines())


def _passed(told):
    return int(re.search(r"^(\d+) passed in", told, re.M)[1])


def test_the_guide_shows_what_the_command_prints(tmp_path):
    """`python -m tests.system.test_migrate` updates the guide."""
    assert _page(tmp_path) == PAGE.read_text()


def _page(tmp_path):
    done = lumen(copy_project("winecli", tmp_path / "wine"), "migrate", ".")
    assert done.returncode == 0
    text = re.sub(r"```text\n.*?```", lambda _: f"```text\n{done.stderr}```", PAGE.read_text(), count=1, flags=re.S)
    return re.sub(r"```diff\n.*?```", lambda _: f"```diff\n{done.stdout}```", text, count=1, flags=re.S)


# ---------------------------------------------------------------------- git


@pytest.fixture
def project(tmp_path, monkeypatch):
    text = "import lightning as L\nx = L.Trainer(gpus=2), L.pytorch.cli.LightningCLI"  # no line end
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "c.yaml").write_text("trainer:\n  barebones: false\n  max_epochs: 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").mkdir()
    (tmp_path / "ignored/b.py").write_text("import lightning\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def texts(path):
    return {each.name: each.read_text() for each in (path / "a.py", path / "c.yaml", path / "ignored/b.py")}


def test_diff_is_a_patch_equal_to_write(project):
    before = texts(project)
    code, diff, said = run_migrate(".")
    assert (code, texts(project)) == (0, before)
    assert "To check by hand:\na.py:2:" not in said
    assert "2 files, 5 lines of the diff; `--write` makes these edits" in said
    subprocess.run(["git", "apply"], input=diff.encode(), check=True)
    patched = texts(project)
    git(project, "checkout", ".")
    assert run_migrate_write(".")[0] == 0
    assert texts(project) == patched
    assert patched["a.py"] == 'import lumen\nx = lumen.Trainer(accelerator="gpu", devices=2), lumen.CLI'
    assert patched[["ignored", "b.py"][1]] == "import lightning\n"


def test_a_second_run_prints_no_edit(project):
    run_migrate_write(".")
    git(project, "commit", "-qam", "b")
    code, diff, said = run_migrate(".")
    assert (code, diff) == (0, "")
    assert said == "nothing to edit; 0 places to check by hand\n"


def test_edits_that_git_cannot_undo_are_refused(project):
    (project / "a.py").write_text("import lightning as L  # new\n")
    (project / "new.py").write_text("import lightning\n")
    before = texts(project)
    code, said = run_migrate_write(".")
    assert code == 2
    assert "a.py has changes that are not committed" in said
    assert "new.py is not in git" in said
    assert texts(project) == before
    assert run_migrate_write(".", "--force")[0] == 0
    assert texts(project)["a.py"] == "import lumen  # new\n"


@pytest.mark.parametrize("setting", ["core.fsmonitor", "filter.bad.clean", "filter.bad.process", "core.hooksPath"])
def test_a_hostile_git_config_runs_nothing(project, setting):
    program = project / ".git/hostile/post-index-change"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\ntouch executed\n")
    program.chmod(0o700)
    git(project, "config", setting, str(program if setting != "core.hooksPath" else program.parent))
    (project / ".gitattributes").write_text("*.py filter=bad\n")
    (project / "a.py").touch()  # git compares its copy with the file
    assert run_migrate_write(".")[0] == 0
    assert texts(project)["a.py"].startswith("import lumen")
    assert not (project / "executed").exists()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(_page(Path(directory)))
