"""Commands that read a run take the URL of its mirror in place of its folder."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")

from runs import TAPE, run

from trainer.__main__ import main
from trainer.checkpoint.mirror import Mirror
from trainer.storage import layout
from trainer.storage.object_store import ObjectStore

FLAGS = (*TAPE, "--steps=12", "--checkpoint.every=3", "--task.validation=16", "--eval.every=4")


@pytest.fixture
def mirrored(ranks, tmp_path, server) -> tuple[str, Path]:
    """The URL and the folder of a finished run."""
    url, folder = f"{server.bucket()}/runs/one", tmp_path / "run"
    run(ranks, 1, folder, *FLAGS, f"--checkpoint.mirror={url}")
    return url, folder


def test_a_url_gives_what_the_folder_gives(mirrored, tmp_path, server, capfd, monkeypatch):
    url, folder = mirrored
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def output(*words: str, code: int = 0) -> str:
        assert main(words) == code
        return capfd.readouterr().out

    assert output("compare", str(folder), url) == "same bits\n"
    assert output("compare", url, str(folder), "--at=1", code=2) == ""
    for checkpoint in ("best", "last"):
        words = [f"--checkpoint={checkpoint}", "--json"]
        assert output("evaluate", url, *words) == output("evaluate", str(folder), *words)
    for name, run_ in (("a", url), ("b", str(folder))):
        output("predict", run_, f"--out={name}.jsonl")
        output("export", run_, f"--to={name}")
        output("report", run_, f"--out={name}")
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    assert Path("a", layout.PRODUCT).read_bytes() == Path("b", layout.PRODUCT).read_bytes()
    assert json.loads(Path("a/export.json").read_text())["run"] == url
    saved = Mirror(ObjectStore.open(url)).entries()
    assert Path("a/report.html").read_text().count("<td>whole") == len(saved) >= 2
    # Only what is needed: a report reads no checkpoint, and an evaluation one.
    del server.requests[:]
    output("report", url, "--text")
    assert not any("/data/" in request for request in server.requests)
    output("evaluate", url, "--checkpoint=last")
    assert len({r for r in server.requests if "/data/" in r and layout.STATE in r}) == 1
    assert not list(Path("temporary").glob("trainer-*"))


def test_inspect_lists_what_is_where(mirrored, server, capfd):
    url, folder = mirrored
    store = ObjectStore.open(url)
    here, there = (json.loads(_inspect(capfd, run_, "--json")) for run_ in (str(folder), url))
    newest = Mirror(store).entries()[-1]

    assert here["mirror"]["checkpoints"] == there["mirror"]["checkpoints"] == there["checkpoints"]
    assert (there["step"], there["finished"], there["next"]) == (12, True, here["next"])
    assert there["mirror"]["owner"]["generation"] == newest.generation
    assert [product["step"] for product in there["mirror"]["products"]] == [12]
    assert there["mirror"]["orphans"] == {"objects": 0, "bytes": 0}

    data = Mirror(store).manifest(newest)["data"]
    store.put("data/step-00000007-0000abcd/model.safetensors", b"12345")
    content = bytearray(store.read(f"{data}/{layout.MODEL}")[0])
    content[-1] ^= 1
    store.put(f"{data}/{layout.MODEL}", bytes(content))

    text = _inspect(capfd, url)
    assert "1 files (5e-06 MB) without a manifest" in text
    assert "model.safetensors doesn't match its checksum" in text
    assert main(["evaluate", url, "--checkpoint=last"]) == 0  # of the one before
    assert f"step {Mirror(store).entries()[-2].step}\n" in capfd.readouterr().out
    server.before = lambda method, path: 403
    assert "mirror not read: " in _inspect(capfd, str(folder))


def _inspect(capfd, *words: str) -> str:
    assert main(["inspect", *words]) == 0
    return capfd.readouterr().out


@pytest.mark.parametrize(("command", "words", "message"), [
    ("evaluate", ["http://bucket/run"], "http://bucket/run: use s3://bucket/prefix"),
    ("inspect", ["file:///no/such/folder"], "file:///no/such/folder: there is no such folder"),
    ("report", ["s3://bucket/run"], "add --out report"),
    ("predict", ["s3://bucket/run"], "add --out predictions.safetensors"),
    ("compare", ["s3://no-bucket/a", "s3://no-bucket/a"], "s3://no-bucket/a: "),
])
def test_a_url_that_can_not_be_read_is_refused(server, capfd, command, words, message):
    assert main([command, *words]) == 2
    assert message in capfd.readouterr().err
    assert not Path("/no").exists()
