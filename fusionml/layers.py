"""`SplitLinear`: the explicit layer, for people who build models themselves."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from . import machine, split
from .plans import Pair, without_table
from .settings import check_ratio


class SplitLinear(nn.Linear):
    """`nn.Linear` that computes its first rows on the CPU and the rest on the current stream (Section 3).

    Same parameters and state keys as `nn.Linear`, so weights, LoRA and quantisation work as they do there.
    Inside a graph transformation (training, `mx.compile`) and for a single row it is the plain layer.

    Args:
        input_dims: K, the input's last dimension.
        output_dims: N, the output's.
        bias: whether there is a bias `[N]`.
        ratio: CPU share of the rows, 0 to 0.5 (0.9 between two CPU streams); None is the built-in default of
            the machine.

    Raises:
        ValueError: a ratio outside the range.
    """

    def __init__(
        self, input_dims: int, output_dims: int, bias: bool = True, *, ratio: float | None = None
    ) -> None:
        super().__init__(input_dims, output_dims, bias)
        self._ratio = None if ratio is None else check_ratio(ratio, split.max_ratio())

    @classmethod
    def from_linear(cls, layer: nn.Linear, *, ratio: float | None = None) -> SplitLinear:
        """The same layer, with the very same arrays, frozen and in training where `layer` is."""
        outputs, inputs = layer.weight.shape
        made = cls(inputs, outputs, "bias" in layer, ratio=ratio)
        made.weight = layer.weight
        if "bias" in layer:
            made.bias = layer.bias
        trainable = layer.trainable_parameters()
        made.freeze(recurse=False, keys=[name for name in layer.parameters() if name not in trainable])
        made.train(layer.training)
        return made

    def __call__(self, x: mx.array) -> mx.array:
        weight, bias = self["weight"], self.get("bias")
        arrays = split.given(x, weight, bias)
        cpu_dtype = split.resolve_cpu_dtype("auto", mx.result_type(*arrays))
        m = self._cpu_rows(x, cpu_dtype)
        if m == 0 or not split.try_boundary(arrays, "eager"):
            return super().__call__(x)
        return split.run_linear(x, weight, bias, m, "eager", cpu_dtype)

    def _cpu_rows(self, x: mx.array, cpu_dtype: str) -> int:
        if x.ndim < 2 or x.shape[-2] < 2 or not x.size:
            return 0
        ratio = self._ratio
        if ratio is None:
            pair = Pair(machine.backend(), machine.cores())
            ratio = without_table(pair, cpu_dtype=cpu_dtype).ratio
        return split.cpu_rows(x.size // x.shape[-1], ratio)
