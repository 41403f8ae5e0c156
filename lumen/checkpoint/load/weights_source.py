"""Sources of initial weights: checkpoints and their parts, third-party weights, and averages of checkpoints."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Literal, TypeAlias, final, get_args

import torch

from lumen.checkpoint.format.folder import find_checkpoints_by_step, find_newest_committed, open_newest_valid, read_info
from lumen.checkpoint.format.manifest import Chunk, Manifest, StoredTensor, read_json, read_manifest
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import check_header, read_header
from lumen.checkpoint.format.storage import (
    MANIFEST,
    as_local_path,
    as_path_or_url,
    explain_read_errors,
    is_dir,
    is_file,
    path_exists,
)
from lumen.console import logger as _log
from lumen.distributed.processes import SINGLE_PROCESS, Processes
from lumen.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, ConfigError, LumenError
from lumen.errors.arguments import expand_path
from lumen.internals.compiler import WRAPPED_NAME

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = ("model", "extra")  # sections that hold parameters and the averages of callbacks
_HUB_FILE_NAMES = (INDEX, SINGLE)
_DDP_PREFIX = "module."
_RESUME_WORDS = ("auto", "last", "best")
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_URL_PATTERN = ("http://", "https://")  # servers without listings, which often send only whole files
Part: TypeAlias = Literal["model", "optimizer", "schedulers", "progress", "data"]
PARTS: frozenset[Part] = frozenset(get_args(Part))
PARAMETERS = "parameters"
_MEAN_PATTERN = re.compile(r"(last|best):([0-9]+)")
_PACKED = torch.float4_e2m1fn_x2  # two numbers per byte; torch cannot cast this dtype
_AVERAGE_OWNERS = {"last": "keep_last", "best": "save_top_k"}
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_CONVERT_HINT = (
    "{path} is a pickle, which can run any code when it is loaded, so Lumen does not read pickles. {verb} the "
    "file: lumen convert {name} {stem}"
)


@final
@dataclass(frozen=True)
class Weights:
    r"""Parameters and persistent buffers to begin with, and the mapping of their names to the model's names.

    The prefix of a wrapper (`module.` of DDP, `_orig_mod.` of `torch.compile`) is removed or added if the model has the
    name without or with the prefix, unless `rename` is set.

    Args:
        path: A checkpoint or run directory (its newest valid checkpoint); a safetensors file; a directory with
            `model.safetensors`, or with `model.safetensors.index.json` and its shards; or a URL (`s3://`, `https://`,
            `hf://`: any URL that fsspec opens) of any of these. Third-party files at a URL, and all files of a web
            server, are first copied to the directory for temporary files (`TMPDIR`). Lumen removes the copies after
            loading.
        rename: Regular expressions and their replacements in a tensor's name, applied in order as in `re.sub`:
            `{"^encoder\\.": "net.encoder."}`.
        ignore: Regular expressions that match whole names after renaming. A matched parameter of the model keeps its
            initial value; a matched tensor of the file is not read.
        strict: Raise an error for a name that only the model or only the file has, and for a pattern without a match.
            If False, log and ignore these names and patterns. A different shape is always an error.
        average: The average to load instead of the parameters of a checkpoint, as in `load_from_checkpoint`.

    Raises:
        ConfigError: A pattern is not a regular expression, or the file is a pickle.
    """

    path: str | Path
    rename: dict[str, str] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    strict: bool = True
    average: str | list[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise ConfigError(f"ignore: expected a list of patterns, found {self.ignore!r}. Write [{self.ignore!r}].")
        renaming = [("rename", *each) for each in self.rename.items()]
        for option, pattern, replacement in (*renaming, *(("ignore", each, "") for each in self.ignore)):
            try:
                re.sub(pattern, replacement, "")
            except re.error as error:
                raise ConfigError(f"{option}: {pattern!r} cannot be used as a regular expression: {error}.") from error
        refuse_pickle(str(self.path))


def as_weights(path: Weights | str | Path) -> Weights:
    """Return `path` if it is a `Weights`, else `Weights(path)`."""
    return path if isinstance(path, Weights) else Weights(path)


def unwrap_names(names: Iterable[str]) -> dict[str, str]:
    """Return names without the prefixes of `torch.compile` (anywhere) and DDP (if all names begin with `module.`)."""
    plain = {name: name.replace(f"{WRAPPED_NAME}.", "") for name in names}
    if all(name.startswith(_DDP_PREFIX) for name in plain.values()):
        plain = {name: each.removeprefix(_DDP_PREFIX) for name, each in plain.items()}
    return plain


def refuse_pickle(path: str) -> None:
    """Refuse a file that could only be unpickled.

    Raises:
        ConfigError: The file is a pickle, such as `model.pt`; the message says how to convert it, or that the file
            does not exist.
    """
    place = expand_path(path.partition("?")[0])
    if place.suffix in PICKLE_SUFFIXES and not place.is_dir():
        if "://" not in path and not place.exists():
            raise ConfigError(f"{path} does not exist. Lumen reads checkpoint directories and safetensors, no pickles.")
        verb, name = ("Download and convert", place.name) if "://" in path else ("Convert", str(place))
        stem = quote(f"{place.stem}.safetensors")
        raise ConfigError(_CONVERT_HINT.format(path=path, verb=verb, name=quote(name), stem=stem))


def is_weights(path: Weights | str | PurePath) -> bool:
    """Return True if a path holds plain weights, and not a checkpoint, a run or its folder of checkpoints.

    Raises:
        CheckpointError: The URL cannot be reached, or this user may not read it.
    """
    return isinstance(path, Weights) or _find_kind(path) == "weights"


def _find_kind(path: str | PurePath) -> Literal["checkpoint", "run", "weights"]:
    """Return the kind of a path; "run" for a run, its folder of checkpoints, or a missing path."""
    if str(path).startswith(_URL_PATTERN):
        return "weights"
    place = as_path_or_url(path)
    if place.suffix == ".safetensors" and as_local_path(place) is None:  # a local run directory may have such a name
        return "weights"
    with explain_read_errors(place):
        if path_exists(place / MANIFEST):
            return "checkpoint"
        if str(path) in _RESUME_WORDS or is_dir(place / "checkpoints"):
            return "run"
        are_files = (
            place.suffix == ".safetensors"
            or is_file(place)
            or any(path_exists(place / name) for name in _HUB_FILE_NAMES)
        )
        return "weights" if are_files else "run"


def find_checkpoint(
    where: str,
    folder: PurePath,
    processes: Processes = SINGLE_PROCESS,
    *,
    sections: Sequence[str] | None = None,
    other_folders: Sequence[PurePath] = (),
) -> Checkpoint | None:
    """Open the checkpoint of a `resume` or `ckpt_path` setting. Collective: every one of `processes` must call this.

    Args:
        where: "auto" or "last": the newest valid checkpoint of the run; "best": the checkpoint that the newest one in
            `folder` records as best; otherwise the path of a checkpoint or of a run directory.
        folder: Directory of the checkpoints for "auto", "last" and "best".
        processes: The processes that open the checkpoint together, each byte verified by one; default: only this
            process.
        sections: The sections to verify; only these can be read, as in `Checkpoint.open`.
        other_folders: Other directories in which the run saves, for "auto" and "last".

    Returns:
        The opened checkpoint; None only for "auto" without any checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or the given checkpoint is damaged.
        ConfigError: The path is that of a pickle.
    """
    is_named, folder = processes.run_on_rank_zero(partial(_resolve_setting, where, folder))
    if is_named:
        return Checkpoint.open(folder, sections=sections, processes=processes)
    other_folders = other_folders if where in ("auto", "last") else ()
    read = () if where == "best" else sections
    newest = open_newest_valid(folder, _log.warning, processes, sections=read, other_folders=other_folders)
    if where == "best" and newest is not None:
        best = newest.info.get("best")
        if not best:
            raise CheckpointError(
                f"{folder}: no checkpoint is recorded as best, because no ModelCheckpoint that saves there has a "
                "monitor, or the monitored value was never logged. Set `monitor` of ModelCheckpoint, or use last or a "
                "path."
            )
        return Checkpoint.open(folder / Path(best).name, sections=sections, processes=processes)
    if newest is None:
        processes.run_on_rank_zero(partial(_refuse_missing_checkpoint, where, [folder, *other_folders]))
    return newest


def find_checkpoint_at(path: PurePath, processes: Processes = SINGLE_PROCESS) -> Checkpoint:
    """Open the checkpoint at a path as `find_checkpoint` does, but take every string as a path, also "last"."""
    where = f"./{path}" if str(path) in _RESUME_WORDS else str(path)
    checkpoint = find_checkpoint(where, path, processes)
    assert checkpoint is not None  # only "auto" may return None
    return checkpoint


def _resolve_setting(where: str, folder: PurePath) -> tuple[bool, PurePath]:
    """Return True and the path of the checkpoint that a setting names, or False and the folder to choose from."""
    if where in _RESUME_WORDS:
        return False, folder
    path = as_path_or_url(where)
    refuse_pickle(where)
    if (kind := _find_kind(where)) == "weights":
        raise CheckpointError(
            f"{where} holds weights, but no run to resume and no hyperparameters. Start a new run with "
            "Trainer(init_from=...), or load the weights into a task that you built."
        )
    with explain_read_errors(path):
        return kind == "checkpoint", path / "checkpoints" if kind == "run" and is_dir(path / "checkpoints") else path


def _refuse_missing_checkpoint(where: str, folders: Sequence[PurePath]) -> None:
    folder = " and ".join(map(str, folders))
    if any(map(find_newest_committed, folders)):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; nothing was changed. Set trainer.resume to null for a new run."
        )
    if where != "auto":
        raise CheckpointError(
            f"no valid checkpoint found in {folder}. Give the path of a checkpoint (a step-... directory) or of a run."
        )


@contextmanager
def open_weights(path: str, processes: Processes, sections: Sequence[str] | None = WEIGHTS) -> Iterator[Checkpoint]:
    """Open the weights at `Weights.path` for the duration of the `with` block; tensors are read one by one.

    All processes verify the weights together. Weights at a URL are fetched once per node. Collective: every rank must
    call this.

    Args:
        path: The `path` of a `Weights` object.
        processes: The processes that open the weights.
        sections: Sections of a checkpoint that can be read; None: all. Third-party weights have only the section
            "model".

    Raises:
        CheckpointError: The weights do not exist, or cannot be fetched.
        CheckpointDamaged: A file is incomplete, or an index names a file that is not in its directory.
    """
    if "://" not in path or not processes.run_on_rank_zero(partial(is_weights, path)):
        yield open_shared_weights(as_path_or_url(path), processes, sections)
        return
    with ExitStack() as cleaning:

        def fetch() -> Path:
            return _fetch(path, Path(cleaning.enter_context(TemporaryDirectory(prefix="lumen-"))), sections)

        place = processes.run_once_per_node(fetch)
        yield processes.run_on_all(
            lambda: _open_in_process(place, sections, verify="sizes" if processes.local_rank else "checksums")
        )
        processes.barrier()  # all processes have read the files


def check_weights_path(path: str | PurePath) -> None:
    """Refuse a local path that cannot hold weights; a URL is not checked.

    Raises:
        CheckpointError: The path does not exist.
        ConfigError: The path holds pickles, which are never read.
    """
    place = as_local_path(as_path_or_url(path))
    if place is None:
        return
    if not path_exists(place):
        raise CheckpointError(f"{path} does not exist. Give a checkpoint, a run, or safetensors files.")
    for each in sorted(place.glob("*")) if _find_kind(path) == "run" else ():
        refuse_pickle(str(each))


def open_shared_weights(path: PurePath, processes: Processes, sections: Sequence[str] | None = WEIGHTS) -> Checkpoint:
    """Open weights at a path that all processes can read, as `open_weights` does. Collective."""

    def check_and_classify() -> Literal["checkpoint", "run", "weights"]:
        check_weights_path(path)
        return _find_kind(path)

    kind = processes.run_on_rank_zero(check_and_classify)
    if kind == "checkpoint":
        return Checkpoint.open(path, sections=sections, processes=processes)
    return (
        processes.run_on_all(partial(_open_in_process, path, sections))
        if kind == "weights"
        else find_checkpoint_at(path, processes)
    )


def _open_in_process(
    path: PurePath, sections: Sequence[str] | None, verify: Literal["checksums", "sizes"] = "checksums"
) -> Checkpoint:
    """Open sections of a checkpoint, or third-party safetensors files, in this process alone."""
    if path_exists(path / MANIFEST):
        return Checkpoint.open(path, verify, sections=sections)
    if is_file(path):
        return _open_files(path.parent, [path.name])
    if not path_exists(path / INDEX):
        return _open_files(path, [SINGLE])
    file_of = _read_index(path)
    checkpoint = _open_files(path, sorted(set(file_of.values())))
    if absent := sorted(file_of.keys() - set(checkpoint.list_tensor_names("model"))):
        raise CheckpointDamaged(f"{path / INDEX} lists {absent[0]!r}, but no listed file holds this tensor.")
    return checkpoint


def _open_files(directory: PurePath, files: list[str]) -> Checkpoint:
    """Open safetensors files of a directory like a checkpoint; links are followed, because hub caches use them."""
    specs: dict[str, StoredTensor] = {}
    begins = {}
    for file in files:
        held = read_header(directory / file)
        begins[file] = check_header(directory / file, held)
        if twice := sorted(held.keys() & specs.keys()):
            raise CheckpointDamaged(f"{twice[0]!r} is in two files of {directory}: {file} is one of them.")
        for name, (dtype, shape) in held.items():
            specs[name] = StoredTensor(dtype, shape, (Chunk(file, (0,) * len(shape), shape),))
    return Checkpoint(directory, Manifest({}, {"model": specs}, {}, {}, {}), {}, begins)


def _read_index(directory: PurePath) -> dict[str, str]:
    """Return the file of each tensor by name, from the index of a model hub."""
    path = directory / INDEX
    file_of = read_json(path).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise CheckpointDamaged(f"{path} has no weight_map, which maps the names of tensors to files.")
    for name, file in file_of.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointDamaged(f"{path} places {name!r} in {file!r}, which is not a file name in its directory.")
    return file_of


def _fetch(url: str, folder: Path, sections: Sequence[str] | None) -> Path:
    """Copy weights, or sections of a checkpoint, from a URL into a directory; return the file or the directory."""
    import fsspec  # slow, and rarely needed

    try:
        filesystem, root = fsspec.core.url_to_fs(url)
        if url.partition("?")[0].endswith(".safetensors"):
            filesystem.get_file(root, str(folder / SINGLE))
            return folder / SINGLE
        root = root.rstrip("/")
        if filesystem.exists(f"{root}/{MANIFEST}"):
            filesystem.get_file(f"{root}/{MANIFEST}", str(folder / MANIFEST))
            files = read_manifest(folder).files
            names = [file for file in files if sections is None or file.partition("/")[0] in sections]
        elif filesystem.exists(f"{root}/{INDEX}"):
            filesystem.get_file(f"{root}/{INDEX}", str(folder / INDEX))
            names = sorted(set(_read_index(folder).values()))
        else:
            names = [SINGLE]
        for name in names:
            (folder / name).parent.mkdir(exist_ok=True)
            filesystem.get_file(f"{root}/{name}", str(folder / name))
    except LumenError:
        raise
    except Exception as error:  # any package may implement the protocol
        raise CheckpointError(
            f"cannot fetch {url}: {type(error).__name__}: {error}. Use the URL of a checkpoint, of a .safetensors "
            f"file, or of a directory with {SINGLE} or {INDEX}, which this machine may read."
        ) from error
    return folder


# ---------------------------------------------------------------------- parts


def choose_parts(parts: Iterable[str] | None, resume: str | None) -> frozenset[Part]:
    """Return the parts of a checkpoint that a run resumes from.

    Raises:
        ConfigError: There is no such part, or the choice contradicts `resume`.
    """
    if parts is None:
        return PARTS
    chosen = frozenset(part for part in PARTS if part in parts)
    if not chosen or set(parts) - PARTS:
        raise ConfigError(f"resume_parts: expected some of {', '.join(get_args(Part))}; found {parts}.")
    if resume in (None, "auto", "last"):
        raise ConfigError(
            f'resume_parts chooses what a new run loads from "best" or a path, but resume is {resume}. '
            "Set resume to the run's path, or remove resume_parts."
        )
    if "data" in chosen and "progress" not in chosen:
        raise ConfigError(
            "resume_parts: data is a position within the epoch that progress counts. Add progress, or remove data."
        )
    return chosen


def format_parts_without(checkpoint: Checkpoint, *parts: str) -> str:
    """Return advice: the setting that resumes from all parts but some."""
    rest = ", ".join(each for each in get_args(Part) if each not in parts)
    return f"start a new run from it with resume: {checkpoint.path} and resume_parts: [{rest}]"


# ---------------------------------------------------------------------- averages


def average_checkpoint(
    checkpoint: Checkpoint, average: str | Sequence[str | PurePath] | None, processes: Processes = SINGLE_PROCESS
) -> Checkpoint:
    """Return a checkpoint whose parameters are read as averages. Collective: every one of `processes` must call this.

    Buffers and parameters without an average are read unchanged from `checkpoint`. A mean of checkpoints averages
    parameters and running statistics, but no integers and no other buffers.

    Args:
        checkpoint: A checkpoint with all sections readable; a mean of checkpoints needs only `WEIGHTS`.
        average: "last:5": the mean of this checkpoint and the four before it in its directory; "best:3": the mean of
            the three best there, by the monitor; paths: the mean of these checkpoints, runs (their newest valid one) or
            safetensors files. "EMA", "SWA" or another callback whose state holds tensors by the parameters' names; for
            several averages in a state, the key path of one average. "Lookahead": its slow weights. "parameters":
            the trained parameters. None: the weights that the run's validations evaluated, which are an average if the
            run had one.
        processes: The processes that read together; default: only this process.

    Raises:
        ConfigError: There is no average of this name, there are several, or there are too few checkpoints.
        CheckpointMismatch: The checkpoints are not of one model.
        CheckpointDamaged: A checkpoint given by its path is damaged.
    """
    if average is None:
        return apply_evaluated_average(checkpoint)
    if average == PARAMETERS:
        return checkpoint
    if not isinstance(average, str):
        return _make_mean_checkpoint(
            checkpoint, {str(each): open_shared_weights(as_path_or_url(str(each)), processes) for each in average}
        )
    if several := _MEAN_PATTERN.fullmatch(average):
        found = _open_several(checkpoint, several[1], int(several[2]), processes)
        return _make_mean_checkpoint(checkpoint, {str(each.path): each for each in found})
    return processes.run_on_all(partial(_select_average, checkpoint, average))


def apply_evaluated_average(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint that is read with the weights that validations evaluated: an average, or the parameters."""
    if (where := checkpoint.info.get("evaluated")) is None:
        return checkpoint
    kept, names = set(checkpoint.list_tensor_names("extra")), checkpoint.list_tensor_names("model")
    places = {name: f"{where}.{name}" for name in names}
    return checkpoint.with_averages({name: [(checkpoint, "extra", at)] for name, at in places.items() if at in kept})


