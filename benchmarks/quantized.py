"""One quantised layer at several numbers of rows, every way we know to compute it.

`python -m benchmarks.quantized`: below some number of rows stock wins, because a weight must be dequantised
whole however few the rows are.
"""

from __future__ import annotations

import argparse
import itertools

import mlx.core as mx

from benchmarks.arms import Arms, table
from fusionml import machine, quantized, split
from fusionml.quantized import Packed


def main() -> None:
    options = _options()
    dtype = getattr(mx, options.dtype)
    weight = mx.random.normal((options.outputs, options.inputs), key=mx.random.key(1)) * options.inputs**-0.5
    packed = Packed(
        *mx.quantize(weight.astype(dtype), options.group_size, options.bits), options.group_size, options.bits
    )
    dense = packed.astype(mx.float32).dense()
    mx.eval(dense, packed.arrays)
    del weight
    print(
        f"{options.inputs} by {options.outputs}, {options.bits} bits in groups of {options.group_size}, "
        f"{options.dtype}; the dense weight is {dense.size * dtype.size / 2**20:.1f} MiB; "
        f"backend {machine.backend()}, {machine.cores()} cores"
    )
    for rows in options.rows:
        x = mx.random.normal((rows, options.inputs), key=mx.random.key(0)).astype(dtype)
        reference = x.astype(mx.float32) @ dense.T
        mx.eval(x, reference)
        m = split.cpu_rows(rows, options.ratio)
        print(f"\n{rows} rows, {m} of them on the CPU stream")
        print(table(_arms(x, packed, m), reference, options.pairs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized", description=__doc__)
    add = parser.add_argument
    add("--inputs", type=int, default=1024)
    add("--outputs", type=int, default=1024)
    add("--bits", type=int, default=4, choices=[2, 3, 4, 5, 6, 8])
    add("--group-size", type=int, default=64, choices=[32, 64, 128])
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"], help="of the scales")
    add("--rows", type=int, nargs="+", default=[4, 16, 64, 256, 512])
    add("--ratio", type=float, default=0.5, help="CPU share of the rows (default: 0.5)")
    add("--pairs", type=int, default=8, help="how often each arm is timed (default: 8)")
    return parser.parse_args()


def _arms(x: mx.array, packed: Packed, m: int) -> Arms:
    arms: Arms = {
        "stock": lambda: packed.multiply(x),
        "dense": lambda: quantized.dense(x, packed, None, "eager"),
    }
    wide = ("native", "float32") if x.dtype != mx.float32 else ("native",)
    for form, cpu_dtype in itertools.product(quantized.FORMS, wide):
        arms[f"split, {form}, {cpu_dtype}"] = lambda form=form, cpu_dtype=cpu_dtype: quantized.run_quantized(
            x, packed, None, m, form, "eager", cpu_dtype
        )
    return arms


if __name__ == "__main__":
    main()
