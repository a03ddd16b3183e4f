"""A linear layer whose three products are all split over two units: forward, input and weight gradient.

Mechanism, for the training experiment alone: FusionML itself never splits under a gradient. Each product has
its own boundary. It is `mx.eval`, which a gradient's trace allows (`mx.async_eval`, which it refuses, is how
FusionML notices that it is in one).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from fusionml import split

Product = Callable[[mx.array, mx.array], mx.array]


def split_product(rows: mx.array, weight: mx.array, ratio: float, cpu_dtype: str) -> mx.array:
    """`rows @ weight.T`, the first rows on the CPU stream, behind a boundary.

    Args:
        rows: `[M, K]`.
        weight: `[N, K]`.
        ratio: CPU share of the rows.
        cpu_dtype: `native` or `float32`, of the CPU's part.
    """
    m = split.cpu_rows(len(rows), ratio)
    if m == 0:
        return rows @ weight.T
    head, cpu_weight = rows, weight
    if cpu_dtype == "float32":
        head, cpu_weight = rows[:m].astype(mx.float32), weight.astype(mx.float32)
    mx.eval(rows, weight, head, cpu_weight)
    with mx.stream(split.cpu_stream):
        cpu = (head[:m] @ cpu_weight.T).astype(rows.dtype)
    return split.join(cpu, rows[m:] @ weight.T, (len(rows),), split.needs_settling())


def linear(product: Product) -> Product:
    """`x @ weight.T` as a function of `x [..., K]` and `weight [N, K]`, with `product` in both directions.

    The gradient of x is `dy [M, N] @ weight [N, K]`, that of the weight `dy.T [N, M] @ x [M, K]`: rows of the
    first are tokens, rows of the second are the layer's outputs.
    """

    def plain(x: mx.array, weight: mx.array) -> mx.array:
        return product(x.reshape(-1, x.shape[-1]), weight).reshape(*x.shape[:-1], -1)

    forward: Any = mx.custom_function(plain)

    @forward.vjp
    def backward(
        primals: tuple[mx.array, mx.array], cotangent: mx.array, output: mx.array
    ) -> tuple[mx.array, mx.array]:
        x, weight = primals
        dy = cotangent.reshape(-1, cotangent.shape[-1])
        dx = product(dy, weight.T).reshape(x.shape)
        return dx, product(dy.T, x.reshape(-1, x.shape[-1]).T)

    made: Product = forward
    return made


class SplitTrainingLinear(nn.Linear):
    """`nn.Linear` that trains with all three of its products split; the very same arrays as `layer`'s."""

    def __init__(self, layer: nn.Linear, ratio: float, cpu_dtype: str) -> None:
        nn.Module.__init__(self)
        self.weight = layer.weight
        if "bias" in layer:
            self.bias = layer.bias
        self._product = linear(lambda rows, weight: split_product(rows, weight, ratio, cpu_dtype))

    def __call__(self, x: mx.array) -> mx.array:
        out = self._product(x, self["weight"])
        return out + self["bias"] if "bias" in self else out


def split_training(model: nn.Module, ratio: float, cpu_dtype: str = "auto") -> nn.Module:
    """Replace every plain linear layer of `model` by one that trains split; the model itself is returned."""

    def swap(layer: nn.Module) -> nn.Module:
        if type(layer) is not nn.Linear:
            return layer
        return SplitTrainingLinear(layer, ratio, split.resolve_cpu_dtype(cpu_dtype, layer.weight.dtype))

    model.update_modules(tree_map(swap, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return model