def is_mean_of_checkpoints(average: str | Sequence[str] | None) -> bool:
    """Return True if an average is the mean of several checkpoints, which needs only their parameters."""
    return average is not None and (not isinstance(average, str) or _MEAN_PATTERN.fullmatch(average) is not None)


# ---------------------------------------------------------------------- the mean of several checkpoints


def _open_several(checkpoint: Checkpoint, choice: str, count: int, processes: Processes) -> list[Checkpoint]:
    """Return the last or the best checkpoints of a directory, oldest first; damaged checkpoints are skipped."""
    list_paths: Callable[[], list[PurePath]] = partial(_list_last if choice == "last" else _list_best, checkpoint)
    found: list[Checkpoint] = []
    for path in processes.run_on_rank_zero(list_paths) if count else ():
        try:
            found.append(Checkpoint.open(path, sections=WEIGHTS, processes=processes))
        except CheckpointDamaged as error:
            _log.warning("%s is damaged and is not part of the mean: %s", path.name, error)
        if len(found) == count:
            return sorted(found, key=lambda each: int(each.info["step"]))
    raise ConfigError(
        f"average {choice}:{count}: {checkpoint.path.parent} has {len(found)} valid checkpoints for this average. Set "
        f"a smaller number, at least 1; {_AVERAGE_OWNERS[choice]} of ModelCheckpoint sets how many are kept."
    )


