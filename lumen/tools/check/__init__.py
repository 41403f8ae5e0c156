"""`lumen check`: a dry run of a config on its first batches, which writes nothing."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Dry-run a config: check data, first steps, schedules, disk space and run time.",
    "lumen.tools.check.command",
    has_config=True,
    example="lumen check --config mine.yaml",
)
