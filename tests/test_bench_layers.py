"""Overhead, linear layers, calibration, quantised layers and experts measure what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import small_checkpoint

from benchmarks import arms, calibration, checkpoints, experts, linears, overhead, quantized
from benchmarks.experiment import NAMES, Options, load
from benchmarks.processes import join
from fusionml import forwards, loading, split

Fixture = pytest.MonkeyPatch
FEW = Options(quick=True, samples=3, warm_ups=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3))


@pytest.mark.parametrize("name", ["linears", "calibration", "quantized", "experts", "overhead"])
def test_cells_are_plain_data_that_need_no_model(name: str) -> None:
    chosen = load(name)
    assert (chosen.name, NAMES[name]) == (name, f"benchmarks.{name}")
    for quick in (True, False):
        cells = chosen.cells(Options(quick=quick))
        assert json.loads(json.dumps(cells)) == cells
        assert all(chosen.memory(cell) >= 0 for cell in cells.values())


def test_memory_of_a_model_is_that_of_its_files(checkpoint: str) -> None:
    size = sum(file.stat().st_size for file in Path(checkpoint).glob("*.safetensors"))
    assert size > 0
    assert checkpoints.memory({"model": checkpoint}) == int(size * checkpoints.OVERHEAD)
    assert checkpoints.memory({"model": None}) == checkpoints.DEMO_BYTES
    assert checkpoints.memory({"model": "somebody/model"}) == 0


# --- overhead


def test_stock_is_mlxs_own_function_and_patched_is_ours(monkeypatch: Fixture) -> None:
    stock, seen = nn.Linear.__call__, []
    layer = overhead.known_layer(128)

    def seconds(call: Any, calls: int) -> float:
        seen.append(nn.Linear.__call__ is stock)
        assert call().shape == (1, 255, 128)
        return 1.0

    monkeypatch.setattr(overhead, "seconds", seconds)
    samples = overhead.sample(layer, 255, pairs=2, count=1)
    assert seen == [True, False, True, True, False, True], "stock, patched, stock again, and back"
    assert {arm: len(times) for arm, times in samples.items()} == {"stock": 2, "patched": 2, "stock again": 2}


def test_the_calls_are_the_largest_that_stay_stock_and_one_row(monkeypatch: Fixture) -> None:
    large = []
    monkeypatch.setattr(forwards, "decide", lambda *args: large.append(args))
    cells = overhead.cells(FEW)
    assert [cell.get("rows") for cell in cells.values()] == [1, 255, None]
    for cell in list(cells.values())[:2]:
        result = join(overhead.EXPERIMENT, cell, [overhead.measure({**cell, "calls": 3}, FEW)])
        assert json.loads(json.dumps(result)) == result
        assert list(result["arms"]) == ["stock", "patched", "stock again"]
        assert result["aa"]["pairs"] == 3
        assert result["figures"]["extra_seconds_a_call"] == result["figures"]["extra"]["value"]
    assert large == []


def test_the_extra_time_is_the_difference_where_times_are_steady() -> None:
    assert overhead.extra([2.0] * 8, [2.5] * 8) == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
    found = overhead.extra([2.0] * 8, [2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8])
    assert 0.1 <= found["low"] < found["value"] < found["high"] <= 0.8
    assert found["value"] == pytest.approx(0.45, abs=0.01)
    assert overhead.extra([2.0], [3.0]) == {"value": pytest.approx(1.0), "low": None, "high": None}


def test_seconds_are_of_one_call_after_a_warm_up() -> None:
    called = []
    taken = overhead.seconds(lambda: called.append(1), 50)
    assert len(called) == 100
    assert 0 < taken < 1


def test_decoding_gives_the_same_tokens_from_the_same_prompt(checkpoint: str) -> None:
    cell = {"model": checkpoint, "prompt": 8, "tokens": 3}
    result = join(overhead.EXPERIMENT, cell, [overhead.measure(cell, FEW)])
    assert result["errors"] == {"patched": 0.0}
    rates = result["figures"]["tokens_per_second"]
    assert rates["stock"] == pytest.approx(3 / result["arms"]["stock"]["median"])


# --- linears


def test_every_live_layer_is_measured_stock_against_split(monkeypatch: Fixture, checkpoint: str) -> None:
    stock, calls, splits = nn.Linear.__call__, [], []
    run_linear, compute = split.run_linear, linears.compute

    def counted(layers: list[nn.Linear], given: list[mx.array]) -> None:
        calls.append((nn.Linear.__call__ is stock, [tuple(layer.weight.shape) for layer in layers], given))
        before = len(splits)
        compute(layers, given)
        assert len(splits) - before == (0 if calls[-1][0] else len(layers))

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, m: int, *rest: Any) -> mx.array:
        splits.append(m)
        return run_linear(x, weight, bias, m, *rest)

    monkeypatch.setattr(split, "run_linear", spy)
    monkeypatch.setattr(linears, "compute", counted)
    monkeypatch.setenv("FUSIONML_RATIO", "0.25")
    options = Options(samples=2, warm_ups=1, extra={"model": checkpoint, "rows": [300]})
    (cell,) = linears.cells(options).values()
    result = linears.measure(cell, options)
    json.dumps(result, allow_nan=False)
    verified, warm = [True, False], [True, False, True]
    timed = [True, False, True, True, False, True]
    assert [is_stock for is_stock, _, _ in calls] == [*verified, *warm, *timed]
    # Two of three blocks are read by a prompt: four layers of attention, three of the rest, the head never.
    assert calls[0][1] == [(128, 128)] * 14
    assert {tuple(x.shape) for x in calls[0][2]} == {(1, 300, 128)}
    assert {x.dtype for x in calls[0][2]} == {mx.bfloat16}
    assert set(splits) == {split.cpu_rows(300, 0.25)}
    assert result["figures"]["layers"] == 14
    assert 0 <= result["errors"]["split"] <= 2.4e-2
    (site,) = result["figures"]["sites"].values()
    assert (site["arm"], site["ratio"]) == ("split", 0.25)


def test_a_split_that_computes_something_else_is_not_timed(monkeypatch: Fixture, checkpoint: str) -> None:
    monkeypatch.setattr(split, "run_linear", lambda x, weight, *_: 2 * split.stock_linear(x, weight, None))
    with pytest.raises(ValueError, match="the split differs from stock by 1"):
        linears.measure({"model": checkpoint, "rows": 300}, FEW)


def test_layers_are_in_the_order_of_the_model_and_inputs_of_their_widths() -> None:
    layers = [nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 128)]
    layers[1].set_dtype(mx.float16)
    given = linears.inputs(layers, 40)
    assert [x.shape for x in given] == [(1, 40, 128), (1, 40, 256), (1, 40, 128)]
    assert [x.dtype for x in given] == [mx.float32, mx.float16, mx.float32]
    assert given[0] is given[2]
    assert mx.std(given[0]).item() == pytest.approx(1, abs=0.1)


def test_a_model_of_which_nothing_may_split_is_refused(tmp_path: Path) -> None:
    narrow = str(small_checkpoint(tmp_path, hidden_size=64, intermediate_size=64))
    with pytest.raises(loading.UsageError, match="nothing of it may split"):
        linears.measure({"model": narrow, "rows": 300}, FEW)


# --- calibration


def test_the_chosen_share_is_held_against_the_grid(monkeypatch: Fixture, checkpoint: str) -> None:
    monkeypatch.setattr(calibration, "GRID_REPEATS", 1)
    cell = {"model": checkpoint, "shape": 0, "rows": 64, "step": 0.3}
    result = join(calibration.EXPERIMENT, cell, [calibration.measure(cell, FEW)])
    json.dumps(result, allow_nan=False)
    figures = result["figures"]
    assert list(figures["grid"]) == ["0.00", "0.30", "0.60", "0.90"]
    assert figures["grid"][f"{figures['best']:.2f}"] == min(figures["grid"].values())
    assert list(result["arms"]) == ["stock", "chosen", "best of the grid", "stock again"]
    times = {arm: found["median"] for arm, found in result["arms"].items()}
    assert figures["slower_than_best"] == pytest.approx(times["chosen"] / times["best of the grid"] - 1)
    with pytest.raises(loading.UsageError, match="1 shapes that may split, not 10"):
        calibration.measure({**cell, "shape": 9}, FEW)


# --- quantised layers and experts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_of_a_quantised_layer(dtype: str) -> None:
    extra = {"inputs": 128, "outputs": 128, "rows": [64], "dtype": dtype}
    (cell,) = quantized.cells(Options(extra=extra)).values()
    result = quantized.measure(cell, FEW)
    wide = 1 if dtype == "float32" else 2
    assert list(result["arms"])[:2] == ["stock", "dense"]
    assert len(result["arms"]) == 3 + wide * len(quantized.quantized.FORMS)
    assert result["figures"]["cpu_rows"] == 32
    assert all(error is not None for error in result["errors"].values())


@pytest.mark.parametrize(("dtype", "baseline"), [("float32", "stock"), ("bfloat16", "dense")])
def test_every_way_of_experts(dtype: str, baseline: str) -> None:
    sizes = {"experts": 4, "top": 2, "tokens": 32, "inputs": 64, "outputs": 64}
    (cell,) = experts.cells(Options(extra={**sizes, "bits": [0], "dtype": dtype})).values()
    result = experts.measure(cell, FEW)
    # Without a GPU MLX gathers in float32 only: what it refuses is said and not timed.
    assert result["baseline"] == baseline
    refused = [name for name, arm in result["arms"].items() if not arm["samples"]]
    assert ("stock" in refused) == (baseline == "dense")
    assert all("not timed" in result["arms"][name]["warnings"][-1] for name in refused)
    assert "split, each, native" in result["ratios"]


def test_half_types_are_computed_in_float32_as_well() -> None:
    assert arms.cpu_types(mx.float32) == ("native",)
    assert arms.cpu_types(mx.bfloat16) == ("native", "float32")
