"""Integration: one site's plan, its learning search and its gate, and what the next call is to do.

Without a table entry a site is stock while the calibrator's own search runs on the calls that come by; then a
gate watches over what was found. Nothing here computes or times: `forwards` does, and tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from .gate import Gate
from .plans import DENSE, SPLIT, STOCK, Plan
from .ratios import RatioSearch
from .search import Found, SiteSearch, Trial, Way
from .split import row_multiple

LEARNING_PROMPTS = 2
"""Prompts after which learning ends, if by then every ratio that matters was timed."""
LEARNING_SHARE = 0.10
"""What learning may cost, of the time that stock takes for the same calls."""


@dataclass(frozen=True)
class Job:
    """What one call is to do.

    `arm` is stock, dense or split (`ratio` of the rows on the CPU, in `form` and `cpu_dtype`); `solo` rows of
    the CPU part are timed alone before the call; `timed` asks for `SiteControl.record`.
    """

    arm: str
    ratio: float = 0.0
    timed: bool = False
    solo: int = 0
    form: str = DENSE
    cpu_dtype: str = "native"
    trial: Trial | None = None


@dataclass(frozen=True)
class Arms:
    """The arms of a site besides stock: the ways to split, the likeliest first, and whether it has a dense
    arm; with what their boundaries cost.
    """

    ways: Sequence[Way]
    dense: bool = False
    boundary: float = 0.0
    waits: Callable[[str | None], int] = lambda form: 1


class Learning:
    """The calibrator's search on live calls, within a budget of the time that they would take anyway."""

    def __init__(self, rows: int, max_ratio: float, arms: Arms) -> None:
        def make() -> RatioSearch:
            return RatioSearch(rows=rows, max_ratio=max_ratio, multiple=row_multiple(rows), repeats=3)

        self.search = SiteSearch(
            arms.ways, dense=arms.dense, boundary_seconds=arms.boundary, waits=arms.waits, make=make
        )
        self.rows, self.boundary = rows, arms.boundary
        self.spent = 0.0
        self.prompts = 0
        self._calls = 0
        self._solo_row = 0.0
        self._first: int | None = None

    def next(self, layer: int) -> Trial | None:
        """What to time in this call of `layer`, if the budget allows."""
        self._calls += 1
        self._first = layer if self._first is None else self._first
        self.prompts += layer == self._first
        trial, base = self.search.next(), self.search.base_seconds()
        # Before anything was timed a first look is free: it is stock's own call.
        if trial is None or base is None:
            return trial
        cost = self._cost(trial, self._expected(trial))
        return trial if self.spent + cost <= LEARNING_SHARE * self._calls * base else None

    def tell(self, trial: Trial, seconds: float, rows: int) -> None:
        solo = trial.probe.kind == "solo"
        scaled = seconds if solo else seconds * self.rows / rows
        self.search.tell(trial, scaled)
        self.spent += self._cost(trial, scaled)
        if solo:
            self._solo_row = scaled / trial.probe.cpu_rows

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

    def _cost(self, trial: Trial, seconds: float) -> float:
        """What a trial costs: the stopwatch's round trip, and what `seconds` exceed an untimed call."""
        if trial.probe.kind == "solo":
            return self.boundary + seconds
        base = self.search.base_seconds() or seconds
        if trial.arm == self.search.base:
            return self.boundary
        return self.boundary + max(0.0, seconds + self.boundary - base)

    def _expected(self, trial: Trial) -> float:
        """Seconds of a trial; of the first of the CPU alone nothing is known, it is what tells."""
        known = self.search.expected_seconds(trial)
        # Of more rows at most so much: the fewer there are, the more each of them costs.
        return self._solo_row * trial.probe.cpu_rows if known is None else known


