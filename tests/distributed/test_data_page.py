"""Programs of the page on third-party datasets: each does what the page says."""

import os
import re
from pathlib import Path

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs/guides/third-party-datasets.md").read_text()
SECTIONS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))


def find_programs(text):
    return re.findall(r"```python\n(.*?)```", text, re.S)


def execute_programs(*texts, found=None):
    """Execute all programs of some sections in order, and return the names they define."""
    found = found or {"__name__": "page"}
    for number, program in enumerate(program for text in texts for program in find_programs(text)):
        exec(compile(program, f"docs/guides/third-party-datasets.md, program {number}", "exec"), found)
    return found


HEAD = PAGE.partition("\n## ")[0]
HUGGING_FACE, TAR, STATE, PARTS = SECTIONS.values()


def test_every_program_of_page_is_tested():
    assert [len(find_programs(text)) for text in (HEAD, HUGGING_FACE, TAR, STATE, PARTS)] == [1, 2, 3, 1, 1]
    assert len(find_programs(PAGE)) == 8


@pytest.mark.filterwarnings("ignore:.*unclosed file:ResourceWarning")  # webdataset does not close its files
@pytest.mark.filterwarnings("ignore:.*part-[01].tar:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("title", SECTIONS)
def test_a_section_of_the_page_runs(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SECTIONS[title]
    if "import datasets" in text:
        pytest.importorskip("datasets")
    if "import webdataset" in text:
        pytest.importorskip("webdataset")
    found = execute_programs(HEAD, *([find_package_free_programs(TAR)] if text == PARTS else []), text)
    assert found["task" if "task" in found else "rest"].seen


def find_package_free_programs(text):
    """Return the programs about a tar that need no package."""
    return text.partition("Where files are far away")[0]


def test_uneven_shards_are_read_once_on_two_ranks(group, tmp_path):
    seen = group(2).run(parts, tmp_path)
    assert [sorted(each) for each, _ in seen] == [[0, 1, 2, 3, 4, 5, 6], [7, 8, 9]]
    assert [steps for _, steps in seen] == [3, 3]
    assert "the first reads 7 samples and the other 3, and the epoch has three steps" in PARTS


def parts(folder):
    os.chdir(folder)
    for rank in range(2):  # each writes the tars
        if rank == torch.distributed.get_rank():
            found = execute_programs(HEAD, find_package_free_programs(TAR).rpartition("task = Classify()")[0] + "```")
        torch.distributed.barrier()
    found = execute_programs(PARTS, found=found)
    return found["task"].seen, found["trainer"].global_step
