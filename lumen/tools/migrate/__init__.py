"""`lumen migrate`: the edits that make a project of Lightning's one of Lumen's, as a diff, and what to think about."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Edit a project that was written for PyTorch Lightning: imports, arguments, hooks, configs.",
    "lumen.tools.migrate.command",
)
