"""The Neural Engine's experiments as far as any system can test them: the program, the line, the search.

All units here are simulated, and no figure in this file was measured. Nothing simulated may become a result.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks import ane, coreml, regression, sustained, three_way, threeway
from benchmarks.experiment import Options
from benchmarks.three_way import STEPS, Shares, ThreeWaySearch, rows_of
from benchmarks.threeway import UNITS

needs_coremltools = pytest.mark.skipif(
    importlib.util.find_spec("coremltools") is None, reason="coremltools, the extra `ane`, is not installed"
)


# --- where they run


@pytest.mark.parametrize("name", ["ane", "threeway"])
@pytest.mark.skipif(sys.platform == "darwin", reason="here they can run")
def test_elsewhere_there_is_one_clear_line_and_no_result(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([name, "--quick", "--results", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"{name}: cannot run here: ")
    assert "macOS" in err
    assert sys.platform in err
    assert list(tmp_path.iterdir()) == []


def test_on_a_mac_without_coremltools_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "`ane`" in (coreml.unavailable() or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert coreml.unavailable() is None


# --- the program


@needs_coremltools
def test_the_program_is_one_product_with_its_weight_baked_in() -> None:
    """Built on any system, run on none but macOS."""
    weight = np.random.default_rng(0).standard_normal((48, 32)).astype(np.float16)
    program = coreml.build(weight, 16, load=False)
    spec = program.get_spec()
    (given_input,), (output,) = spec.description.input, spec.description.output
    assert (given_input.name, list(given_input.type.multiArrayType.shape)) == ("x", [16, 32])
    assert (output.name, list(output.type.multiArrayType.shape)) == ("y", [16, 48])
    half = 65552  # FLOAT16 of CoreML's ArrayDataType
    assert given_input.type.multiArrayType.dataType == output.type.multiArrayType.dataType == half
    function = spec.mlProgram.functions["main"]
    operations = [o.type for o in function.block_specializations[function.opset].operations]
    assert [name for name in operations if name != "const"] == ["linear"]


# --- the line


@settings(deadline=None, max_examples=30)
@given(st.floats(0, 0.05), st.floats(1e-7, 1e-4), st.integers(0, 100))
def test_the_line_finds_what_the_simulated_unit_costs(fixed: float, per_row: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    samples = {
        rows: list((fixed + per_row * rows) * np.exp(0.01 * generator.standard_normal(20)))
        for rows in ane.ROWS
    }
    found = regression.fit(samples)
    scale = fixed + per_row * min(ane.ROWS)
    assert found.fixed == pytest.approx(fixed, abs=0.03 * scale)
    assert found.per_row == pytest.approx(per_row, rel=0.05, abs=0.03 * scale / max(ane.ROWS))
    assert found.fixed_interval[0] <= found.fixed <= found.fixed_interval[1]
    assert found.per_row_interval[0] <= found.per_row <= found.per_row_interval[1]
    assert found.off < 0.05


def test_an_exact_line_is_found_exactly_and_the_papers_unit_is_one() -> None:
    found = regression.fit({rows: [22e-3 + 7e-6 * rows] * 3 for rows in (64, 512, 2048)})
    assert (found.fixed, found.per_row) == (pytest.approx(22e-3), pytest.approx(7e-6))
    assert found.fixed_interval == pytest.approx((22e-3, 22e-3))


def test_what_is_no_line_says_so_and_one_outlier_changes_little() -> None:
    assert regression.fit({n: [1e-6 * n * n] for n in (64, 512, 2048)}).off > ane.LINE_OFF
    calm = {n: [0.02 + 7e-6 * n] * 5 for n in (64, 512, 2048)}
    assert regression.fit({**calm, 512: [*calm[512], 3.0]}).fixed == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("samples", "words"),
    [({64: [1.0]}, "at least 2"), ({64: [], 128: [1.0]}, "64"), ({64: [0.0], 1: [1.0]}, "64")],
)
def test_no_line_through_nothing(samples: dict[int, list[float]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        regression.fit(samples)


def test_the_cell_of_a_simulated_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole cell with a simulated engine, which rounds its weights to 8 bits."""

    def predict(weight: Any, x: Any) -> Any:
        scale = np.abs(weight).max() / 127
        return (x.astype(np.float32) @ (np.round(weight / scale) * scale).T.astype(np.float32)).astype(
            np.float16
        )

    monkeypatch.setattr(coreml, "build", lambda weight, rows: weight)
    monkeypatch.setattr(coreml, "predict", predict)
    monkeypatch.setattr(coreml, "on_the_neural_engine", lambda program: True)
    parameters = {"inputs": 64, "outputs": 48, "rows": [16, 64, 256]}
    cell = ane.measure(parameters, Options(quick=True, samples=3, warm_ups=1))
    assert json.loads(json.dumps(cell, allow_nan=False))["figures"]["on the Neural Engine"] is True
    assert {name: len(arm["samples"]) for name, arm in cell["arms"].items()} == {
        "16 rows": 3,
        "64 rows": 3,
        "256 rows": 3,
    }
    assert 1e-4 < cell["figures"]["largest error"] == max(cell["errors"].values()) < 0.05


