"""A simulated machine for the gate: what each arm would have cost at each call, and what the gate made of it.

Each call's time is the arm's own time, times lognormal noise, times 3 in one call of a hundred. The noise of
a call is the same whichever arm runs, so that a run can be compared with the arms run on their own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fusionml.gate import Gate

STOCK = 10e-6  # seconds per row
READS, RELOADS = 1.4, 1.7  # the paper's eviction: an inactive arm's reading, and the active arm's next call

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """What the arms cost, in seconds per row by call, and how the machine disturbs and observes them."""

    times: dict[str, Floats]
    sigma: float
    outliers: float = 0.01
    timing: float = 0.02  # what timing adds to a call, in stock calls
    told: bool = True  # whether the gate is told of it
    fits: bool | None = True
    evicts: bool = False


@dataclass
class Run:
    """What a run cost, in seconds, and what the gate did: `switched` holds (call, new arm)."""

    gate: Gate
    total: float
    fixed: dict[str, float]  # always the same arm
    ideal: float  # always the fastest arm of the moment
    switched: list[tuple[int, str]] = field(default_factory=list)
    arms: list[str] = field(default_factory=list)  # the active arm at every call
    timed: int = 0

    def against(self, arm: str) -> float:
        return self.total / self.fixed[arm]

    def against_best(self) -> float:
        return self.total / min(self.fixed.values())


def steady(calls: int, **slower: float) -> dict[str, Floats]:
    """Arms at constant times, `slower` relative to stock: `split=0.8` takes 0.8 of stock's time."""
    return {arm: np.full(calls, STOCK * by) for arm, by in {"stock": 1.0, **slower}.items()}


def stepped(calls: int, at: int, split: float, arm: str, by: float) -> dict[str, Floats]:
    """Stock, and a split that takes `split` of its time; `arm` takes `by` times as long from call `at` on."""
    times = steady(calls, split=split)
    times[arm][at:] *= by
    return times


def play(gate: Gate, machine: Machine, seed: int, trace: bool = False) -> Run:
    """Run the gate over the machine's calls."""
    rng = np.random.default_rng(seed)
    calls = len(machine.times["stock"])
    noise = np.exp(machine.sigma * rng.standard_normal(calls))
    noise *= np.where(rng.random(calls) < machine.outliers, 3.0, 1.0)
    rows = rng.integers(512, 2049, calls)
    costs = {arm: per_row * noise * rows for arm, per_row in machine.times.items()}
    fixed = {arm: float(cost.sum()) for arm, cost in costs.items()}
    run = Run(gate, 0.0, fixed, float(np.minimum.reduce(list(costs.values())).sum()))
    run.total = _loop(run, machine, {arm: cost.tolist() for arm, cost in costs.items()}, rows.tolist(), trace)
    return run


def _loop(run: Run, machine: Machine, costs: dict[str, list[float]], rows: list[int], trace: bool) -> float:
    gate, choose, fits = run.gate, run.gate.choose, machine.fits
    total, resident = 0.0, "stock"
    for call, height in enumerate(rows):
        arm, timed = choose(fits)
        cost = costs[arm][call]
        if arm != resident:
            if machine.evicts:
                cost *= RELOADS if arm == gate.arm else READS
            resident = arm
        total += cost
        if timed:
            total += _report(run, machine, call, arm, cost, height)
        if trace:
            run.arms.append(gate.arm)
    return total


def _report(run: Run, machine: Machine, call: int, arm: str, cost: float, height: int) -> float:
    """Hand a timed call to the gate; return what timing it cost."""
    overhead = machine.timing * STOCK * height
    before = run.gate.switches
    run.gate.record(arm, cost, height, overhead=overhead if machine.told else 0.0)
    run.timed += 1
    if run.gate.switches != before:
        run.switched.append((call, run.gate.arm))
    return overhead
