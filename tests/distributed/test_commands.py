"""Options of examples for two devices: the examples train on two processes."""

import contextlib
import shlex

import pytest

from lumen.cli import main
from tests.helpers.documented_commands import SHORT, SOURCES, find_options, find_runs, make_home, train

OFFERS = [
    (name, options)
    for name in SOURCES
    if name.endswith(".yaml")
    for options in find_options(name)
    if "--trainer.devices 2" in options
]


@pytest.mark.usefixtures("program_directory")
@pytest.mark.parametrize(("name", "options"), OFFERS, ids=[name for name, _ in OFFERS])
def test_options_for_two_devices_train(name, options, group, tmp_path):
    make_home(tmp_path)
    for needed in find_runs(f"lumen fit --config {name}"):
        train(needed)
    words = ["fit", "--config", name, *shlex.split(options), *SHORT["fit"]]
    assert group(2).run(run_in, tmp_path, words) == [0, 0]


def run_in(home, words):
    with contextlib.chdir(home):
        return main(words)
