"""`lumen submit`: writes the job file of a cluster's own engine, and gives it to that."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write a job of SLURM, Ray, Kubernetes or SkyPilot that runs a command, and submit it.",
    "lumen.tools.submit.command",
)
