"""Training with all three products split: gradients against stock's, and what is an error."""

from __future__ import annotations

import json
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from benchmarks import split_gradients, training
from benchmarks.experiment import Cell, Options
from benchmarks.processes import join
from fusionml import split

SMALL = {"scale": 32, "hidden": 128, "intermediate": 448, "rows": 96, "ratio": 0.4}
OPTIONS = Options(quick=True, samples=2, warm_ups=1)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    """Every product that is split: (rows, K, N, rows on the CPU)."""
    seen: list[tuple[int, int, int, int]] = []
    join, cpu_rows = split.join, split.cpu_rows

    def spy(cpu: mx.array, current: mx.array, shape: tuple[int, ...], settle: bool) -> mx.array:
        seen.append((len(cpu) + len(current), len(cpu), cpu.shape[1], cpu_rows(shape[0], 0.4)))
        return join(cpu, current, shape, settle)

    monkeypatch.setattr(split, "join", spy)
    return seen


# --- one layer


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(1, 2), st.integers(1, 70)),
    st.integers(1, 40),
    st.integers(2, 90),
    st.sampled_from([0.1, 0.35, 0.5]),
    st.sampled_from(["native", "float32"]),
)
def test_all_three_gradients_are_numpys(
    shape: tuple[int, int], inputs: int, outputs: int, ratio: float, cpu_dtype: str
) -> None:
    generator = np.random.default_rng(inputs * 97 + outputs)
    x, w = generator.standard_normal((*shape, inputs)), generator.standard_normal((outputs, inputs))
    dy = generator.standard_normal((*shape, outputs))
    layer = split_gradients.linear(lambda a, b: split_gradients.split_product(a, b, ratio, cpu_dtype))
    given_arrays = [mx.array(a.astype(np.float32)) for a in (x, w)]
    out, (dx, dw) = mx.vjp(layer, given_arrays, [mx.array(dy.astype(np.float32))])
    flat = dy.reshape(-1, outputs)
    for found, truth in (
        (out[0], x @ w.T),
        (dx, dy @ w),
        (dw, flat.T @ x.reshape(-1, inputs)),
    ):
        np.testing.assert_allclose(np.array(found), truth, rtol=1e-4, atol=1e-4 * np.abs(truth).max())


def test_forward_input_gradient_and_weight_gradient_are_each_split(
    products: list[tuple[int, int, int, int]],
) -> None:
    layer = split_gradients.linear(lambda a, b: split_gradients.split_product(a, b, 0.4, "native"))
    x, w = mx.random.normal((64, 48)), mx.random.normal((80, 48))
    gradients = mx.grad(lambda x, w: layer(x, w).sum(), argnums=(0, 1))(x, w)
    mx.eval(gradients)
    rows = [(rows, outputs) for rows, _, outputs, _ in products]
    assert rows == [(64, 80), (64, 48), (80, 48)]
    assert all(0 < cpu < rows for rows, cpu, _, _ in products)
    assert [cpu for _, cpu, _, _ in products] == [wanted for *_, wanted in products]


def test_every_product_waits_for_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The boundary: the rows, the weight and the CPU's copies are evaluated before the parts are made."""
    order: list[str] = []
    evaluate, join = mx.eval, split.join
    monkeypatch.setattr(mx, "eval", lambda *a: (order.append(f"boundary {len(a)}"), evaluate(*a))[1])
    monkeypatch.setattr(split, "join", lambda *a: (order.append("join"), join(*a))[1])
    layer = split_gradients.linear(lambda a, b: split_gradients.split_product(a, b, 0.5, "float32"))
    x, w = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((64, 16), (32, 16)))
    mx.grad(lambda w: layer(x * 2, w).astype(mx.float32).sum())(w)
    assert order == ["boundary 4", "join"] * 3


def test_only_plain_layers_are_replaced_and_their_arrays_kept() -> None:
    class Odd(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(8, 8), Odd(8, 8), nn.LayerNorm(8))
    weight, bias = model.layers[0].weight, model.layers[0].bias
    made = split_gradients.split_training(model, 0.5)
    assert made is model
    assert [type(layer).__name__ for layer in model.layers] == ["SplitTrainingLinear", "Odd", "LayerNorm"]
    assert model.layers[0].weight is weight
    assert model.layers[0].bias is bias
    x = mx.random.normal((16, 8))
    assert mx.allclose(model.layers[0](x), x @ weight.T + bias, atol=1e-5)


