"""`lumen init`: writes a small starter project."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Begin a project: a task, data, a config and a test, which train at once.", "lumen.tools.init.command"
)
