"""A straight line through times over row counts: what a call costs, and what a row. No MLX, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 2000


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
    fixed, per_row = _line(rows, middle)
    generator = np.random.default_rng(seed)
    again = np.array(
        [
            _line(rows, np.array([np.median(generator.choice(t, len(t))) for t in times]))
            for _ in range(RESAMPLES)
        ]
    )
    low, high = np.quantile(again, [0.025, 0.975], axis=0)
    off = float(np.max(np.abs(fixed + per_row * rows - middle) / middle))
    return Line(fixed, (float(low[0]), float(high[0])), per_row, (float(low[1]), float(high[1])), off)


def _line(rows: NDArray[np.float64], seconds: NDArray[np.float64]) -> tuple[float, float]:
    """Offset and slope of least squares, relative to the times."""
    design = np.stack([np.ones_like(rows), rows], axis=1) / seconds[:, None]
    (fixed, per_row), *_ = np.linalg.lstsq(design, np.ones_like(rows), rcond=None)
    return float(fixed), float(per_row)
