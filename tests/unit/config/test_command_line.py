"""Recipe and flags → `Config` → `config.toml`, and the message for each mistake."""

from __future__ import annotations

import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.__main__ import COMMANDS
from trainer.config import command_line
from trainer.config.compatibility import settings as plain
from trainer.config.fields import Duration, flag_of
from trainer.config.schema import Batch, Checkpoint, Config, Data, Optim
from trainer.errors import ConfigError
from trainer.run.startup_summary import startup_warnings
from trainer.tasks.images import Images


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        command_line.parse_config(argv, commands=", ".join(COMMANDS))
    return str(caught.value)


def recipe(folder: Path, text: str) -> str:
    path = folder / "recipe.toml"
    path.write_text(text)
    return str(path)


# --- recipes and flags


CHOICES = ('epochs = 3\n[clip]\nnorm = 2.0\n[optim]\nbetas = [0.5, 0.75]\nweight_decay = 0.5\n'
           'options = ["amsgrad=true"]\n[schedule]\nname = "linear"\nmin_ratio = 0.0\n'
           'warmup = "3"\noptions = ["start_factor=0.5"]\n')
READ: dict[str, tuple[list[str], str | None, dict[str, Any]]] = {
    "the run folder is named after the recipe": ([], None, {"run": "runs/sample"}),
    "a shipped recipe": (["fashion-mnist"], None, {"run": "runs/fashion-mnist"}),
    "a recipe's file": ([], "", {"run": "runs/recipe"}),
    "--run-dir": (["--run-dir", "a/b"], None, {"run": "a/b"}),
    "its alias": (["--run", "a/b"], None, {"run": "a/b"}),
    "with an underscore": (["--run_dir=a/b"], None, {"run": "a/b"}),
    "flags before the recipe before the defaults": (
        ["--optim.lr", "0.125", "--seed=3"], "steps = 7\n[optim]\nlr = 0.5\nweight_decay = 0.25\n",
        {"optim.lr": 0.125, "optim.weight_decay": 0.25, "steps": 7, "seed": 3,
         "optim.eps": Optim().eps}),
    "repeated flags are collected": (
        ["--inject", "kill:step=3", "--inject", "raise:rank=1", "--accept=data"], None,
        {"inject": ("kill:step=3", "raise:rank=1"), "accept": ("data",)}),
    "fields of a user's task are flags": (
        ["--task", "tape_task:Tape", "--task.samples", "5", "--task.norm=batch"], None,
        {"task.samples": 5, "task.norm": "batch"}),
    "another task drops the fields of the recipe's": (
        ["--task=tape_task:Tape"], 'steps = 3\n[task]\nclass = "images"\ndropout = 0.5\n',
        {"task.dropout": 0.0, "steps": 3}),
    "hyphens or underscores in a recipe": (
        [], "[batch]\nglobal-size = 64\nmicro_size = 16\n",
        {"batch": Batch(global_size=64, micro_size=16)}),
    "and in flags": (
        ["--batch.global_size=64", "--batch.micro-size", "16"], None,
        {"batch": Batch(global_size=64, micro_size=16)}),
    "what belongs to the recipe's choices": (["--schedule.warmup", "4"], CHOICES, {
        "epochs": 3, "optim.betas": (0.5, 0.75), "optim.options": ("amsgrad=true",),
        "schedule.min_ratio": 0.0, "schedule.options": ("start_factor=0.5",)}),
    "is dropped where a flag chooses otherwise": (
        ["--steps=9", "--clip.value=0.25", "--optim.name=sgd", "--schedule.name=constant"], CHOICES,
        {"steps": 9, "epochs": None, "clip.norm": None, "optim": Optim(name="sgd"),
         "schedule.min_ratio": None, "schedule.options": (), "schedule.warmup": Duration(3)}),
    "options of the flag's choice": (
        ["--schedule.name=multi-step", "--schedule.options", "milestones=5"], CHOICES,
        {"schedule.options": ("milestones=5",)}),
    "recorded by an earlier version, which did not use all": (
        [], 'steps = 4\nepochs = 5\n[optim]\nname = "sgd"\nweight_decay = 0.01\n'
        'betas = [0.9, 0.999]\neps = 1e-8\nmomentum = 0.5\nnesterov = "off"\n'
        '[schedule]\nname = "constant"\nmin_ratio = 0.1\n',
        {"steps": 4, "epochs": None, "optim": Optim(name="sgd", momentum=0.5),
         "schedule.min_ratio": None}),
    "a wrong value that a flag replaces": (
        ["--task.root=here", "--checkpoint.keep=2"],
        '[checkpoint]\nkeep = 0\n[task]\nclass = "field_task:Rooted"\n',
        {"task.root": "here", "checkpoint.keep": 2})}
