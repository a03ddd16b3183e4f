"""The mechanism for layers of experts, on MLX-LM's sorted prefill path.

Rows arrive sorted by expert, so the head rows are whole experts and the first part of one. The CPU runs one
dense product an expert over its rows: gathering a weight for every row is slow there, and MLX does it in
float32 only. The current stream either gathers, as stock does, or runs one product an expert too. There is
no policy here: the caller says which form and how many rows go to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import split
from .quantized import Packed, dequantised, unpacked

GATHER, EACH, QUANTISED = "gather", "each", "quantised"
FORMS = (GATHER, EACH, QUANTISED)
"""How the parts are computed:

- `gather`: the current stream gathers as stock does, and dequantises or widens experts for the CPU, which
  runs one dense product an expert.
- `each`: both streams run one dense product an expert, and dequantise or widen their own.
- `quantised`, for quantised experts only: the current stream gathers as stock does, and the CPU runs one
  `quantized_matmul` an expert, dequantising nothing.
"""

Weight = mx.array | Packed
"""Of all experts: dense `[E, N, K]`, or quantised."""


class Call(NamedTuple):
    """What one sorted call multiplies.

    Attributes:
        x: `[rows, 1, K]`, sorted by expert.
        weight: `[E, N, K]`, dense or quantised.
        bias: `[E, N]` or None.
        indices: `[rows]`, the expert of each row.
    """

    x: mx.array
    weight: Weight
    bias: mx.array | None
    indices: mx.array

    @property
    def arrays(self) -> list[mx.array]:
        """What must be real before anything is computed: the input first."""
        weights = self.weight.arrays if isinstance(self.weight, Packed) else [self.weight]
        return [self.x, *weights, *split.given(self.bias), self.indices]

    @property
    def product_type(self) -> mx.Dtype:
        """What stock computes the product in, before any bias."""
        if isinstance(self.weight, Packed):
            return self.weight.product_type(self.x)
        return mx.result_type(self.x, self.weight)

    @property
    def result_type(self) -> mx.Dtype:
        """The dtype that stock gives."""
        dtype = self.product_type
        return dtype if self.bias is None else mx.result_type(mx.zeros((), dtype), self.bias)

    def cpu_type(self, cpu_dtype: str) -> mx.Dtype:
        """What `native` or `float32` comes to."""
        return mx.float32 if cpu_dtype == "float32" else self.product_type


class Run(NamedTuple):
    """Rows `[start, stop)`, all of one expert."""

    expert: int
    start: int
    stop: int


def weight_of(layer: nn.Module) -> Weight:
    """The weight of a `SwitchLinear` or `QuantizedSwitchLinear`; ValueError for a mode other than affine."""
    return Packed.of(layer) if "scales" in layer else layer["weight"]


def is_sorted_call(x: mx.array, indices: mx.array) -> bool:
    """Whether shapes are those of the sorted path: `x` `[rows, 1, K]`, one index a row."""
    return x.ndim == 3 and x.shape[1] == 1 and indices.ndim == 1 and indices.shape[0] == x.shape[0]


def expert_runs(indices: np.ndarray) -> list[Run]:
    """The runs of equal experts in `indices` `[rows]`, in order: one an expert where they are sorted."""
    if not len(indices):
        return []
    edges = [0, *(np.flatnonzero(np.diff(indices)) + 1).tolist(), len(indices)]
    return [Run(int(indices[a]), a, b) for a, b in pairwise(edges)]


def cut(runs: Sequence[Run], m: int) -> tuple[list[Run], list[Run]]:
    """The runs before and from row `m` on; one that holds it is cut in two."""
    head = [Run(e, a, min(b, m)) for e, a, b in runs if a < m]
    rest = [Run(e, max(a, m), b) for e, a, b in runs if b > m]
    return head, rest


def real_runs(call: Call, boundary: str) -> list[Run]:
    """Make the call's arrays real and read where each expert begins.

    The indices are evaluated whatever `boundary` is: without them nobody knows whose rows are whose.

    Raises:
        ValueError: under a trace.
    """
    split.materialise(call.arrays, boundary)
    return expert_runs(np.array(call.indices))


def dense(call: Call, boundary: str) -> mx.array:
    """One dense product an expert, all on the current stream; quantised experts one after the other.

    Args:
        call: the layer's.
        boundary: see `split.materialise`; the indices are evaluated in any case.

    Returns:
        `[rows, 1, N]`, of the dtype that stock gives.

    Raises:
        ValueError: under a trace.
    """
    runs = real_runs(call, boundary)
    dtype = call.product_type
    products = _each(call, call.weight, runs, dtype)
    if boundary != "none" and _transient(call.weight, dtype):
        _dispatch(products, [])
    return mx.concatenate(products, axis=0)[:, None] if products else stock(call)


def run_experts(call: Call, m: int, form: str, boundary: str, cpu_dtype: str) -> mx.array:
    """A layer of experts with the first `m` rows on the CPU (unchecked).

    Args:
        call: the layer's; for the CPU no expert is dequantised that it has no row of.
        m: rows of the CPU part, `0 < m < rows`.
        form: `gather`, `each` or `quantised`, see `FORMS`.
        boundary: see `split.materialise`; the indices are evaluated in any case.
        cpu_dtype: `native` or `float32`, of the CPU part.

    Returns:
        `[rows, 1, N]`, of the dtype that stock gives. Lazy where no weight is transient and with `quantised`.
        Else `gather` makes it real at the boundary, one wait more, and with `each` the products are
        dispatched, so that few weights are alive: on a CPU those that MLX makes some 100 operations ahead,
        temporaries included.

    Raises:
        ValueError: under a trace.
    """
    cpu, current = expert_parts(call, m, form, boundary, cpu_dtype)
    out = split.join(cpu, current, call.x.shape[:-1], split.needs_settling())
    if form == GATHER and _transient(call.weight, call.cpu_type(cpu_dtype)):
        # A lazy result holds on to the CPU's dense experts, and layers that share an input would add up.
        del cpu, current
        split.materialise([out], boundary)
    return out


def expert_parts(call: Call, m: int, form: str, boundary: str, cpu_dtype: str) -> tuple[mx.array, mx.array]:
    """The two parts `(cpu, current)`, `[m, N]` and `[rows - m, N]`, of `run_experts`."""
    head, rest = cut(real_runs(call, boundary), m)
    dtype, cpu_type = call.product_type, call.cpu_type(cpu_dtype)
    cpu = _cpu_products(call, head, form, boundary, cpu_type)
    if form != EACH:
        others = call._replace(x=call.x[m:], indices=call.indices[m:])
        current = stock(others).reshape(-1, call.weight.shape[-2])
    else:
        products = _each(call, call.weight, rest, dtype)
        if boundary != "none" and _transient(call.weight, dtype, cpu_type):
            _dispatch(cpu, products)
        current = mx.concatenate(products, axis=0)
    return _joined(cpu, call.result_type), current


def cpu_part(call: Call, m: int, form: str, cpu_dtype: str) -> mx.array:
    """The first part of `expert_parts` alone, behind an eager boundary: nothing of the rest is sent off."""
    head, _ = cut(real_runs(call, "eager"), m)
    cpu_type = call.cpu_type(cpu_dtype)
    cpu = _cpu_products(call, head, form, "eager", cpu_type)
    if form == EACH and _transient(call.weight, cpu_type):
        _dispatch(cpu, [])
    return _joined(cpu, call.result_type)


def _cpu_products(
    call: Call, head: list[Run], form: str, boundary: str, cpu_type: mx.Dtype
) -> list[mx.array]:
    """The lazy product of each of the CPU's runs, on its stream."""
    weight = _made_here(call.weight, head, cpu_type, boundary) if form == GATHER else call.weight
    with mx.stream(split.cpu_stream):
        return _each(call, weight, head, cpu_type, packed=form == QUANTISED)


