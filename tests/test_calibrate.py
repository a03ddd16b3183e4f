"""The calibrator: which shapes it finds, what it measures in its budget, what it saves and refuses."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from benches import Clock, Simulation, simulate, simulated
from checkpoints import small_checkpoint
from commands import Answer, assert_refused, command
from models import linear_layers, tiny, tokens
from pairs import EQUAL_STREAMS, M5_LIKE, PAPER_CHIPS, THOUSAND, Pair, Unit

import fusionml
from fusionml import calibrate, machine, pressure, split
from fusionml import compare as compare_module
from fusionml.calibrate import NothingToCalibrateError, Shape, search_site, shapes
from fusionml.pressure import Reading
from fusionml.ratios import PAPER_GRID, Choice, Probe, Site
from fusionml.search import Found, Trial, Way
from fusionml.session import Session, open_table
from fusionml.table import RatioTable

Key = tuple[int, int, bool]
Main = Callable[..., Answer]


@pytest.fixture(autouse=True)
def one_math_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine reads another rate each time; which table holds for which rates is tested elsewhere."""
    monkeypatch.setattr(machine, "math_fingerprint", lambda: {"float32": 5.0, "bfloat16": 1.0})


@pytest.fixture
def table(tmp_path: Path) -> RatioTable:
    return open_table(str(tmp_path / "ratios.json"))


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    return lambda *argv: command(capsys, *argv)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("home")
    return str(
        small_checkpoint(home, num_hidden_layers=3, intermediate_size=192, max_position_embeddings=9000)
    )


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which measuring is welcome, whatever the one below is doing."""
    monkeypatch.setattr(calibrate, "LISTEN_SECONDS", 0.0)
    monkeypatch.setattr(machine, "why_not_measurable", lambda needed: [])
    monkeypatch.setattr(machine.OtherLoad, "share", lambda self: 0.0)
    monkeypatch.setattr(pressure, "read", lambda: Reading(level="normal"))


# --- which shapes


def found(model: nn.Module, dtype: mx.Dtype | None = None) -> dict[Key, tuple[int, float]]:
    """K, N and bias of each shape: how many layers, and how many boundaries they cause."""
    return {
        (shape.inputs, shape.outputs, shape.bias): (len(shape.layers), round(shape.boundaries, 6))
        for shape in shapes(model, dtype)
        if shape.kind == "linear"
    }


LLAMA = {(128, 128, False): (8, 4.0), (128, 192, False): (4, 2.0), (192, 128, False): (2, 2.0)}
"""Two of three blocks are live: q, k and v on one boundary, o on its own, gate and up on one, down."""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("llama", LLAMA),
        (
            "qwen2",
            {
                (128, 128, True): (6, 2.0),
                (128, 128, False): (2, 2.0),
                (128, 192, False): (4, 2.0),
                (192, 128, False): (2, 2.0),
            },
        ),
        (
            "phi3",
            {
                (128, 384, False): (4, 4.0),
                (128, 128, False): (2, 2.0),
                (192, 128, False): (2, 2.0),
            },
        ),
        ("mixtral", {(128, 128, False): (8, 4.0)}),
    ],
)
def test_the_shapes_are_those_of_the_live_layers(kind: str, expected: dict[Key, tuple[int, float]]) -> None:
    assert found(tiny(kind)) == expected


@pytest.mark.parametrize("kind", ["llama", "qwen2", "phi3", "jamba", "gemma3n", "deepseek_v3", "nemotron_h"])
def test_the_counts_are_those_of_the_layers_that_a_prompt_splits(kind: str, patch: Any, session: Any) -> None:
    """Against what the patch itself splits in one prompt, and the inputs it makes real for that."""
    model = tiny(kind)
    expected = found(model)
    session.known.add(model, from_loader=True)
    made_real: dict[Key, list[mx.array]] = {}
    calls: dict[Key, int] = {}
    run = split.run_linear

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, *rest: Any) -> mx.array:
        key = (weight.shape[1], weight.shape[0], bias is not None)
        made_real.setdefault(key, []).append(x)
        calls[key] = calls.get(key, 0) + 1
        return run(x, weight, bias, *rest)

    split.run_linear = spy
    try:
        patch(min_rows=2, ratio=0.5)
        mx.eval(model(tokens(8)))
    finally:
        split.run_linear = run
    assert calls == {key: layers for key, (layers, _) in expected.items()}
    everything = [(key, id(x)) for key, xs in made_real.items() for x in xs]
    users = {name: sum(1 for _, other in everything if other == name) for _, name in everything}
    for key, xs in made_real.items():
        assert sum(1 / users[id(x)] for x in xs) == pytest.approx(expected[key][1]), key


def test_a_layer_that_never_splits_shares_no_boundary() -> None:
    """With one K/V head of 32, k and v are too narrow to split: q pays its boundary alone."""
    model = tiny("llama", num_key_value_heads=1)
    assert linear_layers(model)["model.layers.0.self_attn.k_proj"].weight.shape == (32, 128)
    assert found(model)[(128, 128, False)] == (4, 4.0)


def test_shapes_come_with_the_most_arithmetic_first() -> None:
    works = [shape.work for shape in shapes(tiny("llama"))]
    assert works == sorted(works, reverse=True)
    assert sum(works) == 2 * (4 * 128 * 128 + 3 * 128 * 192)


def test_looking_for_shapes_leaves_the_layer_class_alone_and_computes_nothing(
    stock_functions: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(mx, "eval", lambda *a: pytest.fail("computed"))
    monkeypatch.setattr(mx, "async_eval", lambda *a: pytest.fail("computed"))
    shapes(model)
    assert nn.Linear.__call__ is stock_functions[(nn.Linear, "__call__")]


def test_a_model_that_cannot_be_called_with_tokens_charges_every_layer_in_full(
    stock_functions: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    monkeypatch.setattr(type(model), "__call__", lambda self: None)
    assert found(model)[(128, 128, False)] == (8, 8.0)
    assert nn.Linear.__call__ is stock_functions[(nn.Linear, "__call__")]


def test_weights_are_taken_for_another_type_where_one_is_given() -> None:
    assert {shape.dtype for shape in shapes(tiny("llama"), mx.bfloat16)} == {mx.bfloat16}
    assert {shape.dtype for shape in shapes(tiny("llama"))} == {mx.float32}


def test_nothing_eligible_says_why_for_each_kind_of_layer() -> None:
    model = tiny("llama")
    nn.quantize(model, group_size=32, bits=8, mode="mxfp8")
    with pytest.raises(NothingToCalibrateError, match="quantized layers quantised as mxfp8"):
        shapes(model)
    with pytest.raises(NothingToCalibrateError, match="linear layers narrower than 128"):
        shapes(tiny("llama", hidden_size=64, intermediate_size=64))


# --- one site


def one_shape(dtype: mx.Dtype = mx.float32, layers: int = 1, boundaries: float = 1.0) -> Shape:
    made = [nn.Linear(256, 256, bias=False) for _ in range(layers)]
    for layer in made:
        layer.set_dtype(dtype)
    mx.eval([layer.parameters() for layer in made])
    return Shape("linear", "", dtype, 256, 256, False, layers=list(made), boundaries=boundaries)


def best(of: Pair, rows: int) -> float:
    """Seconds of the best share that this machine's pair of streams allows."""
    steps = int(split.max_ratio() * 64)
    return min(of.cost(k / 64, rows) for k in range(steps + 1))


