"""`lumen runs`: lists runs with their status and settings, and checks their checkpoints."""

from lumen.cli.commands import Command

COMMAND = Command("List runs and their checkpoints.", "lumen.tools.runs.command", example="lumen runs --sort val_loss")
