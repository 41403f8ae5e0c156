"""Places that are no directory of this machine: object stores, and whatever else fsspec opens.

There is no renaming, no syncing and no directory: a directory is what the names of objects begin with, and an object is
there, whole and durable, as soon as its upload has ended. So the last object uploaded is what commits the others.
"""

from __future__ import annotations

import errno
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any, final

from lumen.errors import ConfigError
from lumen.errors.arguments import local_path

_PART_BYTES = 16 << 20  # of an upload or a download: what a store takes well, and what memory it needs beside a tensor
_AHEAD_BYTES = 1 << 20  # read at once where less is asked for: headers, small tensors
_MOST_BLOCKS = 64  # of so many bytes that are kept: tensors are read in turn from the files of so many processes

_INSTALL = "{place} cannot be opened: {error}. For s3:// and gs:// `pip install 'lumen[remote]'` brings s3fs and gcsfs."


@final
class RemotePath(PosixPath):
    """A place such as `s3://bucket/run`, joined, named and compared as any path; to open it as a file is an error."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        raise TypeError(f"{self} is not on this machine")

    def exists(self) -> bool:
        """Whether there is an object of this name, or one below it; where that cannot be told it is an OSError."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there are objects below it."""
        return self._kind() == "directory"

    def is_symlink(self) -> bool:
        """There are none."""
        return False

    def _kind(self) -> str | None:
        try:
            return str(self.call("info")["type"])
        except FileNotFoundError:
            return None

    def size(self) -> int:
        """Of this object, in bytes."""
        return int(self.call("info")["size"])

    def names(self) -> list[str]:
        """Names of what is directly below it; none where nothing is."""
        try:
            found = [str(name).rstrip("/") for name in self.call("ls", detail=False)]
        except FileNotFoundError:
            return []
        return [name.rpartition("/")[2] for name in found if not str(self).endswith(f"/{name.lstrip('/')}")]

    def below(self) -> list[RemotePath]:
        """All objects below it."""
        start = self.call("_strip_protocol").strip("/")
        found = [str(name).strip("/") for name in self.call("find")]
        return [self / name.removeprefix(f"{start}/") for name in found if name.startswith(f"{start}/")]

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove one object."""
        try:
            self.call("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_all(self, objects: list[RemotePath]) -> None:
        """Remove objects of this place, in any order."""
        if objects:
            with _translated(self):
                files, _ = _files_of(self)
                files.rm([_files_of(each)[1] for each in objects])

    def copy_to(self, other: RemotePath) -> None:
        """Copy one object to another name of the same store."""
        with _translated(self):
            files, name = _files_of(self)
            files.cp_file(name, _files_of(other)[1])

    def call(self, method: str, **options: Any) -> Any:
        """What a method of the file system returns for this place; whatever it raises becomes an OSError."""
        with _translated(self):
            files, name = _files_of(self)
            return getattr(files, method)(name, **options)


def as_place(path: str | Path) -> Path:
    """A path of this machine, in which `~` is the home directory, or a `RemotePath` where it is a URL.

    Raises:
        ConfigError: It is empty, a URL that pathlib has spoilt, or one with wildcards.
    """
    if isinstance(path, RemotePath):
        return path
    text = str(path)
    if isinstance(path, Path) and re.match("[a-z][a-z0-9+.-]+:$", path.parts[0] if path.parts else ""):
        raise ConfigError(f"{text}: pathlib takes slashes out of URLs. Give a string instead.")
    if "://" not in text:
        return local_path(text)
    if text.startswith("file://"):
        return Path(text.removeprefix("file://"))
    if found := re.search(r"[*?\[\]]", text):
        raise ConfigError(f"{text}: {found[0]!r} would be a wildcard there. Choose another name.")
    return RemotePath(text)


@contextmanager
def uploaded(place: RemotePath) -> Iterator[Callable[[bytes | memoryview], int]]:
    """Upload an object piece by piece: it is there when the `with` block ends well, and is not when that fails.

    Returns:
        What appends bytes.

    Raises:
        OSError: The store refuses, or has another size than what was written.
    """
    with _translated(place):
        files, name = _files_of(place)
        file = files.open(name, "wb", block_size=_PART_BYTES)
    size = 0

    def write(data: bytes | memoryview) -> int:
        nonlocal size
        with _translated(place):
            file.write(data)
        size += len(data)
        return len(data)

    try:
        yield write
        with _translated(place):
            file.close()
    except BaseException:
        with suppress(AttributeError):
            file.closed = True  # to close it later, be it by the garbage collector, would commit what is there
        with suppress(Exception):
            file.discard()
        raise
    if (found := place.size()) != size:
        raise OSError(errno.EREMOTE, f"it has {found} bytes instead of {size} after the upload", str(place))


@final
class _Object(io.RawIOBase):
    """Reads an object range by range, with one request for each and no memory but the caller's."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        self._size = place.size()
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + min(len(view), _PART_BYTES), self._size)
        if end <= self._at:
            return 0
        data = _fetched(self._place, self._at, end)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)

    def readall(self) -> bytes:
        """What Python would read in pieces of some kilobytes."""
        data = bytearray(max(0, self._size - self._at))
        view, done = memoryview(data), 0
        while count := self.readinto(view[done:]):
            done += count
        return bytes(view[:done])