@pytest.mark.parametrize("chip", [*PAPER_CHIPS, EQUAL_STREAMS, M5_LIKE, THOUSAND], ids=lambda p: p.name)
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_the_optimum_is_found(monkeypatch: pytest.MonkeyPatch, chip: Pair, noise: float) -> None:
    simulated(monkeypatch, chip, noise=noise)
    outcome = search_site(one_shape(), 2048, seconds=1e6, boundary=chip.boundary)
    assert outcome.left_out is None
    assert outcome.choice is not None
    assert chip.cost(outcome.choice.ratio, 2048) <= 1.05 * best(chip, 2048)


def test_a_hopeless_cpu_costs_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated(monkeypatch, THOUSAND)
    outcome = search_site(one_shape(), 2048, seconds=1e6, boundary=THOUSAND.boundary)
    assert outcome.choice is not None
    assert outcome.choice.ratio == 0
    assert not [probe for probe in simulation.probes if probe.kind == "split"]
    assert simulation.clock.now < 0.02


def test_the_boundary_is_charged_by_the_share_that_each_layer_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A boundary of half of stock's time takes the whole gain from a layer that pays it alone."""
    boundary = 0.5 * EQUAL_STREAMS.stock(512)
    simulated(monkeypatch, EQUAL_STREAMS)
    alone = search_site(one_shape(), 512, seconds=1e6, boundary=boundary).choice
    assert alone is not None
    assert alone.ratio == 0
    quarter = search_site(one_shape(layers=4, boundaries=1.0), 512, seconds=1e6, boundary=boundary).choice
    assert quarter is not None
    assert quarter.ratio > 0
    truth = EQUAL_STREAMS.split(quarter.ratio, 512) + boundary / 4
    assert quarter.seconds == pytest.approx(truth)
    assert quarter.gain == pytest.approx(EQUAL_STREAMS.stock(512) / truth - 1)