def test_the_figures_are_the_lines() -> None:
    samples = {n: [22e-3 + 7e-6 * n] * 3 for n in (64, 512, 2048)}
    figures = ane.result(samples, dict.fromkeys(samples, 0.014), [True, None, True])["figures"]
    assert (figures["fixed ms"], figures["us a row"]) == (pytest.approx(22), pytest.approx(7))
    assert figures["on the Neural Engine"] is None
    assert figures["a line fits"] is True


# --- the search


def cost(units: list[tuple[float, float, float]], shares: Shares, rows: int) -> float:
    """Simulated seconds: (fixed, per row, slowdown for each other busy unit), all at once."""
    busy = sum(map(bool, shares))
    return max(
        fixed + per_row * rows * n / STEPS * (1 + slowdown * (busy - 1)) if n else 0.0
        for (fixed, per_row, slowdown), n in zip(units, shares, strict=True)
    )


unit = st.tuples(st.sampled_from([0.0, 2e-4]), st.floats(3e-6, 30e-6), st.floats(0, 0.3))
engine = st.tuples(st.floats(5e-3, 24e-3), st.floats(3e-6, 30e-6), st.floats(0, 0.3))


def everywhere(price: Callable[[Shares], float]) -> float:
    return min(price((i, j, STEPS - i - j)) for i in range(STEPS + 1) for j in range(STEPS + 1 - i))


@settings(deadline=None, max_examples=150)
@given(unit, unit, engine, st.sampled_from([512, 2048, 8192, 32768]))
def test_the_search_is_near_the_best_of_the_whole_grid(
    cpu: tuple[float, float, float],
    gpu: tuple[float, float, float],
    slow: tuple[float, float, float],
    rows: int,
) -> None:
    """Within 6 % of all 561 candidates, with less than a third of them timed."""

    def price(shares: Shares) -> float:
        return cost([cpu, gpu, slow], shares, rows)

    found = threeway.search(price, repeats=1)
    assert found.seconds <= 1.06 * everywhere(price)
    assert found.samples < 561 / 3
    assert sum(found.shares.values()) == pytest.approx(1)
    best_alone = min(price(shares) for shares in ((STEPS, 0, 0), (0, STEPS, 0), (0, 0, STEPS)))
    assert found.speedup == pytest.approx(best_alone / found.seconds)
    assert found.speedup >= 1


def test_an_engine_that_costs_more_to_ask_than_the_product_is_left_out() -> None:
    found = threeway.search(
        lambda s: cost([(0, 20e-6, 0.1), (0, 10e-6, 0.1), (22e-3, 7e-6, 0.1)], s, 1024), 1
    )
    assert found.shares["ane"] == 0
    assert found.shares["cpu"] > 0


def test_noise_does_not_mislead_it_far() -> None:
    units = [(0.0, 20e-6, 0.1), (0.0, 10e-6, 0.1), (20e-3, 7e-6, 0.1)]
    generator = np.random.default_rng(3)

    def price(shares: Shares) -> float:
        return cost(units, shares, 16384)

    for _ in range(20):
        found = threeway.search(lambda s: price(s) * float(np.exp(0.02 * generator.standard_normal())), 3)
        steps = tuple(round(STEPS * found.shares[name]) for name in UNITS)
        assert price(steps) <= 1.06 * everywhere(price)


