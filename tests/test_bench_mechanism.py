"""The mechanism's arms compute what they say; how fast anything is, no test asks."""

from __future__ import annotations

import json
import math
from statistics import median
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import mechanism
from benchmarks.experiment import Options
from benchmarks.processes import join
from fusionml import split

Fixture = pytest.MonkeyPatch
SMALL = Options(quick=True, scale=32, samples=3, warm_ups=1)
CELLS = mechanism.cells(SMALL)
SPLITS = (
    "ready inputs",
    "lazy graph",
    "eager boundary",
    "eager boundary, join after dispatch",
    "async boundary",
)


def test_the_papers_sizes_and_share() -> None:
    cells = mechanism.cells(Options())
    assert cells["product, CPU share 0.35"]["rows"] == 2048
    assert cells["product, CPU share 0.35"]["cpu_rows"] == 704
    assert [cells["product, CPU share 0.35"][name] for name in ("inputs", "outputs")] == [1600, 6400]
    one = cells["one operation a buffer, CPU share 0.35"]
    assert one["environ"] == {"MLX_MAX_OPS_PER_BUFFER": "1"}


def test_a_gpu_gets_the_papers_share_and_type_only(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(mechanism.machine, "backend", lambda: "metal")
    cells = mechanism.cells(Options())
    assert {(c["ratio"], c["dtype"], c["cpu_dtype"]) for c in cells.values()} == {(0.35, "float16", "native")}


def test_a_share_that_is_not_allowed_is_refused() -> None:
    with pytest.raises(ValueError, match="--ratio"):
        mechanism.cells(Options(extra={"ratio": [1.5]}))


@pytest.mark.parametrize("name", ["product, CPU share 0.50", "one operation a buffer, CPU share 0.35"])
def test_every_arm_of_a_product(name: str) -> None:
    cell = CELLS[name]
    result = join(mechanism.EXPERIMENT, cell, [mechanism.measure(cell, SMALL)])
    json.dumps(result, allow_nan=False)
    parts = (mechanism.WHOLE, mechanism.CPU_PART, mechanism.CURRENT_PART, mechanism.BOTH)
    assert list(result["arms"]) == ["stock", *parts, *SPLITS, "stock again"]
    assert all(result["errors"][arm] <= 1e-6 for arm in (mechanism.WHOLE, *SPLITS))
    assert all(result["errors"][arm] is None for arm in parts[1:])
    figures, times = result["figures"], {arm: found["median"] for arm, found in result["arms"].items()}
    told = figures["overlaps"]["eager boundary"]
    assert figures["overlap"] == told["value"]
    assert list(figures["overlaps"]) == [mechanism.BOTH, *SPLITS]
    arms = (mechanism.CPU_PART, mechanism.CURRENT_PART, "eager boundary")
    turns = zip(*(result["arms"][arm]["samples"] for arm in arms), strict=True)
    rounds = [(cpu + current) / together for cpu, current, together in turns]
    assert told["value"] == pytest.approx(median(rounds))
    assert (told["smallest"], told["largest"]) == pytest.approx((min(rounds), max(rounds)))
    assert told["low"] <= told["value"] <= told["high"]
    cpu = figures["cpu_rows_per_second"]["alone"]
    assert cpu == pytest.approx(cell["cpu_rows"] / times[mechanism.CPU_PART])
    assert 0 < figures["ratio_of_rates_alone"] < 1
    together = figures["ratio_of_rates_together"]
    assert together is None or 0 < together < 1


def test_the_timeline_has_both_units_of_every_split() -> None:
    result = mechanism.measure(CELLS["product, CPU share 0.50"], SMALL)
    bars = result["trace"]
    assert bars[0]["arm"] == "stock"
    assert [(bar["arm"], bar["unit"]) for bar in bars[1:]] == [
        (arm, unit) for arm in SPLITS for unit in ("cpu", "current")
    ]
    assert all(0 <= bar["start"] < bar["end"] for bar in bars)
    alone = result["arms"][mechanism.CPU_PART]["median"]
    for bar in bars:
        if bar["unit"] == "cpu":
            assert bar["start"] == pytest.approx(max(0.0, bar["end"] - alone))


def test_the_boundaries_are_those_of_the_library(monkeypatch: Fixture) -> None:
    p, seen = mechanism.problem(CELLS["product, CPU share 0.50"]), []
    parts, join = split.linear_parts, split.join

    def spied_parts(x: mx.array, weight: Any, bias: Any, m: int, boundary: str, cpu_dtype: str) -> Any:
        seen.append([boundary, m])
        return parts(x, weight, bias, m, boundary, cpu_dtype)

    def spied_join(cpu: mx.array, current: mx.array, shape: Any, settle: bool) -> mx.array:
        seen[-1].append(settle)
        return join(cpu, current, shape, settle)

    monkeypatch.setattr(split, "linear_parts", spied_parts)
    monkeypatch.setattr(split, "join", spied_join)
    for call in mechanism.splits(p).values():
        mx.eval(call())
    assert seen == [
        ["none", p.m, False],
        ["none", p.m, False],
        ["eager", p.m, False],
        ["eager", p.m, True],
        ["async", p.m, False],
    ]


def test_every_arm_of_a_whole_ffn() -> None:
    result = mechanism.measure(CELLS["whole FFN, CPU share 0.35"], SMALL)
    assert list(result["arms"]) == [
        "stock",
        "whole FFN, lazy graph",
        "whole FFN, eager boundary",
        "each product, eager boundary",
        "stock again",
    ]
    assert max(result["errors"].values()) <= 1e-6
    assert len(result["arms"]["whole FFN, lazy graph"]["samples"]) == 3


# --- rates under contention


def test_rates_under_contention_by_hand() -> None:
    """The CPU is done after 2 s with 100 rows; the other did 10 rows a second beside it, then 20 alone."""
    assert mechanism.contended(100, 60, 2.0, 4.0, 80.0, 20.0) == (50.0, 10.0)
    assert mechanism.contended(60, 100, 4.0, 2.0, 20.0, 80.0) == (10.0, 50.0)
    assert mechanism.contended(100, 60, 2.0, 2.0, 80.0, 40.0) == (50.0, 30.0)


times = st.floats(0.1, 10.0)


@given(times, times, times, times)
def test_rates_that_both_kept_are_found_again(
    cpu: float, current: float, cpu_more: float, more: float
) -> None:
    """Each unit works at one rate beside the other and at a higher one once that is done."""
    cpu_alone, current_alone = cpu * (1 + cpu_more), current * (1 + more)
    cpu_rows, rest = 100.0, 100.0
    first = min(cpu_rows / cpu, rest / current)
    cpu_end = first + (cpu_rows - cpu * first) / cpu_alone
    current_end = first + (rest - current * first) / current_alone
    found = mechanism.contended(cpu_rows, rest, cpu_end, current_end, cpu_alone, current_alone)
    assert found == pytest.approx((cpu, current), rel=1e-6)


@given(times, times, times, times)
def test_noise_never_makes_a_rate_senseless(a: float, b: float, c: float, d: float) -> None:
    found = mechanism.contended(64, 32, a, b, c, d)
    assert all(rate is None or (rate > 0 and math.isfinite(rate)) for rate in found)
    assert found != (None, None)