def test_what_layers_share_is_their_input_not_their_results() -> None:
    """A quantised layer by a dense weight waits for its own result too, whoever has the same input."""
    layers = [nn.QuantizedLinear(128, 128) for _ in range(4)]
    shape = Shape("quantized", "u4g64", mx.float32, 128, 128, True, layers=layers, boundaries=1.0)
    search = calibrate._search(shape, 512, 1e-3, None, "native", 3)
    while search.racing:
        trial = search.next()
        assert trial is not None
        search.tell(trial, {"stock": 20e-3, "dense": 2e-3}[trial.arm])
    assert search.best_so_far().dense_seconds == pytest.approx(2e-3 + (1 / 4 + 1) * 1e-3)


def test_the_first_touch_of_a_weight_is_not_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    outcome = search_site(one_shape(), 512, seconds=1e6, boundary=0.0)
    assert outcome.choice is not None
    assert len(simulation.probes) == outcome.choice.samples + 1
    assert simulation.probes[0] == Probe("stock")


SLOW = replace(EQUAL_STREAMS, cpu=replace(EQUAL_STREAMS.cpu, per_row=2 * EQUAL_STREAMS.cpu.per_row))


@pytest.mark.parametrize("faster", ["native", "float32"])
def test_both_cpu_types_are_compared_where_both_are_safe(
    monkeypatch: pytest.MonkeyPatch, faster: str
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    pairs = {"native": SLOW, "float32": SLOW} | {faster: EQUAL_STREAMS}
    simulation = simulate(monkeypatch, Simulation(Clock(), pairs))
    outcome = search_site(one_shape(mx.bfloat16), 512, seconds=1e6, boundary=0.0)
    assert outcome.found is not None
    assert outcome.found.way.cpu_dtype == faster
    assert {name for _, name in simulation.types} == {"native", "float32"}


@pytest.mark.parametrize(
    ("platform", "setting", "dtype", "types"),
    [
        ("darwin", "auto", mx.bfloat16, {"float32"}),
        ("darwin", "auto", mx.float16, {"float32"}),
        ("darwin", "native", mx.bfloat16, {"native"}),
        ("darwin", "auto", mx.float32, {"native"}),
        ("linux", "auto", mx.float32, {"native"}),
        ("linux", "float32", mx.bfloat16, {"float32"}),
        ("linux", "native", mx.bfloat16, {"native"}),
    ],
)
def test_cpu_types_that_are_not_safe_or_not_asked_for_are_never_run(
    monkeypatch: pytest.MonkeyPatch, platform: str, setting: str, dtype: mx.Dtype, types: set[str]
) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    search_site(one_shape(dtype), 512, seconds=1e6, boundary=0.0, cpu_dtype=setting)
    assert {name for _, name in simulation.types} == types


def test_the_grid_is_all_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    outcome = search_site(one_shape(), 512, seconds=1e6, boundary=0.0, grid=PAPER_GRID)
    assert {probe.ratio for probe in simulation.probes if probe.kind == "split"} <= set(PAPER_GRID)
    assert outcome.choice is not None
    assert outcome.choice.ratio in PAPER_GRID


def test_a_grid_without_a_candidate_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    outcome = search_site(one_shape(), 512, seconds=1e6, boundary=0.0, grid=[0.0])
    assert outcome.left_out is not None
    assert "no candidate" in outcome.left_out


def test_a_search_cut_short_says_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    stock = EQUAL_STREAMS.stock(512)
    outcome = search_site(one_shape(), 512, seconds=3 * stock, boundary=0.0)
    assert outcome.choice is None
    assert outcome.left_out is not None
    assert re.search(r"out of time after \d+ samples", outcome.left_out)
    assert simulation.clock.now <= 4 * stock


def test_without_time_nothing_is_made_or_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS, making=10.0)
    outcome = search_site(one_shape(mx.bfloat16), 512, seconds=0.0, boundary=0.0)
    assert (simulation.made, simulation.probes) == ([], [])
    assert outcome.choice is None
    assert outcome.left_out == "out of time before anything was timed"


# --- the bench itself, on real arrays

NATIVE = Way("dense", "native")


def split_of(ratio: float) -> Found:
    return Found("split", NATIVE, Choice(ratio, 0.0, "for a test", 0, None))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_the_bench_times_what_it_says(bias: bool, dtype: mx.Dtype) -> None:
    layer = nn.Linear(256, 128, bias=bias)
    layer.set_dtype(dtype)
    shape = Shape("linear", "", dtype, 256, 128, bias, layers=[layer])
    bench = calibrate.Bench(shape, 64, made_up=False)
    product = bench.products[0]
    x, weight = product.arrays[:2]
    assert weight is layer["weight"]
    truth = np.array(layer(x).astype(mx.float32))
    limit = calibrate.TOLERANCE[str(dtype).rsplit(".", 1)[-1]] * np.abs(truth).max()
    whole, half = Trial("stock"), Trial("split", Probe("split", 16, 0.25), NATIVE)
    for trial, rows in ((whole, 64), (half, 64), (Trial("split", Probe("solo", 16), NATIVE), 16)):
        solo = trial.probe.kind == "solo"
        out = bench._compute(product, trial.arm, trial.way, trial.probe.cpu_rows, solo)
        assert out.dtype == dtype
        np.testing.assert_allclose(np.array(out.astype(mx.float32)), truth[:rows], atol=limit, rtol=0)
        assert bench.seconds(trial) > 0
    error, allowed = bench.error(split_of(16 / 64))
    assert error <= allowed == calibrate.TOLERANCE[str(dtype).rsplit(".", 1)[-1]]


