"""Table before the reference: the important names of `Trainer` and `TaskModule`, and Lumen's additions."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch import nn

from lumen import TaskModule, Trainer
from tests.helpers import ROOT

PAGE = (ROOT / "docs/site/trainer.md").read_text()
#: Classes, and the files of Lightning that define their members.
CLASSES = {
    Trainer: ("pytorch/trainer/**/*.py",),
    TaskModule: (
        "pytorch/core/module.py",
        "pytorch/core/hooks.py",
        "pytorch/core/mixins/hparams_mixin.py",
        "fabric/utilities/device_dtype_mixin.py",
    ),
}
LIGHTNING_1 = {"add_argparse_args", "from_argparse_args"}  # The error names the replacement.


def list_public_members(kind):
    """Return the public members of a class, without those in a plain module."""
    annotated = {name for each in kind.__mro__ for name in vars(each).get("__annotations__", ())}
    plain = {*dir(nn.Module), *nn.Module.__annotations__}
    return {name for name in {*dir(kind), *annotated} - plain if not name.startswith("_") and not name.isupper()}


def read_lightning_names(patterns):
    """Return the names that Lightning's files define or assign, read as text: importing them takes seconds."""
    home = Path(find_spec("lightning").origin).parent
    text = "\n".join(path.read_text() for pattern in patterns for path in home.glob(pattern))
    return {*re.findall(r"^    def (\w+)", text, re.M), *re.findall(r"\b(?:self|trainer)\.(\w+)(?:: .+?)? = ", text)}


@pytest.mark.parametrize("kind", CLASSES)
def test_table_of_twenty_names_members(kind):
    (section,) = re.findall(rf"^## Twenty names of `{kind.__name__}`\n(.*?)^## ", PAGE, re.S | re.M)
    names = re.findall(r"^\| `(\w+)` \|", section, re.M)
    assert len(names) == 20
    assert {*names} <= list_public_members(kind)


@pytest.mark.skipif(find_spec("lightning") is None, reason="not proven here: it needs Lightning")
@pytest.mark.parametrize("kind", CLASSES)
def test_members_are_lightnings_or_listed(kind):
    own = {*re.findall(rf"^\| `{kind.__name__}` \| `(\w+)` \|", PAGE, re.M)}
    assert own == list_public_members(kind) - read_lightning_names(CLASSES[kind]) - LIGHTNING_1
