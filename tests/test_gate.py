"""What the gate decides, on machines simple enough to know the right answer by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusionml.gate import POLICIES, Decision, Gate

ROWS = 1000
Times = dict[str, float]  # seconds per row


def drive(
    gate: Gate, times: Times, calls: int, fits: bool | None = True, overhead: float = 0.0
) -> list[Decision]:
    """Run a machine without noise."""
    decisions = []
    for _ in range(calls):
        decision = gate.choose(fits)
        decisions.append(decision)
        if decision.timed:
            gate.record(decision.arm, times[decision.arm] * ROWS, ROWS, overhead=overhead)
    return decisions


def settled(times: Times, policy: str = "auto", fits: bool | None = True) -> Gate:
    gate = Gate(times, policy=policy)
    while gate.learning:
        drive(gate, times, 1, fits)
    gate.events.clear()
    return gate


def share(decisions: Iterable[Decision], wanted: Callable[[Decision], bool]) -> float:
    return float(np.mean([wanted(decision) for decision in decisions]))


# Probation


@pytest.mark.parametrize("fits", [True, False, None])
@pytest.mark.parametrize(
    ("times", "best"),
    [
        ({"stock": 1e-5, "split": 8e-6}, "split"),
        ({"stock": 1e-5, "split": 1.2e-5}, "stock"),
        ({"stock": 1e-5, "split": 9.8e-6}, "stock"),  # within the hysteresis
        ({"stock": 1e-5, "split": 1e-5}, "stock"),
        ({"stock": 1e-5, "split": 9e-6, "dense": 8e-6}, "dense"),
        ({"split": 9e-6, "dense": 1.3e-5, "stock": 1e-5}, "split"),
        ({"stock": 1e-5}, "stock"),
    ],
)
def test_probation_picks_the_fastest_and_prefers_stock(times: Times, best: str, fits: bool | None) -> None:
    assert settled(times, fits=fits).arm == best


def test_probation_is_short_and_interleaved() -> None:
    arms = [arm for arm, _ in drive(Gate(["stock", "split"]), {"stock": 1e-5, "split": 8e-6}, 8)]
    assert arms == ["stock", "split"] * 4
    gate = settled({"stock": 1e-5, "split": 8e-6})
    assert gate.calls == 8


def test_probation_goes_on_while_the_arms_cannot_be_told_apart() -> None:
    close = settled({"stock": 1e-5, "split": 9.6e-6})
    assert 8 < close.calls <= 24


def test_one_outlier_does_not_decide_probation() -> None:
    gate = Gate(["stock", "split"])
    for turn in range(8):
        arm, _ = gate.choose(True)
        slow = 3 if turn == 5 else 1  # the third sample of split
        gate.record(arm, {"stock": 1e-2, "split": 8e-3}[arm] * slow, ROWS)
    drive(gate, {"stock": 1e-5, "split": 8e-6}, 20)
    assert gate.arm == "split"


@pytest.mark.parametrize("fits", [True, False])
def test_one_clean_sample_beyond_1_5x_drops_an_arm(fits: bool) -> None:
    for times, most in (({"stock": 1e-5, "split": 1.6e-5}, 1), ({"stock": 1e-5, "split": 1.45e-5}, 12)):
        gate = Gate(times)
        decisions = []
        while gate.learning:
            decisions += drive(gate, times, 1, fits)
        used = sum(decision == ("split", True) for decision in decisions)
        assert used <= most + (not fits)  # the first of a run measures the reload
        assert used >= min(most, 4)
        assert gate.arm == "stock"
        assert any("dropped split" in event for event in gate.events) == (most == 1)


def test_stock_is_never_dropped() -> None:
    gate = Gate(["stock", "split"])
    decisions = drive(gate, {"stock": 9e-5, "split": 1e-5}, 8)
    assert share(decisions, lambda d: d.arm == "stock") == 0.5


@pytest.mark.parametrize("policy", ["auto", "lock"])
def test_an_arm_dropped_on_an_outlier_comes_back(policy: str) -> None:
    times = {"stock": 1e-5, "split": 6e-6}
    gate = Gate(times, policy=policy)
    assert gate.choose(True).arm == "stock"
    gate.record("stock", 1e-2, ROWS)
    assert gate.choose(True).arm == "split"
    gate.record("split", 3e-2, ROWS)
    drive(gate, times, 200)
    assert gate.arm == "split"


def test_a_dropped_arm_costs_one_second_look_only() -> None:
    times = {"stock": 1e-5, "split": 4e-5}
    decisions = drive(Gate(times, policy="lock"), times, 5000)
    assert sum(arm == "split" for arm, _ in decisions) <= 4


def test_unclean_samples_do_not_count_and_do_not_hold_up_for_ever() -> None:
    gate = Gate(["stock", "split"])
    for _ in range(200):
        arm, timed = gate.choose(True)
        if timed:
            gate.record(arm, 1e-9 if arm == "split" else 1e-2, ROWS, clean=False, reason="first touch")
    assert gate.arm == "stock"
    assert not gate.learning
    assert gate.state()["estimates"]["split"]["seconds_per_row"] is None
    assert gate.state()["rejected"]["first touch"] > 10
    # With nothing to compare with, nobody could say what a probe would cost.
    assert {gate.choose(True).arm for _ in range(500)} == {"stock"}
    drive(gate, {"stock": 1e-5, "split": 8e-6}, 300)
    assert gate.arm == "split"  # it learns once there is something to learn from


def test_a_call_that_cannot_be_clean_is_not_timed() -> None:
    gate = Gate(["stock", "split"])
    assert {gate.choose(True, timeable=False) for _ in range(50)} == {("stock", False)}
    assert gate.choose(True).timed


# Where the working sets do not fit


def evicting(gate: Gate, times: Times, calls: int, fits: bool | None) -> None:
    """The paper's machine: an arm swapped in reads 1.4x too slow, and the active one 1.7x after it."""
    resident = "stock"
    for _ in range(calls):
        arm, timed = gate.choose(fits)
        slow = 1.0 if arm == resident else 1.7 if arm == gate.arm else 1.4
        resident = arm
        if timed:
            gate.record(arm, times[arm] * slow * ROWS, ROWS)


