"""Few rows with the split forced on: that it is forced, that nothing else changes, what is said of it."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import pytest

from benchmarks import decode
from benchmarks.experiment import Options
from fusionml import split

OPTIONS = Options(quick=True, samples=2, warm_ups=1)
BLOCK = {"what": "block", "scale": 32, "hidden": 128, "dtype": "float32", "ratio": 0.5}
MODEL = {"what": "model", "model": None, "ratio": 0.5}


def ratio(low: float | None, value: float, high: float | None) -> dict[str, Any]:
    return {"low": low, "value": value, "high": high}


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, CPU rows) of every product that is split."""
    seen: list[tuple[int, int]] = []
    run = split.run_linear

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, m: int, *rest: Any) -> mx.array:
        seen.append((x.size // x.shape[-1], m))
        return run(x, weight, bias, m, *rest)

    monkeypatch.setattr(split, "run_linear", spy)
    return seen


@pytest.mark.parametrize("rows", [2, 33])
def test_a_block_is_split_at_few_rows_and_computes_the_same(rows: int, splits: list[tuple[int, int]]) -> None:
    ways, _, _, _ = decode._block({**BLOCK, "rows": rows})
    stock = ways["stock"].call()
    mx.eval(stock)
    assert splits == []
    assert mx.allclose(ways["split"].call(), stock, atol=1e-4 * mx.abs(stock).max().item())
    assert splits == [(rows, split.cpu_rows(rows, 0.5))] * 7


@pytest.mark.parametrize("rows", [2, 9])
def test_a_model_is_split_at_few_rows_and_goes_on_from_the_same_context(
    rows: int, splits: list[tuple[int, int]]
) -> None:
    ways, tolerance, dtype, told = decode._model({**MODEL, "rows": rows})
    splits.clear()
    assert (dtype, told["model"]) == ("bfloat16", "demo")
    assert told["calls"]["split"] > 0
    logits = {}
    for name in ("stock", "split", "stock", "split"):
        with ways[name].within():
            found = ways[name].call()
            mx.eval(found)
        assert found.shape[1] == rows
        first = logits.setdefault(name, found)
        assert mx.array_equal(first, found), "the second call saw what the first one left in the cache"
    assert splits
    assert {seen for seen, _ in splits} == {rows}
    largest = mx.abs(logits["stock"]).max().item()
    assert mx.abs(logits["split"] - logits["stock"]).max().item() <= tolerance * largest


def test_one_row_has_nothing_to_split(splits: list[tuple[int, int]]) -> None:
    for parameters in ({**BLOCK, "rows": 1}, {**MODEL, "rows": 1}):
        cell = decode.measure(parameters, OPTIONS)
        assert cell["errors"] == {"split": 0.0}
        assert "pair" not in cell["figures"]
    assert splits == []


def test_a_cell_is_plain_data_with_the_default_beside_it() -> None:
    cell = decode.measure({**BLOCK, "rows": 16}, OPTIONS)
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    assert cell["figures"]["by default"] == "stock"
    assert cell["figures"]["pair"]["rows"] == 16
    assert len(cell["arms"]["split"]["samples"]) == 2


@pytest.mark.parametrize(
    ("rows", "found", "verdict"),
    [
        (64, ratio(0.8, 0.9, 0.95), "the default is right"),
        (64, ratio(1.1, 1.2, 1.3), "the default forgoes a gain"),
        (256, ratio(1.1, 1.2, 1.3), "the default is right"),
        (256, ratio(0.8, 0.9, 0.95), "the default loses"),
        (256, ratio(0.9, 1.1, 1.3), "no difference that could be measured"),
        (4, ratio(None, 1.1, None), "not known"),
        (4, None, "not known"),
    ],
)
def test_the_verdict_on_the_default_threshold(rows: int, found: Any, verdict: str) -> None:
    assert decode.verdict(rows, found) == verdict


def test_cells_reach_from_one_row_beyond_the_threshold() -> None:
    cells = decode.cells(Options(scale=16))
    for what in ("block", "model"):
        rows = [cell["rows"] for cell in cells.values() if cell["what"] == what]
        assert {1, 2, 4, 8, 16, 32, 64} <= set(rows)
        assert max(rows) >= decode.THRESHOLD
    assert all(decode.memory(cell) >= 0 for cell in cells.values())
