"""`lumen migrate`: edits a Lightning project for Lumen, shows the edits as a diff, and lists the manual work left."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Edit a project for PyTorch Lightning, or scripts for the Trainer of transformers.",
    "lumen.tools.migrate.command",
    example="lumen migrate .",
)
