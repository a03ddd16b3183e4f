"""CPU, GPU and Neural Engine on one FFN-shaped product: the best shares under contention (Section 6).

The shares are searched while all three run, then held for minutes: burst and sustained apart, as the paper
has them. macOS only; nothing here is ever simulated in a result.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import arms, coreml
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.sustained import summary, watch
from benchmarks.three_way import STEPS, Found, Shares, ThreeWaySearch, rows_of
from fusionml import split

SHAPES = ((8192, 4096, 14336), (8192, 1600, 6400))
"""Rows, inputs, outputs: the FFN of Llama-3-8B and of GPT-2-XL, at batch scale."""
UNITS = ("cpu", "gpu", "ane")
MINUTES, QUICK_MINUTES = 3.0, 0.5
TOLERANCE = 3e-2
"""Relative to the largest output: the Neural Engine's weights alone cost the paper 1.4 %."""


def cells(options: Options) -> dict[str, Cell]:
    minutes = options.extra.get("minutes") or (QUICK_MINUTES if options.quick else MINUTES)
    found: dict[str, Cell] = {}
    for shape in SHAPES:
        rows, inputs, outputs = (max(STEPS, n // options.scale) for n in shape)
        sizes = {"rows": rows, "inputs": inputs, "outputs": outputs, "minutes": minutes}
        found[f"{rows} x {inputs} x {outputs}"] = sizes
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, help="how long the shares are held (default: 3, quick: 0.5)")


def memory(parameters: Cell) -> int:
    rows, inputs, outputs = (parameters[name] for name in ("rows", "inputs", "outputs"))
    # Each program has a copy of the weight, and a search visits a fraction of the row counts.
    return 2 * (rows * inputs + (STEPS // 2 + 1) * inputs * outputs + 4 * rows * outputs)


class Units:
    """The three units at work on one product; a Neural Engine program for each row count."""

    def __init__(self, rows: int, inputs: int, outputs: int) -> None:
        generator = np.random.default_rng(0)
        self.rows = rows
        self._x = generator.standard_normal((rows, inputs)).astype(np.float16)
        self._weight = generator.standard_normal((outputs, inputs)).astype(np.float16)
        self._mx_x, self._mx_weight = mx.array(self._x), mx.array(self._weight)
        self._programs: dict[int, Any] = {}
        self._thread = ThreadPoolExecutor(1)
        mx.eval(self._mx_x, self._mx_weight)

    def call(self, rows: dict[str, int]) -> Callable[[], mx.array]:
        """The product with so many rows for each unit, joined; ready to be called many times."""
        ane = rows["ane"]
        if ane and ane not in self._programs:
            self._programs[ane] = coreml.build(self._weight, ane)
        return lambda: self._together(rows["cpu"], rows["gpu"], ane)

    def _together(self, cpu: int, gpu: int, ane: int) -> mx.array:
        """The Neural Engine takes the last rows, in a thread of its own, while MLX computes the others."""
        waiting: Future[coreml.Half] | None = None
        if ane:
            waiting = self._thread.submit(coreml.predict, self._programs[ane], self._x[cpu + gpu :])
        parts = []
        if cpu:
            with mx.stream(split.cpu_stream):
                parts.append(self._mx_x[:cpu] @ self._mx_weight.T)
        if gpu:
            parts.append(self._mx_x[cpu : cpu + gpu] @ self._mx_weight.T)
        mx.eval(parts)
        if waiting is not None:
            parts.append(mx.array(waiting.result()))
        return mx.concatenate(parts, axis=0)


def search(seconds: Callable[[Shares], float], repeats: int) -> Found:
    """The best shares, each candidate timed by `seconds` (a whole call, all its units at work)."""
    policy = ThreeWaySearch(UNITS, repeats=repeats)
    while (shares := policy.next()) is not None:
        policy.tell(shares, seconds(shares))
    return policy.result()


def measure(parameters: Cell, options: Options) -> Cell:
    """One shape, on a Mac."""
    rows = parameters["rows"]
    units = Units(rows, parameters["inputs"], parameters["outputs"])
    warm: set[Shares] = set()

    def seconds(shares: Shares) -> float:
        call = units.call(rows_of({u: n / STEPS for u, n in zip(UNITS, shares, strict=True)}, rows))
        if shares not in warm:
            mx.eval(call())  # the first call of a program loads it
            warm.add(shares)
        start = time.perf_counter()
        mx.eval(call())
        return time.perf_counter() - start

    found = search(seconds, max(1, min(3, options.samples // 5)))
    alone = min(found.alone, key=found.alone.__getitem__)
    ways = {
        "stock": Arm(units.call(rows_of({u: float(u == alone) for u in UNITS}, rows))),
        "split": Arm(units.call(rows_of(found.shares, rows))),
    }
    return _held(ways, found, alone, 60 * parameters["minutes"])


def _held(ways: dict[str, Arm], found: Found, alone: str, seconds: float) -> Cell:
    """The shares that were found, held: `stock` is the fastest unit alone."""
    checked = arms.verify(ways, "stock", TOLERANCE)["split"]
    if checked.refused is not None:
        raise ArithmeticError(f"split: {checked.refused}")
    looks = watch(ways["stock"], ways["split"], seconds)
    samples = {"stock": [look.stock for look in looks], "split": [look.split for look in looks]}
    cell = arms.summarise(samples, errors={"split": checked.error})
    cell["figures"] = {
        "stock is": f"{alone} alone",
        **{f"{unit} share": share for unit, share in found.shares.items()},
        **summary(looks),
        "alone": found.alone,
        "searched speedup": found.speedup,
        "samples searched": found.samples,
    }
    cell["trace"] = [vars(look) for look in looks]
    return cell


EXPERIMENT = Experiment(
    name="threeway",
    title="CPU, GPU and Neural Engine on one product",
    paper="Section 6, Neural Engine",
    cells=cells,
    measure=measure,
    memory=memory,
    flop=2.0 * SHAPES[0][0] * SHAPES[0][1] * SHAPES[0][2],
    arguments=arguments,
    processes=1,
    unavailable=coreml.unavailable,
)
