"""Run directory: a job claims it, and holds its lock until the job ends."""

import errno
import fcntl
import hashlib
import json
import os
import re
import socket
import time
import warnings
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, final

from lumen.checkpoint.format.folder import clean_leftovers
from lumen.checkpoint.format.storage import fsync_directory, make_directory
from lumen.console import logger as _log
from lumen.errors import ConfigError, RunDirectoryError

_LOCK = ".lock"
_MAX_LAUNCHERS = 256  # number of launchers to write down; at least one of them exists in the next attempt too
_PATIENCE_S = 1.0  # time in which a dying job, or a process that only reads, releases the lock
_TAKEN_ERRNOS = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)

# Within one process record locks do not exclude each other, and closing any descriptor of the file drops them. A run
# in this dictionary is never locked or opened again. Forked children inherit neither the locks nor these entries.
_held_directories: dict[str, dict[str, Any]] = {}
_claims: Counter[str] = Counter()  # number of claims by this process, by directory without its number
os.register_at_fork(after_in_child=_held_directories.clear)


@final
class RunDirectory:
    """Directory of a run, held by this process until `release` or its end; also a context manager.

    The lock is a POSIX record lock on `.lock`: forked data workers do not inherit it, and the kernel frees it however
    the process ends.

    Attributes:
        path: The directory, for example `runs/gpt`.
        checkpoints: The directory of the run's checkpoints.
        restarted: True if an earlier attempt of the same launch claimed the directory.
    """

    def __init__(self, path: Path, descriptor: int, *, restarted: bool) -> None:
        self.path, self.checkpoints, self.restarted = path, path / "checkpoints", restarted
        self._descriptor: int | None = descriptor
        self._key = os.path.realpath(path)

    @staticmethod
    def claim(
        root: Path, name: str, *, reuse: bool, home: str | None = None, launchers: Collection[str] = ()
    ) -> "RunDirectory":
        """Create or take over a run's directory, lock it, and remove files of interrupted saves.

        If a launcher restarts a program after a failure, each of its runs claims its previous directory.

        Args:
            root: Directory of all runs; created if absent.
            name: The run's name, a plain directory name.
            reuse: True takes `root/home`, new or not. False creates a new directory: `root/name`, or if that exists
                `root/name-2`, `root/name-3` and so on.
            home: Name of the directory that `reuse` takes. Default: `name`.
            launchers: Identifiers of the launchers that started the run's processes and may restart them.

        Raises:
            ConfigError: `name` is not a plain directory name.
            RunDirectoryError: A live job holds the directory, or it cannot be created or written.
        """
        with _explain_errors(root / name):
            path = _make_root(root, name)
            _claims[key := os.path.realpath(path)] += 1
            digests = sorted(hashlib.sha256(each.encode()).hexdigest()[:12] for each in launchers)[:_MAX_LAUNCHERS]
            # Only claims of the same run in earlier attempts of the same launch are equal to this claim.
            claim = {"launchers": digests, "name": name, "number": _claims[key]}
            earlier = _find_earlier_attempt(path, claim) if launchers else None
            if reuse and earlier is None:
                path = root / (home or name)
                path.mkdir(exist_ok=True)
            else:
                path = earlier or _create_directory(path)
            run = RunDirectory(path, _lock_directory(path, claim), restarted=earlier is not None)
            try:
                run.checkpoints.mkdir(exist_ok=True)
                for directory in (path, root):
                    fsync_directory(directory)
                clean_leftovers(run.checkpoints)
            except BaseException:
                run.release()
                raise
        return run

    @staticmethod
    def claim_again(path: Path) -> "RunDirectory":
        """Lock the directory of a run of this process that has ended, under its earlier claim.

        Raises:
            RunDirectoryError: A live job holds the directory, or it was removed.
        """
        claim = RunDirectory.read_last_holder(path)
        with _explain_errors(path):
            descriptor = _lock_directory(path, {key: claim.get(key) for key in ("launchers", "name", "number")})
        return RunDirectory(path, descriptor, restarted=False)

    @staticmethod
    def was_claimed(path: Path) -> bool:
        """Return True if a job has ever claimed a directory."""
        return os.path.lexists(path / _LOCK)

    @staticmethod
    def read_last_holder(path: Path) -> dict[str, Any]:
        """Return the notes of the job that holds or held a run's directory; empty without notes."""
        if holder := _held_directories.get(os.path.realpath(path)):
            return dict(holder)
        with suppress(OSError), _open_lock_file(path) as descriptor:
            return _read_holder(descriptor)
        return {}

    @staticmethod
    def read_live_holder(path: Path) -> dict[str, Any] | None:
        """Return the live job that holds a run's directory, as `host`, `pid` and `started`, or None.

        Raises:
            RunDirectoryError: This user may not read the directory.
        """
        if holder := _held_directories.get(os.path.realpath(path)):
            return dict(holder)
        with (
            _explain_errors(path),
            suppress(FileNotFoundError, NotADirectoryError),
            _open_lock_file(path) as descriptor,
        ):
            return None if _try_lock(descriptor, fcntl.LOCK_SH, path) else _read_holder(descriptor)
        return None

    def check_claim(self) -> None:
        """Check that the directory is still the claimed one; warn if its checkpoints were removed.

        Raises:
            RunDirectoryError: The directory was removed, moved or replaced, or another process has claimed it.
        """
        if self._descriptor is None:
            return
        held = os.fstat(self._descriptor)
        is_same = False
        with suppress(FileNotFoundError, NotADirectoryError):
            is_same = os.path.samestat(os.stat(self.path / _LOCK, follow_symlinks=False), held)
        if is_same and not self._holds_lock():
            holder = _read_holder(self._descriptor)
            raise RunDirectoryError(
                f"{self.path} is also in use by process {holder.get('pid')} on {holder.get('host')}. This process had "
                f"lost its lock, because code has opened and closed {_LOCK}, as a copy of the whole directory does. "
                f"Stop the other process, resume this run, and leave {_LOCK} out of copies."
            )
        if not is_same and held.st_nlink:
            raise RunDirectoryError(
                f"{self.path} was moved to {self._get_current_path()} while its run was writing files. Move the "
                "directory back, and resume the run."
            )
        if not is_same:
            raise RunDirectoryError(
                f"{self.path} was removed or replaced while its run was writing files, which are lost. Do not change "
                "the directory during a run. Start the run again."
            )
        if not self.checkpoints.exists():
            _log.warning(
                "%s was removed during the run: its checkpoints are lost. Lumen saves new checkpoints there.",
                self.checkpoints,
            )
            self.checkpoints.mkdir()

    def _holds_lock(self) -> bool:
        """Lock again if code of the user has closed the file, which drops the lock; False if another process has it."""
        assert self._descriptor is not None
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _TAKEN_ERRNOS
        return True

    def _get_current_path(self) -> str:
        """Return the present path of the directory, if the system knows it."""
        with suppress(OSError):
            return os.path.dirname(os.readlink(f"/proc/self/fd/{self._descriptor}"))
        return "a different path"

    def release(self) -> None:
        """Free the directory for other jobs; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
            _held_directories.pop(self._key, None)

    def __enter__(self) -> "RunDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def _open_lock_file(path: Path) -> Iterator[int]:
    descriptor = os.open(path / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def create_directory(root: Path, name: str) -> Path:
    """Create the directory `root/name`, or if that exists `root/name-2` and so on, which no job needs to lock.

    Raises:
        ConfigError: `name` is not a plain directory name.
        RunDirectoryError: The directory cannot be created.
    """
    with _explain_errors(root / name):
        return _create_directory(_make_root(root, name))


def _make_root(root: Path, name: str) -> Path:
    """Create the directory of all runs if it does not exist, and return the path of a run."""
    if not re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", name):
        raise ConfigError(f"{name!r} cannot name a run: use a name without '/' or '\\' that does not begin with '.'.")
    with suppress(FileExistsError):
        make_directory(root)
        with suppress(PermissionError):  # an unreadable directory cannot be synced
            fsync_directory(root.parent)
    return root / name


def _create_directory(path: Path) -> Path:
    taken = set(os.listdir(path.parent))
    names = chain([path.name], (f"{path.name}-{number}" for number in count(2)))
    while True:
        with suppress(FileExistsError):  # another job was faster
            free = path.with_name(next(name for name in names if name not in taken))
            free.mkdir()
            return free


def _find_earlier_attempt(path: Path, claim: dict[str, Any]) -> Path | None:
    """Return the directory that an earlier attempt of the same launch claimed with this number, or None."""
    numbered = re.compile(re.escape(path.name) + r"(-[0-9]+)?")
    for name in filter(numbered.fullmatch, os.listdir(path.parent)):
        holder = RunDirectory.read_last_holder(path.with_name(name))
        is_same_run = all(holder.get(key) == claim[key] for key in ("name", "number"))  # a user may name a run run-2
        if is_same_run and {*claim["launchers"]} & {*holder.get("launchers", ())}:
            return path.with_name(name)
    return None


def _lock_directory(path: Path, claim: dict[str, Any]) -> int:
    """Lock a run's directory, write down the holder, and return the lock's open descriptor."""
    key, began = os.path.realpath(path), datetime.now(UTC).isoformat(timespec="seconds")
    claimed = {"host": socket.gethostname(), "pid": os.getpid(), "started": began, **claim}
    if (holder := _held_directories.setdefault(key, claimed)) is not claimed:
        raise _make_in_use_error(path, holder)
    with ExitStack() as undoing:
        undoing.callback(_held_directories.pop, key)
        descriptor = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        undoing.callback(os.close, descriptor)
        deadline = time.monotonic() + _PATIENCE_S
        while not _try_lock(descriptor, fcntl.LOCK_EX, path):
            if time.monotonic() > deadline:
                raise _make_in_use_error(path, _read_holder(descriptor))
            time.sleep(_PATIENCE_S / 20)
        os.ftruncate(descriptor, os.pwrite(descriptor, json.dumps(claimed).encode(), 0))
        undoing.pop_all()
    return descriptor


def _try_lock(descriptor: int, kind: int, path: Path) -> bool:
    """Return True if no other process holds the lock; then lock it, unless the file system has no locks."""
    try:
        fcntl.lockf(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN_ERRNOS:
            return False
        if error.errno not in _UNSUPPORTED:
            raise
        warnings.warn(
            f"The file system of {path} has no locks ({error.strerror}): do not start two jobs with this directory.",
            stacklevel=5,
        )
    return True


def _read_holder(descriptor: int) -> dict[str, Any]:
    try:
        return dict(json.loads(os.pread(descriptor, 8192, 0)))
    except (ValueError, TypeError):  # the holder is about to write the notes
        return {"host": "unknown", "pid": "unknown", "started": "unknown"}


def _make_in_use_error(path: Path, holder: dict[str, Any]) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} is in use by a live job: process {holder.get('pid')} on {holder.get('host')}, started "
        f"{holder.get('started')}. Wait until it ends, stop it, or choose another run name."
    )


@contextmanager
def _explain_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"cannot use the run directory {error.filename or path}: {error.strerror or error}. "
            "Remove a file of this name, make the directory readable and writable, or choose a different directory."
        ) from error
