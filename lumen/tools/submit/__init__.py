"""`lumen submit`: writes a job file for SLURM, Ray, Kubernetes or SkyPilot, and submits the job."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write a job for SLURM, Ray, Kubernetes or SkyPilot that runs a command, and submit the job.",
    "lumen.tools.submit.command",
    example="lumen submit --on slurm --nodes 2 --dry-run -- fit --config mine.yaml",
)
