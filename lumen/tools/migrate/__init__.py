"""`lumen migrate`: edits a Lightning project for Lumen, shows them as a diff, and lists what is left to do."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Edit a project that was written for PyTorch Lightning: imports, arguments, hooks, configs.",
    "lumen.tools.migrate.command",
)