@pytest.mark.parametrize("fits", [False, None])
@pytest.mark.parametrize("split", [1.05, 1.1, 0.95, 0.9])
def test_probation_is_not_fooled_by_eviction(split: float, fits: bool | None) -> None:
    gate = Gate(["stock", "split"])
    evicting(gate, {"stock": 1e-5, "split": split * 1e-5}, 60, fits)
    assert not gate.learning
    assert gate.arm == ("split" if split < 1 else "stock")
    assert gate.state()["estimates"]["split"]["seconds_per_row"] == pytest.approx(split * 1e-5)


@pytest.mark.parametrize(
    ("policy", "fits"), [("lock", True), ("lock", False), ("auto", False), ("auto", None)]
)
def test_locked_there_are_no_scheduled_probes(policy: str, fits: bool | None) -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = settled(times, policy, fits)
    decisions = drive(gate, times, 2000, fits)
    assert share(decisions, lambda d: d.arm == "split") == 1
    assert 0.02 < share(decisions, lambda d: d.timed) <= 0.05
    assert gate.state()["phase"] == "locked"


@pytest.mark.parametrize("fits", [True, False])
def test_locked_it_moves_on_drift_of_the_active_arm(fits: bool) -> None:
    gate = settled({"stock": 1e-5, "split": 8e-6}, "lock", fits)
    drive(gate, {"stock": 1e-5, "split": 1.3e-5}, 50, fits)
    assert gate.arm == "stock"
    assert gate.switches == 1


def test_auto_probes_once_the_working_sets_fit() -> None:
    times = {"stock": 1e-5, "split": 9e-6}
    gate = settled(times, fits=False)
    assert share(drive(gate, times, 500, False), lambda d: d.arm == "stock") == 0
    assert share(drive(gate, times, 500, True), lambda d: d.arm == "stock") > 0
    drive(gate, {"stock": 7e-6, "split": 9e-6}, 50, True)
    assert gate.arm == "stock"


# Tracking, switching


