"""Run folders whose files a person has crafted: commands and starts end with one clear line."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from runs import flip_a_bit
from safetensors.torch import load_file, save_file
from small_task import Small

from trainer import Config
from trainer.__main__ import main
from trainer.checkpoint.manifest import encode_manifest
from trainer.checkpoint.restore import restore_state
from trainer.commands import inspect
from trainer.commands.compare import COMPARED
from trainer.commands.library import process_settings_restored, train, train_in_process
from trainer.config.fields import Duration
from trainer.config.schema import Batch, Checkpoint, Eval, WorldConfig
from trainer.errors import AlreadyFinished, ConfigError
from trainer.optim import compile_cache
from trainer.run import warmup
from trainer.run.run import BuiltRun
from trainer.storage import layout

LAST, MODEL = "checkpoints/step-00000006", "model.safetensors"


def config(run: Path, steps: int = 6, **more: Any) -> Config[Small]:
    return Config(
        task=Small(), run=str(run), steps=steps, device="cpu", world=WorldConfig(threads=1),
        batch=Batch(global_size=16, micro_size=8), eval=Eval(every=Duration(3)),
        checkpoint=Checkpoint(every=Duration(3), keep=9), **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six steps."""
    path = tmp_path_factory.mktemp("crafted") / "run"
    train(config(path))
    return path


