"""Tests of the launcher's command line."""

from __future__ import annotations

import os

import pytest

from launch.__main__ import main
from launch.options import SECRET, Options, _visible_gpus, parse_options, take_secret
from trainer.errors import ConfigError


def test_arguments_after_the_dashes_belong_to_the_trainer() -> None:
    options = parse_options(["--nproc_per_node=2", "--max-restarts", "5", "--", "tiny", "--grace-s",
                             "--"])

    assert options == Options(nproc_per_node=2, max_restarts=5,
                              trainer_argv=("tiny", "--grace-s", "--"))


@pytest.mark.parametrize(("text", "visible", "expected"), [
    ("gpu", "0,2,5", 3), ("auto", "3", 1), ("auto", "", len(os.sched_getaffinity(0))),
    ("cpu", "0", len(os.sched_getaffinity(0)))])
def test_ranks_as_torchrun_counts_them(text, visible, expected, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert parse_options([f"--nproc-per-node={text}"]).nproc_per_node == expected


@pytest.mark.parametrize(("files", "expected"), [
    ((), 0), (("proc/driver/nvidia/gpus/0000:04:00.0", "dev/nvidia0", "dev/nvidia1"), 1),
    (("dev/nvidia0", "dev/nvidia1", "dev/nvidiactl", "dev/nvidia-uvm"), 2)])
def test_gpus_are_counted_without_torch(files, expected, tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in files:
        (tmp_path / name).mkdir(parents=True)

    assert _visible_gpus(tmp_path) == expected


@pytest.mark.parametrize(("argv", "words"), [
    (["--nproc-per-node", "0"], ("--nproc-per-node: '0'", "from 1")),
    (["--nproc-per-node", "gpu"], ("--nproc-per-node: gpu", "no NVIDIA GPU is visible")),
    (["--grace-s", "nan"], ("--grace-s: 'nan'", "from 0")),
    (["--nnodes", "2:1"], ("--nnodes: '2:1'", "MIN:MAX")),
    (["--nnodes", "2"], ("--nnodes MIN:MAX", "--rdzv-endpoint HOST:PORT")),
    (["--nnodes=2", "--rdzv-endpoint=a:b"], ("--rdzv-endpoint", "'a:b'", "HOST:PORT")),
    (["--nnodes=2", "--rdzv-endpoint=a:5"], ("several nodes need a secret", "a:5",
                                             "same TRAINER_SECRET", "--private-network")),
    (["--rejoin-timeout", "0"], ("--rejoin-timeout: '0'", "from 0.001")),
    (["--max-restart", "3"], ("--max-restart is not", "--help")),
    (["tiny", "--steps", "5"], ("tiny is not", "-- tiny --steps 5")),
])
def test_an_error_names_flag_value_and_remedy(argv, words, capsys):
    assert main(argv) == 2

    error = capsys.readouterr().err
    assert error.startswith("launch: error: ")
    assert error.count("\n") == 1
    for word in words:
        assert word in error


def test_the_secret_of_a_job_is_read_once_and_may_be_left_out_on_a_private_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = parse_options(["--nnodes=2", "--rdzv-endpoint=node0"])
    private = parse_options(["--nnodes=2", "--rdzv-endpoint=node0", "--private-network"])

    assert take_secret(private) == take_secret(parse_options([])) == b""
    for options in (several, private):
        monkeypatch.setenv(SECRET, "a" * 32)
        assert take_secret(options) == b"a" * 32
        assert SECRET not in os.environ  # so that no child process finds it
        monkeypatch.setenv(SECRET, "short")
        with pytest.raises(ConfigError, match="has 5 characters, fewer than 16"):
            take_secret(options)


def test_numbers_of_nodes_and_rendezvous_endpoint() -> None:
    options = parse_options(["--nnodes=1:4", "--rdzv_endpoint", "[fd00::1]:5000",
                             "--rejoin-timeout=9"])

    assert options.nnodes == (1, 4)
    assert options.rdzv_endpoint == ("fd00::1", 5000)
    assert options.rejoin_timeout == 9
    assert parse_options(["--nnodes=2", "--rdzv-endpoint=node0"]).rdzv_endpoint == ("node0", 29400)
