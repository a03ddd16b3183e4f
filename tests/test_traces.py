"""Inside a graph transformation everything is stock, and nothing is left broken afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from graphs import evaluated
from mlx.utils import tree_flatten
from mlx_lm.tuner.trainer import grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import Pair, pair, tiny, tokens

import fusionml

ROWS = 40
TRACE = "under a trace"


@pytest.fixture
def model() -> Iterator[Pair]:
    """A known model in eval mode, as prefill finds it, with the patch on."""
    made = pair()
    fusionml.patch(made, min_rows=32, ratio=0.5)
    yield made
    fusionml.unpatch()


def x() -> mx.array:
    made = mx.random.normal((2, ROWS, 128), key=mx.random.key(2))
    mx.eval(made)
    return made


def with_weight(model: Pair, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the first layer's weight, the input being concrete."""
    given = x()

    def inner(weight: mx.array) -> Any:
        old = model.up.weight
        model.up.weight = weight
        try:
            return function(model.up(given))
        finally:
            model.up.weight = old

    return inner


def with_bias(model: Pair) -> Callable[[mx.array], mx.array]:
    """The first layer as a function of its bias, input and weight being concrete."""
    given = x()

    def inner(bias: mx.array) -> mx.array:
        old = model.up.bias
        model.up.bias = bias
        try:
            return model.up(given)
        finally:
            model.up.bias = old

    return inner


def same(value: mx.array) -> mx.array:
    return value


def square_sum(value: mx.array) -> mx.array:
    return value.square().sum()


# name -> what is computed, of a model; the input is traced
INPUT_TRACED: dict[str, Callable[[Pair], Any]] = {
    "compile": lambda m: mx.compile(lambda a: m(a))(x()),
    "compile, shapeless": lambda m: mx.compile(lambda a: m(a), shapeless=True)(x()),
    "compile, passed state": lambda m: mx.compile(lambda a: m(a), inputs=[m.state])(x()),
    "vmap": lambda m: mx.vmap(lambda a: m(a))(x()),
    "grad": lambda m: mx.grad(lambda a: square_sum(m(a)))(x()),
    "value_and_grad": lambda m: mx.value_and_grad(lambda a: square_sum(m(a)))(x()),
    "checkpoint": lambda m: mx.grad(lambda a: square_sum(mx.checkpoint(lambda b: m(b))(a)))(x()),
    "jvp": lambda m: mx.jvp(lambda a: m(a), [x()], [mx.ones((2, ROWS, 128))]),
    "vjp": lambda m: mx.vjp(lambda a: m(a), [x()], [mx.ones((2, ROWS, 128))]),
    "grad of compile": lambda m: mx.grad(lambda a: square_sum(mx.compile(lambda b: m(b))(a)))(x()),
    "grad of grad": lambda m: mx.grad(lambda a: square_sum(mx.grad(lambda b: square_sum(m(b)))(a)))(x()),
    "vmap of grad": lambda m: mx.vmap(mx.grad(lambda a: square_sum(m(a))))(x()),
}

# The input is concrete and a parameter is traced.
WEIGHT_TRACED: dict[str, Callable[[Pair], Any]] = {
    "compile": lambda m: mx.compile(with_weight(m, same))(m.up.weight),
    "compile, bias": lambda m: mx.compile(with_bias(m))(m.up.bias),
    "vmap": lambda m: mx.vmap(with_weight(m, same))(mx.stack([m.up.weight] * 2)),
    "grad, bias": lambda m: mx.grad(lambda b: square_sum(with_bias(m)(b)))(m.up.bias),
    "grad": lambda m: mx.grad(with_weight(m, square_sum))(m.up.weight),
    "nn.value_and_grad": lambda m: nn.value_and_grad(m, lambda a: square_sum(m(a)))(x()),
    "jvp": lambda m: mx.jvp(with_weight(m, same), [m.up.weight], [mx.ones((256, 128))]),
    "vjp": lambda m: mx.vjp(with_weight(m, same), [m.up.weight], [mx.ones((2, ROWS, 256))]),
    "checkpoint": lambda m: mx.grad(lambda w: square_sum(mx.checkpoint(with_weight(m, same))(w)))(
        m.up.weight
    ),
    "compile, state in a closure": lambda m: mx.compile(state_step(m), inputs=[m.state])(),
}


def state_step(model: Pair) -> Callable[[], mx.array]:
    given = x()
    return lambda: model(given)


def leaves(result: Any) -> list[mx.array]:
    flat = [leaf for _, leaf in tree_flatten([result])]
    mx.eval(flat)
    return flat