@pytest.fixture
def crafted(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, for a test to change."""
    return shutil.copytree(run, tmp_path / "crafted")


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    with process_settings_restored():
        yield


def change_json(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_bytes())
    changed = change(value)
    path.write_text(json.dumps(value if changed is None else changed))


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda fields: None) -> None:
    """Write the manifest of a checkpoint anew, as anybody can who changes its files."""
    import xxhash

    fields = json.loads((folder / "manifest.json").read_bytes())
    for name, entry in fields["files"].items():
        data = (folder / name).read_bytes()
        entry |= {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}
    del fields["checksum"]
    change(fields)
    (folder / "manifest.json").write_bytes(encode_manifest(fields))


def start(path: Path, steps: int = 6, **more: Any) -> int:
    """The exit code of a start in this process."""
    try:
        train(config(path, steps, **more))
    except ConfigError as error:
        return error.exit_code
    return 0


# --- what runs code

def test_a_compile_cache_that_came_with_the_folder_is_not_used(tmp_path, monkeypatch):
    from trainer.distributed.world import LaunchInfo, World

    def use(folder: Path) -> Path:
        monkeypatch.delenv(compile_cache.VARIABLE, raising=False)
        with (World.form(device="cpu", threads=1, launch=LaunchInfo()) as world,
              compile_cache.restored()):
            compile_cache.use(folder, world)
            return Path(os.environ[compile_cache.VARIABLE])

    mine = use(tmp_path / "mine")
    (mine / "kernel.py").write_text("compiled here")
    assert [path.name for path in use(tmp_path / "mine").iterdir()] == ["kernel.py"]

    shutil.copytree(tmp_path / "mine", tmp_path / "sent", copy_function=shutil.copy2)
    assert list(use(tmp_path / "sent").iterdir()) == []
    mine.chmod(0o777)
    assert list(use(tmp_path / "mine").iterdir()) == []


# --- links and special files

@pytest.mark.parametrize("name", [*layout.APPENDED, *layout.FOLDERS])
def test_a_start_follows_no_link_out_of_the_run_folder(crafted, tmp_path, name):
    victim = tmp_path / "victim"
    if name in layout.FOLDERS:
        victim.mkdir()
        (victim / "precious").touch()
    else:
        victim.write_text("precious")
    before = victim.lstat().st_mtime_ns
    place = crafted / name
    shutil.rmtree(place, ignore_errors=True)
    place.unlink(missing_ok=True)
    place.symlink_to(victim)

    with pytest.raises(ConfigError, match="symbolic link, which isn't followed"):
        train(config(crafted, steps=7))

    assert victim.lstat().st_mtime_ns == before
    assert victim.is_dir() or victim.read_text() == "precious"
    assert not victim.is_dir() or [p.name for p in victim.iterdir()] == ["precious"]


def test_a_run_folder_may_be_a_link_and_lie_below_one(crafted, tmp_path):
    (tmp_path / "disk").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "disk/crafted")

    assert start(tmp_path / "linked", steps=7) == 0
    assert inspect.inspect(tmp_path / "linked")["step"] == 7


@pytest.mark.parametrize("name", [
    "run.json", "summary.json", "config.toml", "environment.json", "metrics.jsonl", "events.jsonl",
    "timing.jsonl", "lock", "model.safetensors", f"{LAST}/manifest.json",
    f"{LAST}/state.json", f"{LAST}/model.safetensors"])
@pytest.mark.parametrize("special", ["pipe", "device", "large"])
def test_only_regular_files_of_a_usual_size_are_read(crafted, capsys, name, special):
    path = crafted / name
    path.unlink()
    if special == "pipe":
        os.mkfifo(path)
    elif special == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)

    for arguments in (["inspect", crafted, "--json"], ["report", crafted, "--text"],
                      ["compare", crafted, crafted]):
        assert main([str(argument) for argument in arguments]) in (0, 1, 2)
    assert start(crafted, steps=7) in (0, 2)


@pytest.mark.parametrize("name", [*layout.FOLDERS, LAST, *layout.REPLACED])
def test_a_folder_in_place_of_a_file_and_a_file_in_place_of_a_folder(crafted, name):
    place = crafted / name
    if place.is_file():
        place.unlink()
        place.mkdir()
    else:
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        place.touch()

    assert start(crafted, steps=7) == (0 if name == LAST else 2)


def test_a_mirror_of_pipes_does_not_block(crafted, tmp_path):
    (tmp_path / "mirror").mkdir()
    os.mkfifo(tmp_path / "mirror/owner")
    (crafted / "mirror.json").write_text(json.dumps(
        {"url": f"file://{tmp_path}/mirror", "launch": None, "generation": 1}))

    assert main(["inspect", str(crafted), "--json"]) == 0


def test_optimizer_state_of_another_type_is_refused(crafted):
    path = crafted / LAST / "optimizer.safetensors"
    save_file({name: value.double() for name, value in load_file(path).items()}, path)
    sign(crafted / LAST)

    assert start(crafted, steps=7) == 2


# --- hashes

@pytest.mark.parametrize("name", ["a\0b", "\ud800", "..", "a/b", "", "x" * 300])
def test_a_manifest_lists_names_of_files(crafted, name):
    sign(crafted / LAST, lambda fields: fields["files"].update({name: fields["files"][MODEL]}))

    assert not inspect.inspect(crafted)["checkpoints"][-1]["valid"]
    assert start(crafted, steps=7) == 0


@pytest.mark.parametrize("url", ["5", '"s3://["', '"http://x"', '"file:///"', '"file:///dev/null/x"'])
def test_a_folder_may_name_any_mirror(crafted, url):
    text = '{"url": %s, "launch": null, "generation": 1}'
    (crafted / "mirror.json").write_text(text % url)

    assert main(["inspect", str(crafted), "--json"]) == 0


def test_only_files_that_the_manifest_lists_are_loaded(crafted):
    for name in ("ema.safetensors", "other.safetensors"):
        (crafted / LAST / name).write_bytes(b"no tensors")

    assert start(crafted, steps=7) == 0


def test_a_flipped_bit_of_the_product_is_found(crafted, capsys):
    flip_a_bit(crafted / "model.safetensors")
    shown = inspect.inspect(crafted)
    assert shown["damage"] == ["crafted: model.safetensors doesn't match its checksum"]
    assert shown["does"] == "writes model.safetensors again"
    for init in (crafted, crafted / "model.safetensors"):
        with pytest.raises(ConfigError, match="doesn't match its checksum"):
            train(config(crafted.with_name("new"), init=str(init)))
    shutil.move(crafted / "checkpoints", crafted.with_name("aside"))
    for command in (["evaluate"], ["predict"], ["export", f"--to={crafted}/../out"]):
        assert main([command[0], str(crafted), *command[1:]]) == 2
        assert "doesn't match its checksum" in capsys.readouterr().err
    shutil.move(crafted.with_name("aside"), crafted / "checkpoints")

    assert start(crafted) == 0
    assert inspect.inspect(crafted)["damage"] == []


# --- compare

def in_metrics(old: str, new: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        text = (run / "metrics.jsonl").read_text()
        assert old in text
        (run / "metrics.jsonl").write_text(text.replace(old, new, 1))
    return change


def in_bytes_of_state(write: Callable[[str], bytes]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / LAST / "state.json"
        path.write_bytes(write(path.read_text()))
        sign(run / LAST)
    return change


def in_state(part: str, name: str, value: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        change_json(run / LAST / "state.json", lambda state: state[part].update({name: value}))
        sign(run / LAST)
    return change


@pytest.mark.parametrize("change", [
    in_metrics('"samples": 16', '"samples": 16.0'), in_metrics('"samples": 16', '"samples": true'),
    in_metrics('"samples": 16', '"samples": 16, "samples": 16'),
    in_metrics('"samples": 16', '"samples": 16, "more": null'),
    in_metrics('"step": 1,', '"step": 1.0,'), in_metrics('"step": 1,', '"step": "1",'),
    in_metrics('\n', '\n{"step": null}\n'), in_metrics('\n', '\n{"step": 99}\n'),
    in_metrics('\n', '\nnot JSON\n'), in_metrics('\n', '\n\n'), in_metrics('{', ' {'),
    in_metrics('"loss": ', '"loss": NaN, "was": '), in_metrics('"loss": ', '"loss": 0'),
     *map(in_bytes_of_state, (
         lambda text: text.encode("utf-8-sig"), lambda text: text.encode("utf-16"),
         lambda text: text.encode() + b"\n")),
     in_state("progress", "replaced", False), in_state("optimizer", "more", None)])
def test_other_values_are_never_the_same_bits(run, crafted, capsys, change):
    change(crafted)

    assert main(["compare", str(run), str(crafted)]) in (1, 2)
    assert "same bits" not in capsys.readouterr().out


@pytest.mark.parametrize(("left", "right"), [
    ("0.0", "-0.0"), ("0", "false"), ("1", "true"), ("1", "1.0"), ("NaN", "null"), ("1", '"1"'),
    ("1e400", "Infinity"), ("[0]", "[false]"), ('{"a": 0}', '{"a": 0.0}'), ('{"a": null}', "{}")])
def test_json_values_are_compared_as_they_are_written(left, right):
    from trainer.commands.compare import _as_written, _value_differences

    assert list(_value_differences("x", _as_written(left), _as_written(left))) == []
    assert list(_value_differences("x", _as_written(left), _as_written(right))) != []


# --- odd records

DEEP = "[" * 100_000 + "]" * 100_000
ODD = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 2**53, 10**30, -0.0, 1e308, 5e-324, float("nan"),
                     float("inf"), "", "x", "\x1b[31m\n", "\ud800", "../..", [], {}, [None], [[]],
                     {"": None}, [1, "x"], {"a": {"b": []}}, "step-00000003"]),
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                 lambda inner: st.lists(inner, max_size=3)
                 | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=6))
RAW = st.one_of(st.binary(max_size=40), st.sampled_from([
    b"", b"{}", b"[]", b"null", b"{", DEEP.encode(), b'{"a":' * 2000 + b"1" + b"}" * 2000,
    b'{"step": 1, "step": 2}', b"\xef\xbb\xbf{}", b"9" * 5000, b'{"step": ' + b"9" * 5000 + b"}"]))
RECORDS = ("run.json", "summary.json", "environment.json", "lock", "metrics.jsonl", "events.jsonl",
           "timing.jsonl", "config.toml", f"{LAST}/state.json",
           f"{LAST}/manifest.json")


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each (container, key) in a JSON value."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list) and value[key]:
            yield from places(value[key])


def mutate(draw: Callable[..., Any], data: bytes) -> bytes:
    """One JSON object with a value changed, added or removed."""
    value = json.loads(data)
    for _ in range(draw(st.integers(1, 3))):
        if not (found := list(places(value))):
            break
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        how, odd = draw(st.sampled_from(["change", "remove", "add"])), copy.deepcopy(draw(ODD))
        if how == "change":
            holder[key] = odd
        elif how == "remove":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from([*map(str, holder), "new", "step", "time"]))] = odd
    return json.dumps(value).encode()


def craft(draw: Callable[..., Any], folder: Path) -> None:
    """Change a record of a run folder."""
    import tomllib

    import tomli_w

    path = folder / draw(st.sampled_from(RECORDS))
    data = path.read_bytes()
    if draw(st.integers(0, 5)) == 0:
        data = draw(RAW)
    elif path.suffix == ".jsonl":
        lines = data.splitlines()
        number = draw(st.integers(0, len(lines) - 1))
        lines[number] = mutate(draw, lines[number])
        data = b"\n".join(lines) + b"\n"
    elif path.suffix == ".json" or path.name == "lock":
        data = mutate(draw, data)
    elif path.suffix == ".toml":
        table = tomllib.loads(data.decode())
        holder, key = draw(st.sampled_from(list(places(table))))
        holder[key] = draw(st.sampled_from([0, -1, 2**70, 1.5, float("nan"), "", "x", [], {}, [1],
                                            "\x1b", True, {"a": 1}]))
        data = tomli_w.dumps(table).encode()
    path.write_bytes(data)
    if path.name == "state.json":
        sign(path.parent)
    elif path.name == "manifest.json":
        try:
            fields = json.loads(data)
            fields.pop("checksum", None)
            path.write_bytes(encode_manifest(fields))
        except (ValueError, AttributeError, TypeError, RecursionError):
            path.write_bytes(data)


def read_as_a_start(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build a run and restore its state, as a start does; without a step (30 ms)."""
    def restore(built: BuiltRun) -> None:
        if (found := built.resumption.found) is not None:
            context = built.context
            restore_state(found, built.folder.store, built.trainable.state, context.world,
                          context.log)
        raise AlreadyFinished("restored")

    with monkeypatch.context() as patch, contextlib.suppress(ConfigError):
        patch.setattr(warmup, "start", restore)
        train_in_process(config(path, steps=7))


def check(run: Path, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch,
          draw: Callable[..., Any], *, begin: bool) -> None:
    """Craft a copy of a run; no command and no start may raise, nor take it for the run."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    craft(draw, folder)
    kept = [name for name in ("metrics.jsonl", f"{LAST}/state.json")
            if (folder / name).read_bytes() == (run / name).read_bytes()]
    code = main(["compare", str(run), str(folder)])
    assert code in (0, 1, 2)
    if "metrics.jsonl" not in kept:
        assert code, "same bits for other bytes"
    if code == 0 and len(kept) < 2:  # what isn't compared: settings, circumstances, lines
        one, other = (json.loads((path / LAST / "state.json").read_bytes())
                      for path in (run, folder))
        assert all(json.dumps(one.get(n)) == json.dumps(other.get(n)) for n in COMPARED)
    capsys.readouterr()
    code, shown = main(["inspect", str(folder), "--json"]), capsys.readouterr().out
    assert code == 0 or (code, shown) == (2, "")
    if shown:
        assert inspect._table(json.loads(shown), folder)  # the text, which is made of the object
    assert main(["report", str(folder), "--text"]) in (0, 2)
    if begin:
        assert start(folder, steps=7) in (0, 2)
        assert start(folder.with_name("onward"), steps=7, resume=str(folder)) in (0, 2)
        shutil.rmtree(folder.with_name("onward"), ignore_errors=True)
    else:
        read_as_a_start(folder, monkeypatch)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without fsync, and without what is alive in the garbage collection of each start (0.2 s)."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_odd_records_give_one_line_and_no_traceback(
    run, tmp_path, capsys, monkeypatch, quick, data
):
    check(run, tmp_path / "odd", capsys, monkeypatch, data.draw, begin=False)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_odd_records(run, tmp_path, capsys, monkeypatch, quick, part):
    """Each record is compared, inspected, reported and read as by a start; one in fifty is trained
    on. A part takes 90 s."""
    @seed(part)
    @settings(max_examples=2500)
    @given(data=st.data())
    def records(data: Any) -> None:
        check(run, tmp_path / "odd", capsys, monkeypatch, data.draw,
              begin=data.draw(st.integers(0, 50)) == 17)

    records()
