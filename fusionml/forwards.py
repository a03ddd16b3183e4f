"""Integration: what replaces MLX's and MLX-LM's functions while patched.

Nothing here does arithmetic or decides anything: a call is either handed to the original function or, when
every condition holds, to `split`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from . import split
from .known import Layer
from .plans import SPLIT, STOCK

if TYPE_CHECKING:
    from .session import Session

FAILED = "a split that failed"

Forward = Callable[[nn.Module, mx.array], mx.array]


def replace_linear(session: Session, stock: Forward) -> Forward:
    """`Linear.__call__` with one cheap test in front: a call too small to split is stock at once."""

    @functools.wraps(stock)
    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        try:
            small = x.size < session.smallest
        except (AttributeError, TypeError):  # not an array: stock's own error, or its own success
            small = True
        if small:
            return stock(self, x)
        return call_linear(session, stock, self, x)

    return __call__


def call_linear(session: Session, stock: Forward, layer: nn.Module, x: mx.array) -> mx.array:
    """A call that may be prefill: split it if everything allows it, else the original."""
    if x.ndim < 2 or x.shape[-2] < 2 or x.size < session.settings.min_rows * x.shape[-1]:
        return stock(layer, x)
    decision = decide(session, layer, x)
    reason, rows = decision.reason, x.size // x.shape[-1]
    if reason is None:
        out, reason = try_split(session, x, layer["weight"], layer.get("bias"), decision)
        if out is not None:
            session.count(SPLIT, decision.known, rows)
            return out
    session.count(STOCK, decision.known, rows, reason)
    return stock(layer, x)


class Decision(NamedTuple):
    """How to compute one call: `m` CPU rows in `cpu_dtype`, or stock for a reason."""

    known: Layer
    reason: str | None
    m: int = 0
    cpu_dtype: str = "native"


def decide(session: Session, layer: nn.Module, x: mx.array) -> Decision:
    """What to do with a large call; whatever fails while we find out makes it stock."""
    known = None
    try:
        known = session.known.find(layer)
        reason = refusal(session, known, layer, x)
        return plan_split(session, known, layer, x) if reason is None else Decision(known, reason)
    except Exception as error:
        return Decision(known or Layer(weakref.ref(layer)), failed(session, error))


def plan_split(session: Session, known: Layer, layer: nn.Module, x: mx.array) -> Decision:
    """Ask the plan of the call's site for the CPU rows."""
    bias = layer.get("bias")
    rows = x.size // x.shape[-1]
    dtype = mx.result_type(x, layer["weight"], *([] if bias is None else [bias]))
    plan = session.plan(known, dtype, rows)
    m = split.cpu_rows(rows, plan.ratio)
    return Decision(known, plan.why if m == 0 else None, m, plan.cpu_dtype)


def failed(session: Session, error: Exception) -> str:
    """Say once that something of ours failed; the reason to count."""
    session.report_once(f"a split failed, stock instead: {error!r}")
    return FAILED


def refusal(session: Session, known: Layer, layer: nn.Module, x: mx.array) -> str | None:
    """Why this call of this layer must be stock whatever a plan says; None where it need not."""
    if known.reason is not None:
        return known.reason
    if layer.training:
        return "in training"
    if x.shape[-1] != known.inputs or x.dtype not in split.FLOAT_TYPES:
        return f"input {x.shape} of type {x.dtype}"
    if not session.budget.admit():
        return f"more than {split.MAX_THREADS} threads"
    return None


def try_split(
    session: Session, x: mx.array, weight: mx.array, bias: mx.array | None, decision: Decision
) -> tuple[mx.array | None, str | None]:
    """The split product, or None and the reason."""
    boundary = session.settings.boundary
    # The weight and the bias too: under compile or vmap the input may be concrete and they traced.
    if not split.try_boundary([x, weight, *([] if bias is None else [bias])], boundary):
        return None, "under a trace"
    try:
        return split.run_linear(x, weight, bias, decision.m, boundary, decision.cpu_dtype), None
    except Exception as error:
        return None, failed(session, error)


def replace_load_model(session: Session, stock: Callable[..., Any]) -> Callable[..., Any]:
    """`mlx_lm.utils.load_model` that makes the loaded model known."""

    @functools.wraps(stock)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        if isinstance(result, tuple) and result and isinstance(result[0], nn.Module):
            session.known.add(result[0], from_loader=True)
        return result

    return load_model


def replace_set_wired_limit(session: Session, stock: Callable[..., int]) -> Callable[..., int]:
    """`mx.set_wired_limit` that first waits for our CPU stream.

    MLX-LM resets the limit when a generation ends, also by an exception, and waits for its own streams only;
    changing it under running work has ended in kernel panics.
    """

    @functools.wraps(stock)
    def set_wired_limit(limit: int) -> int:
        if session.budget.admitted_here():
            split.drain()
        return stock(limit)

    return set_wired_limit
