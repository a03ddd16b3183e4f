"""Layers of experts against a float64 loop over the rows, and against MLX-LM's own layers."""

import itertools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from graphs import evaluated, foreign_stream, lazy, operations, peak
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models import switch_layers
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchGLU, SwitchLinear
from quantised import error, exact, pack, values

from fusionml import experts, quantized, split
from fusionml.experts import EACH, FORMS, GATHER, QUANTISED, Call, Run, Weight
from fusionml.products import ExpertsProduct
from fusionml.quantized import Packed

E, K, N = 6, 128, 24
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
CASES = [(form, bits) for form in FORMS for bits in (None, 4) if bits or form != QUANTISED]
COUNTS = {
    "several rows each": [9, 3, 12, 7, 4, 2],
    "some without rows": [0, 17, 0, 0, 19, 1],
    "one row each": [1] * E,
    "one expert": [0, 0, 0, 37, 0, 0],
    "the last": [0, 0, 0, 0, 0, 5],
}


def call(counts: list[int], dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    """Sorted rows `[rows, 1, K]` and the expert of each."""
    x = mx.random.normal((sum(counts), 1, K), key=mx.random.key(3)).astype(dtype)
    indices = mx.array(np.repeat(np.arange(len(counts)), counts).astype(np.uint32))
    mx.eval(x, indices)
    return x, indices


def weights(dtype: mx.Dtype, bits: int | None = None) -> Weight:
    if bits is not None:
        return pack((E, N, K), dtype, bits=bits)
    return (mx.random.normal((E, N, K), key=mx.random.key(4)) * K**-0.5).astype(dtype)


def biases(dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((E, N), key=mx.random.key(5)).astype(dtype)


def truth(x: mx.array, weight: Weight, bias: mx.array | None, indices: mx.array) -> np.ndarray:
    """Row by row, in float64."""
    dense = values(weight) if isinstance(weight, Packed) else exact(weight)
    added = np.zeros((E, N)) if bias is None else exact(bias)
    rows = [row[0] @ dense[e].T + added[e] for row, e in zip(exact(x), np.array(indices), strict=True)]
    return np.array(rows).reshape(len(rows), 1, N)


def forms_for(weight: Weight) -> tuple[str, ...]:
    return FORMS if isinstance(weight, Packed) else (GATHER, EACH)


def layer(weight: Weight, bias: mx.array | None) -> nn.Module:
    """MLX-LM's own layer with these very arrays."""
    if isinstance(weight, Packed):
        made = QuantizedSwitchLinear(K, N, E, bias is not None, weight.group_size, weight.bits)
        made.weight, made.scales, made.biases = weight.arrays
    else:
        made = SwitchLinear(K, N, E, bias is not None)
        made.weight = weight
    if bias is not None:
        made.bias = bias
    return made


def arms(
    x: mx.array, weight: Weight, bias: mx.array | None, indices: mx.array, *, gathers: bool = True
) -> dict[object, mx.array]:
    """Every way to compute the layer, by name."""
    rows = x.shape[0]
    found = {("dense", b): experts.dense(Call(x, weight, bias, indices), b) for b in split.BOUNDARIES}
    cuts = sorted({1, rows // 3, rows - 1} - {0, rows}) if rows > 1 else []
    forms = forms_for(weight) if gathers else (EACH,)
    for m, *options in itertools.product(cuts, forms, split.BOUNDARIES, ("native", "float32")):
        found[(m, *options)] = experts.run_experts(Call(x, weight, bias, indices), m, *options)
    return found


def assert_right(x: mx.array, weight: Weight, bias: mx.array | None, indices: mx.array) -> None:
    """Every arm is of stock's shape and dtype, and no further from the truth than stock, where it runs."""
    plain = layer(weight, bias)(x, indices, sorted_indices=True)
    reference = truth(x, weight, bias, indices)
    # On a CPU MLX gathers dense weights in float32 only.
    product = mx.result_type(x, weight.scales if isinstance(weight, Packed) else weight)
    runs = isinstance(weight, Packed) or product == mx.float32
    theirs = error(plain, reference) if runs else 0.0
    for name, out in arms(x, weight, bias, indices, gathers=runs).items():
        assert (out.shape, out.dtype) == (plain.shape, plain.dtype), name
        rounding = 1e-6 if product == mx.float32 else 2 * mx.finfo(product).eps
        ours = error(out, reference)
        assert ours <= max(theirs * 1.01, rounding), f"{name}: {ours:.2e} against stock's {theirs:.2e}"


@pytest.mark.parametrize("bits", [None, 2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_the_product(dtype: mx.Dtype, bits: int | None) -> None:
    x, indices = call(COUNTS["several rows each"], dtype)
    for bias in (None, biases(dtype)):
        assert_right(x, weights(dtype, bits), bias, indices)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("counts", COUNTS)
def test_experts_with_no_row_or_one(counts: str, bits: int | None) -> None:
    x, indices = call(COUNTS[counts])
    assert_right(x, weights(mx.float32, bits), biases(mx.float32), indices)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("types", [*itertools.product(FLOATS, FLOATS, FLOATS)], ids=str)
def test_mixed_types_promote_as_in_stock(
    types: tuple[mx.Dtype, mx.Dtype, mx.Dtype], bits: int | None
) -> None:
    x, indices = call([3, 5, 0, 2, 1, 6], types[0])
    assert_right(x, weights(types[1], bits), biases(types[2]), indices)


@pytest.mark.parametrize("bits", [None, 4])
def test_no_rows(bits: int | None) -> None:
    x, indices = call([0] * E)
    for boundary in split.BOUNDARIES:
        out = experts.dense(Call(x, weights(mx.float32, bits), biases(mx.float32), indices), boundary)
        assert (out.shape, out.dtype) == ((0, 1, N), mx.float32)


def test_rows_that_are_not_sorted_are_only_slow() -> None:
    x, _ = call([8, 8, 8, 8, 8, 8])
    indices = mx.array(np.random.default_rng(0).integers(0, E, 48).astype(np.uint32))
    weight = weights(mx.float32)
    out = experts.run_experts(Call(x, weight, None, indices), 20, EACH, "eager", "native")
    assert error(out, truth(x, weight, None, indices)) < 1e-6


def test_the_same_shape_with_other_experts() -> None:
    weight = weights(mx.float32)
    for counts in ([20, 10, 0, 0, 0, 0], [0, 0, 0, 0, 10, 20], [5, 5, 5, 5, 5, 5]):
        assert_right(*_ordered(call(counts), weight))


def _ordered(given: tuple[mx.array, mx.array], weight: Weight) -> tuple[mx.array, Weight, None, mx.array]:
    return given[0], weight, None, given[1]


def test_what_mlx_lm_sorts_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, bool]] = []
    stock = SwitchLinear.__call__

    def spy(self: nn.Module, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        seen.append((sorted_indices, experts.is_sorted_call(x, indices)))
        weight = experts.weight_of(self)
        if not sorted_indices:
            return stock(self, x, indices, sorted_indices)
        return experts.run_experts(Call(x, weight, self.get("bias"), indices), 40, GATHER, "eager", "native")

    block = SwitchGLU(K, 48, E, bias=True)
    x = mx.random.normal((2, 30, K))
    chosen = mx.argpartition(mx.random.normal((2, 30, E)), kth=2, axis=-1)[..., :2]
    few = (x[:, :3], chosen[:, :3])
    plain = [block(x, chosen), block(*few)]
    with monkeypatch.context() as spied:
        spied.setattr(switch_layers.SwitchLinear, "__call__", spy)
        ours = [block(x, chosen), block(*few)]
    assert seen == [(True, True)] * 3 + [(False, False)] * 3
    for mine, theirs in zip(ours, plain, strict=True):
        assert mx.allclose(mine, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("x", "indices"),
    [
        ((6, 1, K), (2, 3)),
        ((6, 2, K), (6,)),
        ((6, K), (6,)),
        ((1, 1, K), (6,)),
        ((6, 1, K), (6, 2)),
        ((2, 3, 1, K), (2, 3)),
    ],
)
def test_other_shapes_are_no_sorted_call(x: tuple[int, ...], indices: tuple[int, ...]) -> None:
    assert experts.is_sorted_call(mx.zeros((6, 1, K)), mx.zeros((6,), mx.uint32))
    assert not experts.is_sorted_call(mx.zeros(x), mx.zeros(indices, mx.uint32))


# The rows of each expert


def brute_force(indices: list[int], low: int, high: int) -> list[tuple[int, int]]:
    """(expert, row) of the rows in `[low, high)`."""
    return [(expert, row) for row, expert in enumerate(indices) if low <= row < high]


def rows_of(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.expert, row) for run in runs for row in range(run.start, run.stop)]


@given(indices=st.lists(st.integers(0, 9), max_size=60).map(sorted), m=st.integers(0, 70))
@settings(max_examples=300)
def test_the_boundaries_of_the_experts(indices: list[int], m: int) -> None:
    runs = experts.expert_runs(np.array(indices, np.uint32))
    assert rows_of(runs) == brute_force(indices, 0, len(indices))
    assert [run.expert for run in runs] == sorted(set(indices))
    head, rest = experts.cut(runs, m)
    assert rows_of(head) == brute_force(indices, 0, m)
    assert rows_of(rest) == brute_force(indices, m, len(indices))
    # Nothing empty, and at most one expert is on both sides.
    assert all(run.start < run.stop for run in (*head, *rest))
    assert len({run.expert for run in head} & {run.expert for run in rest}) <= 1


@given(
    counts=st.lists(st.integers(0, 12), min_size=E, max_size=E).filter(lambda c: sum(c) >= 2),
    share=st.floats(0.01, 0.99),
    case=st.sampled_from(CASES),
)
@settings(max_examples=60, deadline=None)
def test_any_routing(counts: list[int], share: float, case: tuple[str, int | None]) -> None:
    form, bits = case
    x, indices = call(counts)
    m = min(max(1, round(share * len(x))), len(x) - 1)
    weight, bias = weights(mx.float32, bits), biases(mx.float32)
    out = experts.run_experts(Call(x, weight, bias, indices), m, form, "eager", "native")
    assert error(out, truth(x, weight, bias, indices)) < 1e-6


# What the CPU touches, and the streams


@pytest.mark.parametrize("form", FORMS)
def test_only_experts_with_rows_on_the_cpu_are_dequantised(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    unpacked: list[bool] = []
    whole = quantized.unpacked
    with mx.stream(split.cpu_stream):
        ours = mx.default_stream(mx.cpu)

    def spy(packed: Packed, dtype: mx.Dtype, *, wait: bool) -> mx.array:
        unpacked.append(mx.default_stream(mx.default_device()) == ours)
        return whole(packed, dtype, wait=wait)

    for module in (quantized, experts):
        monkeypatch.setattr(module, "unpacked", spy)
    x, indices = call([4, 0, 4, 4, 4, 4])
    mx.eval(experts.run_experts(Call(x, weights(mx.float32, 4), None, indices), 10, form, "eager", "native"))
    # Rows of three experts are the CPU's; the third has rows on the other side as well.
    assert unpacked == {GATHER: [False] * 3, EACH: [True] * 3 + [False] * 3, QUANTISED: []}[form]


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
@pytest.mark.parametrize(("form", "bits"), CASES)
def test_each_part_is_on_its_own_stream(
    monkeypatch: pytest.MonkeyPatch, form: str, bits: int | None, cpu_dtype: str
) -> None:
    x, indices = call([4, 0, 4, 4, 4, 4])
    weight, bias = weights(mx.float32, bits), biases(mx.float32)
    mx.eval(bias)
    monkeypatch.setattr(experts, "_dispatch", lambda *products: None)
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    cpu, current = experts.expert_parts(Call(x, weight, bias, indices), 10, form, "eager", cpu_dtype)
    mx.eval(current)
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(cpu)
    monkeypatch.undo()
    if form != GATHER or bits is None:
        monkeypatch.setattr(experts, "_dispatch", lambda *products: None)
        with mx.stream(foreign_stream()):
            cpu, current = experts.expert_parts(Call(x, weight, bias, indices), 10, form, "eager", cpu_dtype)
        mx.eval(cpu)
        with pytest.raises(RuntimeError, match="Stream"):
            mx.eval(current)


@pytest.mark.parametrize(("form", "bits"), CASES)
def test_the_cpus_part_alone_leaves_the_other_stream_nothing_to_do(form: str, bits: int | None) -> None:
    """It is timed to tell what the CPU does without a neighbour."""
    x, indices = call([4, 0, 4, 4, 4, 4])
    weight, bias = weights(mx.float32, bits), biases(mx.float32)
    expected, _ = experts.expert_parts(Call(x, weight, bias, indices), 10, form, "eager", "native")
    mx.eval(expected, bias)
    if form == GATHER and bits:
        return  # there the current stream dequantises for the CPU
    with mx.stream(foreign_stream()):
        alone = ExpertsProduct(Call(x, weight, bias, indices)).cpu_part(10, form, "native")
    assert mx.array_equal(alone, expected)


def test_a_gathering_stream_widens_experts_for_the_cpu_at_the_boundary() -> None:
    x, indices = call(COUNTS["several rows each"], mx.float16)
    weight = weights(mx.float16)
    mx.eval(weight)
    cpu, _ = experts.expert_parts(Call(x, weight, None, indices), 10, GATHER, "eager", "float32")
    # The rows of two runs and the result: no cast of a weight is left.
    assert operations(cpu).count("AsType") == 3
    with mx.stream(foreign_stream()), pytest.raises(RuntimeError, match="Stream"):
        experts.expert_parts(Call(x, weight, None, indices), 12, GATHER, "eager", "float32")


@pytest.mark.parametrize("boundary", split.BOUNDARIES)
def test_the_boundary(boundary: str) -> None:
    for form in (GATHER, EACH):
        x, indices = call(COUNTS["several rows each"])
        inputs = [lazy(x), lazy(weights(mx.float32)), lazy(biases(mx.float32)), lazy(indices)]
        out = experts.run_experts(Call(*inputs), 10, form, boundary, "native")
        assert [evaluated(a) for a in inputs[:3]] == [boundary != "none"] * 3
        assert evaluated(inputs[3])
        assert not evaluated(out)


def test_few_dequantised_experts_are_alive_at_once() -> None:
    count, width = 32, 512
    packed = pack((count, width, width), mx.float32)
    x = mx.random.normal((4 * count, 1, width))
    indices = mx.array(np.repeat(np.arange(count), 4).astype(np.uint32))
    mx.eval(x, indices)
    whole = 4 * count * width * width

    def run(form: str) -> Callable[[], mx.array]:
        return lambda: experts.run_experts(Call(x, packed, None, indices), 2 * count, form, "eager", "native")

    assert peak(lambda: experts.dense(Call(x, packed, None, indices), "eager")) < whole / 2
    assert peak(run(EACH)) < whole / 2
    assert peak(run(GATHER)) < whole * 0.75
    assert peak(run(QUANTISED)) < whole / 8


@pytest.mark.parametrize(("dtype", "cpu_dtype"), [(mx.float32, "native"), (mx.float16, "float32")])
@pytest.mark.parametrize("form", FORMS)
def test_two_layers_of_one_input_hold_their_dense_experts_one_after_the_other(
    form: str, dtype: mx.Dtype, cpu_dtype: str
) -> None:
    """The first two of a block are both asked for before either is read."""
    count, width = 16, 512
    packed = pack((count, width, width), dtype)
    x = mx.random.normal((4 * count, 1, width)).astype(dtype)
    indices = mx.array(np.repeat(np.arange(count), 4).astype(np.uint32))
    mx.eval(x, indices)

    def run() -> mx.array:
        return experts.run_experts(Call(x, packed, None, indices), 3 * count, form, "eager", cpu_dtype)

    # Three quarters of the experts are the CPU's; it multiplies in float32.
    assert peak(lambda: [run(), run()]) < count * width * width * 4


# What is refused


@pytest.mark.parametrize("bits", [None, 4])
def test_a_trace_raises_mlxs_own_error_and_leaves_nothing_broken(bits: int | None) -> None:
    x, indices = call(COUNTS["several rows each"])
    weight = weights(mx.float32, bits)
    calls = [lambda a, i: experts.dense(Call(a, weight, None, i), "eager")]
    for form, boundary in itertools.product(forms_for(weight), ("eager", "none")):
        calls.append(
            lambda a, i, form=form, boundary=boundary: experts.run_experts(
                Call(a, weight, None, i), 10, form, boundary, "native"
            )
        )
    for function in calls:
        with pytest.raises(ValueError, match="transformation") as raised:
            mx.eval(mx.compile(function)(x, indices))
        assert split.is_trace_error(raised.value)
    with pytest.raises(ValueError, match="transformation"):
        mx.eval(mx.grad(lambda a: calls[1](a, indices).sum())(x))
    plain = layer(weight, None)
    mx.eval(mx.compile(lambda a: plain(a, indices, sorted_indices=True))(x))


def test_only_affine_experts_are_taken_from_a_layer() -> None:
    made = SwitchLinear(K, 64, E)
    assert experts.weight_of(made) is made.weight
    packed = experts.weight_of(made.to_quantized(32, 8))
    assert (packed.shape, packed.bits, packed.group_size) == ((E, 64, K), 8, 32)
    with pytest.raises(ValueError, match=r"mode='mxfp4'.*affine"):
        experts.weight_of(made.to_quantized(32, 4, mode="mxfp4"))
