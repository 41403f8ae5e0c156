"""Export of checkpoints for other programs: the command `lumen export`, plain weights, and other formats."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write the weights of a checkpoint as plain safetensors.",
    "lumen.tools.export.command",
    example="lumen export runs/mine --output mine.safetensors",
)
