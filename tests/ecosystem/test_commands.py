"""Commands of the examples of timm and torchvision: each one runs."""

import pytest

import tests.helpers.torchvision_on_cpu  # noqa: F401
from tests.helpers import OF_TORCHVISION
from tests.helpers.documented_commands import find_commands, make_home, run_command


@pytest.mark.usefixtures("program_directory")
@pytest.mark.parametrize("name", sorted(OF_TORCHVISION))
def test_commands_of_an_example_run(name, tmp_path):
    make_home(tmp_path)
    for line in find_commands(f"models/{name}.yaml"):
        run_command(line)
