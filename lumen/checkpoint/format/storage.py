"""What keeps checkpoints: the contract, directories of this machine, and the choice between them and object stores."""

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
from lumen.errors.arguments import local_path

MANIFEST = "manifest.json"
"""The file that makes a checkpoint one: written last."""
TEMPORARY = re.compile(r".+\.tmp-[0-9a-f]{8}")
"""Names that `temporary_name` gives: what killed processes leave has one."""
AnyPath = TypeVar("AnyPath", bound=PurePath)
ReadInto = Callable[[str, int, memoryview], int]
"""Fills memory with the bytes of a file, given its name, from an offset on; returns how many bytes there were."""

ADVICE = {
    errno.ENOSPC: "Free space on that disk or choose another directory.",
    errno.EDQUOT: "The disk quota is used up: free space or choose another directory.",
    errno.EFBIG: "No file may grow that large there: raise the limit (`ulimit -f`) or choose another directory.",
    errno.EACCES: "Give this user the right to write there or choose another directory.",
    errno.EPERM: "Give this user the right to write there or choose another directory.",
    errno.EROFS: "The file system is read-only: choose another directory.",
    errno.ENOENT: "A directory was removed while it was in use: leave the run's directory alone while it runs, on a "
    "disk that all its processes share.",
    errno.ENOTDIR: "A file is in the way: move it or choose another directory.",
    errno.EEXIST: "A file is in the way: move it or choose another directory.",
    errno.EREMOTE: "Check the network, the address and the credentials, which are those of the environment.",
}


@contextmanager
def explained(verb: str, path: PurePath) -> Iterator[None]:
    """Turn what a storage refuses into a CheckpointError: "cannot `verb` `path`", why, and what to do."""
    try:
        yield
    except OSError as error:
        advice = ADVICE.get(error.errno or 0, "Check the disk.")
        raise CheckpointError(f"cannot {verb} {error.filename or path}: {error.strerror or error}. {advice}") from error


@contextmanager
def readable(path: PurePath) -> Iterator[None]:
    """Turn what is missing or unreadable into CheckpointDamaged, and any other refusal into CheckpointError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EIO):
            raise CheckpointDamaged(f"{path} is missing or unreadable: {error.strerror}.") from error
        # the file is intact, as far as is known
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error


def temporary_name(path: AnyPath) -> AnyPath:
    """A free name beside a path, by which everybody knows that what has it is not finished."""
    return path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")


@final
class Url(PurePosixPath):
    """A place such as `s3://bucket/run`, joined, named and compared as any path; no function for files takes it."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on this machine")


@final
class Status(NamedTuple):
    """What has a name; "other": a pipe, a device, a link that leads nowhere."""

    kind: Literal["file", "directory", "other"]
    size_bytes: int


@final
class Draft(NamedTuple):
    """A checkpoint that is being written.

    Attributes:
        root: Where all processes write: beside `directory`, or in its place.
        directory: What it will be called.
        mark: What its files' names end with, where a save that was killed may still be writing others to `root`.
    """

    root: PurePath
    directory: PurePath
    mark: str


