"""Which layers prefill never reads.

MLX-LM evaluates only the caches of a prompt chunk and drops the model's output. So nothing behind the last
cache is ever computed: the last block that owns one (after its keys and values), the blocks behind it where
keys and values are shared, the final norm and the head. A boundary there would force work that stock leaves
undone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

DEAD_BLOCK = "behind the last cache: prefill never reads it"
OUTSIDE = "outside the blocks: prefill may never read it"
HEAD = "a head as wide as the vocabulary"


def dead_layers(model: nn.Module) -> dict[int, str] | None:
    """The modules of `model` that prefill does not read, by `id`, with the reason; None where unknown.

    The blocks are `model.layers` in the order they run, as in every model of MLX-LM, and the number of caches
    is what `make_cache` (or one a block) says. With fewer caches than blocks the exact owner is not known
    from outside, so every block from the last that *could* be the last owner on is exempt: exempting a block
    that is read costs a little speed, the other mistake costs work.
    """
    blocks = _blocks(model)
    caches = _cache_count(model, blocks)
    if blocks is None or caches is None or not 1 <= caches <= len(blocks):
        return None
    owner = _last_owner(blocks, caches)
    inside: set[int] = set()
    dead: dict[int, str] = {}
    for index, block in enumerate(blocks):
        ids = {id(module) for module in walk(block)}
        inside |= ids
        if index >= owner:
            dead |= dict.fromkeys(ids, DEAD_BLOCK)
    outside = (module for module in walk(model) if id(module) not in inside)
    return dead | {id(module): OUTSIDE for module in outside}


def runs_in_mlx_lm(model: nn.Module) -> bool:
    """Whether MLX-LM's generation can drive `model`, so that the rules above hold for it."""
    return hasattr(type(model), "make_cache") or type(model).__module__.startswith("mlx_lm.")


def heads(model: nn.Module) -> dict[int, str]:
    """The linear layers as wide as an embedding is long: for models handed over by hand."""
    vocabularies = {module.weight.shape[0] for module in walk(model) if isinstance(module, nn.Embedding)}
    return {
        id(module): HEAD
        for module in walk(model)
        if not isinstance(module, nn.Embedding)
        and "weight" in module
        and isinstance(module["weight"], mx.array)
        and module["weight"].ndim == 2
        and module["weight"].shape[0] in vocabularies
    }


def walk(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and every module below it, each once."""
    seen: set[int] = set()
    for _, child in module.named_modules():
        if id(child) not in seen:
            seen.add(id(child))
            yield child


def _blocks(model: nn.Module) -> list[nn.Module] | None:
    """The blocks that this process runs; a pipeline leaves None in the places of other ranks' blocks."""
    layers = _attribute(model, "layers")
    if not isinstance(layers, list | tuple):
        return None
    blocks = [layer for layer in layers if layer is not None]
    if not blocks or not all(isinstance(block, nn.Module) for block in blocks):
        return None
    inside = {id(module) for module in walk(model)}
    return blocks if all(id(block) in inside for block in blocks) else None


def _cache_count(model: nn.Module, blocks: list[nn.Module] | None) -> int | None:
    if blocks is None or not hasattr(type(model), "make_cache"):
        return None if blocks is None else len(blocks)
    try:
        return len(model.make_cache())
    except Exception:
        # Somebody else's code, run only to look: a model that cannot make its cache is one we do not know.
        return None


def _last_owner(blocks: list[nn.Module], caches: int) -> int:
    """The index of the first block that could be the last one to fill a cache from its own input."""
    owner = caches - 1
    while owner > 0 and _borrows_keys(blocks[owner]):
        owner -= 1
    return owner


def _borrows_keys(block: nn.Module) -> bool:
    """Whether a block has queries but neither keys nor values: its cache holds an earlier block's."""
    names = {name for module in walk(block) for name in module}
    return "q_proj" in names and not any(name.startswith(("k_", "kv_", "v_")) for name in names)


def _attribute(model: nn.Module, name: str) -> Any:
    try:
        return getattr(model, name, None)
    except Exception:  # a property of a model we do not know
        return None