def _list_last(checkpoint: Checkpoint) -> list[PurePath]:
    """Return a checkpoint and the earlier ones in its directory, newest first, one for each step."""
    by_step = find_checkpoints_by_step(checkpoint.path.parent)
    if checkpoint.path.name not in {path.name for path in by_step.values()}:
        raise ConfigError(
            f"average last: {checkpoint.path} is not named by its step, so Lumen cannot find the checkpoints before "
            "this step. Give the paths of the checkpoints."
        )
    return [by_step[step] for step in sorted(by_step, reverse=True) if step <= int(checkpoint.info["step"])]


def _list_best(checkpoint: Checkpoint) -> list[PurePath]:
    """Return the best checkpoints of a directory according to its newest checkpoint, best first."""
    folder, by_step = checkpoint.path.parent, find_checkpoints_by_step(checkpoint.path.parent)
    ranked = read_info(by_step[max(by_step)]).get("ranked") if by_step else None
    if not ranked:
        raise ConfigError(
            f"average best: {folder} has no record of the best checkpoints, because no ModelCheckpoint that saves "
            "there has a monitor, or the monitored value was never logged. Set `monitor` of ModelCheckpoint, or give "
            "the paths of the checkpoints."
        )
    existing = {path.name for path in by_step.values()}
    return [folder / name for name in ranked if name in existing]


