"""Folders of tests: each one states the needs of its tests, so that the everyday commands stay quick."""

import ast

import pytest

from tests.helpers import ROOT

ROOMS = ("unit", "fit", "distributed", "system", "promises", "ecosystem", "hydra", "installed")
#: Folders in `unit` and `fit`: the packages of Lumen, the examples, and the pages whose programs run.
FOLDERS = {path.parent.name for path in ROOT.glob("lumen/*/__init__.py")} | {"datamodules", "models", "pages"}
TREES = {
    path.relative_to(ROOT / "tests").as_posix(): ast.parse(path.read_text())
    for path in sorted((ROOT / "tests").rglob("*.py"))
    if "projects" not in path.parts and path.stat().st_size  # these projects have tests for Lightning
}


def list_test_files(*rooms):
    return [pytest.param(tree, id=name) for name, tree in TREES.items() if name.split("/")[0] in rooms]


def list_imports(tree):
    """Return the modules that the code of a file imports, at any place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def list_tests(tree):
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def test_folders_of_tests_are_packages():
    files = {name for name, tree in TREES.items() if list_tests(tree)}
    assert {name for name in TREES if name.split("/")[-1].startswith("test_")} == files
    for name in files:
        room, *folders = name.split("/")[:-1]
        assert room in ROOMS, name
        assert not folders or (room in ("unit", "fit") and len(folders) == 1 and folders[0] in FOLDERS), name


@pytest.mark.parametrize("tree", list_test_files("unit", "fit"))
def test_units_and_fits_open_no_group_of_processes(tree):
    assert [test.name for test in list_tests(tree) if "group" in [arg.arg for arg in test.args.args]] == []
    assert not {"tests.helpers.group.run_on_ranks", "tests.helpers.group.Group"} & {*list_imports(tree)}


@pytest.mark.parametrize("tree", list_test_files("unit", "fit"))
def test_units_and_fits_start_no_program(tree):
    starts = {"subprocess", "pty", "tests.helpers.programs"}
    assert not {name for name in list_imports(tree) if name in starts or name.rpartition(".")[0] in starts}


@pytest.mark.parametrize("tree", list_test_files("unit"))
def test_units_start_no_process(tree):
    starts = {"multiprocessing", "torch.multiprocessing"}
    assert not {name for name in list_imports(tree) if name in starts or name.rpartition(".")[0] in starts}


TESTS = {f"tests.{name[:-3].replace('/', '.')}": tree for name, tree in TREES.items() if list_tests(tree)}


@pytest.mark.parametrize("tree", list_test_files("helpers", *ROOMS))
def test_shared_test_code_is_in_helpers(tree):
    known = {name for name, each in TESTS.items() if each is not tree}
    assert {name for name in list_imports(tree) if name in known or name.rpartition(".")[0] in known} == set()
