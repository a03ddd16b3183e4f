"""`python -m benchmarks.overhead`: what the patch costs a call that it leaves alone.

Every linear layer of every decoded token goes through our function first. Timed is one layer of a known
model, called with one row (decode) and with one row less than may be split, stock and patched in turns in one
process, and stock once more under another name, which shows what the machine's noise alone looks like.
Results stay unevaluated: the arithmetic is the same in both arms, the time of a call is not.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks.output import show
from fusionml import machine, patched
from fusionml.measure import order, paired_ratio
from fusionml.patching import session
from fusionml.settings import Settings

ARMS = ("stock", "patched", "stock again")
WIDTH = 1024
MIN_ROWS = Settings().min_rows
CALLS = 2000
"""Calls of one sample, about 10 ms."""
PAIRS = 150

Samples = dict[str, list[float]]


def known_layer(width: int = WIDTH) -> nn.Linear:
    """A layer `[width, width]` of a model that is known, in eval mode."""
    model = nn.Sequential(nn.Linear(width, width, bias=False))
    model.eval()
    mx.eval(model.parameters())
    session().known.add(model, from_loader=False)
    return model.layers[0]


def seconds(call: Callable[[], Any], calls: int) -> float:
    """Seconds of one call, the mean of `calls` after as many again to warm up Python's own caches."""
    repeat = range(calls)
    for _ in repeat:
        call()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in repeat:
            call()
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def sample(layer: nn.Linear, rows: int, pairs: int = PAIRS, calls: int = CALLS) -> Samples:
    """Seconds of a call with `rows` rows, `pairs` samples of each arm in turns."""
    x = mx.ones((1, rows, layer.weight.shape[1]))
    mx.eval(x)
    samples: Samples = {arm: [] for arm in ARMS}
    for arm in order(ARMS, pairs):
        with patched(enabled=True, min_rows=MIN_ROWS) if arm == "patched" else contextlib.nullcontext():
            samples[arm].append(seconds(lambda: layer(x), calls))
    return samples


def extra(stock: Sequence[float], treated: Sequence[float]) -> dict[str, float | None]:
    """Seconds that a treated call takes more than stock, with its 95 % interval, from the pairs' ratios."""
    ratio, base = paired_ratio(stock, treated), float(np.median(stock))

    def more(speed_up: float | None) -> float | None:
        return None if speed_up is None else base / speed_up - base

    return {"value": more(ratio.value), "low": more(ratio.high), "high": more(ratio.low)}


def measure(pairs: int = PAIRS, calls: int = CALLS) -> dict[str, Any]:
    """Both kinds of call, as plain data: seconds, every sample, and the environment before and after."""
    layer, before = known_layer(), machine.stamp()
    cases = []
    for rows in (1, MIN_ROWS - 1):
        samples = sample(layer, rows, pairs, calls)
        stock = samples["stock"]
        cases.append(
            {
                "rows": rows,
                "stock": float(np.median(stock)),
                "extra": {arm: extra(stock, samples[arm]) for arm in ARMS[1:]},
                "samples": samples,
            }
        )
    return {"cases": cases, "environment": before, "conditions_after": machine.conditions()}


def render(result: dict[str, Any]) -> str:
    """The result for people, in microseconds."""
    lines = []
    for case in result["cases"]:
        rows = "1 row (decode)" if case["rows"] == 1 else f"{case['rows']} rows"
        lines.append(f"{rows}: stock {case['stock'] * 1e6:.3f} us a call")
        lines += [f"  {arm:12}{_microseconds(more)}" for arm, more in case["extra"].items()]
    before, after = (result[key]["load_average"] for key in ("environment", "conditions_after"))
    return "\n".join([*lines, f"load average {_load(before)} before, {_load(after)} after"])


def _microseconds(more: dict[str, float | None]) -> str:
    value, low, high = (None if time is None else f"{time * 1e6:+.3f}" for time in more.values())
    return f"{value} us [{low}, {high}]"


def _load(average: Sequence[float] | None) -> str:
    return "not known" if average is None else f"{average[0]:.2f}"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the samples where asked."""
    parser = argparse.ArgumentParser("benchmarks.overhead", description="What the patch costs a small call.")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every sample and the environment here"
    )
    args = parser.parse_args(argv)
    result = measure()
    show(result, render(result), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
