"""One layer of experts, every way we know to compute it.

Without a GPU MLX gathers dense experts in float32 only, and for quantised ones unpacks the weights again for
every row; there both streams run one dense product an expert.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial

import mlx.core as mx
import numpy as np

from benchmarks import arms
from benchmarks.arms import Call
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import experts, machine, split
from fusionml.calibrate import TOLERANCE
from fusionml.quantized import Packed

FLAGS = {"experts": 64, "top": 8, "tokens": 2048, "inputs": 256, "outputs": 256}
QUICK = {"experts": 16, "top": 4, "tokens": 512, "inputs": 128, "outputs": 128}
BITS = (0, 2, 3, 4, 5, 6, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, usual in FLAGS.items():
        parser.add_argument(f"--{name}", type=int, help=f"default: {usual}")
    parser.add_argument(
        "--bits", type=int, nargs="+", default=[0, 4], choices=BITS, help="0 is dense (default: 0 4)"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--ratio", type=float, default=0.5, help="CPU share of the rows (default: 0.5)")


def cells(options: Options) -> dict[str, Cell]:
    """One for each number of bits."""
    extra, usual = options.extra, QUICK if options.quick else FLAGS
    sizes = {name: extra.get(name) or usual[name] for name in FLAGS}
    more = {"dtype": extra.get("dtype", "float32"), "ratio": extra.get("ratio", 0.5)}
    return {
        f"{bits}-bit" if bits else "dense": {**sizes, "bits": bits, **more}
        for bits in extra.get("bits", (0, 4))
    }


def memory(cell: Cell) -> int:
    """Bytes of all experts, three times in float32, and of the rows."""
    rows = cell["tokens"] * cell["top"]
    weights = cell["experts"] * cell["inputs"] * cell["outputs"]
    return 4 * (3 * weights + 4 * rows * (cell["inputs"] + cell["outputs"]))


def measure(cell: Cell, options: Options) -> Cell:
    """Stock where MLX can, one product an expert, and every form of the split."""
    dtype = getattr(mx, cell["dtype"])
    x, indices = call(cell, dtype)
    found = ways(cell, x, weight(cell, dtype), indices)
    # In half types stock gathers on a GPU only: there one product an expert is what the rest is held against.
    can = machine.backend() != "cpu" or dtype == mx.float32 or cell["bits"]
    baseline = "stock" if can else "dense"
    tolerance = TOLERANCE[cell["dtype"]]
    result = arms.measure(found, options, baseline=baseline, tolerance=tolerance)
    return {**result, "figures": {"rows": x.shape[0], "cpu_rows": split.cpu_rows(x.shape[0], cell["ratio"])}}


def call(cell: Cell, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    """Rows as a router leaves them: every token goes to `top` different experts, rows sorted by expert."""
    scores = np.random.default_rng(0).standard_normal((cell["tokens"], cell["experts"]))
    chosen = np.argpartition(scores, -cell["top"], axis=-1)[:, -cell["top"] :]
    indices = mx.array(np.sort(chosen.reshape(-1)).astype(np.uint32))
    x = mx.random.normal((indices.size, 1, cell["inputs"]), key=mx.random.key(0)).astype(dtype)
    mx.eval(x, indices)
    return x, indices


def weight(cell: Cell, dtype: mx.Dtype) -> experts.Weight:
    """The layer's evaluated weight `[experts, outputs, inputs]`, packed where it has bits."""
    shape = (cell["experts"], cell["outputs"], cell["inputs"])
    made = (mx.random.normal(shape, key=mx.random.key(1)) * cell["inputs"] ** -0.5).astype(dtype)
    if not cell["bits"]:
        mx.eval(made)
        return made
    packed = Packed(*mx.quantize(made, 64, cell["bits"]), 64, cell["bits"])
    mx.eval(packed.arrays)
    return packed


def ways(cell: Cell, x: mx.array, weight: experts.Weight, indices: mx.array) -> dict[str, Call]:
    """Every way by name."""
    m, call = split.cpu_rows(x.shape[0], cell["ratio"]), experts.Call(x, weight, None, indices)
    found: dict[str, Call] = {
        "stock": partial(experts.stock, call),
        "dense": partial(experts.dense, call, "eager"),
    }
    forms = experts.FORMS if cell["bits"] else (experts.GATHER, experts.EACH)
    for form, cpu_dtype in itertools.product(forms, arms.cpu_types(x.dtype)):
        found[f"split, {form}, {cpu_dtype}"] = partial(experts.run_experts, call, m, form, "eager", cpu_dtype)
    return found


EXPERIMENT = Experiment(
    name="experts",
    title="One layer of experts, every way to compute it",
    paper="beyond the paper",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(10, 2),
    arguments=add_arguments,
)
