"""The search over all arms of a site, on simulated units: against the best that brute force finds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pairs import EQUAL_STREAMS, M1, M2, M4, Pair, Unit

from fusionml.ratios import Probe, RatioSearch
from fusionml.search import BEATEN, RACE, Found, SiteSearch, Trial, Way

ROWS, STEP = 2048, 1 / 64
DENSE, QUANTISED = Way("dense", "native"), Way("quantised", "native")
WAITS = {None: 1, "dense": 2, "quantised": 1}


@dataclass
class Layer:
    """A simulated quantised layer.

    `unpack` seconds come before anything by a dense weight; `stock` and `packed` are what a unit by the
    packed weight costs, over what the pair's costs by a dense one.
    """

    pair: Pair
    unpack: float
    stock: float
    packed: float
    noise: float = 0.0
    seed: int = 0
    told: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def packed_pair(self) -> Pair:
        def slower(unit: Unit, factor: float) -> Unit:
            return Unit(unit.fixed, unit.per_row * factor, unit.slowdown)

        return Pair("packed", slower(self.pair.cpu, self.packed), slower(self.pair.current, self.stock))

    def true_seconds(self, trial: Trial) -> float:
        if trial.way is None:
            rows = self.pair.stock(ROWS)
            return self.unpack + rows if trial.arm == "dense" else self.packed_pair().stock(ROWS)
        if trial.way == DENSE:
            return self.unpack + self.pair.seconds(trial.probe, ROWS)
        return self.packed_pair().seconds(trial.probe, ROWS)

    def seconds(self, trial: Trial) -> float:
        self.told.append(trial)
        return self.true_seconds(trial) * self._random.lognormvariate(0.0, self.noise)

    def charged(self, arm: str, way: Way | None, ratio: float) -> float:
        """What an arm truly costs in a prompt, its boundaries included."""
        form = None if way is None else way.form
        waits = 0 if arm == "stock" else WAITS[form]
        probe = Probe("split", round(ratio * ROWS), ratio) if ratio else Probe("stock")
        trial = Trial(arm, probe, way if ratio else None)
        return self.true_seconds(trial) + waits * self.pair.boundary

    def best(self) -> float:
        ratios = [k * STEP for k in range(1, 33)]
        splits = [self.charged("split", way, ratio) for way in (DENSE, QUANTISED) for ratio in ratios]
        return min(self.charged("stock", None, 0.0), self.charged("dense", None, 0.0), *splits)


def search_of(layer: Layer, *, dense: bool = True) -> SiteSearch:
    return SiteSearch(
        (DENSE, QUANTISED) if dense else (DENSE,),
        dense=dense,
        boundary_seconds=layer.pair.boundary,
        waits=WAITS.__getitem__,
        make=lambda: RatioSearch(rows=ROWS),
    )


def run(layer: Layer, search: SiteSearch) -> Found:
    while (trial := search.next()) is not None:
        assert trial == search.next(), "asked again, it says the same"
        search.tell(trial, layer.seconds(trial))
    return search.best_so_far()


LAYERS = {
    "stock unpacks for every row": Layer(EQUAL_STREAMS, 5e-3, 30.0, 30.0),
    "the packed product is as fast on both": Layer(EQUAL_STREAMS, 60e-3, 1.0, 1.0),
    "a GPU's own kernel, a CPU that has none": Layer(M1, 1e-3, 1.05, 40.0),
    "a GPU whose dense product is slower": Layer(M4, 2e-3, 0.8, 40.0),
    "unpacking costs more than it brings": Layer(M2, 50e-3, 1.0, 40.0),
}


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("name", LAYERS)
def test_the_best_arm_form_and_share_are_found(name: str, noise: float) -> None:
    wins = 0
    for seed in range(20):
        base = LAYERS[name]
        layer = Layer(base.pair, base.unpack, base.stock, base.packed, noise, seed)
        found = run(layer, search_of(layer))
        way = found.way if found.arm == "split" else None
        wins += layer.charged(found.arm, way, found.choice.ratio) <= 1.05 * layer.best()
    assert wins >= 19


@pytest.mark.parametrize("name", LAYERS)
def test_what_it_says_of_the_arm_is_true(name: str) -> None:
    base = LAYERS[name]
    layer = Layer(base.pair, base.unpack, base.stock, base.packed)
    found = run(layer, search_of(layer))
    way = found.way if found.arm == "split" else None
    truth, stock = (
        layer.charged(found.arm, way, found.choice.ratio),
        layer.charged("stock", None, 0.0),
    )
    # Where its own boundaries are fewer than the base's, a form is charged with the base's.
    slack = layer.pair.boundary
    assert found.choice.seconds == pytest.approx(truth, abs=slack + 1e-9)
    assert found.choice.stock_seconds == pytest.approx(stock)
    assert found.choice.gain == pytest.approx(stock / found.choice.seconds - 1)
    assert found.dense_seconds == pytest.approx(layer.charged("dense", None, 0.0))
    assert found.choice.samples <= len(layer.told)


def test_an_arm_that_is_hopeless_is_timed_twice() -> None:
    layer = LAYERS["stock unpacks for every row"]
    layer = Layer(layer.pair, layer.unpack, layer.stock, layer.packed)
    run(layer, search_of(layer))
    assert sum(trial.arm == "stock" for trial in layer.told) == 2
    assert layer.packed_pair().stock(ROWS) > BEATEN * layer.charged("dense", None, 0.0)


def test_without_a_dense_arm_it_is_the_search_of_the_ratio_alone() -> None:
    search, alone = (
        search_of(Layer(M1, 0.0, 1.0, 1.0), dense=False),
        RatioSearch(rows=ROWS, boundary_seconds=M1.boundary * WAITS["dense"]),
    )
    while (probe := alone.next()) is not None:
        trial = search.next()
        assert trial is not None
        assert trial.probe == probe
        assert trial.arm == ("stock" if probe.kind == "stock" else "split")
        seconds = M1.seconds(probe, ROWS)
        alone.tell(probe, seconds)
        search.tell(trial, seconds)
    assert search.next() is None
    found, choice = search.best_so_far(), alone.result()
    assert (found.choice.ratio, found.choice.seconds) == (choice.ratio, choice.seconds)
    assert found.choice.gain == pytest.approx(choice.gain)
    assert found.dense_seconds is None


def test_cut_short_it_knows_the_faster_whole_arm() -> None:
    layer = LAYERS["stock unpacks for every row"]
    search = search_of(layer)
    for _ in range(2):
        trial = search.next()
        assert trial is not None
        search.tell(trial, layer.true_seconds(trial))
    search.end_race()
    for _ in search.ways:
        search.end_way()
    assert search.next() is None
    assert not search.finished
    found = search.best_so_far()
    assert found.arm == "dense"
    assert found.choice.gain > 1


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_the_times_are_it_ends_and_answers_with_what_it_timed(data: st.DataObject) -> None:
    search = search_of(Layer(M1, 0.0, 1.0, 1.0), dense=data.draw(st.booleans()))
    told: list[Trial] = []
    left = search.samples_left
    while (trial := search.next()) is not None:
        assert search.samples_left > 0
        seconds = data.draw(st.floats(1e-6, 10.0))
        told.append(trial)
        search.tell(trial, seconds)
        assert search.samples_left < left
        left = search.samples_left
        if data.draw(st.integers(0, 50)) == 0 and not search.racing:
            search.end_way()
            left = search.samples_left
    found = search.best_so_far()
    arms = {trial.arm for trial in told if trial.way is None}
    assert found.arm in arms or found.arm == "split"
    if found.arm == "split":
        assert any(t.way == found.way and t.probe.ratio == found.choice.ratio for t in told)
    assert len([trial for trial in told if trial.arm == "dense" and trial.way is None]) == 0 or RACE >= 2
