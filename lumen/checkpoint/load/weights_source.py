"""Finds and opens weights: a checkpoint of a run, or anyone's safetensors files, on this machine or at a URL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from shlex import quote
from tempfile import TemporaryDirectory
from typing import Literal, final

from lumen.checkpoint.format.folder import newest_committed, newest_valid
from lumen.checkpoint.format.manifest import Chunk, Manifest, StoredTensor, read_json, read_manifest
from lumen.checkpoint.format.places import as_local, as_place, exists, is_dir, is_file
from lumen.checkpoint.format.reader import Checkpoint
from lumen.checkpoint.format.safetensors_file import check_header, read_header
from lumen.checkpoint.format.storage import MANIFEST, readable
from lumen.console import logger as _log
from lumen.distributed.processes import Processes
from lumen.errors import CheckpointDamaged, CheckpointError, ConfigError, LumenError
from lumen.errors.arguments import local_path
from lumen.internals.compiler import WRAPPED

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHTS = ("model", "extra")  # sections that hold parameters and the averages of callbacks
_OF_HUBS = (INDEX, SINGLE)
_OF_DDP = "module."
_WORDS = ("auto", "last", "best")
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_WEB = ("http://", "https://")  # servers that list nothing, and often send whole files only
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_CONVERT = (
    "{path} is a pickle, which could run any code when it is read; Lumen reads none. {what}: "
    "lumen convert {name} {stem}"
)


@final
@dataclass(frozen=True)
class Weights:
    r"""Parameters and persistent buffers to begin with, and how their names become the model's.

    Names that `torch.save` took from a wrapped model lose the wrapper's part, `module.` of DDP or `_orig_mod.` of
    `torch.compile`, if the model has the rest, and `rename` is not set.

    Args:
        path: A checkpoint or run directory (its newest valid checkpoint); a safetensors file; a directory with
            `model.safetensors`, or with `model.safetensors.index.json` and its shards; or a URL (`s3://`, `https://`,
            `hf://`: whatever fsspec opens) of any of these. Files that are no checkpoint of Lumen's, and all from a web
            server, are first copied to the directory for temporary files (`TMPDIR`), which is cleaned up after loading.
        rename: Regular expressions, and what replaces each match in a tensor's name, one after the other as in
            `re.sub`: `{"^encoder\\.": "net.encoder."}`.
        ignore: Regular expressions that match whole names, after renaming: such a parameter stays as the model was
            built, such a tensor is not read.
        strict: A name that is only in the model or only in the file, and a pattern that matches nothing, is an error;
            otherwise it is reported and left alone. Another shape is always an error.
        average: What to take in place of the parameters of a checkpoint: see `load_from_checkpoint`.

    Raises:
        ConfigError: A pattern is no regular expression, or the file is a pickle.
    """

    path: str | Path
    rename: dict[str, str] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    strict: bool = True
    average: str | list[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.ignore, str):
            raise ConfigError(f"ignore: expected a list of patterns, found {self.ignore!r}. Write [{self.ignore!r}].")
        for option, pattern, replacement in [
            *(("rename", pattern, replacement) for pattern, replacement in self.rename.items()),
            *(("ignore", pattern, "") for pattern in self.ignore),
        ]:
            try:
                re.sub(pattern, replacement, "")
            except re.error as error:
                raise ConfigError(f"{option}: {pattern!r} cannot be used as a regular expression: {error}.") from error
        refuse_pickle(str(self.path))


def as_weights(path: Weights | str | Path) -> Weights:
    """`path` if it is a `Weights`, else `Weights(path)`."""
    return path if isinstance(path, Weights) else Weights(path)


def unwrapped(names: Iterable[str]) -> dict[str, str]:
    """Return names without those of the wrappers of `torch.compile` (anywhere) and DDP (if all names begin with it)."""
    plain = {name: name.replace(f"{WRAPPED}.", "") for name in names}
    if all(name.startswith(_OF_DDP) for name in plain.values()):
        plain = {name: each.removeprefix(_OF_DDP) for name, each in plain.items()}
    return plain


def refuse_pickle(path: str) -> None:
    """Refuse a file that could only be unpickled.

    Raises:
        ConfigError: The name is that of a pickle, such as `model.pt`; the message says how to convert it.
    """
    place = local_path(path.partition("?")[0])
    if place.suffix in PICKLES and not place.is_dir():
        what, name = ("Download it and convert it", place.name) if "://" in path else ("Convert it once", str(place))
        stem = quote(f"{place.stem}.safetensors")
        raise ConfigError(_CONVERT.format(path=path, what=what, name=quote(name), stem=stem))


def is_weights(path: Weights | str | PurePath) -> bool:
    """Whether a path holds plain weights, not a checkpoint, a run or its folder of checkpoints.

    Raises:
        CheckpointError: The URL cannot be reached, or this user may not read it.
    """
    if isinstance(path, Weights) or str(path).startswith(_WEB):
        return True
    place = as_place(path)
    if place.suffix == ".safetensors" and as_local(place) is None:  # of what is here, a run may be called so
        return True
    with readable(place):
        if str(path) in _WORDS or exists(place / MANIFEST) or is_dir(place / "checkpoints"):
            return False
        return place.suffix == ".safetensors" or is_file(place) or any(exists(place / name) for name in _OF_HUBS)


def find_checkpoint(
    where: str,
    folder: PurePath,
    processes: Processes | None = None,
    *,
    sections: Sequence[str] | None = None,
    beside: Sequence[PurePath] = (),
) -> Checkpoint | None:
    """The checkpoint that a `resume` or `ckpt_path` setting means. Collective: every one of `processes` must call this.

    Args:
        where: "auto" or "last": the newest valid one of the run; "best": the one that the newest of `folder` names
            best; otherwise the path of a checkpoint or of a run directory.
        folder: Directory of the checkpoints among which "auto", "last" and "best" choose.
        processes: The processes that open it together, each byte verified by one; default: this one alone.
        sections: The sections to verify, which alone can then be read; see `Checkpoint.open`.
        beside: More directories in which the run saves, for "auto" and "last".

    Returns:
        None only for "auto" without any checkpoint.

    Raises:
        CheckpointError: There is no such checkpoint, or the one named is damaged.
        ConfigError: The path is that of a pickle.
    """
    processes = Processes() if processes is None else processes
    is_named, folder = processes.on_rank_zero(partial(_place, where, folder))
    if is_named:
        return Checkpoint.open(folder, sections=sections, processes=processes)
    beside = beside if where in ("auto", "last") else ()
    read = () if where == "best" else sections
    newest = newest_valid(folder, _log.warning, processes, sections=read, beside=beside)
    if where == "best" and newest is not None:
        best = newest.info.get("best")
        if not best:
            raise CheckpointError(
                f"{folder}: no checkpoint is known as best, because no ModelCheckpoint that saves there has a monitor, "
                "or it was never logged. Set `monitor` of ModelCheckpoint, or use last or a path."
            )
        return Checkpoint.open(folder / Path(best).name, sections=sections, processes=processes)
    if newest is None:
        processes.on_rank_zero(partial(_check_none_needed, where, [folder, *beside]))
    return newest


def find_named(path: PurePath, processes: Processes | None = None) -> Checkpoint:
    """Like `find_checkpoint`, but every string is a path, also "last"."""
    where = f"./{path}" if str(path) in _WORDS else str(path)
    checkpoint = find_checkpoint(where, path, processes)
    assert checkpoint is not None  # only "auto" may find none
    return checkpoint


def _place(where: str, folder: PurePath) -> tuple[bool, PurePath]:
    """Whether a setting names one checkpoint, and its path; else the directory to choose from."""
    if where in _WORDS:
        return False, folder
    path = as_place(where)
    refuse_pickle(where)
    if is_weights(where):
        raise CheckpointError(
            f"{where} holds weights, but no run to go on from and no hyperparameters. "
            "Start a new run from them with Trainer(init_from=...), or load them into a task that you built."
        )
    with readable(path):
        if exists(path / MANIFEST):
            return True, path
        return False, path / "checkpoints" if is_dir(path / "checkpoints") else path


def _check_none_needed(where: str, folders: Sequence[PurePath]) -> None:
    folder = " and ".join(map(str, folders))
    if any(map(newest_committed, folders)):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; nothing was changed. Set trainer.resume to null for a new run."
        )
    if where != "auto":
        raise CheckpointError(
            f"no valid checkpoint found in {folder}. Give the path of a checkpoint (a step-... directory) or of a run."
        )


@contextmanager
def open_weights(path: str, processes: Processes, sections: Sequence[str] | None = WEIGHTS) -> Iterator[Checkpoint]:
    """Open what `Weights.path` names, for as long as the `with` block lasts; tensors are read one by one.

    All processes verify it together; weights at a URL are fetched once per node. Collective: every rank must call this.

    Args:
        path: That of `Weights`.
        processes: Those that open it.
        sections: Of a checkpoint, those that can be read; None: all. Others have the section "model" alone.

    Raises:
        CheckpointError: There are no such weights, or they cannot be fetched.
        CheckpointDamaged: A file is incomplete, or an index names a file that is not in its directory.
    """
    if "://" not in path or not processes.on_rank_zero(partial(is_weights, path)):
        yield open_here(as_place(path), processes, sections)
        return
    with ExitStack() as cleaning:

        def fetch() -> Path:
            return _fetch(path, Path(cleaning.enter_context(TemporaryDirectory(prefix="lumen-"))))

        place = processes.once_per_node(fetch)
        yield processes.together(lambda: _open(place, verify="sizes" if processes.local_rank else "checksums"))
        processes.barrier()  # all have read it


def check_there(path: str | PurePath) -> None:
    """Refuse a path on this machine that cannot hold weights; a URL is not looked at.

    Raises:
        CheckpointError: The path does not exist.
        ConfigError: The path holds pickles, which are never read.
    """
    place = as_local(as_place(path))
    if place is None:
        return
    if not exists(place):
        raise CheckpointError(f"{path} does not exist. Give a checkpoint, a run, or safetensors files.")
    if is_weights(path) or exists(place / MANIFEST):
        return
    for pickle in sorted(place.glob("*")):
        refuse_pickle(str(pickle))


def open_here(path: PurePath, processes: Processes, sections: Sequence[str] | None = WEIGHTS) -> Checkpoint:
    """The opened weights at a path that all processes can read; see `open_weights`. Collective."""
    kind = processes.on_rank_zero(partial(_kind, path))
    if kind == "checkpoint":
        return Checkpoint.open(path, sections=sections, processes=processes)
    if kind == "files":
        return processes.together(partial(_open, path))
    return find_named(path, processes)


def _kind(path: PurePath) -> Literal["checkpoint", "files", "run"]:
    check_there(path)
    with readable(path):
        is_checkpoint = exists(path / MANIFEST)
    if is_checkpoint:
        return "checkpoint"
    return "files" if is_weights(path) else "run"


def _open(path: PurePath, verify: Literal["checksums", "sizes"] = "checksums") -> Checkpoint:
    """Open a checkpoint's parameters, or anyone's safetensors files, in this process alone."""
    if exists(path / MANIFEST):
        return Checkpoint.open(path, verify, sections=WEIGHTS)
    if is_file(path):
        return _open_files(path.parent, [path.name])
    if not exists(path / INDEX):
        return _open_files(path, [SINGLE])
    placed = _read_index(path)
    checkpoint = _open_files(path, sorted(set(placed.values())))
    if absent := sorted(placed.keys() - set(checkpoint.names("model"))):
        raise CheckpointDamaged(f"{path / INDEX} names {absent[0]!r}, which no file of it holds.")
    return checkpoint


def _open_files(directory: PurePath, files: list[str]) -> Checkpoint:
    """Open safetensors files of a directory as if they were a checkpoint's; links are followed, as hub caches have."""
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
    """The file of each tensor, by name, from a model hub's index."""
    path = directory / INDEX
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointDamaged(f"{path} has no weight_map, which says what is in which file.")
    for name, file in placed.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointDamaged(f"{path} places {name!r} in {file!r}, which is no file name of its directory.")
    return placed