@pytest.mark.parametrize("arm", ["stock", "split"])
def test_a_slower_active_arm_is_left_and_a_faster_inactive_one_taken(arm: str) -> None:
    times = {"stock": 1e-5, "split": 9e-6}
    gate = settled(times)
    drive(gate, times, 100)
    times[arm] *= 1.3 if arm == "split" else 1 / 1.3
    drive(gate, times, 50)
    assert (gate.arm, gate.switches) == ("stock", 1)
    assert gate.since > 100
    times[arm] /= 1.3 if arm == "split" else 1 / 1.3
    drive(gate, times, 50)
    assert (gate.arm, gate.switches) == ("split", 2)


def test_a_machine_that_slows_as_a_whole_causes_no_switch() -> None:
    gate = settled({"stock": 1e-5, "split": 8e-6})
    decisions = drive(gate, {"stock": 2e-5, "split": 1.6e-5}, 500)
    assert share(decisions[:60], lambda d: d.arm == "stock") <= 5 / 60  # it sees soon that a duel is lost
    assert (gate.arm, gate.switches) == ("split", 0)
    assert gate.state()["estimates"]["stock"]["seconds_per_row"] == pytest.approx(2e-5)


@pytest.mark.parametrize("hysteresis", [0.03, 0.1])
def test_a_gain_within_the_hysteresis_is_let_go(hysteresis: float) -> None:
    for inside in (True, False):
        gate = Gate(["stock", "split"], hysteresis=hysteresis)
        drive(gate, {"stock": 1e-5, "split": 1e-5}, 100)
        gain = hysteresis + (-0.01 if inside else 0.03)
        drive(gate, {"stock": 1e-5, "split": 1e-5 * (1 - gain)}, 3000)
        assert gate.arm == ("stock" if inside else "split")


def test_a_single_outlier_moves_nothing_and_two_that_agree_do() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = settled(times)
    drive(gate, times, 100)
    before = gate.state()["estimates"]["split"]["seconds_per_row"]
    for slow in (3.0, 1.0):
        while (decision := gate.choose(True)) != ("split", True):
            if decision.timed:
                gate.record(decision.arm, times[decision.arm] * ROWS, ROWS)
        gate.record("split", 8e-6 * slow * ROWS, ROWS)
    assert gate.state()["estimates"]["split"]["seconds_per_row"] == pytest.approx(before, rel=1e-3)
    assert gate.state()["estimates"]["split"]["outliers"] == 1
    drive(gate, {"stock": 1e-5, "split": 9.2e-6}, 60)
    assert gate.state()["estimates"]["split"]["seconds_per_row"] == pytest.approx(9.2e-6)


def test_an_inactive_arm_shelved_by_two_outliers_is_looked_at_soon() -> None:
    times = {"stock": 1e-5, "split": 1.1e-5}
    gate = settled(times)
    probed = []
    for call in range(400):
        arm, timed = gate.choose(True)
        probed += [call] * (arm == "split")
        if timed:
            gate.record(arm, times[arm] * ROWS * (4 if arm == "split" and len(probed) <= 2 else 1), ROWS)
    assert probed[2] - probed[1] < 100
    assert gate.state()["estimates"]["split"]["seconds_per_row"] == pytest.approx(1.1e-5)


def test_an_outlier_does_not_lose_a_duel() -> None:
    times = {"stock": 1e-5, "split": 1.2e-5}
    for outlier in range(3):  # the first, second or third sample of the challenger
        gate, seen = settled({"stock": 1e-5, "split": 8e-6}), 0
        for _ in range(60):
            arm, timed = gate.choose(True)
            duel = gate.state()["phase"] == "duel" and arm == "stock"
            if timed:
                gate.record(arm, times[arm] * ROWS * (3 if duel and seen == outlier else 1), ROWS)
            seen += duel
        assert gate.arm == "stock"


def test_estimates_are_per_row() -> None:
    gate = Gate(["stock", "split"])
    rng = np.random.default_rng(0)
    for _ in range(300):
        arm, timed = gate.choose(True)
        rows = int(rng.integers(100, 4000))
        if timed:
            gate.record(arm, {"stock": 1e-5, "split": 8e-6}[arm] * rows, rows)
    estimates = gate.state()["estimates"]
    assert gate.arm == "split"
    assert estimates["stock"]["seconds_per_row"] == pytest.approx(1e-5)
    assert estimates["split"]["seconds_per_row"] == pytest.approx(8e-6)


