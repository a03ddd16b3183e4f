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

from . import experts, products, sharded, split
from .known import Layer, Standing
from .plans import DENSE, SPLIT, STOCK
from .products import Product
from .sites import Job, SiteControl

if TYPE_CHECKING:
    from .session import Session

FAILED = "a split that failed"
TRACE = "under a trace"
CROWDED = "another thread"

Forward = Callable[..., mx.array]


def replace_linear(session: Session, stock: Forward) -> Forward:
    """`__call__` of a linear layer with one cheap test in front: a call too small to split is stock at once.

    For `Linear`, `QuantizedLinear` and the sharded layers.
    """

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


def replace_expert_block(session: Session, stock: Forward) -> Forward:
    """`SwitchGLU.__call__` and `SwitchMLP.__call__`, that tell the layers inside how many tokens there are.

    Inside, rows are routed: a batch of 64 in decoding looks like a prompt of 512 there.
    """

    @functools.wraps(stock)
    def __call__(self: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
        try:
            small = x.size < session.smallest or indices.shape[-2] < 2
        except (AttributeError, TypeError, IndexError):
            small = True
        if small:
            return stock(self, x, indices)
        with session.routing(indices.shape):
            return stock(self, x, indices)

    return __call__


def replace_expert_layer(session: Session, stock: Forward) -> Forward:
    """`SwitchLinear.__call__` and `QuantizedSwitchLinear.__call__`: the sorted path of a prompt may split."""

    @functools.wraps(stock)
    def __call__(self: nn.Module, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        top = session.routed()
        if top is None or not sorted_indices or not experts.is_sorted_call(x, indices):
            return stock(self, x, indices, sorted_indices=sorted_indices)
        return call_layer(session, functools.partial(stock, sorted_indices=True), self, x, indices, top=top)

    return __call__


def call_linear(session: Session, stock: Forward, layer: nn.Module, x: mx.array) -> mx.array:
    """A call that may be prefill, if it has rows enough in one sequence."""
    if not isinstance(x, mx.array):
        return stock(layer, x)
    shape = x.shape
    if len(shape) < 2 or shape[-2] < 2 or x.size < session.settings.min_rows * shape[-1]:
        return stock(layer, x)
    return call_layer(session, stock, layer, x)


def call_layer(
    session: Session,
    stock: Forward,
    layer: nn.Module,
    x: mx.array,
    indices: mx.array | None = None,
    *,
    top: int = 1,
) -> mx.array:
    """A call of prefill: do what its site decides if everything allows it, else the original.

    Args:
        x: `[..., K]`; indices: the expert of each row, for a layer of experts.
        top: rows that each token makes: the experts that it goes to.
    """
    rest = () if indices is None else (indices,)
    # Standing down must cost nothing, also where a whole prompt takes a few milliseconds.
    known = session.known.seen(layer)
    standing = None if known is None else known.standing.get(x.shape)
    on_gpu = mx.default_device() == mx.gpu
    if standing is not None and standing.on_gpu == on_gpu and standing.dtype == x.dtype:
        standing.calls += 1
        return stock(layer, x, *rest)
    age = session.known.age
    call = decide(session, layer, x, indices, top)
    if call.known.reason is not None or (call.control is not None and call.control.standing):
        session.known.stand(call.known, x.shape, Standing(call.reason or "", x.dtype, on_gpu), age)
    out, reason = None, call.reason
    if reason is None:
        if call.job.timed:
            out, reason = timed(session, call, layer, lambda: stock(layer, x, *rest))
        else:
            out, reason = untimed(session, call, layer)
    session.count(STOCK if reason else call.job.arm, call.known, call.rows // top, reason)
    return stock(layer, x, *rest) if out is None else out


@dataclass
class Call:
    """One call of a layer: stock for a `reason`, or what `control` wants done with `product`."""

    known: Layer
    rows: int
    reason: str | None
    job: Job = field(default_factory=lambda: Job(STOCK))
    control: SiteControl | None = None
    product: Product | None = None
    unclean: str | None = None


def decide(session: Session, layer: nn.Module, x: mx.array, indices: mx.array | None, top: int) -> Call:
    """What to do with a large call; whatever fails while we find out makes it stock."""
    known, rows = None, x.size // x.shape[-1]
    try:
        known = session.known.find(layer)
        known.top = top
        reason = refusal(session, known, layer, x)
        if reason is not None:
            return Call(known, rows, reason)
        product = products.of(known.kind, layer, x, indices)
        reason = refused_experts(known, product)
        return ask(session, known, product, rows, id(layer)) if reason is None else Call(known, rows, reason)
    except Exception as error:
        return Call(known or Layer(weakref.ref(layer)), rows, failed(session, error))


def ask(session: Session, known: Layer, product: Product, rows: int, layer: int) -> Call:
    """Ask the call's site what to do."""
    dtype = product.dtype
    control = session.control(known, dtype, rows // known.top)
    crowded = session.crowded()  # asked each time: it also tells the other threads that we were here
    unclean = first_touch(known) or (CROWDED if crowded else None)
    # The parts and the joined output, and at worst a dense and a float32 copy of the weight.
    copies = (dtype.size if known.packed else 0) + 4
    working_set = 2 * rows * known.outputs * dtype.size + copies * known.weights
    fits, short = session.conditions(working_set)
    job = control.choose(layer, rows, fits, short, unclean is None)
    session.decided(control)
    reason = control.stock_reason() if job.arm == STOCK and not job.timed else None
    return Call(known, rows, reason, job, control, product, unclean)


def first_touch(known: Layer) -> str | None:
    """The first call of a layer may read its weight from disk, so its time says nothing."""
    touched, known.touched = known.touched, True
    return None if touched else "first touch"


def untimed(session: Session, call: Call, layer: nn.Module) -> tuple[mx.array | None, str | None]:
    """The product by the arm that the job names, left lazy where it can be, or None and the reason."""
    assert call.product is not None
    boundary = session.settings.boundary
    # The weights too: under compile or vmap the input may be concrete and they traced.
    if not split.try_boundary(call.product.arrays, boundary):
        return None, TRACE
    try:
        return sharded.finish(layer, compute(call, boundary)), None
    except Exception as error:
        return None, failed(session, error)


def compute(call: Call, boundary: str) -> mx.array:
    """The product of a dense or split job."""
    assert call.product is not None
    job = call.job
    if job.arm == DENSE:
        return call.product.dense(boundary)
    return call.product.split(split.cpu_rows(call.rows, job.ratio), job.form, boundary, job.cpu_dtype)


def timed(
    session: Session, call: Call, layer: nn.Module, stock: Callable[[], mx.array]
) -> tuple[mx.array | None, str | None]:
    """One arm, evaluated and timed, and the time told to the site; None and the reason where it cannot be.

    Of a sharded layer the product alone is timed: a collective waits for the other ranks.
    """
    job, product = call.job, call.product
    assert call.control is not None
    assert product is not None
    if not split.try_boundary(product.arrays, "eager"):
        return None, TRACE
    try:
        if job.solo:
            part = stopwatch(lambda: product.cpu_part(job.solo, job.form, job.cpu_dtype))[1]
            _record(session, call, part)
            if job.arm == STOCK:
                return None, call.control.stock_reason()
            return sharded.finish(layer, compute(call, "eager")), None
        if job.arm != STOCK:
            out, seconds = stopwatch(lambda: compute(call, "eager"))
        elif call.known.sharded:
            out, seconds = stopwatch(product.stock)
        else:
            out, seconds = stopwatch(stock)
        _record(session, call, seconds)
        reason = "timed as stock" if job.arm == STOCK else None
        if call.known.sharded or job.arm != STOCK:
            out = sharded.finish(layer, out)
        return out, reason
    except Exception as error:
        why = failed(session, error)
        if why == FAILED:
            call.control.failed(job)
        return None, why


def stopwatch(compute: Callable[[], mx.array]) -> tuple[mx.array, float]:
    """A result, evaluated, and the seconds it took."""
    start = time.perf_counter()
    out = compute()
    mx.eval(out)
    return out, time.perf_counter() - start


def _record(session: Session, call: Call, seconds: float) -> None:
    """Charge an arm with the boundaries that stock never pays, and timing with the one it added."""
    boundary, job = session.boundary_seconds(), call.job
    assert call.control is not None
    if job.arm != STOCK and job.trial is None:
        form = job.form if job.arm == SPLIT else None
        seconds += boundary * products.boundaries(call.known.kind, form)
    unclean = call.unclean or (CROWDED if session.crowded() else None)
    call.control.record(job, seconds, call.rows, boundary, unclean)
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
    if known.in_training(layer):
        return "in training"
    if x.dtype not in split.FLOAT_TYPES:
        return f"input of type {x.dtype}"
    if x.shape[-1] != known.inputs:
        return "input of another width"
    if off := session.switched_off(known):
        return off
    if not session.budget.admit():
        return f"more than {split.MAX_THREADS} threads"
    return None


def refused_experts(known: Layer, product: Product) -> str | None:
    """MLX's CPU gathers experts in float32 only, so there stock raises: its error is the user's to see."""
    if known.kind != products.EXPERTS or known.packed or mx.default_device() == mx.gpu:
        return None
    return None if product.dtype == mx.float32 else f"experts of type {product.dtype} on the CPU"


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