def test_the_bench_takes_the_layers_in_turn_up_to_the_size_of_a_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape = one_shape(layers=5)
    monkeypatch.setattr(calibrate, "CACHE_BYTES", 3 * 256 * 256 * 4)
    bench = calibrate.Bench(shape, 32, made_up=False)
    used: list[int] = []

    def compute(product: Any, *rest: Any) -> mx.array:
        used.append(id(product.arrays[1]))
        return product.arrays[1]

    monkeypatch.setattr(bench, "_compute", compute)
    for _ in range(7):
        bench.seconds(Trial("stock"))
    assert len(set(used)) == 3
    assert used[:3] == used[3:6]


def test_made_up_weights_do_not_read_the_layers() -> None:
    shape = replace(one_shape(mx.float16, layers=2), bias=True)
    for layer in shape.layers:
        layer.weight = None
    bench = calibrate.Bench(shape, 32, made_up=True)
    assert [[(a.shape, a.dtype) for a in product.arrays[1:]] for product in bench.products] == [
        [((256, 256), mx.float16), ((256,), mx.float16)]
    ] * 2
    error, allowed = bench.error(split_of(0.5))
    assert error <= allowed == calibrate.TOLERANCE["float16"]


def test_the_price_of_a_boundary_is_a_time() -> None:
    assert 0 <= calibrate.boundary_seconds(links=4, repeats=3) < 0.1


# --- what enters the table