def test_the_standard_error_is_that_of_the_noise() -> None:
    """Over many runs the averages spread as far as the gate says they do."""
    averages, errors = [], []
    for seed in range(200):
        rng, gate = np.random.default_rng(seed), Gate(["stock", "split"])
        for _ in range(1500):
            arm, timed = gate.choose(True)
            if timed:
                gate.record(arm, 1e-2 * math.exp(0.05 * rng.standard_normal()), ROWS)
        estimate = gate.state()["estimates"][gate.arm]
        averages.append(estimate["seconds_per_row"])
        errors.append(estimate["standard_error"])
    assert np.std(averages) == pytest.approx(np.mean(errors), rel=0.25)


# How much it looks


@pytest.mark.parametrize("slower", [1.0, 1.1, 1.3, 1.9, 3.0, 10.0])
def test_the_probe_interval_lengthens_with_the_cost(slower: float) -> None:
    times = {"stock": 1e-5, "split": slower * 1e-5}
    gate = settled(times)
    drive(gate, times, 3000)
    probes = share(drive(gate, times, 20_000), lambda d: d.arm == "split")
    assert probes * (slower - 1) <= 0.0065
    assert probes <= 0.05
    if slower < 1.3:
        assert probes >= 1 / 40


@pytest.mark.parametrize("timing", [0.0, 0.1, 1.0, 5.0])
def test_a_costly_timing_is_done_less(timing: float) -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    decisions = drive(Gate(times), times, 20_000, overhead=timing * 8e-6 * ROWS)
    later = decisions[5000:]
    assert share(later, lambda d: d.timed) * timing <= 0.01
    assert share(later, lambda d: d.timed) > 0


def test_periodic_probes_every_tenth_call() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = settled(times, "periodic", None)
    decisions = drive(gate, times, 1000, None)
    probes = [call for call, decision in enumerate(decisions) if decision.arm == "stock"]
    assert set(np.diff(probes)) == {10}
    drive(gate, {"stock": 6e-6, "split": 8e-6}, 100, None)
    assert (gate.arm, gate.switches) == ("stock", 1)


def test_off_never_times() -> None:
    gate = Gate(["stock", "split"], policy="off")
    assert {gate.choose(True) for _ in range(100)} == {("stock", False)}
    gate.prior({"stock": 1e-5, "split": 8e-6})
    assert {gate.choose(True) for _ in range(100)} == {("split", False)}
    assert gate.state()["phase"] == "off"


def test_probe_excess_is_what_the_probes_cost() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate, cost = Gate(times), 0.0
    for _ in range(5000):
        arm, timed = gate.choose(True)
        cost += times[arm] * ROWS - 8e-6 * ROWS
        if timed:
            cost += 1e-4
            gate.record(arm, times[arm] * ROWS, ROWS, overhead=1e-4)
    assert gate.probe_excess == pytest.approx(cost, rel=1e-6)
    assert gate.state()["probe_excess"] == gate.probe_excess


# Pressure


def test_under_pressure_nothing_is_timed_and_the_plan_stays() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = settled(times)
    assert {gate.choose(True, pressure=True) for _ in range(500)} == {("split", False)}
    assert "pressure" in gate.events[0]
    assert gate.state()["phase"] == "locked under pressure"
    for _ in range(5):
        gate.record("split", 1e-2, ROWS)  # calls that began before
    assert gate.state()["estimates"]["split"]["seconds_per_row"] == pytest.approx(8e-6)
    assert gate.choose(True) == ("split", True)  # what changed meanwhile?
    assert "over" in gate.events[1]


def test_pressure_that_lasts_stands_down_and_recovery_is_noticed() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = settled(times)
    gate.choose(True, pressure=True)
    gate.stand_down("pressure for 30 s")
    assert {gate.choose(True, pressure=True) for _ in range(500)} == {("stock", False)}
    assert gate.state()["phase"] == "stood down"
    assert gate.state()["arm"] == "stock"
    assert "pressure for 30 s" in gate.events[-1]
    assert gate.choose(True).arm == "split"
    assert gate.state()["phase"] == "tracking"
    assert len(gate.events) == 3
    drive(gate, {"stock": 1e-5, "split": 1.3e-5}, 50)  # and if it did not recover:
    assert gate.arm == "stock"


