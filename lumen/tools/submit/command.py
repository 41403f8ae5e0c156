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
from lumen.cli.commands import LOOPS, CommandParser
from lumen.console import stderr, stdout
from lumen.errors import ConfigError
from lumen.internals.atomic_files import replace_file
from lumen.internals.masking import mask_words
from lumen.tools.submit import COMMAND, engines
from lumen.tools.submit.engines import Job

_DESCRIPTION = (
    "Give the command after `--`, such as `-- fit --config run.yaml`. Lumen checks the command and writes one file, "
    "which you can read, edit and submit by hand. Exit code: the exit code of the engine's program."
)
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")  # a name that all engines accept


@final
class Engine(NamedTuple):
    """Engine that runs jobs.

    Attributes:
        suffix: Suffix of the engine's job files.
        text: Function that returns a job as the text of a job file.
        program: The program that submits a job file, and its arguments before the file.
        unsupported: Options that the engine does not support, each with an alternative.
        package: Python package that submission needs, or None to look for `program` itself.
    """

    suffix: str
    text: Callable[[Job], str]
    program: tuple[str, ...]
    unsupported: Mapping[str, str]
    package: str | None = None


_NO_QUEUE = "the engine has no queues"
ENGINES = {
    "slurm": Engine(".sbatch", engines.make_slurm_script, ("sbatch",), {
        "image": "processes run in the environment that submits the job; for containers edit the srun line",
        "volume": "processes use the files of their node",
    }),
    "ray": Engine(".ray.py", engines.make_ray_program, (sys.executable, "-P"), {
        "time": "Ray has no time limit; use --trainer.max_time after --", "partition": _NO_QUEUE, "account": _NO_QUEUE,
        "image": "set the image of the cluster", "volume": "workers use the files of their node",
        "setup": "set up the cluster instead",
    }, package="ray"),
    "k8s": Engine(".k8s.yaml", engines.make_kubernetes_job, ("kubectl", "apply", "-f"), {
        "partition": _NO_QUEUE, "account": _NO_QUEUE, "setup": "put the setup into the image",
    }),
    "sky": Engine(".sky.yaml", engines.make_skypilot_task, ("sky", "jobs", "launch"), {
        "time": "SkyPilot has no time limit; use --trainer.max_time after --",
        "partition": _NO_QUEUE, "account": _NO_QUEUE, "volume": "save to a bucket, see docs/guides/object-stores.md",
    }),
}  # fmt: skip


def options() -> CommandParser:
    """Return the parser of the command's options."""
    parser = CommandParser(
        "submit", COMMAND, "--on slurm|ray|k8s|sky [--nodes N] ... -- fit --config FILE", _DESCRIPTION
    )
    parser.add_argument("--on", required=True, choices=ENGINES, help="The engine of the cluster.")
    parser.add_argument("--nodes", type=int, default=1, help="Number of nodes. Default: 1.")
    parser.add_argument("--gpus-per-node", type=int, default=1, help="GPUs on each node; 0 for the CPU. Default: 1.")
    parser.add_argument("--tasks-per-node", type=int, help="Processes on each node. Default: one per GPU, else 1.")
    parser.add_argument("--gpu", help="Kind of GPU as the engine names it, such as H100.")
    parser.add_argument("--time", help="Time limit as HH:MM:SS. SLURM then requeues the job.")
    parser.add_argument("--partition", help="SLURM partition.")
    parser.add_argument("--account", help="SLURM account.")
    parser.add_argument("--image", help="Container image with the project in its working directory.")
    parser.add_argument("--volume", help="Kubernetes volume claim to mount at /runs.")
    parser.add_argument("--setup", help="Shell command to run first, such as `source env/bin/activate`.")
    parser.add_argument(
        "--max-restarts", type=int, default=3, help="Restarts after failures, except by SLURM. Default: 3."
    )
    parser.add_argument("--name", help="Name of the job. Default: the name of the run.")
    parser.add_argument("--file", help="File to write. Default: the job's name, with .sbatch, .ray.py, .k8s.yaml, ...")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing file.")
    parser.add_argument("--dry-run", action="store_true", help="Print the job; write and submit nothing.")
    return parser


