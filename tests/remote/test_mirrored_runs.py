"""Runs with a mirror: all disks are lost, and the bits are those of the undisturbed run."""

from __future__ import annotations

import re
import shutil

import pytest

pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")

from runs import TAPE, codes, events, metrics, run

from trainer.checkpoint.mirror import Mirror, Owner
from trainer.checkpoint.mirror_fence import Fence
from trainer.commands import compare
from trainer.commands.report import figures
from trainer.commands.report.history import read_history
from trainer.storage import layout
from trainer.storage.object_store import ObjectStore

FLAGS = (*TAPE, "--steps=12", "--checkpoint.every=3", "--task.validation=16", "--eval.every=4",
         "--task.norm=batch", "--task.dropout=0.1")  # fmt: skip
LONG = (*TAPE, "--steps=20000", "--checkpoint.every=100", "--checkpoint.keep=1")


@pytest.mark.parametrize(("sizes", "flags"), [
    ((2, 2), ()), ((2, 1), ("--parallel.reduction=canonical",))])
def test_on_empty_disks_a_run_continues_to_the_bits_of_the_undisturbed_one(
        ranks, undisturbed, tmp_path, sizes, flags):
    whole = undisturbed(sizes[0], *FLAGS, *flags)
    mirror = f"--checkpoint.mirror=file://{tmp_path}/mirror"
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))

    ended = codes(ranks, sizes[0], *FLAGS, *flags, mirror, f"--run-dir={first}",
                  "--inject=kill:step=8", "--inject=kill:step=8:rank=1")
    assert ended == [-9, -9]
    shutil.rmtree(first)
    run(ranks, sizes[1], second, *FLAGS, *flags, mirror)

    assert compare.main([str(whole), str(second)]) == 0
    starts = events(second, "start", rank=0)
    assert [start["attempt"] for start in starts] == [0, 1]
    assert starts[1]["step"] in (3, 4, 6)  # the newest that was uploaded before the deaths

    # A finished run is complete on another empty disk too, and isn't computed again.
    run(ranks, 1, third, *FLAGS, *flags, mirror)
    for name in (layout.PRODUCT, layout.METRICS, layout.SUMMARY):
        assert (third / name).read_bytes() == (second / name).read_bytes()
    assert metrics(third) == metrics(whole)
    # Another run may not use the mirror.
    assert codes(ranks, 1, *FLAGS, mirror, f"--run-dir={tmp_path}/new", "--resume=never") == [2]
    run(ranks, 1, tmp_path / "other", *FLAGS, "--steps=1")
    assert codes(ranks, 1, *FLAGS, mirror, f"--run-dir={tmp_path}/other") == [2]


def test_the_save_of_a_stop_is_in_the_mirror_and_credentials_are_nowhere(
        ranks, undisturbed, tmp_path, server, capfd):
    from servers import KEY, SECRET, TOKEN

    whole = undisturbed(1, *FLAGS)
    url = server.bucket()
    mirror = f"--checkpoint.mirror={url}/runs/one"
    run(ranks, 1, tmp_path / "first", *FLAGS, mirror, "--inject=term:step=5", code=75)
    steps = [entry.step for entry in Mirror(ObjectStore.open(f"{url}/runs/one")).entries()]
    assert steps[-1] == 5
    run(ranks, 1, tmp_path / "second", *FLAGS, mirror)

    second = tmp_path / "second"
    assert compare.main([str(whole), str(second)]) == 0
    assert re.fullmatch(r"\d+ uploads, 0 MB at .* MB/s, at most .* behind",
                        figures.summary(read_history(second))["mirror"])
    written = [path.read_bytes() for name in ("first", "second")
               for path in (tmp_path / name).rglob("*") if path.is_file()]
    written += [*server.content(url).values(), "".join(capfd.readouterr()).encode()]
    assert len(written) > 40
    for secret in (KEY, SECRET, TOKEN):
        assert not any(secret.encode() in content for content in written)


def test_a_run_whose_mirror_another_start_has_taken_over_ends_and_is_not_restarted(
        ranks, tmp_path, server, capfd):
    url = server.bucket()

    def take_over(method, path):
        if method == "PUT" and "/checkpoints/" in path:
            server.before = lambda method, path: None
            mirror = Mirror(ObjectStore.open(url))
            owner, _ = mirror.owner()
            Fence(mirror).take(Owner(run=owner.run, generation=9, nonce="b", host="b"))
    server.before = take_over

    ended = codes(ranks, 1, *LONG, f"--checkpoint.mirror={url}", f"--run-dir={tmp_path}/run")

    assert ended == [2]
    assert "another start of the run (attempt 0 on b, generation 9)" in capfd.readouterr().out
    assert [event["why"] for event in events(tmp_path / "run", "mirror-taken")]


def test_a_failed_upload_ends_the_run_only_if_that_is_wanted(ranks, tmp_path, server):
    url = server.bucket()
    server.before = lambda method, path: 403 if "/data/" in path else None

    ended = codes(ranks, 1, *LONG, f"--checkpoint.mirror={url}", f"--run-dir={tmp_path}/run",
                  "--checkpoint.on-error=stop", "--stop.grace-s=1")

    assert ended == [1]
    failed = events(tmp_path / "run", "mirror-failed")
    assert "403" in failed[0]["why"]


@pytest.mark.parametrize("wrong", ["no bucket", "forbidden", "no conditions"])
def test_a_store_that_can_not_keep_the_promise_is_refused_before_the_start(
        ranks, tmp_path, server, capfd, wrong):
    url = "s3://no-such-bucket" if wrong == "no bucket" else server.bucket()
    server.drops_conditions = wrong == "no conditions"
    if wrong == "forbidden":
        server.before = lambda method, path: 403

    assert codes(ranks, 1, *FLAGS, f"--checkpoint.mirror={url}",
                 f"--run-dir={tmp_path}/run") == [2]
    assert f"--checkpoint.mirror {url}: " in capfd.readouterr().out
    assert not (tmp_path / "run" / layout.METRICS).exists()
