"""One layer of experts, every way we know to compute it: `python -m benchmarks.experts`.

Without a GPU MLX gathers dense experts in float32 only, and for quantised ones unpacks the weights again for
every row; there both streams run one dense product an expert.
"""

from __future__ import annotations

import argparse
import itertools

import mlx.core as mx
import numpy as np

from benchmarks.arms import Arms, table
from fusionml import experts, machine, split
from fusionml.quantized import Packed


def main() -> None:
    options = _options()
    dtype = getattr(mx, options.dtype)
    x, indices = _call(options, dtype)
    weight, reference = _weights(options, dtype, x, indices)
    rows = x.shape[0]
    m = split.cpu_rows(rows, options.ratio)
    kind = f"{options.bits}-bit" if options.bits else "dense"
    print(
        f"{options.experts} experts of {options.inputs} by {options.outputs}, {kind} {options.dtype}; "
        f"{options.tokens} tokens, {options.top} experts each: {rows} rows, {m} of them on the CPU stream; "
        f"backend {machine.backend()}, {machine.cores()} cores"
    )
    arms: Arms = {"stock": lambda: experts.stock(x, weight, None, indices)}
    arms["dense"] = lambda: experts.dense(x, weight, None, indices, "eager")
    wide = ("native", "float32") if dtype != mx.float32 else ("native",)
    forms = experts.FORMS if options.bits else (experts.GATHER, experts.EACH)
    for form, cpu_dtype in itertools.product(forms, wide):
        arms[f"split, {form}, {cpu_dtype}"] = lambda form=form, cpu_dtype=cpu_dtype: experts.run_experts(
            x, weight, None, indices, m, form, "eager", cpu_dtype
        )
    print(table(arms, reference, options.pairs))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.experts", description=__doc__)
    add = parser.add_argument
    add("--experts", type=int, default=64)
    add("--top", type=int, default=8, help="experts of each token (default: 8)")
    add("--tokens", type=int, default=2048)
    add("--inputs", type=int, default=256)
    add("--outputs", type=int, default=256)
    add("--bits", type=int, default=0, choices=[0, 2, 3, 4, 5, 6, 8], help="0 is a dense weight (default)")
    add("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    add("--ratio", type=float, default=0.5, help="CPU share of the rows (default: 0.5)")
    add("--pairs", type=int, default=8, help="how often each arm is timed (default: 8)")
    return parser.parse_args()


def _call(options: argparse.Namespace, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Rows as a router leaves them: every token goes to `top` different experts, rows sorted by expert."""
    random = np.random.default_rng(0)
    scores = random.standard_normal((options.tokens, options.experts))
    chosen = np.argpartition(scores, -options.top, axis=-1)[:, -options.top :]
    indices = mx.array(np.sort(chosen.reshape(-1)).astype(np.uint32))
    x = mx.random.normal((indices.size, 1, options.inputs), key=mx.random.key(0)).astype(dtype)
    mx.eval(x, indices)
    return x, indices


def _weights(
    options: argparse.Namespace, dtype: mx.Dtype, x: mx.array, indices: mx.array
) -> tuple[experts.Weight, mx.array]:
    """The layer's weight, and what it should give, in float32."""
    shape = (options.experts, options.outputs, options.inputs)
    weight: experts.Weight = (mx.random.normal(shape, key=mx.random.key(1)) * options.inputs**-0.5).astype(
        dtype
    )
    dense = weight
    if options.bits:
        weight = Packed(*mx.quantize(weight, 64, options.bits), 64, options.bits)
        dense = weight.astype(mx.float32).dense()
    wide = dense.astype(mx.float32)
    mx.eval(wide, weight.arrays if isinstance(weight, Packed) else weight)
    reference = experts.dense(x.astype(mx.float32), wide, None, indices, "eager")
    mx.eval(reference)
    return weight, reference


if __name__ == "__main__":
    main()
