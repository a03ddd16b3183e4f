"""Quantised weights for tests, and float64 products of what they stand for."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from fusionml.quantized import Packed


def exact(array: mx.array) -> np.ndarray:
    """The values of `array` in float64."""
    return np.array(array.astype(mx.float32)).astype(np.float64)


def pack(
    shape: tuple[int, ...],
    dtype: mx.Dtype = mx.float32,
    *,
    bits: int = 4,
    group_size: int = 64,
    seed: int = 0,
) -> Packed:
    """Random weights `[..., N, K]` of the size of a layer's own, quantised, with scales of `dtype`."""
    weight = mx.random.normal(shape, key=mx.random.key(11)) * shape[-1] ** -0.5
    arrays = mx.quantize(weight.astype(dtype), group_size, bits)
    mx.eval(*arrays)
    return Packed(*arrays, group_size, bits)


def values(packed: Packed) -> np.ndarray:
    """What a quantised weight stands for, in float64, read bit by bit without MLX."""
    words = np.array(packed.weight)
    places = np.arange(32, dtype=np.uint32)
    stream = ((words[..., None] >> places) & 1).reshape(*words.shape[:-1], -1, packed.bits)
    codes = (stream * (1 << np.arange(packed.bits))).sum(-1).astype(np.float64)
    groups = codes.reshape(*codes.shape[:-1], -1, packed.group_size)
    scaled = groups * exact(packed.scales)[..., None] + exact(packed.biases)[..., None]
    return scaled.reshape(codes.shape)


def error(out: mx.array, reference: np.ndarray) -> float:
    """Largest difference relative to the largest true value."""
    if not reference.size:
        return 0.0
    return float(np.abs(exact(out) - reference).max() / np.abs(reference).max())