def test_pressure_breaks_off_a_duel() -> None:
    gate = settled({"stock": 1e-5, "split": 8e-6})
    while gate.state()["phase"] != "duel":
        drive(gate, {"stock": 1e-5, "split": 1.2e-5}, 1)
    gate.choose(True, pressure=True)
    gate.choose(True)
    assert gate.state()["phase"] == "tracking"


def test_pressure_interrupts_probation() -> None:
    times = {"stock": 1e-5, "split": 8e-6}
    gate = Gate(times)
    drive(gate, times, 3)
    assert {gate.choose(True, pressure=True) for _ in range(500)} == {("stock", False)}
    assert gate.learning
    drive(gate, times, 5)
    assert gate.arm == "split"


# What it says


def test_every_decision_is_one_line_with_its_numbers() -> None:
    gate = Gate(["stock", "split"])
    drive(gate, {"stock": 1e-5, "split": 8e-6}, 100)
    assert list(gate.events) == ["call 8: probation: split 8 us/row; stock 10 us/row (1.25x)"]
    drive(gate, {"stock": 1e-5, "split": 1.2e-5}, 100)
    lines = list(gate.events)[1:]
    assert any("split moved from 8 us/row to 12 us/row (+50%)" in line for line in lines)
    assert any("split -> stock: stock 10 us/row; split 12 us/row (1.20x)" in line for line in lines)
    assert not any("\n" in line for line in lines)
    assert gate.state()["why"] == lines[-1].partition(": ")[2]


def test_events_that_nobody_drains_are_bounded() -> None:
    gate = Gate(["stock", "split"])
    for turn in range(300):
        gate.choose(True, pressure=turn % 2 == 0)
    assert len(gate.events) == 64


def test_state_is_json_and_complete() -> None:
    for policy in POLICIES:
        gate = Gate(["stock", "split"], policy=policy)
        drive(gate, {"stock": 1e-5, "split": 8e-6}, 100)
        state = json.loads(json.dumps(gate.state()))
        assert state == gate.state()
        assert set(state) >= {"arm", "since", "why", "estimates", "probes", "probe_excess", "switches"}
        assert set(state["estimates"]["split"]) >= {"seconds_per_row", "samples", "standard_error"}
    assert "NaN" not in json.dumps(Gate(["stock", "split"]).state())


# Prior, save and restore


def test_a_prior_spares_the_probation() -> None:
    gate = Gate(["stock", "split"])
    gate.prior({"stock": 1e-5, "split": 8e-6})
    assert (gate.arm, gate.learning) == ("split", False)
    assert share(drive(gate, {"stock": 1e-5, "split": 8e-6}, 1000), lambda d: d.arm == "split") > 0.97
    gate = Gate(["stock", "split"])
    gate.prior({"stock": 1e-5, "split": 9.9e-6})
    assert gate.arm == "stock"


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("policy", ["auto", "lock"])
def test_a_prior_that_is_wrong_is_found_out(policy: str, fits: bool) -> None:
    gate = Gate(["stock", "split"], policy=policy)
    gate.prior({"stock": 1e-5, "split": 8e-6})
    drive(gate, {"stock": 1e-5, "split": 1.3e-5}, 30, fits)
    assert gate.arm == "stock"


def test_a_prior_of_another_machine_speed_is_no_reason_to_switch() -> None:
    gate = Gate(["stock", "split"])
    gate.prior({"stock": 1e-5, "split": 8e-6})
    drive(gate, {"stock": 3e-5, "split": 2.4e-5}, 500)
    assert (gate.arm, gate.switches) == ("split", 0)


def test_a_partial_prior_leaves_the_probation() -> None:
    gate = Gate(["stock", "split"])
    gate.prior({"split": 8e-6})
    assert gate.learning
    assert gate.arm == "stock"


def test_restore_goes_on_where_save_left_off() -> None:
    gate = settled({"stock": 1e-5, "split": 8e-6})
    drive(gate, {"stock": 1e-5, "split": 8e-6}, 333)
    saved = json.loads(json.dumps(gate.save()))
    twin = Gate(["stock", "split"])
    twin.restore(saved)
    # Whether it tracks or is locked depends on `fits`, which the twin was not told yet.
    assert {**twin.state(), "phase": "tracking"} == {**gate.state(), "rejected": {}}
    drive(twin, {"stock": 1e-5, "split": 1.3e-5}, 50)
    assert twin.arm == "stock"
    unfinished = Gate(["stock", "split"])
    drive(unfinished, {"stock": 1e-5, "split": 8e-6}, 3)
    twin = Gate(["stock", "split"])
    twin.restore(unfinished.save())
    assert twin.learning