def test_a_verified_split_enters_the_table_and_says_how_it_was_made(
    monkeypatch: pytest.MonkeyPatch, table: RatioTable
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    outcomes = calibrate.calibrate(tiny("llama"), rows=[512], budget=1e6, table=table)
    assert len(outcomes) == len(simulation.verified) == len(table) == 3
    saved = open_table(table.path).entries()
    assert saved == table.entries()
    for outcome in outcomes:
        entry, choice = saved[outcome.site], outcome.choice
        assert choice is not None
        assert (entry.ratio, entry.gain, entry.samples) == (choice.ratio, choice.gain, choice.samples)
        assert entry.per_row == pytest.approx(EQUAL_STREAMS.stock(512) / 512)
        assert split.cpu_rows(512, entry.ratio) in simulation.verified


@pytest.mark.parametrize("error", [0.5, math.nan, math.inf])
def test_a_wrong_split_never_enters_the_table(
    monkeypatch: pytest.MonkeyPatch, table: RatioTable, error: float
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS, errors={"native": error, "float32": error})
    outcomes = calibrate.calibrate(tiny("llama"), rows=[512], budget=1e6, table=table)
    assert len(table) == 0
    assert all(outcome.choice is None for outcome in outcomes)
    assert all("differs from stock" in str(outcome.left_out) for outcome in outcomes)
    assert all("differs from stock" in line for line in calibrate.render(outcomes).splitlines()[1:])
    json.dumps([calibrate.as_dict(outcome) for outcome in outcomes], allow_nan=False)


def test_a_real_split_that_computes_the_wrong_thing_is_found(
    monkeypatch: pytest.MonkeyPatch, table: RatioTable
) -> None:
    """Through the bench itself: only the times are simulated, the rows of the CPU are zeros."""
    parts = split.linear_parts

    def wrong(*args: Any) -> tuple[mx.array, mx.array]:
        cpu, current = parts(*args)
        return mx.zeros_like(cpu), current

    clock = Clock()
    monkeypatch.setattr(calibrate, "time", clock)
    monkeypatch.setattr(
        calibrate.Bench, "seconds", lambda self, trial: EQUAL_STREAMS.seconds(trial.probe, self.rows)
    )
    model = tiny("llama")
    right = calibrate.calibrate(model, rows=[64], budget=1e6)
    assert all(outcome.choice is not None and outcome.choice.ratio > 0 for outcome in right)
    assert all(outcome.error is not None and outcome.error < 1e-3 for outcome in right)
    monkeypatch.setattr(split, "linear_parts", wrong)
    calibrate.calibrate(model, rows=[64], budget=1e6, table=table)
    assert len(table) == 0


@pytest.mark.parametrize(("bad", "good"), [("native", "float32"), ("float32", "native")])
def test_where_one_cpu_type_is_wrong_the_other_is_used(
    monkeypatch: pytest.MonkeyPatch, bad: str, good: str
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    pairs = {bad: EQUAL_STREAMS, good: SLOW}
    simulate(monkeypatch, Simulation(Clock(), pairs, errors={bad: 1.0}))
    outcome = search_site(one_shape(mx.float16), 512, seconds=1e6, boundary=0.0)
    assert outcome.choice is not None
    assert outcome.found is not None
    assert (outcome.found.way.cpu_dtype, outcome.error) == (good, 0.0)
    assert outcome.choice.stock_seconds == pytest.approx(SLOW.stock(512))


def test_ctrl_c_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch, table: RatioTable) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    everything = calibrate.calibrate(tiny("llama"), rows=[512], budget=1e6)
    samples = len(simulation.probes)
    again = simulated(monkeypatch, EQUAL_STREAMS, interrupt_after=samples - 1)
    with pytest.raises(KeyboardInterrupt):
        calibrate.calibrate(tiny("llama"), rows=[512], budget=1e6, table=table)
    assert len(again.probes) == samples
    assert set(open_table(table.path).entries()) == {outcome.site for outcome in everything[:2]}


# --- the budget


def test_the_budget_goes_where_the_arithmetic_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """With time for a part only, each site gets its share of the time, and what is left out says so."""
    simulation = simulated(monkeypatch, EQUAL_STREAMS, noise=0.05, reference=128 * 128)
    model = tiny("llama")
    all_of_it = calibrate.calibrate(model, rows=[256, 512], budget=1e6)
    needed, works = (
        simulation.clock.now,
        {s.site(n).key(): s.work * n for s in shapes(model) for n in (256, 512)},
    )
    assert [works[outcome.site.key()] for outcome in all_of_it] == sorted(works.values(), reverse=True)
    part = simulated(monkeypatch, EQUAL_STREAMS, noise=0.05, reference=128 * 128)
    outcomes = calibrate.calibrate(model, rows=[256, 512], budget=needed / 4)
    longest = max(part.pair(shape, "native").stock(512) for shape in shapes(model))
    assert part.clock.now <= needed / 4 + longest
    assert any(outcome.left_out for outcome in outcomes)
    assert {outcome.site.key() for outcome in outcomes} == set(works), "each site is reported"
    first, last = outcomes[0].site.key(), outcomes[-1].site.key()
    assert part.spent[first] > part.spent[last]
    assert part.spent[first] <= needed / 4 * works[first] / sum(works.values()) + longest


@pytest.mark.parametrize("budget", [0.05, 0.2, 1.0, 5.0, 1e6])
def test_a_budget_is_kept_however_slow_a_bench_is_made(
    monkeypatch: pytest.MonkeyPatch, budget: float
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS, making=0.5)
    seen: list[tuple[str, float, float]] = []
    outcomes = calibrate.calibrate(
        tiny("qwen2"),
        rows=[64, 512],
        budget=budget,
        progress=lambda what, spent, whole: seen.append((what, spent, whole)),
    )
    assert simulation.clock.now <= budget + 0.5 + EQUAL_STREAMS.stock(512)
    assert len(outcomes) == 8
    assert all(outcome.choice is not None or outcome.left_out for outcome in outcomes)
    if budget > 100:
        assert all(outcome.left_out is None for outcome in outcomes)
    assert [what for what, _, _ in seen] == [*(outcome.site.key() for outcome in outcomes), "done"]
    assert all(whole == budget for _, _, whole in seen)
    spent = [value for _, value, _ in seen]
    assert spent == sorted(spent)


def test_rows_named_twice_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    assert len(calibrate.calibrate(tiny("llama"), rows=[512, 512], budget=1e6)) == 3


@pytest.mark.parametrize(
    ("rows", "budget", "words"),
    [
        ([15], 60.0, "rows=15 is below 16"),
        ([512, -1], 60.0, "rows=-1 is below 16"),
        ([512], -1.0, "budget=-1.0"),
        ([512], 0.0, "budget=0.0"),
        ([512], math.nan, "budget=nan"),
        ([512], math.inf, "budget=inf"),
    ],
)
def test_what_cannot_be_measured_is_a_value_error(rows: list[int], budget: float, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        calibrate.calibrate(tiny("llama"), rows=rows, budget=budget)


def test_an_unwritable_table_is_found_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        calibrate.calibrate(
            tiny("llama"), rows=[512], budget=1e6, table=open_table(str(tmp_path / "file" / "t.json"))
        )
    assert simulation.probes == []


# --- from the calibrator to a patched model


def test_a_fresh_session_uses_the_table_and_says_that_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, table: RatioTable, patch: Any
) -> None:
    """Measured here, split there: the same sites, the same ratios, nothing left to learn."""
    model = tiny("llama")
    with monkeypatch.context() as context:
        simulated(context, EQUAL_STREAMS)
        calibrate.calibrate(model, rows=[512], budget=1e6, table=table)
    before = model(tokens(520))
    mx.eval(before)
    for gate in ("auto", "off"):
        monkeypatch.setattr(fusionml.patching, "_session", Session())
        rows: set[int] = set()
        run = split.run_linear
        monkeypatch.setattr(split, "run_linear", lambda *a, run=run, rows=rows: rows.add(a[3]) or run(*a))
        patch(model, table=table.path, gate=gate)
        out = model(tokens(520))
        assert mx.allclose(out, before, atol=1e-3)
        sites = fusionml.status()["sites"]
        assert set(sites) == {site.key() for site in table.entries()}
        for site, entry in table.entries().items():
            state = sites[site.key()]
            assert (state["arm"], state["ratio"]) == ("split", entry.ratio)
            assert state["why"].startswith(f"measured {entry.when}, gain {entry.gain:.0%}")
            assert "learning" not in state["why"]
        assert rows >= {split.cpu_rows(520, entry.ratio) for entry in table.entries().values()}
        assert fusionml.status()["table"]["entries"] == 3
        fusionml.unpatch()
        monkeypatch.setattr(split, "run_linear", run)


@pytest.mark.parametrize("rows", [511, 512])
def test_a_prompt_of_as_many_tokens_as_were_measured_uses_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, table: RatioTable, patch: Any, rows: int
) -> None:
    """MLX-LM keeps the last token back: 512 tokens are 511 rows, and both belong to one site."""
    model = tiny("llama")
    with monkeypatch.context() as context:
        simulated(context, EQUAL_STREAMS)
        calibrate.calibrate(model, rows=[rows], budget=1e6, table=table)
    patch(model, table=table.path)
    model(tokens(511))
    sites = fusionml.status()["sites"]
    assert set(sites) == {site.key() for site in table.entries()}
    assert all("measured" in state["why"] for state in sites.values())


