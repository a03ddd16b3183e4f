"""Integration: what replaces MLX's and MLX-LM's functions while patched.

Nothing here does arithmetic or decides anything: a call is either handed to the original function or, when
every condition holds, to `split`.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from . import split
from .known import Layer, Standing
from .plans import SPLIT, STOCK
from .sites import Job, SiteControl

if TYPE_CHECKING:
    from .session import Session

FAILED = "a split that failed"
TRACE = "under a trace"
CROWDED = "another thread"

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
    """A call that may be prefill: do what its site decides if everything allows it, else the original."""
    if not isinstance(x, mx.array):
        return stock(layer, x)
    shape = x.shape
    if len(shape) < 2 or shape[-2] < 2 or x.size < session.settings.min_rows * shape[-1]:
        return stock(layer, x)
    # Standing down must cost nothing, also where a whole prompt takes a few milliseconds.
    known = session.known.seen(layer)
    standing = None if known is None else known.standing.get(shape)
    on_gpu = mx.default_device() == mx.gpu
    if standing is not None and standing.on_gpu == on_gpu and standing.dtype == x.dtype:
        standing.calls += 1
        return stock(layer, x)
    age = session.known.age
    call = decide(session, layer, x)
    if call.known.reason is not None or (call.control is not None and call.control.standing):
        session.known.stand(call.known, shape, Standing(call.reason or "", x.dtype, on_gpu), age)
    out, reason = None, call.reason
    if reason is None:
        out, reason = (
            timed(session, stock, layer, x, call) if call.job.timed else untimed(session, layer, x, call)
        )
    session.count(STOCK if reason else SPLIT, call.known, x.size // x.shape[-1], reason)
    return stock(layer, x) if out is None else out


@dataclass
class Call:
    """One call of a layer: stock for a `reason`, or what `control` wants done."""

    known: Layer
    reason: str | None
    job: Job = field(default_factory=lambda: Job(STOCK))
    control: SiteControl | None = None
    cpu_dtype: str = "native"
    unclean: str | None = None


def decide(session: Session, layer: nn.Module, x: mx.array) -> Call:
    """What to do with a large call; whatever fails while we find out makes it stock."""
    known = None
    try:
        known = session.known.find(layer)
        reason = refusal(session, known, layer, x)
        return ask(session, known, layer, x) if reason is None else Call(known, reason)
    except Exception as error:
        return Call(known or Layer(weakref.ref(layer)), failed(session, error))


def ask(session: Session, known: Layer, layer: nn.Module, x: mx.array) -> Call:
    """Ask the call's site what to do."""
    rows = x.size // x.shape[-1]
    dtype = mx.result_type(*split.given(x, layer["weight"], layer.get("bias")))
    control = session.control(known, dtype, rows)
    crowded = session.crowded()  # asked each time: it also tells the other threads that we were here
    unclean = first_touch(known) or (CROWDED if crowded else None)
    # The parts and the joined output, and at worst a float32 copy of the weight.
    working_set = 2 * rows * known.outputs * dtype.size + 4 * known.arithmetic
    fits, short = session.conditions(working_set)
    job = control.choose(id(layer), rows, fits, short, unclean is None)
    session.decided(control)
    reason = control.stock_reason() if job.arm == STOCK and not job.timed else None
    return Call(known, reason, job, control, control.plan.cpu_dtype, unclean)


def first_touch(known: Layer) -> str | None:
    """The first call of a layer may read its weight from disk, so its time says nothing."""
    touched, known.touched = known.touched, True
    return None if touched else "first touch"


def untimed(
    session: Session, layer: nn.Module, x: mx.array, call: Call
) -> tuple[mx.array | None, str | None]:
    """The split product, left lazy, or None and the reason."""
    weight, bias = layer["weight"], layer.get("bias")
    boundary = session.settings.boundary
    # The weight and the bias too: under compile or vmap the input may be concrete and they traced.
    if not split.try_boundary(split.given(x, weight, bias), boundary):
        return None, TRACE
    try:
        m = split.cpu_rows(x.size // x.shape[-1], call.job.ratio)
        return split.run_linear(x, weight, bias, m, boundary, call.cpu_dtype), None
    except Exception as error:
        return None, failed(session, error)


def timed(
    session: Session, stock: Forward, layer: nn.Module, x: mx.array, call: Call
) -> tuple[mx.array | None, str | None]:
    """One arm, evaluated and timed, and the time told to the site; None and the reason where it cannot be."""
    weight, bias = layer["weight"], layer.get("bias")
    if not split.try_boundary(split.given(x, weight, bias), "eager"):
        return None, TRACE
    job, rows = call.job, x.size // x.shape[-1]
    assert call.control is not None
    try:
        if job.solo:
            _record(session, call, stopwatch(lambda: _solo(x, weight, bias, job.solo, call))[1], rows)
            return None, call.control.stock_reason()
        if job.arm == STOCK:
            out, seconds = stopwatch(lambda: stock(layer, x))
        else:
            m = split.cpu_rows(rows, job.ratio)
            out, seconds = stopwatch(lambda: split.run_linear(x, weight, bias, m, "eager", call.cpu_dtype))
        _record(session, call, seconds, rows)
        return out, "timed as stock" if job.arm == STOCK else None
    except Exception as error:
        return None, failed(session, error)


def stopwatch(compute: Callable[[], mx.array]) -> tuple[mx.array, float]:
    """A result, evaluated, and the seconds it took."""
    start = time.perf_counter()
    out = compute()
    mx.eval(out)
    return out, time.perf_counter() - start


def _solo(x: mx.array, weight: mx.array, bias: mx.array | None, rows: int, call: Call) -> mx.array:
    return split.linear_parts(x.reshape(-1, x.shape[-1]), weight, bias, rows, "eager", call.cpu_dtype)[0]


def _record(session: Session, call: Call, seconds: float, rows: int) -> None:
    """Charge the split with the boundary that stock never pays, and timing with the one it added."""
    boundary = session.boundary_seconds()
    assert call.control is not None
    charged = seconds + (boundary if call.job.arm == SPLIT and call.job.probe is None else 0.0)
    unclean = call.unclean or (CROWDED if session.crowded() else None)
    call.control.record(call.job, charged, rows, boundary, unclean)
    session.decided(call.control)


def failed(session: Session, error: Exception) -> str:
    """Say once that something of ours failed; the reason to count."""
    if isinstance(error, ValueError) and split.is_trace_error(error):
        return TRACE
    session.report_once(f"a split failed, stock instead: {error!r}")
    return FAILED


def refusal(session: Session, known: Layer, layer: nn.Module, x: mx.array) -> str | None:
    """Why this call of this layer must be stock whatever a plan says; None where it need not."""
    if known.reason is not None:
        return known.reason
    if layer.training:
        return "in training"
    if x.dtype not in split.FLOAT_TYPES:
        return f"input of type {x.dtype}"
    if x.shape[-1] != known.inputs:
        return "input of another width"
    if not session.budget.admit():
        return f"more than {split.MAX_THREADS} threads"
    return None


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
