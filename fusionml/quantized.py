"""The mechanism for affine-quantised weights: dequantise once and multiply, or multiply as they are.

A weight that was dequantised is transient. Where the current stream is a CPU, MLX unpacks through
temporaries of up to 13 times the dense weight, so it is done there in blocks of rows, each evaluated before
the next; on a GPU it is one kernel. Because a lazy result would keep the dense weight alive, and several
layers that share an input would each keep theirs, results of a dequantised weight are made real as well, by
the same boundary. There is no policy here: the caller says which form and how many rows go to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from . import split

DENSE, QUANTISED = "dense", "quantised"
FORMS = (DENSE, QUANTISED)
"""What the parts of a split multiply by: the weight dequantised once, or the weight as it is."""
BLOCK = 2**17
"""Entries that are dequantised at once where the current stream is a CPU: its temporaries fit its caches."""


@dataclass(frozen=True, eq=False)
class Packed:
    """An affine-quantised weight `[..., N, K]` as MLX keeps it.

    Attributes:
        weight: uint32 `[..., N, K * bits / 32]`.
        scales: `[..., N, K / group_size]`, float; biases: of the same shape.
        group_size, bits: as in `mx.quantize`.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array
    group_size: int
    bits: int

    @classmethod
    def of(cls, layer: nn.Module) -> Packed:
        """The weight of a quantised layer; ValueError for a mode other than affine."""
        mode = getattr(layer, "mode", "affine")
        if mode != "affine":
            raise ValueError(f"mode={mode!r} of {type(layer).__name__} is not split; only 'affine' is")
        return cls(layer["weight"], layer["scales"], layer["biases"], layer.group_size, layer.bits)

    def __getitem__(self, index: int | slice) -> Packed:
        """The same rows, or the same expert, of all three arrays."""
        weight, scales, biases = (array[index] for array in self.arrays)
        return Packed(weight, scales, biases, self.group_size, self.bits)

    @property
    def arrays(self) -> list[mx.array]:
        """What must be real before anything is computed from it."""
        return [self.weight, self.scales, self.biases]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the dense weight: `[..., N, K]`."""
        return (*self.weight.shape[:-1], self.scales.shape[-1] * self.group_size)

    def product_type(self, x: mx.array) -> mx.Dtype:
        """What MLX computes `x` times this weight in, before any bias of the layer."""
        return mx.result_type(x, self.scales, self.biases)

    def astype(self, dtype: mx.Dtype) -> Packed:
        """The same with scales and biases of another type: what it is dequantised to."""
        scales, biases = self.scales.astype(dtype), self.biases.astype(dtype)
        return Packed(self.weight, scales, biases, self.group_size, self.bits)

    def dense(self) -> mx.array:
        """The lazy weight `[..., N, K]`, of the scales' type, by one operation of MLX's."""
        return mx.dequantize(self.weight, self.scales, self.biases, self.group_size, self.bits)

    def multiply(self, x: mx.array) -> mx.array:
        """The lazy `x [..., K]` times the transposed weight `[N, K]`, as MLX's own layers compute it."""
        return mx.quantized_matmul(x, self.weight, self.scales, self.biases, True, self.group_size, self.bits)


