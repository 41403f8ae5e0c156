"""Averages in place of a checkpoint's parameters: what a callback has kept, or the mean of several checkpoints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath

import torch

from lumen.checkpoint.format.folder import find_moments, read_info
from lumen.checkpoint.format.places import as_place
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.load.weights_source import WEIGHTS, open_here
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointMismatch, ConfigError

PARAMETERS = "parameters"
_SEVERAL = re.compile(r"(last|best):([0-9]+)")
_PACKED = torch.float4_e2m1fn_x2  # two numbers in a byte, which torch does not cast
_KEPT_BY = {"last": "keep_last", "best": "save_top_k"}


def averaged(
    checkpoint: Checkpoint, average: str | Sequence[str | PurePath] | None, processes: Processes | None = None
) -> Checkpoint:
    """A checkpoint whose parameters are read as averages. Collective: every one of `processes` must call this.

    Args:
        checkpoint: All of its sections can be read, but for means of checkpoints.
        average: "last:5": the mean of this checkpoint and the four before it in its directory; "best:3": the mean of
            the three best there, by the monitor; paths: the mean of these checkpoints, runs (their newest valid one) or
            safetensors files. Of a mean, integers and buffers other than running statistics are as in `checkpoint`.
            "EMA", "SWA" or another callback whose state holds tensors by the parameters' names (of several in one
            state, where it is in the checkpoint), "Lookahead" for its slow weights: what has no average is as in
            `checkpoint`. "parameters": the parameters of training. None: what the run's validations evaluated, its
            average if it had one.
        processes: Those that read together; default: this one alone.

    Raises:
        ConfigError: There is no average of this name, or there are several; there are fewer checkpoints than that.
        CheckpointMismatch: The checkpoints are not of one model.
        CheckpointDamaged: Bytes of one that was named by its path are not those that were saved.
    """
    processes = Processes() if processes is None else processes
    if average is None:
        return evaluated(checkpoint)
    if average == PARAMETERS:
        return checkpoint
    if not isinstance(average, str):
        return _mean_of(checkpoint, {str(each): open_here(as_place(str(each)), processes) for each in average})
    if several := _SEVERAL.fullmatch(average):
        found = _several(checkpoint, several[1], int(several[2]), processes)
        return _mean_of(checkpoint, {str(each.path): each for each in found})
    return processes.together(partial(_kept, checkpoint, average))


def evaluated(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that is read with the weights that validations evaluated: an average, or the parameters."""
    if (where := checkpoint.info.get("evaluated")) is None:
        return checkpoint
    kept, names = set(checkpoint.names("extra")), checkpoint.names("model")
    places = {name: f"{where}.{name}" for name in names}
    return checkpoint.with_averages({name: [(checkpoint, "extra", at)] for name, at in places.items() if at in kept})


def is_mean(average: str | Sequence[str] | None) -> bool:
    """Whether an average is the mean of several checkpoints, and needs nothing of a checkpoint but its parameters."""
    return average is not None and (not isinstance(average, str) or _SEVERAL.fullmatch(average) is not None)


# ---------------------------------------------------------------------- the mean of several checkpoints


def _several(checkpoint: Checkpoint, which: str, count: int, processes: Processes) -> list[Checkpoint]:
    """The last or the best of a directory, oldest first; damaged ones are passed over."""
    look: Callable[[], list[PurePath]] = partial(_last if which == "last" else _best, checkpoint)
    found: list[Checkpoint] = []
    for path in processes.on_rank_zero(look) if count else ():
        try:
            found.append(Checkpoint.open(path, sections=WEIGHTS, processes=processes))
        except CheckpointDamaged as error:
            _log.warning("%s is damaged and is not in the mean: %s", path.name, error)
        if len(found) == count:
            return sorted(found, key=lambda each: int(each.info["step"]))
    raise ConfigError(
        f"average {which}:{count}: {checkpoint.path.parent} has {len(found)} whole checkpoints of these. Ask for "
        f"fewer, at least 1; {_KEPT_BY[which]} of ModelCheckpoint says how many are kept."
    )


def _last(checkpoint: Checkpoint) -> list[PurePath]:
    """A checkpoint and those before it, the newest first, one for each step."""
    moments = find_moments(checkpoint.path.parent)
    if checkpoint.path.name not in {path.name for path in moments.values()}:
        raise ConfigError(
            f"average last: {checkpoint.path} is not named by its step, so that it is not known which ones come "
            "before it. Give the paths of the checkpoints."
        )
    return [moments[step] for step in sorted(moments, reverse=True) if step <= int(checkpoint.info["step"])]


