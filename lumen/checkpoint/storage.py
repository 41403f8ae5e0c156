"""What keeps checkpoints: one contract for directories of this machine and for object stores, and what errors say."""

from __future__ import annotations

import errno
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from io import BufferedReader
from pathlib import Path, PurePath
from typing import ClassVar, Literal, NamedTuple, TypeVar, final

from lumen.errors import CheckpointDamaged, CheckpointError

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
class Status(NamedTuple):
    """What has a name; "other": a pipe, a device, a link that leads nowhere."""

    kind: Literal["file", "directory", "other"]
    size_bytes: int


@final
class Draft(NamedTuple):
    """A checkpoint that is being written.

    Attributes:
        root: Where all processes write.
        directory: What it will be called.
        mark: What its files' names end with, where a save that was killed may still be writing others to `root`.
    """

    root: PurePath
    directory: PurePath
    mark: str

    @property
    def is_in_place(self) -> bool:
        """Whether it lies under its name already."""
        return self.root == self.directory


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
    """

    quick_bytes: ClassVar[int] = 16 << 20  # on a disk after some tens of milliseconds

    @abstractmethod
    def as_local(self, path: PurePath) -> Path | None:
        """The path by which the operating system knows a place, for locks, logs and links; None: it does not."""

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
    def open(self, path: PurePath, *, whole: bool = False) -> BufferedReader:
        """Open a file to read it, where one wants or, `whole`, from its beginning to its end."""

    @abstractmethod
    def pieces(self, directory: PurePath, sizes: Mapping[str, int]) -> ReadInto:
        """What reads pieces of files in a directory, for several threads; what it keeps is freed with it.

        Args:
            directory: Directory that holds the files.
            sizes: Sizes of the files in bytes, by their names in it; no piece may reach beyond its file.
        """

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
