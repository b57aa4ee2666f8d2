"""Objects in S3, Google Cloud Storage, Azure Blob Storage or a folder, with conditional writes.

The requests are made by obstore (https://developmentseed.org/obstore), the extra `trainer[remote]`.
Credentials come from the environment only, by each provider's own variables; no message has them.
"""

from __future__ import annotations

import fcntl
import os
import re
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

from trainer.storage.files import CHUNK, LARGEST_RECORD, make_folder, open_regular
from trainer.storage.secrets import hide, mask

SCHEMES = ("s3", "gs", "az", "file")
PART_BYTES, MOST_PARTS, PARALLEL = 8 << 20, 9000, 6
"""Size of the parts of an upload and of a download, the most parts of an object (S3 allows 10,000),
and how many are on their way at a time."""
ANSWER_S, PART_S = 5.0, 120.0
"""Longest wait for an answer, and for each next piece of its content; longest upload of a part."""
RETRIES, RETRY_S = 2, 10.0
"""How often a request is repeated, and seconds after its start from which it isn't any more."""
S3_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
"""Environment variables that name another server than Amazon's; the first one counts."""

Version = dict[str, str]
"""Identifies the content of an object, for a conditional write."""


class StoreError(Exception):
    """A request to the object store has failed; later it may succeed."""


class AccessDenied(StoreError):
    """The credentials are missing or wrong, or don't permit the request."""


class Missing(StoreError):
    """There is no such object, or no such bucket."""


class Conflict(StoreError):
    """The condition of a write doesn't hold: the object exists, or has changed."""


