"""Multi-node runs continue when a node dies, joins, is cut off, or returns with an empty disk."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from hosts import Hosts, two_hosts
from launches import PATH, Launch, finish, wait_until
from machine import free_port, listening
from paced_task import SAMPLES, consumed
from runs import steps, validations

from trainer.commands.compare import differences
from trainer.commands.inspect import inspect
from trainer.storage import processes

PORT = 29400
BOUND_S = 10.0
"""Limit from a node's death to the next step without it, and from its return to a step with it."""

SECRET = {"TRAINER_SECRET": "a secret that strangers do not know"}
STEPS = 300
ATTACK = """
import base64, os, pickle, sys, time
from torch.distributed import TCPStore

class Payload:
    def __reduce__(self):
        return os.system, (f"touch {sys.argv[3]}",)

store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False)
attack = base64.b64encode(pickle.dumps(Payload())).decode()
for _ in range(5):
    store.set("torch.rendezvous.trainer", attack)
    for name in ("launch", "newest", "stop", "end"):
        store.set(f"trainer/{name}", "0")
    time.sleep(1)
"""


def training(folder: Path, *more: str) -> list[str]:
    return ["--task=paced_task:Paced", f"--task.hurry={folder / 'hurry'}", "--device=cpu",
            "--batch.global-size=8", "--batch.micro-size=2", "--data.workers=0",
            "--checkpoint.every=20", f"--steps={STEPS}",
            "--eval.every=100", "--log.every=1000", "--optim.name=sgd", *more]


def nodes(hosts: Hosts, folder: Path, nnodes: str, *more: str, count: int = 2) -> list[Launch]:
    """A node with one rank, which hosts the store, and others with two on the second host, with a
    folder each."""
    options = [f"--nnodes={nnodes}", "--max-restarts=0",
               f"--rdzv-endpoint={hosts.addresses[0]}:{PORT}"]
    return [Launch(folder / f"node{number}", *training(folder, *more), size=min(number, 1) + 1,
                   options=options, enter=hosts.enter(min(number, 1)), **SECRET)
            for number in range(count)]


def undisturbed(folder: Path, *more: str) -> Path:
    """The same run on one node with three ranks."""
    (folder / "hurry").touch()
    return finish(folder / "straight", *training(folder, *more), size=3).run


def end(code: int, *running: Launch) -> None:
    assert [each.process.wait(400) for each in running] == [code] * len(running), "\n".join(
        each.output() for each in running)


def reach(step: int, *running: Launch) -> None:
    wait_until(lambda: all(node.step() >= step for node in running), f"step {step}", *running)


def time_to_first_step(*running: Launch, since: float) -> float:
    """Seconds from `since` (wall clock) to the first step of a later attempt."""
    first = wait_until(lambda: [
        e["time"] for e in running[0].events("first-step") if e["time"] > since],
        "the first step of the next attempt", *running)
    return first[0] - since


def epochs(run: Path) -> list[list[int]]:
    """The sample indices of each complete epoch."""
    taken, length = consumed(run), SAMPLES // 8
    return [sorted(i for step in taken[at : at + length] for i in step)
            for at in range(0, len(taken) - length + 1, length)]


