"""Times that the calibrator and the gate both need."""

from __future__ import annotations

import time

import mlx.core as mx
import numpy as np


def boundary_seconds(links: int = 16, repeats: int = 7) -> float:
    """What one boundary costs on this machine: the host's round trip, which stock's lazy graph never makes.

    A chain of small products evaluated at once, against the same chain evaluated link by link.
    """
    weight = mx.zeros((256, 256))
    x = mx.zeros((32, 256))

    def chain(eager: bool) -> float:
        start, y = time.perf_counter(), x
        for _ in range(links):
            y = y @ weight
            if eager:
                mx.eval(y)
        mx.eval(y)
        return time.perf_counter() - start

    chain(True)
    pairs = [(chain(False), chain(True)) for _ in range(repeats)]
    return max(0.0, float(np.median([eager - lazy for lazy, eager in pairs])) / links)
