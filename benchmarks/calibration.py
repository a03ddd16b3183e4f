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

import numpy as np

from benchmarks import arms, checkpoints
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.processes import told_of_each
from fusionml import loading, split
from fusionml.calibrate import Bench, boundary_seconds, search_site, shapes
from fusionml.plans import DENSE, SPLIT, STOCK
from fusionml.ratios import Probe
from fusionml.search import Found, Trial, Way

STEP, QUICK_STEP = 0.05, 0.15
ROWS, QUICK_ROWS = (512, 256), (256,)
SITES, QUICK_SITES = 3, 1
GRID_REPEATS = 5
SEARCH_SECONDS = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)
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
    found_arm = outcome.found
    if found_arm is None:
        raise ValueError(f"the search found nothing: {outcome.left_out}")
    bench = Bench(shape, rows, made_up=False)
    grid = exhaustive(bench, found_arm.way, cell["step"])
    best = min(grid, key=lambda ratio: grid[ratio])
    return {
        **compare(bench, found_arm, best, options),
        "figures": {
            "model": name,
            "site": outcome.site.key(),
            "arm": found_arm.arm,
            "form": found_arm.way.form,
            "chosen": found_arm.choice.ratio,
            "best": best,
            "search_seconds": searched,
            "search_samples": found_arm.choice.samples,
            "composed": found_arm.choice.composed,
            "choice": asdict(found_arm.choice),
            "grid": {f"{ratio:.2f}": seconds for ratio, seconds in grid.items()},
        },
    }


def conclude(parameters: Cell, result: Cell) -> Cell:
    """By how much the choice is slower than the grid's best, as a share of that; each process's own."""
    chosen, best = (result["arms"][name]["median"] for name in ("chosen", "best of the grid"))
    return {
        "slower_than_best": chosen / best - 1 if chosen and best else None,
        "chosen_by_each": told_of_each(result, "chosen"),
        "best_of_each": told_of_each(result, "best"),
    }


def exhaustive(bench: Bench, way: Way, step: float) -> dict[float, float]:
    """Median seconds of every share from 0 to the largest, by `step`, timed in turn."""
    steps = [round(i * step, 2) for i in range(int(split.max_ratio() / step + 1e-9) + 1)]
    rounds: dict[float, list[float]] = {ratio: [] for ratio in steps}
    for turn in range(GRID_REPEATS):
        for ratio in steps if turn % 2 == 0 else reversed(steps):
            rounds[ratio].append(bench.seconds(trial(bench.rows, way, ratio)))
    return {ratio: float(np.median(times)) for ratio, times in rounds.items()}


def trial(rows: int, way: Way, ratio: float) -> Trial:
    """What times one share of a call."""
    m = split.cpu_rows(rows, ratio)
    return Trial(SPLIT, Probe("split", m, ratio), way) if m else Trial(STOCK)


def compare(bench: Bench, found: Found, best: float, options: Options) -> Cell:
    """Stock, what was chosen and the grid's best, on one weight and one input."""
    product, way = bench.products[0], found.way

    def share(ratio: float) -> Any:
        m = split.cpu_rows(bench.rows, ratio)
        return (lambda: product.split(m, way.form, "eager", way.cpu_dtype)) if m else product.stock

    chosen = (lambda: product.dense("eager")) if found.arm == DENSE else share(found.choice.ratio)
    given = {"stock": product.stock, "chosen": chosen, "best of the grid": share(best)}
    return arms.measure(given, options, tolerance=bench.error(found)[1])


EXPERIMENT = Experiment(
    name="calibration",
    title="The calibrator's choice against an exhaustive grid",
    paper="Section 4",
    cells=cells,
    measure=measure,
    memory=checkpoints.memory,
    samples=(10, 2),
    arguments=add_arguments,
    conclude=conclude,
)
