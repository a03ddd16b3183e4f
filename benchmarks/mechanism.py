"""One row-split product, every way to ask MLX for it (Section 3, Figure 1).

The input is the output of an operation before, as in every layer but the first; only the arm with ready
inputs has it made already. The timeline tells when each unit was done.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks import arms, library, pair_model
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.processes import groups
from fusionml import machine, split
from fusionml.calibrate import TOLERANCE
from fusionml.measure import overlap
from fusionml.pair_model import sentence
from fusionml.ratios import composed_ratio
from fusionml.settings import check_ratio

ROWS, INPUTS, OUTPUTS = 2048, 1600, 6400
PAPER_RATIO, EQUAL_RATIO = 0.35, 0.50
ONE_A_BUFFER = {"MLX_MAX_OPS_PER_BUFFER": "1"}
BARS = 5
"""Runs whose median makes a bar of the timeline."""
WHOLE, CPU_PART, CURRENT_PART, BOTH = "CPU alone", "CPU part alone", "current part alone", "both parts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    library.add_dtype(parser, cpu_dtype="native")
    parser.add_argument(
        "--ratio",
        type=float,
        nargs="+",
        help="CPU share (default: the paper's 0.35; between two CPU streams 0.5 as well)",
    )


def cells(options: Options) -> dict[str, Cell]:
    """The product for each CPU share, the same with one operation a buffer, and a whole FFN split at once."""
    usual = [EQUAL_RATIO, PAPER_RATIO] if machine.backend() == "cpu" else [PAPER_RATIO]
    found: dict[str, Cell] = {}
    for ratio in options.extra.get("ratio") or usual:
        check_ratio(ratio, split.max_ratio(), "--ratio")
        cell = _parameters(options, ratio)
        found[f"product, CPU share {ratio:.2f}"] = {"what": "product", **cell}
        found[f"one operation a buffer, CPU share {ratio:.2f}"] = {
            "what": "buffers",
            **cell,
            "environ": ONE_A_BUFFER,
        }
        found[f"whole FFN, CPU share {ratio:.2f}"] = {"what": "ffn", **cell}
    return found


def _parameters(options: Options, ratio: float) -> Cell:
    rows, inputs, outputs = (max(32, size // options.scale) for size in (ROWS, INPUTS, OUTPUTS))
    dtype = library.dtype_name(options)
    cpu_dtype = split.resolve_cpu_dtype(options.extra.get("cpu_dtype", "native"), getattr(mx, dtype))
    return {
        "rows": rows,
        "inputs": inputs,
        "outputs": outputs,
        "ratio": ratio,
        "cpu_rows": split.cpu_rows(rows, ratio),
        "dtype": dtype,
        "cpu_dtype": cpu_dtype,
    }


def memory(cell: Cell) -> int:
    """Bytes of weights, their float32 copies, inputs and the outputs of all parts."""
    weights = 2 * cell["inputs"] * cell["outputs"]
    values = cell["rows"] * (4 * cell["inputs"] + 4 * cell["outputs"])
    return 8 * (weights + values)


# --- what is computed


@dataclass(frozen=True)
class Problem:
    """`before` [rows, K] is made; `weight` [N, K] and `back` [K, N] are those of a feed-forward layer."""

    before: mx.array
    weight: mx.array
    back: mx.array
    m: int
    cpu_dtype: str

    def input(self) -> mx.array:
        """The lazy output of an operation on the current stream."""
        return self.before * 0.5

    def parts(self, x: mx.array, boundary: str) -> tuple[mx.array, mx.array]:
        return split.linear_parts(x, self.weight, None, self.m, boundary, self.cpu_dtype)

    def product(self, boundary: str, settle: bool, x: mx.array | None = None) -> mx.array:
        """The split product of the lazy input, or of `x`."""
        x = self.input() if x is None else x
        return split.join(*self.parts(x, boundary), x.shape[:-1], settle)


def problem(cell: Cell) -> Problem:
    dtype = getattr(mx, cell["dtype"])

    def random(seed: int, rows: int, columns: int, size: float = 1.0) -> mx.array:
        made = (mx.random.normal((rows, columns), key=mx.random.key(seed)) * size).astype(dtype)
        mx.eval(made)
        return made

    inputs, outputs = cell["inputs"], cell["outputs"]
    return Problem(
        random(0, cell["rows"], inputs),
        random(1, outputs, inputs, inputs**-0.5),
        random(2, inputs, outputs, outputs**-0.5),
        cell["cpu_rows"],
        cell["cpu_dtype"],
    )


def splits(p: Problem) -> dict[str, Callable[[], mx.array]]:
    """Every way to ask for the split product: by boundary, and by how the parts are joined."""
    ready = p.input()
    mx.eval(ready)
    settle = split.needs_settling()
    return {
        "ready inputs": lambda: p.product("none" if p.cpu_dtype == "native" else "eager", settle, ready),
        "lazy graph": lambda: p.product("none", False),
        "eager boundary": lambda: p.product("eager", False),
        "eager boundary, join after dispatch": lambda: p.product("eager", True),
        "async boundary": lambda: p.product("async", settle),
    }


def units(p: Problem) -> dict[str, Arm]:
    """What each unit does alone, from a ready input: all rows, and its part of them."""
    x = p.input()
    mx.eval(x)

    def part(which: int) -> mx.array:
        return p.parts(x, "none")[which]

    return {
        WHOLE: Arm(partial(_on_the_cpu, x, p.weight)),
        CPU_PART: Arm(partial(part, 0), compare=False),
        CURRENT_PART: Arm(partial(part, 1), compare=False),
        BOTH: Arm(lambda: list(p.parts(x, "none")), compare=False),
    }


def _on_the_cpu(x: mx.array, weight: mx.array) -> mx.array:
    with mx.stream(split.cpu_stream):
        return x @ weight.T


# --- the cells


def measure(cell: Cell, options: Options) -> Cell:
    p = problem(cell)
    tolerance = TOLERANCE[cell["dtype"]]
    if cell["what"] == "ffn":
        return {**arms.measure(ffn(p), options, tolerance=tolerance), "figures": {}}
    stock = {"stock": lambda: split.stock_linear(p.input(), p.weight, None)}
    result = arms.measure({**stock, **units(p), **splits(p)}, options, tolerance=tolerance)
    times = {name: arm["median"] for name, arm in result["arms"].items() if arm["median"] is not None}
    return {**result, "figures": figures(cell, times, p), "trace": timeline(p, times)}


def ffn(p: Problem) -> dict[str, Callable[[], mx.array]]:
    """A feed-forward layer: each product split behind a boundary, and rows of the whole layer at once."""

    def layer(x: mx.array) -> mx.array:
        return nn.gelu_approx(x @ p.weight.T) @ p.back.T

    def coarse(boundary: str) -> mx.array:
        x = p.input()
        split.materialise([x], boundary)
        with mx.stream(split.cpu_stream):
            cpu = layer(x[: p.m])
        return split.join(cpu, layer(x[p.m :]), x.shape[:-1], split.needs_settling() and boundary != "none")

    def each() -> mx.array:
        h = nn.gelu_approx(p.product("eager", split.needs_settling()))
        return split.run_linear(h, p.back, None, p.m, "eager", p.cpu_dtype)

    return {
        "stock": lambda: layer(p.input()),
        "whole FFN, lazy graph": lambda: coarse("none"),
        "whole FFN, eager boundary": lambda: coarse("eager"),
        "each product, eager boundary": each,
    }


# --- figures


def conclude(cell: Cell, result: Cell) -> Cell:
    """Overlap of both parts and of every split arm with its interval, round by round."""
    samples = {name: arm["samples"] for name, arm in result["arms"].items()}
    if not (samples.get(CPU_PART) and samples.get(CURRENT_PART)):
        return {}
    alone = samples[CPU_PART], samples[CURRENT_PART]
    whole = {"stock", f"stock {arms.AGAIN}", WHOLE, CPU_PART, CURRENT_PART}
    overlaps = {
        name: asdict(overlap(*alone, together, groups=groups(result)))
        for name, together in samples.items()
        if together and name not in whole
    }
    return {"overlap": overlaps.get("eager boundary", {}).get("value"), "overlaps": overlaps}


def figures(cell: Cell, times: dict[str, float], p: Problem) -> dict[str, Any]:
    """Rates of both units in rows a second, alone and together."""
    cpu_alone, current_alone = times[CPU_PART], times[CURRENT_PART]
    cpu_rows, rest = cell["cpu_rows"], cell["rows"] - cell["cpu_rows"]
    alone = (cpu_rows / cpu_alone, rest / current_alone)
    cpu, current = contended(cpu_rows, rest, *ends(p), *alone)
    told = pair_model.beside(p.input(), p.weight, cpu_dtype=p.cpu_dtype)
    return {
        "pair": told,
        "pair model": sentence(told),
        "cpu_rows_per_second": {"alone": alone[0], "together": cpu},
        "current_rows_per_second": {"alone": alone[1], "together": current},
        "ratio_of_rates_alone": composed_ratio(*alone),
        "ratio_of_rates_together": composed_ratio(cpu, current) if cpu and current else None,
    }


def contended(
    cpu_rows: int, rest: int, cpu_end: float, current_end: float, cpu_alone: float, current_alone: float
) -> tuple[float | None, float | None]:
    """Rows a second of (CPU, current stream) while both work; None where noise leaves nothing of one.

    The unit that is done first worked beside the other all the time; what the other did afterwards it did
    alone, at its own rate.

    Args:
        cpu_rows, rest: rows of the two parts.
        cpu_end, current_end: seconds after which each was done.
        cpu_alone, current_alone: rows a second of each with nobody beside it.
    """
    both = min(cpu_end, current_end)
    cpu = (cpu_rows - cpu_alone * (cpu_end - both)) / both
    current = (rest - current_alone * (current_end - both)) / both
    return cpu if cpu > 0 else None, current if current > 0 else None


def ends(p: Problem) -> tuple[float, float]:
    """Seconds after which each part was done while both ran, medians: (CPU, current stream)."""
    x = p.input()
    mx.eval(x)
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(2 * BARS):
        both = p.parts(x, "none")
        start = time.perf_counter()
        # The CPU's part first: on CUDA the other order has been seen to deadlock.
        mx.async_eval(both[0])
        mx.async_eval(both[1])
        # Waiting for one only: which of the two is waited for takes turns.
        mx.synchronize(split.cpu_stream) if turn % 2 == 0 else mx.synchronize()
        found[turn % 2].append(time.perf_counter() - start)
        mx.eval(*both)
    return median(found[0]), median(found[1])


def timeline(p: Problem, times: dict[str, float]) -> list[dict[str, Any]]:
    """Bars for Figure 1: `arm`, `unit` (cpu or current), `start` and `end` in seconds, `end_from`.

    The end of the CPU's part is measured by waiting for its stream, the end of the current stream's by
    waiting for the result, its join included. MLX does not tell when a unit began: the start is the end less
    the time of that part alone, never before the call.
    """
    cpu_alone, current_alone, stock = times[CPU_PART], times[CURRENT_PART], times["stock"]
    bars = [_bar("stock", "current", stock, stock, "median")]
    for name, call in splits(p).items():
        if name not in times:
            continue
        cpu_end, end = _two_ends(call)
        bars.append(_bar(name, "cpu", cpu_end, cpu_alone, "CPU stream"))
        bars.append(_bar(name, "current", end, current_alone, "result"))
    return bars


def _bar(arm: str, unit: str, end: float, seconds: float, end_from: str) -> dict[str, Any]:
    return {"arm": arm, "unit": unit, "start": max(0.0, end - seconds), "end": end, "end_from": end_from}


def _two_ends(call: Callable[[], mx.array]) -> tuple[float, float]:
    """Seconds until the CPU stream is done and until the result is there, medians of some runs."""
    found = [_once(call) for _ in range(BARS)]
    return median(cpu for cpu, _ in found), median(end for _, end in found)


def _once(call: Callable[[], mx.array]) -> tuple[float, float]:
    split.drain()
    start = time.perf_counter()
    out = call()
    mx.async_eval(out)
    split.drain()
    cpu = time.perf_counter() - start
    mx.eval(out)
    return cpu, time.perf_counter() - start


def available() -> str | None:
    """A single core has no second unit."""
    return (
        "one CPU core: there is no second unit"
        if machine.cores() < 2 and machine.backend() == "cpu"
        else None
    )


EXPERIMENT = Experiment(
    name="mechanism",
    title="One row-split product: when the two units run at once",
    paper="Section 3, Figure 1",
    cells=cells,
    measure=measure,
    memory=memory,
    flop=2.0 * ROWS * INPUTS * OUTPUTS,
    arguments=add_arguments,
    unavailable=available,
    conclude=conclude,
)
