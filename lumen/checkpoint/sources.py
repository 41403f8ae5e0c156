"""Where parameters come from: a checkpoint of a run, or safetensors files of anyone, on this machine or at a URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, final

from lumen.checkpoint.disk import check_file, read_json
from lumen.checkpoint.folder import find_checkpoints, newest_valid
from lumen.checkpoint.manifest import MANIFEST, Chunk, Manifest, Spec, read_manifest
from lumen.checkpoint.reader import Checkpoint
from lumen.checkpoint.safetensors_files import check_header, read_header
from lumen.console import logger as _log
from lumen.errors import CheckpointDamaged, CheckpointError, ConfigError, LumenError
from lumen.strategies.processes import Processes

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_OF_HUBS = (_INDEX, _SINGLE)
_WORDS = ("auto", "last", "best")
_FILE_NAME = re.compile(r"[\w.-]+\.safetensors", re.ASCII)
_PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
_CONVERT = """{path} is a pickle, which could run any code when it is read; Lumen reads none. Convert it once:
    import torch; from safetensors.torch import save_file
    tensors = torch.load("{name}", map_location="cpu", weights_only=True)  # of a Lightning checkpoint: ["state_dict"]
    save_file({{name: tensor.clone() for name, tensor in tensors.items()}}, "{stem}.safetensors")"""


@final
@dataclass(frozen=True)
class Weights:
    r"""Parameters and persistent buffers to begin with, and how their names become the model's.

    Args:
        path: A checkpoint or run directory (its newest valid checkpoint); a safetensors file; a directory with
            `model.safetensors`, or with `model.safetensors.index.json` and its shards; or a URL (`s3://`, `https://`,
            `hf://`: whatever fsspec opens) of any of these but a run. A URL's files are first copied to the directory
            for temporary files (`TMPDIR`), which is cleaned up after loading.
        rename: Regular expressions, and what replaces each match in a tensor's name, one after the other as in
            `re.sub`: `{"^encoder\\.": "net.encoder."}`.
        ignore: Regular expressions that match whole names, after renaming: such a parameter stays as the model was
            built, such a tensor is not read.
        strict: A name that is only in the model or only in the file, and a pattern that matches nothing, is an error;
            otherwise it is reported and left alone. Another shape is always an error.

    Raises:
        ConfigError: A pattern is no regular expression, or the file is a pickle.
    """

    path: str | Path
    rename: dict[str, str] = field(default_factory=dict)
    ignore: list[str] = field(default_factory=list)
    strict: bool = True

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
    """Weights as they are, or those of a path."""
    return path if isinstance(path, Weights) else Weights(path)


def refuse_pickle(path: str) -> None:
    """Refuse a file that could only be unpickled.

    Raises:
        ConfigError: It is one by its name; says how to convert it.
    """
    place = Path(path.partition("?")[0])
    if place.suffix in _PICKLES and not place.is_dir():
        raise ConfigError(_CONVERT.format(path=path, name=place.name, stem=place.stem))


def is_weights(path: Weights | str | Path) -> bool:
    """Whether this names plain weights, or weights somewhere else, and not a checkpoint or run on this machine."""
    if isinstance(path, Weights) or "://" in str(path):
        return True
    place = Path(path)
    if str(path) in _WORDS or (place / MANIFEST).exists() or (place / "checkpoints").is_dir():
        return False
    return place.is_file() or place.suffix == ".safetensors" or any((place / name).exists() for name in _OF_HUBS)


def find_checkpoint(where: str, folder: Path) -> Checkpoint | None:
    """The checkpoint that a `resume` or `ckpt_path` setting means.

    Args:
        where: "auto" or "last": the newest valid one of the run; "best": the one its monitor named best; otherwise
            the path of a checkpoint or of a run directory.
        folder: The checkpoints among which "auto", "last" and "best" choose.

    Returns:
        None only for "auto" without any checkpoint.

    Raises:
        CheckpointError: There is none, or the one named is damaged.
        ConfigError: The path is that of a pickle.
    """
    if where not in _WORDS:
        path = Path(where)
        refuse_pickle(where)
        if is_weights(where):
            raise CheckpointError(
                f"{where} holds weights, but no run to go on from and no hyperparameters. "
                "Start a new run from them with Trainer(init_from=...), or load them into a task that you built."
            )
        if (path / MANIFEST).exists():
            return Checkpoint.open(path)
        folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    newest = newest_valid(folder, _log.warning) if folder.is_dir() else None
    if where == "best" and newest is not None:
        best = newest.info.get("best")
        if not best:
            raise CheckpointError(
                f"{folder}: no checkpoint is known as best, because no monitor was set or it was never logged. "
                "Set `monitor` of ModelCheckpoint, or use last or a path."
            )
        return Checkpoint.open(folder / Path(best).name)
    if newest is None and folder.is_dir() and find_checkpoints(folder):
        raise CheckpointError(
            f"every checkpoint in {folder} is damaged; nothing was changed. Set trainer.resume to null for a new run."
        )
    if newest is None and where != "auto":
        raise CheckpointError(
            f"no valid checkpoint found in {folder}. Give the path of a checkpoint (a step-... directory) or of a run."
        )
    return newest


@contextmanager
def open_weights(path: str, processes: Processes) -> Iterator[Checkpoint]:
    """Open what `Weights.path` names, for as long as the `with` block lasts; tensors are read one by one.

    Rank 0 verifies it; a URL is fetched once per node. Collective: every rank must call this.

    Returns:
        Its section "model"; nothing else of a checkpoint is read.

    Raises:
        CheckpointError: There is nothing of that kind, or it cannot be fetched.
        CheckpointDamaged: It is not whole, or an index names a file that is not in its directory.
    """
    if "://" not in path:
        yield _opened_by_all(Path(path), processes)
        return
    with ExitStack() as cleaning:

        def fetch() -> Path:
            return _fetch(path, Path(cleaning.enter_context(TemporaryDirectory(prefix="lumen-"))))

        place = processes.once_per_node(fetch)
        yield processes.together(lambda: _open(place, verify="sizes" if processes.local_rank else "checksums"))
        processes.barrier()  # all have read it


def check_there(path: str | Path) -> None:
    """Refuse a place on this machine where no weights can be; a URL is not looked at.

    Raises:
        CheckpointError: There is nothing.
        ConfigError: There are pickles, which nobody reads.
    """
    place = Path(path)
    if "://" in str(path):
        return
    if not place.exists():
        raise CheckpointError(f"{path} does not exist. Give a checkpoint, a run, or safetensors files.")
    if is_weights(path) or (place / MANIFEST).exists():
        return
    for pickle in sorted(place.glob("*")):
        refuse_pickle(str(pickle))


def _opened_by_all(path: Path, processes: Processes) -> Checkpoint:
    """What rank 0 finds there and verifies, open on every rank."""
    found: list[Checkpoint] = []

    def find() -> Path:
        found.append(_open(path))
        return found[0].path if (found[0].path / MANIFEST).exists() else path

    place = processes.on_rank_zero(find)
    return processes.together(lambda: found[0] if found else _open(place, verify="sizes"))


def _open(path: Path, verify: Literal["checksums", "sizes"] = "checksums") -> Checkpoint:
    check_there(path)
    if (path / MANIFEST).exists():
        return _open_model(path, verify)
    if not is_weights(path):
        checkpoint = find_checkpoint(str(path), path)
        assert checkpoint is not None  # only "auto" may find none
        return checkpoint
    if path.is_file():
        return _open_files(path.parent, [path.name])
    if not (path / _INDEX).exists():
        return _open_files(path, [_SINGLE])
    placed = _read_index(path)
    checkpoint = _open_files(path, sorted(set(placed.values())))
    if absent := sorted(placed.keys() - set(checkpoint.names("model"))):
        raise CheckpointDamaged(f"{path / _INDEX} names {absent[0]!r}, which no file of it holds.")
    return checkpoint


def _open_model(path: Path, verify: Literal["checksums", "sizes"]) -> Checkpoint:
    """Open a checkpoint with its section "model" alone, and verify that."""
    manifest = read_manifest(path)
    contents = {file: held for file, held in manifest.contents.items() if file.startswith("model/")}
    for file in contents:
        size, sha256 = manifest.files[file]
        check_file(path, file, size, sha256 if verify == "checksums" else None)
    return Checkpoint(path, manifest, {}, {file: check_header(path / file, held) for file, held in contents.items()})


def _open_files(directory: Path, files: list[str]) -> Checkpoint:
    """Open safetensors files of a directory as if they were a checkpoint's; a hub's cache has links there."""
    specs: dict[str, Spec] = {}
    begins = {}
    for file in files:
        held = read_header(directory / file)
        begins[file] = check_header(directory / file, held)
        if twice := sorted(held.keys() & specs.keys()):
            raise CheckpointDamaged(f"{twice[0]!r} is in two files of {directory}: {file} is one of them.")
        for name, (dtype, shape) in held.items():
            specs[name] = Spec(dtype, shape, (Chunk(file, (0,) * len(shape), shape),))
    return Checkpoint(directory, Manifest({}, {"model": specs}, {}, {}, {}), {}, begins)


def _read_index(directory: Path) -> dict[str, str]:
    """File of each tensor by its name, as a model hub's index has them."""
    path = directory / _INDEX
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointDamaged(f"{path} has no weight_map, which says what is in which file.")
    for name, file in placed.items():
        if not isinstance(file, str) or not _FILE_NAME.fullmatch(file):
            raise CheckpointDamaged(f"{path} places {name!r} in {file!r}, which is no file name of its directory.")
    return placed


