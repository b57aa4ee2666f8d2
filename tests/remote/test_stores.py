"""The same promises in each kind of store: commit, fence, verification, restore, time limits."""

from __future__ import annotations

import shutil
import socket

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")
pytest.importorskip("moto.server", reason="moto[server] is not installed")

from mirrors import Machine, newest
from servers import Azurite, GoogleServer, S3Server

from trainer.checkpoint.mirror import Mirror
from trainer.errors import ConfigError, MirrorTaken
from trainer.storage import object_store
from trainer.storage.object_store import ObjectStore, StoreError


@pytest.fixture(params=["s3", "gs", "az", "file"])
def url(request, tmp_path, monkeypatch):
    """An empty bucket, or folder, of a server that the environment variables name."""
    if request.param == "file":
        yield f"file://{tmp_path}/mirror"
        return
    program = shutil.which("azurite-blob")
    if request.param == "az" and program is None:
        pytest.skip("azurite-blob is not on the PATH; npm install azurite")
    made = {"s3": S3Server, "gs": GoogleServer,
            "az": lambda: Azurite(program, tmp_path / "azurite")}[request.param]()
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    yield made.bucket()
    made.close()


def test_each_store_commits_fences_verifies_prunes_and_restores(url, tmp_path, monkeypatch):
    monkeypatch.setattr(object_store, "PART_BYTES", 5 << 20)
    first, second = (Machine(tmp_path / name, ObjectStore.open(f"{url}/runs/one"))
                     for name in ("first", "second"))
    first.take(nonce="a")
    for step in (1, 2, 3):
        first.upload(step, size=(11 << 20) // 8)  # three parts
    second.take(nonce="b")
    second.upload(4)
    with pytest.raises(MirrorTaken, match="attempt 0 on second, generation 2"):
        first.upload(5)

    mirror = Mirror(ObjectStore.open(f"{url}/runs/one"))
    assert [(e.generation, e.step) for e in mirror.entries()] == [(1, 3), (2, 4)]
    assert newest(mirror.store, tmp_path / "third") == 4
    data = mirror.manifest(mirror.entries()[-1])["data"]
    mirror.store.put(f"{data}/model.safetensors", b"?")
    assert newest(mirror.store, tmp_path / "fourth") == 3


def test_a_google_bucket_that_ignores_conditions_is_refused(tmp_path, monkeypatch):
    server = GoogleServer()
    server.drops_conditions = True
    monkeypatch.setenv(*next(iter(server.environment().items())))
    with pytest.raises(ConfigError, match="ignores the conditions of a write"):
        Machine(tmp_path / "run", ObjectStore.open(server.bucket())).take(nonce="a")
    server.close()


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    for limit in ("ANSWER_S", "PART_S", "RETRY_S"):
        monkeypatch.setattr(object_store, limit, 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the kernel accepts connections
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "a",
                            "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}.items():
            monkeypatch.setenv(name, value)
        store = ObjectStore.open("s3://bucket/x")
        for request in (lambda: store.read("owner"), lambda: list(store.list("checkpoints")),
                        lambda: store.put_new("owner", b"1"), lambda: store.delete(["owner"]),
                        lambda: list(store.download("data", 20 << 20))):
            with pytest.raises(StoreError):
                request()
