"""Profile of a step: tables and a trace."""

from __future__ import annotations

import json
from pathlib import Path

from trainer.__main__ import main


def profiled(*arguments: str) -> int:
    """Run `python -m trainer profile` in a rank. Return its exit code."""
    return main(["profile", *arguments, "--world.threads=1", "--device=cpu"])


def test_phases_and_operations_are_printed_and_the_trace_is_complete(ranks, tmp_path, capfd):
    assert ranks(1, profiled, "spiral", "--task.points=300", "--active=3", f"--to={tmp_path}",
                 group=False) == [0]

    output = capfd.readouterr().out
    phases, operations, *_ = output[output.index("phase  "):].split("\n\n")
    for phase in ("data", "forward", "backward and clip", "update", "between steps"):
        assert f"\n{phase} " in phases
    shares = [float(line.split()[-2]) for line in phases.splitlines() if line.endswith("%")]
    assert 99 < sum(shares) < 101
    assert "Self CPU %" in operations
    assert "aten::" in operations
    trace, = Path(tmp_path).glob("*.pt.trace.json")
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    assert sum(name == "phase: forward" for name in names) == 3 * 2