def _make_mean_checkpoint(checkpoint: Checkpoint, sources: Mapping[str, Checkpoint]) -> Checkpoint:
    """Return a checkpoint whose parameters and running statistics are the means of other checkpoints, given by path.

    Raises:
        CheckpointMismatch: The names, shapes or dtypes of the checkpoints differ.
    """
    if not sources:
        raise ConfigError("average: the list of checkpoints is empty. Give the paths of several checkpoints.")
    checkpoint, sources = (
        apply_evaluated_average(checkpoint),
        {where: apply_evaluated_average(each) for where, each in sources.items()},
    )
    if conflicts := [
        problem for where, other in sources.items() for problem in _find_mean_conflicts(checkpoint, where, other)
    ]:
        ellipsis = "; ..." if len(conflicts) > 4 else ""
        raise CheckpointMismatch(
            f"cannot average checkpoints whose tensors differ from {checkpoint.path}: "
            f"{'; '.join(conflicts[:4])}{ellipsis}. Give checkpoints of one run, or of runs of one model."
        )
    _log.info("the mean of %s", ", ".join(sources))
    kinds = {name: checkpoint.get_spec("model", name)[0] for name in checkpoint.list_tensor_names("model")}
    for name in checkpoint.info.get("copied", ()):
        kinds.pop(name, None)
    numbers = [name for name, dtype in kinds.items() if dtype.is_floating_point or dtype.is_complex]
    return checkpoint.with_averages({name: [(each, "model", name) for each in sources.values()] for name in numbers})


