"""Files from the internet, each checked against the hash its data module was written for."""

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
    """Where downloads are kept: ``$LUMEN_CACHE``, or ``~/.cache/lumen``."""
    return Path(os.environ.get("LUMEN_CACHE") or "~/.cache/lumen").expanduser()


def check_sha256(data: bytes, expected: str, source: str) -> None:
    """Compare a hash with the expected one.

    Args:
        data: The bytes to hash.
        expected: SHA-256, 64 hexadecimal digits.
        source: Where the bytes are from, for the message.

    Raises:
        DataError: It is another one.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != expected:
        raise DataError(
            f"{source} is not the file this data module was written for: its SHA-256 is {found}, expected {expected}. "
            "It was changed, at its source or on the way."
        )


def download(url: str, path: str | Path, sha256: str, timeout_s: float = 60.0) -> Path:
    """Fetch a file once, and only the right one.

    A file at ``path`` with the right hash is used as it is; any other one is replaced, but not before the download
    is complete and verified. Several processes may do this at the same time.

    Args:
        url: Address of the file.
        path: Where to put it; missing directories are made.
        sha256: SHA-256 of its content, 64 hexadecimal digits.
        timeout_s: Longest silence of the server, in seconds.

    Returns:
        ``path``.

    Raises:
        DataError: The server cannot be reached, the file ends early, or its hash is another one. What was at ``path``
            is untouched then.
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
            error.close()  # it is an answer of the server, and its connection is still open
        raise DataError(f"cannot download {url}: {error}. Without network, put the file at {path} yourself.") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def fetch(url: str, path: Path, timeout_s: float) -> None:
    """Write what a server sends into a new file; a DataError if it sends less than it promised."""
    with urlopen(url, timeout=timeout_s) as response, path.open("xb") as file:
        shutil.copyfileobj(response, file)
    length, promised = path.stat().st_size, response.headers["Content-Length"]
    if promised is not None and length != int(promised):
        raise DataError(f"{url} ended early, after {length:,} of {int(promised):,} bytes. Try again.")
