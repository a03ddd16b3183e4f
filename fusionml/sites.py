"""Integration: one site's plan, its learning search and its gate, and what the next call is to do.

Without a table entry a site is stock while the calibrator's own search runs on the calls that come by; then a
gate watches over what was found. Nothing here computes or times: `forwards` does, and tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from .gate import Gate
from .plans import SPLIT, STOCK, Plan
from .ratios import STOCK as STOCK_PROBE
from .ratios import Choice, Probe, RatioSearch
from .split import row_multiple

LEARNING_PROMPTS = 2
"""Prompts after which learning ends, if by then every ratio that matters was timed."""
LEARNING_SHARE = 0.10
"""What learning may cost, of the time that stock takes for the same calls."""


@dataclass(frozen=True)
class Job:
    """What one call is to do.

    `arm` is stock or split (`ratio` of the rows on the CPU); `solo` rows of the CPU part are timed alone
    before the call; `timed` asks for `SiteControl.record`.
    """

    arm: str
    ratio: float = 0.0
    timed: bool = False
    solo: int = 0
    probe: Probe | None = None


class Learning:
    """The calibrator's search on live calls, within a budget of stock's own time."""

    def __init__(self, rows: int, max_ratio: float, boundary: float) -> None:
        self.search = RatioSearch(
            rows=rows,
            max_ratio=max_ratio,
            multiple=row_multiple(rows),
            boundary_seconds=boundary,
            repeats=3,
        )
        self.rows, self.boundary = rows, boundary
        self.spent = 0.0
        self.prompts = 0
        self._calls = 0
        self._solo_row = 0.0
        self._first: int | None = None

    def next(self, layer: int) -> Probe | None:
        """What to time in this call of `layer`, if the budget allows."""
        self._calls += 1
        self._first = layer if self._first is None else self._first
        self.prompts += layer == self._first
        probe, stock = self.search.next(), self._stock()
        # Before anything was timed a first look is free: it is stock's own call.
        if probe is None or stock is None:
            return probe
        cost = self._cost(probe, self._expected(probe))
        return probe if self.spent + cost <= LEARNING_SHARE * self._calls * stock else None

    def tell(self, probe: Probe, seconds: float, rows: int) -> None:
        scaled = seconds if probe.kind == "solo" else seconds * self.rows / rows
        self.search.tell(probe, scaled)
        self.spent += self._cost(probe, scaled)
        if probe.kind == "solo":
            self._solo_row = scaled / probe.cpu_rows

    @property
    def finished(self) -> bool:
        """Whether there is nothing left to ask."""
        return self.search.next() is None

    def prompts_left(self) -> int:
        """At most so many prompts until the answer stands."""
        if self.finished:
            return 0
        if not self.prompts:
            return LEARNING_PROMPTS
        each = max(1, self._calls // self.prompts)
        return max(1, LEARNING_PROMPTS - self.prompts, -(-self.search.samples_left // each))

    def _cost(self, probe: Probe, seconds: float) -> float:
        """What timing `probe` costs over stock: the stopwatch's round trip, and what `seconds` exceed."""
        if probe.kind == "split":
            seconds = max(0.0, seconds + self.boundary - (self._stock() or seconds))
        return self.boundary + (0.0 if probe.kind == "stock" else seconds)

    def _expected(self, probe: Probe) -> float:
        """Seconds of a probe; of the first of the CPU alone nothing is known, it is what tells."""
        known = self.search.expected_seconds(probe)
        # Of more rows at most so much: the fewer there are, the more each of them costs.
        return self._solo_row * probe.cpu_rows if known is None else known

    def _stock(self) -> float | None:
        """Stock's time for `rows` rows: a median, so that one outlier opens no purse."""
        return self.search.expected_seconds(STOCK_PROBE)


