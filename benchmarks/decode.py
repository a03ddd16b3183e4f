"""Few rows: from how many on a split pays, and whether the default threshold lies beyond (Section 6, Decode).

The split is forced on, for one decoder block and for a real model, at 1 to 64 rows and on to where it may
pay. A single row, which is decoding proper, has nothing to split: it shows what asking costs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache
from mlx_lm.models.llama import TransformerBlock

from benchmarks import arms, pair_model
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.training import DTYPES, HIDDEN, LEAST_WIDTH, WIDTH, default_ratio, geometry
from fusionml import loading, machine, patched, status
from fusionml.blocks import split_twin
from fusionml.pair_model import sentence
from fusionml.settings import Settings

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
QUICK_ROWS = (1, 4, 16, 64, 256)
THRESHOLD = Settings().min_rows
CONTEXT = 32
"""Tokens that the model has read before."""
TOKENS = 200
"""Ids that every vocabulary has."""
TOLERANCE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 2.4e-2}
"""Of one block, relative to its largest output: float16's is the paper's."""
MODEL_TOLERANCE = 0.15
"""Of a whole model's logits: in bfloat16 each layer adds its rounding. Wrong rows would be off by 1."""


# --- cells


def cells(options: Options) -> dict[str, Cell]:
    dtype = "float32" if machine.backend() == "cpu" else "float16"
    block = {
        "what": "block",
        "width": max(LEAST_WIDTH, WIDTH // options.scale),
        "hidden": max(LEAST_WIDTH, HIDDEN // options.scale),
        "dtype": dtype,
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
    parser.add_argument("--model", help="folder or hub id (default: a small one made on the spot)")
    parser.add_argument("--ratio", type=float, help="CPU share (default: the machine's built-in)")


def memory(parameters: Cell) -> int:
    if parameters["what"] == "block":
        width, hidden = parameters["width"], parameters["hidden"]
        return 4 * (4 * width * width + 3 * width * hidden + parameters["rows"] * (8 * width + 4 * hidden))
    folder = Path(parameters["model"] or "")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors")) if parameters["model"] else 0


# --- one cell


def measure(parameters: Cell, options: Options) -> Cell:
    make = _block if parameters["what"] == "block" else _model
    ways, tolerance, dtype, told = make(parameters)
    result = arms.measure(ways, options, tolerance=tolerance)
    rows = parameters["rows"]
    result["figures"] = {
        "rows": rows,
        "by default": "split" if rows >= THRESHOLD else "stock",
        "verdict": verdict(rows, result["ratios"].get("split")),
        "dtype": dtype,
        **told,
    }
    return result


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
    mx.random.seed(0)
    dtype = DTYPES[parameters["dtype"]]
    block = TransformerBlock(geometry(parameters["width"], parameters["hidden"]))
    block.set_dtype(dtype)
    x = mx.random.normal((1, parameters["rows"], parameters["width"])).astype(dtype)
    ratio = default_ratio(dtype) if parameters["ratio"] is None else parameters["ratio"]
    twin = split_twin(block, ratio)
    mx.eval(x, block.parameters())
    told: dict[str, Any] = {"ratio": ratio}
    if parameters["rows"] > 1:
        expected = pair_model.beside(x, block.mlp.gate_proj.weight)
        told |= {"pair": expected, "pair model": sentence(expected)}
    ways = {"stock": Arm(lambda: block(x, "causal")), "split": Arm(lambda: twin(x, "causal"))}
    return ways, TOLERANCE[parameters["dtype"]], parameters["dtype"], told


def _model(parameters: Cell) -> _Made:
    """The same of a real model that goes on from a short context."""
    with patched(enabled=True):
        model, _, _, name = loading.load(parameters["model"])
    linears = [module for _, module in model.named_modules() if isinstance(module, nn.Linear)]
    dtype = linears[0].weight.dtype if linears else mx.bfloat16
    ratio = default_ratio(dtype) if parameters["ratio"] is None else parameters["ratio"]
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
        str(dtype).removeprefix("mlx.core."),
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
)
