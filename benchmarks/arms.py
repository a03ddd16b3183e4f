"""Several ways to compute one layer, timed in an order that favours none, as one table."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import mlx.core as mx
import numpy as np

from fusionml import split
from fusionml.measure import order, paired_ratio, relative_error

Arms = dict[str, Callable[[], mx.array]]


def table(arms: Arms, reference: mx.array, pairs: int) -> str:
    """Time the arms and say how they compare with the first.

    Args:
        arms: by name; an arm that MLX refuses is left out, with MLX's words.
        reference: what each should give, in float32.
        pairs: how often each arm is timed.

    Returns:
        Of each arm: the median time, how many times faster than the first (with the 95 % interval), the
        largest error relative to the largest value, and the memory that it needs beyond what was there.
    """
    checked = {name: _check(arm, reference) for name, arm in arms.items()}
    works = [name for name, found in checked.items() if not isinstance(found, str)]
    times: dict[str, list[float]] = {name: [] for name in works}
    for name in order(works, pairs):
        start = time.perf_counter()
        mx.eval(arms[name]())
        times[name].append(time.perf_counter() - start)
    lines = [f"{'arm':24}{'median':>11}  {'against ' + works[0]:24}{'error':>9}{'memory':>12}"]
    for name, found in checked.items():
        if isinstance(found, str):
            lines.append(f"{name:24}{'-':>11}  {found}")
            continue
        error, peak = found
        faster = str(paired_ratio(times[works[0]], times[name]))
        middle = median(times[name]) * 1e3
        lines.append(f"{name:24}{middle:8.1f} ms  {faster:24}{error:9.1e}{peak / 2**20:8.1f} MiB")
    return "\n".join(lines)


def _check(arm: Callable[[], mx.array], reference: mx.array) -> tuple[float, int] | str:
    """An arm's error and peak memory in bytes, or why it cannot run; it also warms the arm up."""
    split.drain()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    try:
        out = arm()
        mx.eval(out)
    except RuntimeError as error:
        return str(error)
    peak = mx.get_peak_memory() - before
    return relative_error(*(np.array(a.astype(mx.float32)) for a in (out, reference))), peak