# Bad input


@pytest.mark.parametrize("hysteresis", [-0.01, 1, 1.5, math.nan, math.inf, "0.03", True, None])
def test_bad_hysteresis(hysteresis: float) -> None:
    with pytest.raises(ValueError, match=r"hysteresis is .*(\[0, 1\)|finite number)"):
        Gate(["stock", "split"], hysteresis=hysteresis)


def test_bad_policy_and_arms() -> None:
    with pytest.raises(ValueError, match=r"policy is 'always'.*auto, periodic, lock, off"):
        Gate(["stock", "split"], policy="always")
    with pytest.raises(ValueError, match=r"baseline is 'stock'.*'split'"):
        Gate(["split", "dense"])
    with pytest.raises(ValueError, match=r"arms is .*different names"):
        Gate(["stock", "split", "split"])
    with pytest.raises(ValueError, match="baseline"):
        Gate([])
    assert Gate(["split", "eager"], baseline="eager").arm == "eager"


@pytest.mark.parametrize("seconds", [-1.0, 0.0, math.nan, math.inf, "1", None])
def test_bad_seconds(seconds: float) -> None:
    gate = Gate(["stock", "split"])
    with pytest.raises(ValueError, match=r"seconds is .*finite"):
        gate.record("stock", seconds, ROWS)
    with pytest.raises(ValueError, match=r"'split' is .*finite"):
        gate.prior({"stock": 1e-5, "split": seconds})
    assert gate.state() == Gate(["stock", "split"]).state()


@pytest.mark.parametrize("rows", [0, -5, 1.5, math.nan, "7", None])
def test_bad_rows(rows: int) -> None:
    with pytest.raises(ValueError, match=r"rows is .*number"):
        Gate(["stock", "split"]).record("stock", 1e-2, rows)


@pytest.mark.parametrize("overhead", [-1.0, math.nan, math.inf])
def test_bad_overhead(overhead: float) -> None:
    with pytest.raises(ValueError, match="overhead is"):
        Gate(["stock", "split"]).record("stock", 1e-2, ROWS, overhead=overhead)


def test_unknown_arm() -> None:
    gate = Gate(["stock", "split"])
    with pytest.raises(ValueError, match=r"arm is 'dense'.*stock, split"):
        gate.record("dense", 1e-2, ROWS)
    with pytest.raises(ValueError, match=r"arm is 'dense'.*stock, split"):
        gate.prior({"dense": 1e-5})
    with pytest.raises(ValueError, match=r"arm is 'dense'.*stock, split"):
        gate.restore(settled({"stock": 1e-5, "dense": 8e-6}).save())


def test_bad_saved_state_changes_nothing() -> None:
    good = settled({"stock": 1e-5, "split": 8e-6}).save()
    tracks = good["tracks"]
    for bad in (
        {},
        {**good, "calls": None},
        {**good, "tracks": 3},
        {**good, "tracks": {"stock": {"value": "fast"}}},
        {**good, "tracks": {**tracks, "split": {**tracks["split"], "spread": math.nan}}},
        {**good, "tracks": {**tracks, "split": {**tracks["split"], "value": -1.0}}},
        {**good, "tracks": {**tracks, "split": {**tracks["split"], "colour": 1}}},
    ):
        gate = Gate(["stock", "split"])
        with pytest.raises(ValueError, match=r"saved|value|spread"):
            gate.restore(bad)
        assert gate.state() == Gate(["stock", "split"]).state()


# Properties

ratios = st.floats(0.02, 50.0)


