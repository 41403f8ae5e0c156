"""Reports of runs, as one HTML file that needs no network."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write runs as one HTML file to share: curves, settings, time, log.",
    "lumen.tools.report.command",
    example="lumen report runs/mine",
)