def _fetch(url: str, folder: Path) -> Path:
    """Copy weights from a URL into a folder, piece by piece. Returns where they are: a file or the folder."""
    import fsspec  # slow, and there is seldom a URL

    try:
        files, root = fsspec.core.url_to_fs(url)
        if url.partition("?")[0].endswith(".safetensors"):
            files.get_file(root, str(folder / _SINGLE))
            return folder / _SINGLE
        root = root.rstrip("/")
        if files.exists(f"{root}/{MANIFEST}"):
            files.get_file(f"{root}/{MANIFEST}", str(folder / MANIFEST))
            names = [file for file in read_manifest(folder).contents if file.startswith("model/")]
            (folder / "model").mkdir()
        elif files.exists(f"{root}/{_INDEX}"):
            files.get_file(f"{root}/{_INDEX}", str(folder / _INDEX))
            names = sorted(set(_read_index(folder).values()))
        else:
            names = [_SINGLE]
        for name in names:
            files.get_file(f"{root}/{name}", str(folder / name))
    except LumenError:
        raise
    except Exception as error:  # of whichever package speaks this protocol
        raise CheckpointError(
            f"cannot fetch {url}: {type(error).__name__}: {error}. It must be a checkpoint, a .safetensors file, or a "
            f"directory with {_SINGLE} or {_INDEX}, and this machine must be allowed to read it."
        ) from error
    return folder
