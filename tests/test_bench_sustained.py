"""A load over time: which looks are burst and which sustained, cold and hot apart. Times are simulated."""

from __future__ import annotations

import json
from itertools import count, pairwise

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import arms, overtime, sustained
from benchmarks.arms import Arm
from benchmarks.experiment import Options
from benchmarks.overtime import Look
from fusionml import machine


def looks(seconds: float, speedup: float = 1.5, every: float = 1.0) -> list[Look]:
    """Looks at a simulated load that slows down: from `speedup` to 1.0 over its whole length."""
    times = [every * i for i in range(int(seconds / every) + 1)]
    return [Look(at, speedup - (speedup - 1) * at / seconds, 1.0) for at in times]


def test_burst_is_the_first_ten_seconds_and_sustained_the_last_minute() -> None:
    given_looks = looks(300)
    assert [look.at for look in overtime.burst(given_looks)] == [float(i) for i in range(11)]
    assert [look.at for look in overtime.sustained(given_looks)] == [float(i) for i in range(240, 301)]
    first, last = (overtime.part(part(given_looks)) for part in (overtime.burst, overtime.sustained))
    assert first["speedup"]["value"] == pytest.approx(1.5 - 0.5 * 5 / 300)
    assert last["speedup"]["value"] == pytest.approx(1.5 - 0.5 * 270 / 300)
    assert (last["from"], last["to"]) == (240, 300)


def test_of_a_short_run_the_last_half_is_sustained() -> None:
    assert [look.at for look in overtime.sustained(looks(30))] == [float(i) for i in range(15, 31)]


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=40))
def test_there_is_always_something_to_tell(times: list[float]) -> None:
    some = [Look(at, 2.0, 1.0) for at in sorted(times)]
    for part in (overtime.burst(some), overtime.sustained(some)):
        assert len(part) >= min(3, len(some))
        assert set(part) <= set(some)
        assert overtime.part(part)["speedup"]["value"] == 2.0


def test_cold_and_hot_are_apart() -> None:
    some = [Look(0.0, 1.6, 1.0, "nominal", 4000.0), Look(1.0, 1.2, 1.0, "heavy", 2000.0)]
    found = overtime.by_state(some)
    assert (found["cold"]["speedup"]["value"], found["hot"]["speedup"]["value"]) == (1.6, 1.2)
    assert (found["cold"]["hot"], found["hot"]["hot"]) == (False, True)
    assert (found["cold"]["clock_mhz"], found["hot"]["clock_mhz"]) == (4000.0, 2000.0)
    assert overtime.by_state(some[:1])["hot"] is None


def test_a_state_that_nobody_tells_is_unknown() -> None:
    some = looks(5)
    assert overtime.by_state(some) == {"cold": None, "hot": None}
    told = sustained.summary(some)
    assert told["hot at the end"] is None
    assert told["burst"]["thermal"] is None
    assert told["burst"]["clock_mhz"] is None


class Simulated:
    """A clock that only working moves, and units that get slower with time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.ran = 0.0, []
        self.stock, self.split = Arm(lambda: None), Arm(lambda: None)
        monkeypatch.setattr(arms, "seconds", self.seconds)
        heat = count()
        monkeypatch.setattr(machine, "thermal_state", lambda: "nominal" if next(heat) < 2 else "heavy")
        monkeypatch.setattr(sustained, "_clock_mhz", lambda: 3000.0)

    def seconds(self, arm: Arm) -> float:
        name, taken = ("stock", 0.3) if arm is self.stock else ("split", 0.2 * (1 + self.now / 100))
        self.now += taken
        self.ran.append(name)
        return taken


def test_the_split_runs_all_the_time_and_a_look_takes_one_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_ = Simulated(monkeypatch)
    found = sustained.watch(machine_.stock, machine_.split, 30.0, clock=lambda: machine_.now)
    assert 30 <= machine_.now < 31.5
    assert machine_.ran.count("stock") == len(found)
    assert machine_.ran.count("split") > 3 * len(found)
    assert all(1 <= b.at - a.at < 2 for a, b in pairwise(found))
    assert all(look.stock == 0.3 for look in found)
    assert found[-1].split > found[0].split
    assert {look.clock_mhz for look in found} == {3000.0}
    # The heat is read every five seconds, not at every look.
    changes = [look.at for look in found if look.thermal == "heavy"]
    assert 10 <= changes[0] < 13
    pairs = [machine_.ran[i : i + 2] for i, name in enumerate(machine_.ran) if name == "stock"]
    assert ["stock", "split"] in pairs, "sometimes stock is first"


def test_a_look_is_taken_however_short_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_ = Simulated(monkeypatch)
    assert len(sustained.watch(machine_.stock, machine_.split, 0.0, clock=lambda: machine_.now)) == 1


def test_looks_take_turns_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    machine_ = Simulated(monkeypatch)
    monkeypatch.setattr(sustained, "LOOK_SECONDS", 0.0)
    sustained.watch(machine_.stock, machine_.split, 1.9, clock=lambda: machine_.now)
    assert machine_.ran == ["stock", "split", "split", "stock", "stock", "split", "split", "stock"]


CELL = {"rows": 64, "inputs": 32, "outputs": 48, "dtype": "float32", "minutes": 0.02, "ratio": 0.5}


def test_a_cell_here() -> None:
    cell = sustained.measure(CELL, Options(quick=True))
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    assert len(cell["trace"]) == len(cell["arms"]["stock"]["samples"]) >= 1
    assert set(cell["trace"][0]) == {"at", "stock", "split", "thermal", "clock_mhz"}
    assert cell["figures"]["burst speedup"] > 0
    assert cell["errors"]["split"] <= 1e-3


def test_a_split_that_computes_something_else_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sustained.split, "split_linear", lambda x, weight, ratio: (x @ weight.T) + mx.ones((1,))
    )
    with pytest.raises(ArithmeticError, match="differs from the baseline"):
        sustained.measure(CELL, Options(quick=True))


def test_minutes_are_the_users() -> None:
    assert [c["minutes"] for c in sustained.cells(Options(extra={"minutes": 7.5})).values()] == [7.5]
    assert [c["minutes"] for c in sustained.cells(Options(quick=True)).values()] == [0.5]
    assert [c["minutes"] for c in sustained.cells(Options()).values()] == [5.0]