def _joined(cpu: list[mx.array], dtype: mx.Dtype) -> mx.array:
    """The CPU's products as one part."""
    with mx.stream(split.cpu_stream):
        return mx.concatenate(cpu, axis=0).astype(dtype)


def _made_here(
    weight: Weight, runs: list[Run], dtype: mx.Dtype, boundary: str
) -> Weight | dict[int, mx.array]:
    """What the CPU multiplies by, of the runs' experts only: transient weights by the current stream."""
    if not _transient(weight, dtype):
        return weight
    made = {run.expert: _matrix(weight, run.expert, dtype, boundary) for run in runs}
    split.materialise(list(made.values()), boundary)
    return made


def _each(
    call: Call,
    weight: Weight | dict[int, mx.array],
    runs: list[Run],
    dtype: mx.Dtype,
    *,
    packed: bool = False,
) -> list[mx.array]:
    """The lazy product `[rows, N]` of each run, in `dtype` or the bias's wider one, on the current stream.

    `weight` is the call's, or what was made of it; `packed` multiplies by the quantised one as it is.
    """
    flat = call.x.reshape(-1, call.x.shape[-1])
    products = []
    for expert, start, stop in runs:
        rows = flat[start:stop].astype(dtype)
        if packed and isinstance(weight, Packed):
            out = weight[expert].astype(dtype).multiply(rows)
        else:
            out = rows @ _matrix(weight, expert, dtype, "none").T
        products.append(out if call.bias is None else out + call.bias[expert])
    return products


def _dispatch(first: list[mx.array], second: list[mx.array]) -> None:
    """Send the products of both streams off side by side.

    In one evaluation MLX would make all transient weights before it multiplies by the first.
    """
    for pair in zip_longest(first, second):
        mx.async_eval(*[product for product in pair if product is not None])


def stock(call: Call) -> mx.array:
    """What MLX-LM's own layers compute for a sorted call: lazy `[rows, 1, N]`."""
    x, weight, bias, indices = call
    if isinstance(weight, Packed):
        out = mx.gather_qmm(
            x,
            weight.weight,
            weight.scales,
            weight.biases,
            rhs_indices=indices,
            transpose=True,
            group_size=weight.group_size,
            bits=weight.bits,
            sorted_indices=True,
        )
    else:
        out = mx.gather_mm(x, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=True)
    return out if bias is None else out + mx.expand_dims(bias[indices], -2)


def _transient(weight: Weight, *dtypes: mx.Dtype) -> bool:
    """Whether multiplying in one of `dtypes` takes a copy of the weight."""
    return isinstance(weight, Packed) or any(dtype != weight.dtype for dtype in dtypes)


def _matrix(weight: Weight | dict[int, mx.array], expert: int, dtype: mx.Dtype, boundary: str) -> mx.array:
    """One expert's weight `[N, K]` in `dtype`, on the current stream; real where there is a boundary."""
    if isinstance(weight, dict):
        return weight[expert]
    if not isinstance(weight, Packed):
        return weight[expert].astype(dtype)
    one = weight[expert]
    return unpacked(one, dtype, wait=False) if boundary == "none" else dequantised(one, dtype, boundary)
