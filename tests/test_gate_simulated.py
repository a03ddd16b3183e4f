"""The gate on a simulated machine: what it costs, what it gains, and how fast it follows.

`python tests/test_gate_simulated.py` prints every figure over 10,000 calls and 100 seeds; the tests take
fewer seeds where the figure hardly varies.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from simulated import Floats, Machine, Run, play, steady, stepped

from fusionml.gate import Gate

CALLS = 10_000
SIGMAS = (0.02, 0.05)
SPEEDUPS = (1 / 1.3, 1.0, 1.25, 1.38, 1.9)
SHORT = 1.0  # timing costs as much as the call
STEPS = {  # split's time by stock's, the arm that steps, by how much, and the arm that is the best afterwards
    "equal, split 1.3x faster": (1.0, "split", 1 / 1.3, "split"),
    "equal, stock 1.3x slower": (1.0, "stock", 1.3, "split"),
    "stock 1.15x ahead, split 1.3x faster": (1.15, "split", 1 / 1.3, "split"),
    "stock 1.15x ahead, stock 1.3x slower": (1.15, "stock", 1.3, "split"),
    "split 1.15x ahead, split 1.3x slower": (1 / 1.15, "split", 1.3, "stock"),
    "split 1.15x ahead, stock 1.3x faster": (1 / 1.15, "stock", 1 / 1.3, "stock"),
}
WITHIN = {0.02: 50, 0.05: 100}


def cell(speedup: float, sigma: float, timing: float = 0.02, told: bool = True) -> Machine:
    return Machine(steady(CALLS, split=1 / speedup), sigma, timing=timing, told=told)


def crowded(speedup: float, sigma: float) -> Machine:
    """The paper's 8 GB M1 at 8192: three modes evict one another; `compiled` loses 6 % to eager stock."""
    return Machine(steady(CALLS, split=1 / speedup, compiled=1.06), sigma, fits=False, evicts=True)


def runs(machine: Machine, seeds: int, policy: str = "auto", trace: bool = False) -> list[Run]:
    return [play(Gate(machine.times, policy=policy), machine, seed, trace) for seed in range(seeds)]


def quiet(results: list[Run]) -> float:
    """The share of runs without a switch."""
    return float(np.mean([run.gate.switches == 0 for run in results]))


def delays(name: str, sigma: float, seeds: int, after: int, policy: str = "auto") -> list[float]:
    """Calls until the step is followed, by seed: infinite if it was not, or with more than one switch."""
    split, arm, by, best = STEPS[name]
    waited = []
    for seed in range(seeds):
        at = 1500 + 13 * seed
        machine = Machine(stepped(at + after, at, split, arm, by), sigma)
        run = play(Gate(machine.times, policy=policy), machine, seed, trace=True)
        switches = sum(call >= at for call, _ in run.switched)
        waited.append(run.arms[at:].index(best) if best in run.arms[at:] and switches <= 1 else np.inf)
    return waited


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("speedup", SPEEDUPS)
def test_auto_in_regime(speedup: float, sigma: float) -> None:
    results = runs(cell(speedup, sigma), seeds=50)
    assert max(run.against("stock") for run in results) <= 1.01
    assert max(run.against_best() for run in results) <= 1.02
    assert quiet(results) >= 0.95
    for run in results:  # it says what probing cost; noise in a probe counts only against it
        assert -0.001 <= run.gate.probe_excess / run.total - (run.against_best() - 1) <= 0.005


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("speedup", SPEEDUPS)
def test_cells_as_short_as_the_probes(speedup: float, sigma: float) -> None:
    results = runs(cell(speedup, sigma, timing=SHORT), seeds=20)
    assert max(run.against_best() for run in results) <= 1.03
    assert quiet(results) >= 0.95


def test_timing_that_the_gate_is_not_told_of_is_bounded_too() -> None:
    results = runs(cell(1.25, 0.05, timing=SHORT, told=False), seeds=5)
    assert max(run.timed for run in results) <= CALLS / 10


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("speedup", SPEEDUPS)
def test_periodic_costs_what_the_paper_accepts(speedup: float, sigma: float) -> None:
    results = runs(cell(speedup, sigma), seeds=10, policy="periodic")
    assert max(run.against_best() for run in results) <= 1.10
    assert min(run.against_best() for run in results) >= 1 + 0.9 * max(speedup - 1, 1 / speedup - 1) / 10


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("speedup", [1.1, 0.9])
def test_where_probing_evicts_periodic_loses_and_auto_does_not(speedup: float, sigma: float) -> None:
    machine = crowded(speedup, sigma)
    for run in runs(machine, 10, policy="periodic"):
        assert run.against("stock") > 1.05
    for run in runs(machine, 25):
        assert 1 / run.against_best() >= 0.995
        assert run.gate.arm == ("split" if speedup > 1 else "stock")


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_of_30_per_cent_is_followed(step: str, sigma: float) -> None:
    waited = delays(step, sigma, seeds=100, after=400)
    assert sum(wait <= WITHIN[sigma] for wait in waited) >= 95


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize(
    "step", ["split 1.15x ahead, split 1.3x slower", "stock 1.15x ahead, stock 1.3x slower"]
)
def test_lock_follows_a_step_of_the_active_arm(step: str, sigma: float) -> None:
    waited = delays(step, sigma, seeds=40, after=400, policy="lock")
    assert sum(wait <= WITHIN[sigma] for wait in waited) >= 38