def assert_stock(model: Pair, compute: Callable[[Pair], Any]) -> None:
    """`compute` gives stock's very bits, splits nothing, and MLX works as before afterwards."""
    ours = leaves(compute(model))
    status = fusionml.status()
    fusionml.unpatch()
    theirs = leaves(compute(model))
    assert len(ours) == len(theirs)
    for mine, stock in zip(ours, theirs, strict=True):
        assert mine.dtype == stock.dtype
        assert mx.array_equal(mine, stock)
    assert status["calls"].get("split", 0) == 0
    assert set(status["reasons"]) == {TRACE}
    fusionml.patch(model, min_rows=32, ratio=0.5)
    assert_nothing_is_broken(model)


def assert_nothing_is_broken(model: Pair) -> None:
    """Compiled and plain calls work, and plain ones split again."""
    before = fusionml.status()["calls"].get("split", 0)
    plain = model(x())
    assert fusionml.status()["calls"]["split"] == before + 2
    assert mx.allclose(mx.compile(lambda a: model(a))(x()), plain, atol=1e-4)
    assert mx.array_equal(mx.compile(lambda a: a + 1)(x()), x() + 1)
    assert not evaluated(model.up(x()))


@pytest.mark.parametrize("name", INPUT_TRACED)
def test_with_the_input_traced(model: Pair, name: str) -> None:
    assert_stock(model, INPUT_TRACED[name])


@pytest.mark.parametrize("name", WEIGHT_TRACED)
def test_with_only_a_parameter_traced(model: Pair, name: str) -> None:
    assert_stock(model, WEIGHT_TRACED[name])


@pytest.mark.parametrize("boundary", ["eager", "async"])
@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
def test_whatever_the_settings(boundary: str, cpu_dtype: str) -> None:
    for compute in (INPUT_TRACED["compile"], INPUT_TRACED["grad"], WEIGHT_TRACED["vmap"]):
        made = pair()
        made.set_dtype(mx.float16)
        fusionml.patch(made, min_rows=32, ratio=0.5, boundary=boundary, cpu_dtype=cpu_dtype)
        ours = leaves(compute(made))
        calls = fusionml.status()["calls"]
        fusionml.unpatch()
        assert all(mx.array_equal(a, b) for a, b in zip(ours, leaves(compute(made)), strict=True))
        assert "split" not in calls


def test_without_a_boundary_the_results_are_right_too() -> None:
    for name, compute in [*INPUT_TRACED.items(), *WEIGHT_TRACED.items()]:
        if "shapeless" in name:
            continue  # a slice has no shapeless form: a lazy split cannot be traced there
        made = pair()
        fusionml.patch(made, min_rows=32, ratio=0.5, boundary="none")
        ours = leaves(compute(made))
        fusionml.unpatch()
        for mine, stock in zip(ours, leaves(compute(made)), strict=True):
            assert mx.allclose(mine, stock, rtol=1e-3, atol=1e-3)


def test_a_compiled_function_with_captured_arrays_is_right(model: Pair) -> None:
    given, late = x(), mx.ones((2, ROWS, 128))
    step = mx.compile(lambda a: model(given).sum() + a.sum())
    ours = [step(late), step(late + 1)]
    mx.eval(ours)
    fusionml.unpatch()
    for mine, stock in zip(ours, [step(late), step(late + 1)], strict=True):
        assert mx.allclose(mine, stock, rtol=1e-4)
    reference = model(given).sum() + late.sum()
    assert mx.allclose(ours[0], reference, rtol=1e-4)


def test_an_exported_function_is_stock(model: Pair, tmp_path: Path) -> None:
    path = str(tmp_path / "function.mlxfn")
    mx.export_function(path, lambda a: model(a), x())
    assert fusionml.status()["calls"] == {"stock": 2}
    assert set(fusionml.status()["reasons"]) == {TRACE}
    (out,) = mx.import_function(path)(x())
    fusionml.unpatch()
    assert mx.allclose(out, model(x()), atol=1e-5)
    fusionml.patch(model, min_rows=32, ratio=0.5)
    assert_nothing_is_broken(model)


def test_a_tracer_that_was_evaluated_by_the_user_changes_no_gradient(model: Pair) -> None:
    def loss(a: mx.array) -> mx.array:
        b = a * 2
        mx.eval(b)
        return square_sum(model(b))

    ours = mx.grad(loss)(x())
    mx.eval(ours)
    fusionml.unpatch()
    assert mx.allclose(ours, mx.grad(loss)(x()), rtol=1e-3, atol=1e-3)


