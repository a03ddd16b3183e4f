"""The no-regression gate (paper, Sections 4 and 5.5): which arm a site runs, and which calls are timed.

Policy only: no MLX, no clock, no files, no log. The caller says what the machine is like and how long a call
took; the gate answers with an arm and keeps its reasons as lines of text in `Gate.events`.

How it decides
    *Probation* times the arms in turn, four samples each, and picks by median; the baseline wins within the
    hysteresis. An arm whose first clean sample is beyond 1.5x the best is dropped on the spot. While two
    standard errors cannot tell the two best apart, probation goes on for those two, to three times its
    length.
    *Tracking* keeps an exponential moving average of seconds per row for each arm.
    *Switching* needs a *duel*. It opens when the averages differ by more than max(hysteresis, 3 standard
    errors), or when an arm has moved. The two arms are timed again in turn, and the fresh samples must pass
    the same threshold in two consecutive rounds. Fresh and interleaved, because the average of old probes
    says nothing once the whole machine has slowed down.

Which samples count
    Not those the caller calls unclean (first touch of a weight, a wait on a lock, a trace), none taken under
    memory pressure, none of an arm just swapped in where the working sets do not fit together: it measures
    the reload. The outlier rule: a sample further from its arm's average than max(10 %, 2.5 standard
    deviations) is *held*. If the arm's next clean sample agrees (same side, within twice that band), the arm
    has *moved* and its average restarts from the two; otherwise the held one was an outlier and is dropped.
    Outliers still widen the noise estimate, clipped at the band, so that a machine that turns noisy widens
    the band too.

How often `auto` looks
    The active arm getting slower shows in its own time: it is timed every 20 calls, a slow sample asks for
    another at once, and two open a duel. An *inactive* arm getting faster shows in a probe only. A change is
    to be followed within 50 calls; a promising probe is repeated at once and a duel takes six calls or a few
    more; so near arms need a probe every 40 calls at least. A probe costs `slower - 1 + timing` calls, and
    the interval is that cost over 0.6 %: 20 calls for an equal arm (never fewer), 40 for one 1.24x slower,
    50 for 1.3x, 150 for 1.9x. What is 1.3x away or more is not made the best by a step of 30 %, so it can
    wait. Timing the active arm may cost 0.25 %. Duels are paid from the rest: every call earns 1 % of a
    call, all timing spends it, and in debt nothing is probed and no duel opens. So the excess stays under
    one per cent and a few calls, whatever the times do. Where timing costs as much as the call, the same
    shares hold and changes are followed later. The caller has to tell that cost (`overhead`): untold, two
    arms are each timed every 20 calls, whatever that costs.

Where the working sets do not fit together, or nobody knows, probing evicts what the active arm needs
(Section 5.5). There `auto` does what `lock` does: no scheduled probes, a duel only on drift of the active
arm; and probation and duels time each arm in runs, the first call of which does not count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Real
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

POLICIES = ("auto", "periodic", "lock", "off")

EARN = 0.01  # calls of credit that each call earns: the bound on the excess
CREDIT = 6.0  # calls of credit that may be saved up: a few failed duels, or probes that hit an outlier
PROBE_SHARE = 0.006  # calls of cost a call, for scheduled probes of all inactive arms together
ACTIVE_SHARE = 0.0025  # calls of cost a call, for timing the active arm
SECOND_LOOK_SHARE = 0.05  # the same, for one early look at an arm shelved on one or two samples
SHORTEST = 20  # calls between two looks at one arm
PERIOD = 10  # the paper's re-probe interval

PROBATION = 4  # samples an arm
STRETCH = 3  # probation may grow to this many times its length
DUEL = 24  # rounds at most
RUN = 2  # samples kept of each run where a change of arm evicts
DROP = 1.5
ERRORS = 3.0  # standard errors that a switch needs
MEMORY = 0.1  # weight of the newest sample in the moving average
BAND = 0.10
BAND_SIGMAS = 2.5
PRIOR_BAND = 0.25  # a calibrated time is of another process and another day
FIRST_SPREAD = 0.04  # relative noise assumed before any was seen, worth this many samples:
FIRST_SEEN = 4
LONGEST_SEEN = 40

_NEVER = 1 << 62
_MEDIAN_ERROR = 1.25  # standard error of a median, against that of a mean


class Decision(NamedTuple):
    """What the next call is to do: run `arm`; if `timed`, time it and hand the time to `Gate.record`."""

    arm: str
    timed: bool


@dataclass(slots=True)
class _Track:
    """What is known of one arm: a moving average of seconds per row, and its noise."""

    value: float | None = None
    samples: int = 0
    factor: float = 1.0  # variance of `value`, in variances of one sample
    spread: float = FIRST_SPREAD  # relative standard deviation of one sample
    seen: int = FIRST_SEEN
    held: float | None = None
    outliers: int = 0
    doubt: bool = False  # slow on the word of one or two samples; to be looked at once more, early
    next_probe: int = _NEVER

    def error(self) -> float:
        """Relative standard error of the average; infinite while it rests on no sample."""
        return self.spread * math.sqrt(self.factor) if self.samples else math.inf

    def band(self) -> float:
        return max(BAND, BAND_SIGMAS * self.spread * math.sqrt(1 + self.factor))

    def add(self, x: float) -> str:
        """Take a clean sample: 'kept', 'held' (perhaps an outlier) or 'moved' (the average restarted)."""
        if self.value is None or not self.samples:
            moved = self.value is not None and abs(math.log(x / self.value)) > PRIOR_BAND
            self.restart([x])
            return "moved" if moved else "kept"
        off, band = math.log(x / self.value), self.band()
        self.learn(off, band)
        if abs(off) <= band:
            self.outliers += self.held is not None
            self.held = None
            self._average(x)
            return "kept"
        held = self.held
        if held is not None and off * (held - self.value) > 0 and abs(math.log(x / held)) <= 2 * band:
            self.restart([held, x])
            return "moved"
        self.outliers += held is not None
        self.held = x
        return "held"

    def restart(self, samples: list[float], centre: float | None = None) -> None:
        self.value = fmean(samples) if centre is None else centre
        self.samples = len(samples)
        self.factor = 1 / len(samples)
        self.held = None

    def learn(self, off: float, band: float) -> None:
        """Follow the noise from one relative deviation, clipped so that an outlier moves it a little only."""
        self.seen = min(self.seen + 1, LONGEST_SEEN)
        square = min(abs(off), band) ** 2 / (1 + self.factor)
        self.spread = math.sqrt(self.spread**2 + (square - self.spread**2) / self.seen)

    def _average(self, x: float) -> None:
        assert self.value is not None
        self.samples += 1
        weight = max(MEMORY, 1 / self.samples)
        self.value += weight * (x - self.value)
        self.factor = (1 - weight) ** 2 * self.factor + weight**2


@dataclass(slots=True)
class _Trial:
    """Arms timed in turn: a probation of all arms, or a duel of the active arm and a challenger."""

    samples: dict[str, list[float]]
    challenger: str | None = None  # None: a probation
    goal: int = PROBATION
    arm: str | None = None
    kept: int = 0  # clean samples in the current run of `arm`
    attempts: int = 0
    confirmed: int = 0
    dropped: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    rows: int = 0
    overhead: float = 0.0

    def next(self, run: int) -> str:
        """The arm to time: the current one until `run` samples are kept, then the one with the fewest."""
        if self.arm not in self.samples or self.kept >= run:
            others = [arm for arm in self.samples if arm != self.arm] or list(self.samples)
            self.arm = min(others, key=lambda arm: len(self.samples[arm]))
            self.kept = 0
        self.attempts += 1
        return self.arm

    def add(self, arm: str, x: float) -> None:
        self.samples[arm].append(x)
        self.kept += arm == self.arm

    def exhausted(self) -> bool:
        """Whether so many samples were unclean that waiting for more is no use."""
        rounds = DUEL if self.challenger else PROBATION * STRETCH
        return self.attempts > 3 * rounds * (len(self.samples) + len(self.dropped))

    def centres(self) -> dict[str, float]:
        return {arm: median(samples) for arm, samples in self.samples.items() if samples}

    def is_hopeless(self, arm: str, *before: float) -> bool:
        """Whether most samples of `arm`, and of `before`, are beyond 1.5x the best of the others."""
        others = [median(samples) for name, samples in self.samples.items() if name != arm and samples]
        return bool(others) and median_low([*self.samples[arm], *before]) > DROP * min(others)


class Gate:
    """Decide, call by call, which arm a site runs: never slower than stock by more than the probes cost.

    Call `choose` before every call of the site, and `record` after it where the decision says `timed`. An
    untimed call needs nothing more, so it can stay lazy. Not thread-safe: the caller holds a lock around each
    method; the decision and its record need not be under one hold.

    Args:
        arms: names of the ways to compute the site, one of which is the baseline.
        policy: one of
            `auto`: probe while the arms' working sets fit in free memory together, otherwise as `lock`;
            `periodic`: re-probe each inactive arm every 10th call, switch on the averages: the paper's;
            `lock`: probation, then no scheduled probes; a duel on drift of the active arm;
            `off`: time nothing; run the arm that `prior` found best, or the baseline.
        hysteresis: relative gain below which arms count as equal, in [0, 1).
        baseline: the arm that is stock.

    Raises:
        ValueError: for arms, a policy, a hysteresis or a baseline outside what is allowed.

    Attributes:
        arm: the active arm.
        events: one line of text for each decision, for the caller to drain and log; the newest 64 are kept.
    """

    def __init__(
        self,
        arms: Iterable[str],
        *,
        policy: str = "auto",
        hysteresis: float = 0.03,
        baseline: str = "stock",
    ) -> None:
        names = tuple(arms)
        _check_arms(names, baseline)
        if policy not in POLICIES:
            raise ValueError(f"policy is {policy!r}; it must be one of {', '.join(POLICIES)}")
        self.arms, self.policy, self.baseline = names, policy, baseline
        self.hysteresis = _number("hysteresis", hysteresis)
        if not 0 <= self.hysteresis < 1:
            raise ValueError(f"hysteresis is {hysteresis!r}; it must be in [0, 1)")
        self.why, self.since = "nothing known yet", 0
        self.calls = self.probes = self.switches = 0
        self.probe_excess = 0.0
        self.rejected: dict[str, int] = {}
        self.events: deque[str] = deque(maxlen=64)
        self._tracks = {name: _Track() for name in names}
        self._timed = {name: Decision(name, True) for name in names}
        self._trial = _Trial({name: [] for name in names}) if len(names) > 1 and policy != "off" else None
        self._fits: bool | None = None
        self._pressed = self._stood_down = False
        self._again: str | None = None  # the arm of a held sample that is worth a second look at once
        self._news: str | None = None  # an arm that moved so that another may be the best
        self._last = ""  # the arm of the last call
        self._evicted: set[str] = set()
        self._confirmed = 0  # `periodic` only
        self._timing = 0.0  # what timing adds to a call, in calls
        self._credit, self._credit_call = CREDIT, 0
        self._next_active = 0
        self._due = 0  # up to this call there is nothing to look at
        self._activate(baseline)

    @property
    def learning(self) -> bool:
        """Whether probation is still going on."""
        return self._trial is not None and self._trial.challenger is None

    def choose(self, fits: bool | None = None, pressure: bool = False, timeable: bool = True) -> Decision:
        """Decide the next call.

        Args:
            fits: whether the working sets of all arms fit in free memory together; None if that is not known.
            pressure: whether the system reports memory pressure: nothing is timed and the plan does not move.
            timeable: False for a call that cannot give a clean sample (first touch of a weight, a trace).
        """
        self.calls += 1
        if self.calls < self._due and fits is self._fits and not pressure:
            return self._untimed
        return self._look(fits, pressure, timeable)

    def record(
        self,
        arm: str,
        seconds: float,
        rows: int,
        clean: bool = True,
        reason: str | None = None,
        overhead: float = 0.0,
    ) -> None:
        """Take the time of a call that `choose` wanted timed.

        Args:
            arm: the arm that ran.
            seconds: what the arm costs in an untimed call too: split with its boundary, stock without the
                boundary that only timing needed.
            rows: rows of the call, at least 1.
            clean: False if the time is not the arm's own; `reason` then says why.
            overhead: seconds that timing added to this call and `seconds` leaves out.

        Raises:
            ValueError: for an unknown arm, or times or rows outside what is allowed.
        """
        self._check_arm(arm)
        _check_positive("seconds", seconds)
        if _number("rows", rows) != int(rows) or rows < 1:
            raise ValueError(f"rows is {rows!r}; it must be a whole number of at least 1")
        if _number("overhead", overhead) < 0:
            raise ValueError(f"overhead is {overhead!r}; it must be finite and not negative")
        evicted = arm in self._evicted
        self._evicted.discard(arm)
        self._due = 0
        if self._pressed or self.policy == "off":
            clean, reason = False, "pressure" if self._pressed else "policy off"
        else:
            self._charge(arm, seconds, rows, overhead, evicted)
        if not clean or evicted:
            why = (reason or "unclean") if not clean else "swapped in"
            self.rejected[why] = self.rejected.get(why, 0) + 1
        elif self._trial is not None and arm in self._trial.samples:
            self._trial_sample(arm, seconds / rows)
        elif self._trial is None:
            self._track_sample(arm, seconds / rows)

    def prior(self, estimates: Mapping[str, float]) -> None:
        """Seed the estimates, in seconds per row by arm, from a calibration table.

        If they cover every arm, the best becomes active at once (the baseline within the hysteresis), with
        no probation. The first clean sample of an arm replaces its prior; one that contradicts it by more
        than 25 % counts as a move of the arm.

        Raises:
            ValueError: for an unknown arm, or an estimate that is not finite and above 0.
        """
        for arm, value in estimates.items():
            self._check_arm(arm)
            _check_positive(f"the estimate of {arm!r}", value)
        for arm, value in estimates.items():
            self._tracks[arm] = _Track(value=float(value))
        values = {arm: track.value for arm, track in self._tracks.items() if track.value is not None}
        if len(values) == len(self.arms):
            self._trial = None
            arm = self._pick(values)
            self._adopt(arm, f"calibrated: {self._compare(arm, values)}")
            self._next_active = self.calls + 2  # the first call may find nothing resident

    def stand_down(self, why: str) -> None:
        """Pressure lasts: run the baseline until `choose` is called without pressure."""
        if not self._stood_down:
            self._pressed = self._stood_down = True
            self._untimed, self._due = Decision(self.baseline, False), 0
            self._say(f"stood down from {self.arm} to {self.baseline}: {why}")

    def state(self) -> dict[str, Any]:
        """What the gate does and why, JSON-able. Times are in seconds, estimates in seconds per row."""
        return {
            "policy": self.policy,
            "arm": self._untimed.arm,
            "since": self.since,
            "why": self.why,
            "phase": self._phase(),
            "calls": self.calls,
            "estimates": {name: _public(track) for name, track in self._tracks.items()},
            "probes": self.probes,
            "probe_excess": self.probe_excess,
            "switches": self.switches,
            "rejected": dict(self.rejected),
        }

    def save(self) -> dict[str, Any]:
        """What was learned, as a plain JSON-able dict for `restore`."""
        return {
            "arm": self.arm,
            "since": self.since,
            "why": self.why,
            "learning": self.learning,
            "calls": self.calls,
            "probes": self.probes,
            "probe_excess": self.probe_excess,
            "switches": self.switches,
            "timing": self._timing,
            "tracks": {name: asdict(track) for name, track in self._tracks.items()},
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `save` returned; a probation that was not finished starts again.

        Raises:
            ValueError: if `saved` is of other arms, or is not what `save` returns.
        """
        try:
            tracks = {str(name): _checked(_Track(**track)) for name, track in saved["tracks"].items()}
            for name in (*tracks, saved["arm"]):
                self._check_arm(name)
            learning, arm, why = bool(saved["learning"]), str(saved["arm"]), str(saved["why"])
            counts = {key: int(saved[key]) for key in ("since", "calls", "probes", "switches")}
            excess, timing = (_number(key, saved[key]) for key in ("probe_excess", "timing"))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"saved is not what Gate.save() returns: {error!r}") from error
        for key, value in counts.items():
            setattr(self, key, value)
        self.probe_excess, self._timing, self._credit_call = excess, timing, self.calls
        self._tracks.update(tracks)
        if not learning:
            self._trial = None
        self.why = why
        self._activate(arm)
        self._next_active = self.calls + 2  # the first call may find nothing resident

    # What the next call does.

    def _look(self, fits: bool | None, pressure: bool, timeable: bool) -> Decision:
        self._fits = None if fits is None else bool(fits)
        self._feel(bool(pressure))
        arm = None if pressure or not timeable or self.policy == "off" else self._wanted()
        decision = self._untimed if arm is None else self._timed[arm]
        if arm is not None:
            self.probes += arm != self.arm
            if not self._roomy() and arm != self._last:
                self._evicted.add(arm)
        self._last = decision.arm
        self._due = self._next_due(decision.arm)
        return decision

    def _feel(self, pressure: bool) -> None:
        """Notice the beginning and the end of pressure."""
        if pressure and not self._pressed:
            self._pressed = True
            if not self.learning:
                self._trial = None
            self._say(f"memory pressure: no probes, locked on {self.arm}")
        elif self._pressed and not pressure:
            self._pressed = self._stood_down = False
            self._untimed = Decision(self.arm, False)
            self._schedule()
            self._next_active = self.calls
            self._say(f"memory pressure is over: back to {self.arm}")

    def _wanted(self) -> str | None:
        """The arm to time in this call, or None."""
        if self._trial is None:
            self._second_look()
        if self._trial is not None:
            if not self._trial.exhausted():
                return self._trial.next(1 if self._roomy() else RUN)
            self._give_up(self._trial)
        arm, self._again = self._again, None
        if arm is None or (arm != self.arm and self._balance() < 0):
            arm = self._due_probe()
        if arm is None and self.calls >= self._next_active:
            arm = self.arm
        if arm == self.arm:
            self._next_active = self.calls + self._active_interval()
        elif arm is not None:
            self._tracks[arm].next_probe = self.calls + self._interval(arm)
        return arm

    def _due_probe(self) -> str | None:
        unknown = self._tracks[self.arm].value is None  # then nobody could say what a probe costs
        if not self._probing() or unknown or (self.policy == "auto" and self._balance() < 0):
            return None
        due = [arm for arm in self._others if self._tracks[arm].next_probe <= self.calls]
        return min(due, key=lambda arm: self._tracks[arm].next_probe) if due else None

    def _second_look(self) -> None:
        """Where nothing is probed on schedule, look once more at an arm shelved on little evidence."""
        if self._probing() or self._balance() < 0:
            return
        for arm in self._others:
            track = self._tracks[arm]
            if track.doubt and track.next_probe <= self.calls:
                track.doubt = False
                self._open_duel(arm, f"a second look at {arm}")
                return

    def _next_due(self, arm: str) -> int:
        """The first call that needs more than the untimed plan."""
        if self.policy == "off" or len(self.arms) == 1:
            return _NEVER if not self._pressed else 0
        if self._pressed or self._trial is not None or self._again is not None or arm != self.arm:
            return 0
        tracks = [self._tracks[other] for other in self._others]
        looks = [track.next_probe for track in tracks if self._probing() or track.doubt]
        wait = self.calls + math.ceil(max(0.0, -self._balance()) / EARN) if self.policy != "periodic" else 0
        return min(self._next_active, max(wait, min(looks, default=_NEVER)))

    def _roomy(self) -> bool:
        """Whether a change of arm evicts nothing, as far as is known. The paper's `periodic` did not ask."""
        return self._fits is True or self.policy == "periodic"

    def _probing(self) -> bool:
        return self.policy == "periodic" or (self.policy == "auto" and self._fits is True)

    # How often, and what it costs.

    def _interval(self, arm: str) -> int:
        """Calls until the next probe of an inactive arm: what a probe costs over what probes may cost."""
        if self.policy == "periodic":
            return PERIOD
        track, value = self._tracks[arm], self._tracks[self.arm].value
        if track.value is None or value is None:
            return SHORTEST
        cost = max(0.0, track.value / value - 1) + self._timing
        share = SECOND_LOOK_SHARE if track.doubt else PROBE_SHARE / (len(self.arms) - 1)
        return max(SHORTEST, math.ceil(cost / share))

    def _active_interval(self) -> int:
        return max(SHORTEST, math.ceil(self._timing / ACTIVE_SHARE))

    def _schedule(self) -> None:
        """Set the next look at each arm, spread so that no two fall together."""
        self._next_active = self.calls + self._active_interval() // 4
        for place, arm in enumerate(self._others):
            self._tracks[arm].next_probe = self.calls + self._interval(arm) + 3 * place

    def _balance(self) -> float:
        """Credit in calls, brought up to this call."""
        self._credit = min(CREDIT, self._credit + EARN * (self.calls - self._credit_call))
        self._credit_call = self.calls
        return self._credit

    def _charge(self, arm: str, seconds: float, rows: int, overhead: float, evicted: bool) -> None:
        """Account for what a timed call cost above the active arm's estimate."""
        trial, value = self._trial, self._tracks[self.arm].value
        if trial is not None and self.learning:
            trial.seconds, trial.rows = trial.seconds + seconds, trial.rows + rows
            trial.overhead += overhead
            return
        if value is None:
            return
        usual = value * rows
        excess = overhead
        if arm != self.arm or evicted:
            excess += max(0.0, seconds - usual)
        self.probe_excess += excess
        self._timing += 0.2 * (overhead / usual - self._timing)
        if self.policy != "periodic":
            self._credit = self._balance() - excess / usual

    # What a sample changes.

    def _track_sample(self, arm: str, x: float) -> None:
        track, active = self._tracks[arm], self._tracks[self.arm]
        before = track.value
        verdict = track.add(x)
        assert track.value is not None
        if verdict != "held":
            # Two outliers in a row would shelve an inactive arm for long, so such news is checked early.
            doubt = verdict == "moved" and arm != self.arm and before is not None and track.value > before
            if doubt or track.doubt:
                track.doubt = doubt
                track.next_probe = self.calls + self._interval(arm)
        if verdict == "held":
            # Only news that could change the plan is worth another timed call at once.
            bad = arm == self.arm and x > track.value
            good = arm != self.arm and active.value is not None and x < active.value * (1 - self.hysteresis)
            self._again = arm if (bad or good) and self.policy != "periodic" else None
        elif verdict == "moved" and before is not None:
            self._say(
                f"{arm} moved from {_us(before)} to {_us(track.value)} ({track.value / before - 1:+.0%})"
            )
            if arm == self.arm or self._gain(arm) > -math.log1p(-self.hysteresis):
                self._news = arm
        self._consider()

    def _consider(self) -> None:
        """Challenge the active arm if another looks better by more than the threshold, or an arm moved."""
        active = self._tracks[self.arm]
        values = {arm: v for arm in self._others if (v := self._tracks[arm].value) is not None}
        if active.value is None or not values:
            return
        rival = min(values, key=lambda arm: values[arm])
        gain = math.log(active.value / values[rival])
        better = gain > self._threshold(active.error(), self._tracks[rival].error())
        if self.policy == "periodic":
            self._confirmed = self._confirmed + 1 if better else 0
            if self._confirmed == 2:
                self._switch(rival, self._compare(rival, {**values, self.arm: active.value}))
        elif self._balance() >= 0:
            news, self._news = self._news, None
            if better or (news and gain > -math.log(2)):  # news is not worth a duel with an arm twice as slow
                self._open_duel(rival, f"{news} moved" if news else f"looks {math.expm1(gain):.1%} faster")

    def _gain(self, arm: str) -> float:
        """How much faster `arm` looks than the active one, as a logarithm."""
        active, value = self._tracks[self.arm].value, self._tracks[arm].value
        return 0.0 if active is None or value is None else math.log(active / value)

    def _threshold(self, *errors: float) -> float:
        """The log-gain that a switch needs: the hysteresis or three standard errors, whichever is more."""
        return max(-math.log1p(-self.hysteresis), ERRORS * math.hypot(*errors))

    def _open_duel(self, challenger: str, reason: str) -> None:
        self._news = self._again = None
        self._trial = _Trial({self.arm: [], challenger: []}, challenger)
        self._say(f"duel of {challenger} against {self.arm}: {reason}")

    def _trial_sample(self, arm: str, x: float) -> None:
        trial = self._trial
        assert trial is not None
        trial.add(arm, x)
        # In a duel the challenger's average counts as a sample, lest one outlier undo what opened the duel.
        before = [v] if trial.challenger and (v := self._tracks[arm].value) is not None else []
        if arm != (self.arm if trial.challenger else self.baseline) and trial.is_hopeless(arm, *before):
            trial.dropped[arm] = trial.samples.pop(arm)
            if trial.challenger is None:
                self._say(f"dropped {arm}: {_us(x)} is beyond {DROP:g}x the best")
        if trial.challenger is None:
            self._weigh_probation(trial)
        else:
            self._weigh_duel(trial, trial.challenger)

    def _weigh_probation(self, trial: _Trial) -> None:
        """End the probation once it is long enough, or stretch it for two arms that cannot be told apart."""
        if min(len(samples) for samples in trial.samples.values()) < trial.goal:
            return
        centres = trial.centres()
        ranked = sorted(centres, key=lambda arm: self._handicapped(arm, centres[arm]))
        if len(ranked) > 1 and trial.goal < PROBATION * STRETCH:
            first, second = ranked[:2]
            gap = math.log(
                self._handicapped(second, centres[second]) / self._handicapped(first, centres[first])
            )
            if gap < 2 * _MEDIAN_ERROR * _difference_error(trial.samples[first], trial.samples[second]):
                for arm in ranked[2:]:
                    trial.dropped[arm] = trial.samples.pop(arm)
                trial.goal += RUN
                return
        self._settle(trial)

    def _handicapped(self, arm: str, value: float) -> float:
        """The baseline wins within the hysteresis."""
        return value * (1 - self.hysteresis) if arm == self.baseline else value

    def _pick(self, values: Mapping[str, float]) -> str:
        return min(values, key=lambda arm: (self._handicapped(arm, values[arm]), arm != self.baseline))

    def _settle(self, trial: _Trial) -> None:
        """End the probation with the samples there are."""
        centres = trial.centres()
        for arm, samples in {**trial.dropped, **trial.samples}.items():
            if samples:
                track = self._tracks[arm]
                track.restart(samples, median(samples))
                track.spread, track.seen = _spread(samples), FIRST_SEEN + len(samples)
                track.doubt = len(samples) == 1
        self._trial = None
        if self.baseline not in centres:
            self._adopt(self.baseline, "nothing learned: no clean sample in probation")
            return
        arm = self._pick(centres)
        self.probe_excess += trial.overhead + max(0.0, trial.seconds - centres[arm] * trial.rows)
        self._timing = trial.overhead / (centres[arm] * trial.rows)
        known = {name: track.value for name, track in self._tracks.items() if track.value is not None}
        self._adopt(arm, f"probation: {self._compare(arm, known)}")

    def _weigh_duel(self, trial: _Trial, challenger: str) -> None:
        """After each full round: confirm, give up, or go on."""
        if challenger in trial.dropped:
            self._end_duel(trial, f"{challenger} is beyond {DROP:g}x")
            return
        ours, theirs = trial.samples[self.arm], trial.samples[challenger]
        rounds = len(ours)
        if rounds != len(theirs) or rounds < 2:
            return
        # The noise is the machine's; the arm that was sampled less knows it less well.
        spread = max(self._tracks[self.arm].spread, self._tracks[challenger].spread)
        gain = math.log(_centre(ours, spread) / _centre(theirs, spread))
        error = spread * math.sqrt(2 / rounds)
        if gain > self._threshold(error):
            trial.confirmed += 1
            if trial.confirmed == 2:
                self._end_duel(trial, f"in {rounds} rounds", winner=challenger)
            return
        trial.confirmed = 0
        hopeless = rounds > 2 and gain + error < -math.log1p(-self.hysteresis)
        if hopeless or rounds >= DUEL:
            self._end_duel(trial, f"after {rounds} rounds")

    def _end_duel(self, trial: _Trial, why: str, winner: str | None = None) -> None:
        """Take over the duel's samples: fresh, and of both arms under the same conditions."""
        for arm, samples in {**trial.samples, **trial.dropped}.items():
            if len(samples) > 1:
                track = self._tracks[arm]
                centre = _centre(samples, track.spread)
                track.restart(samples, centre)
                for x in samples:
                    track.learn(math.log(x / centre), track.band())
        self._trial = None
        values = {arm: v for arm in self.arms if (v := self._tracks[arm].value) is not None}
        if winner is None:
            self._schedule()
            self._say(f"kept {self.arm} {why}: {self._compare(self.arm, values)}")
        else:
            self._switch(winner, f"{self._compare(winner, values)}, {why}")

    def _give_up(self, trial: _Trial) -> None:
        if trial.challenger is None:
            self._settle(trial)
        else:
            self._end_duel(trial, "for want of clean samples")

    def _switch(self, arm: str, why: str) -> None:
        self.switches += 1
        self._confirmed = 0
        self._adopt(arm, f"{self.arm} -> {arm}: {why}")

    def _adopt(self, arm: str, why: str) -> None:
        self.why, self.since = why, self.calls
        self._activate(arm)
        self._schedule()
        self._say(why)

    def _activate(self, arm: str) -> None:
        self.arm = arm
        self._others = [other for other in self.arms if other != arm]
        self._untimed, self._due = Decision(arm, False), 0

    # Words.

    def _phase(self) -> str:
        if self.policy == "off":
            return "off"
        if self._pressed:
            return "stood down" if self._stood_down else "locked under pressure"
        if self._trial is not None:
            return "probation" if self.learning else "duel"
        return "tracking" if self._probing() else "locked"

    def _say(self, line: str) -> None:
        self.events.append(f"call {self.calls}: {line}")

    def _compare(self, arm: str, values: Mapping[str, float]) -> str:
        """'split 12.3 us/row; stock 15.4 us/row (1.25x)', the ratios against `arm`."""
        others = [f"{name} {_us(v)} ({v / values[arm]:.2f}x)" for name, v in values.items() if name != arm]
        return "; ".join([f"{arm} {_us(values[arm])}", *others])

    def _check_arm(self, arm: str) -> None:
        if arm not in self._tracks:
            raise ValueError(f"arm is {arm!r}; it must be one of {', '.join(self.arms)}")


