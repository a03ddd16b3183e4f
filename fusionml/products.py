"""The mechanism behind one interface: what a layer multiplies in one call, and each way to compute it.

A product is made for one call and kept no longer. There is no policy here: the caller says which arm, which
form and how many rows go to the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn

from . import experts, quantized, sharded, split
from .quantized import Packed

LINEAR, QUANTIZED, EXPERTS = "linear", "quantized", "experts"
"""The kinds of layer that can be split."""
DENSE = quantized.DENSE
"""The form of a split by a dense weight."""
_WAITS: dict[str, dict[str | None, int]] = {
    LINEAR: {DENSE: 1},
    QUANTIZED: {None: 2, DENSE: 2, quantized.QUANTISED: 1},
    EXPERTS: {None: 1, experts.GATHER: 2, experts.EACH: 1, experts.QUANTISED: 1},
}


class Product(Protocol):
    """What one layer computes in one call."""

    @property
    def arrays(self) -> list[mx.array]:
        """What must be real before anything is computed: the input first."""

    @property
    def dtype(self) -> mx.Dtype:
        """The type that the product is computed in; names the site."""

    def stock(self) -> mx.array:
        """The lazy product as MLX's own layer computes it."""

    def exact(self) -> mx.array | None:
        """The product by the same weight in float32, to judge the others by; None where stock is exact."""

    def dense(self, boundary: str) -> mx.array:
        """The product by a dense weight that is made once, on the current stream."""

    def split(self, m: int, form: str, boundary: str, cpu_dtype: str) -> mx.array:
        """The product with the first `m` rows on the CPU."""

    def cpu_part(self, m: int, form: str, cpu_dtype: str) -> mx.array:
        """The CPU's rows of that split alone, to time what the CPU does without a neighbour."""


@dataclass(frozen=True, eq=False)
class LinearProduct:
    """`x [..., K]` times `weight [N, K]` transposed, plus `bias [N]` or None."""

    x: mx.array
    weight: mx.array
    bias: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        return split.given(self.x, self.weight, self.bias)

    @property
    def dtype(self) -> mx.Dtype:
        return mx.result_type(*self.arrays)

    def stock(self) -> mx.array:
        return split.stock_linear(self.x, self.weight, self.bias)

    def dense(self, boundary: str) -> mx.array:
        return self.stock()  # its weight is dense already

    def exact(self) -> None:
        return None

    def split(self, m: int, form: str, boundary: str, cpu_dtype: str) -> mx.array:
        return split.run_linear(self.x, self.weight, self.bias, m, boundary, cpu_dtype)

    def cpu_part(self, m: int, form: str, cpu_dtype: str) -> mx.array:
        flat = self.x.reshape(-1, self.x.shape[-1])
        return split.linear_parts(flat, self.weight, self.bias, m, "eager", cpu_dtype)[0]


@dataclass(frozen=True, eq=False)
class QuantizedProduct:
    """`x [..., K]` times a quantised weight `[N, K]` transposed, plus `bias [N]` or None."""

    x: mx.array
    packed: Packed
    bias: mx.array | None

    @property
    def arrays(self) -> list[mx.array]:
        return [self.x, *self.packed.arrays, *split.given(self.bias)]

    @property
    def dtype(self) -> mx.Dtype:
        return self.packed.product_type(self.x)

    def stock(self) -> mx.array:
        out = self.packed.multiply(self.x)
        return out if self.bias is None else out + self.bias

    def dense(self, boundary: str) -> mx.array:
        return quantized.dense(self.x, self.packed, self.bias, boundary)

    def exact(self) -> mx.array:
        return quantized.dense(self.x.astype(mx.float32), self.packed.astype(mx.float32), self.bias, "eager")

    def split(self, m: int, form: str, boundary: str, cpu_dtype: str) -> mx.array:
        return quantized.run_quantized(self.x, self.packed, self.bias, m, form, boundary, cpu_dtype)

    def cpu_part(self, m: int, form: str, cpu_dtype: str) -> mx.array:
        flat = self.x.reshape(-1, self.x.shape[-1])
        parts = quantized.dense_parts if form == quantized.DENSE else quantized.quantised_parts
        return parts(flat, self.packed, self.bias, m, "eager", cpu_dtype)[0]


@dataclass(frozen=True, eq=False)
class ExpertsProduct:
    """Rows sorted by expert, each times the weight of its expert."""

    call: experts.Call

    @property
    def arrays(self) -> list[mx.array]:
        return self.call.arrays

    @property
    def dtype(self) -> mx.Dtype:
        return self.call.product_type

    def stock(self) -> mx.array:
        return experts.stock(self.call)

    def dense(self, boundary: str) -> mx.array:
        return experts.dense(self.call, boundary)

    def exact(self) -> mx.array | None:
        weight = self.call.weight
        if not isinstance(weight, Packed):
            return None
        wide = self.call._replace(x=self.call.x.astype(mx.float32), weight=weight.astype(mx.float32))
        return experts.dense(wide, "eager")

    def split(self, m: int, form: str, boundary: str, cpu_dtype: str) -> mx.array:
        return experts.run_experts(self.call, m, form, boundary, cpu_dtype)

    def cpu_part(self, m: int, form: str, cpu_dtype: str) -> mx.array:
        return experts.cpu_part(self.call, m, form, cpu_dtype)


def of(kind: str, layer: nn.Module, x: mx.array, indices: mx.array | None) -> Product:
    """The product of a layer of this kind; of a sharded one what its rank computes.

    Args:
        kind: `linear`, `quantized` or `experts`.
        x: its input; indices: the expert of each row, for `experts`.
    """
    bias = sharded.product_bias(layer)
    if kind == QUANTIZED:
        return QuantizedProduct(x, Packed.of(layer), bias)
    if kind == EXPERTS and indices is not None:
        return ExpertsProduct(experts.Call(x, experts.weight_of(layer), bias, indices))
    return LinearProduct(x, layer["weight"], bias)


def forms(kind: str, packed: bool, backend: str) -> tuple[str, ...]:
    """The forms that a split can take, the built-in default first.

    Args:
        packed: whether the weight is quantised.
        backend: `metal`, `cuda` or `cpu`. `each` sends products of both streams off alternately, which can
            deadlock on CUDA.
    """
    if kind == LINEAR:
        return (DENSE,)
    if kind == QUANTIZED:
        return (DENSE, quantized.QUANTISED)
    made = {"cpu": (experts.EACH, experts.GATHER), "metal": (experts.GATHER, experts.EACH)}
    return (*made.get(backend, (experts.GATHER,)), *((experts.QUANTISED,) if packed else ()))


def has_dense(kind: str) -> bool:
    """Whether layers of this kind have a dense arm beside stock: where a dense weight is not stock's own."""
    return None in _WAITS[kind]


def boundaries(kind: str, form: str | None) -> int:
    """Waits of a split in this form, or of the dense arm (None), that stock's lazy graph does without.

    A result by a dense weight that was made for it is made real too, so that the weight is freed. At most:
    a layer of experts that gathers its own dense weights needs one fewer.
    """
    return _WAITS[kind][form]
