"""Directories of this machine: a checkpoint is written beside its place, synced, and committed by one rename."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePath
from typing import final

from lumen.checkpoint.storage import TEMPORARY, Draft, ReadInto, Status, Storage, readable, temporary_name
from lumen.console import logger as _log
from lumen.errors import CheckpointDamaged

_MOST_OPEN = 64  # files at once: tensors are read in turn from the files of so many processes
_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.EBADF, errno.ELOOP)


@final
class LocalStorage(Storage):
    """Directories of this machine, and those that it shares with others."""

    def as_local(self, path: PurePath) -> Path:
        """The path itself."""
        return Path(path)

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

    def open(self, path: PurePath, *, whole: bool = False) -> BufferedReader:
        """As Python does."""
        return open(path, "rb")

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
        """Synced at the end."""
        Path(path).mkdir(exist_ok=True)
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
