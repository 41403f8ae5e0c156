"""Collect the names of PyTorch Lightning that Lumen lacks, with their replacements, for the migration guide."""

import re
from collections.abc import Iterator, Mapping

from lumen.errors import lightning_names as names
from lumen.task import hooks
from lumen.tools.migrate.names import ELSEWHERE

BEGINNING = """# Lightning's names

Names of PyTorch Lightning that Lumen lacks or calls differently, of all versions of Lightning. Using
such a name in Lumen is an error with the same text. Names that are not in this list keep their name
and meaning, or are described on the [pages by subject](from-lightning.md).
"""


def tables() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the heading of each table, and its replacements by name."""
    renamed = {name: f"`{new}`" for name, new in {**names.RENAMED, **ELSEWHERE}.items()}
    yield "Classes", {**renamed, **names.INSTEAD_OF_CLASSES}
    yield "Arguments of Trainer", names.INSTEAD
    yield "Attributes and methods of Trainer", names.ATTRIBUTES
    yield "Hooks and methods of LightningModule", hooks.NOT_CALLED["task"]
    yield "Hooks of LightningDataModule", hooks.NOT_CALLED["data module"]
    yield "Hooks of Callback", hooks.NOT_CALLED["callback"]
    yield "Arguments of ModelCheckpoint", names.INSTEAD_IN_CHECKPOINTS
    yield "Attributes of ModelCheckpoint", names.ATTRIBUTES_OF_CHECKPOINTS
    yield "Arguments of self.log", names.INSTEAD_IN_LOG
    yield "Arguments of save_checkpoint", names.INSTEAD_IN_SAVE
    yield "Arguments of loggers", {name: text for name, text in names.INSTEAD_IN_LOGGERS.items() if name != "*"}
    yield "Methods of WandbLogger", names.ATTRIBUTES_OF_WANDB
    yield "Arguments of LightningCLI", names.INSTEAD_IN_CLI
    yield "Methods of LightningCLI", names.NOT_IN_CLI


def escape(text: str) -> str:
    """Return a message as Markdown in a cell of a table; code in backticks stays code."""
    return text if text.startswith("`") else re.sub(r"([_*|<])", r"\\\1", text)


def page() -> str:
    """Return the tables as Markdown."""
    parts = [BEGINNING]
    for heading, replacements in tables():
        rows = (f"| `{name}` | {escape(text)} |" for name, text in sorted(replacements.items()))
        parts.append("\n".join([f"## {heading}\n", "| in Lightning | in Lumen |", "|---|---|", *rows, ""]))
    return "\n".join(parts)