class SiteControl:
    """The plan of one site and whoever decides on it; methods may be called from any thread.

    Args:
        name: of the site, for the log.
        plan: the plan before anything was timed here.
        policy: of the gate; `off` keeps the plan as it is.
        dense: whether the site has a dense arm.
        learn: makes the search, given a call's rows; None where there is nothing to learn.
        per_row: seconds a row of arms, if a table knows them.
        learned: told the answer of the search, once.
    """

    def __init__(
        self,
        name: str,
        plan: Plan,
        policy: str,
        *,
        dense: bool = False,
        learn: Callable[[int], Learning] | None = None,
        per_row: Mapping[str, float] | None = None,
        learned: Callable[[Found, int], None] = lambda found, rows: None,
    ) -> None:
        self.name = name
        self.plan, self._policy, self._learn, self._learned = plan, policy, learn, learned
        self._dense = dense
        self._lock = threading.Lock()
        self._learning: Learning | None = None
        self._gate: Gate | None = None
        self._meanwhile = Job(STOCK)
        self._stood_down = False
        self._since, self._arm = _now(), STOCK if learn is not None else plan.arm
        self._events: list[str] = []
        self._learning_spent = 0.0
        if policy != "off" and learn is None and plan.arm != STOCK:
            self._watch(per_row or {})

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
                return self._job(self.plan.arm)
            decision = self._gate.choose(fits, pressure, timeable)
            self._note(self._gate.arm if decision.timed else decision.arm)
            return self._job(decision.arm, timed=decision.timed)

    def record(self, job: Job, seconds: float, rows: int, overhead: float, unclean: str | None) -> None:
        """The time of a job that was to be timed, of the arm (or the solo part) alone.

        Args:
            seconds: of the arm as an untimed call would take it.
            overhead: seconds that timing added on top.
            unclean: why the time does not count, None where it does.
        """
        with self._lock:
            if job.trial is not None:
                if self._learning is not None and unclean is None:
                    self._learning.tell(job.trial, seconds, rows)
                return
            if self._gate is not None:
                self._gate.record(job.arm, seconds, rows, unclean is None, unclean, overhead)

    def failed(self, job: Job) -> None:
        """A job raised: while learning, the arm or the way to split that it tried is not tried again."""
        with self._lock:
            if self._learning is not None and job.trial is not None and job.trial.arm != STOCK:
                self._learning.search.drop()

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
            now = self._job(self.plan.arm if gate is None else gate["arm"])
            now = now if self._learn is None else self._meanwhile
            return {
                "arm": now.arm,
                "ratio": now.ratio,
                "form": now.form if now.arm == SPLIT else None,
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
        trial = learning.next(layer) if timeable and not pressure else None
        if learning.finished:
            self._finish(learning)
            return self._job(self.plan.arm)
        if trial is None:
            return self._do_meanwhile(learning, pressure)
        if trial.way is None:
            return Job(trial.arm, timed=True, trial=trial)
        way, probe = trial.way, trial.probe
        if probe.kind == "solo":
            base = learning.search.base
            return Job(base, 0.0, True, probe.cpu_rows, way.form, way.cpu_dtype, trial)
        return Job(SPLIT, probe.ratio, True, 0, way.form, way.cpu_dtype, trial)

    def _job(self, arm: str, *, timed: bool = False) -> Job:
        """What the plan says for an arm."""
        ratio = self.plan.ratio if arm == SPLIT else 0.0
        return Job(arm, ratio, timed, form=self.plan.form, cpu_dtype=self.plan.cpu_dtype)

    def _do_meanwhile(self, learning: Learning, pressure: bool) -> Job:
        """The faster of stock and dense, or after the learning prompts the best so far.

        Under pressure nothing that takes memory.
        """
        search = learning.search
        self._meanwhile = Job(STOCK if pressure else search.base)
        if learning.prompts > LEARNING_PROMPTS and not pressure:
            best = search.best_so_far()
            self._meanwhile = Job(
                best.arm, best.choice.ratio, form=best.way.form, cpu_dtype=best.way.cpu_dtype
            )
        self._note(self._meanwhile.arm)
        return self._meanwhile

    def _finish(self, learning: Learning) -> None:
        found = learning.search.best_so_far()
        choice = found.choice
        self._learn, self._learning, self._learning_spent = None, None, learning.spent
        why = f"learned from {choice.samples} calls: {choice.reason}"
        self.plan = Plan(found.arm, choice.ratio, found.way.cpu_dtype, why, found.way.form)
        self._note(found.arm)
        self._events.append(f"{found.arm}, CPU share {choice.ratio:.2f}, gain {choice.gain:.0%}: {why}")
        if found.arm != STOCK and choice.stock_seconds and choice.seconds:
            seconds = {STOCK: choice.stock_seconds, DENSE: found.dense_seconds, found.arm: choice.seconds}
            self._dense = found.dense_seconds is not None  # None where it raised
            self._watch({arm: each / learning.rows for arm, each in seconds.items() if each})
        if found.arm != STOCK or learning.search.finished:  # else every way to split raised
            self._learned(found, learning.rows)

    def _watch(self, per_row: Mapping[str, float]) -> None:
        arms = [STOCK, *([DENSE] if self._dense or self.plan.arm == DENSE else [])]
        self._gate = Gate([*arms, *([SPLIT] if self.plan.arm == SPLIT else [])], policy=self._policy)
        if per_row:
            self._gate.prior({arm: each for arm, each in per_row.items() if arm in self._gate.arms})
            if self._gate.arm == self.plan.arm:
                self._gate.events.clear()  # it agrees: no decision of its own
        self._note(self._gate.arm)

    def _note(self, arm: str) -> None:
        if arm != self._arm:
            self._arm, self._since = arm, _now()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
