"""`lumen runs`: which runs there are, how they stand, what they were set to, which of their checkpoints are good."""

from lumen.cli.commands import Command

COMMAND = Command("List runs and their checkpoints.", "lumen.tools.runs.command")
