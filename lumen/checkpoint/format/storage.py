"""Storage of checkpoints: the interface, local directories, and the choice between directories and object stores."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import ClassVar, Literal, NamedTuple, TypeVar, final

from lumen.console import logger as _log
from lumen.errors import CheckpointDamaged, CheckpointError, ConfigError
from lumen.errors.arguments import expand_path

MANIFEST = "manifest.json"
"""Name of the manifest, the file that is written last and completes a checkpoint."""
TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{8}")
"""Pattern of the names that `make_temporary_path` returns; leftovers of killed processes have such names."""
AnyPath = TypeVar("AnyPath", bound=PurePath)
ReadInto = Callable[[str, int, memoryview], int]
"""Function that fills memory with bytes of a file, from an offset on, and returns the number of bytes read."""

ADVICE = {
    errno.ENOSPC: "Free space on that disk or choose another directory.",
    errno.EDQUOT: "The disk quota is used up: free space or choose another directory.",
    errno.EFBIG: "The file exceeds a size limit: raise the limit (`ulimit -f`) or choose another directory.",
    errno.EACCES: "Give this user the right to write there or choose another directory.",
    errno.EPERM: "Give this user the right to write there or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.ENOENT: "A directory was removed while in use: do not change the run's directory during the run, and use a "
    "disk that all processes share.",
    errno.ENOTDIR: "A file is in the way: move it or choose another directory.",
    errno.EEXIST: "A file is in the way: move it or choose another directory.",
    errno.EREMOTE: "Check the network, the address and the credentials in the environment.",
}


@contextmanager
def explain_storage_errors(verb: str, path: PurePath) -> Iterator[None]:
    """Turn an OSError of a storage into a CheckpointError: "cannot `verb` `path`", the reason, and advice."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check the disk.")
        raise CheckpointError(f"cannot {verb} {error.filename or path}: {error.strerror or error}. {advice}") from error


@contextmanager
def explain_read_errors(path: PurePath) -> Iterator[None]:
    """Turn an OSError into CheckpointDamaged for a missing or unreadable file, and otherwise into CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO):
            raise CheckpointDamaged(f"{path} is missing or unreadable: {error.strerror}.") from error
        # The file may be intact.
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def make_temporary_path(path: AnyPath) -> AnyPath:
    """Return an unused name in the directory of a path; the suffix marks an unfinished file or directory."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


