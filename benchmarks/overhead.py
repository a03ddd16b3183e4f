"""What the patch costs a call that it leaves alone, and decoding (Section 5.4: exactly neutral).

Every linear layer of every decoded token goes through our function first. Timed is one layer of a known
model, called with one row (decode) and with one row less than may be split; results stay unevaluated there,
because the arithmetic is the same in both arms and the time of a call is not. Then whole decoding steps of a
model.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import cache

from benchmarks import arms, checkpoints
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.processes import groups
from fusionml import loading, patched
from fusionml.measure import order, paired_ratio
from fusionml.patching import session
from fusionml.settings import Settings

ARMS = ("stock", "patched", "stock again")
WIDTH = 1024
MIN_ROWS = Settings().min_rows
CALLS, QUICK_CALLS = 2000, 500
"""Calls of one sample, about 10 ms."""
TOKENS, QUICK_TOKENS = 16, 4
"""Decoding steps of one sample."""
PROMPT = 64

Samples = dict[str, list[float]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)


def cells(options: Options) -> dict[str, Cell]:
    """Both kinds of call, and decoding."""
    calls = QUICK_CALLS if options.quick else CALLS
    return {
        "one row (decode)": {"rows": 1, "width": WIDTH, "calls": calls},
        f"{MIN_ROWS - 1} rows": {"rows": MIN_ROWS - 1, "width": WIDTH, "calls": calls},
        "decoding": {
            "model": options.extra.get("model"),
            "prompt": PROMPT,
            "tokens": QUICK_TOKENS if options.quick else TOKENS,
        },
    }


def memory(cell: Cell) -> int:
    """Bytes of the layer, or of the model."""
    if "model" in cell:
        return checkpoints.memory(cell)
    return 4 * cell["width"] * (cell["width"] + 2 * cell["rows"])


def measure(cell: Cell, options: Options) -> Cell:
    return calls(cell, options) if "width" in cell else decoding(cell, options)


# --- one call


def known_layer(width: int = WIDTH) -> nn.Linear:
    """A layer `[width, width]` of a model that is known, in eval mode."""
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    model.eval()
    mx.eval(model.parameters())
    session().known.add(model, from_loader=False)
    return model.layers[0]


def calls(cell: Cell, options: Options) -> Cell:
    """Seconds of one call, stock and patched."""
    samples = sample(known_layer(cell["width"]), cell["rows"], options.samples, cell["calls"], options.first)
    return {**arms.summarise(samples), "figures": {}}


def conclude(cell: Cell, result: Cell) -> Cell:
    """How much more a patched call takes, or tokens a second."""
    if "width" not in cell:
        medians = {name: arm["median"] for name, arm in result["arms"].items()}
        return {"tokens_per_second": {name: cell["tokens"] / one for name, one in medians.items() if one}}
    stock, patched, again = (result["arms"][name]["samples"] for name in ARMS)
    more = extra(stock, patched, groups(result))
    return {
        "extra_seconds_a_call": more["value"],
        "extra": more,
        "extra_of_stock_again": extra(stock, again, groups(result)),
    }


def seconds(call: Callable[[], Any], count: int) -> float:
    """Seconds of one call, the mean of `count` after as many again to warm up Python's own caches."""
    repeat = range(count)
    for _ in repeat:
        call()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in repeat:
            call()
        return (time.perf_counter() - start) / count
    finally:
        gc.enable()


def sample(layer: nn.Linear, rows: int, pairs: int, count: int, before: int = 0) -> Samples:
    """Seconds of a call with `rows` rows, `pairs` samples of each arm in turns, `before` taken elsewhere."""
    x = mx.ones((1, rows, layer.weight.shape[1]))
    mx.eval(x)
    samples: Samples = {arm: [] for arm in ARMS}
    for arm in order(ARMS, pairs, before=before):
        with patched(enabled=True, min_rows=MIN_ROWS) if arm == "patched" else contextlib.nullcontext():
            samples[arm].append(seconds(lambda: layer(x), count))
    return samples


def extra(
    stock: Sequence[float], treated: Sequence[float], by_process: Sequence[int] | None = None
) -> dict[str, float | None]:
    """Seconds that a treated call takes more than stock, with its 95 % interval, from the pairs' ratios."""
    ratio, base = paired_ratio(stock, treated, groups=by_process), float(np.median(stock))

    def more(speed_up: float | None) -> float | None:
        return None if speed_up is None else base / speed_up - base

    return {"value": more(ratio.value), "low": more(ratio.high), "high": more(ratio.low)}


# --- decoding


def decoding(cell: Cell, options: Options) -> Cell:
    """Decoding steps of a model that was loaded while patched, stock and patched; one sample is all steps."""
    with patched(enabled=True):
        model, _, _, name = loading.load(cell["model"])
    prompt, steps = mx.arange(cell["prompt"])[None] % 16, cell["tokens"]
    kept = cache.make_prompt_cache(model)
    first = model(prompt, kept)[:, -1:].argmax(-1)
    mx.eval(first, [layer.state for layer in kept])

    def decode() -> mx.array:
        cache.trim_prompt_cache(kept, kept[0].offset - cell["prompt"])
        tokens = [first]
        for _ in range(steps):
            tokens.append(model(tokens[-1], kept)[:, -1:].argmax(-1))
            mx.eval(tokens[-1])
        return mx.concatenate(tokens)

    result = arms.measure({"stock": decode, "patched": Arm(decode, patched)}, options, tolerance=0.0)
    return {**result, "figures": {"model": name}}


EXPERIMENT = Experiment(
    name="overhead",
    title="What the patch costs where it does nothing: a call, and decoding",
    paper="Section 5.4",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(150, 0),
    arguments=add_arguments,
    conclude=conclude,
)
