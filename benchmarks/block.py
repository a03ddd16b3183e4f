"""One decoder block, stock and split, by sequence length (Section 5.2, Figure 3)."""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx

import fusionml
from benchmarks import arms, library, pair_model
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.geometries import GEOMETRIES, Geometry, bytes_needed, model, stack
from fusionml import machine, split
from fusionml.calibrate import LEAST_ROWS, TOLERANCE
from fusionml.pair_model import sentence

ROWS = (1024, 2048, 4096, 8192)
QUICK_ROWS = (1024, 4096)
PAPER_GEOMETRIES = ("Llama-3-8B", "GPT-2-XL")
SMALLER = {"GPT-2-XL": 2}
"""A GPT-2 block has a seventh of the arithmetic: half the scale makes it as long as the others."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    library.add_dtype(parser)
    parser.add_argument(
        "--geometry", nargs="+", choices=list(GEOMETRIES), default=list(GEOMETRIES), help="default: all"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="the paper's: 1024 2048 4096 8192, then scaled")


def cells(options: Options) -> dict[str, Cell]:
    """One for each geometry and number of rows; `paper_rows` are the rows before scaling.

    Where `auto` widens the CPU's rows to float32, the paper's own blocks are timed in the native type too, as
    the paper did: in a cell of its own, because there the library has been seen to crash.
    """
    rows = options.extra.get("rows") or (QUICK_ROWS if options.quick else ROWS)
    found = {}
    for name in options.extra.get("geometry", GEOMETRIES):
        for n in rows:
            cell = parameters(options, name, n, blocks=1)
            found[f"{name}, {n} rows"] = cell
            if cell["cpu_dtype"] == "auto" and widened(cell) and name in PAPER_GEOMETRIES:
                found[f"{name}, {n} rows, native"] = {**cell, "cpu_dtype": "native"}
    return found


def widened(cell: Cell) -> bool:
    """Whether the CPU's rows are computed in float32 although the weights are not."""
    return split.resolve_cpu_dtype("auto", getattr(mx, cell["dtype"])) != "native"


def parameters(options: Options, name: str, rows: int, blocks: int) -> Cell:
    """What one cell computes: a geometry and rows, both scaled."""
    scale = max(1, options.scale // SMALLER.get(name, 1))
    geometry = GEOMETRIES[name].scaled(scale)
    return {
        "geometry": name,
        "paper_rows": rows,
        "rows": max(LEAST_ROWS, rows // scale),
        "scale": scale,
        "blocks": blocks,
        "hidden": geometry.hidden,
        "intermediate": geometry.intermediate,
        "heads": geometry.heads,
        "kv_heads": geometry.kv_heads,
        "dtype": library.dtype_name(options),
        "cpu_dtype": options.extra.get("cpu_dtype", "auto"),
    }


def geometry_of(cell: Cell) -> Geometry:
    return GEOMETRIES[cell["geometry"]].scaled(cell["scale"])


def memory(cell: Cell) -> int:
    """Bytes that the blocks need; without a GPU attention keeps its scores."""
    fused = machine.backend() != "cpu"
    size = getattr(mx, cell["dtype"]).size
    return bytes_needed(geometry_of(cell), cell["blocks"], cell["rows"], size, fused)


def measure(cell: Cell, options: Options) -> Cell:
    """Stock, the paper's fixed share, the built-in one and calibrated shares, on one block and one input."""
    geometry, dtype, rows = geometry_of(cell), getattr(mx, cell["dtype"]), cell["rows"]
    blocks = stack(geometry, cell["blocks"], dtype)
    x = mx.random.normal((1, rows, geometry.hidden), key=mx.random.key(0)).astype(dtype)
    mx.eval(x)

    def call() -> mx.array:
        return blocks(x)

    one = stack(geometry, 1, dtype)
    seconds = library.calibration_seconds(lambda: one(x), options)
    two = model(geometry, 2, dtype)
    table, shares = library.calibrated(two, [rows], seconds, cell["cpu_dtype"], options.shared)
    library.know(blocks)
    split = library.split_arms(call, table, min_rows=max(2, rows // 2), cpu_dtype=cell["cpu_dtype"])
    result = arms.measure({"stock": call, **split}, options, tolerance=TOLERANCE[cell["dtype"]])
    told = widest(geometry, dtype, rows, cell["cpu_dtype"])
    expected = {"pair": told, "pair model, its widest linear layer": sentence(told)}
    figures = {"sites": shares, "calls": fusionml.status()["calls"], **expected}
    return {**result, "figures": figures}


def widest(geometry: Geometry, dtype: mx.Dtype, rows: int, cpu_dtype: str) -> dict[str, Any]:
    """What the pair model expects of a block's widest linear layer; attention is not in it."""
    shape = (geometry.intermediate, geometry.hidden)
    x = mx.random.normal((rows, geometry.hidden), key=mx.random.key(1)).astype(dtype)
    weight = (mx.random.normal(shape, key=mx.random.key(2)) * geometry.hidden**-0.5).astype(dtype)
    return pair_model.beside(x, weight, cpu_dtype=cpu_dtype)


def conclude(parameters: Cell, result: Cell) -> Cell:
    """Which arm was fastest, and by how much."""
    ratios = result["ratios"]
    best = max(ratios, key=lambda name: ratios[name]["value"], default=None)
    return {"best": best, "speedup": ratios[best]["value"] if best else None}


EXPERIMENT = Experiment(
    name="block",
    title="One decoder block: split over stock by sequence length",
    paper="Section 5.2, Figure 3",
    cells=cells,
    measure=measure,
    memory=memory,
    arguments=add_arguments,
    conclude=conclude,
)
