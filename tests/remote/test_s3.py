"""The mirror in an S3 server: a writer that is killed, refused stores, and what messages tell."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")

from mirrors import FaultyStore, Machine, newest
from servers import SECRET, TOKEN, S3Server

from trainer.checkpoint.mirror import Mirror
from trainer.config.schema import Checkpoint
from trainer.errors import ConfigError
from trainer.storage import object_store, open_uploads
from trainer.storage.object_store import AccessDenied, Missing, ObjectStore, StoreError
from trainer.storage.open_uploads import _request, abort_open_uploads

WRITERS = """
import os, sys
from pathlib import Path
from mirrors import Machine
from trainer.storage import object_store

object_store.PART_BYTES = 5 << 20
print("ready", flush=True)
for line in sys.stdin:
    url, folder, pid_file = line.split()
    child = os.fork()
    if not child:
        Path(pid_file).write_text(str(os.getpid()))
        machine = Machine(Path(folder), object_store.ObjectStore.open(url), keep=1)
        machine.uploads.fence.owner, _ = machine.uploads.fence.mirror.owner()
        machine.uploads.fence.is_held = True
        machine.uploads.offer(2, always=True)
        machine.work()
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Writers:
    """Starts a fresh writer for each upload, from a process that has everything imported."""

    def __init__(self, folder: Path) -> None:
        path = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITERS], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path})
        self.pid_file = folder / "pid"
        self._read()

    def run(self, url: str, folder: Path) -> int:
        """Exit status of a writer that uploads step 2, as of os.wait."""
        self._process.stdin.write(f"{url} {folder} {self.pid_file}\n")
        self._process.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(30)


def start_mirror(server: S3Server, folder: Path) -> str:
    """A bucket with step 1 of the machine in a folder, which has step 2 too; its URL."""
    url = f"{server.bucket()}/runs/one"
    machine = Machine(folder, ObjectStore.open(url), keep=1)
    machine.take(nonce="a")
    machine.uploads.offer(1, always=True)
    machine.work()
    return url