def _find_mean_conflicts(checkpoint: Checkpoint, where: str, other: Checkpoint) -> list[str]:
    """Describe tensors of another checkpoint that have no mean with the tensors of the first."""
    ours, theirs = (dict.fromkeys(each.list_tensor_names("model")) | each.aliases for each in (checkpoint, other))
    found = [f"{n} is {'not' if n in ours else 'only'} in {where}" for n in sorted(ours.keys() ^ theirs.keys())]
    if not found and ours != theirs:
        found = [f"{where} ties other tensors"]
    for name in sorted({*checkpoint.list_tensor_names("model")} & {*other.list_tensor_names("model")}):
        dtype, shape = other.get_spec("model", name)
        if (dtype, shape) != checkpoint.get_spec("model", name):
            found.append(f"{name} is {tuple(shape)} {dtype} in {where}")
        elif dtype == _PACKED:
            found.append(f"{name} is {dtype}, packed numbers that have no mean")
    return found


# ---------------------------------------------------------------------- averages in one checkpoint


def _select_average(checkpoint: Checkpoint, average: str) -> Checkpoint:
    """Return a checkpoint whose parameters are read from averages in the same checkpoint."""
    if not checkpoint.state:
        raise ConfigError(
            f"average {average}: only checkpoints of Lumen hold averages, and {checkpoint.path} holds plain weights."
        )
    found = _list_averages(checkpoint)
    chosen = [average] if average in found else [where for where in found if f".{average}." in f".{where}."]
    if len(chosen) == 1:
        averages = found[chosen[0]].items()
        return checkpoint.with_averages({name: [(checkpoint, *place)] for name, place in averages})
    available = f"Available: {', '.join(found)}." if found else "The checkpoint has none at all."
    count = "several averages" if chosen else "no average"
    raise ConfigError(f"average {average}: {checkpoint.path} has {count} of that name. {available}")


def _list_averages(checkpoint: Checkpoint) -> dict[str, dict[str, tuple[str, str]]]:
    """Return the groups of tensors that replace parameters: Lookahead's slow weights, and averages of callbacks."""
    parameters = set(checkpoint.list_tensor_names("model"))
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    slow = [name for name in checkpoint.list_tensor_names("optimizer") if name.endswith(".slow")]
    candidates = [("Lookahead", ("optimizer", name), name.removesuffix(".slow")) for name in slow]
    for name in checkpoint.list_tensor_names("extra"):
        ends = [at for at, letter in enumerate(name) if letter == "." and name[at + 1 :] in parameters]
        if ends and name.startswith("callbacks."):
            candidates.append((name[: ends[0]], ("extra", name), name[ends[0] + 1 :]))
    for where, place, parameter in candidates:
        if parameter in parameters and checkpoint.get_spec(*place)[1] == checkpoint.get_spec("model", parameter)[1]:
            found[where][parameter] = place
    return found
