"""Secrets in a run's records: values of names such as `api_key` are masked, and references to the environment stay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, final

MASK = "<masked>"
_SECRETS = {"password", "passwd", "passphrase", "secret", "credential", "apikey"}
_AMBIGUOUS_SECRETS = {"key", "token"}  # `sort_key` and `pad_token` are no secrets
_SECRET_QUALIFIERS = {
    "access", "account", "api", "app", "auth", "bearer", "bot", "client", "encryption", "github", "hf", "hub", "id",
    "license", "private", "refresh", "secret", "security", "service", "session", "signing", "ssh", "storage", "user",
    "wandb",
}  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_GENERATED = re.compile(r"(?=\S*[0-9])(?=\S*[A-Za-z])\S{16,}")
_REFERENCE = re.compile(r"(?<!\\)\$\{")
_IN_URL = re.compile(r"(?<=://)([^\s/:@{]*):[^\s/@{]+@")
_NOT_FOUND = re.compile("Environment variable '(.*?)' not found")
_ITEM = re.compile(r"""([\w.-]+)(["']?[ \t]*[:=][ \t]*)("[^"]*"|'[^']*'|[^\s,{}\[\]][^\s,}\]]*)""")


@final
class Reference(str):
    """Text with references to the environment, such as `${oc.env:TOKEN}`, that is recorded instead of its value.

    Attributes:
        value: The resolved text, or None if the reference was read from a record.
    """

    value: str | None

    def __new__(cls, text: str, value: str | None = None) -> Reference:
        """Create a reference from a text in the form of a config."""
        reference = super().__new__(cls, text)
        reference.value = value
        return reference


@final
class ObjectName(str):
    """Description of an object that is not plain data, recorded instead of the object."""


References: TypeAlias = Mapping[tuple[Any, ...], Reference]
"""References by the keys and numbers that lead to their place in nested data."""


def holds_secret(name: str, value: str) -> bool:
    """Return True if a name means a secret: by its last word, split at `_`, `-`, `.` and case.

    After a word that is not in `_SECRET_QUALIFIERS`, `key` and `token` mean a secret only if the value looks generated.
    """
    words = [word.lower() for word in _WORD.findall(name.rpartition(".")[2])]
    last = words[-1] if words else ""
    if {last, last.removesuffix("s")} & _SECRETS:
        return True
    if last.removesuffix("s") not in _AMBIGUOUS_SECRETS:
        return False
    is_qualified = words[-2] in _SECRET_QUALIFIERS if len(words) > 1 else last in _AMBIGUOUS_SECRETS
    return is_qualified or _GENERATED.fullmatch(value) is not None


def mask_secrets(
    value: Any,
    name: str = "",
    references: References | None = None,
    *,
    path: tuple[Any, ...] = (),
    inside: bool = False,
) -> Any:
    """Return plain data in which `MASK` replaces every secret text, and known references replace their values.

    Args:
        value: The nested mappings, lists and tuples, which are copied; other values are not copied.
        name: The name of the value.
        references: The references to the environment inside the value.
        path: The place of the value in the whole data.
        inside: True if the value is part of a secret.
    """
    if isinstance(value, Mapping):
        items = value.items()
        return {
            key: mask_secrets(item, str(key), references, path=(*path, key), inside=inside or holds_secret(name, ""))
            for key, item in items
        }
    if type(value) in (list, tuple):
        copies = (mask_secrets(item, name, references, path=(*path, i), inside=inside) for i, item in enumerate(value))
        return type(value)(copies)
    if type(value) is not str or not value:
        return value
    reference = (references or {}).get(path)
    if reference is not None and reference.value == value:
        return reference
    if (inside or holds_secret(name, value)) and not _REFERENCE.search(value):
        return MASK
    return _IN_URL.sub(rf"\1:{MASK}@", value)


def mask_words(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with secrets masked: `--model.api_key TEXT`, `--data={token: TEXT}`."""
    found, name = list[str](), ""
    for word in words:
        key, equals, text = word.partition("=")
        if word.startswith("--"):
            name = "" if equals else key
            found.append(f"{key}={_mask_named_values(text, key)}" if equals else word)
        else:
            found.append(_mask_named_values(word, name))
            name = ""
    return found


def mask_text(text: str) -> str:
    """Return a text such as YAML, with the secret values of `name: value` and `name=value` masked."""
    text = _ITEM.sub(lambda item: f"{item[1]}{item[2]}{mask_secrets(item[3], item[1])}", text)
    return _IN_URL.sub(rf"\1:{MASK}@", text)


def _mask_named_values(text: str, name: str) -> str:
    masked = str(mask_secrets(text, name))
    return masked if masked == MASK else mask_text(text)


def is_masked(value: Any) -> bool:
    """Return True if any text in plain data contains a mask."""
    return any(MASK in text for text in _iterate_texts(value))


def find_secret_placeholder(value: Any) -> str | None:
    """Return the first text in plain data that replaces a secret: a mask, or a reference to the environment."""
    return next((text for text in _iterate_texts(value) if MASK in text or isinstance(text, Reference)), None)


def has_reference(value: Any) -> bool:
    """Return True if any text in plain data may contain a reference that OmegaConf resolves, such as `${oc.env:A}`."""
    return any("${" in text for text in _iterate_texts(value))


def lacks_object(value: Any) -> bool:
    """Return True if plain data has the name of an object in place of the object."""
    return any(isinstance(text, ObjectName) for text in _iterate_texts(value))


def _iterate_texts(value: Any) -> Iterator[str]:
    """Yield every text in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_texts(item)


def describe_missing_reference(error: Exception) -> str:
    """Return OmegaConf's error in one line, with the command that sets a missing environment variable."""
    message = str(error).partition("\n")[0]
    name = _NOT_FOUND.search(message)
    return message if name is None else f"the environment variable {name[1]} is not set. Run: export {name[1]}=VALUE"
