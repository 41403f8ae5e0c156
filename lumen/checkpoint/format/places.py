"""The places that users name, and the one choice of what keeps them."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

from lumen.checkpoint.format.object_store import ObjectStore, Url
from lumen.checkpoint.format.storage import LocalStorage, Storage
from lumen.errors import ConfigError
from lumen.errors.arguments import local_path

_LOCAL, _REMOTE = LocalStorage(), ObjectStore()


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
    return _REMOTE if isinstance(place, Url) else _LOCAL


def as_local(place: PurePath) -> Path | None:
    """As `Storage.as_local`."""
    return storage_of(place).as_local(place)


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
