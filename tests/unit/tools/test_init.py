"""`lumen init`: the names that it derives, and the files that it does not change."""

import ast
from pathlib import Path

import pytest
import yaml

from lumen.cli import main


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def packages(project):
    return [path.parent.name for path in Path(project).glob("*/__init__.py")]


@pytest.mark.parametrize(
    ("directory", "package"),
    [
        ("mine", "mine"), ("My Project-2", "my_project_2"), ("3d", "my_3d"), ("class", "my_class"), ("größe", "größe"),
        ("torch", "my_torch"), ("json", "my_json"), ("tests", "my_tests"), ("...!", "project"), ("a/b/deep", "deep"),
    ],
)  # fmt: skip
def test_directory_becomes_importable_package_name(directory, package):
    assert main(["init", directory]) == 0
    assert packages(directory) == [package]
    assert (
        yaml.safe_load(Path(directory, f"{package}.yaml").read_text())["data"]["class_path"] == f"{package}.data.Text"
    )


def test_empty_directory_does_not_make_its_name_taken():
    Path("mine").mkdir()
    assert main(["init", "mine"]) == 0
    assert packages("mine") == ["mine"]


@pytest.mark.parametrize("template", ["finetune", "gpt", "images", "table", "transformers"])
def test_project_never_mentions_its_template(template):
    assert main(["init", "mine", "--template", template]) == 0
    written = {path.relative_to("mine").as_posix(): path.read_text() for path in Path("mine").rglob("*.*")}
    assert not [name for name, text in written.items() if "starter" in name + text]
    shared = {".gitignore", "README.md", "pyproject.toml", "mine.yaml", "tests/test_mine.py"}
    assert written.keys() - {"iris.csv", "mine/example.py"} == shared | {
        f"mine/{name}.py" for name in ("__init__", "data", "task")
    }
    for name, text in written.items():
        if name.endswith(".py"):
            imported = [node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            assert not [each for each in imported if each.startswith("lumen.")], name  # the public names are enough


def test_non_empty_directory_is_refused_and_kept(capsys):
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep")
    assert main(["init", "mine"]) == 2
    assert capsys.readouterr().err == (
        "error: mine is not empty: the directory contains notes.txt. Name a new or empty directory.\n"
    )
    assert [path.name for path in Path("mine").iterdir()] == ["notes.txt"]


def test_a_file_is_no_place_for_a_project(capsys):
    Path("mine").write_text("keep")
    assert main(["init", "mine"]) == 2
    assert "mine is a file" in capsys.readouterr().err
    assert Path("mine").read_text() == "keep"


def test_current_directory_gives_package_name(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["init", "."]) == 0
    assert packages(".") == ["here"]


@pytest.mark.parametrize(
    ("words", "said"),
    [([], "NAME"), (["mine", "--template", "gtp"], "invalid choice: 'gtp'"), (["mine", "--templat"], "--template?")],
)
def test_a_wrong_command_line_makes_nothing(words, said, capsys):
    assert main(["init", *words]) == 2
    assert said in capsys.readouterr().err
    assert list(Path().iterdir()) == []