class Storage(ABC):
    """What keeps checkpoints. It has no state; `storage_of` chooses it by what the user wrote.

    A place is a pure path: it is joined, named and compared anywhere, but looked at, read and written by these methods
    alone. What a storage refuses is an OSError; `explained` and `readable` say it to the user.

    A checkpoint that readers see is complete, whenever a process or a machine dies. A save asks `begin` for a draft,
    all processes `create` its files, each durable when it ends, the manifest last, and `commit` makes it one:

    * A directory of this machine: the draft lies beside its place, and the commit is one rename.
    * An object store, which cannot rename: the draft lies in its place, under names that never come again, and is
      `unseen` until its manifest is there. The upload of that was the commit.

    `remove` goes backwards: first the name or the manifest goes, then the rest.

    Attributes:
        quick_bytes: A smaller save is over so soon that training may wait for it.
        piece_bytes: A file that is read whole is best read in pieces of this size.
    """

    quick_bytes: ClassVar[int] = 16 << 20  # on a disk after some tens of milliseconds
    piece_bytes: ClassVar[int] = 1 << 20  # stays in the processor's cache until it is hashed

    # ---------------------------------------------------------------------- looking

    @abstractmethod
    def look(self, path: PurePath) -> Status | None:
        """What has this name, or None; links are followed. In an object store one request."""

    @abstractmethod
    def names(self, folder: PurePath) -> list[str]:
        """Names of what is directly in a directory; in an object store none where nothing is."""

    @abstractmethod
    def files(self, directory: PurePath) -> list[str]:
        """Names, in a directory, of all files and links in it and below; "" for what is a file or a link itself."""

    @abstractmethod
    def written_s(self, file: PurePath) -> float:
        """When a file was written, in seconds since 1970."""

    def with_manifest(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Which of some directories in a folder have a manifest; it is not read. One request where that is enough.

        Raises:
            CheckpointError: The place cannot be reached, or this user may not look.
        """
        found = set()
        for each in directories:
            with readable(each):
                status = self.look(each / MANIFEST)
            if status is not None and status.kind == "file":
                found.add(each)
        return found

    def unseen(self, folder: PurePath, directories: Sequence[PurePath]) -> set[PurePath]:
        """Which of some names in a folder are no checkpoints yet, or no more, for a reader: drafts that lie in place.

        Raises:
            CheckpointError: The place cannot be reached, or this user may not look.
        """
        return set()

    # ---------------------------------------------------------------------- reading

    @abstractmethod
    def pieces(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """What reads pieces of files in a directory, for several threads; what it keeps is freed with it.

        Args:
            directory: Directory that holds the files.
            sizes: Sizes of the files in bytes, by their names in it; no piece may reach beyond its file.
        """

    def size_of(self, file: PurePath) -> int:
        """Size of a file in bytes.

        Raises:
            FileNotFoundError: Nothing has this name.
        """
        if (found := self.look(file)) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        return found.size_bytes

    def read(self, file: PurePath, size_bytes: int) -> bytearray:
        """Return the first bytes of a file; fewer if it is shorter."""
        data = bytearray(size_bytes)
        count = self.pieces(file.parent, {file.name: size_bytes})(file.name, 0, memoryview(data))
        return data[:count]

    def check_inside(self, directory: PurePath, name: str) -> None:
        """Check that a name in a directory is a regular file there, and no link to one elsewhere.

        Raises:
            CheckpointDamaged: The name is a link out of the directory, or no regular file.
        """

    # ---------------------------------------------------------------------- writing

    def check_writable(self, folder: PurePath) -> None:
        """Find out before any work whether checkpoints can be kept in a place that no job has claimed by a lock.

        Raises:
            CheckpointError: Nothing can be written there; the message says why.
            ConfigError: A package is missing.
        """

    @abstractmethod
    def begin(self, directory: PurePath) -> Draft:
        """Make room for a new checkpoint and for the directories that it lies in.

        Raises:
            FileExistsError: The draft would lie in its place, but something has that name.
        """

    @abstractmethod
    def directory(self, path: PurePath) -> AbstractContextManager[None]:
        """Make a directory in one that is there, if it is not; when the `with` block ends its names are durable."""

    @abstractmethod
    def create(self, path: PurePath) -> AbstractContextManager[Callable[[bytes | memoryview], int]]:
        """Create a file, which is there, whole and durable, when the `with` block ends; it yields what appends bytes.

        It must not exist. In an object store nobody can see to that, so names there must never come again.
        """

    @abstractmethod
    def commit(self, draft: Draft) -> None:
        """Make a draft whose files are all written a checkpoint, for good; its name must be free."""

    @abstractmethod
    def rename(self, directory: PurePath, other: PurePath) -> None:
        """Give a checkpoint another name, for good; what lies in its place and is `unseen` is removed."""

    @abstractmethod
    def remove(self, directory: PurePath) -> None:
        """Remove a checkpoint or a draft with everything in it; a kill meanwhile leaves nothing that readers see.

        Of a link only the link: what it leads to is somebody else's.
        """


_MOST_OPEN = 64  # files at once: tensors are read in turn from the files of so many processes
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)


@final
class LocalStorage(Storage):
    """Directories of this machine, and those that it shares with others."""

    def look(self, path: PurePath) -> Status | None:
        """By one stat, after links."""
        try:
            found = os.stat(path)
        except OSError as error:
            if error.errno not in _ABSENT:
                raise
            return Status("other", 0) if os.path.islink(path) else None
        except ValueError:  # a name that nothing can have
            return None
        mode = found.st_mode
        return Status("file" if stat.S_ISREG(mode) else "directory" if stat.S_ISDIR(mode) else "other", found.st_size)

    def names(self, folder: PurePath) -> list[str]:
        """In no order."""
        return os.listdir(folder)

    def files(self, directory: PurePath) -> list[str]:
        """No way leads through links."""
        root = Path(directory)
        if root.is_symlink() or not root.is_dir():
            return [""]
        return [str(each.relative_to(root)) for each in root.rglob("*") if each.is_symlink() or not each.is_dir()]

    def written_s(self, file: PurePath) -> float:
        """By the clock of the file system."""
        return os.stat(file).st_mtime

    def pieces(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """Each file is opened once."""
        opened = lru_cache(_MOST_OPEN)(lambda name: _Descriptor(directory / name))

        def read_into(name: str, start: int, view: memoryview) -> int:
            file, done = opened(name), 0
            while done < len(view) and (count := os.preadv(file.number, [view[done:]], start + done)):
                done += count
            return done

        return read_into

    def check_inside(self, directory: PurePath, name: str) -> None:
        """Links inside the directory are none to elsewhere."""
        path, above = directory / name, PurePath(name).parents[-2::-1]
        with readable(path):
            modes = [os.lstat(each).st_mode for each in (*(directory / each for each in above), path)]
            if any(map(stat.S_ISLNK, modes)):
                root, real = os.path.realpath(directory), os.path.realpath(path)
                if os.path.commonpath([root, real]) != root:
                    raise CheckpointDamaged(f"{path} is a link that leaves the checkpoint.")
                modes.append(os.stat(real).st_mode)
            if not stat.S_ISREG(modes[-1]):  # opening a pipe would wait for ever
                raise CheckpointDamaged(f"{path} is not a regular file.")

    def begin(self, directory: PurePath) -> Draft:
        """In a new directory beside its place."""
        draft = Draft(temporary_name(directory), directory, "")
        make_directory(Path(draft.root))
        return draft

    @contextmanager
    def directory(self, path: PurePath) -> Iterator[None]:
        """Synced at the end. If a file has this name, or the directory is removed, opening a file in it raises."""
        with suppress(FileExistsError):
            os.mkdir(path)
        yield
        fsync_directory(path)

    @contextmanager
    def create(self, path: PurePath) -> Iterator[Callable[[bytes | memoryview], int]]:
        """Synced at the end; that it does not exist is seen to."""
        with open(path, "xb") as file:
            yield file.write
            file.flush()
            os.fsync(file.fileno())

    def commit(self, draft: Draft) -> None:
        """By one rename."""
        fsync_directory(draft.root)
        self.rename(draft.root, draft.directory)

    def rename(self, directory: PurePath, other: PurePath) -> None:
        """The directory that it is in is synced."""
        os.rename(directory, other)
        fsync_directory(other.parent)

    def remove(self, directory: PurePath) -> None:
        """First it gets a temporary name, if it has none."""
        if os.path.islink(directory):
            _log.info("%s is a link: it is removed, what it leads to stays: %s", directory, os.path.realpath(directory))
            os.unlink(directory)
            fsync_directory(directory.parent)
            return
        if not TEMPORARY.fullmatch(directory.name):
            self.rename(directory, doomed := temporary_name(directory))
            directory = doomed
        shutil.rmtree(directory)


@final
class _Descriptor:
    """A file that is open for reading until nobody has this any more."""

    def __init__(self, path: PurePath) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)


def make_directory(path: Path) -> None:
    """Make a new directory and those above it; the names of these survive a power loss.

    Raises:
        OSError: It is there, or cannot be made.
    """
    above = [each for each in path.parents if not each.exists()]
    path.mkdir(parents=True)
    for each in above:
        with suppress(PermissionError):  # what may not be read cannot be synced
            fsync_directory(each.parent)


def fsync_directory(path: PurePath) -> None:
    """Make renames and new names in a directory survive a power loss."""
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


def as_place(path: str | PurePath) -> PurePath:
    """A path of this machine, in which `~` is the home directory, or a `Url`.

    Raises:
        ConfigError: It is empty, a URL that pathlib has spoilt, or one with wildcards.
    """
    text = str(path)
    if isinstance(path, Path) and re.match("[a-z][a-z0-9+.-]+:$", path.parts[0] if path.parts else ""):
        raise ConfigError(f"{text}: pathlib takes slashes out of URLs. Give a string instead.")
    if "://" not in text:
        return local_path(text)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if found := re.search(r"[*?\[\]]", text):
        raise ConfigError(f"{text}: {found[0]!r} would be a wildcard there. Choose another name.")
    return Url(text)


def storage_of(place: PurePath) -> Storage:
    """What keeps a place."""
    if not isinstance(place, Url):
        return _LOCAL
    from lumen.checkpoint.format.object_store import ObjectStore  # a module above this one, which few runs need

    return ObjectStore()


def as_local(place: PurePath) -> Path | None:
    """The path by which the operating system knows a place, for locks, logs and links; None: it does not."""
    return Path(place) if storage_of(place) is _LOCAL else None


def exists(place: PurePath) -> bool:
    """Whether something has this name, be it a link that leads nowhere; where that cannot be told it is an OSError."""
    return storage_of(place).look(place) is not None


def is_file(place: PurePath) -> bool:
    """Whether a file has this name; where that cannot be told it is an OSError."""
    found = storage_of(place).look(place)
    return found is not None and found.kind == "file"


def is_dir(place: PurePath) -> bool:
    """Whether a directory has this name, or objects begin with it; where that cannot be told it is an OSError."""
    found = storage_of(place).look(place)
    return found is not None and found.kind == "directory"
