"""`GatedBlock`: the block's own results in every mode, its parameters untouched, its gate on real calls."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from fusionml import GatedBlock, blocks


class Block(nn.Module):
    """Two linear layers and a residual: enough to have three modes."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256)
        self.down = nn.Linear(256, 128, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(nn.relu(self.up(x)))


@pytest.fixture
def block() -> Block:
    mx.random.seed(7)
    made = Block()
    made.eval()
    mx.eval(made.parameters())
    return made


def rows(n: int) -> mx.array:
    return mx.random.normal((1, n, 128), key=mx.random.key(n))


def timed_as(monkeypatch: pytest.MonkeyPatch, gated: GatedBlock, seconds: dict[str, float]) -> list[str]:
    """Make each arm appear to take `seconds`; the list of arms that ran."""
    clock = [0.0]
    ran: list[str] = []
    monkeypatch.setattr(blocks.time, "perf_counter", lambda: clock[0])
    arms = gated._hidden.arms
    for name, arm in list(arms.items()):

        def run(x: mx.array, name: str = name, arm: Callable[..., mx.array] = arm) -> mx.array:
            ran.append(name)
            clock[0] += seconds[name]
            return arm(x)

        arms[name] = run
    return ran


@pytest.mark.parametrize("fastest", ["split", "compiled", "eager"])
def test_it_settles_on_the_fastest_mode_and_computes_what_the_block_does(
    fastest: str, block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    gated = GatedBlock(block)
    ran = timed_as(monkeypatch, gated, {arm: 0.01 if arm == fastest else 0.013 for arm in gated.gate.arms})
    x = rows(300)
    expected = np.array(block(x))
    for _ in range(40):
        np.testing.assert_allclose(np.array(gated(x)), expected, rtol=1e-5, atol=1e-5)
    assert gated.gate.arm == fastest
    assert set(ran) == {"split", "compiled", "eager"}
    assert ran[-3:].count(fastest) >= 2


def test_the_first_run_of_a_mode_never_counts(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedBlock(block)
    slow_start = {"split": [5.0], "compiled": [50.0], "eager": [1.0]}
    clock = [0.0]
    monkeypatch.setattr(blocks.time, "perf_counter", lambda: clock[0])
    for name, arm in list(gated._hidden.arms.items()):

        def run(x: mx.array, name: str = name, arm: Callable[..., mx.array] = arm) -> mx.array:
            clock[0] += slow_start[name].pop() if slow_start[name] else {"split": 0.01}.get(name, 0.02)
            return arm(x)

        gated._hidden.arms[name] = run
    for _ in range(30):
        gated(rows(300))
    assert gated.gate.arm == "split"
    assert gated.gate.state()["rejected"]["first run"] == 3


def test_few_rows_and_traces_are_the_block_itself(block: Block) -> None:
    gated = GatedBlock(block)
    gated(rows(64))
    mx.eval(mx.compile(gated)(rows(300)), mx.grad(lambda x: gated(x).sum())(rows(300)))
    assert gated.gate.state()["estimates"]["split"]["samples"] == 0
    assert gated.gate.state()["rejected"] == {}


def test_the_compiled_mode_follows_new_weights(block: Block) -> None:
    gated = GatedBlock(block)
    x = rows(300)
    before = np.array(gated._hidden.arms["compiled"](x))
    block.up.weight = block.up.weight * 2
    after = np.array(gated._hidden.arms["compiled"](x))
    assert not np.allclose(before, after)
    np.testing.assert_allclose(after, np.array(block(x)), rtol=1e-5, atol=1e-5)


def test_parameters_and_files_are_the_blocks(block: Block) -> None:
    gated = GatedBlock(block)
    keys = [name for name, _ in tree_flatten(gated.parameters())]
    assert keys == [f"block.{name}" for name, _ in tree_flatten(block.parameters())]
    twin = gated._hidden.arms["split"]
    assert isinstance(twin, nn.Module)
    shared = zip(tree_flatten(twin.parameters()), tree_flatten(block.parameters()), strict=True)
    assert all(mine is its for (_, mine), (_, its) in shared), "weights are shared, not copied"


def test_the_state_can_be_written_down(block: Block) -> None:
    gated = GatedBlock(block)
    for _ in range(8):
        gated(rows(300))
    assert json.loads(json.dumps(gated.gate.state()))["policy"] == "auto"


@pytest.mark.parametrize(("name", "value"), [("policy", "sometimes"), ("ratio", 1.5), ("ratio", -0.1)])
def test_wrong_arguments_are_named(block: Block, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        GatedBlock(block, **{name: value})
