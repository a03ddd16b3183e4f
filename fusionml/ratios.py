"""Which share of a layer's rows the CPU should take: where to look, when to stop, what to answer.

No MLX, no clock, no files: whoever measures asks `RatioSearch` what to time next and tells it how long it
took. The paper's Section 4 is the reason to measure the split itself: while both units run, both slow down,
so a ratio composed from their speeds alone gives the CPU too much.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

PAPER_GRID = (0.0, 0.10, 0.20, 0.30, 0.40, 0.50)
"""Candidate ratios of the paper (Section 4); without `grid=` they are the coarse step of the search."""

ROW_EDGES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Lower bounds of the row buckets."""
DEFAULT_ROWS = (512, 1024, 2048)
"""Prompt chunks as MLX-LM makes them: speculative decoding's, a remainder, and the usual one."""


LARGEST_RATIO = 0.9
"""No search and no table goes beyond it: past it the current stream would be the helper."""

FINE_STEP = 1 / 64
"""The search resolves ratios this finely, unless `multiple` rows are a larger share than that."""

EXHAUSTIVE_STEP = 0.025
"""Step of the exhaustive grid that a search may take half the samples of."""

_SCREEN_REPEATS = 3
_EXPLORE_REPEATS = 3
_MOST_REPEATS = 4  # times `repeats`, for a ratio whose place stays in dispute
_ASSUMED_SPREAD = 0.05  # until something was timed three times
_BOUND_SLACK = 1.1  # the fit of the solo rates is noisy, and a bound too low would hide the optimum


# --- sites ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """What one decision is made for.

    `kind` ('linear', 'quantized', ...) and `dtype` ('bfloat16', 'u4g64-float16', ...) are free words without
    '/' or white space. `inputs` and `outputs` are the layer's K and N; `rows` is its bucket's lower bound
    (see `bucket`; 0 means below every bucket). A wrong value is a ValueError that names it.
    """

    kind: str
    dtype: str
    inputs: int
    outputs: int
    bias: bool
    rows: int

    def __post_init__(self) -> None:
        for name in ("kind", "dtype"):
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(r"[^\s/]{1,64}", value):
                raise ValueError(f"{name} is {value!r}: use 1 to 64 characters without '/' or white space")
        for name, least in (("inputs", 1), ("outputs", 1), ("rows", 0)):
            _require_int(name, getattr(self, name), least, 2**40)
        if not isinstance(self.bias, bool):
            raise ValueError(f"bias is {self.bias!r}: use True or False")

    def key(self) -> str:
        """The site in one word, for files and people: `linear/bfloat16/4096x14336/nobias/rows=2048`."""
        bias = "bias" if self.bias else "nobias"
        return f"{self.kind}/{self.dtype}/{self.inputs}x{self.outputs}/{bias}/rows={self.rows}"

    @classmethod
    def parse(cls, key: str) -> Site:
        """The site whose `key()` this is. Anything else is a ValueError."""
        number = r"(0|[1-9][0-9]{0,12})"
        pattern = rf"([^\s/]+)/([^\s/]+)/{number}x{number}/(no)?bias/rows={number}"
        found = re.fullmatch(pattern, key, re.ASCII)
        if not found:
            raise ValueError(f"{key[:100]!r} is no site: use KIND/DTYPE/KxN/bias|nobias/rows=ROWS")
        kind, dtype, inputs, outputs, no, rows = found.groups()
        return cls(kind, dtype, int(inputs), int(outputs), no is None, int(rows))


def bucket(rows: int, edges: Sequence[int] = ROW_EDGES) -> int:
    """The bucket of a call with `rows` rows: the nearest edge at or below, 0 where there is none."""
    at = bisect_right(edges, rows)
    return edges[at - 1] if at else 0


# --- answers without a measurement ------------------------------------------------------------------------


def default_ratio(pair: str, *, widened: bool = False) -> float:
    """The ratio where there is no table.

    'metal': 0.30, what the paper ran end to end (Section 5.4); half of that where the CPU part computes
    half-precision weights in float32 (`widened`), at a lower rate. 'cpu', two equal CPU
    streams: 0.50. 'cuda': 0, because a discrete GPU leaves the CPU nothing worth its boundaries.
    """
    defaults = {"metal": 0.15 if widened else 0.30, "cpu": 0.50, "cuda": 0.0}
    if pair not in defaults:
        raise ValueError(f"pair is {pair!r}: use one of {', '.join(map(repr, defaults))}")
    return defaults[pair]


def composed_ratio(cpu_rate: float, current_rate: float) -> float:
    """The ratio at which both units would finish together if neither slowed the other (rates in rows/s).

    To stand beside a measured ratio, never instead of one: solo rates overstate the CPU's share (Section 4).
    """
    for name, rate in (("cpu_rate", cpu_rate), ("current_rate", current_rate)):
        if not (math.isfinite(rate) and rate > 0):
            raise ValueError(f"{name} is {rate!r}: use a positive number of rows a second")
    return cpu_rate / (cpu_rate + current_rate)


# --- the search -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """One thing to time.

    'stock': the layer as MLX computes it, all rows. 'solo': the CPU part alone, `cpu_rows` rows. 'split': the
    real split of all rows, `cpu_rows` of them (a share of `ratio`) on the CPU stream while the rest runs.
    """

    kind: Literal["stock", "solo", "split"]
    cpu_rows: int = 0
    ratio: float = 0.0


STOCK = Probe("stock")


@dataclass(frozen=True)
class Choice:
    """What a search found.

    `gain` is stock's time over the chosen split's, less 1, boundary charged (0 for ratio 0). `spread` is the
    relative deviation of one sample (robust), over everything timed. Seconds are medians; `seconds` includes
    the boundary. Rates are rows a second, each unit alone; `composed` is the ratio that they suggest.
    None means not measured.
    """

    ratio: float
    gain: float
    reason: str
    samples: int
    spread: float | None
    stock_seconds: float | None = None
    seconds: float | None = None
    cpu_rate: float | None = None
    current_rate: float | None = None
    composed: float | None = None


@dataclass(frozen=True)
class _Solo:
    """The CPU part alone, in seconds: `fixed + per_row * rows`."""

    fixed: float
    per_row: float

    def balance(self, stock: float, rows: int) -> float:
        """The ratio at which the CPU part ends with the rest of stock's rows, nothing else slowing either."""
        return max(0.0, (stock - self.fixed) / (self.per_row * rows + stock))


