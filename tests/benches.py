"""A calibrator's bench on simulated units and a clock of its own: no test depends on the machine's speed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pairs import Pair, Unit

from fusionml import calibrate
from fusionml.calibrate import Shape
from fusionml.ratios import Probe
from fusionml.search import Found, Trial


class Clock:
    """Stands in for the module `time`: it moves only when somebody works or sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Simulation:
    """Simulated benches: `pairs` by CPU type, every cost times the shape's arithmetic over `reference`'s.

    `making` are the seconds that making a bench takes, `errors` what its split is wrong by, by CPU type.
    """

    clock: Clock
    pairs: dict[str, Pair]
    noise: float = 0.0
    reference: int | None = None
    making: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    interrupt_after: int | None = None
    made: list[tuple[str, int]] = field(default_factory=list)
    types: set[tuple[str, str]] = field(default_factory=set)
    """(site, CPU type) of every split, or CPU part, that was timed."""
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    probes: list[Probe] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def pair(self, shape: Shape, cpu_dtype: str) -> Pair:
        pair = self.pairs[cpu_dtype]
        scale = 1.0 if self.reference is None else shape.inputs * shape.outputs / self.reference
        return replace(pair, cpu=_scaled(pair.cpu, scale), current=_scaled(pair.current, scale))


def _scaled(unit: Unit, scale: float) -> Unit:
    return Unit(unit.fixed * scale, unit.per_row * scale, unit.slowdown)


def simulate(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> Simulation:
    """Make the calibrator measure `simulation` instead of this machine."""

    class Bench:
        def __init__(self, shape: Shape, tokens: int, made_up: bool) -> None:
            self.rows, self.name = tokens, shape.site(tokens).key()
            self.pairs = {name: simulation.pair(shape, name) for name in simulation.pairs}
            self.random = random.Random(self.name)
            simulation.made.append((self.name, tokens))
            self._pass(simulation.making)

        def _pass(self, seconds: float) -> None:
            simulation.clock.now += seconds
            simulation.spent[self.name] += seconds

        def seconds(self, trial: Trial) -> float:
            name = next(iter(self.pairs)) if trial.way is None else trial.way.cpu_dtype
            simulation.probes.append(trial.probe)
            if trial.way is not None:
                simulation.types.add((self.name, name))
            if simulation.interrupt_after is not None and len(simulation.probes) > simulation.interrupt_after:
                raise KeyboardInterrupt
            seconds = self.pairs[name].seconds(trial.probe, self.rows)
            taken = seconds * self.random.lognormvariate(0, simulation.noise)
            self._pass(taken)
            return taken

        def error(self, found: Found) -> tuple[float, float]:
            simulation.verified.append(round(found.choice.ratio * self.rows))
            return simulation.errors.get(found.way.cpu_dtype, 0.0), 1e-3

    monkeypatch.setattr(calibrate, "Bench", Bench)
    monkeypatch.setattr(calibrate, "time", simulation.clock)
    monkeypatch.setattr(calibrate, "boundary_seconds", lambda: next(iter(simulation.pairs.values())).boundary)
    return simulation


def simulated(monkeypatch: pytest.MonkeyPatch, pair: Pair, **more: Any) -> Simulation:
    """The same pair of units for either CPU type."""
    both = {"native": pair, "float32": pair}
    return simulate(monkeypatch, Simulation(Clock(), more.pop("pairs", both), **more))