@pytest.mark.long
@pytest.mark.timeout(800)
def test_deaths_of_whole_nodes_change_no_bit_if_all_return(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        a, b = nodes(hosts, tmp_path, "2")
        with a, b:
            a.start(), b.start()
            reach(8, a, b)

            b.kill()
            wait_until(lambda: a.events("save", kind="survivor"), "a survivor's save", a)
            b.start()
            time_to_first_step(a, b, since=time.time())

            a.kill()  # it hosts the store and is rank 0
            shutil.rmtree(a.run)
            wait_until(lambda: b.output().count("does not answer; retrying"), "the store's loss", b)
            a.start()
            time_to_first_step(b, a, since=time.time())
            (tmp_path / "hurry").touch()
            end(0, a, b)

    straight = undisturbed(tmp_path)
    assert not list(differences(straight, a.run))
    assert not list(differences(straight, b.run))
    assert all(epoch == list(range(SAMPLES)) for epoch in epochs(a.run))
    for node in (a, b):
        assert (node.run / "model.safetensors").read_bytes() == (
            straight / "model.safetensors").read_bytes()
    assert len(inspect(b.run)["attempts"]) == 3
    # The empty node got the checkpoint and the metric lines before the first step.
    assert any(e["at_step"] < STEPS for e in a.events("copied"))
    # The loss of a node uses up no restart: --max-restarts is 0.
    assert "giving up" not in a.output() + b.output()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [
    ["--task.norm=group"],  # batch norm's statistics depend on the micro-batches run in parallel,
    ["--task.norm=batch", "--parallel.reduction=canonical"],  # unless each has its own
], ids=["ddp", "canonical"])
def test_joining_and_leaving_nodes_keep_batch_schedule_and_order(tmp_path, more) -> None:
    with two_hosts() as hosts:
        a, b = nodes(hosts, tmp_path, "1:2", *more)
        with a, b:
            a.start()
            reach(4, a)  # alone, and in mid-epoch
            b.start()
            wait_until(lambda: a.output().count(" joins;"), "node 1 joins", a, b)
            assert time_to_first_step(a, b, since=time.time()) < BOUND_S

            b.kill()
            assert time_to_first_step(a, since=time.time()) < BOUND_S
            b.start()
            wait_until(lambda: a.output().count(" joins;") == 2, "node 1 joins again", a, b)
            assert time_to_first_step(a, b, since=time.time()) < BOUND_S
            reach(b.step() + 3, a, b)

            frozen_at, before = time.time(), a.step()
            b.signal(signal.SIGSTOP)
            assert time_to_first_step(a, since=frozen_at) < BOUND_S
            reach(before + 5, a)
            b.signal(signal.SIGCONT)
            wait_until(lambda: a.output().count(" joins;") == 3, "node 1 joins again", a, b)
            assert time_to_first_step(a, b, since=time.time()) < BOUND_S
            reach(b.step() + 3, a, b)

            cut_at, before = time.time(), a.step()
            hosts.cut()
            assert time_to_first_step(a, since=cut_at) < BOUND_S
            wait_until(lambda: time.time() > cut_at + 20, "20 s")
            assert a.step() > before + 5  # one side continues,
            assert b.step() <= before + 1  # the other one waits and writes nothing
            newest = max(c["step"] for c in inspect(b.run)["checkpoints"])
            assert newest <= before + 1
            back_at = time.time()
            hosts.join()
            assert time_to_first_step(b, a, since=back_at) < BOUND_S
            (tmp_path / "hurry").touch()
            end(0, a, b)

    straight = undisturbed(tmp_path, *more)
    for run in (a.run, b.run):
        assert consumed(run) == consumed(straight)
        assert "canonical" not in more[-1] or not list(differences(straight, run))
        for kind in (steps, validations):
            for line, expected in zip(kind(run), kind(straight), strict=True):
                assert line == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert {attempt["world_size"] for attempt in inspect(a.run)["attempts"]} == {1, 3}


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_stranger_at_the_endpoint_runs_no_code_and_a_node_joins_after_that(
    tmp_path: Path,
) -> None:
    with two_hosts() as hosts:
        a, b, c, wrong = nodes(hosts, tmp_path, "1:3", "--batch.micro-size=1", count=4)
        wrong.env["TRAINER_SECRET"] = "not the one of this job"
        with a, b, c, wrong:
            a.start(), b.start()
            reach(8, a, b)
            wrong.start()
            subprocess.run([*hosts.enter(1), sys.executable, "-c", ATTACK, hosts.addresses[0],
                            str(PORT), str(tmp_path / "ran")], check=True, timeout=100)
            reach(a.step() + 5, a, b)
            c.start()
            wait_until(lambda: a.output().count("3 nodes: "), "node 3 joins", a, b, c)
            reach(a.step() + 5, a, b, c)
            wait_until(lambda: "is not signed with this node's TRAINER_SECRET" in wrong.output(),
                       "the wrong secret is noticed", wrong)
            (tmp_path / "hurry").touch()
            end(0, a, b, c)

    assert "contains a value that is not signed" in a.output()
    assert not (tmp_path / "ran").exists()
    assert wrong.step() <= 0
    for each in (a, b, c):
        found = b"".join(path.read_bytes() for path in each.run.rglob("*") if path.is_file())
        assert SECRET["TRAINER_SECRET"].encode() not in found + each.log.read_bytes()