@final
class Pieces:
    """Reads pieces of objects of known sizes; what is small together with what lies around it. For several threads.

    Args:
        place: What they are below.
        sizes: Their sizes in bytes, by their names there.
    """

    def __init__(self, place: RemotePath, sizes: Mapping[str, int]) -> None:
        def fetch(name: str, number: int) -> bytes:
            start = number * _AHEAD_BYTES
            return _fetched(place / name, start, min(start + _AHEAD_BYTES, sizes[name]))

        self._place = place
        self._block = lru_cache(_MOST_BLOCKS)(fetch)
        self.free = self._block.cache_clear

    def read_into(self, name: str, start: int, view: memoryview) -> int:
        """Fill memory with the bytes of an object from `start` on, which must be inside its size.

        Returns:
            How many bytes there were.

        Raises:
            OSError: It cannot be read.
        """
        done = 0
        while done < len(view):
            at, missing = start + done, len(view) - done
            if missing < _AHEAD_BYTES:
                number, begin = divmod(at, _AHEAD_BYTES)
                data = self._block(name, number)[begin : begin + missing]
            else:
                data = _fetched(self._place / name, at, at + min(missing, _PART_BYTES))
            if not data:
                break
            view[done : done + len(data)] = data
            done += len(data)
        return done


def _fetched(place: RemotePath, start: int, end: int) -> bytes:
    """Bytes of an object, by one request."""
    data: bytes = place.call("cat_file", start=start, end=end)
    if len(data) > end - start:
        raise OSError(errno.EREMOTE, "the server sends whole files only", str(place))
    return data


def opened_remotely(place: RemotePath, *, whole: bool) -> io.BufferedReader:
    """Open an object to read all of it, or a few places in it."""
    return io.BufferedReader(_Object(place), _PART_BYTES if whole else _AHEAD_BYTES)


def _files_of(place: RemotePath) -> tuple[Any, str]:
    """The file system of a place, and its name there. Asked for anew each time: after a fork the old one is dead."""
    import fsspec  # slow, and there is seldom such a place

    try:  # without the cache, because what other processes do is to be seen at once
        return fsspec.core.url_to_fs(str(place), use_listings_cache=False)  # type: ignore[no-any-return]
    except ValueError as error:
        raise ConfigError(f"{place}: nothing opens such a URL: {error}. It may be misspelt.") from error


@contextmanager
def _translated(place: Path) -> Iterator[None]:
    """Turn whatever a package for some protocol raises into an OSError whose number tells what is known of it."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(_INSTALL.format(place=place, error=error)) from error
    except ConfigError:
        raise
    except OSError as error:
        kinds = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
        number = next((number for kind, number in kinds.items() if isinstance(error, kind)), errno.EREMOTE)
        raise OSError(number, error.strerror or str(error) or type(error).__name__, str(place)) from error
    except Exception as error:
        raise OSError(errno.EREMOTE, f"{type(error).__name__}: {error}", str(place)) from error