# --- a config without weights

LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


@pytest.mark.usefixtures("quiet")
def test_llama_3_8b_needs_no_weights_and_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, main: Main
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B))
    units = Unit(0.0, 40e-3, 1.03)
    simulation = simulated(monkeypatch, Pair("slow", units, units), reference=4096 * 14336, making=2.0)
    mx.reset_peak_memory()
    held = mx.get_active_memory()
    answer = main("calibrate", "--config", str(config), "--rows", "64", "--budget", "60", "--json")
    assert answer.status == 0
    assert mx.get_peak_memory() - held < 64 * 2**20, "no weight was made"
    assert simulation.clock.now <= 60 + 2.0 + units.alone(64)
    sites = {site["site"]: site for site in json.loads(answer.out)["sites"]}
    assert set(sites) == {
        f"linear/bfloat16/{inputs}x{outputs}/nobias/rows=64"
        for inputs, outputs in ((4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096))
    }
    assert any(site["left_out"] for site in sites.values())
    assert all(site["choice"] or site["left_out"] for site in sites.values())


@pytest.mark.usefixtures("quiet")
def test_a_small_config_is_measured_for_real(tmp_path: Path, main: Main) -> None:
    config = tmp_path / "config.json"
    changes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 100}
    config.write_text(json.dumps(LLAMA_8B | changes | {"num_attention_heads": 1, "num_key_value_heads": 1}))
    answer = main("calibrate", "--config", str(config), "--rows", "16", "--budget", "0.5", "--json")
    assert answer.status == 0
    report = json.loads(answer.out)
    assert {site["site"].split("/")[1] for site in report["sites"]} == {"bfloat16"}
    assert len(report["sites"]) == 3


# --- the command


def measured(main: Main, checkpoint: str, *options: str) -> Answer:
    return main("calibrate", "--model", checkpoint, "--rows", "64", *options)


