"""`lumen check`: what can be known of a training before it begins, by its own first batches; nothing is written."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Look at a configuration before a long run: data, first steps, schedules, room, time.",
    "lumen.tools.check.command",
    has_config=True,
)
