"""The pair model against simulated units and exhaustive grids; the paper's M1; `calibrate --explain`.

Every pair here is simulated: none of these figures was measured. The paper's own are named as such.
"""

from __future__ import annotations

import ast
import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from benches import simulated
from checkpoints import small_checkpoint
from commands import assert_refused, command
from hypothesis import given
from hypothesis import strategies as st
from pairs import EQUAL_STREAMS, Pair, Unit

from benchmarks import pair_model as measuring
from fusionml import calibrate, pair_model
from fusionml.pair_model import Figures, Searched, contention, predict, split_seconds
from fusionml.ratios import Choice

US = 1e-6
rates = st.floats(0.5, 500)
figures = st.builds(
    Figures, cpu_us=rates, current_us=rates, contention=st.floats(1, 2.5), fixed_us=st.floats(0, 2000)
)


def simulated_pair(f: Figures) -> Pair:
    """The same machine as a simulation that plays both units off against each other."""
    cpu, current = (Unit(0.0, us * US, f.contention) for us in (f.cpu_us, f.current_us))
    return Pair("simulated", cpu, current, f.fixed_us * US)


# --- the model


def test_the_papers_m1_gives_the_papers_speedup_within_five_per_cent() -> None:
    m1 = measuring.PAPER_M1
    assert m1.current_us * 2048 == pytest.approx(20.2e3)  # GPU only, Figure 1
    assert m1.contention == pytest.approx(15.5 / 13.2)  # Section 4
    assert m1.fixed_us == pytest.approx(20.2e3 / 1.34 - 20.2e3 / 1.38)  # eager against ready inputs
    found = predict(m1, measuring.PAPER_ROWS, max_ratio=0.5)
    assert found.ratio == pytest.approx(0.35)
    assert found.speedup == pytest.approx(1.34, rel=0.05)
    assert found.stock_seconds == pytest.approx(20.2e-3)


@given(figures, st.integers(2, 16384), st.floats(0.001, 0.9))
def test_a_split_takes_what_the_simulated_units_take(f: Figures, rows: int, ratio: float) -> None:
    truth = simulated_pair(f)
    assert split_seconds(f, rows, ratio) == pytest.approx(truth.cost(ratio, rows), rel=1e-9)
    assert split_seconds(f, rows, 0.0) == pytest.approx(truth.stock(rows), rel=1e-9)


@given(figures, st.integers(1, 16384), st.sampled_from([0.5, 0.9]))
def test_no_share_of_a_fine_grid_is_better_than_the_predicted(
    f: Figures, rows: int, max_ratio: float
) -> None:
    truth, found = simulated_pair(f), predict(f, rows, max_ratio=max_ratio)
    grid = [truth.cost(max_ratio * i / 500, rows) for i in range(501)]
    assert found.seconds <= min(grid) * (1 + 1e-9)
    assert found.speedup == pytest.approx(truth.stock(rows) / truth.cost(found.ratio, rows), rel=1e-9)
    assert 0 <= found.ratio <= max_ratio
    assert found.speedup >= 1


@given(figures)
def test_beyond_a_contention_the_cpu_costs_more_than_it_saves(f: Figures) -> None:
    beyond = Figures(f.cpu_us, f.current_us, 1 + f.current_us / f.cpu_us + 0.01)
    assert predict(beyond, 4096, max_ratio=1e-3).ratio == 0
    below = Figures(f.cpu_us, f.current_us, max(1.0, 0.99 * (1 + f.current_us / f.cpu_us)))
    if below.contention < 1 + f.current_us / f.cpu_us:
        assert predict(below, 4096).ratio > 0


def test_two_equal_units_nearly_double_and_a_unit_that_uses_both_gains_nothing() -> None:
    cpu = EQUAL_STREAMS.cpu.per_row / US
    assert predict(Figures(cpu, cpu), 2048).speedup == pytest.approx(2)
    assert predict(Figures(cpu, cpu, contention=2.0, fixed_us=50), 2048) == pair_model.Prediction(
        0.0,
        1.0,
        predict(Figures(cpu, cpu), 2048).stock_seconds,
        predict(Figures(cpu, cpu), 2048).stock_seconds,
    )


