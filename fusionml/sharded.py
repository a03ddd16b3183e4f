"""The mechanism for layers sharded over ranks: which part of them is a product, and what follows it.

A rank's layer is a product of its own shard and, in one of the two kinds, a collective:

- `AllToShardedLinear` and its quantised twin hold rows of the weight. The product with the layer's own bias
  is the result; nothing is communicated but gradients, by `sum_gradients`, which leaves the input as it is.
- `ShardedToAllLinear` and its quantised twin hold columns. The product has no bias; `all_sum` adds the ranks'
  products up, and the bias is added once, after it.

So a rank computes its product in any way it likes (`split.run_linear`, `quantized.run_quantized` or stock's
own, with `product_bias` for the bias) and hands it to `finish`, which calls the collective as the layer
itself does: on the current stream, of the layer's group, in the product's type. None of it is ever on
`split.cpu_stream`. The ranks must call the same collectives in the same order, so what is timed on a rank is
the product alone: a time with a collective in it is mostly another rank's.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed

TO_ALL = (distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear)
LAYERS = (distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear, *TO_ALL)
"""The layers that this module knows to take apart; a subclass may do arithmetic of its own."""


def product_bias(layer: nn.Module) -> mx.array | None:
    """The bias `[N]` of the local product of a sharded layer; None where it has none or it comes later."""
    return None if isinstance(layer, TO_ALL) else layer.get("bias")


def finish(layer: nn.Module, product: mx.array) -> mx.array:
    """The layer's result from this rank's local product `[..., N]`; lazy, and of the same shape.

    Every rank must come here, whatever it computed its product with.
    """
    if not isinstance(layer, TO_ALL):
        return product
    out = mx.distributed.all_sum(product, group=layer.group)
    return out + layer["bias"] if "bias" in layer else out
