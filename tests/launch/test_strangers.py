"""What strangers send or leave: one attack of each kind, by commands that every version has.

The file imports nothing that depends on the layout of the package: in the tree of an older version
it shows which attacks succeed there.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xxhash
from launching import Launched
from machine import free_port
from small_task import Small
from torch.distributed import TCPStore

from trainer.__main__ import main

ROOT = Path(__file__).parents[2]
LAST = "checkpoints/step-00000006"
TRAINING = ["--task=test_strangers:Keyed", "--steps=6", "--device=cpu", "--world.threads=1",
            "--batch.global-size=16", "--batch.micro-size=8", "--data.workers=0",
            "--eval.every=3", "--checkpoint.every=3"]
KEY = "hunter2-hunter2"
CONTROL = "\x1b[2J\x9b\u202e<script>"
LIMIT_S = 100


@dataclasses.dataclass(frozen=True)
class Keyed(Small):
    api_key: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    code: int
    output: str


def command(*arguments: object, first: Callable[[], object] = int) -> Ended:
    """Run a command in a process that is forked from this one, which has torch imported; in it
    `first` is called before."""
    log = Path("log")
    if not (pid := os.fork()):
        code = 99
        try:
            signal.alarm(LIMIT_S)
            for number in (1, 2):
                os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
            first()
            code = main([*map(str, arguments)])
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    output = log.read_text(errors="replace")
    log.unlink()
    return Ended(os.waitstatus_to_exitcode(status), output)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps."""
    path = tmp_path_factory.mktemp("strangers")
    with contextlib.chdir(path):
        ended = command(*TRAINING, "--run=run", f"--task.api-key={KEY}")
    assert ended.code == 0, ended.output
    return path / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test to change."""
    return shutil.copytree(finished, tmp_path / "run")


def change(path: Path, update: Callable[[dict[str, Any]], None]) -> None:
    value = json.loads(path.read_bytes())
    update(value)
    path.write_text(json.dumps(value))


def sign(folder: Path, update: Callable[[dict[str, Any]], None] = len) -> None:
    """Write the manifest of a checkpoint anew, as anybody can who changes its files."""
    fields = json.loads((folder / "manifest.json").read_bytes())
    for name, entry in fields["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    del fields["checksum"]
    update(fields)
    body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
    (folder / "manifest.json").write_bytes(
        body + b',\n  "checksum": "%s"\n}\n' % xxhash.xxh3_128_hexdigest(body).encode())


def inspected(run: Path) -> dict[str, Any]:
    ended = command("inspect", run, "--json")
    assert ended.code == 0, ended.output
    found: dict[str, Any] = json.loads(ended.output)
    return found


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self._path),)


def test_1_a_stranger_at_the_rendezvous_runs_no_code(tmp_path, monkeypatch):
    """A pickle in the launchers' store is not loaded."""
    monkeypatch.setenv("TRAINER_SECRET", "a secret that strangers do not know")
    port, ran = free_port(), tmp_path / "ran"
    attack = base64.b64encode(pickle.dumps(Payload(ran))).decode()
    with Launched(tmp_path / "run", {"0.0": "stubborn"}, "--nnodes=1:2",
                  f"--rdzv-endpoint=127.0.0.1:{port}") as launched:
        launched.wait_notes("serving", 1)
        stranger = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        deadline_s = time.monotonic() + LIMIT_S
        while "not signed" not in launched.err and not ran.exists():
            assert time.monotonic() < deadline_s, launched.err
            stranger.set("torch.rendezvous.trainer", attack)
            time.sleep(0.1)
    assert not ran.exists()


def test_2_the_documents_tell_which_launcher_listens_on_all_interfaces(tmp_path):
    """`torchrun --standalone` does, which README.md says."""
    (tmp_path / "wait.py").write_text("import signal; print('up', flush=True); signal.pause()")
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "wait.py"],
        stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        inodes = {os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()}
        rows = [line.split() for table in ("tcp", "tcp6")
                for line in Path("/proc/net", table).read_text().splitlines()[1:]]
        open_to_all = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes
                       and not row[1].rpartition(":")[0].strip("0")]
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert len(open_to_all) == 2
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "`torchrun --standalone` has two listeners on all interfaces" in text


def test_3_looking_at_a_run_imports_nothing_of_it(run, tmp_path):
    """Neither its task nor anything else that its config.toml names."""
    (tmp_path / "stranger.py").write_text("open('ran', 'w').close()")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("test_strangers:Keyed", "stranger:Task"))

    for arguments in (["inspect", run], ["report", run], ["compare", run, run]):
        assert command(*arguments).code == 0
        assert not (tmp_path / "ran").exists(), arguments
    assert command("evaluate", run).code == 2
    assert (tmp_path / "ran").exists(), "evaluate runs the task"


