"""`lumen init`: writes a small starter project."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Create a small project that trains: a task, a data module, a config and a test.",
    "lumen.tools.init.command",
    example="lumen init mine",
)
