"""The command line: `lumen COMMAND`."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from importlib import import_module

from lumen.console import stderr, stdout
from lumen.distributed import worker
from lumen.errors import HUNG, ConfigError, LumenError, ProcessStuck
from lumen.errors.arguments import did_you_mean
from lumen.internals.garbage import only_young_collected
from lumen.version import __version__

VERBOSE = "LUMEN_DEBUG"  # what `--verbose` sets, for the processes of the run too
COMMANDS = {
    "fit": "Train.",
    "validate": "Evaluate on the validation data.",
    "test": "Evaluate on the test data.",
    "predict": "Predict; text is printed.",
}
LOOKS = {
    "check": "Look at a configuration before a long run: data, first steps, schedules, room, time.",
    "verify": "Prove the promises of Lumen on your own task and data.",
}
WITHOUT_CONFIG = {
    "export": "Write the weights of a checkpoint as plain safetensors.",
    "convert": "Write the weights of a pickle, such as Lightning's .ckpt, as safetensors.",
    "init": "Begin a project: a task, data, a config and a test, which train at once.",
    "migrate": "Edit a project that was written for PyTorch Lightning: imports, arguments, hooks, configs.",
    "report": "Write runs as one HTML file that can be mailed: curves, settings, time, log.",
    "runs": "List runs and their checkpoints.",
    "diff": "Compare two runs or configs: where their trainings part, down to the operator.",
    "replay": "Make one step of a run again and compare it with what the run recorded.",
    "completion": "Print a script that makes bash, zsh or fish complete the words of lumen.",
    "submit": "Write a job of SLURM, Ray, Kubernetes or SkyPilot that runs a command, and submit it.",
}


def main(args: list[str] | None = None) -> int:
    """Run one command, by default that of the process's own command line.

    Returns:
        The exit code: 0; 2 for a wrong command line or configuration; 70 where a process hangs; 1 for any other error
        of Lumen; 130 for Ctrl-C. An error of the user's own code is 1 too, and shown without the frames of libraries;
        it is raised where words are given, and where a debugger waits for it.
    """
    try:
        return _dispatch(sys.argv[1:], own=True) if args is None else _dispatch(args, own=False)
    except KeyboardInterrupt:
        return 130
    except LumenError as error:
        return tell(error)
    except Exception as error:
        if args is not None or sys.gettrace() is not None or sys.flags.interactive:
            raise
        from lumen.cli.users_error import show

        show(error)
        return 1
    finally:
        stdout.flush()  # here, where a closed pipe is no error, and not when Python exits


def tell(error: LumenError) -> int:
    """Print an error, or leave that to who has started this process; returns the exit code."""
    if os.environ.get(VERBOSE) == "1":
        traceback.print_exc()
    text = "\n".join([f"error: {error}", *getattr(error, "__notes__", ())])
    if not worker.report(error, text):
        print(text, file=stderr)
    return 2 if isinstance(error, ConfigError) else HUNG if isinstance(error, ProcessStuck) else 1


def _dispatch(args: list[str], *, own: bool) -> int:
    args = _heard(without_launchers(args))
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        ours, others = (
            [f"  {command:{width}}  {summary}" for command, summary in each.items()]
            for each in (COMMANDS | LOOKS, WITHOUT_CONFIG)
        )
        head = "lumen COMMAND --config FILE [--KEY VALUE ...]"
        more = "lumen COMMAND --help says more; with --verbose errors show every frame."
        print(head, *ours, "without a config:", *others, more, sep="\n", file=stdout)
        return 0
    command, *words = args
    if command == "--version":
        print(f"lumen {__version__}", file=stdout)
        return 0
    known = [*COMMANDS, *LOOKS, *WITHOUT_CONFIG]
    if command not in known:
        hint = did_you_mean(command, known) or " lumen --help lists them."
        raise ConfigError(f"lumen has no command {command}.{hint}")
    with only_young_collected():
        run = _command(command)
    if own:
        gc.freeze()  # what there is now stays until the end: no need to look through it again and again

    return run(words)


def _heard(words: list[str]) -> list[str]:
    """A command line without `--verbose`, which is for this process and for those that it starts."""
    own = words.index("--") if "--" in words else len(words)  # what follows is another command line
    if "--verbose" in words[:own]:
        os.environ[VERBOSE] = "1"
    return [word for word in words[:own] if word != "--verbose"] + words[own:]


def without_launchers(words: list[str]) -> list[str]:
    """A command line without what `torch.distributed.launch` puts before it; the environment says the same."""
    rank = os.environ.get("LOCAL_RANK")
    return [word for word in words if word not in (f"--local-rank={rank}", f"--local_rank={rank}")]


def _command(name: str) -> Callable[[list[str]], int]:
    """Import what runs a command, which takes seconds, for torch: not before it is needed."""
    if name in COMMANDS:
        from lumen.cli import command_line

        return partial(command_line.run, name)
    run: Callable[[list[str]], int] = import_module(place_of(name)).run
    return run


def place_of(name: str) -> str:
    """The module of a command that is none of the four loops."""
    if name in ("verify", "diff", "replay"):
        return f"lumen.tools.proof.{name}"
    return "lumen.tools.completion" if name == "completion" else f"lumen.tools.{name}.command"