@final
class Url(PurePosixPath):
    """URL such as `s3://bucket/run` that is joined, named and compared like a path, but refused by file functions."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on this machine")


@final
class Status(NamedTuple):
    """Kind and size of an existing file or directory; "other": a pipe, a device or a broken link."""

    kind: Literal["file", "directory", "other"]
    size_bytes: int


@final
class Draft(NamedTuple):
    """Unfinished checkpoint.

    Attributes:
        root: The directory that all processes write to: a temporary directory, or `directory` itself.
        directory: The final path of the checkpoint.
        mark: Suffix of the names of files, if a killed save may still be writing other files to `root`.
    """

    root: PurePath
    directory: PurePath
    mark: str


class Storage(ABC):
    """Interface of a storage for checkpoints. A storage has no state; `get_storage` chooses one for a path.

    A place is a pure path. Any code may join, name and compare places, but only the methods of a storage access them. A
    storage raises OSError for all failures; `explain_storage_errors` and `explain_read_errors` turn an OSError into a
    message for users.

    Every checkpoint that readers see is complete, even if a process or a machine dies. A save calls `begin` to get a
    draft. All processes `create` the draft's files, each durable when its `with` block ends. The manifest is the last
    file, and `commit` makes the draft a complete checkpoint:

    * Local directory: the draft is a temporary directory next to the final path, and the commit is one rename.
    * Object store, which cannot rename: the draft is written to the final path, under unique names. Until
      its manifest exists, `find_uncommitted` finds the draft. The upload of the manifest completes the checkpoint.

    `remove` works in reverse order: it first removes the name or the manifest, then the rest.

    Attributes:
        quick_bytes: Size in bytes below which a save is so fast that training may wait for it.
        piece_bytes: Best size in bytes of the pieces in which a whole file is read.
    """

    quick_bytes: ClassVar[int] = 16 << 20  # takes tens of milliseconds on a disk
    piece_bytes: ClassVar[int] = 1 << 20  # fits into the processor's cache until it is hashed

    # ---------------------------------------------------------------------- queries

    @abstractmethod
    def get_status(self, path: PurePath) -> Status | None:
        """Return the status of a path, or None if it does not exist; follows links. One request in an object store."""

    @abstractmethod
    def list_names(self, folder: PurePath) -> list[str]:
        """Return the names in a directory; an object store returns an empty list for a missing directory."""

    @abstractmethod
    def list_files(self, directory: PurePath) -> list[str]:
        """Return the relative names of all files and links below a directory; "" if the path is a file or a link."""

    @abstractmethod
    def get_write_time_s(self, file: PurePath) -> float:
        """Return the time when a file was written, in seconds since 1970."""

    def find_with_manifest(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Return the directories that have a manifest, without reading it; an object store needs one request.

        Raises:
            CheckpointError: The folder cannot be reached, or this user has no permission.
        """
        found = set()
        for each in directories:
            with explain_read_errors(each):
                status = self.get_status(each / MANIFEST)
            if status is not None and status.kind == "file":
                found.add(each)
        return found

    def find_uncommitted(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Return the names in a folder that readers must ignore: drafts at their final path without a manifest.

        Raises:
            CheckpointError: The folder cannot be reached, or this user has no permission.
        """
        return set()

    # ---------------------------------------------------------------------- reading

    @abstractmethod
    def make_piece_reader(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """Return a thread-safe function that reads pieces of files in a directory; its caches are freed with it.

        Args:
            directory: Directory that holds the files.
            sizes: Sizes of the files in bytes, by relative name; no piece may reach beyond the end of its file.
        """

    def get_size(self, file: PurePath) -> int:
        """Return the size of a file in bytes.

        Raises:
            FileNotFoundError: The path does not exist.
        """
        if (found := self.get_status(file)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return found.size_bytes

    def read(self, file: PurePath, size_bytes: int) -> bytearray:
        """Return the first bytes of a file; fewer if it is shorter."""
        data = bytearray(size_bytes)
        count = self.make_piece_reader(file.parent, {file.name: size_bytes})(file.name, 0, memoryview(data))
        return data[:count]

    def check_inside(self, directory: PurePath, name: str) -> None:
        """Check that a name in a directory is a regular file there, and not a link to a file elsewhere.

        Raises:
            CheckpointDamaged: The name is a link out of the directory, or not a regular file.
        """

    # ---------------------------------------------------------------------- writing

    def check_writable(self, folder: PurePath) -> None:
        """Check before any work that checkpoints can be written to a folder that cannot be locked.

        Raises:
            CheckpointError: The folder is not writable; the message gives the reason.
            ConfigError: A package is missing.
        """

    @abstractmethod
    def begin(self, directory: PurePath) -> Draft:
        """Create a draft of a new checkpoint, and the parent directories.

        Raises:
            FileExistsError: The draft would use the final path, but the path exists.
        """

    @abstractmethod
    def make_directory(self, path: PurePath) -> AbstractContextManager[None]:
        """Create a directory in an existing one, if it is missing; its names are durable when the `with` block ends."""

    @abstractmethod
    def create(self, path: PurePath) -> AbstractContextManager[Callable[[bytes | memoryview], int]]:
        """Create a file that is complete and durable when the `with` block ends; yields a function that appends bytes.

        The file must not exist. An object store cannot check this, so names there must be unique.
        """

    @abstractmethod
    def commit(self, draft: Draft) -> None:
        """Turn a draft whose files are all written into a durable complete checkpoint; the final path must be free."""

    @abstractmethod
    def rename(self, directory: PurePath, other: PurePath) -> None:
        """Rename a checkpoint durably; `find_uncommitted` leftovers at the old path are removed."""

    @abstractmethod
    def remove(self, directory: PurePath) -> None:
        """Remove a checkpoint or a draft with all files; readers see no partial checkpoint, even after a kill.

        For a link, only the link is removed, and its target is kept.
        """


_MAX_OPEN_FILES = 64  # open files: tensors are read alternately from the files of up to 64 processes
_ABSENT_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)


@final
class LocalStorage(Storage):
    """Local directories, including shared file systems."""

    def get_status(self, path: PurePath) -> Status | None:
        """Return the status of a path, or None if it does not exist; calls `os.stat` once, which follows links."""
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno not in _ABSENT_ERRNOS:
                raise
            return Status("other", 0) if os.path.islink(path) else None
        except ValueError:  # an invalid name, such as one with a null byte
            return None
        mode = found.st_mode
        return Status("file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other", found.st_size)

    def list_names(self, folder: PurePath) -> list[str]:
        """Return the names in a directory, unordered."""
        return os.listdir(folder)

    def list_files(self, directory: PurePath) -> list[str]:
        """Return the relative names of all files and links below a directory; links are not followed."""
        root = Path(directory)
        if root.is_symlink() or not root.is_dir():
            return [""]
        return [str(each.relative_to(root)) for each in root.rglob("*") if each.is_symlink() or not each.is_dir()]

    def get_write_time_s(self, file: PurePath) -> float:
        """Return the modification time of a file, in seconds since 1970, by the clock of the file system."""
        return os.stat(file).st_mtime

    def make_piece_reader(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """Return a function that reads pieces of files; each file is opened once."""
        opened = lru_cache(_MAX_OPEN_FILES)(lambda name: _Descriptor(directory / name))

        def read_into(name: str, start: int, view: memoryview) -> int:
            file, done = opened(name), 0
            while done < len(view) and (count := os.preadv(file.descriptor, [view[done:]], start + done)):
                done += count
            return done

        return read_into

    def check_inside(self, directory: PurePath, name: str) -> None:
        """Check that a name is a regular file; links within the directory are allowed."""
        path, parents = directory / name, PurePath(name).parents[-2::-1]
        with explain_read_errors(path):
            modes = [os.lstat(each).st_mode for each in (*(directory / each for each in parents), path)]
            if any(map(stat.S_ISLNK, modes)):
                root, real = os.path.realpath(directory), os.path.realpath(path)
                if os.path.commonpath([root, real]) != root:
                    raise CheckpointDamaged(f"{path} is a link that leaves the checkpoint.")
                modes.append(os.stat(real).st_mode)
            if not stat.S_ISREG(modes[-1]):  # opening a pipe would block
                raise CheckpointDamaged(f"{path} is not a regular file.")

    def begin(self, directory: PurePath) -> Draft:
        """Create a draft as a new temporary directory next to the final path."""
        draft = Draft(make_temporary_path(directory), directory, "")
        make_directory(Path(draft.root))
        return draft

    @contextmanager
    def make_directory(self, path: PurePath) -> Iterator[None]:
        """Create a directory if it is missing, and sync it at the end of the block.

        If a file has this name, or the directory is removed meanwhile, opening a file in the directory raises an error.
        """
        with suppress(FileExistsError):
            os.mkdir(path)
        yield
        fsync_directory(path)

    @contextmanager
    def create(self, path: PurePath) -> Iterator[Callable[[bytes | memoryview], int]]:
        """Create a file exclusively, and sync it at the end of the block."""
        with open(path, "xb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())

    def commit(self, draft: Draft) -> None:
        """Sync the draft, and rename it to the final path."""
        fsync_directory(draft.root)
        self.rename(draft.root, draft.directory)

    def rename(self, directory: PurePath, other: PurePath) -> None:
        """Rename a directory, and sync its parent."""
        os.rename(directory, other)
        fsync_directory(other.parent)

    def remove(self, directory: PurePath) -> None:
        """Rename a directory to a temporary name, unless it has one, and remove it."""
        if os.path.islink(directory):
            _log.info("removing the link %s; its target is kept: %s", directory, os.path.realpath(directory))
            os.unlink(directory)
            fsync_directory(directory.parent)
            return
        if not TEMPORARY.fullmatch(directory.name):
            self.rename(directory, temporary := make_temporary_path(directory))
            directory = temporary
        shutil.rmtree(directory)


@final
class _Descriptor:
    """Open file for reading, which is closed when this object is freed."""

    def __init__(self, path: PurePath) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)


def make_directory(path: Path) -> None:
    """Create a new directory and its missing parents; new parents survive a power loss.

    Raises:
        OSError: The directory exists, or cannot be created.
    """
    missing = [each for each in path.parents if not each.exists()]
    path.mkdir(parents=True)
    for each in missing:
        with suppress(PermissionError):  # a directory without read permission cannot be synced
            fsync_directory(each.parent)


def fsync_directory(path: PurePath) -> None:
    """Sync a directory, so that renames and new names in it survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------- places

_LOCAL = LocalStorage()


def as_path_or_url(path: str | PurePath) -> PurePath:
    """Return a local path, with `~` expanded, or a `Url`.

    Raises:
        ConfigError: The path is empty, a URL that pathlib has changed, or a URL with wildcards.
    """
    text = str(path)
    if isinstance(path, Path) and re.match("[a-z][a-z0-9+.-]+:$", path.parts[0] if path.parts else ""):
        raise ConfigError(f"{text}: pathlib removes slashes from URLs. Pass a string instead.")
    if "://" not in text:
        return expand_path(text)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if found := re.search(r"[*?\[\]]", text):
        raise ConfigError(f"{text}: {found[0]!r} is a wildcard in URLs. Choose a different name.")
    return Url(text)


def get_storage(place: PurePath) -> Storage:
    """Return the storage of a path or URL."""
    if not isinstance(place, Url):
        return _LOCAL
    from lumen.checkpoint.format.object_store import ObjectStore  # imports this module, and few runs need it

    return ObjectStore()


def as_local_path(place: PurePath) -> Path | None:
    """Return the path for the operating system, used for locks, logs and links; None for a URL."""
    return Path(place) if get_storage(place) is _LOCAL else None


def path_exists(place: PurePath) -> bool:
    """Return True if a path exists, including a broken link; raise OSError if this cannot be determined."""
    return get_storage(place).get_status(place) is not None


def is_file(place: PurePath) -> bool:
    """Return True if a path is a file; raise OSError if this cannot be determined."""
    found = get_storage(place).get_status(place)
    return found is not None and found.kind == "file"


def is_dir(place: PurePath) -> bool:
    """Return True if a path is a directory or a prefix of objects; raise OSError if this cannot be determined."""
    found = get_storage(place).get_status(place)
    return found is not None and found.kind == "directory"
