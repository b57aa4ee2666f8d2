"""`python -m launch`, and the command `trainer-launch`: launch, and exit with the code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn


def main(argv: Sequence[str]) -> int:
    """Launch; return the exit code, which is the trainer's if the trainer ended the run."""
    found, root = find_spec("trainer"), Path(__file__).resolve().parents[1]
    if found is not None and found.origin is not None and (
            not Path(found.origin).resolve().is_relative_to(root / "trainer")):
        print(f"launch: error: {found.origin} hides the package trainer; rename it, or start from "
              "another folder", file=sys.stderr)
        return 2
    from launch.launcher import run  # imports `trainer`

    return run(argv)


def launch_command() -> NoReturn:
    """The whole process: arguments, exit code."""
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # everything is closed; unloading torch's modules would take a second


if __name__ == "__main__":
    launch_command()