"""What is read → flags, text of a recipe, settings."""


@pytest.mark.parametrize("what", READ)
def test_settings_come_from_flags_and_the_recipe(tmp_path, what):
    argv, text, expected = READ[what]

    config = command_line.parse_config(argv if text is None else [recipe(tmp_path, text), *argv])

    assert {name: operator.attrgetter(name)(config) for name in expected} == expected


# --- lengths

def test_a_recipe_may_begin_with_a_byte_order_mark_and_name_files_that_are_not_utf8(tmp_path):
    (tmp_path / "marked.toml").write_bytes(
        b'\xef\xbb\xbf[task]\nclass = "images"\ndata = "fashion-mnist"\nroot = "\xff"\n')

    assert command_line.parse_config([str(tmp_path / "marked.toml")]).task.root == "\udcff"


@pytest.mark.parametrize(("text", "length", "steps"), [
    ("200", Duration(200), 200), ("1ep", Duration(1, "epochs"), 75),
    ("0.5ep", Duration(0.5, "epochs"), 38), ("5%", Duration(5, "percent"), 19),
    ("off", Duration(0), 0), ("0", Duration(0), 0),
    ("0.001%", Duration(0.001, "percent"), 1), (" 3 ep ", Duration(3, "epochs"), 225),
    ("100%", Duration(100, "percent"), 375)])
def test_a_length_is_steps_epochs_a_part_of_the_run_or_off(text, length, steps):
    assert Duration.parse(text) == length
    assert length.steps(epoch=75, total=375) == steps


@pytest.mark.parametrize(("text", "message"), [
    ("", "is not a length; write 200 (steps), 1ep (epochs), 5% (of the run) or off"),
    ("-5", "is not a length"), ("1e3", "is not a length"), ("1epoch", "is not a length"),
    ("1.5", "is not a whole number of steps"), ("101%", "is more than the whole run")])
def test_an_invalid_length_is_refused_with_the_allowed_forms(text, message):
    with pytest.raises(ValueError, match=re.escape(f"{text!r} {message}")):
        Duration.parse(text)


@settings(deadline=None)
@given(st.one_of(
    st.integers(0, 10**12).map(lambda n: Duration(float(n))),
    st.floats(0, 1e6, allow_subnormal=False).map(lambda x: Duration(x, "epochs")),
    st.floats(0, 100).map(lambda x: Duration(x, "percent"))))
def test_a_length_written_out_is_read_as_the_same(length):
    again = Duration.parse(str(length))

    assert again.value == length.value
    assert again == length or length.value == 0, "off has no unit"


# --- config.toml

FIELDS, KINDS = "--task=field_task:Fields", "--task=field_task:Kinds"
RUNS = [
    *([name] for name in command_line.recipe_names()),
    ["--freeze=*", "--freeze=!fc.*", "--optim.rates=layer4.*=0.1", "--init=a.pth",
     "--schedule.name=warm-restarts", "--schedule.options=T_0=1ep", "--schedule.options=T_mult=2"],
    ["--batch.global-size=96", "--batch.micro-size=24", "--data.workers=3", "--data.drop-last=off",
     "--data.shuffle=off", "--data.prefetch=5"],
    ["--optim.name=sgd", "--optim.lr=1e-30", "--optim.momentum=0.1", "--optim.nesterov=on"],
    ["--optim.name=m:C", "--optim.betas", "0.1", "0.2", "--optim.eps=0.30000000000000004",
     "--optim.options=a=1", "--optim.options=b=0.5,none"],
    ["--checkpoint.every=0.333ep", "--checkpoint.keep-every=12.5%", "--checkpoint.on-error=stop",
     "--eval.every=off", "--eval.batch-size=7", "--eval.best=val_loss:min"],
    ["--precision.dtype=bf16", "--precision.compile=on", "--world.threads=2", "--device=cpu",
     "--stop.grace-s=inf"],
    ["--task.model=resnet18", "--task.label-smoothing=0.1", "--task.root=/some/where",
     "--task.data=fashion-mnist",
     "--task.augment=flip+crop", "--task.seed=4"],
    ["--task=tape_task:Tape", "--task.tape=\"quoted\" and\nbroken", "--task.nan-at=3"],
    *([FIELDS, *more] for more in (
        [], ["--task.width=None"], ["--task.width=7", "--task.depth=3"], ["--task.norm=LAYER"],
        ["--task.sizes=3", "--task.sizes=1", "--task.names=b", "--task.names=a"],
        ["--task.inner.rate=None"], ["--task.weights", "a", "0.25"],
        ["--task.places=one", "--task.places=two"]))]


@pytest.mark.parametrize("argv", RUNS, ids=lambda argv: " ".join(argv[:2]) or "default")
def test_config_toml_reproduces_the_run(tmp_path, argv):
    attempt = ["--inject=kill", "--resume=never", "--accept=data"]
    config = command_line.parse_config(argv)
    text = command_line.to_toml(command_line.parse_config([*argv, *attempt]))

    again = command_line.parse_config([recipe(tmp_path, text), f"--run-dir={config.run}"])

    assert again == config
    assert plain(again) == plain(config)
    assert [type(v) for v in vars(again.task).values()] == [
        type(v) for v in vars(config.task).values()]


@pytest.mark.parametrize("name", ["Gaps", "Objects"])
def test_a_value_that_config_toml_cannot_hold_is_refused_with_its_field(name):
    assert refusal(f"--task=field_task:{name}").startswith("--task.odd-one ")


# --- refusals

@pytest.mark.parametrize(("argv", "message"), [
    # names
    (["--optim.lrr=1"], "--optim.lrr: there is no such flag; did you mean --optim.lr?"),
    (["--lr=1"], "--lr: there is no such flag; did you mean --optim.lr?"),
    (["--xyzzy=1"], "--xyzzy: there is no such flag; --help lists them all."),
    (["-v"], "-v: there is no such flag; --help lists them all. (Write a value that begins"),
    (["inspct", "runs/x"], "recipe inspct: there is no such file, shipped recipe or command; did "
     "you mean 'inspect'?"),
    (["fashion-mnis"], "recipe fashion-mnis: there is no such file, shipped recipe or command; did "
     "you mean 'fashion-mnist'?"),
    (["nowhere.toml"], "recipe nowhere.toml: there is no such file, shipped recipe or command; "
     "Shipped recipes: cifar-10, distill, "),
    ([""], "recipe '': there is no such file"),
    ([__file__], f"recipe {__file__}: this is no TOML file; "),
    (["sample", "text"], "text: it belongs to no flag; give one RECIPE, before all flags."),
    # tasks
    (["--task=image"], "--task image: no built-in task of this name; did you mean 'images'?"),
    (["--task"], "--task: give the name of a task or module:Class"),
    (["--task=tape_task:Tap"], "--task tape_task:Tap: tape_task has no 'Tap'; did you mean "
     "tape_task:Tape?"),
    (["--task=:Tape"], "--task :Tape: the module is missing; write module:Name."),
    (["--task=nowhere:Task"], "--task nowhere:Task: there is no such module"),
    *((["--task", wrong], f"--task {wrong}: give a module name, not a path: write {right}")
      for wrong, right in [
          ("./tape_task.py:Tape", "tape_task:Tape."), (".tape:Tape", "tape:Tape."),
          ("/a/b/tape.py:Tape", "tape:Tape, and run in /a/b.")]),
    (["--task=field_task:Unknown"], "--task field_task:Unknown: the types of its fields can't be "
     "resolved: name 'Nowhere' is not defined; import them at run time too, not"),
    (["--task=field_task:Needy"], "--task field_task:Needy: --task.root: this field has no "
     "default; give a value."),
    (["--task.dropout=2"], "--task: --task.dropout 2.0: use FLOAT >= 0 and < 1."),
    (["--task=field_task:Rooted"], "--task field_task:Rooted: root is empty; name a folder"),
    # number of values
    (["--freeze", "README.md", "docs"], "--freeze README.md docs: 'docs' is an excess value; "
     "repeat --freeze for each value, and quote a value that has blanks or that the shell would "),
    (["--optim.lr=1", "2"], "--optim.lr 1 2: '2' is an excess value; quote a value that has blan"),
    (["--optim.betas", "0.9,0.99"], "--optim.betas 0.9,0.99: expected 2 values, separated by "),
    (["--steps"], "--steps: expected a value; write one that begins with - as --steps=-…"),
    ([KINDS, "--task.shares", "a=1"], "--task.shares a=1: expected keys and values in turn, "
     "separated by blanks"),
    ([KINDS, "--task.no-deep=off"], "--task.no-deep off: it takes no value."),
    (["--init="], "--init '': the value is empty; give one, or omit the flag."),
    # types
    (["--optim.lr", "1,5"], "--optim.lr 1,5: expected FLOAT."),
    (["--data.workers", "many"], "--data.workers many: expected auto|INT."),
    (["--device", "gpu"], "--device gpu: expected auto|cpu|cuda|mps (did you mean cpu?)."),
    (["--schedule.warmup", "5x"], "--schedule.warmup 5x: '5x' is not a length; write 200"),
    (["--schedule.warmup=0.05"], "--schedule.warmup 0.05: '0.05' is not a whole number of steps; 5 "
     "% of the run is written 5%."),
    ([KINDS, "--task.wide", "1"], "--task.wide 1: expected on|off."),
    # ranges
    (["--batch.global-size=0"], "--batch.global-size 0: use INT >= 1 and <= 10000000."),
    (["--batch.micro-size=33"], "--batch.micro-size 33: it must divide --batch.global-size 128; "
     "the nearest divisor is 32"),
    (["--optim.lr=nan"], "--optim.lr nan: use FLOAT > 0 and < inf."),
    (["--optim.betas", "0.9", "1.0"], "--optim.betas (0.9, 1.0): use FLOAT FLOAT >= 0 and < 1."),
    (["--stop.grace-s=1e10"], "--stop.grace-s 10000000000.0: use a number > 0 and <= 1e+09, or "),
    # choices, and values that contradict each other
    (["--steps=9", "--epochs=2"], "--steps 9: --epochs 2 sets the length of the run too"),
    (["--run= "], "--run-dir ' ': give the path of a folder."),
    (["--inject=kil"], "--inject kil: no fault 'kil'; there are kill"),
    (["--accept=optim.lr"], "--accept optim.lr: there is no such setting; use task.FIELD, batch.g"),
    (["--optim.name=adam"], "--optim.name adam: use adamw, sgd, or your own as module:Class"),
    (["--optim.rates=a=0"], "--optim.rates a=0: write PATTERN=FACTOR with a factor above 0"),
    (["--schedule.name=cosin"], "--schedule.name cosin: use cosine, constant, "),
    (["--schedule.name=m:f", "--schedule.options=a=1"],
     "--schedule.options a=1: --schedule.name m:f takes no"),
    (["--schedule.name=constant", "--schedule.min-ratio=0"], "--schedule.min-ratio 0.0: "
     "--schedule.name constant doesn't use it, only cosine and linear"),
    (["--log.sinks=mine"], "--log.sinks mine: write module:Class."),
    (["--log.hints-off=flat-los"], "--log.hints-off flat-los: there is no such hint; use ")])
def test_a_mistake_is_one_line_with_flag_value_and_remedy(argv, message):
    found = refusal(*argv)

    assert found.startswith(message), found
    assert "\n" not in found


@pytest.mark.parametrize(("text", "message"), [
    ("[optim\nlr = 1", "recipe {path}: "),
    ("[optim]\nlrr = 1", "{path}: unknown key optim.lrr; did you mean optim.lr?"),
    ("optim = 3", "{path}: optim = 3: write a table [optim]."),
    ("seed = true", "{path}: seed = True: expected INT."),
    ("[data]\nshuffle = 'of'", "{path}: data.shuffle = 'of': expected on|off (did you mean off"),
    ("[schedule]\nwarmup = '5x'", "{path}: schedule.warmup = '5x': '5x' is not a length"),
    ("None = ['seed']", "{path}: seed = None: expected INT."),
    ("inject = 'kill'", "{path}: inject = 'kill': expected STR …."),
    ("inject = ['kill']", "{path}: inject = ['kill']: a recipe can't decide this; remove it, and "),
    ("accept = ['data']", "{path}: accept = ['data']: a recipe can't decide this"),
    ("run = 'x'", "{path}: run = 'x': a recipe can't decide this; remove it, and give --run-dir"),
    ("resume = 'x'", "{path}: resume = 'x': a recipe can't decide this"),
    ("[task]\nclass = 'image'", "--task image: no built-in task of this name; did you mean"),
    ("[task]\ndropout = 2.0", "{path}: [task]: --task.dropout 2.0: use FLOAT >= 0 and < 1."),
    ("task = 'spiral'", "{path}: task = 'spiral': write a table [task], with the task's name as"),
    ("[task]\nclass = 'field_task:Rooted'", "{path}: [task]: root is empty; name a folder"),
    ("[checkpoint]\nkeep = 0", "{path}: --checkpoint.keep 0: use INT >= 1")])
def test_a_mistake_in_a_recipe_names_file_and_key(tmp_path, text, message):
    path = recipe(tmp_path, text)

    assert refusal(path).startswith(message.format(path=path)), refusal(path)


@pytest.mark.parametrize(("argv", "expected"), [
    ([], {"widths": (64, 64), "names": ["a"], "wide": False, "deep": True}),
    (["--task.widths", "8", "-4", "2", "--task.names=b"], {"widths": (8, -4, 2), "names": ["b"]}),
    (["--task.widths=8", "--seed=1", "--task.widths", "4", "2"], {"widths": (8, 4, 2)}),
    (["--task.names", "b", "--task.widths", "--task.names=c d"],
     {"widths": (), "names": ["b", "c d"]}),
    (["--task.shares", "a", "1", "b", "2"], {"shares": {"a": 1.0, "b": 2.0}}),
    (["--task.wide", "--task.no-deep"], {"wide": True, "deep": False}),
    (["--task.no-wide", "--task.deep=off"], {"wide": False, "deep": False}),
    (["--task.wide=on"], {"wide": True})])
def test_several_values_replace_the_default_and_a_boolean_is_a_switch(argv, expected):
    task = command_line.parse_config([KINDS, *argv]).task

    assert {name: getattr(task, name) for name in expected} == expected


# --- help

def shown_help(capsys, monkeypatch, *argv: str, columns: int = 100) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        command_line.parse_config([*argv, "--help"], commands="inspect, compare")
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_documents_every_setting(capsys, monkeypatch):
    text = "".join(shown_help(capsys, monkeypatch).split())  # words may be cut at a hyphen
    names = [name for name, _, _ in command_line.parse_config([]).leaves()]

    for name, setting in command_line._settings(Images).items():
        about = command_line._docs(setting.owner)[setting.field.name]
        assert f"{flag_of(name)}" in text, f"{name} is not in --help"
        assert "".join(about.split()) in text, f"{name}: {about}"
        names.remove(name)
    assert not names


def test_help_names_commands_recipes_and_defaults_and_fits_the_terminal(capsys, monkeypatch):
    for columns in (80, 100):
        text = shown_help(capsys, monkeypatch, "--task=tape_task:Tape", columns=columns)
        sections = text[text.index("\nrun:"):]
        assert max(map(len, sections.splitlines())) <= columns
    for part in ("torchrun --standalone --nproc_per_node=2", "python -m trainer",
                 "inspect, compare", "fashion-mnist", "text-stream", "5% (of the run)",
                 "(default: 128)", "(default: 1ep)", "(default: 5.0)", "(default: 5%)",
                 "--task.nan-at INT"):
        assert part in text
    assert "--task.augment" not in text


# --- the object itself


def test_each_setting_declares_its_change_class_and_task_fields_must_match():
    leaves = {name: change for name, _, change in command_line.parse_config([]).leaves()}

    assert set(leaves.values()) == {"fixed", "must_match", "may_change", "ignored"}
    of_task = {name: change for name, change in leaves.items() if name.startswith("task.")}
    for name in ("task.root", "task.teacher"):
        assert of_task.pop(name) == "ignored", "the location of the data does not change them"
    assert set(of_task.values()) == {"must_match"}


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Optim(nesterov=True), "--optim.nesterov True: expected on|off."),
    (lambda: Data(workers="two"), "--data.workers 'two': expected auto|INT."),
    (lambda: Optim(lr="0.1"), "--optim.lr '0.1': expected FLOAT."),
    (lambda: Batch(global_size=64.0), "--batch.global-size 64.0: expected INT."),
    (lambda: Config(freeze="*"), "--freeze '*': expected STR …."),
    (lambda: Config(optim={"lr": 1}), "--optim {'lr': 1}: expected Optim.")])
def test_a_value_of_another_type_is_refused_where_it_is_given_in_python(make, message):
    with pytest.raises(ConfigError) as caught:
        make()

    assert str(caught.value).startswith(message)


def test_suitable_numbers_paths_lists_and_lengths_are_converted():
    config = Config(optim=Optim(lr=1), run=Path("runs/x"), freeze=["*"], seed=np.int64(3),
                    checkpoint=Checkpoint(every="1ep"))

    assert config == Config(optim=Optim(lr=1.0), run="runs/x", freeze=("*",), seed=3,
                            checkpoint=Checkpoint(every=Duration(1, "epochs")))


def test_a_warm_up_longer_than_the_run_is_reported():
    config = command_line.parse_config(["--schedule.warmup", "3ep"])

    assert startup_warnings(config, {}, warmup=12, total=12) == []
    (line,) = startup_warnings(config, {}, warmup=12, total=6)
    assert "the run has 6 steps and the warm-up 12, so the rate ends at 50% of --optim.lr" in line
