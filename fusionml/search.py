"""Policy: which arm is fastest for a site, and which share and form of a split.

Whoever measures asks `SiteSearch` what to time next and tells it how long it took. Where there is a dense
arm, it is raced against stock first; every way to split is then searched against the winner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from .plans import DENSE, SPLIT, STOCK
from .ratios import STOCK as WHOLE
from .ratios import Choice, Probe, RatioSearch

RACE = 3
"""Samples of stock and of the dense arm."""
BEATEN = 1.5
"""An arm that is this many times slower after two samples is not timed again."""
TIE = 0.03
"""Relative gain below which stock wins against the dense arm."""


@dataclass(frozen=True)
class Way:
    """How a split computes: the form of its parts and the arithmetic of the CPU's."""

    form: str
    cpu_dtype: str


@dataclass(frozen=True)
class Trial:
    """One thing to time: an arm, all rows, or with a `solo` probe the CPU's part of a split alone."""

    arm: str
    probe: Probe = WHOLE
    way: Way | None = None


@dataclass(frozen=True)
class Found:
    """The answer: an arm, for a split the way and in `choice` its share, and what the dense arm takes.

    The gain and the seconds in `choice` are those of the arm, against stock, boundaries charged.
    """

    arm: str
    way: Way
    choice: Choice
    dense_seconds: float | None = None


