"""Conversion of pickled weights to safetensors: the command `lumen convert`, and the only reader of pickles."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write the weights of a pickle, such as Lightning's .ckpt, as safetensors.",
    "lumen.tools.convert.command",
    example="lumen convert old.ckpt new.safetensors",
)