def heating() -> dict[str, Floats]:
    """A laptop heats up from call 2,000 to 5,000: split loses more than stock, and its lead."""
    times = steady(CALLS, split=0.8)
    heat = np.clip((np.arange(CALLS) - 2000) / 3000, 0, 1)
    times["split"] *= 1 + 0.4 * heat
    times["stock"] *= 1 + 0.1 * heat
    return times


def competing(*slowed: str) -> dict[str, Floats]:
    """Another program slows some arms by half from call 3,000 to 5,000."""
    times = steady(CALLS, split=0.8)
    for arm in slowed:
        times[arm][3000:5000] *= 1.5
    return times


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("policy", ["auto", "lock"])
def test_thermal_drift(policy: str, sigma: float) -> None:
    for run in runs(Machine(heating(), sigma), 10, policy):
        assert run.against("stock") < 0.96
        assert run.total <= 1.02 * run.ideal


@pytest.mark.parametrize("sigma", SIGMAS)
def test_a_competing_program(sigma: float) -> None:
    results = runs(Machine(competing("split"), sigma), 40, trace=True)
    assert max(run.total / run.ideal for run in results) <= 1.015
    left = ["stock" in run.arms[3000 : 3000 + WITHIN[sigma]] for run in results]
    back = ["split" in run.arms[5000:5100] for run in results]  # within a prompt's calls
    once = [[arm for _, arm in run.switched] == ["stock", "split"] for run in results]
    assert min(np.mean(left), np.mean(back), np.mean(once)) >= 0.95


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("policy", ["auto", "lock"])
def test_contention_that_slows_every_arm_changes_nothing(policy: str, sigma: float) -> None:
    results = runs(Machine(competing("stock", "split"), sigma), 20, policy)
    assert quiet(results) >= 0.95
    assert max(run.against_best() for run in results) <= 1.01


@pytest.mark.parametrize("policy", ["auto", "lock"])
def test_bursts_of_contention_never_make_it_slower_than_stock(policy: str) -> None:
    times = steady(CALLS, split=0.8)
    for start in np.flatnonzero(np.random.default_rng(0).random(CALLS) < 0.004):
        times["split"][start : start + 20] *= 1.5
    for run in runs(Machine(times, 0.05), 10, policy):
        assert run.against("stock") <= 1.01


def _print(name: str, sigma: float, results: list[Run], measure: Callable[[Run], float]) -> None:
    values = [measure(run) for run in results]
    print(
        f"{name:44} {sigma:.0%}  mean {np.mean(values):.4f}  worst {max(values):.4f}  "
        f"no switch {quiet(results):.0%}  timed {np.mean([run.timed for run in results]):.0f}",
        flush=True,
    )


def main(seeds: int = 100) -> None:
    """Print every figure: time by always-stock and by the best fixed arm, and how fast steps are followed."""
    for sigma in SIGMAS:
        for speedup in SPEEDUPS:
            for policy in ("auto", "lock", "periodic"):
                results = runs(cell(speedup, sigma), seeds, policy)
                _print(
                    f"{policy}, split {speedup:.2f}x, by stock",
                    sigma,
                    results,
                    lambda run: run.against("stock"),
                )
                _print(f"{policy}, split {speedup:.2f}x, by best", sigma, results, Run.against_best)
            results = runs(cell(speedup, sigma, timing=SHORT), seeds)
            _print(f"auto, split {speedup:.2f}x, short cell, by best", sigma, results, Run.against_best)
        results = runs(cell(1.25, sigma, timing=SHORT, told=False), seeds)
        _print("auto, split 1.25x, short cell untold, by best", sigma, results, Run.against_best)
        for speedup in (1.15, 1.1, 1.05, 0.9):
            for policy in ("auto", "periodic"):
                results = runs(crowded(speedup, sigma), seeds, policy)
                _print(
                    f"{policy}, evicting, {speedup:.2f}x, by stock",
                    sigma,
                    results,
                    lambda r: r.against("stock"),
                )
                _print(f"{policy}, evicting, {speedup:.2f}x, by best", sigma, results, Run.against_best)
        for step in STEPS:
            waited = delays(step, sigma, seeds, CALLS)
            good = sum(wait <= WITHIN[sigma] for wait in waited)
            print(
                f"{step:44} {sigma:.0%}  followed {good}/{seeds}  median {np.median(waited):.0f} calls",
                flush=True,
            )


if __name__ == "__main__":
    main()
