"""Blocks have the paper's widths and MLX-LM's arithmetic; the split arms go through the library."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import fusionml
from benchmarks import block, depth, geometries, library, runner
from benchmarks.experiment import Options
from benchmarks.geometries import GEOMETRIES
from benchmarks.processes import join
from fusionml import split
from fusionml.session import open_table

Fixture = pytest.MonkeyPatch
STOCK = nn.Linear.__call__
SMALL = Options(quick=True, scale=64, samples=3, warm_ups=1)


# --- geometries


@pytest.mark.parametrize(
    ("name", "millions"), [("Llama-3-8B", 218.1), ("GPT-2-XL", 30.7), ("Qwen2.5-7B", 233.0)]
)
def test_weights_of_one_block(name: str, millions: float) -> None:
    """By hand from the models' published widths."""
    assert GEOMETRIES[name].weights / 1e6 == pytest.approx(millions, abs=0.1)
    assert GEOMETRIES[name].scaled(1) == GEOMETRIES[name]


@pytest.mark.parametrize("name", GEOMETRIES)
@pytest.mark.parametrize("scale", [1, 2, 8, 16, 64])
def test_scaled_widths(name: str, scale: int) -> None:
    whole, small = GEOMETRIES[name], GEOMETRIES[name].scaled(scale)
    assert small.head == whole.head
    assert small.heads % small.kv_heads == 0
    assert small.hidden >= 128
    assert small.kv_heads * small.head >= 128 or whole.head < 128
    assert small.hidden <= max(128, whole.hidden / scale * 1.5)
    assert small.intermediate / small.hidden == pytest.approx(whole.intermediate / whole.hidden, rel=0.2)


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_block_is_the_models_own_with_the_counted_weights(name: str) -> None:
    geometry = GEOMETRIES[name].scaled(64)
    made = geometries.stack(geometry, 2, mx.float16)
    assert [type(b).__module__ for b in made.blocks] == [f"mlx_lm.models.{geometry.module}"] * 2
    arrays = dict(tree_flatten(made.parameters()))
    assert {a.dtype for a in arrays.values()} == {mx.float16}
    assert sum(a.size for a in arrays.values() if a.ndim == 2) == 2 * geometry.weights
    first, second = (
        a for path, a in arrays.items() if path.endswith("o_proj.weight") or "attn.c_proj.w" in path
    )
    assert not mx.array_equal(first, second).item()
    x = mx.random.normal((1, 40, geometry.hidden)).astype(mx.float16)
    whole = made(x)
    assert mx.all(mx.isfinite(whole)).item()
    assert mx.array_equal(whole, made.blocks[1](made.blocks[0](x, "causal"), "causal")).item()
    # Causal: a row does not depend on the rows behind it.
    assert mx.allclose(made(x[:, :20]), whole[:, :20], rtol=1e-2, atol=1e-2).item()


# --- cells


def test_the_papers_cells() -> None:
    cells = block.cells(Options())
    assert [(c["geometry"], c["rows"]) for c in cells.values()][:4] == [
        ("Llama-3-8B", n) for n in (1024, 2048, 4096, 8192)
    ]
    assert len(cells) == 12
    llama = cells["Llama-3-8B, 1024 rows"]
    assert (llama["hidden"], llama["intermediate"], llama["heads"], llama["kv_heads"]) == (4096, 14336, 32, 8)


