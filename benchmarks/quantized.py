"""One quantised layer at several numbers of rows, every way we know to compute it.

Below some number of rows stock wins, because a weight must be dequantised whole however few the rows are.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import mlx.core as mx

from benchmarks import arms
from benchmarks.arms import Call
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import quantized, split
from fusionml.calibrate import TOLERANCE
from fusionml.quantized import Packed

ROWS, QUICK_ROWS = (4, 16, 64, 256, 512), (16, 256)
BITS = (2, 3, 4, 5, 6, 8)
WIDTH, QUICK_WIDTH = 1024, 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--inputs", type=int, help="default: 1024")
    add("--outputs", type=int, help="default: 1024")
    add("--bits", type=int, default=4, choices=BITS)
    add("--group-size", type=int, default=64, choices=[32, 64, 128])
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"], help="of the scales")
    add("--rows", type=int, nargs="+", help="default: 4 16 64 256 512")
    add("--ratio", type=float, default=0.5, help="CPU share of the rows (default: 0.5)")


def cells(options: Options) -> dict[str, Cell]:
    """One for each number of rows."""
    extra, width = options.extra, QUICK_WIDTH if options.quick else WIDTH
    return {
        f"{rows} rows": {
            "rows": rows,
            "inputs": extra.get("inputs") or width,
            "outputs": extra.get("outputs") or width,
            "bits": extra.get("bits", 4),
            "group_size": extra.get("group_size", 64),
            "dtype": extra.get("dtype", "float32"),
            "ratio": extra.get("ratio", 0.5),
        }
        for rows in extra.get("rows") or (QUICK_ROWS if options.quick else ROWS)
    }


def memory(cell: Cell) -> int:
    """Bytes of the weight, three times in float32, and of inputs and outputs."""
    return 4 * (3 * cell["inputs"] * cell["outputs"] + 4 * cell["rows"] * (cell["inputs"] + cell["outputs"]))


def measure(cell: Cell, options: Options) -> Cell:
    """Stock, dequantised on one unit, and every form of the split."""
    dtype, bits, group = getattr(mx, cell["dtype"]), cell["bits"], cell["group_size"]
    weight = mx.random.normal((cell["outputs"], cell["inputs"]), key=mx.random.key(1))
    packed = Packed(*mx.quantize((weight * cell["inputs"] ** -0.5).astype(dtype), group, bits), group, bits)
    x = mx.random.normal((cell["rows"], cell["inputs"]), key=mx.random.key(0)).astype(dtype)
    mx.eval(x, packed.arrays)
    m = split.cpu_rows(cell["rows"], cell["ratio"])
    result = arms.measure(ways(x, packed, m), options, tolerance=TOLERANCE[cell["dtype"]])
    dense = cell["inputs"] * cell["outputs"] * dtype.size
    return {**result, "figures": {"cpu_rows": m, "dense_bytes": dense}}


def ways(x: mx.array, packed: Packed, m: int) -> dict[str, Call]:
    """Every way by name; `m` rows on the CPU."""
    found: dict[str, Call] = {
        "stock": lambda: packed.multiply(x),
        "dense": lambda: quantized.dense(x, packed, None, "eager"),
    }
    for form, cpu_dtype in itertools.product(quantized.FORMS, arms.cpu_types(x.dtype)):
        found[f"split, {form}, {cpu_dtype}"] = partial(
            quantized.run_quantized, x, packed, None, m, form, "eager", cpu_dtype
        )
    return found


EXPERIMENT = Experiment(
    name="quantized",
    title="One quantised layer, every way to compute it, by rows",
    paper="beyond the paper",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(10, 2),
    arguments=add_arguments,
)
