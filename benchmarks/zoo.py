"""Are models of other libraries trained, and restored to the same bits after a kill?

    python -m benchmarks.zoo [--models gpt2,bert,…] [--keep FOLDER]

Small models made from configurations (nothing is downloaded), each trained twice on two ranks by
`python -m launch`: undisturbed, and with a SIGKILL of the last rank in a backward. Three
micro-batches a step leave a rank without one in the last slot. Models of libraries that are not
installed are left out by name. The exit code is 1 if a row does not hold.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
import time
from pathlib import Path

from benchmarks import reporting
from benchmarks.chaos_run import Launcher, differences, ends, kill
from trainer.errors import EXIT_COMPLETE
from trainer.storage.layout import EVENTS
from trainer.telemetry.events import read_events

MODELS = {
    "gpt2": ("Gpt2", "transformers"),
    "gpt2-checkpointing": ("Gpt2Checkpointing", "transformers"),
    "gpt2-lora": ("Gpt2Lora", "peft"),
    "bert": ("Bert", "transformers"),
    "t5": ("T5", "transformers"),
    "resnet18": ("ResNet18", "timm"),
    "vit-tiny": ("VitTiny", "timm"),
    "qat": ("Quantized", "torch"),
    "graphs": ("Graphs", "torch"),
}
"""Row → its task in `examples.other_libraries`, and the library that it needs."""
FLAGS = ("--steps=8", "--batch.global-size=12", "--batch.micro-size=4", "--eval.every=4",
         "--checkpoint.every=3", "--device=cpu", "--world.threads=1", "--data.workers=0")
LIMIT_S = 120.0  # for a run


def problem(task: str, folder: Path, launcher: Launcher, *flags: str) -> str | None:
    """Train a task; the first line of its log that names a failure, if it isn't trained."""
    log, flag = folder.with_suffix(".log"), f"--task=examples.other_libraries:{task}"
    pid = launcher.start(2, [flag, f"--run-dir={folder}", *FLAGS, *flags], log)
    if not ends(pid, LIMIT_S):
        kill([pid])
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == EXIT_COMPLETE:
        return None
    return next((line for line in log.read_text().splitlines()
                 if "error:" in line or "failed first" in line), f"exit code {code}")


def row(task: str, folder: Path, launcher: Launcher) -> list[str]:
    """Whether a task is trained, killed, and restored to the same bits; then the first problem."""
    straight, killed = folder / "straight", folder / "killed"
    folder.mkdir()
    if told := problem(task, straight, launcher):
        return ["no", "", "", told]
    told = problem(task, killed, launcher, "--inject=kill:rank=1:step=6:phase=backward")
    if not any(event["event"] == "fault" for event in read_events(killed / EVENTS)):
        return ["yes", "no", "", told or "the fault was not reached"]
    found = [told] if told else differences(straight, killed)
    return ["yes", "yes", "no" if found else "yes", *found[:1]]


def main() -> int:
    parser = reporting.parser("zoo", __doc__)
    parser.add_argument("--models", type=reporting.some_of(MODELS), default=",".join(MODELS),
                        help="(%(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for the runs and their logs")
    options = parser.parse_args()
    machine, began_s = reporting.machine(), time.monotonic()
    folder = Path(options.keep or tempfile.mkdtemp(prefix="zoo-"))
    folder.mkdir(parents=True, exist_ok=True)
    launcher, found = Launcher("launch-cold", max_restarts=1), dict[str, list[str]]()
    for name in options.models:
        task, library = MODELS[name]
        if importlib.util.find_spec(library) is None:
            print(f"left out: {name}; pip install -e '.[bench]' for it", flush=True)
            continue
        found[name] = row(task, folder / name, launcher)
        print(f"{name}: {', '.join(filter(None, found[name]))}", flush=True)
    print(reporting.table(["model", "trained", "killed", "same bits"],
                          [[name, *cells[:3]] for name, cells in found.items()]))
    same = sum(cells[:3] == ["yes"] * 3 for cells in found.values())
    print(f"{same} of {len(found)}, {time.monotonic() - began_s:.0f} s")
    reporting.print_json("zoo", machine=machine, models=found)
    if same == len(found) and options.keep is None:
        shutil.rmtree(folder)
    return int(same < len(found))


if __name__ == "__main__":
    reporting.finish(main)
