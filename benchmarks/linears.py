"""The linear part of a model's prompt phase alone: what the split can touch at all.

Every live linear layer of the model, in the order of the model, on evaluated inputs of one number of rows:
all stock, then all split. Attention, norms and the rest are not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import arms, checkpoints, library
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import loading, patched, status
from fusionml.calibrate import TOLERANCE
from fusionml.measure import relative_error
from fusionml.patching import session
from fusionml.split import dtype_name

ROWS, QUICK_ROWS = (511,), (127,)
"""Prompts of 512 and 128 tokens, of which MLX-LM holds the last one back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="rows of each call (default: 511)")


def cells(options: Options) -> dict[str, Cell]:
    """One for each number of rows."""
    model = options.extra.get("model")
    rows = options.extra.get("rows") or (QUICK_ROWS if options.quick else ROWS)
    return {f"{n} rows": {"model": model, "rows": n} for n in rows}


def live_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a known model that its prompt phase reads, each once, in the model's order."""
    live = {id(layer.ref()) for layer in session().known.layers() if layer.live}
    return [m for _, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in live]


def inputs(layers: Sequence[nn.Linear], rows: int) -> list[mx.array]:
    """An evaluated input `[1, rows, K]` for each layer, of its weight's type; equal ones are one array."""
    made: dict[tuple[int, mx.Dtype], mx.array] = {}
    for layer in layers:
        key = (layer.weight.shape[1], layer.weight.dtype)
        if key not in made:
            made[key] = mx.random.normal((1, rows, key[0]), key=mx.random.key(key[0])).astype(key[1])
    mx.eval(made)
    return [made[layer.weight.shape[1], layer.weight.dtype] for layer in layers]


def compute(layers: Sequence[nn.Linear], given: Sequence[mx.array]) -> None:
    """All layers, one after the other, each evaluated; no result is kept: there may be gigabytes of them."""
    for layer, x in zip(layers, given, strict=True):
        mx.eval(layer(x))


def error(layers: Sequence[nn.Linear], given: Sequence[mx.array], arm: Arm) -> float:
    """The largest relative error of any layer in the arm against stock."""
    largest = 0.0
    for layer, x in zip(layers, given, strict=True):
        stock = layer(x)
        with arm.within():
            other = layer(x)
        wide = [np.array(array.astype(mx.float32)) for array in (other, stock)]
        largest = max(largest, relative_error(*wide))
    return largest


def measure(cell: Cell, options: Options) -> Cell:
    """Stock against the split with what the table or the built-in default says.

    Raises:
        UsageError: the model cannot be loaded, or nothing of it may split.
        ValueError: the split computes something else.
    """
    with patched(enabled=True):
        model, _, _, name = loading.load(cell["model"])
    layers = live_layers(model)
    if not session().coverage()["eligible"]:
        raise loading.UsageError(f"{name}: nothing of it may split: {session().coverage()['skipped']}")
    given = inputs(layers, cell["rows"])
    split = library.split_arm(lambda: compute(layers, given), min_rows=min(256, cell["rows"]))
    wrong = error(layers, given, split)
    allowed = TOLERANCE[dtype_name(given[0].dtype)]
    if not wrong <= allowed:
        raise ValueError(f"the split differs from stock by {wrong:.2g}, more than {allowed:.2g}")
    result = arms.measure({"stock": split.call, "split": split}, options, tolerance=None)
    with split.within():
        sites = status()["sites"]
    figures = {"model": name, "layers": len(layers), "sites": sites}
    return {**result, "errors": {"split": wrong}, "figures": figures}


EXPERIMENT = Experiment(
    name="linears",
    title="The linear layers of a prompt alone",
    paper="Section 4",
    cells=cells,
    measure=measure,
    memory=checkpoints.memory,
    samples=(10, 1),
    arguments=add_arguments,
)
