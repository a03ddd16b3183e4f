"""A calibrator's bench on simulated units and a clock of its own: no test depends on the machine's speed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import pytest
from pairs import Pair, Unit

from fusionml import calibrate
from fusionml.calibrate import Shape
from fusionml.ratios import Probe


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
    made: list[tuple[str, int, str]] = field(default_factory=list)
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
        def __init__(self, shape: Shape, rows: int, cpu_dtype: str, made_up: mx.Dtype | None) -> None:
            self.rows, self.cpu_dtype, self.name = rows, cpu_dtype, shape.site(rows).key()
            self.pair = simulation.pair(shape, cpu_dtype)
            self.random = random.Random(f"{self.name} {cpu_dtype}")
            simulation.made.append((self.name, rows, cpu_dtype))
            self._pass(simulation.making)

        def _pass(self, seconds: float) -> None:
            simulation.clock.now += seconds
            simulation.spent[self.name] += seconds

        def seconds(self, probe: Probe) -> float:
            simulation.probes.append(probe)
            if simulation.interrupt_after is not None and len(simulation.probes) > simulation.interrupt_after:
                raise KeyboardInterrupt
            taken = self.pair.seconds(probe, self.rows) * self.random.lognormvariate(0, simulation.noise)
            self._pass(taken)
            return taken

        def error(self, cpu_rows: int) -> float:
            simulation.verified.append(cpu_rows)
            return simulation.errors.get(self.cpu_dtype, 0.0)

    monkeypatch.setattr(calibrate, "Bench", Bench)
    monkeypatch.setattr(calibrate, "time", simulation.clock)
    monkeypatch.setattr(calibrate, "boundary_seconds", lambda: next(iter(simulation.pairs.values())).boundary)
    return simulation


def simulated(monkeypatch: pytest.MonkeyPatch, pair: Pair, **more: Any) -> Simulation:
    """The same pair of units for either CPU type."""
    both = {"native": pair, "float32": pair}
    return simulate(monkeypatch, Simulation(Clock(), more.pop("pairs", both), **more))
