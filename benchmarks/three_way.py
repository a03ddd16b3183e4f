"""Which shares of a product's rows three units should take, measured while they all run (Section 6).

Policy only: no MLX, no clock. Whoever measures asks `ThreeWaySearch` what to time next and tells it how long
it took, as `fusionml.ratios.RatioSearch` is used for two units. One may cost tens of milliseconds a call
however few its rows: the best answer often leaves it out, and small steps from an answer that has it would
never find out. So the search starts several times: at the balance of each pair and of all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from statistics import median

STEPS = 32
STRIDES = (4, 2, 1)
"""How many steps are moved from one unit to another: first coarse, then fine."""
TOLERANCE = 0.01
"""A move must gain more than this: less is noise."""

Shares = tuple[int, ...]
"""Steps of each unit, in the order of the units; they add up to STEPS."""


@dataclass(frozen=True)
class Found:
    """The best shares, 0..1 by unit, their median seconds, the best single unit's, and samples taken."""

    shares: dict[str, float]
    seconds: float
    alone: dict[str, float]
    samples: int

    @property
    def speedup(self) -> float:
        """Over the fastest unit alone."""
        return min(self.alone.values()) / self.seconds


class ThreeWaySearch:
    """Ask `next()`, time it, `tell()` it, until it is None; then `result()`.

    Args:
        units: names, at least two.
        repeats: samples of each candidate; medians are compared.
        steps: into how many equal parts the rows are divided.

    Raises:
        ValueError: too few units, or repeated names; fewer than one repeat.
    """

    def __init__(self, units: Sequence[str], *, repeats: int = 3, steps: int = STEPS) -> None:
        if len(units) < 2 or len(set(units)) != len(units):
            raise ValueError(f"units must be at least two different names, not {list(units)!r}")
        if repeats < 1 or steps < len(units):
            raise ValueError(f"repeats={repeats!r} and steps={steps!r} must be at least 1 and {len(units)}")
        self.units, self.repeats, self.steps = tuple(units), repeats, steps
        self._times: dict[Shares, list[float]] = {}
        self._starts: list[Shares] | None = None
        self._finer = 0

    def next(self) -> Shares | None:
        """The shares to time next, in steps; None when the answer stands."""
        alone = next(filter(self._missing, self._alone()), None)
        if alone is not None:
            return alone
        balance = next(filter(self._missing, self._balances()), None)
        return self._descend() if balance is None else balance

    def tell(self, shares: Shares, seconds: float) -> None:
        """What the shares that `next()` gave took.

        Raises:
            ValueError: a time that is not positive, or shares that do not add up.
        """
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"seconds={seconds!r} must be a positive time")
        if len(shares) != len(self.units) or sum(shares) != self.steps or min(shares) < 0:
            raise ValueError(
                f"shares={shares!r} must be {len(self.units)} counts that add up to {self.steps}"
            )
        self._times.setdefault(shares, []).append(seconds)

    def result(self) -> Found:
        """The answer. A RuntimeError while `next()` still asks for something."""
        if self.next() is not None:
            raise RuntimeError("the search is not finished: go on until next() is None")
        best = min(self._times, key=self._seconds)
        return Found(
            dict(zip(self.units, (n / self.steps for n in best), strict=True)),
            self._seconds(best),
            {unit: self._seconds(shares) for unit, shares in zip(self.units, self._alone(), strict=True)},
            sum(map(len, self._times.values())),
        )

    # --- candidates

    def _alone(self) -> list[Shares]:
        return [
            tuple(self.steps if i == unit else 0 for i in range(len(self.units)))
            for unit in range(len(self.units))
        ]

    def _balances(self) -> list[Shares]:
        """Each pair, each triple and so on, where all of them would end together if none slowed another."""
        rates = [1 / self._seconds(shares) for shares in self._alone()]
        sizes = range(2, len(self.units) + 1)
        return [
            self._rounded([rate if i in group else 0.0 for i, rate in enumerate(rates)])
            for size in sizes
            for group in combinations(range(len(self.units)), size)
        ]

    def _rounded(self, weights: Sequence[float]) -> Shares:
        """Whole steps in proportion to the weights, at least one where there is a weight."""
        total = sum(weights)
        shares = [max(1, round(self.steps * w / total)) if w else 0 for w in weights]
        shares[shares.index(max(shares))] += self.steps - sum(shares)
        return tuple(shares)

    def _descend(self) -> Shares | None:
        """From each group's balance downhill, coarse steps first, until no neighbour is better."""
        if self._starts is None:
            self._starts = sorted(self._balances(), key=self._seconds)
        while self._starts:
            at, stride = self._starts[0], STRIDES[self._finer]
            near = self._neighbours(at, stride)
            missing = next(filter(self._missing, near), None)
            if missing is not None:
                return missing
            best = min(near, key=self._seconds)
            if self._seconds(best) < self._seconds(at) * (1 - TOLERANCE):
                self._starts[0] = best
            elif self._finer + 1 < len(STRIDES):
                self._finer += 1
            else:
                self._starts.pop(0)
                self._finer = 0
        return None

    def _neighbours(self, shares: Shares, stride: int) -> list[Shares]:
        """Every move of `stride` steps, or of what there is, from one unit to another, or with all others.

        Where two units end together, a move that relieves one of them alone gains nothing.
        """
        pairs = [{giver: -1, taker: 1} for giver, taker in permutations(range(len(shares)), 2)]
        others = [
            {unit: -sign if unit == one else sign for unit in range(len(shares))}
            for one in range(len(shares))
            for sign in (1, -1)
        ]
        moves = [_moved(shares, move, stride) for move in [*pairs, *others]]
        return list(dict.fromkeys(each for each in moves if each != shares))

    # --- samples

    def _missing(self, shares: Shares) -> bool:
        return len(self._times.get(shares, ())) < self.repeats

    def _seconds(self, shares: Shares) -> float:
        return median(self._times[shares])


def _moved(shares: Shares, move: Mapping[int, int], stride: int) -> Shares:
    """Shares after each unit that gives (-1) gave `stride` steps or what it has to those that take (1)."""
    changed = list(shares)
    takers = [unit for unit, sign in move.items() if sign > 0]
    given = 0
    for unit, sign in move.items():
        if sign < 0:
            gift = min(stride * max(1, len(takers)), changed[unit])
            changed[unit] -= gift
            given += gift
    for place, unit in enumerate(takers):
        changed[unit] += given // len(takers) + (place < given % len(takers))
    return tuple(changed)


def rows_of(shares: Mapping[str, float], rows: int, multiple: int = 1) -> dict[str, int]:
    """Whole rows of each unit, in multiples of `multiple`; the largest share takes what is left over.

    Raises:
        ValueError: shares that do not add up to 1.
    """
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"shares={dict(shares)!r} must add up to 1")
    found = {unit: int(rows * share / multiple) * multiple for unit, share in shares.items()}
    found[max(shares, key=lambda unit: shares[unit])] += rows - sum(found.values())
    return found