def _best(checkpoint: Checkpoint) -> list[PurePath]:
    """The best of a directory, as its newest checkpoint knows them, the best first."""
    folder, moments = checkpoint.path.parent, find_moments(checkpoint.path.parent)
    ranked = read_info(moments[max(moments)]).get("ranked") if moments else None
    if not ranked:
        raise ConfigError(
            f"average best: nothing in {folder} says which checkpoints are best, because no ModelCheckpoint that saves "
            "there has a monitor, or it was never logged. Set `monitor` of ModelCheckpoint, or give their paths."
        )
    there = {path.name for path in moments.values()}
    return [folder / name for name in ranked if name in there]


def _mean_of(checkpoint: Checkpoint, others: Mapping[str, Checkpoint]) -> Checkpoint:
    """A checkpoint whose parameters and running statistics are the means of those of others, given by their places.

    Raises:
        CheckpointMismatch: The others have tensors that the first has not, or the reverse, or of another shape.
    """
    if not others:
        raise ConfigError("average: there is no checkpoint in the list. Give the paths of several.")
    checkpoint, others = evaluated(checkpoint), {where: evaluated(each) for where, each in others.items()}
    if wrong := [problem for where, other in others.items() for problem in _differences(checkpoint, where, other)]:
        more = "; ..." if len(wrong) > 4 else ""
        raise CheckpointMismatch(
            f"no mean can be made with other tensors than {checkpoint.path} has: {'; '.join(wrong[:4])}{more}. Give "
            "checkpoints of one run, or of runs of one model."
        )
    _log.info("the mean of %s", ", ".join(others))
    kinds = {name: checkpoint.spec("model", name)[0] for name in checkpoint.names("model")}
    for name in checkpoint.info.get("copied", ()):
        kinds.pop(name, None)
    numbers = [name for name, dtype in kinds.items() if dtype.is_floating_point or dtype.is_complex]
    return checkpoint.with_averages({name: [(each, "model", name) for each in others.values()] for name in numbers})


def _differences(checkpoint: Checkpoint, where: str, other: Checkpoint) -> list[str]:
    """What another checkpoint has that has no mean with the tensors of the first, in words."""
    ours, theirs = (dict.fromkeys(each.names("model")) | each.aliases for each in (checkpoint, other))
    found = [
        f"{name} is {'not' if name in ours else 'only'} in {where}" for name in sorted(ours.keys() ^ theirs.keys())
    ]
    if not found and ours != theirs:
        found = [f"{where} ties others"]
    for name in sorted({*checkpoint.names("model")} & {*other.names("model")}):
        dtype, shape = other.spec("model", name)
        if (dtype, shape) != checkpoint.spec("model", name):
            found.append(f"{name} is {tuple(shape)} {dtype} in {where}")
        elif dtype == _PACKED:
            found.append(f"{name} is {dtype}, packed numbers that have no mean")
    return found


# ---------------------------------------------------------------------- averages in one checkpoint


def _kept(checkpoint: Checkpoint, average: str) -> Checkpoint:
    """A checkpoint whose parameters are those averages that it holds itself."""
    if not checkpoint.state:
        raise ConfigError(
            f"average {average}: it is kept in checkpoints of Lumen, and {checkpoint.path} has plain weights."
        )
    found = _all_kept(checkpoint)
    chosen = [where for where in found if where == average] or [
        where for where in found if f".{average}." in f".{where}."
    ]
    if len(chosen) == 1:
        averages = found[chosen[0]].items()
        return checkpoint.with_averages({name: [(checkpoint, *place)] for name, place in averages})
    there = f"It has {', '.join(found)}." if found else "It has none at all."
    what = "several averages" if chosen else "no average"
    raise ConfigError(f"average {average}: {checkpoint.path} has {what} of that name. {there}")


def _all_kept(checkpoint: Checkpoint) -> dict[str, dict[str, tuple[str, str]]]:
    """All groups of tensors that stand for parameters: Lookahead's slow weights, and those of callbacks' states."""
    parameters = set(checkpoint.names("model"))
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    candidates = [
        ("Lookahead", ("optimizer", name), name.removesuffix(".slow"))
        for name in checkpoint.names("optimizer")
        if name.endswith(".slow")
    ]
    for name in checkpoint.names("extra"):
        ends = [at for at, letter in enumerate(name) if letter == "." and name[at + 1 :] in parameters]
        if ends and name.startswith("callbacks."):
            candidates.append((name[: ends[0]], ("extra", name), name[ends[0] + 1 :]))
    for where, place, parameter in candidates:
        if parameter in parameters and checkpoint.spec(*place)[1] == checkpoint.spec("model", parameter)[1]:
            found[where][parameter] = place
    return found