@pytest.mark.usefixtures("quiet")
def test_the_command_prints_what_it_found_and_where(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    path = tmp_path / "ratios.json"
    answer = measured(main, checkpoint, "--table", str(path))
    assert answer.status == 0
    table = open_table(str(path))
    lines = answer.out.splitlines()
    assert len(lines) == 1 + len(table) == 4
    for site, entry in table.entries().items():
        line = next(line for line in lines if line.startswith(site.key() + " "))
        assert f"{entry.ratio:.2f}" in line
        assert f"{entry.gain:.0%}" in line
    assert str(path) in answer.err


@pytest.mark.usefixtures("quiet")
def test_json_holds_every_site_and_the_environment(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    path = str(tmp_path / "ratios.json")
    report = json.loads(measured(main, checkpoint, "--table", path, "--json").out)
    assert report["table"] == path
    assert report["environment"]["mlx"] == machine.identity()["mlx"]
    entries = open_table(path).entries()
    assert {Site.parse(site["site"]): site["choice"]["ratio"] for site in report["sites"]} == {
        site: entry.ratio for site, entry in entries.items()
    }


@pytest.mark.usefixtures("quiet")
def test_show_and_clear(monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    path = tmp_path / "ratios.json"
    assert "0 sites" in main("calibrate", "--show", "--table", str(path)).out
    measured(main, checkpoint, "--table", str(path))
    probes = len(simulation.probes)
    shown = main("calibrate", "--show", "--table", str(path))
    assert shown.status == 0
    table = open_table(str(path))
    assert f"{path}: 3 sites" in shown.out
    for site, entry in table.entries().items():
        line = next(line for line in shown.out.splitlines() if line.startswith(site.key()))
        assert all(word in line for word in (f"{entry.ratio:.2f}", entry.cpu_dtype, entry.when))
    plain = json.loads(main("calibrate", "--show", "--json", "--table", str(path)).out)
    assert {Site.parse(key) for key in plain["entries"]} == set(table.entries())
    cleared = main("calibrate", "--clear", "--table", str(path))
    assert (cleared.status, path.exists()) == (0, False)
    assert main("calibrate", "--clear", "--table", str(path)).status == 0, "twice is no error"
    assert len(simulation.probes) == probes, "neither measures"


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [["--show"], ["--show", "--json"], []])
def test_the_table_of_the_environment_is_the_one_that_is_used(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path, options: list[str]
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    path = tmp_path / "mine.json"
    monkeypatch.setenv("FUSIONML_TABLE", str(path))
    answer = measured(main, checkpoint, *options)
    assert str(path) in answer.out + answer.err
    assert path.exists() == (not options)
    assert not (tmp_path / "fusionml" / "ratios.json").exists()


@pytest.mark.usefixtures("quiet")
def test_the_cpu_type_of_the_environment_is_the_one_that_is_measured(
    monkeypatch: pytest.MonkeyPatch, main: Main, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 2}))
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    monkeypatch.setenv("FUSIONML_CPU_DTYPE", "float32")
    assert main("calibrate", "--config", str(config), "--rows", "64").status == 0
    assert {name for _, name in simulation.types} == {"float32"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], ["--model /no/such/model", "no such folder"]),
        (["--config", "/no/config.json"], ["--config /no/config.json"]),
        (["--model", "m", "--config", "c"], ["--model", "--config", "exclude"]),
        (["--rows", "15"], ["rows=15", "16"]),
        (["--rows", "-512"], ["rows=-512", "16"]),
        (["--rows", "many"], ["--rows", "'many'"]),
        (["--budget", "-1"], ["budget=-1", "positive"]),
        (["--budget", "0"], ["budget=0", "positive"]),
        (["--budget", "nan"], ["budget=nan", "positive"]),
        (["--budget", "soon"], ["--budget", "'soon'"]),
        (["--grid", "0.1", "1.5"], ["--grid=1.5", "0 to"]),
        (["--grid", "-0.1"], ["--grid=-0.1", "0 to"]),
        (["--grid", "nan"], ["--grid=nan"]),
        (["--cpu-dtype", "float64"], ["cpu_dtype='float64'", "auto, native, float32"]),
        (["--show", "--budget"], ["--budget"]),
    ],
)
def test_bad_input_is_one_line(main: Main, options: list[str], words: list[str]) -> None:
    assert_refused(main("calibrate", *options), *words)


def test_a_wrong_variable_is_one_line(monkeypatch: pytest.MonkeyPatch, main: Main) -> None:
    monkeypatch.setenv("FUSIONML_BOUNDARY", "eagre")
    assert_refused(main("calibrate"), "FUSIONML_BOUNDARY='eagre'", "eager, async, none")


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"model_type": "no"}', '{"model_type": "llama"}', "\xff"]
)
def test_a_config_that_describes_no_model_is_one_line(main: Main, tmp_path: Path, content: str) -> None:
    config = tmp_path / "config.json"
    config.write_bytes(content.encode("latin-1"))
    assert_refused(main("calibrate", "--config", str(config)), f"--config {config}", "cannot be used")


@pytest.mark.usefixtures("quiet")
def test_a_model_with_nothing_to_calibrate_is_one_line_with_the_reasons(main: Main, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    small = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 64}
    config.write_text(json.dumps(LLAMA_8B | small | {"num_hidden_layers": 2, "vocab_size": 100}))
    path = tmp_path / "ratios.json"
    answer = main("calibrate", "--config", str(config), "--table", str(path))
    assert_refused(
        answer, "nothing to calibrate", "7 linear layers narrower than 128", "behind the last cache"
    )
    assert not path.exists()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("options", [[], ["--clear"]])