class SiteControl:
    """The plan of one site and whoever decides on it; methods may be called from any thread.

    Args:
        name: of the site, for the log.
        plan: the plan before anything was timed here.
        policy: of the gate; `off` keeps the plan as it is.
        learn: makes the search, given a call's rows; None where there is nothing to learn.
        per_row: seconds a row of (stock, split), if a table knows them.
        learned: told the answer of the search, once.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        policy: str,
        *,
        learn: Callable[[int], Learning] | None = None,
        per_row: tuple[float, float] | None = None,
        learned: Callable[[Choice, int], None] = lambda choice, rows: None,
    ) -> None:
        self.name = name
        self.plan, self._policy, self._learn, self._learned = plan, policy, learn, learned
        self._lock = threading.Lock()
        self._learning: Learning | None = None
        self._gate: Gate | None = None
        self._meanwhile = Job(STOCK)
        self._stood_down = False
        self._since, self._arm = _now(), STOCK if learn is not None else plan.arm
        self._events: list[str] = []
        self._learning_spent = 0.0
        if policy != "off" and learn is None and plan.arm == SPLIT:
            self._watch(per_row)

    def choose(self, layer: int, rows: int, fits: bool | None, pressure: bool, timeable: bool) -> Job:
        """What the next call does.

        Args:
            layer: identity of the layer that is called, to tell one prompt from the next.
            rows: rows of the call.
            fits: whether the working sets of all arms fit in memory together.
            pressure: whether memory is short: nothing is timed and the plan does not move.
            timeable: False where a clean time cannot be had.
        """
        with self._lock:
            self._stood_down = self._stood_down and pressure
            if self._learn is not None:
                return self._learning_job(layer, rows, pressure, timeable)
            if self._gate is None:
                return Job(self.plan.arm, self.plan.ratio)
            decision = self._gate.choose(fits, pressure, timeable)
            self._note(self._gate.arm if decision.timed else decision.arm)
            ratio = self.plan.ratio if decision.arm == SPLIT else 0.0
            return Job(decision.arm, ratio, decision.timed)

    def record(self, job: Job, seconds: float, rows: int, overhead: float, unclean: str | None) -> None:
        """The time of a job that was to be timed, of the arm (or the solo part) alone.

        Args:
            seconds: of the arm as an untimed call would take it.
            overhead: seconds that timing added on top.
            unclean: why the time does not count, None where it does.
        """
        with self._lock:
            if job.probe is not None:
                if self._learning is not None and unclean is None:
                    self._learning.tell(job.probe, seconds, rows)
                return
            if self._gate is not None:
                self._gate.record(job.arm, seconds, rows, unclean is None, unclean, overhead)

    def stand_down(self, why: str) -> None:
        """Memory pressure lasts: stock until it is over."""
        with self._lock:
            if self._gate is not None:
                self._stood_down = True
                self._gate.stand_down(why)

    def drain(self) -> list[str]:
        """Decisions since the last time, one line each."""
        with self._lock:
            lines, self._events = self._events, []
            while self._gate is not None and self._gate.events:
                lines.append(self._gate.events.popleft())
            return lines

    @property
    def standing(self) -> bool:
        """Whether this site is stock and nothing will change that."""
        return self._gate is None and self._learn is None and self.plan.arm == STOCK

    @property
    def learning(self) -> bool:
        """Whether what this site does is still being found out."""
        return self._learn is not None or (self._gate is not None and self._gate.learning)

    @property
    def probe_seconds(self) -> float:
        """What finding out has cost so far, over doing without."""
        with self._lock:
            spent = self._learning_spent if self._learning is None else self._learning.spent
            return spent + (self._gate.probe_excess if self._gate is not None else 0.0)

    def state(self) -> dict[str, Any]:
        """For people and JSON: arm, ratio, why, since when, and the gate's estimates."""
        with self._lock:
            gate = None if self._gate is None else self._gate.state()
            now = Job(self.plan.arm if gate is None else gate["arm"], self.plan.ratio)
            now = now if self._learn is None else self._meanwhile
            return {
                "arm": now.arm,
                "ratio": now.ratio if now.arm == SPLIT else 0.0,
                "cpu_dtype": self.plan.cpu_dtype,
                "why": self._why() if gate is None else f"{self.plan.why}; gate: {gate['why']}",
                "since": self._since,
                "gate": gate,
            }

    def stock_reason(self) -> str:
        """Why a call of this site is stock now, in words that many sites share."""
        if self._stood_down:
            return "stood down: memory is short"
        if self.learning:
            return "still learning what is fastest"
        return self.plan.why if self._gate is None else "the gate found stock to be as fast"

    def _why(self) -> str:
        if self._learn is None:
            return self.plan.why
        left = LEARNING_PROMPTS if self._learning is None else self._learning.prompts_left()
        return f"learning, {left} prompts left"

    def _learning_job(self, layer: int, rows: int, pressure: bool, timeable: bool) -> Job:
        assert self._learn is not None
        if self._learning is None:
            self._learning = self._learn(rows)
            self._events.append(f"learning on live prompts, at most {LEARNING_SHARE:.0%} of stock's time")
        learning = self._learning
        probe = learning.next(layer) if timeable and not pressure else None
        if learning.finished:
            self._finish(learning)
            return Job(self.plan.arm, self.plan.ratio)
        if probe is None:
            return self._do_meanwhile(learning, pressure)
        if probe.kind == "solo":
            return Job(STOCK, timed=True, solo=probe.cpu_rows, probe=probe)
        return Job(SPLIT if probe.ratio else STOCK, probe.ratio, True, probe=probe)

    def _do_meanwhile(self, learning: Learning, pressure: bool) -> Job:
        """Stock, or after the learning prompts the best so far; under pressure nothing that takes memory."""
        late = learning.prompts > LEARNING_PROMPTS and not pressure
        ratio = learning.search.best_so_far().ratio if late else 0.0
        self._meanwhile = Job(SPLIT if ratio > 0 else STOCK, ratio)
        self._note(self._meanwhile.arm)
        return self._meanwhile

    def _finish(self, learning: Learning) -> None:
        choice = learning.search.result()
        self._learn, self._learning, self._learning_spent = None, None, learning.spent
        arm = SPLIT if choice.ratio > 0 else STOCK
        why = f"learned from {choice.samples} calls: {choice.reason}"
        self.plan = Plan(arm, choice.ratio, self.plan.cpu_dtype, why)
        self._note(arm)
        self._events.append(f"{arm}, CPU share {choice.ratio:.2f}, gain {choice.gain:.0%}: {why}")
        if arm == SPLIT and choice.stock_seconds and choice.seconds:
            self._watch((choice.stock_seconds / learning.rows, choice.seconds / learning.rows))
        self._learned(choice, learning.rows)

    def _watch(self, per_row: tuple[float, float] | None) -> None:
        self._gate = Gate((STOCK, SPLIT), policy=self._policy)
        if per_row is not None:
            self._gate.prior(dict(zip((STOCK, SPLIT), per_row, strict=True)))
            if self._gate.arm == self.plan.arm:
                self._gate.events.clear()  # it agrees: no decision of its own
        self._note(self._gate.arm)

    def _note(self, arm: str) -> None:
        if arm != self._arm:
            self._arm, self._since = arm, _now()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
