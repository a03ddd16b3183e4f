"""`GatedBlock`: the paper's controller of a whole decoder block (Sections 4 and 5.5)."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map

from . import pressure, split
from .gate import Gate
from .layers import SplitLinear

SPLIT, COMPILED, EAGER = "split", "compiled", "eager"


def split_twin(block: nn.Module, ratio: float | None = None) -> nn.Module:
    """A copy of `block` with the very same arrays whose linear layers are `SplitLinear`."""
    twin = copy.deepcopy(block)
    twin.update(block.parameters())

    def swap(layer: Any) -> Any:
        plain = isinstance(layer, nn.Linear) and type(layer).__call__ is nn.Linear.__call__
        return SplitLinear.from_linear(layer, ratio=ratio) if plain else layer

    twin.update_modules(tree_map(swap, twin.leaf_modules(), is_leaf=nn.Module.is_module))
    return twin


class _Hidden:
    """Holds what must not become part of a module's parameters, pickles and files."""

    def __init__(self, arms: dict[str, Callable[..., mx.array]], gate: Gate) -> None:
        self.arms, self.gate = arms, gate
        self.ran: set[str] = set()
        self.lock = threading.Lock()


class GatedBlock(nn.Module):
    """A decoder block that runs the fastest of three modes: `split`, `compiled` (`mx.compile`) and `eager`.

    `eager` is the block as it is, the baseline; `compiled` has been seen to lose against it at long inputs.
    A call with few rows, or inside a graph transformation, is the block itself.

    Args:
        block: any module called with arrays `[..., rows, width]` first; its weights are shared, not copied.
        policy: of the gate: `auto`, `periodic` (the paper's), `lock` or `off`.
        ratio: CPU share of the split arm's linear layers; None is the machine's built-in default.
        min_rows: calls with fewer rows are the block itself.

    Raises:
        ValueError: a policy, or a ratio, outside what is allowed.
    """

    def __init__(
        self, block: nn.Module, *, policy: str = "auto", ratio: float | None = None, min_rows: int = 256
    ) -> None:
        super().__init__()
        self.block = block
        self._min_rows = min_rows
        arms = {
            SPLIT: split_twin(block, ratio),
            COMPILED: mx.compile(block.__call__, inputs=block.state),
            EAGER: block,
        }
        self._hidden = _Hidden(arms, Gate(arms, policy=policy, baseline=EAGER))

    @property
    def gate(self) -> Gate:
        """The gate: its `state()` says which arm runs, since when and why."""
        return self._hidden.gate

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> mx.array:
        rows = x.size // x.shape[-1] if x.ndim > 1 and x.size else 0
        if rows < self._min_rows:
            return self.block(x, *args, **options)
        arms, gate = self._hidden.arms, self._hidden.gate
        now = pressure.read()
        with self._hidden.lock:
            decision = gate.choose(pressure.fits(now, self._working_set(x)), now.short)
        if not decision.timed:
            return arms[decision.arm](x, *args, **options)
        if not split.try_boundary([x, *_arrays(self.block)], "eager"):
            return self.block(x, *args, **options)
        start = time.perf_counter()
        out = arms[decision.arm](x, *args, **options)
        mx.eval(out)
        seconds = time.perf_counter() - start
        with self._hidden.lock:
            # The first run of an arm compiles, or touches its weights.
            clean = decision.arm in self._hidden.ran
            self._hidden.ran.add(decision.arm)
            gate.record(decision.arm, seconds, rows, clean, None if clean else "first run")
        return out

    def _working_set(self, x: mx.array) -> int:
        """Bytes that the three modes may take together: the intermediate results of each, at most."""
        widths = sum(array.shape[0] for array in _arrays(self.block) if array.ndim == 2)
        rows = x.size // x.shape[-1]
        return 3 * rows * widths * x.dtype.size


def _arrays(block: nn.Module) -> list[mx.array]:
    return [array for _, array in tree_flatten(block.parameters())]
