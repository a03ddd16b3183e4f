"""What a model's layers are given, seen by building the graph of a short prompt, which computes nothing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .known import BLOCKS, SWITCH_LAYERS


def observe(model: nn.Module, layers: Iterable[nn.Module]) -> dict[int, tuple[int, int]]:
    """How many of `layers` get the very input of each, and how many experts its tokens go to; by `id`.

    Empty where the model cannot be called with a prompt alone.
    """
    wanted = {id(layer): layer for layer in layers}
    inputs: dict[int, tuple[mx.array, list[int]]] = {}
    tops: dict[int, int] = {}
    routes: list[int] = []

    def seen(stock: Callable[..., Any], layer: nn.Module, x: mx.array, *rest: Any, **options: Any) -> Any:
        if id(layer) in wanted:
            inputs.setdefault(id(x), (x, []))[1].append(id(layer))
            tops[id(layer)] = routes[-1] if routes else 1
        return stock(layer, x, *rest, **options)

    def routed(stock: Callable[..., Any], block: nn.Module, x: mx.array, indices: mx.array) -> Any:
        routes.append(indices.shape[-1])
        try:
            return stock(block, x, indices)
        finally:
            routes.pop()

    with contextlib.ExitStack() as stack:
        for cls in {type(layer) for layer in wanted.values()}:
            stack.enter_context(_called(cls, seen))
        for cls in _blocks():
            stack.enter_context(_called(cls, routed))
        try:
            model(mx.zeros((1, 2), mx.int32))
        except Exception:
            return {}
    sharing = {layer: len(sharers) for _, sharers in inputs.values() for layer in sharers}
    return {layer: (sharers, tops[layer]) for layer, sharers in sharing.items()}


def _blocks() -> list[type]:
    """MLX-LM's blocks that route rows to layers of experts; none while it is not imported."""
    layers = sys.modules.get(SWITCH_LAYERS)
    return [getattr(layers, name) for name in BLOCKS if hasattr(layers, name)]


@contextlib.contextmanager
def _called(cls: type, instead: Callable[..., Any]) -> Iterator[None]:
    """Calls of `cls` go through `instead`, which is given the original first."""
    stock = cls.__call__

    def __call__(self: Any, *args: Any, **options: Any) -> Any:
        return instead(stock, self, *args, **options)

    own = "__call__" in vars(cls)
    cls.__call__ = __call__  # type: ignore[method-assign]
    try:
        yield
    finally:
        if own:
            cls.__call__ = stock  # type: ignore[method-assign]
        else:
            del cls.__call__