class SiteSearch:
    """The search of one site over all arms; `next` and `tell` as in `RatioSearch`.

    Args:
        ways: of a split, the likeliest first.
        dense: whether there is a dense arm.
        boundary_seconds: what one boundary costs.
        waits: boundaries of a split in a form, or of the dense arm (None); of one that is shared, a part.
        make: makes the search of one way.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        *,
        dense: bool,
        boundary_seconds: float,
        waits: Callable[[str | None], float],
        make: Callable[[], RatioSearch],
    ) -> None:
        self.ways = tuple(ways)
        self._boundary, self._waits = boundary_seconds, waits
        self._searches = {way: make() for way in ways}
        self._at, self._finished = 0, False
        self._times: dict[str, list[float]] = {STOCK: [], DENSE: []} if dense else {}
        self._racing = list(self._times)
        self.base = STOCK
        if not dense:
            self._charge()

    # --- what to time

    def next(self) -> Trial | None:
        """What to time next; None once the answer stands."""
        if self._racing:
            return Trial(min(self._racing, key=lambda arm: len(self._times[arm])))
        while self._at < len(self.ways):
            way = self.ways[self._at]
            probe = self._searches[way].next()
            if probe is not None:
                return Trial(self.base) if probe.kind == "stock" else Trial(SPLIT, probe, way)
            self._finished = True
            self._at += 1
        return None

    def tell(self, trial: Trial, seconds: float) -> None:
        """Record that `trial` took `seconds`, for all rows."""
        if self._racing:
            self._times[trial.arm].append(seconds)
            self._race()
        else:
            self._searches[self.way].tell(trial.probe, seconds)

    @property
    def way(self) -> Way:
        """The way that is searched now, or was last."""
        return self.ways[self.at]

    @property
    def at(self) -> int:
        """Which of the ways that is."""
        return min(self._at, len(self.ways) - 1)

    @property
    def finished(self) -> bool:
        """Whether the search of a way came to its end, so that stock is an answer too."""
        return self._finished

    @property
    def racing(self) -> bool:
        """Whether stock and the dense arm are still compared."""
        return bool(self._racing)

    @property
    def samples_left(self) -> int:
        """At most so many more will be asked for."""
        race = sum(max(0, RACE - len(self._times[arm])) for arm in self._racing)
        return race + sum(self._searches[way].samples_left for way in self.ways[self._at :])

    def expected_seconds(self, trial: Trial) -> float | None:
        """What a trial will take at least, from what was told so far; None where that says nothing."""
        if not self._racing:
            return self._searches[self.way].expected_seconds(trial.probe)
        known = self._times[trial.arm] or [t for times in self._times.values() for t in times]
        return median(known) if known else None

    def base_seconds(self) -> float | None:
        """What a call takes that is not timed; None while nothing is known."""
        for way in reversed(self.ways[: self._at + 1]):
            seconds = self._searches[way].expected_seconds(WHOLE)
            if seconds is not None:
                return seconds + self._base_charge
        times = self._times.get(self.base)
        return median(times) if times else None

    def end_race(self) -> None:
        """Go on with the faster so far, for lack of time."""
        self._racing = []
        known = {arm: median(times) for arm, times in self._times.items() if times}
        dense, stock = known.get(DENSE), known.get(STOCK)
        if dense is not None and stock is not None:
            dense += self._boundary * self._waits(None)
            self.base = DENSE if dense < stock * (1 - TIE) else STOCK
        self._charge()

    def end_way(self) -> Choice:
        """Stop searching the present way, for lack of time; the next one follows."""
        choice = self._searches[self.way].stop_early()
        self._at += 1
        return choice

    def drop(self) -> None:
        """What was asked for cannot be computed: go on without the dense arm, or with the next way."""
        if self._racing:
            self.end_race()
        elif self._at < len(self.ways):
            self.end_way()

    # --- the answer

    def candidates(self) -> list[Found]:
        """Every split that was measured to be faster, the fastest first, and the base at the end."""
        splits = [found for way in self.ways if (found := self._split(way)) is not None]
        return [*sorted(splits, key=lambda found: found.choice.seconds or 0.0), self._whole()]

    def best_so_far(self) -> Found:
        """The answer if nothing more were told."""
        return self.candidates()[0]

    def _race(self) -> None:
        """Drop an arm that is beaten, and end the race once both are known."""
        if any(len(times) < 2 for times in self._times.values()):
            return
        centres = [median(times) for times in self._times.values()]
        beaten = max(centres) > BEATEN * min(centres)
        if beaten or all(len(times) >= RACE for times in self._times.values()):
            self.end_race()

    def _charge(self) -> None:
        """Charge each split with the boundaries that the base does not have."""
        self._base_charge = self._boundary * self._waits(None) if self.base == DENSE else 0.0
        for way, search in self._searches.items():
            search.boundary_seconds = max(0.0, self._boundary * self._waits(way.form) - self._base_charge)

    def _split(self, way: Way) -> Found | None:
        choice = self._searches[way].best_so_far()
        if self._racing or choice.ratio == 0 or choice.seconds is None:
            return None
        return self._found(SPLIT, way, choice, choice.seconds + self._base_charge)

    def _whole(self) -> Found:
        """The base arm: with the words of the first way's search why no split is better."""
        choice = self._searches[self.ways[0]].best_so_far()
        seconds = self.base_seconds()
        reason = choice.reason if self.base == STOCK else f"the dense arm: {choice.reason}"
        return self._found(self.base, self.ways[0], replace(choice, ratio=0.0, reason=reason), seconds)

    def _found(self, arm: str, way: Way, choice: Choice, seconds: float | None) -> Found:
        stock, dense = self._arms(choice.stock_seconds)
        stock = seconds if arm == STOCK else stock
        gain = stock / seconds - 1 if stock and seconds else 0.0
        samples = sum(map(len, self._times.values())) + choice.samples
        told = replace(choice, gain=gain, seconds=seconds, stock_seconds=stock, samples=samples)
        return Found(arm, way, told, dense)

    def _arms(self, base: float | None) -> tuple[float | None, float | None]:
        """Seconds of stock and of the dense arm; the newer ones of the base are those that a way saw."""
        stock, dense = (
            median(times) if times else None for times in (self._times.get(STOCK), self._times.get(DENSE))
        )
        if self.base == STOCK:
            return base or stock, None if dense is None else dense + self._boundary * self._waits(None)
        return stock, (base or dense or 0.0) + self._base_charge
