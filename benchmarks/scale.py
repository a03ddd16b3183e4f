"""How much smaller than the paper's the sizes must be here: `--scale 0`."""

from __future__ import annotations

import time

import mlx.core as mx

SIZE = 512
PAPER_FLOP = 3.6e12
"""One Llama-3-8B block at 8192 rows, the largest thing that is timed many times."""
PAPER_SECONDS = 5.0
"""A machine that takes no longer for it is one of the paper's kind."""
SMALL_SECONDS = 0.2
"""What it is brought down to on any other machine."""
QUICK_SECONDS = 0.1


def gflops(samples: int = 3) -> float:
    """GFLOP/s of one float32 product of 512 x 512 x 512 on the current stream: the best of some samples."""
    x = mx.ones((SIZE, SIZE))
    mx.eval(x @ x)
    return 2 * SIZE**3 / min(_seconds(x) for _ in range(samples)) / 1e9


def _seconds(x: mx.array, products: int = 4) -> float:
    start = time.perf_counter()
    mx.eval([x @ x for _ in range(products)])
    return (time.perf_counter() - start) / products


def choose(rate: float, quick: bool) -> int:
    """A power of two, by which widths and rows are divided; the arithmetic shrinks with its cube.

    Args:
        rate: GFLOP/s of the machine.
        quick: whether the whole experiment should take less than a minute.
    """
    whole = PAPER_FLOP / (rate * 1e9)
    if whole <= (QUICK_SECONDS if quick else PAPER_SECONDS):
        return 1
    aim = QUICK_SECONDS if quick else SMALL_SECONDS
    scale = 1
    while whole / scale**3 > aim:
        scale *= 2
    return scale
