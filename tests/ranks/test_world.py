"""Process groups of an attempt, and their collectives."""

from __future__ import annotations

import os
import signal
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import Ranks

from launch.fork_server import fork
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.optim.precision import set_determinism


def test_ranks_form_a_world_with_a_common_nonce_and_store(ranks: Ranks) -> None:
    found = ranks(3, _describe, group=False)
    assert [world[:2] for world in found] == [(0, True), (1, False), (2, False)]
    assert {world[2:-1] for world in found} == {(3, "cpu", "gloo", "from rank 0")}
    assert len({nonce for *_, nonce in found}) == 1


def _describe() -> tuple[object, ...]:
    with World.form() as world:
        assert world.store is not None
        if world.is_main:
            world.store.set("message", "from rank 0")
        return (world.rank, world.is_main, world.size, str(world.device),
                dist.get_backend(world.group), world.store.clone().get("message").decode(),
                world.nonce)


def test_a_world_of_one_has_no_group_and_the_same_results(ranks: Ranks) -> None:
    for environment in ({}, {"TORCHELASTIC_RUN_ID": "x"}):
        assert ranks(1, _alone, group=False, env=environment) == [[
            [6.0, 7.0], [1.0, 2.0], {"a": [1, 2]}, [{"1": None}]]]


def _alone() -> list[object]:
    with World.form(device="cpu") as world:
        assert (world.group, world.store, dist.is_initialized()) == (None, None, False)
        world.barrier()
        world.raise_on_all_ranks(None)
        kept = torch.tensor([1.0, 2.0])
        world.broadcast([kept])
        with world.long_timeout():
            return [world.all_sum(torch.tensor([6.0, 7.0])).tolist(), kept.tolist(),
                    world.broadcast_json({"a": (1, 2)}), world.gather_json({1: None})]


def test_all_sum_works_in_place_for_any_strides_and_dtype(ranks: Ranks) -> None:
    for wide, last, whole, flag in ranks(3, _sums, group=False):
        assert wide == [[6.0, -1.0, 6.0, -1.0]] * 2
        assert last == [[6.0, 60.0]]
        assert whole == 2**60 * 3 + 3
        assert flag == 6.0


def _sums() -> tuple[object, ...]:
    with World.form() as world:
        wide = torch.full((2, 4), -1.0)
        view = wide[:, ::2]
        view.fill_(world.rank + 1)
        assert world.all_sum(view) is view
        last = torch.tensor([[1.0, 10.0]]) * (world.rank + 1)
        if world.rank == 1:
            last = last.T.contiguous().T  # other strides than on the other ranks
        parameter = torch.nn.Parameter(torch.tensor(float(world.rank + 1)))
        return (wide.tolist(), world.all_sum(last).tolist(),
                world.all_sum(torch.tensor(2**60 + world.rank)).item(),
                world.all_sum(parameter).item())


def test_broadcast_gives_every_rank_the_bits_of_the_source(ranks: Ranks) -> None:
    found, expected = zip(*ranks(3, _broadcast, group=False), strict=True)
    assert found == (expected[1],) * 3
    assert expected[0] != expected[1]


def _broadcast() -> tuple[list[bytes], list[bytes]]:
    """The bytes after a broadcast from rank 1, and those before it."""
    with World.form() as world:
        torch.manual_seed(world.rank)
        tensors = [
            torch.randn(3, 5, dtype=torch.float64), torch.rand(7) > 0.5, torch.randn(()),
            torch.zeros(2, 0), torch.nn.Parameter(torch.randn(9, 4)[:, ::2]),
            torch.full((2,), float("nan")), torch.randn(3).half(), torch.randint(200, (5, 1)),
            torch.randn(2, dtype=torch.complex64),
            torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last).bfloat16()]

        def content() -> list[bytes]:
            return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    for t in tensors]

        before = content()
        world.broadcast(tensors, 1)
        world.broadcast([], 1)
        return content(), before


def test_an_error_on_one_rank_is_raised_on_all(ranks: Ranks) -> None:
    for error, other in ((ConfigError("--task.root /none: not found"),
                          "ConfigError: --task.root /none: not found (rank 1)"),
                         (KeyError("x"), "PeerFailed: rank 1 failed: KeyError: 'x'")):
        found = ranks(3, _agree, error, group=False)
        assert found == [other, f"{type(error).__name__}: {error}", other]


def _agree(error: BaseException) -> str:
    with World.form() as world:
        world.raise_on_all_ranks(None)
        try:
            world.raise_on_all_ranks(error if world.rank == 1 else None)
        except (ConfigError, KeyError, RuntimeError) as raised:
            return f"{type(raised).__name__}: {raised}"
        return "nothing was raised"