def run(words: list[str]) -> int:
    """Write a job, submit it, and return the exit code."""
    end = words.index("--") if "--" in words else len(words)
    args, command = options().read(words[:end]), words[end + 1 :]
    engine = ENGINES[args.on]
    for option in ("nodes", "gpus_per_node", "tasks_per_node", "max_restarts"):
        minimum, value = int(option in ("nodes", "tasks_per_node")), getattr(args, option)
        if value is not None and value < minimum:
            raise ConfigError(f"--{option.replace('_', '-')}: must be at least {minimum}, found {value}.")
    for option, advice in engine.unsupported.items():
        if getattr(args, option) is not None:
            raise ConfigError(f"--{option}: not supported by --on {args.on}: {advice}. Leave --{option} out.")
    for option in ("gpu", "partition", "account", "image", "volume"):
        if (text := getattr(args, option)) is not None and not re.fullmatch(r"[!-~]+", text):
            raise ConfigError(f"--{option}: expected a word of printable ASCII characters, found {text!r}.")
    if args.time is not None and not re.fullmatch(r"\d+:[0-5]\d:[0-5]\d", args.time):
        raise ConfigError(f"--time: expected HH:MM:SS, found {args.time}.")
    if args.on == "k8s" and args.image is None:
        raise ConfigError(
            "--image: Kubernetes needs an image with Lumen, and with the project in the working directory."
        )
    if args.on == "sky" and args.gpus_per_node and args.gpu is None:
        raise ConfigError("--gpu: SkyPilot needs a kind of GPU, such as H100. `sky show-gpus` lists the kinds.")
    processes = args.tasks_per_node or args.gpus_per_node or 1
    name, command = _check_command(command, args.nodes, processes)
    name = args.name or re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "lumen"
    if not _NAME.fullmatch(name) or len(name) > 50:
        raise ConfigError(f"--name: expected at most 50 lowercase letters, digits and inner hyphens, found {name}.")
    job = Job(
        name, tuple(command), args.nodes, args.gpus_per_node, processes, args.max_restarts, sys.executable,
        os.getcwd(), args.gpu, args.time, args.partition, args.account, args.image, args.volume, args.setup,
    )  # fmt: skip
    if args.dry_run:
        print(engine.text(job), end="", file=stdout)
        return 0
    path = Path(args.file or f"{name}{engine.suffix}")
    _write_job(path, engine.text(job), [*engine.program, str(path)], job.words, overwrite=args.overwrite)
    return _submit_job(engine, path)


def _check_command(command: list[str], nodes: int, processes: int) -> tuple[str, list[str]]:
    """Return the name of the run and the words of the job's command, checked before the job is queued.

    Raises:
        ConfigError: The command is missing or wrong, or asks for other numbers of processes than the job has.
    """
    if not command or command[0] not in LOOPS:
        found = command[0] if command else "no command"
        raise ConfigError(f"lumen submit: expected {' or '.join(LOOPS)} after --, found {found}.")
    trainer = CheckedCommand(args=command).settings.trainer
    for option, setting, number, source in (
        ("devices", trainer.devices, processes, "--gpus-per-node or --tasks-per-node"),
        ("num_nodes", trainer.num_nodes, nodes, "--nodes"),
    ):
        if setting is not None and str(setting) not in ("auto", "-1", str(number)):
            raise ConfigError(f"trainer.{option}: found {setting}, but {source} is {number}. Leave {option} out.")
    if command[0] == "fit" and trainer.resume is None:
        command = [*command, "--trainer.resume", "auto"]
    return trainer.name or command[0], command


def _write_job(path: Path, text: str, command: list[str], words: Sequence[str], *, overwrite: bool) -> None:
    """Write a job file, but do not replace an edited one. With secrets, only the owner can read the file.

    Raises:
        ConfigError: The file exists with other text, or cannot be written.
    """
    content = text.encode()
    try:
        if not overwrite and path.exists() and path.read_bytes() != content:
            raise ConfigError(
                f"{path} exists and differs from this job. Submit the existing file: {shlex.join(command)}; or replace "
                "the file: --overwrite; or write a new file: --file PATH."
            )
        with replace_file(path) as temporary:
            temporary.touch(0o666 if mask_words(words) == [*words] else 0o600)
            temporary.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}. Write a different file: --file PATH."
        ) from error


def _submit_job(engine: Engine, path: Path) -> int:
    command = [*engine.program, str(path)]
    print(f"written: {path}; submitting: {shlex.join(command)}", file=stderr)
    if (find_spec(engine.package) if engine.package else shutil.which(command[0])) is None:
        missing = engine.package or command[0]
        where = f"on a machine with {missing}"
        raise ConfigError(f"{missing} is not installed. The job is in {path}. Run {where}: {shlex.join(command)}")
    return subprocess.run(command, check=False).returncode