def check_url(url: str) -> None:
    """Raise ValueError, with a remedy, unless a URL may name an object store."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError("use s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or "
                         "file:///folder")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("a URL is written to files and logs, so it may not contain credentials or "
                         "a query; set the provider's environment variables instead")
    if parts.scheme == "file" and (parts.netloc or parts.path in ("", "/")):
        raise ValueError("write file:///folder, with the absolute path of a folder")
    if parts.scheme != "file" and not parts.netloc:
        raise ValueError(f"name a bucket: {parts.scheme}://bucket/prefix")


def path_or_url(text: str) -> Path | str:
    """An argument that names a run: a URL stays as it is."""
    return text if "://" in text else Path(text)


class ObjectStore:
    """The objects below a URL, by key. Thread-safe. All methods raise StoreError. `folder` is that
    of a `file://` store, whose conditional writes need a lock. `uploads` is as `store`, with the
    longer time limit of uploads and deletions."""

    def __init__(self, store: Any, url: str, *, folder: Path | None = None,
                 uploads: Any = None) -> None:
        import obstore

        self.url, self.folder = url, folder
        self._store, self._uploads, self._api = store, uploads or store, cast(Any, obstore)

    @classmethod
    def open(cls, url: str, *, create: bool = True) -> ObjectStore:
        """Connect to the store of a URL; no request is made. Raises ModuleNotFoundError without
        obstore, and StoreError if an environment variable is wrong. The folder of a `file://` URL
        is created if it is missing, only with `create`."""
        from obstore.store import LocalStore, from_url

        parts = urllib.parse.urlsplit(url)
        if parts.scheme == "file":
            folder = Path(urllib.parse.unquote(parts.path))
            with _translated(url):
                if create:
                    make_folder(folder)
                elif not folder.is_dir():
                    raise Missing("there is no such folder")
                return cls(LocalStore(folder), url, folder=folder)
        retry: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S)}
        # A limit of the wait for an answer would include the time in which a part is sent.
        uploads: Any = {"timeout": timedelta(seconds=PART_S), "allow_http": True,  # if it is http://
                        "connect_timeout": timedelta(seconds=ANSWER_S)}
        others: Any = {**uploads, "read_timeout": timedelta(seconds=ANSWER_S)}
        # Over https, a signature of the content would add nothing but half of an upload's work.
        is_plain = any(os.environ.get(name, "").startswith("http://") for name in S3_ENDPOINTS)
        config: Any = {"unsigned_payload": True} if parts.scheme == "s3" and not is_plain else None
        with _translated(url):
            stores = [from_url(url.rstrip("/"), config=config, client_options=options,
                               retry_config=retry) for options in (others, uploads)]
            return cls(stores[0], url, uploads=stores[1])

    def put_new(self, key: str, data: bytes) -> None:
        """Write a new object; raises Conflict if it exists (`If-None-Match: *`)."""
        with _translated(key):
            self._api.put(self._store, key, data, mode="create")

    def put(self, key: str, data: bytes) -> None:
        with _translated(key):
            self._api.put(self._uploads, key, data)

    def replace(self, key: str, data: bytes, version: Version) -> None:
        """Overwrite an object if it still has this version, else raise Conflict (`If-Match`)."""
        with _translated(key):
            if self.folder is None:
                self._api.put(self._store, key, data, mode=version)
                return
            with (self.folder / ".lock").open("ab") as lock:  # closing it releases the lock
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _version(self._api.head(self._store, key)) != version:
                    raise Conflict(f"{key} has changed")
                self._api.put(self._store, key, data)

    def read(self, key: str) -> tuple[bytes, Version] | None:
        """Content and version of a small object; None if it is missing."""
        try:
            with self._reading(key):
                found = self._api.get(self._store, key)
                if found.meta["size"] > LARGEST_RECORD:
                    raise StoreError(f"{key} has {found.meta['size']:,} bytes")
                return bytes(found.bytes()), _version(found.meta)
        except Missing:
            return None

    def upload(self, key: str, path: Path, on_chunk: Callable[[memoryview], object]) -> None:
        """Write a file to an object, in parallel parts; each chunk is passed to `on_chunk` first.
        An exception in it aborts the upload: there is no object then."""
        size = path.stat().st_size
        part = max(PART_BYTES, size // MOST_PARTS)
        with _translated(key), open(open_regular(path), "rb") as file:
            if size <= PART_BYTES:
                data = file.read()
                on_chunk(memoryview(data))
                self._api.put(self._uploads, key, data)
                return
            self._api.put(self._uploads, key, _chunks(file, part, on_chunk), chunk_size=part,
                          max_concurrency=PARALLEL)

    def download(self, key: str, size: int) -> Iterator[memoryview]:
        """The content of an object of this size, in parts that are read in parallel."""
        def part(start: int) -> memoryview:
            with self._reading(key):
                return memoryview(self._api.get_range(
                    self._store, key, start=start, end=min(start + PART_BYTES, size)))

        with ThreadPoolExecutor(PARALLEL, thread_name_prefix="download") as pool:
            ahead = deque[Any]()
            for start in range(0, size, PART_BYTES):
                ahead.append(pool.submit(part, start))
                if len(ahead) == PARALLEL:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    @contextmanager
    def _reading(self, key: str) -> Iterator[None]:
        """Context of a request; in a folder, only regular files are read."""
        with _translated(key):
            if self.folder is not None:
                os.close(open_regular(self.folder / key))
            yield

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Key and size of the objects below a folder."""
        with _translated(prefix):
            for batch in self._api.list(self._store, prefix=prefix or None):
                for meta in batch:
                    yield meta["path"], meta["size"]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects, which may be missing; S3 and Azure do many by one request."""
        try:
            with _translated(keys[0]):
                self._api.delete(self._uploads, keys)  # many take their time
        except Missing:  # the others may be left
            for key in keys if len(keys) > 1 else ():
                self.delete([key])


def _chunks(file: Any, size: int, on_chunk: Callable[[memoryview], object]) -> Iterator[bytes]:
    while data := file.read(size):
        for start in range(0, len(data), CHUNK):
            on_chunk(memoryview(data)[start : start + CHUNK])
        yield data


def _version(meta: Any) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta.get(name)}


@contextmanager
def _translated(key: str) -> Iterator[None]:
    """Raise the errors of obstore as those of this module."""
    from obstore import exceptions

    try:
        yield
    except FileNotFoundError as error:
        raise Missing(_message(error)) from None
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise Conflict(_message(error)) from None
    except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
        raise AccessDenied(_message(error)) from None
    except (exceptions.BaseError, NotImplementedError, OSError) as error:
        if "status code: 404" in str(error):  # of a bucket
            raise Missing(_message(error)) from None
        if re.search(r"\(code: (AccessDenied|403)\b", str(error)):  # of one object of many
            raise AccessDenied(_message(error)) from None
        raise StoreError(f"{key}: {_message(error)}") from None


def _message(error: Exception) -> str:
    """The message of an error of obstore without its debugging output, tags and secrets."""
    text = re.sub(r"<[^>]*>|\s+", " ", str(error).partition("\n\nDebug source")[0])
    hide()  # the variables of now
    text = " ".join(mask(text).split())
    return text if len(text) <= 400 else f"{text[:400]}…"
