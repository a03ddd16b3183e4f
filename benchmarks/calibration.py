"""The calibrator against an exhaustive grid (Section 4: solo rates overstate the CPU's share).

For each site of a model: the share that the search chooses, with how many samples; then every 5 % timed in
turn, and the chosen share against the best of them. Beside it the share that the units' speeds alone would
suggest.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import arms, library
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import loading, split
from fusionml.calibrate import TOLERANCE, Bench, Outcome, Shape, boundary_seconds, search_site, shapes
from fusionml.ratios import Probe

STEP, QUICK_STEP = 0.05, 0.15
ROWS, QUICK_ROWS = (512, 256), (256,)
SITES, QUICK_SITES = 3, 1
GRID_REPEATS = 5
SEARCH_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    library.add_model(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="rows of the calls (default: 512 256)")
    parser.add_argument(
        "--sites", type=int, help="shapes, the one with the most arithmetic first (default: 3)"
    )


def cells(options: Options) -> dict[str, Cell]:
    """One for each number of rows and shape; shapes are numbered by their arithmetic."""
    rows = options.extra.get("rows") or (QUICK_ROWS if options.quick else ROWS)
    sites = options.extra.get("sites") or (QUICK_SITES if options.quick else SITES)
    return {
        f"shape {number + 1}, {n} rows": {
            "model": options.extra.get("model"),
            "shape": number,
            "rows": n,
            "step": QUICK_STEP if options.quick else STEP,
        }
        for n in rows
        for number in range(sites)
    }


def measure(cell: Cell, options: Options) -> Cell:
    """Search, grid, then stock, the chosen share and the best of the grid in turns.

    Raises:
        UsageError: the model cannot be loaded, or has fewer shapes.
        ValueError: the search found nothing; says why.
    """
    model, _, _, name = loading.load(cell["model"])
    found = shapes(model)
    if cell["shape"] >= len(found):
        raise loading.UsageError(f"{name} has {len(found)} shapes that may split, not {cell['shape'] + 1}")
    shape, rows, start = found[cell["shape"]], cell["rows"], time.perf_counter()
    outcome = search_site(
        shape, rows, seconds=SEARCH_SECONDS, boundary=boundary_seconds(), cpu_dtype="native"
    )
    searched = time.perf_counter() - start
    if outcome.choice is None:
        raise ValueError(f"the search found nothing: {outcome.left_out}")
    grid = exhaustive(shape, rows, outcome.cpu_dtype, cell["step"])
    best = min(grid, key=lambda ratio: grid[ratio])
    result = compare(shape, rows, outcome, best, options)
    times = result["arms"]
    return {
        **result,
        "figures": {
            "model": name,
            "site": outcome.site.key(),
            "chosen": outcome.choice.ratio,
            "best": best,
            "slower_than_best": times["chosen"]["median"] / times["best of the grid"]["median"] - 1,
            "search_seconds": searched,
            "search_samples": outcome.choice.samples,
            "composed": outcome.choice.composed,
            "choice": asdict(outcome.choice),
            "grid": {f"{ratio:.2f}": seconds for ratio, seconds in grid.items()},
        },
    }


def exhaustive(shape: Shape, rows: int, cpu_dtype: str, step: float) -> dict[float, float]:
    """Median seconds of every share from 0 to the largest, by `step`, timed in turn."""
    bench = Bench(shape, rows, cpu_dtype, None)
    steps = [round(i * step, 2) for i in range(int(split.max_ratio() / step + 1e-9) + 1)]
    rounds: dict[float, list[float]] = {ratio: [] for ratio in steps}
    for turn in range(GRID_REPEATS):
        for ratio in steps if turn % 2 == 0 else reversed(steps):
            rounds[ratio].append(bench.seconds(probe(rows, ratio)))
    return {ratio: float(np.median(times)) for ratio, times in rounds.items()}


def probe(rows: int, ratio: float) -> Probe:
    """What times one share of a call."""
    return Probe("split", split.cpu_rows(rows, ratio), ratio) if ratio else Probe("stock")


def compare(shape: Shape, rows: int, outcome: Outcome, best: float, options: Options) -> Cell:
    """Stock, the chosen share and the grid's best, on one weight and one input."""
    assert outcome.choice is not None
    bench = Bench(shape, rows, outcome.cpu_dtype, None)
    weight, bias = bench.weights[0]

    def product(ratio: float) -> Any:
        m = split.cpu_rows(rows, ratio)

        def call() -> mx.array:
            if m == 0:
                return split.stock_linear(bench.x, weight, bias)
            return split.run_linear(bench.x, weight, bias, m, "eager", outcome.cpu_dtype)

        return call

    given = {
        "stock": product(0.0),
        "chosen": product(outcome.choice.ratio),
        "best of the grid": product(best),
    }
    return arms.measure(given, options, tolerance=TOLERANCE[outcome.site.dtype])


EXPERIMENT = Experiment(
    name="calibration",
    title="The calibrator's choice against an exhaustive grid",
    paper="Section 4",
    cells=cells,
    measure=measure,
    memory=library.memory_of_model,
    samples=(10, 2),
    arguments=add_arguments,
)
