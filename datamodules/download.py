"""Downloads of files, whose hashes are verified."""

import hashlib
import http.client
import os
import shutil
import uuid
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

from lumen.errors import DataError


def cache_dir() -> Path:
    """Return the directory of downloads: ``$LUMEN_CACHE``, or ``~/.cache/lumen``."""
    return Path(os.environ.get("LUMEN_CACHE") or "~/.cache/lumen").expanduser()


def check_sha256(data: bytes, expected: str, source: str) -> None:
    """Compare a hash with the expected one.

    Args:
        data: The bytes to hash.
        expected: SHA-256, 64 hexadecimal digits.
        source: Origin of the bytes, for the message.

    Raises:
        DataError: The hash is different.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DataError(
            f"{source} has the SHA-256 {found}, expected {expected}. The file has changed, or the download was "
            "damaged. Try again, or use the original file."
        )


def download(url: str, path: str | Path, sha256: str, timeout_s: float = 60.0) -> Path:
    """Download a file once, and verify its hash.

    A file at ``path`` with the expected hash is used as it is. Any other file is replaced after the download is
    complete and verified. Several processes may call this at the same time.

    Args:
        url: Address of the file.
        path: Path of the file to write. Missing directories are created.
        sha256: SHA-256 of the content, 64 hexadecimal digits.
        timeout_s: Longest time without an answer of the server, in seconds.

    Returns:
        ``path``.

    Raises:
        DataError: The server cannot be reached, the file ends early, or its hash is different. The file at ``path``
            stays unchanged.
    """
    path = Path(path).expanduser()
    if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        fetch(url, partial, timeout_s)
        check_sha256(partial.read_bytes(), sha256, url)
        os.replace(partial, path)
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, HTTPError):
            error.close()  # The error is an answer of the server, whose connection is still open.
        raise DataError(f"cannot download {url}: {error}. Without network, put the file at {path} yourself.") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def fetch(url: str, path: Path, timeout_s: float) -> None:
    """Write the answer of a server into a new file; raise DataError if the server sends less than it promised."""
    with urlopen(url, timeout=timeout_s) as response, path.open("xb") as file:
        shutil.copyfileobj(response, file)
    length, promised = path.stat().st_size, response.headers["Content-Length"]
    if promised is not None and length != int(promised):
        raise DataError(f"{url} ended early, after {length:,} of {int(promised):,} bytes. Try again.")
