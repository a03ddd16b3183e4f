"""Measures the four figures of the pair model on this machine, to stand beside what an experiment measured.

The model itself is `fusionml.pair_model`. Its figures are taken from one shape, with both units at work at
once but no boundary and no join; what it predicts is the whole split call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import mlx.core as mx

from fusionml import split
from fusionml.measure import order
from fusionml.pair_model import US, Figures, as_dict, contention
from fusionml.timing import boundary_seconds

PAPER_ROWS, PAPER_MS, PAPER_CPU_SHARE = 2048, 20.2, 0.35
PAPER_M1 = Figures(
    # Both units finish together at the share that the paper ran; it gives no rate of the CPU alone.
    cpu_us=PAPER_MS * 1e3 / PAPER_ROWS * (1 - PAPER_CPU_SHARE) / PAPER_CPU_SHARE,
    current_us=PAPER_MS * 1e3 / PAPER_ROWS,
    contention=15.5 / 13.2,
    fixed_us=PAPER_MS * 1e3 * (1 / 1.34 - 1 / 1.38),
)
"""The paper's M1: Figure 1 and Section 4. The boundary is what the eager split lost to ready inputs."""


def beside(x: mx.array, weight: mx.array, *, cpu_dtype: str = "auto", repeats: int = 3) -> dict[str, Any]:
    """The four figures of `x @ weight.T` and what they predict for x's rows, as plain data.

    Args:
        x: `[..., K]`, at least two rows.
        weight: `[N, K]`.
        cpu_dtype: as of `split_linear`.
        repeats: samples of each figure.
    """
    rows = x.size // x.shape[-1]
    figures = measured(x, weight, cpu_dtype=cpu_dtype, repeats=repeats)
    return as_dict(figures, rows, max_ratio=split.max_ratio())


def measured(x: mx.array, weight: mx.array, *, cpu_dtype: str = "auto", repeats: int = 3) -> Figures:
    """The four figures of one shape: each unit alone, both at once, the boundary and the join."""
    flat = x.reshape(-1, x.shape[-1])
    rows = len(flat)
    mx.eval(flat, weight)
    name = split.resolve_cpu_dtype(cpu_dtype, flat.dtype)

    def parts(m: int) -> tuple[mx.array, mx.array]:
        return split.linear_parts(flat, weight, None, m, "eager", name)

    m = _balance(rows, parts, lambda: split.stock_linear(flat, weight, None))
    calls: dict[str, Callable[[], Any]] = {
        "stock": lambda: split.stock_linear(flat, weight, None),
        "cpu": lambda: parts(m)[0],
        "current": lambda: parts(m)[1],
        "both": lambda: parts(m),
    }
    times: dict[str, list[float]] = {arm: [] for arm in calls}
    for arm in order(list(calls), repeats):
        times[arm].append(_seconds(calls[arm]))
    took = {arm: median(samples) for arm, samples in times.items()}
    return Figures(
        cpu_us=took["cpu"] / m / US,
        current_us=took["stock"] / rows / US,
        contention=contention(took["cpu"], took["current"], took["both"]),
        fixed_us=(boundary_seconds() + _join_seconds(parts(m), repeats)) / US,
    )


def _balance(
    rows: int, parts: Callable[[int], tuple[mx.array, mx.array]], stock: Callable[[], mx.array]
) -> int:
    """CPU rows that keep both units busy about as long, from one look at each."""
    look = max(1, rows // 8)
    for call in (stock, lambda: parts(look)[0]):
        mx.eval(call())  # the first touch of anything never counts
    current, cpu = _seconds(stock) / rows, _seconds(lambda: parts(look)[0]) / look
    ratio = min(current / (cpu + current), split.max_ratio())
    return split.cpu_rows(rows, ratio)


def _join_seconds(parts: tuple[mx.array, mx.array], repeats: int) -> float:
    mx.eval(parts)
    return median(_seconds(lambda: mx.concatenate(list(parts), axis=0)) for _ in range(repeats))


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start
