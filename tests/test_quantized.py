"""Quantised products against float64 products of the weights they stand for, and against MLX's own layer."""

import itertools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from graphs import evaluated, foreign_stream, lazy, operations, peak
from quantised import error, exact, pack, values

from fusionml import quantized, split
from fusionml.quantized import FORMS, Packed

FLOATS = (mx.float32, mx.float16, mx.bfloat16)
BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
K, N = 128, 24
SHAPES = {1: (K,), 2: (37, K), 3: (2, 19, K), 4: (2, 2, 9, K)}
SPLITS = list(itertools.product(FORMS, split.BOUNDARIES, ("native", "float32")))


def layer(packed: Packed, bias: mx.array | None) -> nn.QuantizedLinear:
    """MLX's own layer with these very arrays."""
    rows, width = packed.shape
    made = nn.QuantizedLinear(width, rows, bias is not None, packed.group_size, packed.bits)
    made.weight, made.scales, made.biases = packed.arrays
    if bias is not None:
        made.bias = bias
    return made


def data(shape: tuple[int, ...], dtype: mx.Dtype, bias: bool) -> tuple[mx.array, mx.array | None]:
    keys = mx.random.split(mx.random.key(7), 2)
    x = mx.random.normal(shape, key=keys[0]).astype(dtype)
    return x, mx.random.normal((N,), key=keys[1]).astype(dtype) if bias else None


def truth(x: mx.array, packed: Packed, bias: mx.array | None) -> np.ndarray:
    product = exact(x) @ values(packed).T
    return product if bias is None else product + exact(bias)


