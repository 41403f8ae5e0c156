"""Strikes: a process kills itself at the n-th event of a kind, such as one operation on the disk."""

import builtins
import io
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import NamedTuple


class Strike(NamedTuple):
    """Event at which one rank ends itself by `kill -9`."""

    rank: int
    event: str
    occurrence: int


class Striker:
    """Counter of the events of this process, which ends the process at the chosen one.

    Callers of `happens` report events. Two more kinds are `operation`, one operation below the checkpoints' folder
    since the first other event, and `cleaning`, an operation before that. A write counts twice: before it begins, and
    when half of it is done. The file `begun-<process>` marks the first event. The file `saves` counts saves that begin,
    and the file `commits` the committed ones.

    Args:
        folder: Folder of the checkpoints.
        strike: Event and its occurrence, or None for this process.
    """

    def __init__(self, folder, strike=None):
        self.folder = os.path.abspath(folder)
        self.strike = strike
        self.counts = Counter()
        self.begun = False
        self._lock = threading.Lock()

    def __deepcopy__(self, memo):
        """Return this object itself: a copied task counts the same events."""
        return self

    def happens(self, event):
        if not self.begun:
            self.begun = True
            Path(f"begun-{os.getpid()}").touch()
        self._count(event)

    def watch_the_disk(self):
        """Count every operation below the folder as an event from now on."""
        for name in ("open", "mkdir", "rename", "replace", "link", "unlink", "rmdir", "fsync", "truncate"):
            setattr(os, name, self._watched(getattr(os, name)))
        self._note_saves()
        striker, real_open = self, open

        class File(io.FileIO):
            def write(self, data):
                striker.operation()
                half = super().write(data[: len(data) // 2])
                striker.operation()
                return half + super().write(data[half:])

        def watched_open(path, mode="r", *args, **kwargs):
            if mode.startswith("r") or not self._is_below(path):
                return real_open(path, mode, *args, **kwargs)
            self.operation()
            assert "b" in mode, f"{path} is written as text, which is not watched"
            return File(path, mode)

        builtins.open = watched_open

    def watch_the_store(self):
        """Count every request to an object store twice from now on: before it is sent and when it is answered."""
        from fsspec.asyn import sync_wrapper
        from s3fs import S3FileSystem  # slow

        ask, striker = S3FileSystem._call_s3, self

        async def watched(files, method, *args, **kwargs):
            striker.operation()
            answer = await ask(files, method, *args, **kwargs)
            striker.operation()
            if method in ("put_object", "complete_multipart_upload") and kwargs["Key"].endswith("/manifest.json"):
                with open("commits", "a") as file:
                    file.write(f"{Path(kwargs['Key']).parent.name}\n")
            return answer

        S3FileSystem._call_s3, S3FileSystem.call_s3 = watched, sync_wrapper(watched)

    def operation(self):
        self._count("operation" if self.begun else "cleaning")

    def _count(self, event):
        with self._lock:  # a save has a separate thread
            self.counts[event] += 1
            if self.strike == (event, self.counts[event]):
                os.kill(os.getpid(), signal.SIGKILL)

    def _watched(self, function):
        def call(path, *args, **kwargs):
            if self._is_below(path, kwargs.get("dir_fd")):
                self.operation()
            return function(path, *args, **kwargs)

        return call

    def _is_below(self, path, directory=None):
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        if directory is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
        return os.path.abspath(path).startswith(f"{self.folder}/")

    def _note_saves(self):
        mkdir, rename, write = os.mkdir, os.rename, builtins.open

        def note(file, path):
            with write(file, "a") as opened:
                opened.write(f"{Path(path).name}\n")

        def noting_mkdir(path, *args, **kwargs):
            mkdir(path, *args, **kwargs)
            if self._is_below(path) and ".tmp-" in Path(path).name:
                note("saves", path)

        def noting_rename(source, target, **kwargs):
            rename(source, target, **kwargs)
            if self._is_below(target) and ".tmp-" in str(source) and ".tmp-" not in str(target):
                note("commits", target)

        os.mkdir, os.rename = noting_mkdir, noting_rename
