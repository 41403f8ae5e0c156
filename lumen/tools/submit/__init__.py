"""`lumen submit`: writes a job file for SLURM, Ray, Kubernetes or SkyPilot, and submits the job."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write a job of SLURM, Ray, Kubernetes or SkyPilot that runs a command, and submit it.",
    "lumen.tools.submit.command",
)