# --- the block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_blocks_gradients_agree_with_stock(dtype: str, products: list[tuple[int, int, int, int]]) -> None:
    """Independently of `verify`: NumPy on every parameter."""
    ours, stock = (training.trainee(SMALL, dtype, ratio) for ratio in (0.4, None))
    (our_loss, found), (loss, truth) = ours.gradients(), stock.gradients()
    mx.eval(found, truth)
    assert len(products) == 3 * 7  # q, k, v, o, gate, up, down
    allowed = 1e-3 if dtype == "float32" else 5e-2
    assert float(our_loss.item()) == pytest.approx(float(loss.item()), rel=allowed)
    wanted = dict(tree_flatten(truth))
    assert wanted.keys() == dict(tree_flatten(found)).keys()
    for name, gradient in tree_flatten(found):
        ours_here, theirs = (np.array(a.astype(mx.float32)) for a in (gradient, wanted[name]))
        assert np.abs(theirs).max() > 0, name
        assert np.abs(ours_here - theirs).max() <= allowed * np.abs(theirs).max(), name


def test_steps_train_and_both_arms_go_the_same_way() -> None:
    ours, stock = (training.trainee(SMALL, "float32", ratio) for ratio in (0.4, None))
    before = stock.loss()
    for _ in range(3):
        mx.eval(ours.step(), stock.step())
    assert stock.loss() < before
    assert ours.loss() == pytest.approx(stock.loss(), rel=1e-3)


def measured(dtype: str, against: str) -> Cell:
    parameters = {**SMALL, "dtype": dtype, "against": against}
    return join(training.EXPERIMENT, parameters, [training.measure(parameters, OPTIONS)])


def test_a_cell_has_samples_and_verified_gradients() -> None:
    cell = measured("float32", "float32")
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    assert {name: len(arm["samples"]) for name, arm in cell["arms"].items()} == {
        "stock": 2,
        "split": 2,
        "stock again": 2,
    }
    assert 0 <= cell["errors"]["split"] <= 1e-3
    assert all(math.isfinite(loss) for loss in cell["figures"]["losses"].values())
    assert cell["figures"]["pair"]["rows"] == 96
    assert "precision-matched speedup" not in cell["figures"]


def test_mixed_precision_is_told_apart_from_the_split() -> None:
    cell = measured("bfloat16", "float32")
    assert list(cell["arms"]) == ["stock", "split", "stock bfloat16", "stock again"]
    figures = cell["figures"]
    assert figures["apparent speedup"] == cell["ratios"]["split"]["value"]
    assert figures["of it precision alone"] == cell["ratios"]["stock bfloat16"]["value"]
    ours, half = (cell["arms"][name]["samples"] for name in ("split", "stock bfloat16"))
    pairs = sorted(h / o for h, o in zip(half, ours, strict=True))
    assert figures["precision-matched speedup"] == pytest.approx(sum(pairs) / 2)


@pytest.mark.parametrize("poisoned", ["stock", "split"])
def test_a_run_with_nan_is_an_error(poisoned: str) -> None:
    made = {
        name: training.trainee(SMALL, "float32", 0.4 if name == "split" else None)
        for name in ("stock", "split")
    }
    made[poisoned].x = mx.full(made[poisoned].x.shape, math.nan)
    with pytest.raises(ArithmeticError, match=f"{poisoned}: the loss is nan"):
        training.verify(made["split"], made["stock"], 1e-3)


def test_nan_in_a_gradient_alone_and_wrong_gradients_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, stock = (training.trainee(SMALL, "float32", None) for _ in range(2))
    loss, gradients = stock.gradients()
    monkeypatch.setattr(
        stock, "gradients", lambda: (loss, {"up": gradients["blocks"][0]["mlp"]["up_proj"]["weight"]})
    )
    for factor, words in ((math.nan, "of up differs"), (1.01, "of up differs from stock's by 0.01")):
        wrong = {"up": gradients["blocks"][0]["mlp"]["up_proj"]["weight"] * factor}
        monkeypatch.setattr(ours, "gradients", lambda wrong=wrong: (loss, wrong))
        with pytest.raises(ArithmeticError, match=words):
            training.verify(ours, stock, 1e-3)


def test_a_loss_that_becomes_nan_while_training_fails_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Trainee, "loss", lambda self: math.nan)
    with pytest.raises(ArithmeticError, match="loss after training is nan"):
        training.measure({**SMALL, "dtype": "float32", "against": "float32"}, OPTIONS)


def test_cells_match_precisions_but_for_the_one_that_does_not() -> None:
    cells = training.cells(Options(scale=8))
    assert {name: (c["dtype"], c["against"]) for name, c in cells.items()} == {
        "float32": ("float32", "float32"),
        "bfloat16": ("bfloat16", "bfloat16"),
        "mixed precision": ("bfloat16", "float32"),
    }
    assert training.EXPERIMENT.name == "training"
    assert all(training.memory(cell) > 4 * 4 * cell["hidden"] ** 2 for cell in cells.values())