def test_native_is_a_cell_of_its_own_where_auto_widens(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(split, "resolve_cpu_dtype", lambda name, dtype: "float32" if name == "auto" else name)
    cells = block.cells(Options(extra={"rows": [1024], "geometry": ["GPT-2-XL", "Qwen2.5-7B"]}))
    assert {name: cell["cpu_dtype"] for name, cell in cells.items()} == {
        "GPT-2-XL, 1024 rows": "auto",
        "GPT-2-XL, 1024 rows, native": "native",
        "Qwen2.5-7B, 1024 rows": "auto",
    }


def test_depth_has_one_block_and_many_of_the_same_widths() -> None:
    cells = depth.cells(Options())
    assert [c["blocks"] for c in cells.values()] == [1, 32] * 3
    assert list(cells)[:2] == ["2048 rows, 1 block", "2048 rows, 32 blocks"]
    assert depth.cells(Options(scale=16))["2048 rows, 8 blocks"]["rows"] == 128
    one, many = (dict(c) for c in list(cells.values())[:2])
    del one["blocks"], many["blocks"]
    assert one == many


def test_memory_counts_every_block_and_the_scores_of_a_cpu(monkeypatch: Fixture) -> None:
    cells = depth.cells(Options(extra={"dtype": "float16"}))
    monkeypatch.setattr(block.machine, "backend", lambda: "metal")
    needed = block.memory(cells["8192 rows, 32 blocks"])
    assert 34 * 218.1e6 * 2 < needed < 34 * 218.1e6 * 2 + 2e9
    monkeypatch.setattr(block.machine, "backend", lambda: "cpu")
    assert block.memory(cells["8192 rows, 32 blocks"]) - needed == 2 * 32 * 8192**2 * 2


def test_the_paper_stack_is_refused_in_8_gb(monkeypatch: Fixture) -> None:
    """The paper excluded a 15.6 GB model resident in 1.8 GB."""
    monkeypatch.setattr(runner.pressure, "read", lambda: runner.pressure.Reading(free_bytes=int(1.8e9)))
    needed = block.memory(depth.cells(Options(extra={"dtype": "float16"}))["2048 rows, 32 blocks"])
    assert any("it needs 1" in reason and "1.8 GB is free" in reason for reason in runner.refusals(needed))


# --- measuring


def test_the_arms_of_a_block_are_split_by_the_library(monkeypatch: Fixture) -> None:
    splits: list[int] = []
    run_linear = split.run_linear

    def spy(*arguments: object) -> mx.array:
        splits.append(arguments[3])  # type: ignore[arg-type]
        return run_linear(*arguments)  # type: ignore[arg-type]

    cell = {**block.parameters(SMALL, "GPT-2-XL", 4096, blocks=2), "rows": 128}
    table, shares = library.calibrated(geometries.model(block.geometry_of(cell), 2, mx.float32), [128], 0.5)
    assert len(open_table(table)) == sum(share["ratio"] is not None for share in shares.values())
    monkeypatch.setattr(library, "calibrated", lambda *_: (table, shares))
    monkeypatch.setattr(split, "run_linear", spy)
    result = join(block.EXPERIMENT, cell, [block.measure(cell, SMALL)])
    json.dumps(result, allow_nan=False)
    assert list(result["arms"]) == ["stock", "fixed 0.30", "fixed 0.50", "calibrated", "stock again"]
    runs = 1 + 1 + 3  # verified, warmed up, timed
    assert splits.count(split.cpu_rows(128, 0.30)) >= runs * 2 * 4
    assert result["figures"]["calls"]["split"] >= 2 * runs * 2 * 4
    assert max(result["errors"].values()) < 1e-3
    assert result["figures"]["sites"] == shares
    best = result["figures"]["best"]
    assert result["figures"]["speedup"] == max(r["value"] for r in result["ratios"].values())
    assert result["figures"]["speedup"] == result["ratios"][best]["value"]


def test_stock_is_not_split(monkeypatch: Fixture) -> None:
    made = geometries.stack(GEOMETRIES["GPT-2-XL"].scaled(64), 1, mx.float32)
    library.know(made)
    assert nn.Linear.__call__ is STOCK
    x = mx.ones((1, 512, 128))
    arms = library.split_arms(lambda: made(x), None, min_rows=2)
    before = fusionml.status()["calls"].get("split", 0)
    mx.eval(made(x))
    assert fusionml.status()["calls"].get("split", 0) == before == 0
    with arms["fixed 0.30"].within():
        mx.eval(made(x))
    assert fusionml.status()["calls"]["split"] == 4
    assert nn.Linear.__call__ is STOCK


def test_a_gpu_has_no_second_fixed_share(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(library.machine, "backend", lambda: "metal")
    assert list(library.split_arms(lambda: None, "table")) == ["fixed 0.30", "calibrated"]
    monkeypatch.setattr(library.machine, "backend", lambda: "cuda")
    assert list(library.split_arms(lambda: None, None)) == ["fixed 0.30"]


def test_a_quick_run_calibrates_for_a_tenth_of_the_time(monkeypatch: Fixture) -> None:
    clock = iter([0.0, 1.0, 0.0, 1.0])
    monkeypatch.setattr(library.time, "perf_counter", lambda: next(clock))
    assert library.calibration_seconds(lambda: mx.ones(1), Options()) == 100.0
    assert library.calibration_seconds(lambda: mx.ones(1), Options(quick=True)) == 10.0