def test_4_a_start_writes_nothing_through_a_link(run, tmp_path):
    """To a file of the user outside of the run folder."""
    places = [run / name for name in ("lock", "last-step", "events.jsonl", "timing.jsonl")]
    victims = [tmp_path / place.name for place in places]
    for place, victim in zip(places, victims, strict=True):
        place.rename(victim) if place.exists() else victim.touch()
        place.symlink_to(victim)
    before = [victim.read_bytes() for victim in victims]

    ended = command(*TRAINING, f"--run={run}", "--steps=7", f"--task.api-key={KEY}")
    assert [victim.read_bytes() for victim in victims] == before
    assert ended.code == 2
    assert "symbolic link" in ended.output


def test_5_a_checkpoint_or_model_without_its_files_or_bits_is_damaged(run):
    """A manifest with an empty list; a flipped bit of the run's model.safetensors."""
    sign(run / LAST, lambda fields: fields["files"].clear())
    data = bytearray((run / "model.safetensors").read_bytes())
    data[-9] ^= 1
    (run / "model.safetensors").write_bytes(data)

    found = inspected(run)
    assert [checkpoint["valid"] for checkpoint in found["checkpoints"]] == [True, False]
    assert "model.safetensors doesn't match its checksum" in str(found["damage"])
    ended = command(*TRAINING, "--run=new", f"--init={run / 'model.safetensors'}")
    assert ended.code == 2
    assert "doesn't match its checksum" in ended.output


@pytest.mark.parametrize(("old", "new"), [
    ('"samples": 16', '"samples": 16.0'), ('"skipped": 0', '"skipped": -0'),
    ('"skipped": 0', '"skipped": false'), ("\n", '\n{"step": null}\n')])
def test_6_other_json_values_are_not_the_same_bits(finished, run, old, new):
    """Numbers count as they are written, and so does each line."""
    path = run / (f"{LAST}/state.json" if "skipped" in old else "metrics.jsonl")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    sign(run / LAST)

    ended = command("compare", finished, run)
    assert ended.code in (1, 2)
    assert "same bits" not in ended.output


def test_7_odd_records_give_one_line_and_block_no_start(run):
    """Wrong types, deep nesting, a folder of a huge step, and a device in place of a file."""
    change(run / "environment.json", lambda found: found.update(determinism=[]))
    with (run / "events.jsonl").open("a") as file:
        file.write("[" * 100_000 + '\n{"event": "start"}\n{"time": NaN, "attempt": {}}\n')
    (run / "checkpoints/step-10000000000000000000.tmp-1-0123abcd").mkdir()

    for arguments in (["inspect", run], ["report", run], ["compare", run, run],
                      [*TRAINING, f"--run={run}", "--steps=7", f"--task.api-key={KEY}"]):
        ended = command(*arguments)
        assert ended.code == 0, ended.output
        assert "Traceback" not in ended.output
    (run / "run.json").unlink()
    (run / "run.json").symlink_to("/dev/zero")
    assert command("inspect", run).code == 0


def test_8_control_characters_of_files_do_not_reach_the_terminal(run):
    """Neither those of the environment, of events, of a manifest nor of a state."""
    other = shutil.copytree(run, run.with_name("other"))
    change(run / "environment.json",
           lambda found: found["determinism"].update(why=CONTROL, label=CONTROL))
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines += [lines[0] | {"event": "start", "attempt": 1, "world_size": 1, "launch": CONTROL},
              lines[-1] | {"event": "failure", "why": CONTROL, "attempt": 1, "phase": CONTROL}]
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    change(run / LAST / "state.json", lambda state: state["meter"].update(total=CONTROL))
    sign(run / LAST, lambda fields: fields.update(kind=CONTROL))

    outputs = [command(*arguments).output for arguments in (
        ["inspect", run], ["compare", run, other], ["report", run])]
    page = (run / "report.html").read_text()
    assert "<script>" not in page
    assert not set("\x1b\x9b\u202e") & set("".join([*outputs, page]))


def test_9_a_recipe_decides_no_start_and_a_secret_is_masked(run, tmp_path):
    """`run`, `inject` and `accept` are refused; a flag named like a key is not recorded."""
    for text in ("run = 'elsewhere'", "inject = ['raise']", "accept = ['data']"):
        (tmp_path / "recipe.toml").write_text(text)
        ended = command("recipe.toml", *TRAINING, *["--run=new"] * ("run" not in text))
        assert ended.code == 2, text
        assert text.split()[0] in ended.output
    assert command("report", run).code == 0
    found = [path.name for path in run.rglob("*")
             if path.is_file() and KEY.encode() in path.read_bytes()]
    assert found == ["config.toml"]


def test_10_a_report_is_a_new_file(run, tmp_path):
    """Links in its place and in that of its temporary file are not followed."""
    def link() -> None:
        for name in ("report.html", *(f".report.html.{os.getpid()}{end}" for end in ("", ".tmp"))):
            (run / name).symlink_to(tmp_path / "victim")

    (tmp_path / "victim").write_text("precious")
    assert command("report", run, first=link).code == 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert not (run / "report.html").is_symlink()
