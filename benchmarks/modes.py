"""Three execution modes of one product, each with a working set of its own, for the pressure experiment.

A call reads all of its mode's working set and computes one product, as the block's three modes of the paper
do (Section 5.5). Where the system swaps or compresses, the working set is MLX arrays. Where it cannot take
memory away from a program at all (Linux without swap) it is a file, mapped: its pages are what gets evicted.

`python -m benchmarks.modes NAME BYTES FILE|- SAMPLES` is one mode in a fresh process.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx
import psutil

from fusionml import split

EAGER, COMPILED, SPLIT = "eager", "compiled", "split"
NAMES = (SPLIT, COMPILED, EAGER)
ROWS, WIDTH, OUTPUTS = 128, 256, 512
PIECE_ROWS = 2048
FILL = 16 * 2**20
RATIO = 0.3


def swaps() -> bool:
    """Whether the system can put a program's memory aside."""
    return sys.platform == "darwin" or psutil.swap_memory().total > 0


class Mode:
    """One mode.

    Args:
        name: one of NAMES: how the product is computed.
        size: bytes of its working set.
        file: a file of that size (see `write_file`); None keeps the working set in MLX arrays.
    """

    def __init__(self, name: str, size: int, file: Path | None = None) -> None:
        self.name, self.size = name, size
        self._x, self._weight = mx.ones((ROWS, WIDTH)), mx.ones((OUTPUTS, WIDTH))
        self._product = products()[name]
        self._read = self._arrays(size) if file is None else self._map(file)
        mx.eval(self._x, self._weight)

    def run(self) -> float:
        """One call; its seconds."""
        start = time.perf_counter()
        self._read()
        mx.eval(self._product(self._x, self._weight))
        return time.perf_counter() - start

    def _arrays(self, size: int) -> Callable[[], None]:
        key, one = mx.random.key(len(self.name)), mx.ones((1, PIECE_ROWS))
        pieces = []
        for _ in range(max(1, size // (4 * PIECE_ROWS * WIDTH))):
            key, use = mx.random.split(key)
            pieces.append(mx.random.normal((PIECE_ROWS, WIDTH), key=use))
        mx.eval(pieces)
        return lambda: mx.eval([one @ piece for piece in pieces])

    def _map(self, file: Path) -> Callable[[], None]:
        with file.open("rb") as opened:
            mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)

        def touch() -> None:
            mapped[:: mmap.PAGESIZE]

        return touch


def products() -> dict[str, Callable[[mx.array, mx.array], mx.array]]:
    """The product in each mode."""

    def eager(x: mx.array, weight: mx.array) -> mx.array:
        return x @ weight.T

    def divided(x: mx.array, weight: mx.array) -> mx.array:
        return split.split_linear(x, weight, ratio=RATIO)

    return {EAGER: eager, COMPILED: mx.compile(eager), SPLIT: divided}


def write_file(file: Path, size: int) -> None:
    """A file of so many bytes on the disk, none of which is left in memory."""
    piece = os.urandom(min(FILL, size))
    with file.open("wb") as opened:
        for start in range(0, size, len(piece)):
            opened.write(piece[: size - start])
        opened.flush()
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fresh(name: str, size: int, file: Path | None, samples: int) -> list[float]:
    """Seconds of a mode's calls in a process that has nothing else, after one that does not count."""
    command = [sys.executable, "-m", "benchmarks.modes", name, str(size), str(file or "-"), str(samples)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    return [float(seconds) for seconds in json.loads(done.stdout)]


def main(name: str, size: str, file: str, samples: str) -> None:
    mode = Mode(name, int(size), None if file == "-" else Path(file))
    mode.run()
    print(json.dumps([mode.run() for _ in range(int(samples))]))


if __name__ == "__main__":
    main(*sys.argv[1:])