def test_a_fixed_cost_matters_less_with_more_rows() -> None:
    f = Figures(20, 10, 1.1, 400)
    few, many = predict(f, 64), predict(f, 8192)
    assert (few.ratio, few.speedup) == (0.0, 1.0)
    assert many.speedup > 1.3


@given(st.floats(1e-6, 10), st.floats(1e-6, 10), st.floats(1, 3))
def test_contention_is_what_the_time_together_implies(cpu: float, current: float, factor: float) -> None:
    pair = Pair("simulated", Unit(0, cpu, factor), Unit(0, current, factor))
    assert contention(cpu, current, pair.split(0.5, 2)) == pytest.approx(factor, rel=1e-6)
    assert contention(cpu, current, 0.5 * max(cpu, current)) == 1.0


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"cpu_us": 0.0}, "cpu_us=0.0"),
        ({"current_us": -1.0}, "current_us=-1.0"),
        ({"contention": 0.9}, "contention=0.9"),
        ({"fixed_us": -1.0}, "fixed_us=-1.0"),
        ({"cpu_us": math.nan}, "cpu_us=nan"),
    ],
)
def test_wrong_figures_are_named(wrong: dict[str, float], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Figures(**{"cpu_us": 1.0, "current_us": 1.0, **wrong})


def test_wrong_rows_and_times_are_named() -> None:
    with pytest.raises(ValueError, match="rows=0"):
        predict(Figures(1, 1), 0)
    with pytest.raises(ValueError, match="together=0"):
        contention(1, 1, 0)


def test_the_model_knows_no_mlx_and_no_clock() -> None:
    assert pair_model.__file__ is not None
    tree = ast.parse(Path(pair_model.__file__).read_text())
    imported = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= {
        "__future__",
        "math",
        "collections.abc",
        "dataclasses",
        "statistics",
        "typing",
        "ratios",
    }


# --- taking the figures


def test_figures_are_taken_of_the_parts_that_a_split_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds are simulated: each is what the rows that are computed would take on a known pair."""
    f = Figures(20, 10, 1.25, 0)
    truth, rows = simulated_pair(f), 256

    def seconds(call: Any) -> float:
        made = call()
        parts = [len(part) for part in (made if isinstance(made, tuple) else [made])]
        if len(parts) == 2:
            return truth.split(parts[0] / rows, rows)
        return parts[0] * US * (10 if parts[0] in (rows, rows - m) else 20)

    m = 96  # 256 rows at 10 / (10 + 20), in multiples of 32
    monkeypatch.setattr(measuring, "_seconds", seconds)
    monkeypatch.setattr(measuring, "_join_seconds", lambda parts, repeats: 3e-3)
    monkeypatch.setattr(measuring, "boundary_seconds", lambda: 1e-3)
    found = measuring.measured(mx.ones((1, rows, 8)), mx.ones((16, 8)))
    assert (found.cpu_us, found.current_us) == (pytest.approx(20), pytest.approx(10))
    assert found.contention == pytest.approx(1.25)
    assert found.fixed_us == pytest.approx(4000)


def test_figures_can_be_taken_here_and_are_plain_data() -> None:
    told = measuring.beside(mx.ones((2, 32, 64)), mx.ones((48, 64)), repeats=1)
    assert json.loads(json.dumps(told)) == told
    assert told["rows"] == 64
    assert told["predicted_speedup"] >= 1
    assert f"contention {told['contention']:.2f}" in pair_model.sentence(told)


# --- calibrate --explain


def searched(name: str, f: Figures, ratio: float, rows: int = 1024) -> Searched:
    """What a search finds on the simulated pair `f` when it settles for `ratio`."""
    seconds = split_seconds(f, rows, ratio)
    stock = split_seconds(f, rows, 0.0)
    rates = (1 / f.cpu_us / US, 1 / f.current_us / US)
    return Searched(name, rows, Choice(ratio, stock / seconds - 1, "", 9, 0.0, stock, seconds, *rates))


def test_a_sites_contention_comes_from_the_others() -> None:
    sites = [
        searched("a", Figures(20, 10, 1.9), 0.3),
        searched("b", Figures(30, 10, 1.2), 0.2),
        searched("c", Figures(24, 12, 1.2), 0.25),
    ]
    told = pair_model.explain(sites, 0.0, max_ratio=0.5)
    assert told["a"]["contention"] == pytest.approx(1.2)
    assert told["b"]["contention"] == pytest.approx((1.9 + 1.2) / 2)
    assert told["a"]["contention_from"] == "the other sites"
    assert told["a"]["predicted_speedup"] == pytest.approx(predict(Figures(20, 10, 1.2), 1024).speedup)
    assert told["a"]["measured_speedup"] == pytest.approx(10 / (14 * 0.5 / 0.7 * 0 + 7 + 0.9 * 6), rel=1e-6)
    assert told["a"]["measured_ratio"] == 0.3


def test_where_nothing_was_split_the_expectation_is_a_bound_and_says_so() -> None:
    told = pair_model.explain([searched("a", Figures(20, 10, 1.9), 0.0)], 0.0, max_ratio=0.5)
    assert told["a"]["contention"] == 1.0
    assert "bound" in told["a"]["contention_from"]
    assert "bound" in pair_model.render(told)
    one = pair_model.explain([searched("a", Figures(20, 10, 1.3), 0.3)], 0.0, max_ratio=0.5)
    assert one["a"]["contention"] == pytest.approx(1.3)
    assert one["a"]["contention_from"] == "this site's own split"
    assert pair_model.explain([Searched("a", 64, Choice(0.0, 0.0, "", 0, None))], 0.0, max_ratio=0.5) == {}


def test_the_boundary_is_not_taken_for_contention() -> None:
    f = Figures(20, 10, 1.3, 500)
    assert pair_model.slowed(searched("a", f, 0.3), 500 * US) == pytest.approx(1.3)


def explained(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path, *more: str) -> Any:
    simulated(monkeypatch, Pair("simulated", Unit(0, 20 * US, 1.2), Unit(0, 10 * US, 1.2)))
    monkeypatch.setattr(calibrate, "why_not", lambda: [])
    model = str(small_checkpoint(tmp_path / "model"))
    return command(
        capsys, "calibrate", "--model", model, "--rows", "1024", "--table", str(tmp_path / "t.json"), *more
    )


def test_explain_prints_the_model_beside_each_site(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = explained(monkeypatch, capsys, tmp_path, "--explain", "--json")
    assert answer.status == 0, answer
    told = json.loads(answer.out)["pair_model"]
    assert told
    expected = predict(Figures(20, 10, 1.2), 1024, max_ratio=0.5).speedup
    for site in told.values():
        assert (site["cpu_us"], site["current_us"]) == (pytest.approx(20), pytest.approx(10))
        assert site["predicted_speedup"] == pytest.approx(expected, rel=0.02)
        assert site["measured_speedup"] == pytest.approx(expected, rel=0.05)


def test_without_explain_nothing_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "pair_model" not in json.loads(explained(monkeypatch, capsys, tmp_path, "--json").out)


def test_explain_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer = explained(monkeypatch, capsys, tmp_path, "--explain")
    assert "CPU us/row" in answer.out
    assert "(1024 rows)" in answer.out
    assert answer.out.index("CPU share") < answer.out.index("CPU us/row")


def test_explain_needs_a_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(command(capsys, "calibrate", "--show", "--explain"), "--explain needs a measurement")