def test_a_sum_of_metrics_does_not_pair_with_one_of_gradients(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(2, _out_of_step, group=False)
    assert all(isinstance(outcome.error, RuntimeError) for outcome in outcomes)


def _out_of_step() -> float:
    with World.form(timeout_s=1.0) as world:
        ones = torch.ones(4)
        if world.is_main:
            dist.all_reduce(ones, group=world.group)  # one batch more than rank 1 has
        return float(world.all_sum(ones).sum())


def test_each_collective_has_a_timeout_and_patient_raises_it(ranks: Ranks) -> None:
    assert ranks.outcomes(2, _late, group=False)[0].error is None


def _late() -> None:
    """Rank 1 is late for each collective by more than the timeout of 1 s."""
    with World.form(timeout_s=1.0, long_timeout_s=60.0) as world:
        assert world.store is not None

        def be_late() -> None:
            if not world.is_main:
                time.sleep(1.3)

        with world.long_timeout():
            be_late()
            world.all_sum(torch.ones(1))
            be_late()
            dist.all_reduce(torch.ones(1), group=world.group)
        be_late()
        world.gather_json(None)
        if world.is_main:
            with pytest.raises(RuntimeError, match="Timed out") as caught:
                world.all_sum(torch.ones(1))
            assert "(in World.all_sum, rank 0 of 2)" in caught.value.__notes__
            world.store.set("done", "")
        else:
            world.store.wait(["done"])
        world.abandon()


def test_survivors_notice_a_death_when_one_of_them_abandons(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(4, _survive, group=False)
    assert outcomes[3].signal == signal.SIGKILL
    for survivor in outcomes[:3]:
        assert survivor.error is None
        noticed_s, refused = survivor.value
        assert noticed_s < 20.0  # usually a thousandth of that; the timeout is a minute
        assert "World.barrier: the process group of this attempt is abandoned" in refused


def _survive() -> tuple[float, str]:
    world = World.form()
    assert world.store is not None
    world.all_sum(torch.ones(1000))
    world.barrier()
    if world.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    with pytest.raises(RuntimeError):  # noqa: PT012
        while True:
            dist.all_reduce(torch.ones(1000), group=world.group)
    world.abandon()
    noticed_s = time.monotonic() - begun
    # No rank may exit, which would close its connections too, before all have noticed.
    world.store.set(f"noticed/{world.rank}", "")
    world.store.wait([f"noticed/{rank}" for rank in range(3)])
    with pytest.raises(RuntimeError) as refused:
        world.barrier()
    assert not world.close()
    if world.is_main:  # it hosts the store that the others still read
        world.store.wait(["read/1", "read/2"])
    else:
        world.store.set(f"read/{world.rank}", "")
    return noticed_s, str(refused.value)


def test_a_death_is_noticed_while_a_child_of_the_rank_lives(ranks: Ranks) -> None:
    survivor, dead = ranks.outcomes(2, _fork_and_die, group=False)
    assert survivor.error is None
    assert dead.signal == signal.SIGKILL
    assert "Timed out" not in survivor.value


def _fork_and_die() -> str:
    world = World.form(long_timeout_s=5.0)
    world.barrier()  # otherwise rank 0 may still form the group
    if not world.is_main:
        if fork() == 0:
            time.sleep(8.0)  # longer than the long timeout
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as lost:
        world.barrier()
    world.abandon()
    return str(lost.value)


def test_closing_does_not_wait_forever_for_a_missing_rank(ranks: Ranks) -> None:
    assert ranks(2, _close, group=False)[0] is False


def _close() -> bool:
    world = World.form()
    assert world.store is not None
    if world.is_main:
        whole = world.close(timeout_s=0.3)
        world.store.set("closed", "")
        return whole
    world.store.wait(["closed"])
    return True


def test_the_users_choice_of_interface_is_kept(ranks: Ranks) -> None:
    user = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "ib7"}
    assert ranks(2, _interfaces, group=False, env=user) == [["lo", "ib7"]] * 2
    # The variables describe two hosts: the route to MASTER_ADDR decides.
    two_hosts = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert ranks(2, _interfaces, group=False, env=two_hosts) == [["lo", "=lo"]] * 2


def _interfaces() -> list[str]:
    with World.form():
        return [os.environ[f"{backend}_SOCKET_IFNAME"] for backend in ("GLOO", "NCCL")]


def test_a_connection_of_another_library_is_no_connection_of_a_peer(ranks: Ranks) -> None:
    """NCCL opens connections while a group is made, and closes them in a healthy run."""
    assert ranks(2, _noisy, group=False) == [(True, 3.0, "0", "0")] * 2


def _noisy() -> tuple[object, ...]:
    noise: list[socket.socket] = []
    seen: list[object] = []
    init = dist.init_process_group

    def noisy_init(*arguments: Any, store: dist.Store, rank: int, **options: Any) -> None:
        seen.extend([torch.are_deterministic_algorithms_enabled(),
                     os.environ["TORCH_NCCL_RETHROW_CUDA_ERRORS"],
                     os.environ["TORCH_NCCL_ENABLE_MONITORING"]])
        if rank == 0:
            server = socket.create_server(("127.0.0.1", 0))
            store.set("noise", str(server.getsockname()[1]))
            noise.append(server.accept()[0])
        else:
            noise.append(socket.create_connection(("127.0.0.1", int(store.get("noise")))))
        init(*arguments, store=store, rank=rank, **options)

    dist.init_process_group = noisy_init
    set_determinism(True)
    with World.form(device="cpu") as world:
        mine = {os.fstat(fd).st_ino for fd in world.connections()}
        noise[0].shutdown(socket.SHUT_RDWR)
        total = world.all_sum(torch.tensor(world.rank + 1.0)).item()
        assert os.fstat(noise[0].fileno()).st_ino not in mine
    return seen[0], total, *seen[1:]
