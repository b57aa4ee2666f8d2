"""How much do several ranks gain? This trainer and bare DDP against independent processes.

    python -m benchmarks.scaling [--ranks 1,2] [--minutes 5]

The small CNN on the bundled sample, as in `benchmarks.throughput`: this trainer; the loop by hand
under DDP, twice (the second is the control); and `independent`: the same loop with as many
micro-batches per rank but without DDP, W processes that share only the machine. All use each rank's
own batch statistics.
"""

from __future__ import annotations

from benchmarks import reporting
from benchmarks.peers import WORKS
from benchmarks.throughput import compare

NAMES = ("trainer", "by-hand", "control", "independent")
WANTED = 0.98


def main() -> None:
    parser = reporting.parser("scaling", __doc__)
    parser.add_argument("--ranks", type=reporting.some_of("124"), default="1,2",
                        help="each a divisor of 4, the micro-batches of a step (%(default)s)")
    parser.add_argument("--minutes", type=float, default=5, help="of all rounds (%(default)s)")
    options = parser.parse_args()
    machine = reporting.machine()
    found = {size: compare("cnn", int(size), NAMES, 60 * options.minutes / len(options.ranks))
             for size in options.ranks}
    samples = WORKS["cnn"].micro_size * WORKS["cnn"].accumulation
    rows = [[name, *(f"{samples / side['seconds'][name]['median']:,.0f}"
                     for side in found.values())] for name in NAMES]
    rows += [[f"trainer / {name}", *(reporting.within(side["to_trainer"][name])
                                     for side in found.values())] for name in NAMES[1:]]
    print(reporting.table(["samples/s", *(f"W = {size}" for size in found)], rows))
    print(f"wanted at W = 2: {WANTED} of by-hand or more")
    reporting.print_json("scaling", machine=machine, ranks=found)


if __name__ == "__main__":
    reporting.finish(main)
