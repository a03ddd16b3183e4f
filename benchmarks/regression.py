"""A straight line through times over row counts: what a call costs, and what a row. No MLX, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """`fixed + per_row * rows`, in seconds, each with its 95 % interval.

    `off` is the largest deviation of a row count's median from the line, relative to that median: where it is
    large, a line is not what the unit does.
    """

    fixed: float
    fixed_interval: tuple[float, float]
    per_row: float
    per_row_interval: tuple[float, float]
    off: float


def fit(samples: Mapping[int, Sequence[float]], *, seed: int = 0) -> Line:
    """The line through each row count's median, every count of the same relative weight.

    Args:
        samples: seconds by rows; at least two row counts, each with at least one sample.
        seed: of the bootstrap over the samples of each row count.

    Raises:
        ValueError: too few row counts, one without samples, or a time that is not positive.
    """
    if len(samples) < 2:
        raise ValueError(f"samples has {len(samples)} row counts; a line needs at least 2")
    for count, taken in samples.items():
        if not taken or not all(0 < t < float("inf") for t in taken):
            raise ValueError(f"samples of {count} rows must be positive, finite times, not {list(taken)!r}")
    rows = np.array(sorted(samples), dtype=float)
    times = [np.asarray(samples[int(n)], dtype=float) for n in rows]
    middle = np.array([np.median(t) for t in times])
    fixed, per_row = (float(value[0]) for value in _lines(rows, middle[None]))
    generator = np.random.default_rng(seed)
    picks = [t[generator.integers(len(t), size=(RESAMPLES, len(t)))] for t in times]
    again = _lines(rows, np.stack([np.median(p, axis=1) for p in picks], axis=1))
    (fixed_low, fixed_high), (low, high) = (np.quantile(value, [0.025, 0.975]) for value in again)
    off = float(np.max(np.abs(fixed + per_row * rows - middle) / middle))
    return Line(fixed, (float(fixed_low), float(fixed_high)), per_row, (float(low), float(high)), off)


def _lines(rows: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """Offsets and slopes of least squares, relative to the times, one line for each row of `seconds`."""
    one, n = 1 / seconds, rows / seconds
    aa, ab, bb = (np.sum(x * y, axis=1) for x, y in ((one, one), (one, n), (n, n)))
    a, b = one.sum(axis=1), n.sum(axis=1)
    size = aa * bb - ab**2
    return (a * bb - b * ab) / size, (b * aa - a * ab) / size