@pytest.fixture
def folder(tmp_path, server, monkeypatch) -> Path:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    disk = Machine(tmp_path / "first", FaultyStore())
    disk.save(1, generation=1)
    disk.save(2, generation=1, size=(11 << 20) // 16)  # two parts
    return disk.path


def test_sigkill_at_20_instants_of_an_upload_leaves_the_old_or_the_new_checkpoint_whole(
        tmp_path, server, folder):
    writers = Writers(tmp_path)
    url = start_mirror(server, folder)
    made = len(server.requests)
    assert writers.run(url, folder) == 0
    count = len(server.requests) - made
    assert newest(ObjectStore.open(url)) == 2

    seen = []
    for instant in range(20):
        at, after = divmod(round(instant * (2 * count - 1) / 19), 2)
        url = start_mirror(server, folder)
        made = len(server.requests)

        def kill(method, path, at=at, made=made):
            if len(server.requests) - made == at + 1:
                os.kill(int(writers.pid_file.read_text()), signal.SIGKILL)
        setattr(server, "after" if after else "before", kill)
        status = writers.run(url, folder)
        server.before = server.after = lambda method, path: None
        assert status == signal.SIGKILL or at + 1 == count
        seen.append(newest(ObjectStore.open(url)))

        # The next start finds the same, and removes what the dead one has left.
        shutil.copytree(folder, tmp_path / f"disk-{instant}")
        other = Machine(tmp_path / f"disk-{instant}", ObjectStore.open(url), keep=1)
        other.take(nonce="b")
        assert other.uploads.writer.manifests
        abort_open_uploads(url, datetime.now(UTC) + timedelta(days=2))
        listed = _request("GET", f"/{url.split('/')[2]}", {"uploads": ""})
        assert "<UploadId>" not in listed
        mirror = Mirror(ObjectStore.open(url))
        used = {mirror.manifest(entry)["data"] for entry in mirror.entries()}
        keys = [key for key, _ in mirror.store.list("data")]
        assert {key.rpartition("/")[0] for key in keys} == used
    writers.close()
    assert seen == sorted(seen), "an older checkpoint came back after the new one was there"
    assert set(seen) == {1, 2}


def test_only_open_uploads_older_than_a_day_are_aborted(server, monkeypatch):
    url, bucket = f"{server.bucket()}/runs/one", f"bucket-{id(server)}-1"
    real = open_uploads._request
    # moto gives each upload the same old date.
    monkeypatch.setattr(open_uploads, "_request", lambda *request: re.sub(
        "<Initiated>.*?</Initiated>",
        f"<Initiated>{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.000Z}</Initiated>", real(*request)))
    _request("POST", f"/{bucket}/runs/one/data/x", {"uploads": ""})
    _request("POST", f"/{bucket}/runs/two/data/x", {"uploads": ""})

    assert abort_open_uploads(url) == 0
    assert abort_open_uploads(url, datetime.now(UTC) + timedelta(hours=25)) == 1
    listed = _request("GET", f"/{bucket}", {"uploads": ""})
    assert "runs/two" in listed
    assert "runs/one" not in listed


# --- refusals


@pytest.mark.parametrize(("status", "kind"), [(403, AccessDenied), (404, Missing),
                                              (500, StoreError)])
def test_the_message_of_a_refused_request_has_no_secrets(server, status, kind):
    store = ObjectStore.open(server.bucket())
    server.before = lambda method, path: status

    with pytest.raises(kind) as caught:
        store.put("key", b"x")

    assert str(status) in str(caught.value)
    assert "Debug source" not in str(caught.value)
    assert not any(secret in str(caught.value) for secret in (SECRET, TOKEN))


def test_s3_answers_200_to_a_deletion_that_is_not_permitted(server):
    store, moto = ObjectStore.open(server.bucket()), server._moto

    def refuse(environ, start_response):
        if not environ["QUERY_STRING"].startswith("delete"):
            return moto(environ, start_response)
        start_response("200 OK", [])
        return [b"<DeleteResult><Error><Key>a</Key><Code>AccessDenied</Code>"
                b"<Message>Access Denied</Message></Error></DeleteResult>"]
    server._moto = refuse

    with pytest.raises(AccessDenied, match="Access Denied"):
        store.delete(["a", "b"])


def test_over_https_the_content_is_not_hashed_for_the_signature(server, monkeypatch):
    assert "unsigned_payload" not in ObjectStore.open("s3://bucket")._store.config
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://localhost")
    assert ObjectStore.open("s3://bucket")._store.config["unsigned_payload"]


@pytest.mark.parametrize(("url", "remedy"), [
    ("s3://user:pass1word@bucket/x", "set the provider's environment variables"),
    ("s3://bucket/x?sig=pass1word", "set the provider's environment variables"),
    ("http://bucket/x", "use s3://bucket/prefix"),
    ("s3:///x", "name a bucket: s3://bucket/prefix"),
    ("file://relative/x", "absolute path"),
])
def test_urls_that_name_no_store_or_contain_credentials_are_refused(url, remedy):
    with pytest.raises(ConfigError, match=remedy) as caught:
        Checkpoint(mirror=url)

    assert str(caught.value).startswith("--checkpoint.mirror ")
    assert "pass1word" not in str(caught.value)


def test_without_the_extra_the_flag_is_refused_with_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)

    with pytest.raises(ConfigError, match=r"pip install 'trainer\[remote\]'"):
        Mirror.open("s3://bucket/x")


def test_a_folder_has_conditional_writes_too(tmp_path):
    first, second = (ObjectStore.open(f"file://{tmp_path}/mirror") for _ in range(2))
    first.put_new("owner", b"1")
    _, version = second.read("owner")
    first.replace("owner", b"2", version)

    with pytest.raises(object_store.Conflict):
        second.replace("owner", b"3", version)
    with pytest.raises(object_store.Conflict):
        second.put_new("owner", b"3")
    assert second.read("owner")[0] == b"2"
