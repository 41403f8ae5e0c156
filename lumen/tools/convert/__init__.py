"""Weights of a pickle as safetensors: the command `lumen convert`, and the one module that reads pickles."""

from lumen.cli.commands import Command

COMMAND = Command(
    "Write the weights of a pickle, such as Lightning's .ckpt, as safetensors.", "lumen.tools.convert.command"
)
