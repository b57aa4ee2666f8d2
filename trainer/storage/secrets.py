"""Secrets: values with such a name (of a setting, a flag, an environment variable), and what a URL
has before its host and in its query. Of the files of a run only config.toml has those settings."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MASK = "***"
LEAST = 8
"""Characters of a value that is masked wherever it occurs: a shorter one may be any word."""
_WORDS = frozenset(("key", "apikey", "accesskey", "token", "password", "passwd", "passphrase",
                    "secret", "secrets", "credential", "credentials", "sas"))
_ENDS = ("token", "password", "secret")
_URL = re.compile(r"(://)([^/@\s'\"]+@)?([^\s?'\"]*)(\?[^\s'\"]*=[^\s'\"]*)?")
_NAMED = re.compile(r"""((['"]?)\b(\w+)\2\s*[=:]\s*)(['"])(?:(?!\4)[^\\\n]|\\.)+\4""")
_hidden = list[str]()  # what `mask` replaces, the longest first


@functools.cache
def is_secret(name: str) -> bool:
    """Whether a name is that of a secret: api_key, --task.hub-token, PASSWORD."""
    words = re.split(r"[^a-z]+", name.lower())
    return any(word in _WORDS or word.endswith(_ENDS) for word in words)


def hide(values: Iterable[tuple[str, Any]] = ()) -> None:
    """Let `mask` replace the secrets among these (name, value) and the environment variables, from
    now on. What is only called a key, as `label_key` may be, is a secret if it has digits."""
    found = set(_hidden)
    for name, text in _texts([*values, *os.environ.items()]):
        if is_secret(name.lower().replace("key", "")) or (
                is_secret(name) and any(map(str.isdigit, text))):
            found |= {text, *text.splitlines(), repr(text)[1:-1], urllib.parse.quote(text, "")}
    _hidden[:] = sorted((text for text in found if len(text) >= LEAST), key=len, reverse=True)


def mask(text: str) -> str:
    """A text without secrets: those that are hidden, those in URLs, and quoted values after their
    name, as in the representation of an object (but after `key` or `token` alone: any data)."""
    for secret in _hidden:
        text = text.replace(secret, MASK)
    return _NAMED.sub(lambda match: match[1] + match[4] + MASK + match[4] if is_secret(match[3])
                      and match[3] not in ("key", "token") else match[0], _mask_urls(text))


def masked(name: str, value: Any) -> Any:
    """A setting as it is recorded: with masks in place of secrets, also of those in a list, a
    mapping or a URL, and a digest by which equal values can be told."""
    if isinstance(value, Mapping):
        return {key: masked(f"{name}.{key}", inner) for key, inner in value.items()}
    if value is None or isinstance(value, bool | int | float) or str(value).startswith(MASK):
        return value
    if isinstance(value, list) and not is_secret(name):
        return [masked(name, inner) for inner in value]
    shown = MASK if is_secret(name) else _mask_urls(value) if isinstance(value, str) else value
    if shown == value:
        return value
    return f"{shown} {hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()[:8]}"


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with masks in place of secrets."""
    shown, flag = list[str](), ""
    for argument in arguments:
        is_flag = argument.startswith("--")
        begin, equals, value = argument.partition("=") if is_flag else ("", "", argument)
        flag = begin or flag
        shown.append(begin + equals + (MASK if value and is_secret(flag) else mask(value)))
        flag *= not equals
    return shown


def _mask_urls(text: str) -> str:
    return _URL.sub(lambda url: url[1] + f"{MASK}@" * bool(url[2]) + url[3]
                    + f"?{MASK}" * bool(url[4]), text)


def _texts(values: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, str]]:
    """The strings among values, also those in lists and mappings, by name."""
    for name, value in values:
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, Mapping):
            yield from _texts((f"{name}.{key}", inner) for key, inner in value.items())
        elif isinstance(value, list | tuple | set | frozenset):
            yield from _texts((name, inner) for inner in value)