def arms(x: mx.array, packed: Packed, bias: mx.array | None) -> dict[object, mx.array]:
    """Every way to compute the product, by name; only the dense ones for fewer than two rows."""
    found = {("dense", b): quantized.dense(x, packed, bias, b) for b in split.BOUNDARIES}
    rows = x.size // x.shape[-1]
    for m in sorted({1, rows // 3} - {0, rows}) if rows > 1 else ():
        for options in SPLITS:
            found[(m, *options)] = quantized.run_quantized(x, packed, bias, m, *options)
    return found


def assert_as_good_as_stock(x: mx.array, packed: Packed, bias: mx.array | None) -> None:
    plain, reference = layer(packed, bias)(x), truth(x, packed, bias)
    theirs = error(plain, reference)
    for name, out in arms(x, packed, bias).items():
        assert (out.shape, out.dtype) == (plain.shape, plain.dtype), name
        ours = error(out, reference)
        # One rounding of the weight and one of the result cannot be avoided.
        rounding = 0 if plain.dtype == mx.float32 else 2 * mx.finfo(plain.dtype).eps
        assert ours <= max(theirs * 1.01, rounding) + 1e-6, f"{name}: {ours:.2e} against stock's {theirs:.2e}"


@pytest.mark.parametrize("bits", BITS)
def test_the_truth_reads_weights_as_mlx_does(bits: int) -> None:
    packed = pack((3, N, K), bits=bits)
    assert packed.shape == (3, N, K)
    assert np.abs(values(packed) - exact(packed.dense())).max() < 1e-6


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("bits", BITS)
def test_the_product(bits: int, group_size: int, dtype: mx.Dtype) -> None:
    packed = pack((N, K), dtype, bits=bits, group_size=group_size)
    for bias in (False, True):
        x, added = data(SHAPES[2], dtype, bias)
        assert_as_good_as_stock(x, packed, added)


@pytest.mark.parametrize("dimensions", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_shape(dtype: mx.Dtype, dimensions: int) -> None:
    packed = pack((N, K), dtype)
    for bias in (False, True):
        x, added = data(SHAPES[dimensions], dtype, bias)
        assert_as_good_as_stock(x, packed, added)


@pytest.mark.parametrize("types", [*itertools.product(FLOATS, FLOATS, (None, *FLOATS))], ids=str)
def test_mixed_types_promote_as_in_stock(types: tuple[mx.Dtype, mx.Dtype, mx.Dtype | None]) -> None:
    x, bias = data(SHAPES[2], types[0], types[2] is not None)
    assert_as_good_as_stock(x, pack((N, K), types[1]), None if types[2] is None else bias.astype(types[2]))


INPUTS: dict[str, Callable[[], mx.array]] = {
    "transposed": lambda: mx.random.normal((K, 48), key=mx.random.key(1)).T,
    "strided": lambda: mx.random.normal((96, 2 * K), key=mx.random.key(1))[::2, ::2],
    "broadcast": lambda: mx.broadcast_to(mx.random.normal((24, K), key=mx.random.key(1)), (3, 24, K)),
    "two rows": lambda: mx.random.normal((2, K), key=mx.random.key(1)),
    "one row": lambda: mx.random.normal((1, 1, K), key=mx.random.key(1)),
    "no rows": lambda: mx.zeros((2, 0, K)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_unusual_inputs(name: str) -> None:
    assert_as_good_as_stock(INPUTS[name](), pack((N, K)), None)


@pytest.mark.parametrize("block", [1, K, 7 * K, N * K])
def test_weights_of_many_blocks(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    packed = pack((N, K), bits=5)
    monkeypatch.setattr(quantized, "BLOCK", block)
    for boundary in split.BOUNDARIES:
        weight = quantized.dequantised(packed, mx.float32, boundary)
        assert np.abs(exact(weight) - values(packed)).max() < 1e-6
    assert np.abs(exact(quantized.unpacked(packed, mx.float32, wait=False)) - values(packed)).max() < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_the_first_rows_are_the_cpus(form: str) -> None:
    packed, (x, bias) = pack((N, K)), data((320, K), mx.float32, True)
    parts = quantized.dense_parts if form == "dense" else quantized.quantised_parts
    cpu, current = parts(x, packed, bias, 96, "eager", "native")
    reference = truth(x, packed, bias)
    assert error(cpu, reference[:96]) < 1e-6
    assert error(current, reference[96:]) < 1e-6


# The streams: evaluating an operation that is on a stream of a thread that is gone fails, and only then.


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_each_part_is_on_its_own_stream(monkeypatch: pytest.MonkeyPatch, form: str, cpu_dtype: str) -> None:
    packed, (x, bias) = pack((N, K), mx.float16), data((64, K), mx.float16, True)
    parts = quantized.dense_parts if form == "dense" else quantized.quantised_parts
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    cpu, current = parts(x, packed, bias, 32, "eager", cpu_dtype)
    mx.eval(current)
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(cpu)


def test_nothing_of_the_quantised_cpu_part_is_on_the_current_stream() -> None:
    packed, (x, bias) = pack((N, K)), data((64, K), mx.float32, True)
    mx.eval(x, bias)
    with mx.stream(foreign_stream()):
        cpu, current = quantized.quantised_parts(x, packed, bias, 32, "none", "native")
        with pytest.raises(RuntimeError, match="Stream"):
            mx.eval(current)
    # The slice of the rows is the CPU's own as well.
    mx.eval(cpu)


def test_the_weight_is_dequantised_on_the_current_stream() -> None:
    packed, (x, _) = pack((N, K)), data((64, K), mx.float32, False)
    mx.eval(x)
    with mx.stream(foreign_stream()), pytest.raises(RuntimeError, match="Stream"):
        quantized.dense_parts(x, packed, None, 32, "eager", "native")


# The boundary and the memory


@pytest.mark.parametrize(("boundary", "real"), [("eager", True), ("async", True), ("none", False)])
def test_the_boundary(boundary: str, real: bool) -> None:
    for form in FORMS:
        packed, (x, bias) = pack((N, K)), data((64, K), mx.float32, True)
        waiting = Packed(*map(lazy, packed.arrays), packed.group_size, packed.bits)
        inputs = [lazy(x), lazy(bias), *waiting.arrays]
        out = quantized.run_quantized(inputs[0], waiting, inputs[1], 32, form, boundary, "native")
        assert [evaluated(a) for a in inputs] == [real] * 5
        # A lazy result would hold the dense weight.
        assert evaluated(out) == (real and form == "dense")
    x, packed = lazy(data((64, K), mx.float32, False)[0]), pack((N, K))
    assert evaluated(quantized.dense(x, packed, None, boundary)) == real


def test_dequantising_waits_for_nothing_where_nothing_is_a_boundary() -> None:
    out = quantized.run_quantized(mx.zeros((64, K)), pack((N, K)), None, 32, "dense", "none", "native")
    assert operations(out).count("Matmul") == 2


TEMPORARIES = 16 * 2 * quantized.BLOCK
"""Bytes that MLX needs to unpack one block of half-precision weights, at most (6 bits)."""


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [4, 6])
def test_a_dequantised_weight_is_transient(bits: int, dtype: mx.Dtype) -> None:
    shape = (2048, 2048)
    packed = pack(shape, dtype, bits=bits)
    x = mx.random.normal((16, 2048)).astype(dtype)
    mx.eval(x)
    weight = shape[0] * shape[1]
    parts = 8 * 16 * sum(shape)

    def grows(arm: Callable[[], mx.array]) -> int:
        # Two layers that share an input: neither may still hold its weight when the other is dequantised.
        both = peak(lambda: [arm(), arm()])
        return both - parts

    def run(form: str, cpu_dtype: str) -> Callable[[], mx.array]:
        return lambda: quantized.run_quantized(x, packed, None, 8, form, "eager", cpu_dtype)

    native = weight * dtype.size + TEMPORARIES
    wide = 0 if dtype == mx.float32 else 4 * weight
    assert grows(lambda: quantized.dense(x, packed, None, "eager")) <= native
    assert grows(run("dense", "native")) <= native
    assert grows(run("dense", "float32")) <= native + wide
    assert grows(run("quantised", "native")) <= TEMPORARIES
    after = mx.get_active_memory()
    kept = run("dense", "float32")()
    assert mx.get_active_memory() - after <= 2 * kept.nbytes


# What is refused


def test_a_trace_raises_mlxs_own_error_and_leaves_nothing_broken() -> None:
    packed, (x, _) = pack((N, K)), data((48, K), mx.float32, False)

    calls = [lambda a, p: quantized.dense(a, p, None, "eager")]
    calls += [
        lambda a, p, form=form: quantized.run_quantized(a, p, None, 16, form, "eager", "native")
        for form in FORMS
    ]
    for call in calls:

        def of_x(a: mx.array, call: Callable[..., mx.array] = call) -> mx.array:
            return call(a, packed).sum()

        def of_scales(s: mx.array, call: Callable[..., mx.array] = call) -> mx.array:
            return call(x, Packed(packed.weight, s, packed.biases, 64, 4)).sum()

        for function, argument in ((of_x, x), (of_scales, packed.scales)):
            for transform in (mx.compile, mx.grad):
                with pytest.raises(ValueError, match="transformation") as raised:
                    mx.eval(transform(function)(argument))
                assert split.is_trace_error(raised.value)
    plain = layer(packed, None)
    assert mx.array_equal(mx.compile(lambda a: plain(a))(x), plain(x))


def test_only_affine_weights_are_taken_from_a_layer() -> None:
    made = nn.QuantizedLinear(K, N, False, group_size=32, bits=5)
    packed = Packed.of(made)
    assert (packed.group_size, packed.bits, packed.shape) == (32, 5, (N, K))
    assert [a is b for a, b in zip(packed.arrays, (made.weight, made.scales, made.biases), strict=True)]
    other = nn.QuantizedLinear(K, N, False, mode="mxfp4")
    with pytest.raises(ValueError, match=r"mode='mxfp4'.*affine"):
        Packed.of(other)
