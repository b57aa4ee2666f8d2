"""`python -m launch`: command line → ranks → exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launch.options import Options, parse
from launch.output import Output
from launch.signals import StopRequest
from trainer.errors import EXIT_CONFIG, EXIT_STOPPED, ConfigError

OUTPUT_S = 1.0
"""How long the end of the run waits for output that something still holds back."""


def main(argv: Sequence[str]) -> int:
    """Launch, and return the exit code: the trainer's own where it has ended the run itself."""
    try:
        options = parse(argv)
    except ConfigError as error:
        print(f"launch: error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    if not hasattr(os, "pidfd_open"):
        print("launch: error: this needs Linux; elsewhere use torchrun", file=sys.stderr)
        return EXIT_CONFIG
    stop = StopRequest()
    stop.install()
    return _launch(options, stop)


def _launch(options: Options, stop: StopRequest) -> int:
    # Imported once, then forked: two imports side by side take more than twice as long.
    import torch  # noqa: F401

    from launch.ranks import Ranks, fork_server

    entry, argv = options.entry, options.trainer_argv
    output = Output()
    ranks = Ranks(fork_server(entry, argv), entry=entry, argv=argv, stop=stop, output=output)
    stop.on_insist = ranks.kill_and_exit
    try:
        # While the server imports the trainer. From here on this process may have threads.
        from launch.agent import HotAgent
        from launch.rendezvous import LoopbackRendezvous

        if (code := ranks.wait_ready(until_stop=True)) is not None:
            return code
        if stop.signal is not None:
            return EXIT_STOPPED
        agent = HotAgent(
            LoopbackRendezvous(),
            ranks,
            num_ranks=options.nproc_per_node,
            max_restarts=options.max_restarts,
            grace_s=options.grace_s,
            stop=stop,
            output=output,
        )
        agent.run()
        return agent.verdict.code
    finally:
        ranks.close()
        output.finish(OUTPUT_S)


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # all is closed; taking torch's modules down would cost a second