@settings(max_examples=60, deadline=None)
@given(
    ratio=ratios,
    timing=st.floats(0.0, 2.0),
    policy=st.sampled_from(["auto", "lock"]),
    fits=st.sampled_from([True, False, None]),
)
def test_a_steady_machine_costs_one_per_cent_and_a_few_calls(
    ratio: float, timing: float, policy: str, fits: bool | None
) -> None:
    """Whatever the arms cost: at most the best arm's time, 1 % and a few calls, and what probation took."""
    times = {"stock": 1.0, "split": ratio}
    gate, spent, calls, tuition = Gate(times, policy=policy), 0.0, 3000, 0.0
    for _ in range(calls):
        arm, timed = gate.choose(fits)
        spent += times[arm] + timing * timed
        if timed:
            gate.record(arm, times[arm] * ROWS, ROWS, overhead=timing * ROWS)
        if gate.learning or not tuition:
            tuition = spent
    best, dearest = min(times.values()), max(times.values())
    settled_best = best if abs(math.log(ratio)) > 0.04 else dearest  # within the hysteresis either will do
    duel = 12 * timing + 3 * (dearest + settled_best)  # one that had begun when the credit ran out
    allowed = 0.01 * calls * settled_best + 6 * settled_best + duel
    assert spent - tuition <= calls * settled_best + allowed
    assert tuition <= 24 * (settled_best + timing) * 1.5 + 6 * (dearest + timing) + 12 * best


@settings(max_examples=60, deadline=None)
@given(
    slower=st.lists(st.sampled_from([1.0, 1.05, 1.3, 2.0, 3.0, 20.0]), min_size=1, max_size=40),
    fits=st.sampled_from([True, False]),
)
def test_an_arm_that_is_never_faster_is_never_chosen_and_costs_little(
    slower: list[float], fits: bool
) -> None:
    """Stock is steady; the other arm does what an adversary likes, but never better than stock."""
    gate, excess, probed, calls = Gate(["stock", "split"]), 0.0, 0, 4000
    for _ in range(calls):
        arm, timed = gate.choose(fits)
        assert timed or arm == "stock"
        if arm == "split":
            by = slower[probed % len(slower)]
            probed, excess = probed + 1, excess + by - 1
            gate.record(arm, by * 1e-5 * ROWS, ROWS)
        elif timed:
            gate.record(arm, 1e-5 * ROWS, ROWS)
    learning = 12 * (max(slower) - 1)
    assert excess <= 0.01 * calls + 6 + 2 * (max(slower) - 1) + learning
    assert gate.switches == 0


@settings(max_examples=40, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    seed=st.integers(0, 2**32 - 1),
    power=st.integers(-20, 20),
    fits=st.sampled_from([True, False, None]),
)
def test_only_ratios_matter(policy: str, seed: int, power: int, fits: bool | None) -> None:
    """A machine 2^n times as fast gets the same decisions."""
    gates = [Gate(["stock", "split", "dense"], policy=policy) for _ in range(2)]
    rng = np.random.default_rng(seed)
    for _ in range(400):
        pressure = rng.random() < 0.02
        left, right = (gate.choose(fits, pressure) for gate in gates)
        assert left == right
        seconds = float(np.exp(0.3 * rng.standard_normal()))
        if left.timed:
            for gate, scale in zip(gates, (1.0, 2.0**power), strict=True):
                gate.record(left.arm, seconds * scale, 8, overhead=0.02 * scale)
    assert gates[0].switches == gates[1].switches


@settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    calls=st.lists(
        st.tuples(
            st.sampled_from([True, False, None]),  # fits
            st.booleans(),  # pressure
            st.booleans(),  # timeable
            st.floats(1e-12, 1e6),  # seconds
            st.integers(1, 10**7),  # rows
            st.sampled_from(["clean", "unclean", "lost"]),
        ),
        max_size=120,
    ),
)
def test_any_sequence_of_calls_leaves_a_sound_gate(policy: str, calls: list[tuple]) -> None:
    gate = Gate(["stock", "split", "dense"], policy=policy)
    for fits, pressure, timeable, seconds, rows, fate in calls:
        decision = gate.choose(fits, pressure, timeable)
        assert decision.arm in gate.arms
        assert not (decision.timed and (pressure or not timeable or policy == "off"))
        if decision.timed and fate != "lost":
            gate.record(decision.arm, seconds, rows, fate == "clean", "asked for")
        state = gate.state()
        assert json.loads(json.dumps(state, allow_nan=False)) == state
        twin = Gate(["stock", "split", "dense"], policy=policy)
        twin.restore(gate.save())
        assert twin.state()["estimates"] == state["estimates"]