def losses(model: nn.Module, compiled: bool) -> list[float]:
    """Four steps of training."""
    optimizer = optim.SGD(learning_rate=1e-2)
    given, wanted = x(), mx.ones((2, ROWS, 128))
    state = [model.state, optimizer.state]

    def step() -> mx.array:
        value, gradients = nn.value_and_grad(model, lambda a: (model(a) - wanted).square().mean())(given)
        optimizer.update(model, gradients)
        return value

    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    taken = []
    for _ in range(4):
        taken.append(run().item())
        mx.eval(state)
    return taken


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_training_steps_give_stocks_losses(model: Pair, training: bool, compiled: bool) -> None:
    theirs = losses(stock_twin().train(training), compiled)
    ours = losses(model.train(training), compiled)
    assert ours == theirs
    assert "split" not in fusionml.status()["calls"]
    assert ours[3] < ours[0]


def stock_twin() -> Pair:
    """The same model as the fixture's, unknown to us."""
    return pair()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_fine_tuning_adapters_gives_stocks_losses(patch: Callable[..., None], checkpointed: bool) -> None:
    theirs = adapter_losses(tiny("llama"), checkpointed)
    model = tiny("llama")
    patch(model, min_rows=32, ratio=0.5)
    assert adapter_losses(model, checkpointed) == theirs
    assert "split" not in fusionml.status()["calls"]


def adapter_losses(model: nn.Module, checkpointed: bool) -> list[float]:
    """Four steps of LoRA, the frozen model in eval mode, so that only the trace keeps it stock."""
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    model.eval()
    batch, optimizer = tokens(ROWS, batch=2), optim.Adam(learning_rate=1e-2)

    def loss(model: nn.Module) -> mx.array:
        return nn.losses.cross_entropy(model(batch)[:, :-1], batch[:, 1:]).mean()

    block, call = type(model.layers[0]), type(model.layers[0]).__call__
    if checkpointed:
        grad_checkpoint(model.layers[0])
    taken = []
    try:
        for _ in range(4):
            value, gradients = nn.value_and_grad(model, loss)(model)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), optimizer.state)
            taken.append(value.item())
    finally:
        block.__call__ = call
    return taken


# Errors


def failing(rows: int = ROWS) -> mx.array:
    """An input whose own graph fails when it is evaluated."""
    with mx.stream(mx.cpu):
        both = mx.array([0, 1])
        product = mx.gather_mm(
            mx.zeros((2, rows, 16), mx.float16), mx.zeros((2, 16, 128), mx.float16), both, both
        )
        return product.astype(mx.float32)


def test_the_error_of_the_users_own_graph_is_the_users(model: Pair) -> None:
    with pytest.raises(RuntimeError) as theirs:
        mx.eval(failing())
    with pytest.raises(RuntimeError) as ours:
        mx.eval(model(failing()))
    assert str(ours.value) == str(theirs.value)
    assert "a split that failed" not in fusionml.status()["reasons"]
    assert_nothing_is_broken(model)


def test_a_value_error_that_is_no_traces_is_not_swallowed(
    model: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arrays: mx.array) -> None:
        raise ValueError("[conv] the user's own mistake")

    monkeypatch.setattr(mx, "async_eval", broken)
    with pytest.raises(ValueError, match="own mistake"):
        model(x())


def test_an_input_that_does_not_fit_fails_as_in_stock(model: Pair) -> None:
    wrong = mx.zeros((2, ROWS, 130))
    with pytest.raises(ValueError, match=r"addmm|matmul") as ours:
        model(wrong)
    assert fusionml.status()["reasons"] == {"input of another width": 1}
    fusionml.unpatch()
    with pytest.raises(ValueError, match=r"addmm|matmul") as theirs:
        model(wrong)
    assert str(ours.value) == str(theirs.value)


def test_an_input_of_another_kind_is_stock(model: Pair) -> None:
    whole = mx.arange(ROWS * 128).reshape(1, ROWS, 128)
    ours = model.up(whole)
    assert fusionml.status()["reasons"] == {"input of type mlx.core.int32": 1}
    fusionml.unpatch()
    assert mx.array_equal(ours, model.up(whole))


def test_what_is_no_array_fails_as_in_stock(model: Pair) -> None:
    for wrong in (None, "text", [1.0] * 128):
        with pytest.raises(Exception) as ours:  # noqa: PT011 - whatever stock raises
            model(wrong)
        fusionml.unpatch()
        with pytest.raises(Exception) as theirs:  # noqa: PT011
            model(wrong)
        assert (type(ours.value), str(ours.value)) == (type(theirs.value), str(theirs.value))
        fusionml.patch(model, min_rows=32, ratio=0.5)