def test_what_the_search_asks_adds_up_and_is_repeated_as_told() -> None:
    search, asked = ThreeWaySearch(UNITS, repeats=2), []
    while (shares := search.next()) is not None:
        asked.append(shares)
        search.tell(shares, cost([(0, 2e-5, 0), (0, 1e-5, 0), (0.01, 1e-5, 0)], shares, 4096))
    assert all(sum(shares) == STEPS and min(shares) >= 0 for shares in asked)
    assert {asked.count(shares) for shares in asked} == {2}
    assert search.result().samples == len(asked)


def test_the_search_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="two different"):
        ThreeWaySearch(("cpu",))
    with pytest.raises(ValueError, match="repeats=0"):
        ThreeWaySearch(UNITS, repeats=0)
    search = ThreeWaySearch(UNITS)
    with pytest.raises(ValueError, match="add up"):
        search.tell((1, 2, 3), 1.0)
    with pytest.raises(ValueError, match="seconds=0"):
        search.tell((STEPS, 0, 0), 0)
    with pytest.raises(RuntimeError, match="not finished"):
        search.result()


@given(st.integers(0, STEPS), st.integers(0, STEPS), st.integers(STEPS, 20000), st.sampled_from([1, 8]))
def test_rows_add_up(one: int, two: int, rows: int, multiple: int) -> None:
    one, two = min(one, two), max(one, two)
    shares = {"cpu": one / STEPS, "gpu": (two - one) / STEPS, "ane": (STEPS - two) / STEPS}
    found = rows_of(shares, rows, multiple)
    assert sum(found.values()) == rows
    assert all(found[name] == 0 for name, share in shares.items() if share == 0)
    assert min(found.values()) >= 0
    with pytest.raises(ValueError, match="add up to 1"):
        rows_of({"cpu": 0.5}, rows)


def test_policy_files_know_no_mlx_and_no_clock() -> None:
    for module in (three_way, regression):
        tree = ast.parse(Path(module.__file__).read_text())
        names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
        names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        assert not [n for n in names if n.split(".")[0] in ("mlx", "time", "benchmarks", "fusionml")]


# --- three units at work


def test_three_units_compute_the_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Neural Engine is simulated by NumPy; the parts, the thread and the join are the real ones."""
    built: list[int] = []

    def build(weight: Any, rows: int) -> Any:
        built.append(rows)
        return SimpleNamespace(weight=weight, rows=rows)

    def predict(program: Any, x: Any) -> Any:
        assert len(x) == program.rows
        return x @ program.weight.T

    monkeypatch.setattr(coreml, "build", build)
    monkeypatch.setattr(coreml, "predict", predict)
    units = threeway.Units(64, 16, 24)
    truth = np.array(units.call({"cpu": 0, "gpu": 64, "ane": 0})().astype(mx.float32))
    assert built == []
    for rows in ((64, 0, 0), (0, 0, 64), (16, 24, 24), (40, 0, 24), (0, 40, 24), (32, 32, 0)):
        found = units.call(dict(zip(UNITS, rows, strict=True)))()
        np.testing.assert_allclose(np.array(found.astype(mx.float32)), truth, atol=0.05)
    assert built == [64, 24], "a program for each number of rows, once"


def test_a_cell_of_simulated_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coreml, "build", lambda weight, rows: weight)
    monkeypatch.setattr(coreml, "predict", lambda weight, x: x @ weight.T)
    parameters = {"rows": 64, "inputs": 16, "outputs": 24, "minutes": 0.005}
    cell = threeway.measure(parameters, Options(quick=True, samples=3))
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    figures = cell["figures"]
    assert sum(figures[f"{name} share"] for name in UNITS) == pytest.approx(1)
    assert figures["stock is"] in [f"{name} alone" for name in UNITS]
    assert set(cell["arms"]) == {"stock", "split"}
    assert {"burst speedup", "sustained speedup"} <= set(figures)


def test_shapes_and_minutes() -> None:
    cells = threeway.cells(Options(scale=1))
    assert [(c["rows"], c["inputs"], c["outputs"]) for c in cells.values()] == list(threeway.SHAPES)
    assert {c["minutes"] for c in threeway.cells(Options(extra={"minutes": 9.0})).values()} == {9.0}
    assert sustained.EXPERIMENT.unavailable() is None
    assert threeway.EXPERIMENT.unavailable is ane.EXPERIMENT.unavailable is coreml.unavailable
