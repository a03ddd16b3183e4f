"""A site's control on simulated units: learning within its budget, the gate after it, and what it says."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pairs import EQUAL_STREAMS, M1, M5_LIKE, PAPER_CHIPS, THOUSAND, Pair, Unit

from fusionml import sites
from fusionml.plans import SPLIT, STOCK, Plan
from fusionml.ratios import Choice, Probe
from fusionml.search import Trial, Way
from fusionml.sites import LEARNING_SHARE, Arms, Job, Learning, SiteControl

LAYERS = 24
ROWS = 2048
FORCED = Plan(SPLIT, 0.5, "native", "ratio=0.5 was given")
DEFAULT = Plan(SPLIT, 0.3, "native", "built-in default for metal")


@dataclass
class World:
    """A simulated machine that runs what a control says and tells it the times, as the patch does."""

    pair: Pair
    control: SiteControl
    rows: int = ROWS
    fits: bool | None = True
    pressure: bool = False
    total: float = 0.0
    stock: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    split_factor: float = 1.0
    """What a split takes, over what the pair says: conditions change."""

    def call(self, layer: int, *, rows: int | None = None, unclean: str | None = None) -> Job:
        rows = rows or self.rows
        job = self.control.choose(layer, rows, self.fits, self.pressure, unclean is None)
        self.jobs.append(job)
        took = self._seconds(job, rows)
        self.total += took
        self.stock += self.pair.stock(rows)
        if job.timed:
            # A stopwatch around an evaluation costs a round trip, a solo part comes on top of the call.
            self.total += self.pair.boundary + (self.pair.stock(rows) if job.solo else 0.0)
            charge = self.pair.boundary if job.arm == SPLIT and job.trial is None else 0.0
            seconds = took if job.arm == STOCK or job.solo else took - self.pair.boundary
            self.control.record(job, seconds + charge, rows, self.pair.boundary, unclean)
        return job

    def _seconds(self, job: Job, rows: int) -> float:
        if job.solo:
            return self.pair.cpu.alone(job.solo)
        if job.arm == STOCK:
            return self.pair.stock(rows)
        return self.split_factor * self.pair.split(job.ratio, rows) + self.pair.boundary

    def prompts(self, count: int, layers: int = LAYERS) -> None:
        for _ in range(count):
            for layer in range(layers):
                self.call(layer)

    @property
    def excess(self) -> float:
        """What was spent over always-stock, as a share of it."""
        return self.total / self.stock - 1

    @property
    def arm(self) -> str:
        return str(self.control.state()["arm"])


def arms(boundary: float) -> Arms:
    """One way to split."""
    return Arms([Way("dense", "native")], boundary=boundary)


def learner(pair: Pair, learned: Any = lambda found, rows: None, **options: Any) -> SiteControl:
    return SiteControl(
        "a site",
        DEFAULT,
        options.pop("policy", "auto"),
        learn=lambda rows: Learning(rows, options.pop("max_ratio", 0.5), arms(pair.boundary)),
        learned=learned,
    )


def learning_world(pair: Pair, **options: Any) -> World:
    return World(pair, learner(pair, **options))


def best(pair: Pair, rows: int = ROWS) -> float:
    return min(pair.cost(k / 64, rows) for k in range(33))


# --- learning


@pytest.mark.parametrize("chip", [*PAPER_CHIPS, EQUAL_STREAMS, M5_LIKE], ids=lambda pair: pair.name)
def test_learning_ends_on_the_right_arm_and_pays_for_itself(chip: Pair) -> None:
    world = learning_world(chip)
    for _ in range(200):
        world.prompts(1)
        if not world.control.learning:
            break
    assert not world.control.learning, "still learning after 200 prompts"
    state = world.control.state()
    cost = chip.cost(state["ratio"], ROWS) if state["arm"] == SPLIT else chip.stock(ROWS)
    assert cost <= 1.05 * best(chip)
    assert world.excess <= LEARNING_SHARE
    learned = world.total
    world.prompts(1)
    assert world.total - learned == pytest.approx(LAYERS * cost, rel=0.03)


@pytest.mark.parametrize("chip", [*PAPER_CHIPS, EQUAL_STREAMS], ids=lambda pair: pair.name)
def test_two_prompts_of_a_real_models_layers_are_enough(chip: Pair) -> None:
    """Before the third prompt the plan is the learned one, or the best so far."""
    world = learning_world(chip)
    world.prompts(sites.LEARNING_PROMPTS, layers=96)
    before = world.total
    world.prompts(1, layers=96)
    assert (world.total - before) / 96 <= 1.10 * best(chip)


def test_a_hopeless_cpu_is_stock_at_the_cost_of_one_look() -> None:
    world = learning_world(THOUSAND)
    world.prompts(2)
    assert world.arm == STOCK
    assert not world.control.learning
    looks = [job for job in world.jobs if job.solo]
    assert len(looks) == 1
    assert not [job for job in world.jobs if job.arm == SPLIT]
    look = THOUSAND.cpu.alone(looks[0].solo) + 2 * THOUSAND.boundary
    assert world.total - world.stock <= look + 1e-12
    assert world.control.probe_seconds == pytest.approx(world.total - world.stock)


UNITS = st.floats(0.3, 1000.0)


@settings(deadline=None, max_examples=150)
@given(
    slower=UNITS,
    fixed=st.floats(0.0, 0.3),
    slowdown=st.floats(1.0, 1.3),
    boundary=st.floats(0.0, 0.5),
    rows=st.sampled_from([256, 512, 2048]),
    layers=st.integers(1, 100),
)
@example(slower=1.0, fixed=0.0, slowdown=1.0, boundary=0.3, rows=512, layers=12)
def test_learning_stays_within_a_tenth_of_stocks_time(
    slower: float, fixed: float, slowdown: float, boundary: float, rows: int, layers: int
) -> None:
    """At any moment: a tenth of what stock would have taken, and the looks that nothing could foretell.

    Those are the first at the CPU alone, the first at stock, and what contention adds to a split.
    """
    stock = 10e-6 * rows
    pair = Pair(
        "any",
        Unit(fixed * stock, slower * 10e-6, slowdown),
        Unit(0.0, 10e-6, slowdown),
        boundary * stock,
    )
    world = World(pair, learner(pair), rows=rows)
    first_look = pair.cpu.alone(32) + 2 * pair.boundary
    contention = (slowdown - 1) * stock + 2 * pair.boundary
    for call in range(300):
        world.call(call % layers)
        if not world.control.learning:
            break
        allowed = LEARNING_SHARE * world.stock + first_look + contention
        assert world.total - world.stock <= allowed * (1 + 1e-9)


def test_an_outlier_of_stock_does_not_open_the_purse() -> None:
    """Stock read ten times too slow once: what may be spent rests on the median."""
    learning = Learning(ROWS, 0.5, arms(0.0))
    truth = M1.stock(ROWS)
    for layer in range(400):
        trial = learning.next(layer % LAYERS)
        if trial is None or trial.probe.kind == "split":
            continue
        seconds = M1.seconds(trial.probe, ROWS)
        if trial.probe.kind == "stock" and learning.search.best_so_far().choice.samples >= 6:
            seconds *= 10
        learning.tell(trial, seconds, ROWS)
    assert learning.spent <= LEARNING_SHARE * 400 * truth


def test_it_says_how_many_prompts_are_left() -> None:
    world = learning_world(M1)
    said: list[int] = []
    while world.control.learning and len(said) < 100:
        world.prompts(1)
        why = world.control.state()["why"]
        if world.control.learning:
            found = re.fullmatch(r"learning, (\d+) prompts left", why)
            assert found, why
            said.append(int(found[1]))
            assert world.arm == world.control.state()["arm"]
    assert said
    assert said[0] >= said[-1] >= 1
    assert "learned from" in world.control.state()["why"]


def test_prompts_are_counted_by_the_layer_that_was_called_first() -> None:
    learning = Learning(ROWS, 0.5, arms(0.0))
    for layer in (7, 1, 2, 7, 1, 2, 7):
        learning.next(layer)
    assert learning.prompts == 3


def test_what_was_learned_is_told_once() -> None:
    told: list[tuple[Choice, int]] = []
    world = learning_world(M1, learned=lambda found, rows: told.append((found.choice, rows)))
    world.prompts(50)
    assert not world.control.learning
    assert [rows for _, rows in told] == [ROWS]
    assert told[0][0].ratio == world.control.state()["ratio"] > 0


def test_calls_of_other_lengths_are_scaled_to_the_first() -> None:
    """Chunks differ in length; without fixed costs a time for each row says the same at any length."""
    pair = Pair("no fixed costs", Unit(0.0, 20e-6, 1.1), Unit(0.0, 10e-6, 1.1))
    told: list[Choice] = []
    world = learning_world(pair, learned=lambda found, rows: told.append(found.choice))
    lengths = (2048, 3000, 2500, 2300)
    for call in range(600):
        world.call(call % LAYERS, rows=lengths[call % 4])
    assert told
    assert told[0].stock_seconds == pytest.approx(pair.stock(2048))
    assert pair.cost(told[0].ratio, ROWS) <= 1.05 * best(pair)


@pytest.mark.parametrize("reason", ["first touch", "another thread"])
def test_unclean_calls_are_stock_and_teach_nothing(reason: str) -> None:
    world = learning_world(M1)
    for layer in range(50):
        world.call(layer, unclean=reason)
    assert set(world.jobs) == {Job(STOCK)}
    assert world.total == world.stock
    assert world.control.state()["why"] == "learning, 2 prompts left"


def test_a_time_that_turned_out_unclean_is_thrown_away() -> None:
    control = learner(M1)
    job = control.choose(1, ROWS, True, False, True)
    assert job.timed
    control.record(job, 1e3, ROWS, 0.0, "another thread")
    assert control.choose(1, ROWS, True, False, True).trial == job.trial, "it is asked again"


def test_a_slow_learner_uses_the_best_so_far_but_not_under_pressure() -> None:
    """What is not decided yet does not hold memory that is short."""
    world = learning_world(M1)
    world.prompts(11, layers=2)
    assert world.control.learning
    found = world.call(1, unclean="another thread")
    assert (found.arm, found.timed) == (SPLIT, False)
    assert M1.cost(found.ratio, ROWS) < M1.stock(ROWS)
    assert (world.arm, world.control.state()["ratio"]) == (SPLIT, found.ratio)
    world.pressure = True
    done = len(world.jobs)
    world.prompts(2, layers=2)
    assert set(world.jobs[done:]) == {Job(STOCK)}
    assert (world.arm, world.control.state()["ratio"]) == (STOCK, 0.0)
    world.pressure = False
    world.prompts(20, layers=2)
    assert not world.control.learning


def test_a_site_says_since_when_it_does_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(f"at {n}" for n in range(10**6))
    monkeypatch.setattr(sites, "_now", lambda: next(clock))
    world = learning_world(M1)
    start = world.control.state()["since"]
    arms = [(world.arm, world.control.state()["since"])]
    for call in range(2000):
        world.call(call % 2, unclean="another thread" if call % 5 == 4 else None)
        arms.append((world.arm, world.control.state()["since"]))
    assert arms[0] == (STOCK, start)
    assert len(set(arms)) > 1
    assert arms[-1][0] == SPLIT
    for (arm, since), (next_arm, next_since) in pairwise(arms):
        assert (arm == next_arm) == (since == next_since), (arm, since, next_arm, next_since)


# --- the gate


def controlled(pair: Pair, plan: Plan = DEFAULT, *, prior: bool = True, policy: str = "auto") -> World:
    times = {STOCK: pair.stock(ROWS) / ROWS, SPLIT: pair.cost(plan.ratio, ROWS) / ROWS}
    return World(pair, SiteControl("a site", plan, policy, per_row=times if prior else None))


def test_a_measured_site_splits_from_the_first_call() -> None:
    world = controlled(M1)
    assert world.call(0).arm == SPLIT
    assert world.arm == SPLIT
    assert world.control.state()["gate"]["estimates"]["stock"]["seconds_per_row"] > 0
    world.prompts(20)
    assert world.total <= 1.02 * len(world.jobs) * M1.cost(0.3, ROWS)


def test_the_learned_times_are_the_gates_priors() -> None:
    world = learning_world(M1)
    world.prompts(50)
    gate = world.control.state()["gate"]
    assert gate["phase"] != "probation"
    ratio = world.control.state()["ratio"]
    assert gate["estimates"][STOCK]["seconds_per_row"] == pytest.approx(M1.stock(ROWS) / ROWS, rel=1e-6)
    assert gate["estimates"][SPLIT]["seconds_per_row"] == pytest.approx(M1.cost(ratio, ROWS) / ROWS, rel=0.02)


def test_a_split_that_turns_slow_is_left_and_taken_again() -> None:
    world = controlled(M1)
    world.prompts(5)
    world.split_factor = 2.0
    world.prompts(10)
    assert world.arm == STOCK
    world.split_factor = 1.0
    world.prompts(40)
    assert world.arm == SPLIT


@pytest.mark.parametrize("cpu", [10.0, 100.0])
def test_a_forced_ratio_goes_through_probation_and_a_hopeless_one_ends_on_stock(cpu: float) -> None:
    pair = replace(M1, cpu=replace(M1.cpu, per_row=cpu * M1.cpu.per_row))
    world = controlled(pair, FORCED, prior=False)
    assert world.control.learning
    world.prompts(1)
    assert world.arm == STOCK
    assert not world.control.learning
    assert len([job for job in world.jobs if job.arm == SPLIT]) == 1, "dropped after one clean sample"
    assert {job.ratio for job in world.jobs if job.arm == SPLIT} == {0.5}


def test_a_forced_ratio_that_helps_stays_as_it_is() -> None:
    world = controlled(EQUAL_STREAMS, FORCED, prior=False)
    world.prompts(2)
    assert world.arm == SPLIT
    assert {job.ratio for job in world.jobs[-5:] if job.arm == SPLIT} == {0.5}
    assert "ratio=0.5 was given" in world.control.state()["why"]


@pytest.mark.parametrize("learn", [False, True])
def test_off_keeps_the_plan_and_times_nothing(learn: bool) -> None:
    world = World(THOUSAND, SiteControl("a site", DEFAULT, "off"))
    world.prompts(3)
    assert set(world.jobs) == {Job(SPLIT, DEFAULT.ratio)}
    assert world.control.probe_seconds == 0
    assert world.control.state()["gate"] is None
    assert not world.control.learning


def test_a_plan_of_stock_needs_no_gate() -> None:
    world = World(M1, SiteControl("a site", Plan(STOCK, 0.0, "native", "measured"), "auto"))
    world.prompts(2)
    assert set(world.jobs) == {Job(STOCK)}
    assert world.control.stock_reason() == "measured"


def test_pressure_stops_probes_stands_down_when_it_lasts_and_recovers() -> None:
    world = controlled(M1)
    world.prompts(3)
    world.pressure = True
    done = len(world.jobs)
    world.prompts(5)
    assert {(job.arm, job.timed) for job in world.jobs[done:]} == {(SPLIT, False)}
    world.control.stand_down("memory pressure for more than 10 s")
    done = len(world.jobs)
    world.prompts(2)
    assert set(world.jobs[done:]) == {Job(STOCK)}
    assert world.arm == STOCK
    assert "memory" in world.control.stock_reason()
    world.pressure = False
    world.prompts(1)
    assert world.arm == SPLIT
    lines = "\n".join(world.control.drain())
    assert "memory pressure: no probes" in lines
    assert "stood down" in lines
    assert "is over" in lines


@pytest.mark.parametrize("reason", ["first touch", "another thread"])
def test_unclean_times_never_reach_the_gate(reason: str) -> None:
    world = controlled(M1, prior=False)
    for layer in range(100):
        world.call(layer, unclean=reason)
    assert not [job for job in world.jobs if job.timed]
    assert world.control.learning
    control = controlled(M1, prior=False).control
    job = control.choose(1, ROWS, True, False, True)
    control.record(job, 1e3, ROWS, 0.0, reason)
    state = control.state()["gate"]
    assert state["rejected"] == {reason: 1}
    assert state["estimates"][job.arm]["samples"] == 0


# --- what it says


def test_every_decision_is_one_line_and_drained_once() -> None:
    world = learning_world(M1)
    world.call(0)
    assert len(world.control.drain()) == 1, "learning begins"
    world.prompts(50)
    lines = world.control.drain()
    assert len(lines) == 1, lines
    assert re.fullmatch(r"split, CPU share 0\.\d\d, gain \d+%: learned from \d+ calls: .*", lines[0])
    assert world.control.drain() == []
    world.split_factor = 2.0
    world.prompts(10)
    lines = world.control.drain()
    assert [line for line in lines if "split -> stock" in line]
    assert all("\n" not in line for line in lines)


def test_a_prior_that_confirms_the_plan_is_no_decision_and_one_that_overrules_it_is() -> None:
    assert controlled(M1).control.drain() == []
    slower = SiteControl("a site", DEFAULT, "auto", per_row={STOCK: 10e-6, SPLIT: 9.9e-6})
    assert slower.state()["arm"] == STOCK
    assert len(slower.drain()) == 1


def test_the_state_is_json_and_complete_at_every_stage() -> None:
    world = learning_world(M1)
    for _ in range(800):
        world.call(len(world.jobs) % LAYERS)
        state = json.loads(json.dumps(world.control.state(), allow_nan=False))
        assert set(state) == {"arm", "ratio", "form", "cpu_dtype", "why", "since", "gate"}
        assert state["arm"] in (STOCK, SPLIT)
        assert (state["ratio"] > 0) == (state["form"] is not None) == (state["arm"] == SPLIT)


def test_a_call_is_stock_for_a_reason_that_is_true() -> None:
    world = learning_world(M1)
    assert world.control.stock_reason() == "still learning what is fastest"
    world = controlled(M1, prior=False)
    assert world.control.stock_reason() == "still learning what is fastest"
    world = controlled(replace(M1, cpu=THOUSAND.cpu), FORCED, prior=False)
    world.prompts(2)
    assert world.control.stock_reason() == "the gate found stock to be as fast"


@pytest.mark.parametrize("chip", [M1, M5_LIKE, THOUSAND], ids=lambda pair: pair.name)
def test_probe_seconds_are_what_finding_out_cost(chip: Pair) -> None:
    """A stopwatch's round trip each time, a solo part whole, and of a split what it took beyond stock."""
    world, cost = learning_world(chip), 0.0
    while world.control.learning:
        job = world.call(len(world.jobs) % LAYERS)
        if job.timed:
            beyond = max(0.0, chip.cost(job.ratio, ROWS) - chip.stock(ROWS)) if job.arm == SPLIT else 0.0
            cost += chip.boundary + (chip.cpu.alone(job.solo) if job.solo else beyond)
        assert world.control.probe_seconds == pytest.approx(cost)
        if len(world.jobs) > 5000:
            pytest.fail("never learned")


# --- threads


def test_many_threads_leave_a_sound_control() -> None:
    control = learner(EQUAL_STREAMS)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            world = World(EQUAL_STREAMS, control)
            for call in range(300):
                world.call((seed + call) % LAYERS)
                control.state()
                control.drain()
                assert control.probe_seconds >= 0
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not control.learning
    assert control.state()["arm"] == SPLIT


def test_a_probe_answered_twice_is_told_twice_and_one_after_the_end_is_dropped() -> None:
    control = learner(M1)
    job = control.choose(1, ROWS, True, False, True)
    control.record(job, M1.stock(ROWS), ROWS, 0.0, None)
    control.record(job, M1.stock(ROWS), ROWS, 0.0, None)
    world = World(M1, control)
    world.prompts(50)
    assert not control.learning
    control.record(
        Job(SPLIT, 0.25, True, trial=Trial(SPLIT, Probe("split", 512, 0.25))), 1.0, ROWS, 0.0, None
    )
    assert control.state()["arm"] == SPLIT
