"""How much smaller than the paper's the sizes must be here: `--scale 0`."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import mlx.core as mx

from fusionml import split

SIZE = 512
PAPER_RATE = 720.0
"""GFLOP/s from which a machine is one of the paper's kind: an M1 has more than twice as many."""
SMALL_SECONDS = 0.2
"""What the largest thing may take on any other machine."""
QUICK_SECONDS = 0.1


def gflops(samples: int = 3) -> float:
    """GFLOP/s of one float32 product of 512 x 512 x 512 on the slower of the two units: the best of some."""
    return min(_rate(samples, stream) for stream in (None, split.cpu_stream))


def _rate(samples: int, stream: Any) -> float:
    with nullcontext() if stream is None else mx.stream(stream):
        x = mx.ones((SIZE, SIZE))
        mx.eval(x @ x)
        return 2 * SIZE**3 / min(_seconds(x) for _ in range(samples)) / 1e9


def _seconds(x: mx.array, products: int = 4) -> float:
    start = time.perf_counter()
    mx.eval([x @ x for _ in range(products)])
    return (time.perf_counter() - start) / products


def choose(rate: float, flop: float, quick: bool) -> int:
    """A power of two, by which widths and rows are divided; the arithmetic shrinks with its cube.

    Args:
        rate: GFLOP/s of the machine.
        flop: floating-point operations of the largest thing, undivided.
        quick: whether the whole experiment should take less than a minute.
    """
    if rate >= PAPER_RATE and not quick:
        return 1
    aim = QUICK_SECONDS if quick else SMALL_SECONDS
    scale = 1
    while flop / (rate * 1e9) / scale**3 > aim:
        scale *= 2
    return scale
