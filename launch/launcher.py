"""The launcher: parse the command line, run the ranks, return the exit code."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from launch.options import Options, parse_options, take_secret
from launch.output import Output
from launch.signals import LauncherStop
from trainer.errors import EXIT_CONFIG, EXIT_FAILURE, ConfigError
from trainer.resilience.diagnosis import remedy
from trainer.resilience.preflight import (
    allow_files,
    check_cache_folder,
    check_current_folder,
    use_utf8,
)
from trainer.telemetry.std_streams import fill_descriptors

OUTPUT_S = 1.0  # to wait at the end for output pipes that some process still holds open


def run(argv: Sequence[str]) -> int:
    """Launch; return the exit code."""
    fill_descriptors()
    try:
        use_utf8()
        options = parse_options(argv)
        secret = take_secret(options)
        check_current_folder("trainer", "launch")
        allow_files()
        check_cache_folder()
        stop = LauncherStop()
        stop.install()
        return _launch(options, secret, stop)
    except ConfigError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Exception as error:  # usually a limit of the system
        traceback.print_exc()
        hint = f"; {remedy(error)}".removesuffix("; ")
        print(f"launch: error: {type(error).__name__}: {error}{hint}; running ranks save and stop; "
              "repeat the command to continue", file=sys.stderr)
        return EXIT_FAILURE


def _launch(options: Options, secret: bytes, stop: LauncherStop) -> int:
    if options.rdzv_endpoint is not None:
        # Otherwise torch warns at each connection about addresses without a host name.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Import once, then fork: two concurrent imports take more than twice as long.
    import torch  # noqa: F401

    from launch.workers import Workers, start_server

    entry, argv = options.entry, options.trainer_argv
    output = Output()
    ranks = Workers(start_server(entry, argv, by_fork=True), entry, argv, stop, output)
    try:
        # These imports overlap with the fork server's. From here on this process may have threads.
        from launch.agent import HotAgent
        from launch.nodes.agent import NodeAgent
        from launch.nodes.rendezvous import NodesRendezvous
        from launch.rendezvous import LoopbackRendezvous

        if (code := ranks.wait_ready()) is not None:
            return code
        stop.defer(ranks.kill_and_exit)
        agent: HotAgent
        if options.rdzv_endpoint is None:
            agent = HotAgent(LoopbackRendezvous(), ranks, options, stop, output)
        else:
            nodes = NodesRendezvous(
                options, secret, lambda: stop.signal is not None, output.print_line)
            agent = NodeAgent(nodes, ranks, options, stop, output)
        agent.run()
        return agent.decision.code
    finally:
        ranks.close()
        output.finish(OUTPUT_S)
