"""The command `lumen submit`: checks a command of Lumen, writes a job that runs it, and submits the job."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, final

from lumen.cli.command_line import CheckedCommand
from lumen.cli.commands import LOOPS, Words
from lumen.console import stderr, stdout
from lumen.errors import ConfigError
from lumen.internals.atomic_files import replace_file
from lumen.internals.masking import mask_words
from lumen.tools.submit import COMMAND, engines
from lumen.tools.submit.engines import Job

_MORE = (
    "The command, such as `fit --config run.yaml`, stands after `--` and is checked first. One file is written, which "
    "can be read, edited and submitted by hand. Exit code: that of the engine's own program."
)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # a name that all engines accept


@final
class Engine(NamedTuple):
    """Engine that runs jobs.

    Attributes:
        suffix: Suffix of the engine's job files.
        text: Function that returns a job as the text of a job file.
        program: The program that submits a job file, and its arguments before the file.
        without: Options that the engine does not support, each with an alternative.
        needs: Python package that submission needs, or None to look for `program` itself.
    """

    suffix: str
    text: Callable[[Job], str]
    program: tuple[str, ...]
    without: Mapping[str, str]
    needs: str | None = None


_NO_QUEUE = "it has none"
ENGINES = {
    "slurm": Engine(".sbatch", engines.make_slurm_script, ("sbatch",), {
        "image": "the processes run in the environment that submits; for containers edit the line of srun",
        "volume": "the processes see the files of their node",
    }),
    "ray": Engine(".ray.py", engines.make_ray_program, (sys.executable, "-P"), {
        "time": "Ray sets jobs no limit; use --trainer.max_time after --", "partition": _NO_QUEUE, "account": _NO_QUEUE,
        "image": "set that of the cluster", "volume": "workers see the files of their node",
        "setup": "what the cluster was set up with counts",
    }, needs="ray"),
    "k8s": Engine(".k8s.yaml", engines.make_kubernetes_job, ("kubectl", "apply", "-f"), {
        "partition": _NO_QUEUE, "account": _NO_QUEUE, "setup": "put it into the image",
    }),
    "sky": Engine(".sky.yaml", engines.make_skypilot_task, ("sky", "jobs", "launch"), {
        "time": "SkyPilot sets jobs no limit; use --trainer.max_time after --",
        "partition": _NO_QUEUE, "account": _NO_QUEUE, "volume": "save to a bucket, see docs/guides/object-stores.md",
    }),
}  # fmt: skip


def options() -> Words:
    """Return the parser of the command's options."""
    parser = Words("submit", COMMAND, "--on slurm|ray|k8s|sky [--nodes N] ... -- fit --config FILE ...", _MORE)
    parser.add_argument("--on", required=True, choices=ENGINES, help="The engine of the cluster.")
    parser.add_argument("--nodes", type=int, default=1, help="Number of nodes. Default: 1.")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="GPUs on each; 0: train on the CPU. Default: 1.")
    parser.add_argument("--tasks-per-node", type=int, help="Processes on each node. Default: one per GPU, else 1.")
    parser.add_argument("--gpu", help="Kind of GPU, in the engine's words: H100.")
    parser.add_argument("--time", help="The most time to take: HH:MM:SS. SLURM puts the job back into its queue then.")
    parser.add_argument("--partition", help="Partition of SLURM.")
    parser.add_argument("--account", help="Account of SLURM.")
    parser.add_argument("--image", help="Container image with the project in its working directory.")
    parser.add_argument("--volume", help="Claim of Kubernetes to mount at /runs.")
    parser.add_argument("--setup", help="Shell command to run before, such as `source env/bin/activate`.")
    parser.add_argument("--max-restarts", type=int, default=3, help="Restarts after failures. Default: 3. Not SLURM's.")
    parser.add_argument("--name", help="Name of the job. Default: the config's.")
    parser.add_argument("--file", help="File to write. Default: the job's name, with .sbatch, .ray.py, .k8s.yaml, ...")
    parser.add_argument("--overwrite", action="store_true", help="Replace a file that has other text.")
    parser.add_argument("--dry-run", action="store_true", help="Print the file; write and submit nothing.")
    return parser


def run(words: list[str]) -> int:
    """Write a job, submit it, and return the exit code."""
    end = words.index("--") if "--" in words else len(words)
    given, inner = options().read(words[:end]), words[end + 1 :]
    engine = ENGINES[given.on]
    for option in ("nodes", "gpus_per_node", "tasks_per_node", "max_restarts"):
        least, value = int(option in ("nodes", "tasks_per_node")), getattr(given, option)
        if value is not None and value < least:
            raise ConfigError(f"--{option.replace('_', '-')}: must be at least {least}, found {value}.")
    for option, instead in engine.without.items():
        if getattr(given, option) is not None:
            raise ConfigError(f"--{option}: not for --on {given.on}: {instead}. Leave it out.")
    for option in ("gpu", "partition", "account", "image", "volume"):
        if (text := getattr(given, option)) is not None and not re.fullmatch(r"[!-~]+", text):
            raise ConfigError(f"--{option}: expected a word of printable ASCII characters, found {text!r}.")
    if given.time is not None and not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", given.time):
        raise ConfigError(f"--time: expected HH:MM:SS, found {given.time}.")
    if given.on == "k8s" and given.image is None:
        raise ConfigError("--image: Kubernetes needs one, with Lumen and the project in its working directory.")
    if given.on == "sky" and given.gpus_per_node and given.gpu is None:
        raise ConfigError("--gpu: SkyPilot must know the kind, as H100. `sky show-gpus` lists them.")
    processes = given.tasks_per_node or given.gpus_per_node or 1
    name, inner = _check_command(inner, given.nodes, processes)
    name = given.name or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "lumen"
    if not _NAME.fullmatch(name) or len(name) > 50:
        raise ConfigError(f"--name: expected at most 50 small letters, digits and inner hyphens, found {name}.")
    job = Job(
        name, tuple(inner), given.nodes, given.gpus_per_node, processes, given.max_restarts, sys.executable,
        os.getcwd(), given.gpu, given.time, given.partition, given.account, given.image, given.volume, given.setup,
    )  # fmt: skip
    if given.dry_run:
        print(engine.text(job), end="", file=stdout)
        return 0
    path = Path(given.file or f"{name}{engine.suffix}")
    _write_job(path, engine.text(job), [*engine.program, str(path)], job.words, overwrite=given.overwrite)
    return _submit_job(engine, path)


def _check_command(inner: list[str], nodes: int, processes: int) -> tuple[str, list[str]]:
    """Return the name of the run and the words of the job's command, checked before the job is queued.

    Raises:
        ConfigError: The command is missing or wrong, or asks for other numbers of processes than the job has.
    """
    if not inner or inner[0] not in LOOPS:
        found = f"found {inner[0]}" if inner else "there is none"
        raise ConfigError(f"lumen submit: expected {' or '.join(LOOPS)} after --, {found}.")
    trainer = CheckedCommand(args=inner).settings.trainer
    for option, asked, has, ours in (
        ("devices", trainer.devices, processes, "--gpus-per-node or --tasks-per-node"),
        ("num_nodes", trainer.num_nodes, nodes, "--nodes"),
    ):
        if asked is not None and str(asked) not in ("auto", "-1", str(has)):
            raise ConfigError(f"trainer.{option}: {asked} asked for, but {ours} says {has}. Leave {option} out.")
    if inner[0] == "fit" and trainer.resume is None:
        inner = [*inner, "--trainer.resume", "auto"]
    return trainer.name or inner[0], inner


def _write_job(path: Path, text: str, command: list[str], words: Sequence[str], *, overwrite: bool) -> None:
    """Write a job file, but do not replace an edited one. With secrets, only the owner can read the file.

    Raises:
        ConfigError: The file exists with other text, or cannot be written.
    """
    wanted = text.encode()
    try:
        if not overwrite and path.exists() and path.read_bytes() != wanted:
            raise ConfigError(
                f"{path} is there, with other text than this job has. Submit it as it is: {shlex.join(command)}; or "
                "replace it: --overwrite; or write another file: --file PATH."
            )
        with replace_file(path) as beside:
            beside.touch(0o666 if mask_words(words) == [*words] else 0o600)
            beside.write_bytes(wanted)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}. Say where: --file PATH.") from error


def _submit_job(engine: Engine, path: Path) -> int:
    command = [*engine.program, str(path)]
    print(f"written: {path}; submitting: {shlex.join(command)}", file=stderr)
    if (find_spec(engine.needs) if engine.needs else shutil.which(command[0])) is None:
        said = f"{engine.needs or command[0]} is not installed here. The job is in {path}. Where it is, run:"
        raise ConfigError(f"{said} {shlex.join(command)}")
    return subprocess.run(command, check=False).returncode
