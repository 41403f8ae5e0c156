"""`lumen check`: a dry run of a config on its first batches, which writes nothing."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Look at a configuration before a long run: data, first steps, schedules, room, time.",
    "lumen.tools.check.command",
    has_config=True,
)