@pytest.mark.timeout(600)
def test_stopping_one_node_stops_all_and_two_nodes_may_share_a_machine_and_folder(
    tmp_path: Path,
) -> None:
    first, second = neighbours(tmp_path)
    with first:
        first.start()
        first.wait(lambda: "waiting for 2 to 2 nodes" in first.output())
        first.process.send_signal(signal.SIGTERM)
        first.end(75)  # although it waited for another node
    first, second = neighbours(tmp_path)
    with first, second:
        first.start(), second.start()
        reach(5, first)
        second.process.send_signal(signal.SIGTERM)
        end(75, first, second)

    assert [c["kind"] for c in inspect(first.run)["checkpoints"]][-1] == "stop"
    # The folder is shared: one rank wrote it.
    assert len(list((first.run / "tensorboard/train").iterdir())) == 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("restarts", "more", "code"), [
    (0, ["--inject=raise:step=20:rank=1:always"], 1),
    (9, ["--inject=raise:step=20:rank=1:always"], 76),
    (0, ["--inject=nan:step=20:rank=1", "--nonfinite.max-total=0"], 77),
    (0, ["--batch.global-size=16"], 2),
])
def test_all_nodes_exit_with_the_same_code(
    tmp_path: Path, restarts: int, more: list[str], code: int
) -> None:
    (tmp_path / "hurry").touch()
    for flags, ends in ((["--steps=10"], 0), (more, code)):
        first, second = neighbours(tmp_path, *flags, restarts=restarts)
        with first, second:
            first.start(), second.start()
            end(ends, first, second)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_death_or_stop_of_one_rank_restarts_or_stops_all_nodes(tmp_path: Path) -> None:
    kill = "--inject=kill:rank=1:step=12:phase=backward"
    first, second = neighbours(tmp_path, kill, restarts=1)
    with first, second:
        first.start(), second.start()
        [fault] = first.wait(lambda: first.events("fault"), "the death")
        time_to_first_step(first, second, since=fault["time"])
        [saved] = first.events("save", kind="survivor")
        assert saved["at_step"] == 11  # the last step before that of the death
        first.wait(lambda: len(first.events("first-step", rank=0)) > 1)
        phases = first.events("first-step", rank=0)[-1]["entered"]
        assert list(phases)[:4] == ["stop", "rendezvous", "fork", "start"]
        reach(15, first)

        [rank] = [pid for pid in first.pids() if processes.name(pid) == "rank 1"]
        os.kill(rank, signal.SIGTERM)
        end(75, first, second)
        assert inspect(first.run)["checkpoints"][-1]["kind"] == "stop"
        wait_until(lambda: not first.pids(), "all processes exit", first, second)

        (tmp_path / "hurry").touch()
        first.start(), second.start()
        end(0, first, second)

    straight = finish(tmp_path / "straight", *training(tmp_path))
    assert not list(differences(straight.run, first.run))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_if_all_disks_of_two_nodes_are_lost_the_mirror_continues_on_two_nodes_and_on_one(
    tmp_path: Path,
) -> None:
    pytest.importorskip("obstore", reason="the extra trainer[remote] is not installed")
    canonical = ["--task.norm=batch", "--parallel.reduction=canonical"]
    mirror = f"--checkpoint.mirror=file://{tmp_path}/mirror"
    for goal, saved in ((45, 40), (65, 60)):
        first, second = neighbours(tmp_path, *canonical, mirror, runs=("node0", "node1"))
        with first, second:
            first.start(), second.start()
            reach(goal, first, second)
            wait_until(partial(first.events, "mirror", at_step=saved), "the upload", first, second)
            for node in (first, second):
                assert saved in {c["step"] for c in inspect(node.run)["checkpoints"]}
                node.kill()
        for node in (first, second):
            shutil.rmtree(node.run)

    (tmp_path / "hurry").touch()
    last = finish(tmp_path / "node2", *training(tmp_path, *canonical, mirror), size=1)
    straight = finish(tmp_path / "straight", *training(tmp_path, *canonical), size=1)
    assert not list(differences(straight.run, last.run))
    attempts = inspect(last.run)["attempts"]
    assert [(a["attempt"], a["world_size"]) for a in attempts] == [(0, 2), (1, 2), (2, 1)]
    assert attempts[-1]["start_step"] >= 60


def neighbours(folder: Path, *more: str, restarts: int = 0,
               runs: tuple[str, str] = ("run", "run")) -> tuple[Launch, Launch]:
    """Two nodes on this machine, with the same run folder unless `runs` says otherwise."""
    options = ["--nnodes=2", f"--max-restarts={restarts}", "--private-network",
               f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    first, second = (Launch(folder / run, *training(folder, *more), size=1, options=options)
                     for run in runs)
    second.log = folder / "second.log"
    return first, second


def test_a_port_in_use_is_an_error_that_names_port_and_option(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        options = ["--nnodes=2", "--private-network", f"--rdzv-endpoint=127.0.0.1:{port}"]
        with Launch(tmp_path / "run", *training(tmp_path), options=options).start() as launch:
            output = launch.end(2)

    assert re.search(rf"--rdzv-endpoint 127\.0\.0\.1:{port}: .*port {port} is in use", output)


def test_one_node_listens_on_loopback_only_and_unpickles_nothing(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def hook(event, args):\n"
        "    if event == 'pickle.find_class':\n"
        f"        print(args, file=open({str(tmp_path / 'unpickled')!r}, 'a'), flush=True)\n"
        "sys.addaudithook(hook)\n")
    with Launch(tmp_path / "run", *training(tmp_path),
                PYTHONPATH=os.pathsep.join([str(tmp_path), PATH])).start() as launch:
        reach(3, launch)
        found = {pid: listening(pid) for pid in launch.pids()}
        launch.signal(signal.SIGTERM)
        launch.process.wait(200)

    assert len(found) >= 4  # launcher, fork server, ranks
    addresses = {address for ports in found.values() for address in ports.values()}
    assert addresses == {"0100007F"}, found  # 127.0.0.1 as the kernel writes it
    assert not (tmp_path / "unpickled").exists(), (tmp_path / "unpickled").read_text()
