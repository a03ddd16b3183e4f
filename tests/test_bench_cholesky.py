"""Blocked Cholesky: against NumPy's, with the trailing update on two streams; a wrong factor is an error."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import cholesky
from benchmarks.experiment import Options
from fusionml import split

SHARES = st.one_of(st.none(), st.sampled_from(cholesky.SHARES))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 90), st.integers(1, 40), SHARES)
def test_the_factor_is_numpys(n: int, block: int, share: float | None) -> None:
    a = cholesky.spd(n)
    truth = np.linalg.cholesky(np.array(a).astype(np.float64))
    found = np.array(cholesky.factor(a, block, share))
    assert found.shape == (n, n)
    np.testing.assert_allclose(found, truth, atol=2e-5 * truth.max())
    assert (np.triu(found, 1) == 0).all()


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 80), st.integers(1, 20), st.sampled_from(cholesky.SHARES))
def test_an_update_is_right_wherever_it_is_read(n: int, block: int, share: float) -> None:
    generator = np.random.default_rng(n)
    trailing, panel = generator.standard_normal((n, n)), generator.standard_normal((n, block))
    arrays = [mx.array(a.astype(np.float32)) for a in (trailing, panel)]
    found = np.array(cholesky.update(*arrays, block, share))
    truth = trailing - panel @ panel.T
    lower = np.tri(n, dtype=bool)
    np.testing.assert_allclose(found[lower], truth[lower], atol=1e-4)
    for start in range(0, n, block):  # LAPACK may read either triangle of a block on the diagonal
        corner = slice(start, min(n, start + block))
        np.testing.assert_allclose(found[corner, corner], truth[corner, corner], atol=1e-4)


@given(st.integers(2, 5000), st.integers(1, 300), st.sampled_from(cholesky.SHARES))
def test_cpu_rows_are_whole_blocks_and_leave_some(rows: int, block: int, share: float) -> None:
    m = cholesky.cpu_rows(rows, block, share)
    assert 0 <= m < rows
    assert (m > 0) == (rows > block)
    assert m % block == 0 or m == rows - 1


def test_every_update_is_shared_by_two_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    join = split.join

    def spy(cpu: mx.array, current: mx.array, *rest: Any) -> mx.array:
        seen.append((len(cpu), len(current)))
        return join(cpu, current, *rest)

    monkeypatch.setattr(split, "join", spy)
    mx.eval(cholesky.factor(cholesky.spd(128), 32, 0.5))
    assert seen == [(64, 32), (32, 32)], "96 and 64 rows trail; the last 32 are one block"
    seen.clear()
    mx.eval(cholesky.factor(cholesky.spd(128), 32, None))
    assert seen == []


def test_the_residual_tells_a_wrong_factor() -> None:
    a = cholesky.spd(64)
    good = mx.linalg.cholesky(a, stream=mx.cpu)
    whole = np.array(a).astype(np.float64)
    assert cholesky.residual(a, good) <= cholesky.RESIDUAL
    wrong = np.array(good)
    wrong[40, 3] += 1
    truth = np.linalg.norm(whole - wrong.astype(float) @ wrong.T.astype(float)) / np.linalg.norm(whole)
    assert cholesky.residual(a, mx.array(wrong)) == pytest.approx(truth)
    with pytest.raises(ArithmeticError, match="split: the residual is"):
        cholesky.check("split", cholesky.residual(a, mx.array(wrong)))
    with pytest.raises(ArithmeticError):
        cholesky.check("split", cholesky.residual(a, good * float("nan")))


def test_a_cell_tries_shares_and_verifies_every_arm() -> None:
    cell = cholesky.measure({"n": 128, "block": 32}, Options(quick=True, samples=2, warm_ups=1))
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    figures = cell["figures"]
    assert set(cell["arms"]) == {"stock", "blocked", "split", "stock again"}
    assert set(figures["residuals"]) == {"stock", "blocked", "split"}
    assert max(figures["residuals"].values()) <= cholesky.RESIDUAL
    assert figures["share"] == min(cholesky.SHARES, key=lambda share: figures["looks"][str(share)])


def test_a_wrong_update_fails_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cholesky.update
    monkeypatch.setattr(cholesky, "update", lambda *a: right(*a) + (0 if a[-1] is None else 0.01))
    with pytest.raises(ArithmeticError, match="split"):
        cholesky.measure({"n": 128, "block": 32}, Options(quick=True, samples=2, warm_ups=1))


def test_cells_keep_whole_blocks_at_every_scale() -> None:
    for scale in (1, 8, 32, 512):
        cells = cholesky.cells(Options(scale=scale))
        assert cells
        assert all(0 < 4 * cell["block"] <= cell["n"] for cell in cells.values())
        assert all(cholesky.memory(cell) >= 4 * 4 * cell["n"] ** 2 for cell in cells.values())
