"""Settings whose values are secret, told by their names, and how they are written down."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.config.schema import Config

MASK = "***"
_WORDS = frozenset(("key", "apikey", "accesskey", "token", "password", "passwd", "passphrase",
                    "secret", "secrets", "credential", "credentials"))
_ENDS = ("token", "password", "secret")
LEAST = 8
"""Characters of a value that is hidden in text: a shorter one may be any word."""


@functools.cache
def is_secret(name: str) -> bool:
    """Whether a setting or flag is named like a secret: api_key, --task.hub-token, password."""
    words = re.split(r"[^a-z]+", name.lower())
    return any(word in _WORDS or word.endswith(_ENDS) for word in words)


def hidden(value: Any) -> Any:
    """A mask in place of a value, other than a number, with which equal values can be told."""
    if value is None or isinstance(value, bool | int | float) or str(value).startswith(MASK):
        return value
    return f"{MASK} {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:8]}"


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line with masks in place of the values of secret flags."""
    masked, secret = [], False
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            secret = is_secret(flag)
            masked.append(f"{flag}={MASK}" if secret and value else argument)
            secret = secret and not equals
        else:
            masked.append(MASK if secret else argument)
    return masked


def masked_repr(config: Config[Any], text: str) -> str:
    """A text with masks in place of the representations of secret values, as a dataclass has."""
    for name, value, _ in config.leaves():
        if is_secret(name) and isinstance(value, str):
            text = text.replace(f"{name.rpartition('.')[2]}={value!r}",
                                f"{name.rpartition('.')[2]}={MASK!r}")
    return text


def secret_texts(config: Config[Any]) -> Iterator[str]:
    """The secret values of a configuration, to be hidden in messages. One of a `key` without any
    digit, as `label_key` may have, is a name."""
    for name, value, _ in config.leaves():
        if is_secret(name) and isinstance(value, str) and len(value) >= LEAST and (
                "key" not in name or any(map(str.isdigit, value))):
            yield value
