"""Simulated pairs: two units with a fixed cost and a cost per row, which slow each other down.

Everything here is a simulation: no figure in this file was measured by this project. Where a figure is
the paper's it says so; the rest was chosen so that the optimum of each of the paper's chips lies in the range
of ratios and gains that the paper reports (0.25 to 0.40, 1.15x to 1.38x), below the ratio that the rates of
each unit alone suggest (its Section 4).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from fusionml.ratios import Probe


@dataclass(frozen=True)
class Unit:
    """`fixed` seconds a call, `per_row` seconds a row, and `slowdown` while the other unit runs too."""

    fixed: float
    per_row: float
    slowdown: float = 1.0

    def alone(self, rows: float) -> float:
        return self.fixed + self.per_row * rows if rows else 0.0


@dataclass(frozen=True)
class Pair:
    """A simulated machine with one layer. `boundary`: seconds that a split pays and stock never does."""

    name: str
    cpu: Unit
    current: Unit
    boundary: float = 0.0
    origin: str = "a simulation"

    def stock(self, rows: int) -> float:
        return self.current.alone(rows)

    def split(self, ratio: float, rows: int) -> float:
        """True seconds of the two parts side by side; the one left over runs at its solo speed."""
        cpu, current = self.cpu.alone(ratio * rows), self.current.alone((1 - ratio) * rows)
        together = min(cpu * self.cpu.slowdown, current * self.current.slowdown)
        left = (cpu - together / self.cpu.slowdown, current - together / self.current.slowdown)
        return together + max(left)

    def cost(self, ratio: float, rows: int) -> float:
        """True seconds of the layer at `ratio`, boundary included."""
        return self.split(ratio, rows) + self.boundary if ratio else self.stock(rows)

    def seconds(self, probe: Probe, rows: int) -> float:
        """True seconds of a probe as a stopwatch sees it, which no boundary is part of."""
        if probe.kind == "solo":
            return self.cpu.alone(probe.cpu_rows)
        return self.split(probe.cpu_rows / rows, rows) if probe.kind == "split" else self.stock(rows)


@dataclass
class Stopwatch:
    """Times probes on a simulated pair, with lognormal noise, drift and outliers; counts what they cost."""

    pair: Pair
    rows: int
    seed: int
    noise: float = 0.03
    drift: float = 0.0  # relative, from the first to the hundredth probe
    outliers: float = 0.0  # share of probes that read three times too slow
    spent: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(f"{self.pair.name} {self.seed}")

    def __call__(self, probe: Probe) -> float:
        seconds = self.pair.seconds(probe, self.rows) * self._random.lognormvariate(0.0, self.noise)
        seconds *= 1 + self.drift * len(self.spent) / 100
        if self._random.random() < self.outliers:
            seconds *= 3
        self.spent.append(seconds)
        return seconds


US = 1e-6
MS = 1e-3

M1 = Pair(
    "M1",
    cpu=Unit(0.35 * MS, 22.0 * US, 1.30),
    current=Unit(0.2 * MS, 13.2 * US, 15.5 / 13.2),
    boundary=0.15 * MS,
    origin="a simulation; the paper measured 13.2 us/row for the GPU alone and 15.5 beside the CPU",
)
M2 = Pair("M2", Unit(0.25 * MS, 12.5 * US, 1.25), Unit(0.2 * MS, 8.8 * US, 1.15), 0.15 * MS)
M3_PRO = Pair("M3 Pro", Unit(0.25 * MS, 12.9 * US, 1.30), Unit(0.2 * MS, 5.2 * US, 1.14), 0.15 * MS)
M4 = Pair("M4", Unit(0.2 * MS, 11.0 * US, 1.30), Unit(0.2 * MS, 6.4 * US, 1.17), 0.15 * MS)
M4_PRO = Pair("M4 Pro", Unit(0.2 * MS, 9.2 * US, 1.25), Unit(0.15 * MS, 3.4 * US, 1.12), 0.12 * MS)
PAPER_CHIPS = (M1, M2, M3_PRO, M4, M4_PRO)

EQUAL_STREAMS = Pair("two equal CPU streams", Unit(2 * MS, 180 * US, 1.03), Unit(2 * MS, 180 * US, 1.03))

THOUSAND = Pair(
    "a CPU a thousand times slower", Unit(0.05 * MS, 120 * US), Unit(0.02 * MS, 0.12 * US), 0.2 * MS
)

M5_LIKE = Pair("M5-like", Unit(0.3 * MS, 12.0 * US, 1.10), Unit(0.15 * MS, 1.3 * US, 1.12), 0.15 * MS)

PRESETS = (*PAPER_CHIPS, EQUAL_STREAMS, THOUSAND, M5_LIKE)
