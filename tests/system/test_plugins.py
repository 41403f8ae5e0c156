"""Plugins: packages register commands, loggers and callbacks, in the same way as Lumen itself."""

import os
import re
import subprocess
import sys
import textwrap
import tomllib

import pytest

from tests.helpers import ROOT
from tests.helpers.pages import find_programs

PAGE = (ROOT / "docs/guides/plugins.md").read_text()
PROJECT = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.S)[1])["project"]
FILES = re.findall(r"^`greenlight/(\w+\.py)` ", PAGE, re.M)


def install(folder, name="greenlight", **groups):
    """Write the files that pip writes for a package's entry points."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [line for group, each in groups.items() for line in (f"[lumen.{group}]", *(f"{k} = {v}" for k, v in each))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture
def greenlight(tmp_path):
    """Return the folder in which the page's package is installed."""
    folder = tmp_path / "packages"
    points = {name.removeprefix("lumen."): each.items() for name, each in PROJECT["entry-points"].items()}
    install(folder, **points)
    (folder / "greenlight").mkdir()
    for name, text in zip(FILES, find_programs("docs/guides/plugins.md"), strict=True):
        (folder / "greenlight" / name).write_text(text)
    return folder


def lumen(*words, path, code=0, python=("-m", "lumen")):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *python, *words], env=environment, capture_output=True, text=True, cwd=path[0]
    )
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_a_package_adds_a_command(greenlight):
    assert "\n  energy      Print the energy of a run.\n" in lumen("--help", path=[greenlight])
    assert lumen("energy", "runs/a", path=[greenlight]) == "runs/a: 3 Wh\n"
    assert "energy" in lumen("completion", "bash", path=[greenlight])


def test_a_package_adds_a_logger_and_callbacks(greenlight):
    program = textwrap.dedent("""
        import lumen
        from tests.helpers.tasks import Regression, loader

        trainer = lumen.Trainer(logger="lines", max_steps=2, log_every_n_steps=1, enable_progress_bar=False)
        trainer.fit(Regression(), loader())
    """)
    said = lumen("-c", program, path=[greenlight], python=()).splitlines()
    assert [line.split(" [")[0] for line in said if line.startswith(("logged", "measured"))][-3:] == [
        "logged 1",
        "logged 2",
        "measured 2 steps",
    ]


@pytest.mark.parametrize("broken", ["__init__.py", "command.py"])
def test_a_broken_command_is_one_error(greenlight, broken):
    (greenlight / "greenlight" / broken).write_text("import nowhere\n")
    assert lumen("energy", path=[greenlight], code=2) == (
        "error: the command energy, registered by greenlight, cannot be imported (ModuleNotFoundError: No module named "
        "'nowhere'). Repair or uninstall greenlight.\n"
    )
    assert "Dry-run a config" in lumen("--help", path=[greenlight])


def test_two_packages_with_one_command_are_an_error(greenlight, tmp_path):
    install(tmp_path / "other", "redlight", commands=[("energy", "redlight:ENERGY"), ("fit", "redlight:FIT")])
    path = [greenlight, tmp_path / "other"]
    said = "error: the command energy is registered by greenlight and redlight. Uninstall one of these packages.\n"
    assert lumen("energy", path=path, code=2) == said
    assert "Train." in lumen("fit", "--help", path=path).replace("\n", " ")


def test_renamed_distribution_may_be_registered_twice(tmp_path):
    """An older installation of Lumen under a different name registers the same commands."""
    install(tmp_path, "lumen", commands=[("check", "lumen.tools.check:COMMAND")])
    install(tmp_path, "lumen-train", commands=[("check", "lumen.tools.check:COMMAND")])
    assert "Dry-run a config" in lumen("--help", path=[tmp_path])
    assert "usage: lumen check" in lumen("check", "--help", path=[tmp_path])


def test_without_metadata_the_error_says_to_install():
    program = """if True:
        import importlib.metadata, sys
        importlib.metadata.MetadataPathFinder.find_distributions = lambda *_: []
        from lumen.cli import main
        sys.exit(main(["check"]))
    """
    said = lumen("-c", program, path=[ROOT], python=(), code=2)
    assert said == (
        "error: lumen has no command check. The installed metadata of Lumen is missing or old: run pip install "
        f"--editable {ROOT}\n"
    )
