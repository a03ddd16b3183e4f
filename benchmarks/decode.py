"""Few rows: from how many on a split pays, and whether the default threshold lies beyond (Section 6, Decode).

The split is forced on, for one decoder block and for a real model, at 1 to 64 rows and on to where it may
pay. A single row, which is decoding proper, has nothing to split: it shows what asking costs.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

from benchmarks import arms, checkpoints, library, pair_model
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.geometries import GEOMETRIES, bytes_needed, stack
from benchmarks.shares import add_ratio, share
from fusionml import loading, patched, split, status
from fusionml.blocks import split_twin
from fusionml.calibrate import TOLERANCE
from fusionml.pair_model import sentence
from fusionml.settings import Settings

GEOMETRY = "Llama-3-8B"
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 16, 64, 256)
THRESHOLD = Settings().min_rows
CONTEXT = 32
"""Tokens that the model has read before."""
TOKENS = 200
"""Ids that every vocabulary has."""
MODEL_TOLERANCE = 0.15
"""Of a whole model's logits: in bfloat16 each layer adds its rounding. Wrong rows would be off by 1."""


# --- cells


def cells(options: Options) -> dict[str, Cell]:
    geometry = GEOMETRIES[GEOMETRY].scaled(options.scale)
    block = {
        "what": "block",
        "scale": options.scale,
        "hidden": geometry.hidden,
        "intermediate": geometry.intermediate,
        "dtype": library.dtype_name(options),
    }
    model = {"what": "model", "model": options.extra.get("model")}
    rows = QUICK_ROWS if options.quick else ROWS
    ratio = options.extra.get("ratio")
    return {
        f"{kind['what']}, {n} {'row' if n == 1 else 'rows'}": {**kind, "rows": n, "ratio": ratio}
        for kind, most in ((block, 512), (model, 256))
        for n in rows
        if n <= most
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)
    parser.add_argument("--dtype", choices=library.DTYPES, help="of the block (default: as `block` has it)")
    add_ratio(parser)


def memory(cell: Cell) -> int:
    if cell["what"] == "model":
        return checkpoints.memory(cell)
    geometry = GEOMETRIES[GEOMETRY].scaled(cell["scale"])
    return bytes_needed(geometry, 1, cell["rows"], getattr(mx, cell["dtype"]).size, fused=False)


# --- one cell


def measure(parameters: Cell, options: Options) -> Cell:
    make = _block if parameters["what"] == "block" else _model
    ways, tolerance, dtype, told = make(parameters)
    result = arms.measure(ways, options, tolerance=tolerance)
    rows = parameters["rows"]
    result["figures"] = {
        "rows": rows,
        "by default": "split" if rows >= THRESHOLD else "stock",
        "dtype": dtype,
        **told,
    }
    return result


def conclude(parameters: Cell, result: Cell) -> Cell:
    """Whether the default threshold does the right thing."""
    return {"verdict": verdict(parameters["rows"], result["ratios"].get("split"))}


def verdict(rows: int, ratio: dict[str, Any] | None) -> str:
    """Whether the default threshold does the right thing at so many rows, by the interval of the ratio."""
    if ratio is None or ratio["low"] is None:
        return "not known"
    if ratio["low"] <= 1 <= ratio["high"]:
        return "no difference that could be measured"
    if (ratio["value"] > 1) == (rows >= THRESHOLD):
        return "the default is right"
    return "the default loses" if rows >= THRESHOLD else "the default forgoes a gain"


_Made = tuple[dict[str, Arm], float, str, dict[str, Any]]


def _block(parameters: Cell) -> _Made:
    """Stock and split of one block, what they may differ by, their type, and what is told of them."""
    dtype = getattr(mx, parameters["dtype"])
    block = stack(GEOMETRIES[GEOMETRY].scaled(parameters["scale"]), 1, dtype)
    x = mx.random.normal((1, parameters["rows"], parameters["hidden"]), key=mx.random.key(0)).astype(dtype)
    ratio = share(parameters, dtype)
    twin = split_twin(block, ratio)
    mx.eval(x, block.parameters())
    told: dict[str, Any] = {"ratio": ratio}
    if parameters["rows"] > 1:
        expected = pair_model.beside(x, block.blocks[0].mlp.gate_proj.weight)
        told |= {"pair": expected, "pair model": sentence(expected)}
    ways = {"stock": Arm(lambda: block(x)), "split": Arm(lambda: twin(x))}
    return ways, TOLERANCE[parameters["dtype"]], parameters["dtype"], told


def _model(parameters: Cell) -> _Made:
    """The same of a real model that goes on from a short context."""
    with patched(enabled=True):
        model, _, _, name = loading.load(parameters["model"])
    linears = [module for _, module in model.named_modules() if isinstance(module, nn.Linear)]
    dtype = linears[0].weight.dtype if linears else mx.bfloat16
    ratio = share(parameters, dtype)
    rows = parameters["rows"]
    tokens = mx.random.randint(0, TOKENS, (1, CONTEXT + rows), key=mx.random.key(0))
    cache = make_prompt_cache(model)
    mx.eval(model(tokens[:, :CONTEXT], cache=cache))

    def go_on() -> mx.array:
        trim_prompt_cache(cache, cache[0].offset - CONTEXT)
        return model(tokens[:, CONTEXT:], cache=cache)

    forced = {"enabled": True, "ratio": ratio, "min_rows": 2, "gate": "off"}
    with patched(**forced):
        mx.eval(go_on())
        calls = status()["calls"]
    ways = {
        "stock": Arm(go_on, lambda: patched(enabled=False)),
        "split": Arm(go_on, lambda: patched(**forced)),
    }
    return (
        ways,
        MODEL_TOLERANCE,
        split.dtype_name(dtype),
        {"ratio": ratio, "model": name, "calls": calls},
    )


EXPERIMENT = Experiment(
    name="decode",
    title="A few rows, with the split forced on",
    paper="Section 6, Decode",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(30, 6),
    arguments=arguments,
    conclude=conclude,
)