def _fetch(url: str, folder: Path) -> Path:
    """Copy weights from a URL into a directory, piece by piece. Returns the path of the file or the directory."""
    import fsspec  # slow, and there is seldom a URL

    try:
        files, root = fsspec.core.url_to_fs(url)
        if url.partition("?")[0].endswith(".safetensors"):
            files.get_file(root, str(folder / SINGLE))
            return folder / SINGLE
        root = root.rstrip("/")
        if files.exists(f"{root}/{MANIFEST}"):
            files.get_file(f"{root}/{MANIFEST}", str(folder / MANIFEST))
            names = [file for file in read_manifest(folder).contents if file.partition("/")[0] in WEIGHTS]
            for section in WEIGHTS:
                (folder / section).mkdir()
        elif files.exists(f"{root}/{INDEX}"):
            files.get_file(f"{root}/{INDEX}", str(folder / INDEX))
            names = sorted(set(_read_index(folder).values()))
        else:
            names = [SINGLE]
        for name in names:
            files.get_file(f"{root}/{name}", str(folder / name))
    except LumenError:
        raise
    except Exception as error:  # of whichever package speaks this protocol
        raise CheckpointError(
            f"cannot fetch {url}: {type(error).__name__}: {error}. It must be a checkpoint, a .safetensors file, or a "
            f"directory with {SINGLE} or {INDEX}, and this machine must be allowed to read it."
        ) from error
    return folder
