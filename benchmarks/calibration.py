"""The calibrator against an exhaustive grid: `python -m benchmarks.calibration --model PATH`.

For each site of a model: the share that the search chooses, with how many samples; then every 5 % timed in
turn in the same run, and how much slower the chosen share is than the best of them. Beside it the share that
the units' speeds alone would suggest (the paper's Section 4: they overstate the CPU's), and both units' rates
alone and together.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm import load

from benchmarks.output import show
from fusionml import machine, split
from fusionml.calibrate import Bench, Outcome, Shape, boundary_seconds, search_site, shapes
from fusionml.ratios import Probe

STEP = 0.05


def exhaustive(shape: Shape, rows: int, cpu_dtype: str, repeats: int) -> dict[float, float]:
    """Median seconds of every share from 0 to the largest, by 5 %, timed in turn."""
    bench = Bench(shape, rows, cpu_dtype, None)
    steps = [round(i * STEP, 2) for i in range(int(split.max_ratio() / STEP) + 1)]
    rounds: dict[float, list[float]] = {ratio: [] for ratio in steps}
    for turn in range(repeats):
        for ratio in steps if turn % 2 == 0 else reversed(steps):
            rounds[ratio].append(bench.seconds(probe(rows, ratio)))
    return {ratio: float(np.median(times)) for ratio, times in rounds.items()}


def probe(rows: int, ratio: float) -> Probe:
    """What times one share of a call."""
    return Probe("split", split.cpu_rows(rows, ratio), ratio) if ratio else Probe("stock")


def chosen_against_best(
    shape: Shape, rows: int, outcome: Outcome, grid: dict[float, float], repeats: int
) -> float:
    """Time of the chosen share over that of the grid's best, both timed again in turn."""
    assert outcome.choice is not None
    bench = Bench(shape, rows, outcome.cpu_dtype, None)
    best = min(grid, key=lambda ratio: grid[ratio])
    pairs = [
        (bench.seconds(probe(rows, outcome.choice.ratio)), bench.seconds(probe(rows, best)))
        for _ in range(2 * repeats)
    ]
    return float(np.median([chosen / other for chosen, other in pairs]))


def rates_together(shape: Shape, rows: int, outcome: Outcome) -> dict[str, float]:
    """Rows a second of each unit while both work, at the chosen share."""
    assert outcome.choice is not None
    bench = Bench(shape, rows, outcome.cpu_dtype, None)
    cpu = split.cpu_rows(rows, outcome.choice.ratio)
    seconds = float(np.median([bench.seconds(probe(rows, outcome.choice.ratio)) for _ in range(5)]))
    return {"cpu": cpu / seconds, "current": (rows - cpu) / seconds}


def measure(path: str, rows: Sequence[int], sites: int, repeats: int) -> dict[str, Any]:
    """Every site's search and grid, with the environment."""
    model, _ = load(path)
    boundary, found = boundary_seconds(), []
    jobs = [(shape, n) for n in rows for shape in shapes(model)][:sites]
    for shape, n in jobs:
        start = time.perf_counter()
        outcome = search_site(shape, n, seconds=600, boundary=boundary, cpu_dtype="native")
        searched = time.perf_counter() - start
        grid = exhaustive(shape, n, outcome.cpu_dtype, repeats)
        found.append(
            {
                "site": shape.site(n).key(),
                "choice": asdict(outcome.choice) if outcome.choice else None,
                "search_seconds": searched,
                "grid": grid,
                "slower_than_best": chosen_against_best(shape, n, outcome, grid, repeats),
                "together": rates_together(shape, n, outcome),
            }
        )
    return {"model": Path(path).name, "sites": found, "environment": machine.stamp()}


def render(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{'site':50}{'chosen':>8}{'best':>6}{'slower':>8}{'composed':>10}{'samples':>9}{'seconds':>9}"]
    for site in result["sites"]:
        choice, grid = site["choice"], site["grid"]
        best = min(grid, key=lambda ratio: grid[ratio])
        composed = "-" if choice["composed"] is None else f"{choice['composed']:.2f}"
        lines.append(
            f"{site['site']:50}{choice['ratio']:>8.2f}{float(best):>6.2f}{site['slower_than_best'] - 1:>8.1%}"
            f"{composed:>10}{choice['samples']:>9}{site['search_seconds']:>9.1f}"
        )
        alone = f"CPU {choice['cpu_rate'] or 0:.0f}, current {choice['current_rate']:.0f}"
        both = f"CPU {site['together']['cpu']:.0f}, current {site['together']['current']:.0f}"
        lines.append(f"{'':8}rows a second alone: {alone}; together: {both}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.calibration", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder that mlx_lm.load accepts")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 256], help="rows (default: 512 256)")
    parser.add_argument("--sites", type=int, default=5, help="sites, of the first rows first (default: 5)")
    parser.add_argument("--repeats", type=int, default=5, help="samples of each share (default: 5)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything and the environment here")
    args = parser.parse_args(argv)
    result = measure(args.model, args.rows, args.sites, args.repeats)
    show(result, render(result), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
