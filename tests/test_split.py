"""The mechanism against the float64 product, and the graph that it builds."""

import itertools
import threading
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from graphs import evaluated, foreign_stream, lazy, operations
from hypothesis import given
from hypothesis import strategies as st

from fusionml import split, split_linear

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
K, N = 96, 80
SHAPES = {1: (K,), 2: (48, K), 3: (2, 24, K), 4: (2, 2, 12, K)}


def exact(array: mx.array) -> np.ndarray:
    """The values of `array` in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def truth(x: mx.array, weight: mx.array, bias: mx.array | None) -> np.ndarray:
    product = exact(x) @ exact(weight).T
    return product if bias is None else product + exact(bias)


def stock(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def error(out: mx.array, reference: np.ndarray) -> float:
    """Largest difference relative to the largest true value."""
    if not reference.size:
        return 0.0
    return float(np.abs(exact(out) - reference).max() / np.abs(reference).max())


def data(
    shape: tuple[int, ...], dtype: mx.Dtype, bias: bool, width: int = N
) -> tuple[mx.array, mx.array, mx.array | None]:
    keys = mx.random.split(mx.random.key(5), 3)
    x = mx.random.normal(shape, key=keys[0]).astype(dtype)
    weight = (mx.random.normal((width, shape[-1]), key=keys[1]) * shape[-1] ** -0.5).astype(dtype)
    added = mx.random.normal((width,), key=keys[2]).astype(dtype) if bias else None
    mx.eval(x, weight, *([] if added is None else [added]))
    return x, weight, added


def assert_as_good_as_stock(
    out: mx.array, x: mx.array, weight: mx.array, bias: mx.array | None, limit: float = 1.0
) -> None:
    plain, reference = stock(x, weight, bias), truth(x, weight, bias)
    assert out.shape == plain.shape
    assert out.dtype == plain.dtype
    ours, theirs = error(out, reference), error(plain, reference)
    assert ours <= 2 * theirs + 1e-7, f"error {ours:.2e} against stock's {theirs:.2e}"
    assert ours <= limit


@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_product(dtype: mx.Dtype, bias: bool, dimensions: int) -> None:
    x, weight, added = data(SHAPES[dimensions], dtype, bias)
    choices = itertools.product(
        (0, 0.1, 0.3, 0.5, split.max_ratio()), split.BOUNDARIES, (None, "native", "float32")
    )
    for ratio, boundary, cpu_dtype in choices:
        out = split_linear(x, weight, added, ratio=ratio, boundary=boundary, cpu_dtype=cpu_dtype)
        assert_as_good_as_stock(out, x, weight, added)


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
def test_float16_stays_within_three_thousandths(cpu_dtype: str) -> None:
    x, weight, bias = data((512, 1024), mx.float16, True, 64)
    out = split_linear(x, weight, bias, ratio=0.5, cpu_dtype=cpu_dtype)
    assert_as_good_as_stock(out, x, weight, bias, limit=3e-3)


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
@pytest.mark.parametrize("types", [*itertools.product(FLOATS, FLOATS, (None, *FLOATS))], ids=str)
def test_mixed_types_promote_as_in_stock(
    types: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None], cpu_dtype: str
) -> None:
    x, weight, bias = data((48, K), mx.float32, types[2] is not None)
    x, weight = x.astype(types[0]), weight.astype(types[1])
    bias = None if bias is None else bias.astype(types[2])
    out = split_linear(x, weight, bias, ratio=0.5, cpu_dtype=cpu_dtype)
    assert_as_good_as_stock(out, x, weight, bias)


@pytest.mark.parametrize("dtype", [mx.float64, mx.complex64], ids=str)
def test_float32_arithmetic_never_narrows(dtype: mx.Dtype) -> None:
    with mx.stream(mx.cpu):
        x = (mx.arange(40 * 8).reshape(40, 8) / 7).astype(dtype) * mx.array(1 + 1e-12, dtype)
        x = x + mx.array(2j) if dtype == mx.complex64 else x
        weight = mx.eye(8).astype(dtype)
        out = split_linear(x, weight, ratio=0.5, cpu_dtype="float32")
        assert out.dtype == dtype
        assert mx.array_equal(out, x)


def test_float32_arithmetic_rounds_once() -> None:
    x, weight = mx.zeros((40, 8), mx.float16), mx.zeros((16, 8), mx.float16)
    x[:, :2] = 1
    weight[:, 0], weight[:, 1] = 2048, 1
    # 2049 is not a float16; 2050 is: adding the bias after rounding the product would lose it.
    out = split_linear(x, weight, mx.ones((16,), mx.float16), ratio=0.5, cpu_dtype="float32")
    assert mx.all(out[:20] == 2050)


INPUTS: dict[str, Callable[[], mx.array]] = {
    "transposed": lambda: mx.random.normal((K, 48), key=mx.random.key(1)).T,
    "swapped": lambda: mx.random.normal((40, 2, K), key=mx.random.key(1)).swapaxes(0, 1),
    "strided rows": lambda: mx.random.normal((96, K), key=mx.random.key(1))[::2],
    "strided columns": lambda: mx.random.normal((48, 2 * K), key=mx.random.key(1))[:, ::2],
    "reversed": lambda: mx.random.normal((48, K), key=mx.random.key(1))[::-1],
    "broadcast rows": lambda: mx.broadcast_to(mx.random.normal((K,), key=mx.random.key(1)), (48, K)),
    "broadcast batch": lambda: mx.broadcast_to(mx.random.normal((24, K), key=mx.random.key(1)), (3, 24, K)),
    "broadcast columns": lambda: mx.broadcast_to(mx.random.normal((48, 1), key=mx.random.key(1)), (48, K)),
    "no rows": lambda: mx.zeros((0, K)),
    "no rows in a batch": lambda: mx.zeros((2, 0, K)),
    "no batch": lambda: mx.zeros((0, 40, K)),
    "one row": lambda: mx.random.normal((1, K), key=mx.random.key(1)),
    "two rows": lambda: mx.random.normal((2, K), key=mx.random.key(1)),
    "one row in a batch": lambda: mx.random.normal((1, 1, K), key=mx.random.key(1)),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("evaluate", [False, True], ids=["lazy", "real"])
@pytest.mark.parametrize("name", INPUTS)
def test_unusual_inputs(name: str, evaluate: bool, bias: bool) -> None:
    x = INPUTS[name]()
    if evaluate:
        mx.eval(x)
    _, weight, added = data((48, K), mx.float32, bias)
    for boundary in split.BOUNDARIES:
        out = split_linear(x, weight, added, ratio=0.5, boundary=boundary)
        assert_as_good_as_stock(out, x, weight, added)


def test_an_unusual_weight() -> None:
    x, weight, _ = data((48, K), mx.float32, False)
    turned = mx.array(weight.T).T
    for odd in (turned, mx.broadcast_to(weight[:1], (N, K)), mx.concatenate([weight, weight], 1)[:, :K]):
        assert_as_good_as_stock(split_linear(x, odd, ratio=0.5), x, odd, None)


def test_no_inner_dimension() -> None:
    out = split_linear(mx.zeros((40, 0)), mx.zeros((N, 0)), mx.ones((N,)), ratio=0.5)
    assert out.shape == (40, N)


# The rows


@given(rows=st.integers(0, 20000), ratio=st.floats(0, 0.9))
def test_the_rows_of_the_cpu(rows: int, ratio: float) -> None:
    m = split.cpu_rows(rows, ratio)
    if rows < 2 or ratio == 0:
        assert m == 0
        return
    assert 0 < m < rows
    assert abs(m - rows * ratio) <= max(rows / 8, 1)
    if rows >= 256:
        assert m % 32 == 0
    if rows * ratio >= 16:
        assert abs(m - rows * ratio) <= 16


@given(rows=st.integers(2, 20000), ratios=st.tuples(st.floats(0, 0.9), st.floats(0, 0.9)))
def test_a_larger_ratio_never_means_fewer_rows(rows: int, ratios: tuple[float, float]) -> None:
    low, high = sorted(ratios)
    assert split.cpu_rows(rows, low) <= split.cpu_rows(rows, high)


def test_the_first_rows_are_the_cpus() -> None:
    x, weight, bias = data((320, K), mx.float32, True)
    cpu, current = split.linear_parts(x, weight, bias, 96, "eager", "native")
    assert (cpu.shape, current.shape) == ((96, N), (224, N))
    reference = truth(x, weight, bias)
    assert error(cpu, reference[:96]) < 1e-6
    # On a GPU float32 products may be rounded to tf32, stock's as well.
    stock = mx.addmm(bias, x, weight.T)
    assert error(current, reference[96:]) <= 2 * error(stock, reference) + 1e-6


@pytest.mark.parametrize("shape", [(320, K), (2, 160, K), (2, 2, 80, K), (320, 1, K)])
def test_rows_are_counted_over_all_dimensions(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    parts: list[tuple[int, ...]] = []
    join = split.join

    def spy(cpu: mx.array, current: mx.array, *rest: object) -> mx.array:
        parts.extend([cpu.shape, current.shape])
        return join(cpu, current, *rest)

    monkeypatch.setattr(split, "join", spy)
    x, weight, _ = data(shape, mx.float32, False)
    assert split_linear(x, weight, ratio=0.3).shape == (*shape[:-1], N)
    assert parts == [(96, N), (224, N)]


# The streams: evaluating an operation that is on a stream of a thread that is gone fails, and only then.


@pytest.mark.parametrize("bias", [False, True])
def test_nothing_of_the_cpu_part_is_on_the_current_stream(bias: bool) -> None:
    x, weight, added = data((64, K), mx.float16, bias)
    with mx.stream(foreign_stream()):
        cpu, current = split.linear_parts(x, weight, added, 32, "eager", "native")
    mx.eval(cpu)
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(current)


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
@pytest.mark.parametrize("bias", [False, True])
def test_nothing_of_the_current_part_is_on_the_cpu_stream(
    monkeypatch: pytest.MonkeyPatch, bias: bool, cpu_dtype: str
) -> None:
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    x, weight, added = data((64, K), mx.float16, bias)
    cpu, current = split.linear_parts(x, weight, added, 32, "eager", cpu_dtype)
    mx.eval(current)
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(cpu)


def test_the_copies_in_float32_are_made_on_the_current_stream_at_the_boundary() -> None:
    x, weight, bias = data((64, K), mx.float16, True)
    cpu, _ = split.linear_parts(x, weight, bias, 32, "eager", "float32")
    # Of the three copies nothing is left to do; the one cast that is left is the result's.
    assert operations(cpu).count("AsType") == 1
    with mx.stream(foreign_stream()), pytest.raises(RuntimeError, match="Stream"):
        split.linear_parts(x, weight, bias, 32, "eager", "float32")


def test_the_copy_of_the_weight_is_transient() -> None:
    x, weight, _ = data((64, 256), mx.float16, False, 4096)
    before = mx.get_active_memory()
    out = split_linear(x, weight, ratio=0.5, cpu_dtype="float32")
    mx.eval(out)
    assert mx.get_active_memory() - before < 4 * weight.size
    mx.eval(split_linear(x, weight, ratio=0.5, cpu_dtype="float32"))
    assert mx.get_active_memory() - before < 4 * weight.size


def test_the_stream_serves_every_thread() -> None:
    x, weight, bias = data((64, K), mx.float32, True)
    outs: list[np.ndarray] = []

    def work() -> None:
        outs.append(np.array(split_linear(x, weight, bias, ratio=0.5)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reference = truth(x, weight, bias)
    assert len(outs) == 3
    assert all(np.abs(out - reference).max() < 1e-5 for out in outs)


# The boundary and the join


def test_the_boundary_makes_input_and_weight_real_and_the_result_is_lazy() -> None:
    for boundary, real in (("eager", True), ("async", True), ("none", False)):
        x, weight, bias = (lazy(a) for a in data((64, K), mx.float32, True) if a is not None)
        out = split_linear(x, weight, bias, ratio=0.5, boundary=boundary)
        assert [evaluated(a) for a in (x, weight, bias)] == [real] * 3, boundary
        assert not evaluated(out)


def test_only_eager_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    evaluate = mx.eval
    monkeypatch.setattr(mx, "eval", lambda *arrays: waited.append("eval") or evaluate(*arrays))
    x, weight, _ = data((64, K), mx.float32, False)
    for boundary, waits in (("none", 0), ("async", 0), ("eager", 1)):
        waited.clear()
        split_linear(lazy(x), weight, ratio=0.5, boundary=boundary)
        assert len(waited) == waits, boundary


def test_both_parts_are_computed_before_the_join_where_the_backend_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, bias = data((64, K), mx.float32, True)
    for needed in (False, True):
        monkeypatch.setattr(split, "needs_settling", lambda needed=needed: needed)
        out = split_linear(x, weight, bias, ratio=0.5)
        left = operations(out)
        assert ("Matmul" in left, "AddMM" in left) == (not needed, not needed)
        assert "Concatenate" in left
        assert_as_good_as_stock(out, x, weight, bias)


@pytest.mark.parametrize(
    ("device", "cuda"), [(mx.cpu, False), (mx.cpu, True), (mx.gpu, False), (mx.gpu, True)]
)
def test_only_cuda_needs_that(monkeypatch: pytest.MonkeyPatch, device: mx.DeviceType, cuda: bool) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: device)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    assert split.needs_settling() == (device == mx.gpu and cuda)


def test_a_ratio_of_zero_has_no_boundary_and_no_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    x, weight, bias = data((64, K), mx.float32, True)
    waiting = lazy(x)
    out = split_linear(waiting, weight, bias, ratio=0)
    assert not evaluated(waiting)
    assert mx.array_equal(out, stock(x, weight, bias))


def test_gradients_flow_where_nothing_is_a_boundary() -> None:
    x, weight, bias = data((64, K), mx.float32, True)
    ours = mx.grad(lambda w: split_linear(x, w, bias, ratio=0.5, boundary="none").square().sum())(weight)
    theirs = mx.grad(lambda w: stock(x, w, bias).square().sum())(weight)
    assert mx.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


# The arithmetic's name, the threads, the errors


def test_auto_is_float32_only_for_half_types_on_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    for platform, half in (("darwin", "float32"), ("linux", "native")):
        monkeypatch.setattr(split.sys, "platform", platform)
        assert [split.resolve_cpu_dtype("auto", t) for t in FLOATS] == ["native", half, half]
    assert [split.resolve_cpu_dtype("float32", t) for t in FLOATS] == ["native", "float32", "float32"]
    assert [split.resolve_cpu_dtype("native", t) for t in FLOATS] == ["native"] * 3


def test_the_threads_of_the_cpu_stream_are_bounded() -> None:
    budget = split.StreamBudget(limit=3)
    seen: list[tuple[bool, bool, bool]] = []

    def work() -> None:
        seen.append((budget.admit(), budget.admit(), budget.admitted_here()))

    for _ in range(5):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert seen == [(True, True, True)] * 3 + [(False, False, False)] * 2
    assert not budget.admitted_here()
    assert split.StreamBudget()._limit == 32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ratio": 1.5}, ("ratio", "1.5", str(split.max_ratio()))),
        ({"ratio": -0.1}, ("ratio", "-0.1", "0")),
        ({"ratio": float("nan")}, ("ratio", "nan")),
        ({"ratio": True}, ("ratio", "True")),
        ({"ratio": "0.3"}, ("ratio", "'0.3'")),
        ({"boundary": "eagre"}, ("boundary", "'eagre'", "eager, async, none")),
        ({"cpu_dtype": "half"}, ("cpu_dtype", "'half'", "auto, native, float32")),
        ({"x": mx.zeros((48, K + 1))}, ("x", str(K + 1))),
        ({"x": mx.zeros(())}, ("x", "()")),
        ({"weight": mx.zeros((N, K, 1))}, ("weight", f"({N}, {K}, 1)")),
        ({"bias": mx.zeros((N + 1,))}, ("bias", f"({N + 1},)", f"[{N}]")),
        ({"bias": mx.zeros((1, N))}, ("bias", f"(1, {N})")),
    ],
)
def test_a_wrong_argument(change: dict, words: tuple[str, ...]) -> None:
    x, weight, bias = data((48, K), mx.float32, True)
    arguments = {"x": x, "weight": weight, "bias": bias, "ratio": 0.3} | change
    with pytest.raises(ValueError, match=words[0]) as raised:
        split_linear(arguments.pop("x"), arguments.pop("weight"), arguments.pop("bias"), **arguments)
    assert all(word in str(raised.value) for word in words), raised.value


def test_the_range_of_the_ratio_depends_on_the_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    assert split.max_ratio() == 0.5
    monkeypatch.setattr(mx, "default_device", lambda: mx.cpu)
    assert split.max_ratio() == 0.9


def test_inside_a_transformation_it_raises_and_leaves_nothing_broken() -> None:
    x, weight, _ = data((48, K), mx.float32, False)
    for transform in (mx.compile, mx.vmap):
        with pytest.raises(ValueError, match="transformation") as raised:
            mx.eval(
                transform(lambda a: split_linear(a, weight, ratio=0.5))(
                    x[None] if transform is mx.vmap else x
                )
            )
        assert split.is_trace_error(raised.value)
    assert mx.array_equal(mx.compile(lambda a: a @ weight.T)(x), x @ weight.T)


def test_only_the_traces_own_error_counts_as_one() -> None:
    assert not split.is_trace_error(ValueError("[matmul] shapes do not fit"))
    x = mx.zeros((2, 2))
    seen: list[bool] = []

    def probe(a: mx.array) -> mx.array:
        for evaluate in (mx.async_eval, mx.eval):
            try:
                evaluate(a)
            except ValueError as error:
                seen.append(split.is_trace_error(error))
        return a

    mx.eval(mx.compile(probe)(x))
    mx.eval(mx.vmap(lambda a: probe(a + 1))(x))
    assert seen == [True] * 4
