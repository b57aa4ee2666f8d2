"""The launcher's command line: its own options, and the arguments of the trainer after `--`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer.errors import ConfigError
from trainer.resilience.preflight import LONGEST_S

DEFAULT_PORT = 29400
SECRET, SECRET_LENGTH = "TRAINER_SECRET", 16
USAGE = """python -m launch [--nproc-per-node N] [--max-restarts K]
           [--nnodes MIN:MAX --rdzv-endpoint HOST:PORT] -- [RECIPE] [--section.key value]"""

DESCRIPTION = """\
Train on N processes of this machine (with --nnodes, of several machines) and restart them when one
dies. Arguments after `--` are passed to the trainer; see `python -m trainer --help`. The ranks are
forked from a process that has imported everything, so a restart takes a fraction of a second."""

EPILOG = """\
Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 makes the ranks save and stop; a second Ctrl-C kills them.

exit codes: 0 complete · 2 bad configuration or data · 75 stopped, the same command continues
            76 the same step failed repeatedly · 77 too many non-finite values · 1 other failure"""


class Parser(argparse.ArgumentParser):
    """Raises `ConfigError` for errors at which argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


def number(kind: type[int] | type[float], least: float) -> Callable[[str], float]:
    """A parser of numbers from `least` on, for argparse."""
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if least <= value <= LONGEST_S:
                return value
        what = "a whole number" if kind is int else "a number"
        raise ArgumentTypeError(f"{text!r} is not {what} from {least:g} to {LONGEST_S:g}")

    return parse


def _ranks(text: str) -> int:
    """N, or as torchrun has it: cpu (one per core), gpu (one per GPU), auto (gpu, else cpu)."""
    if text not in ("cpu", "gpu", "auto"):
        return int(number(int, 1)(text))
    gpus = 0 if text == "cpu" else _visible_gpus()
    if text == "gpu" and not gpus:
        raise ArgumentTypeError("gpu: no NVIDIA GPU is visible (see CUDA_VISIBLE_DEVICES)")
    return gpus or len(os.sched_getaffinity(0))


def _visible_gpus(root: Path = Path("/")) -> int:
    """Number of GPUs, without torch, which takes seconds to import."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return len([device for device in chosen.split(",") if device.strip() not in ("", "-1")])
    return len([*root.glob("proc/driver/nvidia/gpus/*")] or [*root.glob("dev/nvidia[0-9]*")])


def _nodes(text: str) -> tuple[int, int]:
    least, _, most = (text if ":" in text else f"{text}:{text}").partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise ArgumentTypeError(f"{text!r} is not MIN:MAX, such as 1:4, nor a number")
    return int(least), int(most)


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ArgumentTypeError(f"{text!r} is not HOST:PORT, such as node0:29400")
    return host, int(port)


def _option(default: Any, parse: Callable[[str], Any], metavar: str, words: str) -> Any:
    return dataclasses.field(
        default=default, metadata={"type": parse, "metavar": metavar, "help": words})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    nproc_per_node: int = _option(
        1, _ranks, "N", "ranks on this machine: a number, cpu (one per core), gpu (one per GPU) or "
        "auto (gpu if there is one, else cpu) (default: 1)")
    max_restarts: int = _option(
        3, number(int, 0), "K",
        "restarts after failures; the count is reset when a later step has been saved (default: 3)")
    nnodes: tuple[int, int] = _option(
        (1, 1), _nodes, "MIN:MAX",
        "number of nodes that train together: as many as have joined, from MIN to MAX (default: 1)")
    rdzv_endpoint: tuple[str, int] | None = _option(
        None, _endpoint, "HOST:PORT", "rendezvous of several nodes: the address of one of them, "
        f"which hosts the store (default port: {DEFAULT_PORT})")
    private_network: bool = dataclasses.field(default=False, metadata={
        "action": "store_true", "help": "several nodes may train without a secret in "
        f"{SECRET}: nobody else reaches their ports"})
    rejoin_timeout: float = _option(
        600.0, number(float, 0.001), "X",
        "seconds to wait for the endpoint to answer and for MIN nodes to join (default: 600)")
    grace_s: float = _option(
        30.0, number(float, 0), "X", "seconds for the other ranks to save and exit after a rank "
        "has died, before SIGTERM and 5 s later SIGKILL (default: 30)")
    entry: str = _option(
        "trainer.__main__:main", str, "MODULE:FUNCTION",
        "function that each rank runs, for developers (default: trainer.__main__:main)")
    trainer_argv: tuple[str, ...] = ()


def parse_options(argv: Sequence[str]) -> Options:
    """Parse the command line; arguments after the first `--` belong to the trainer."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = Parser(
        prog="python -m launch", usage=USAGE, description=DESCRIPTION, epilog=EPILOG,
        allow_abbrev=False, argument_default=argparse.SUPPRESS,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Options):
        if field.metadata:
            parser.add_argument(f"--{field.name.replace('_', '-')}", **field.metadata)
    options, unknown = parser.parse_known_args([_dashed(argument) for argument in argv[:end]])
    if unknown:
        raise ConfigError(f"{unknown[0].partition('=')[0]} is not an option of the launcher (see "
                          "--help); put the trainer's arguments after --: "
                          f"python -m launch … -- {' '.join(unknown)}")
    found = Options(**vars(options), trainer_argv=tuple(argv[end + 1:]))
    if (found.nnodes[1] > 1) != (found.rdzv_endpoint is not None):
        raise ConfigError("several nodes need both --nnodes MIN:MAX and --rdzv-endpoint "
                          "HOST:PORT, the same on all of them")
    return found


def take_secret(options: Options) -> bytes:
    """The secret of the job, from the environment, where child processes must not find it; empty on
    a private network or a single node. Raises `ConfigError` if several nodes have none."""
    secret = os.environ.pop(SECRET, "")
    if options.rdzv_endpoint is None:
        return b""
    if not secret and not options.private_network:
        raise ConfigError(
            f"several nodes need a secret: whoever reaches {options.rdzv_endpoint[0]}:"
            f"{options.rdzv_endpoint[1]} could run code as you. Set the same {SECRET} on all "
            "nodes (openssl rand -hex 32), or give --private-network if nobody else reaches it")
    if secret and len(secret) < SECRET_LENGTH:
        raise ConfigError(f"{SECRET} has {len(secret)} characters, fewer than {SECRET_LENGTH}, "
                          "and could be guessed: openssl rand -hex 32 makes one")
    return secret.encode()


def _dashed(argument: str) -> str:
    """Accept `_` for `-` in option names, as torchrun does."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument
