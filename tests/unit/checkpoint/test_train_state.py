"""The training state is restored by name, exactly, or with an error that names the entry."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from trainer.checkpoint.progress import BestTracker, LossMeter, ScheduleLengths, TrainProgress
from trainer.checkpoint.saved_state import SavedState
from trainer.checkpoint.train_state import TrainState
from trainer.config.schema import Schedule
from trainer.errors import CheckpointDamaged, ConfigError
from trainer.optim import schedules
from trainer.optim.ema import Ema
from trainer.storage.layout import EMA, MODEL, OPTIMIZER


def make(*, reverse: bool = False, lr: float = 0.1, dtype: torch.dtype = torch.float32,
         width: int = 4) -> TrainState:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    model = model.to(dtype)
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if p.dim() > 1], "weight_decay": 0.1},
              {"params": [p for n, p in named if p.dim() < 2], "weight_decay": 0.0}]
    if reverse:
        groups = [{**g, "params": g["params"][::-1]} for g in groups[::-1]]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    horizon = ScheduleLengths(epoch=5, total=20)
    return TrainState(
        model=model, optimizer=optimizer,
        schedule=schedules.Scheduler(Schedule(), optimizer, horizon),
        scaler=torch.amp.GradScaler("cpu", enabled=False), progress=TrainProgress(),
        best=BestTracker(), meter=LossMeter(), seed=3, num_ranks=2, parts={"horizon": horizon})


def train(state: TrainState, count: int) -> TrainState:
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(8, 3, generator=generator).to(state.model[0].weight.dtype)
        state.optimizer.zero_grad()
        state.model(x).square().mean().backward()
        state.optimizer.step()
        state.schedule.step()
        state.progress.step += 1
    return state


def saved(state: TrainState) -> tuple[dict, dict]:
    tensors = {file: {n: t.clone() for n, t in found.items()}
               for file, found in state.tensors().items()}
    return tensors, json.loads(json.dumps(state.facts()))


def restored(state: TrainState, tensors: dict, facts: dict) -> TrainState:
    state.load(tensors, SavedState.from_json(facts))
    return state


def moments(state: TrainState) -> dict[str, torch.Tensor]:
    return {f"{name}|{key}": value for parameter, name in state.names().items()
            for key, value in state.optimizer.state[parameter].items()}


@pytest.mark.parametrize("reverse", [False, True])
def test_the_optimizer_is_restored_by_name_in_any_order_of_groups(reverse):
    before = train(make(), 4)
    before.optimizer.param_groups[0]["steps_seen"] = 7  # an optimizer's own counter
    tensors, facts = saved(before)
    after = make(reverse=reverse)
    after.optimizer.param_groups[reverse]["steps_seen"] = 0

    restored(after, tensors, facts)

    assert after.optimizer.param_groups[reverse]["steps_seen"] == 7
    assert moments(after).keys() == moments(before).keys()
    assert all(torch.equal(v, moments(before)[k]) for k, v in moments(after).items())
    decay = {after.names()[p]: g["weight_decay"] for g in after.optimizer.param_groups
             for p in g["params"]}
    assert decay["0.weight"] == 0.1
    assert decay["0.bias"] == 0.0


def test_moments_keep_their_dtype_if_parameters_have_another():
    before = train(make(dtype=torch.bfloat16), 2)
    for entries in before.optimizer.state.values():
        entries["exp_avg"] = entries["exp_avg"].float()
    tensors, facts = saved(before)

    after = restored(make(dtype=torch.bfloat16), tensors, facts)

    for entries in after.optimizer.state.values():
        assert entries["exp_avg"].dtype == torch.float32
        assert entries["exp_avg_sq"].dtype == torch.bfloat16


def test_a_rate_changed_on_purpose_takes_effect():
    tensors, facts = saved(train(make(lr=0.1), 4))

    after = restored(make(lr=0.2), tensors, facts)

    assert after.optimizer.param_groups[0]["lr"] == pytest.approx(
        2 * facts["optimizer"]["groups"][0]["lr"])


def test_the_schedule_keeps_the_length_it_began_with():
    tensors, facts = saved(train(make(), 4))

    after = make()
    after.parts["horizon"].total = 400
    restored(after, tensors, facts)

    assert after.parts["horizon"].total == 20
    assert after.optimizer.param_groups[0]["lr"] == facts["optimizer"]["groups"][0]["lr"]


@pytest.mark.parametrize("missing", ["progress", "optimizer", "schedule", "best", "parts"])
def test_a_missing_entry_is_an_error_that_names_it(missing):
    tensors, facts = saved(train(make(), 1))
    del facts[missing]

    with pytest.raises(CheckpointDamaged, match=missing):
        restored(make(), tensors, facts)


def test_another_shape_or_name_is_an_error_that_names_it():
    tensors, facts = saved(train(make(), 1))

    with pytest.raises(CheckpointDamaged, match=r"0\.weight has shape"):
        restored(make(width=5), tensors, facts)
    del tensors[MODEL]["2.bias"]
    with pytest.raises(CheckpointDamaged, match=r"missing from the checkpoint: 2\.bias"):
        restored(make(), tensors, facts)


def test_weights_are_checked_that_a_step_freezes_for_a_time():
    state = make()
    state.model[0].requires_grad_(False)  # as in the forward of another turn
    broken = {name: torch.full_like(t, torch.nan) for name, t in state.tensors()[MODEL].items()
              if t.is_floating_point()}

    assert state.nonfinite_parameters(broken) == [n for n, _ in state.model.named_parameters()]


def with_average(state: TrainState) -> TrainState:
    state.ema = Ema(state.model, 0.9)
    return state


def test_averaged_weights_are_restored_or_start_from_the_model_if_there_were_none():
    state = with_average(train(make(), 2))
    for _ in range(2):
        state.ema.update()
        train(state, 1)
    tensors, facts = saved(state)

    resumed = restored(with_average(make()), tensors, facts)

    assert set(tensors) == {MODEL, OPTIMIZER, EMA}
    assert resumed.ema.updates == 2
    assert all(torch.equal(t, tensors[EMA][n]) for n, t in resumed.ema.tensors().items())
    assert all(torch.equal(t, state.export_weights()[n])
               for n, t in resumed.export_weights().items())
    del tensors[EMA], facts["ema"]
    restored(resumed, tensors, facts)
    assert resumed.ema.updates == 0
    assert all(torch.equal(t, tensors[MODEL][n]) for n, t in resumed.export_weights().items())
    with pytest.raises(CheckpointDamaged, match=r"do not contain 0\.weight"):
        resumed.ema.load({}, state.ema.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_the_count_of_updates_stays_on_the_host_unless_a_kernel_reads_it(fused: bool) -> None:
    """Otherwise a resumed run reads it from the device for each parameter in each update."""
    tensors, facts = saved(train(make(), 2))
    state = make()
    state.model.to("meta")  # stands for a GPU
    parameters = dict(state.model.named_parameters())
    for group in state.optimizer.param_groups:
        group["fused"] = fused
        names = [n for n, p in make().model.named_parameters() if (p.dim() > 1) == (
            group["weight_decay"] > 0)]
        group["params"] = [parameters[name] for name in names]

    state.load_optimizer(tensors[OPTIMIZER], facts["optimizer"])

    entries = list(state.optimizer.state.values())
    assert {e["step"].device.type for e in entries} == {"meta" if fused else "cpu"}
    assert {e["exp_avg"].device.type for e in entries} == {"meta"}


def test_a_replaced_parameter_is_named():
    state = make()

    state.model[2] = nn.Linear(4, 1)

    with pytest.raises(ConfigError, match=r"replaced or unfrozen 2\.bias, 2\.weight"):
        state.tensors()
