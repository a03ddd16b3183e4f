"""Decoder blocks of the paper's models, MLX-LM's own classes with random weights (Section 5.2)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

VOCABULARY = 32
"""Blocks alone are timed: the embedding is as small as it may be."""


@dataclass(frozen=True)
class Geometry:
    """Widths of one model's decoder blocks; `module` is MLX-LM's."""

    name: str
    module: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int

    @property
    def head(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads

    @property
    def weights(self) -> int:
        """Weights of one block's linear layers."""
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        return attention + self.hidden * self.intermediate * (2 if self.module == "gpt2" else 3)

    def scaled(self, scale: int) -> Geometry:
        """Every width divided by `scale`: fewer heads of the same width, at least 128 in all."""
        least = max(1, 128 // self.head)
        heads = max(least, round(self.heads / scale))
        kv = max(least, round(self.kv_heads / scale))
        kv = heads if self.kv_heads == self.heads else next(n for n in range(kv, heads + 1) if heads % n == 0)
        hidden = heads * self.head
        intermediate = max(1, round(self.intermediate / self.hidden * hidden / 64)) * 64
        return Geometry(self.name, self.module, hidden, intermediate, heads, kv)


GEOMETRIES = {
    geometry.name: geometry
    for geometry in (
        Geometry("Llama-3-8B", "llama", 4096, 14336, 32, 8),
        Geometry("GPT-2-XL", "gpt2", 1600, 6400, 25, 25),
        Geometry("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 4),
    )
}


class Stack(nn.Module):
    """Blocks one after the other, causal, without embedding and head: all that they compute is read."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = blocks

    def __call__(self, x: mx.array) -> mx.array:
        """`x` and the result are `[1, rows, hidden]`."""
        for block in self.blocks:
            x = block(x, "causal")
        return x


def stack(geometry: Geometry, blocks: int, dtype: mx.Dtype) -> Stack:
    """`blocks` blocks with random weights of `dtype`, in eval mode."""
    made = Stack(_blocks(model(geometry, blocks, dtype)))
    made.eval()
    return made


def model(geometry: Geometry, blocks: int, dtype: mx.Dtype) -> nn.Module:
    """A model of MLX-LM with so many blocks and a tiny vocabulary, its weights random and evaluated."""
    found = importlib.import_module(f"mlx_lm.models.{geometry.module}")
    arguments = _gpt2(geometry, blocks) if geometry.module == "gpt2" else _llama(geometry, blocks)
    made: nn.Module = found.Model(found.ModelArgs(**arguments))
    key = mx.random.key(20260724)

    def random(path: str, parameter: mx.array) -> mx.array:
        nonlocal key
        if parameter.ndim < 2:
            return (
                mx.ones(parameter.shape, dtype)
                if "norm" in path or "ln_" in path
                else mx.zeros(parameter.shape, dtype)
            )
        key, own = mx.random.split(key)
        return (mx.random.normal(parameter.shape, key=own) * parameter.shape[-1] ** -0.5).astype(dtype)

    _replace(made, random)
    made.eval()
    return made


def _replace(module: nn.Module, make: Callable[[str, mx.array], mx.array]) -> None:
    """Every parameter made anew, one at a time: at no moment are there two of all."""
    from mlx.utils import tree_flatten

    for path, parameter in tree_flatten(module.parameters()):
        new = make(path, parameter)
        mx.eval(new)
        module.load_weights([(path, new)], strict=False)


def _llama(geometry: Geometry, blocks: int) -> dict[str, Any]:
    return {
        "model_type": geometry.module,
        "hidden_size": geometry.hidden,
        "num_hidden_layers": blocks,
        "intermediate_size": geometry.intermediate,
        "num_attention_heads": geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
    }


def _gpt2(geometry: Geometry, blocks: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": geometry.hidden,
        "n_head": geometry.heads,
        "n_layer": blocks,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "vocab_size": VOCABULARY,
    }


def _blocks(made: Any) -> list[nn.Module]:
    return list(made.model.h if hasattr(made.model, "h") else made.model.layers)


def bytes_needed(geometry: Geometry, blocks: int, rows: int, size: int, fused: bool) -> int:
    """Bytes of the blocks, of two more to calibrate with, and of what one of them computes on the way.

    `size` is of one number; without a `fused` attention every score is kept, twice.
    """
    weights = geometry.weights * (blocks + 2)
    on_the_way = rows * (4 * geometry.intermediate + 8 * geometry.hidden)
    scores = 0 if fused else 2 * geometry.heads * rows * rows
    return (weights + on_the_way + scores) * size
