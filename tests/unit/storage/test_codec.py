"""Values as JSON and back: equal, of the same types, and in their own memory."""

from __future__ import annotations

import enum
import json
import random

import numpy as np
import pytest
import torch

from trainer.run.proof import content
from trainer.storage.codec import decode, encode

LOOP: list = []
LOOP.append(LOOP)


@pytest.mark.parametrize("value", [
    None, True, 2**200, -0.0, float("nan"), "a", b"\x00\xff", [], (), {}, set(),
    {"a": [1, {"b": None}]}, [1, (2, [3])], {1: "one", "1": 1, (2, 3): {4}}, frozenset({(1, 2)}),
    {"$tuple": [1]}, {"$": 1}, {"a": "$"}, random.Random(1).getstate(),
    np.random.RandomState(1).get_state(),
    np.random.default_rng(1).bit_generator.state, torch.Generator().manual_seed(1).get_state(),
    {"buffer": [torch.arange(6).view(2, 3).t(), torch.tensor(2.5, dtype=torch.bfloat16)]},
    torch.empty(0, 3), np.arange(6)[::-2], np.array(["a", "bc"]), np.datetime64("2020-01-01"),
    (np.float32(2.5),), np.zeros((), dtype=np.int8),
], ids=lambda value: str(value)[:30])
def test_a_value_comes_back(value):
    found = decode(json.loads(json.dumps(encode(value))))

    assert type(found) is type(value)
    assert content(found) == content(value)
    assert repr(found) == repr(value)


def test_a_value_is_copied_both_ways():
    live = {"place": [1, 2], "seen": torch.zeros(2)}
    encoded = encode(live)
    live["place"].append(3)
    live["seen"] += 1
    decode(encoded)["seen"].add_(1)

    assert content(decode(encoded)) == content({"place": [1, 2], "seen": torch.zeros(2)})


@pytest.mark.parametrize(("value", "message"), [
    (torch.Generator(), "it is a torch._C.Generator, which can't be saved"),
    ({"a": [1, (enum.Enum("Kind", "A").A,)]}, r"\['a'\]\[1\]\[0\] is a .*Kind, which can't"),
    ([np.array([object()])], r"\[0\] can't be saved: Object arrays"),
    ({"x": torch.zeros(2).to_sparse()}, r"\['x'\] can't be saved: "),
    (LOOP, "it contains itself"),
])
def test_what_cannot_be_stored_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        encode(value)