def _check_arms(arms: tuple[str, ...], baseline: str) -> None:
    if not all(isinstance(arm, str) and arm for arm in arms) or len(set(arms)) != len(arms):
        raise ValueError(f"arms is {arms!r}; it must be different names")
    if baseline not in arms:
        raise ValueError(f"baseline is {baseline!r}; it must be one of the arms {arms!r}")


def _number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be a finite number")
    return float(value)


def _check_positive(name: str, value: float) -> None:
    if _number(name, value) <= 0:
        raise ValueError(f"{name} is {value!r}; it must be finite and above 0")


def _checked(track: _Track) -> _Track:
    """The track, if its numbers are such as a gate saves."""
    for name in ("value", "held"):
        if getattr(track, name) is not None:
            _check_positive(name, getattr(track, name))
    for name in ("samples", "factor", "spread", "seen", "outliers", "next_probe"):
        if _number(name, getattr(track, name)) < 0:
            raise ValueError(f"{name} is {getattr(track, name)!r}; it must not be negative")
    return track


def _centre(samples: list[float], spread: float) -> float:
    """The mean of the samples near their median: as precise as a mean, and no outlier moves it."""
    middle = median(samples)
    band = max(BAND, BAND_SIGMAS * spread)
    near = [x for x in samples if abs(math.log(x / middle)) <= band]
    return fmean(near) if near else middle


def _spread(samples: list[float]) -> float:
    """Relative noise of a few samples about their median, leaning on what is usual; outliers are clipped."""
    middle, square = median(samples), FIRST_SEEN * FIRST_SPREAD**2
    for x in samples:
        square += min(abs(math.log(x / middle)), BAND_SIGMAS * FIRST_SPREAD) ** 2
    return math.sqrt(square / (FIRST_SEEN + len(samples) - 1))


def _difference_error(*arms: list[float]) -> float:
    """Relative standard error of the difference of the arms' means."""
    return math.hypot(*(_spread(samples) / math.sqrt(len(samples)) for samples in arms))


def _public(track: _Track) -> dict[str, Any]:
    error = None if track.value is None or not track.samples else track.value * track.error()
    return {
        "seconds_per_row": track.value,
        "samples": track.samples,
        "standard_error": error,
        "outliers": track.outliers,
    }


def _us(value: float) -> str:
    return f"{value * 1e6:.4g} us/row"
