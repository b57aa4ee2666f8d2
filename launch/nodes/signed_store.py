"""A store whose values carry a signature, so that torch unpickles nothing of a stranger."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch.distributed import Store, TCPStore

MAC_BYTES, VERSION_BYTES = 32, 8


class ForgedValue(RuntimeError):
    """The store contains a value that nobody with the job's secret has written."""


class Signed(NamedTuple):
    version: int
    raw: bytes
    """What the store contains: HMAC-SHA256, version, value."""
    value: bytes


class SignedStore(Store):
    """Signs what it writes with the job's secret (HMAC-SHA256 of key, version and value), and
    returns only what is signed.

    A value without a valid signature, or older than one that this node has seen (a replay), is
    replaced by the newest one that this node has seen; so is a deleted one. While a node has not
    seen any, it raises `ForgedValue` and leaves the repair to the others: otherwise a node with
    another secret would disturb them. Only the host of the store, which may be alone, overwrites
    it. `on_forged` is called for each value that is not accepted.
    """

    def __init__(
        self, store: TCPStore, secret: bytes, *, is_host: bool, on_forged: Callable[[], None]
    ) -> None:
        super().__init__()
        self._store, self._secret, self._is_host = store, secret, is_host
        self._on_forged = on_forged
        self._seen: dict[str, Signed] = {}  # by key: the newest

    def set(self, key: str, value: str | bytes) -> None:
        if self._store.check([key]):
            self._read(key)  # the new value needs a later version
        self._store.set(key, self._sign(key, value).raw)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Waits for the key. Raises `ForgedValue`."""
        found = self._read(key)
        if found is None:
            raise ForgedValue(key)
        return found.value

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys) and all(self._read(key) is not None for key in keys)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """As `Store.compare_set`: returns what the store contains then. Raises `ForgedValue`."""
        seen, new = self._seen.get(key), self._sign(key, desired)
        if not expected:
            before = b""
        elif seen is not None and seen.value == _to_bytes(expected):
            before = seen.raw
        else:
            return self.get(key)
        raw = self._swap(key, before, new.raw)
        if before and raw == before:  # the key is gone: the store returns what was expected
            raw = self._swap(key, b"", new.raw)
        found = self._accept(key, raw)
        if found is None and self._is_host and seen is None and not expected:
            found = self._accept(key, self._swap(key, raw, new.raw))
        found = found or self._restore(key, raw)
        if found is None:
            raise ForgedValue(key)
        return found.value

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def _read(self, key: str) -> Signed | None:
        seen = self._seen.get(key)
        raw = self._store.get(key) if seen is None else self._swap(key, b"", seen.raw)
        return self._accept(key, raw) or self._restore(key, raw)

    def _restore(self, key: str, forged: bytes) -> Signed | None:
        seen = self._seen.get(key)
        if seen is None:
            return None
        return self._accept(key, self._swap(key, forged, seen.raw)) or seen

    def _swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return self._store.compare_set(key, expected, desired)  # type: ignore[arg-type]

    def _sign(self, key: str, value: str | bytes) -> Signed:
        seen = self._seen.get(key)
        version, data = 1 if seen is None else seen.version + 1, _to_bytes(value)
        body = version.to_bytes(VERSION_BYTES) + data
        return Signed(version, self._mac(key, body) + body, data)

    def _accept(self, key: str, raw: bytes) -> Signed | None:
        """The value, if it is signed and not older than the newest seen."""
        body, seen = raw[MAC_BYTES:], self._seen.get(key)
        version = int.from_bytes(body[:VERSION_BYTES])
        if not hmac.compare_digest(raw[:MAC_BYTES], self._mac(key, body)) or (
                seen is not None and version < seen.version):
            self._on_forged()
            return None
        self._seen[key] = found = Signed(version, raw, body[VERSION_BYTES:])
        return found

    def _mac(self, key: str, body: bytes) -> bytes:
        name = key.encode()
        return hmac.digest(self._secret, len(name).to_bytes(8) + name + body, hashlib.sha256)


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