class _Samples:
    """The times of each probe, with their medians and the spread of all."""

    def __init__(self) -> None:
        self._times: dict[Probe, list[float]] = {}
        self._medians: dict[Probe, float] = {}
        self.taken = 0
        self.spread: float | None = None

    def add(self, probe: Probe, seconds: float) -> None:
        times = self._times.setdefault(probe, [])
        times.append(seconds)
        self._medians[probe] = median(times)
        self.taken += 1
        self.spread = self._pooled_spread()

    def count(self, probe: Probe) -> int:
        return len(self._times.get(probe, ()))

    def median(self, probe: Probe) -> float | None:
        return self._medians.get(probe)

    def _pooled_spread(self) -> float | None:
        """Relative deviation of one sample, over all probes timed three times or more; robust."""
        deviations = []
        for probe, times in self._times.items():
            if (n := len(times)) >= 3:
                apart = sorted(abs(seconds / self._medians[probe] - 1) for seconds in times)
                # A median of few lies among its own samples: of an odd number it is one, and says nothing.
                deviations += apart[1:] if n % 2 else [each * n / (n - 1) for each in apart]
        return 1.4826 * median(deviations) if deviations else None


class RatioSearch:
    """Finds the smallest ratio within `tolerance` of the fastest; ratio 0 is stock and wins ties.

        search = RatioSearch(rows=2048)
        while (probe := search.next()) is not None:
            search.tell(probe, seconds_of(probe))
        choice = search.result()

    rows: rows of the call (M). multiple: CPU rows come in multiples of it. max_ratio: the largest candidate,
    at most 0.9. grid: candidates, instead of every `step`; all those within the bound are timed. tolerance:
    relative time that a smaller ratio may cost, because past the balance the CPU is the critical path and
    the curve rises steeply. min_gain: where the bound on the gain is lower the answer is 0 and no split is
    timed. boundary_seconds: added to every split time, for what its boundary costs and stock never pays.
    repeats: samples of each ratio that the answer rests on. solo_rows: the two sizes of the CPU part alone.

    What comes next depends only on what was told so far: probes may come from live calls, far apart, and
    `next()` gives the same probe until something is told. The number of samples never exceeds half of
    an exhaustive 2.5 % grid with the same repeats. Not safe for use by two threads at once.
    """

    def __init__(
        self,
        *,
        rows: int,
        multiple: int = 32,
        max_ratio: float = 0.5,
        grid: Sequence[float] | None = None,
        tolerance: float = 0.02,
        min_gain: float = 0.03,
        boundary_seconds: float = 0.0,
        repeats: int = 5,
        solo_rows: tuple[int, int] = (32, 128),
    ) -> None:
        _require_int("rows", rows, 1)
        _require_int("multiple", multiple, 1)
        _require_int("repeats", repeats, 3)
        _require_number("max_ratio", max_ratio, 0, LARGEST_RATIO)
        _require_number("tolerance", tolerance, 0, 1)
        _require_number("min_gain", min_gain, 0, 1)
        _require_number("boundary_seconds", boundary_seconds, 0, math.inf)
        _require_solo_rows(solo_rows)
        for ratio in grid or ():
            _require_number("a grid ratio", ratio, 0, max_ratio)
        self.rows, self.multiple, self.repeats = rows, multiple, repeats
        self.tolerance, self.min_gain, self.boundary_seconds = tolerance, min_gain, boundary_seconds
        # A machine whose slow samples come in runs needs more of them to know a ratio from its neighbour.
        self._explore = max(_EXPLORE_REPEATS, repeats // 2)
        self._gridded = grid is not None
        self._step_rows = max(1, math.floor(FINE_STEP * rows / multiple)) * multiple
        self._candidates = self._on_grid(grid) if grid is not None else self._every_step(max_ratio)
        self._solo = self._solo_probes(solo_rows)
        self._cap = max(12, (round(max_ratio / EXHAUSTIVE_STEP) + 1) * repeats // 2)
        self._splits = {ratio: Probe("split", self._cpu_rows(ratio), ratio) for ratio in self._candidates}
        self._samples = _Samples()
        self._stopped = False

    @property
    def step(self) -> float:
        """The distance between neighbouring candidates, as a ratio (without `grid`)."""
        return self._step_rows / self.rows

    @property
    def samples_left(self) -> int:
        """At most this many more probes will be asked for."""
        return 0 if self._stopped else max(0, self._cap - self._samples.taken)

    def next(self) -> Probe | None:
        """What to time next; None once the answer stands. All rows are `rows`, except a solo part's."""
        if self._stopped or self._samples.taken >= self._cap:
            return None
        wanted = self._wanted()
        if not wanted:
            return None
        # The least sampled first: candidates and stock take turns, so that a drift meets all of them.
        return min(wanted, key=self._samples.count)

    def tell(self, probe: Probe, seconds: float) -> None:
        """Records that `probe` took `seconds`, for all `rows` rows (whoever timed other lengths scales)."""
        # A clock's bounds: beyond them the squares of a fit would overflow.
        if not isinstance(seconds, int | float) or not 1e-12 <= seconds <= 1e9:
            raise ValueError(f"seconds is {seconds!r} for {probe}: use a positive number, at most 1e9")
        if probe not in (STOCK, *self._solo, *self._splits.values()):
            raise ValueError(f"probe is {probe!r}: use one that next() gave")
        self._samples.add(probe, float(seconds))

    def expected_seconds(self, probe: Probe) -> float | None:
        """What `probe` will take at least, from what was told so far; None where that says nothing.

        For a caller with a budget: a split takes longer than this, by what the units slow each other down.
        """
        known = self._samples.median(probe)
        if known is not None:
            return known
        solo, stock = self._solo_fit(), self._seconds(0.0)
        if solo is None or stock is None or probe.kind == "stock":
            return None
        cpu = solo.fixed + solo.per_row * probe.cpu_rows
        return cpu if probe.kind == "solo" else max(cpu, stock * (1 - probe.ratio))

    def stop_early(self) -> Choice:
        """Ends the search, for lack of time, with the best answer there is now."""
        self._stopped = True
        return self.best_so_far()

    def result(self) -> Choice:
        """The answer. A RuntimeError while `next()` still asks for something."""
        if self.next() is not None:
            raise RuntimeError("the search is not finished: go on until next() is None, or call stop_early()")
        return self.best_so_far()

    def best_so_far(self) -> Choice:
        """The answer if nothing more were told. Ratio 0 unless a split was measured to be faster."""
        refusal = self._refusal()
        if refusal is not None:
            return self._choice(0.0, refusal)
        times = self._explored(least=1)
        if len(times) < 2 or 0.0 not in times:
            return self._choice(0.0, "no split was timed yet")
        chosen, fastest = self._smallest_fast(times)
        if chosen == 0 or self._ties_with_stock(chosen, times):
            best = min((r for r in times if r), key=times.__getitem__)
            return self._choice(0.0, f"the best split, at {best:.3f}, is not measurably faster than stock")
        why = (
            f"within {self.tolerance:.0%} of the fastest, {fastest:.3f}"
            if chosen < fastest
            else "the fastest"
        )
        return self._choice(chosen, f"{why}, of {len(times) - 1} ratios timed")

    def _choice(self, ratio: float, reason: str) -> Choice:
        stock, seconds, solo = self._seconds(0.0), self._seconds(ratio), self._solo_fit()
        cpu_rate = 1 / solo.per_row if solo and solo.per_row else None
        current_rate = self.rows / stock if stock else None
        return Choice(
            ratio=ratio,
            gain=stock / seconds - 1 if stock and seconds else 0.0,
            reason=reason,
            samples=self._samples.taken,
            spread=self._samples.spread,
            stock_seconds=stock,
            seconds=seconds,
            cpu_rate=cpu_rate,
            current_rate=current_rate,
            composed=composed_ratio(cpu_rate, current_rate) if cpu_rate and current_rate else None,
        )

    # --- candidates: ratios, ascending, without 0 ---

    def _cpu_rows(self, ratio: float) -> int:
        return round(ratio * self.rows / self.multiple) * self.multiple

    def _every_step(self, max_ratio: float) -> list[float]:
        last = math.floor(max_ratio * self.rows + 1e-9)
        return [m / self.rows for m in range(self._step_rows, last + 1, self._step_rows)]

    def _on_grid(self, grid: Sequence[float]) -> list[float]:
        distinct = {self._cpu_rows(ratio): ratio for ratio in sorted(grid, reverse=True)}
        return sorted(ratio for cpu_rows, ratio in distinct.items() if 0 < cpu_rows < self.rows)

    def _solo_probes(self, solo_rows: tuple[int, int]) -> list[Probe]:
        """Two sizes of the CPU part, neither above the largest candidate's."""
        if not self._candidates:
            return []
        large = min(solo_rows[1], self._cpu_rows(self._candidates[-1]))
        small = min(solo_rows[0], max(1, large // 4))
        return [Probe("solo", n) for n in sorted({small, large})]

    # --- what the samples say ---

    def _probe(self, ratio: float) -> Probe:
        return self._splits[ratio] if ratio else STOCK

    def _count(self, ratio: float) -> int:
        return self._samples.count(self._probe(ratio))

    def _seconds(self, ratio: float) -> float | None:
        """The median time at `ratio`, boundary charged."""
        seconds = self._samples.median(self._probe(ratio))
        return None if seconds is None else seconds + (self.boundary_seconds if ratio else 0.0)

    def _explored(self, least: int | None = None) -> dict[float, float]:
        """Median seconds of each ratio, 0 among them, with at least so many samples."""
        least = self._explore if least is None else least
        ratios = [r for r in [0.0, *self._candidates] if self._count(r) >= least]
        return {r: seconds for r in ratios if (seconds := self._seconds(r)) is not None}

    def _doubt(self, *ratios: float) -> float:
        """Standard error, relative, of the difference of these ratios' medians."""
        spread = self._samples.spread
        variance = sum(1 / max(1, self._count(r)) for r in ratios)
        return 1.25 * (_ASSUMED_SPREAD if spread is None else spread) * math.sqrt(variance)

    # --- screening: each unit alone ---

    def _solo_fit(self) -> _Solo | None:
        if not self._solo:
            return None
        small, large = self._solo[0], self._solo[-1]
        low, high = self._samples.median(small), self._samples.median(large)
        if low is None or high is None:
            return None
        between = large.cpu_rows - small.cpu_rows
        per_row = max(0.0, (high - low) / between) if between else high / large.cpu_rows
        return _Solo(max(0.0, low - per_row * small.cpu_rows), per_row)

    def _refusal(self) -> str | None:
        """Why no split is worth timing, as far as the samples of each unit alone say; else None."""
        if not self._candidates:
            return f"{self.rows} rows leave no candidate in multiples of {self.multiple}"
        first, last = self._solo[0], self._solo[-1]
        stock, alone = self._seconds(0.0), self._samples.median(first)
        if stock is None or alone is None:
            return None
        sure = min(self._samples.count(first), self._count(0.0)) >= _SCREEN_REPEATS
        if alone > stock * (1 if sure else 2):
            return f"{first.cpu_rows} rows alone on the CPU take longer than stock for all {self.rows}"
        solo = self._solo_fit()
        if solo is None or self._samples.count(last) < _SCREEN_REPEATS:
            return None
        gain = stock / (stock * (1 - solo.balance(stock, self.rows)) + self.boundary_seconds) - 1
        if gain < self.min_gain:
            return f"each unit alone bounds the gain to {max(0.0, gain):.1%}, below {self.min_gain:.0%}"
        return None

    def _useful(self) -> list[float]:
        """Candidates whose CPU part alone would finish before stock; the smallest of all at least."""
        solo, stock = self._solo_fit(), self._seconds(0.0)
        if solo is None or stock is None or solo.per_row == 0:
            return self._candidates
        bound = _BOUND_SLACK * (stock - solo.fixed) / (solo.per_row * self.rows)
        return [r for r in self._candidates if r <= bound] or self._candidates[:1]

    # --- planning ---

    def _wanted(self) -> list[Probe]:
        """Everything that should have one more sample now; empty when the answer stands."""
        if self._refusal() is not None:
            return []
        screen = [p for p in [STOCK, *self._solo] if self._samples.count(p) < _SCREEN_REPEATS]
        if screen:
            return screen
        ratios = [r for r in self._unexplored() if self._count(r) < self._explore] or self._contested()
        splits = sum(self._count(r) for r in self._candidates)
        if ratios and self._count(0.0) < 2 + splits // 6:
            return [STOCK]
        return [self._probe(r) for r in ratios]

    def _unexplored(self) -> list[float]:
        """Ratios to time next: coarse ones about the balance, outwards until they bracket, then inside."""
        useful, explored = self._useful(), self._explored()
        if self._gridded:
            return [r for r in useful if r not in explored]
        coarse = self._coarse(useful)
        start = [r for r in self._start(coarse) if r not in explored]
        if start:
            return start
        best = min(explored, key=explored.__getitem__)
        above = [r for r in coarse if r > max(explored)]
        below = [r for r in coarse if r < min(r for r in explored if r)]
        if best == max(explored) and above:
            return above[:1]
        if best <= min(r for r in explored if r) and below:
            return below[-1:]
        return self._inside(best, explored, useful)

    def _coarse(self, useful: list[float]) -> list[float]:
        """The candidates nearest the paper's grid, continued by its step, and the largest one."""
        tenths = [k / 10 for k in range(1, math.floor(useful[-1] * 10 + 1e-9) + 1)]
        nearest = {min(useful, key=lambda r: abs(r - tenth)) for tenth in tenths}
        if not nearest or useful[-1] - max(nearest) > 0.05:
            nearest.add(useful[-1])
        return sorted(nearest)

    def _start(self, coarse: list[float]) -> list[float]:
        """The coarse ratio nearest the balance of the solo rates, with its neighbours."""
        solo, stock = self._solo_fit(), self._seconds(0.0)
        balance = solo.balance(stock, self.rows) if solo and stock else 0.0
        at = min(range(len(coarse)), key=lambda i: abs(coarse[i] - balance))
        return coarse[max(0, at - 1) : at + 2]

    def _inside(self, best: float, explored: dict[float, float], useful: list[float]) -> list[float]:
        """One candidate between the ratios that are surely slower: the estimated knee, else a midpoint."""
        limits = {r: explored[best] * (1 + max(self.tolerance, self._doubt(r, best))) for r in explored}
        slower = [r for r in explored if explored[r] > limits[r]]
        low = max((r for r in slower if r < best), default=0.0)
        high = min((r for r in slower if r > best), default=1.0)
        inside = [r for r in useful if low < r < high and r not in explored]
        meet = _knee([(r, seconds, self._count(r)) for r, seconds in explored.items() if r])
        near = [r for r in inside if meet is not None and abs(r - meet) <= self.step / 2]
        if near:
            return near[:1]
        marks = sorted({low, high, *(r for r in explored if low < r < high)})
        gaps = [[r for r in inside if a < r < b] for a, b in pairwise(marks) if b - a > 3.5 * FINE_STEP]
        widest = max(gaps, key=len, default=[])
        return widest[len(widest) // 2 :][:1]

    def _contested(self) -> list[float]:
        """Ratios whose place in the answer the spread leaves open, or that it rests on with few samples."""
        times = self._explored()
        chosen, fastest = self._smallest_fast(times)
        rests_on = times if self._gridded else {0.0, chosen, fastest}
        short = [r for r in rests_on if self._count(r) < self.repeats]
        if short:
            return sorted(short)
        limit = times[fastest] * (1 + self.tolerance)
        # Below the fastest: inside the tolerance or not? Above: would it move the tolerance?
        disputed = {r for r in times if r < fastest and abs(times[r] / limit - 1) < self._doubt(r, fastest)}
        disputed |= {
            r for r in times if r > fastest and times[r] / times[fastest] - 1 < self._doubt(r, fastest)
        }
        disputed |= {fastest} if disputed else set()
        if chosen and self._ties_with_stock(chosen, times):
            disputed |= {0.0, chosen}
        return sorted(r for r in disputed if self._count(r) < _MOST_REPEATS * self.repeats)

    def _smallest_fast(self, times: dict[float, float]) -> tuple[float, float]:
        """The smallest ratio within the tolerance of the fastest, and the fastest."""
        fastest = min(times, key=times.__getitem__)
        limit = times[fastest] * (1 + self.tolerance)
        return min(r for r, seconds in times.items() if seconds <= limit), fastest

    def _ties_with_stock(self, ratio: float, times: dict[float, float]) -> bool:
        return times[0.0] / times[ratio] - 1 < 2 * self._doubt(0.0, ratio)


_Point = tuple[float, float, int]  # ratio, seconds, samples


def _knee(points: Sequence[_Point]) -> float | None:
    """The ratio at which a falling and a rising line through the points meet, None where none do.

    The current stream is the critical path along the falling line, the CPU along the rising one. Only a
    guide to where to look: what is answered was timed.
    """
    meetings = []
    for at in range(2, len(points) - 1):
        falling, rising = _line(points[:at]), _line(points[at:])
        if falling[1] < 0 < rising[1]:
            meet = (falling[0] - rising[0]) / (rising[1] - falling[1])
            if points[at - 1][0] <= meet <= points[at][0]:
                meetings.append((falling[2] + rising[2], meet))
    return min(meetings)[1] if meetings else None


def _line(points: Sequence[_Point]) -> tuple[float, float, float]:
    """Offset, slope and squared error of least squares through points weighted by their samples."""
    total = sum(n for _, _, n in points)
    x_mean = sum(n * x for x, _, n in points) / total
    y_mean = sum(n * y for _, y, n in points) / total
    xx = sum(n * (x - x_mean) ** 2 for x, _, n in points)
    slope = sum(n * (x - x_mean) * (y - y_mean) for x, y, n in points) / xx
    offset = y_mean - slope * x_mean
    return offset, slope, sum(n * (y - offset - slope * x) ** 2 for x, y, n in points)


# --- arguments --------------------------------------------------------------------------------------------


def _require_int(name: str, value: object, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r}: use a whole number of at least {least}")


def _require_number(name: str, value: object, least: float, most: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not (math.isfinite(value) and least <= value <= most):  # type: ignore[arg-type, operator]
        raise ValueError(f"{name} is {value!r}: use a finite number from {least} to {most}")


def _require_solo_rows(solo_rows: tuple[int, int]) -> None:
    for rows in solo_rows:
        _require_int("solo_rows", rows, 1)
    if len(solo_rows) != 2 or not solo_rows[0] < solo_rows[1]:
        raise ValueError(f"solo_rows is {solo_rows!r}: use two sizes, the smaller first")