@pytest.mark.parametrize("place", ["file/ratios.json", "folder"])
def test_an_unwritable_table_is_one_line_and_nothing_is_lost(
    monkeypatch: pytest.MonkeyPatch,
    main: Main,
    checkpoint: str,
    tmp_path: Path,
    options: list[str],
    place: str,
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    (tmp_path / "file").write_text("a file")
    (tmp_path / "folder").mkdir()
    answer = measured(main, checkpoint, "--table", str(tmp_path / place), *options)
    if options and place.startswith("file"):
        assert answer.status == 0, "there is nothing to forget"
    else:
        words = "is a folder" if place == "folder" else "cannot be written"
        assert_refused(answer, f"--table {tmp_path / place}", words)
    assert simulation.probes == []
    assert (tmp_path / "file").read_text() == "a file"
    assert (tmp_path / "folder").is_dir()


@pytest.mark.usefixtures("quiet")
def test_a_disk_that_fills_up_is_one_line_and_what_was_saved_stays(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS)
    path, save, saves = tmp_path / "ratios.json", RatioTable.save, []

    def full(self: RatioTable) -> None:
        saves.append(len(self))
        if len(self) == 2:
            raise OSError(28, "No space left on device")
        save(self)

    monkeypatch.setattr(RatioTable, "save", full)
    answer = measured(main, checkpoint, "--table", str(path))
    assert_refused(answer, f"--table {path}", "No space left on device")
    assert len(open_table(str(path))) == 1


@pytest.mark.usefixtures("quiet")
def test_ctrl_c_ends_the_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path
) -> None:
    simulated(monkeypatch, EQUAL_STREAMS, interrupt_after=150)
    path = tmp_path / "ratios.json"
    answer = measured(main, checkpoint, "--table", str(path))
    assert (answer.status, answer.out) == (130, "")
    assert answer.err.count("\n") == 1
    kept = len(open_table(str(path)))
    assert 0 < kept < 3
    assert f"{kept} sites" in answer.err
    assert str(path) in answer.err


STEADY = {"free_bytes": 1, "power_source": "mains", "battery_percent": None, "low_power_mode": None}
STATES: dict[str, tuple[dict[str, Any], str]] = {
    "battery": ({"power_source": "battery", "battery_percent": 41.0}, "on battery (41 %)"),
    "low power": ({"low_power_mode": True}, "low-power mode is on"),
    "pressure": ({"level": "warning"}, "memory pressure is warning"),
    "busy": ({"others": 0.4}, "other programs use 40%"),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("force", [False, True])
def test_a_machine_that_would_measure_wrongly_is_refused_unless_forced(
    monkeypatch: pytest.MonkeyPatch,
    main: Main,
    checkpoint: str,
    tmp_path: Path,
    state: str,
    force: bool,
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    now, words = STATES[state]
    monkeypatch.setattr(machine, "conditions", lambda: STEADY | now)
    monkeypatch.setattr(machine.OtherLoad, "share", lambda self: now.get("others", 0.0))
    monkeypatch.setattr(pressure, "read", lambda: Reading(level=now.get("level", "normal")))
    path = str(tmp_path / "ratios.json")
    answer = measured(main, checkpoint, "--table", path, *(["--force"] if force else []))
    if force:
        assert answer.status == 0
        assert len(open_table(path)) == 3
    else:
        assert_refused(answer, "not now", words, "--force")
        assert simulation.probes == []


@pytest.mark.usefixtures("quiet")
def test_the_progress_ends_when_the_work_does(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, tmp_path: Path
) -> None:
    from fusionml import cli

    told: list[tuple[float, float, str]] = []
    monkeypatch.setattr(cli, "_progress", lambda label: lambda *a: told.append(a))
    simulated(monkeypatch, EQUAL_STREAMS)
    measured(main, checkpoint, "--table", str(tmp_path / "t.json"), "--budget", "60")
    assert len(told) == 4
    assert all("linear/bfloat16" in what for _, _, what in told[:3])
    assert all(done < total for done, total, _ in told[:3])
    assert told[-1][0] == told[-1][1]


# --- compare --calibrate


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        (["300"], {299}),
        (["8", "300"], {299}),
        (["350", "300"], {299, 349}),
        (["8"], set()),
        (["8192"], {2048}),
    ],
)
def test_compare_calibrates_the_rows_that_its_prompts_make(
    monkeypatch: pytest.MonkeyPatch, main: Main, checkpoint: str, lengths: list[str], rows: set[int]
) -> None:
    simulation = simulated(monkeypatch, EQUAL_STREAMS)
    monkeypatch.setattr(
        compare_module, "compare", lambda *a, **o: {"samples": [], "summary": [], "status": {}}
    )
    monkeypatch.setattr(compare_module, "render", lambda *a: "a table")
    answer = main(
        *("compare", "--model", checkpoint, "--calibrate"),
        *("--prompt-tokens", *lengths, "--max-tokens", "2"),
    )
    assert answer.status == 0, answer.err
    assert {n for _, n in simulation.made} == rows
