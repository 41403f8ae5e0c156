"""What is asked of any engine: which command, on how much, under which name."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import final


def quoted(*words: str) -> str:
    """Return words as bash reads them: printable and in one line, whatever bytes they have."""
    return " ".join(shlex.quote(word) if word.isprintable() else f"$'{_escaped(word)}'" for word in words)


def _escaped(word: str) -> str:
    found = word.encode("utf-8", "surrogateescape")
    return "".join(f"\\{byte:03o}" if byte in b"\\'" or not 32 <= byte < 127 else chr(byte) for byte in found)


@final
@dataclass(frozen=True)
class Job:
    """A job, before it is written in the words of an engine.

    Attributes:
        name: What the engine lists it by: at most 50 small letters, digits and inner hyphens.
        words: The command of Lumen and its words, such as `fit --config run.yaml`.
        nodes: Number of nodes, >= 1.
        gpus_per_node: Number of GPUs on each, >= 0.
        processes_per_node: Number of processes on each, >= 1.
        restarts: How often the engine starts it again after a failure, >= 0.
        python: The interpreter where the engine shares this machine's files.
        directory: The working directory, likewise.
        gpu: Kind of GPU, or None.
        time: The most time to take, as `HH:MM:SS`, or None.
        partition: Partition of SLURM, or None.
        account: Account of SLURM, or None.
        image: Container image, or None.
        volume: Claim of Kubernetes that is mounted at `/runs`, or None.
        setup: Command to run before, or None.
    """

    name: str
    words: tuple[str, ...]
    nodes: int
    gpus_per_node: int
    processes_per_node: int
    restarts: int
    python: str
    directory: str
    gpu: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    image: str | None = None
    volume: str | None = None
    setup: str | None = None

    @property
    def seconds(self) -> int | None:
        """The most time to take, in seconds."""
        if self.time is None:
            return None
        hours, minutes, seconds = map(int, self.time.split(":"))
        return hours * 3600 + minutes * 60 + seconds