def unpacked(packed: Packed, dtype: mx.Dtype, *, wait: bool) -> mx.array:
    """The weight `[N, K]` in `dtype`, on the current stream.

    On a CPU block by block: each evaluated before the next where `wait`, else in one lazy chain, which MLX
    runs some 100 operations ahead of itself.
    """
    if mx.default_device() == mx.gpu:
        return packed.astype(dtype).dense()
    rows, width = packed.shape
    step = max(1, BLOCK // max(1, width))
    if step >= rows and not wait:
        return packed.astype(dtype).dense()
    weight = mx.zeros((rows, width), dtype)
    for start in range(0, rows, step):
        block = slice(start, start + step)
        weight[block] = packed[block].astype(dtype).dense()
        if wait:
            mx.eval(weight)
    return weight


def dequantised(packed: Packed, dtype: mx.Dtype, boundary: str) -> mx.array:
    """The weight `[N, K]` in `dtype`, on the current stream.

    Lazy on a GPU and where `boundary` is `none`; real on a CPU, where a lazy one would take many times its
    own memory. Under a trace it may be computed in vain: whoever makes the product real finds the trace.
    """
    if boundary == "none" or mx.default_device() == mx.gpu:
        return packed.astype(dtype).dense()
    return unpacked(packed, dtype, wait=True)


def dense(x: mx.array, packed: Packed, bias: mx.array | None, boundary: str) -> mx.array:
    """`x` times the weight dequantised once, plus bias, all on the current stream.

    Args:
        x: input `[..., K]`.
        packed: weight `[N, K]`; bias: `[N]` or None.
        boundary: see `split.materialise`; it makes the result real too, so that the dense weight is freed.

    Returns:
        `[..., N]`, of the shape and dtype that `nn.QuantizedLinear` gives.

    Raises:
        ValueError: under a trace, where there is a boundary.
    """
    dtype = packed.product_type(x)
    weight = dequantised(packed, dtype, boundary)
    out = x.astype(dtype) @ weight.T
    out = out if bias is None else out + bias
    # A lazy result holds on to the dense weight.
    split.materialise([out], boundary)
    return out


def dense_parts(
    flat: mx.array, packed: Packed, bias: mx.array | None, m: int, boundary: str, cpu_dtype: str
) -> tuple[mx.array, mx.array]:
    """The two lazy parts of a row split by the weight that is dequantised once, on the current stream.

    Arguments as for `split.linear_parts`, with `packed` `[N, K]` for the weight. The parts hold the dense
    weight, and its float32 copy where `cpu_dtype` is `float32`.
    """
    dtype = packed.product_type(flat)
    weight = dequantised(packed, dtype, boundary)
    return split.linear_parts(flat.astype(dtype), weight, bias, m, boundary, cpu_dtype)


def quantised_parts(
    flat: mx.array, packed: Packed, bias: mx.array | None, m: int, boundary: str, cpu_dtype: str
) -> tuple[mx.array, mx.array]:
    """The two lazy parts of a row split by the weight as it is, `quantized_matmul` on both streams.

    Arguments as for `dense_parts`. With `cpu_dtype` `float32` the CPU's rows, the scales and the biases are
    cast on the current stream before the boundary; the weight itself is never copied.
    """
    added = split.given(bias)
    dtype = mx.result_type(flat, packed.scales, packed.biases, *added)
    head, cpu_packed, cpu_bias = flat, packed, bias
    if cpu_dtype == "float32":
        head, cpu_packed = flat[:m].astype(mx.float32), packed.astype(mx.float32)
        cpu_bias = None if bias is None else bias.astype(mx.float32)
    copies = split.given(cpu_bias)
    split.materialise([flat, head, *packed.arrays, *cpu_packed.arrays, *added, *copies], boundary)
    with mx.stream(split.cpu_stream):
        cpu = cpu_packed.multiply(head[:m])
        cpu = (cpu if cpu_bias is None else cpu + cpu_bias).astype(dtype)
    current = packed.multiply(flat[m:])
    return cpu, current if bias is None else current + bias


def run_quantized(
    x: mx.array,
    packed: Packed,
    bias: mx.array | None,
    m: int,
    form: str,
    boundary: str,
    cpu_dtype: str,
) -> mx.array:
    """`x` times a quantised weight, plus bias, with the first `m` rows on the CPU (unchecked).

    Args:
        x: input `[..., K]` of more than `m` rows.
        packed: weight `[N, K]`; bias: `[N]` or None.
        m: rows of the CPU part, `0 < m < rows`.
        form: `dense` or `quantised`, what both parts multiply by.
        boundary: see `split.materialise`. With `dense` it makes the result real as well: one wait more.
        cpu_dtype: `native` or `float32`, of the CPU part.

    Returns:
        `[..., N]`, of the shape and dtype that `nn.QuantizedLinear` gives; lazy with `quantised`.

    Raises:
        ValueError: under a trace, where there is a boundary.
    """
    flat = x.reshape(-1, x.shape[-1])
    parts = dense_parts if form == DENSE else quantised_parts
    cpu, current = parts(flat, packed, bias, m, boundary, cpu_dtype)
    out = split.join(cpu, current, x.shape[:-1], split.needs_settling())
    if form == DENSE:
        # A lazy result holds on to the dense weight, and layers that share an input would add up.
        del cpu, current
        split.materialise([out], boundary)
    return out
