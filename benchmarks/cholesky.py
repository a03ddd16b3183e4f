"""A blocked Cholesky factorisation whose trailing update is split by rows, against LAPACK (Section 6).

Right-looking: factor a diagonal block, solve for the panel below it, subtract the panel's product with itself
from what trails. That update is the large product of the three; its rows are shared between the CPU stream
and the current one. Only the lower triangle is ever read, so the CPU's rows, the upper ones, end at the
diagonal.
"""

from __future__ import annotations

import argparse

import mlx.core as mx
import numpy as np

from benchmarks import arms, pair_model
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.processes import told_of_each
from fusionml import split
from fusionml.pair_model import sentence

SIZES = (1024, 2048, 4096)
BLOCK = 256
LEAST_SIZE, LEAST_BLOCK = 256, 32
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""CPU shares of the trailing rows that are tried, beyond 0.5 too: the CPU's rows are the short ones."""
LOOKS = 3
RESIDUAL = 1e-5
"""Largest |A - L L'| / |A| (Frobenius) in float32: some units in the last place for each of the columns."""


# --- the factorisation


def factor(a: mx.array, block: int, share: float | None) -> mx.array:
    """The lower factor of a symmetric positive definite matrix, block column by block column.

    Args:
        a: `[n, n]` float32; only its lower triangle is read.
        block: columns of a block.
        share: CPU share of the rows of each trailing update; None is the same algorithm without a split.

    Returns:
        `[n, n]`, zeros above the diagonal.
    """
    n, columns, trailing = len(a), [], a
    for start in range(0, n, block):
        width = min(block, n - start)
        with mx.stream(mx.cpu):  # neither of the two has another home
            corner = mx.linalg.cholesky(trailing[:width, :width])
            below = mx.linalg.solve_triangular(corner, trailing[width:, :width].T, upper=False).T
        column = mx.concatenate([mx.zeros((start, width)), corner, below], axis=0)
        columns.append(column)
        if start + width < n:
            trailing = update(trailing[width:, width:], below, width, share)
    return mx.concatenate(columns, axis=1)


def update(trailing: mx.array, panel: mx.array, block: int, share: float | None) -> mx.array:
    """`trailing - panel @ panel.T`, of which only the lower triangle counts, by rows on two units."""
    m = 0 if share is None else cpu_rows(len(trailing), block, share)
    if m == 0:
        return trailing - panel @ panel.T
    mx.eval(trailing, panel)
    with mx.stream(split.cpu_stream):
        corner = trailing[:m, :m] - panel[:m] @ panel[:m].T
        # Above the diagonal nothing is read, so what was there may stay.
        upper = mx.concatenate([corner, trailing[:m, m:]], axis=1)
    lower = trailing[m:] - panel[m:] @ panel.T
    return split.join(upper, lower, (len(trailing),), split.needs_settling())


def cpu_rows(rows: int, block: int, share: float) -> int:
    """Rows of the CPU part: whole blocks, so that every block on the diagonal is whole. 0 for too few."""
    return min(max(block, round(rows * share / block) * block), rows - 1) if rows > block else 0


def residual(a: mx.array, factor: mx.array) -> float:
    """|A - L L'| / |A|, Frobenius, in float64; infinity where L is not finite."""
    whole, lower = (np.array(array).astype(np.float64) for array in (a, factor))
    if not np.isfinite(lower).all():
        return float("inf")
    return float(np.linalg.norm(whole - lower @ lower.T) / np.linalg.norm(whole))


def spd(n: int) -> mx.array:
    """A well-conditioned symmetric positive definite matrix."""
    x = mx.random.normal((n, n), key=mx.random.key(n))
    return x @ x.T / n + mx.eye(n)


# --- the experiment


def cells(options: Options) -> dict[str, Cell]:
    sizes = sorted({max(LEAST_SIZE, n // options.scale) for n in SIZES})
    block = max(LEAST_BLOCK, BLOCK // options.scale)
    return {f"{n} x {n}": {"n": n, "block": options.extra.get("block") or min(block, n // 4)} for n in sizes}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--block", type=int, help="columns of a block (default: 256, less where scaled)")


def memory(parameters: Cell) -> int:
    return 6 * 4 * parameters["n"] ** 2


def measure(parameters: Cell, options: Options) -> Cell:
    """One size.

    Raises:
        ArithmeticError: a factor that does not give the matrix back.
    """
    n, block = parameters["n"], parameters["block"]
    a = spd(n)
    mx.eval(a)
    looks = arms.sample({str(share): _split(a, block, share) for share in SHARES}, LOOKS, 0.0)
    best = min(SHARES, key=lambda share: min(looks[str(share)]))  # what disturbs a look only slows it
    ways = {
        "stock": Arm(lambda: mx.linalg.cholesky(a, stream=mx.cpu)),
        "blocked": Arm(lambda: factor(a, block, None)),
        "split": _split(a, block, best),
    }
    residuals = {name: check(name, residual(a, arm.call())) for name, arm in ways.items()}
    result = arms.measure(ways, options, tolerance=None)
    told = pair_model.beside(a[:, :block], a[:, :block])
    result["figures"] = {
        "n": n,
        "block": block,
        "share": best,
        "residuals": residuals,
        "looks": {share: min(times) for share, times in looks.items()},
        "pair": told,
        "pair model": sentence(told),
    }
    return result


def conclude(parameters: Cell, result: Cell) -> Cell:
    """The share that each process chose."""
    return {"shares": told_of_each(result, "share")}


def _split(a: mx.array, block: int, share: float) -> Arm:
    return Arm(lambda: factor(a, block, share))


def check(name: str, found: float) -> float:
    """The residual; an ArithmeticError if it is too large."""
    if not found <= RESIDUAL:
        raise ArithmeticError(f"{name}: the residual is {found:.2g}, more than {RESIDUAL:.0e}")
    return found


EXPERIMENT = Experiment(
    name="cholesky",
    title="Blocked Cholesky, its trailing update split",
    paper="Section 6, Workload shape",
    cells=cells,
    measure=measure,
    memory=memory,
    flop=SIZES[-1] ** 3 / 3,
    arguments=arguments,
    conclude=conclude,
)
