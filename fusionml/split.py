"""The mechanism (paper, Section 3): one matrix product on two units at once.

Rows `[0, m)` of the input go to a CPU stream of our own, the rest to the stream that the caller is on.
Inside one lazy graph MLX serialises the two, so the input is made real first (the *boundary*), and where the
backend needs it both parts are computed before they are joined. There is no policy here: the caller says
how many rows go to the CPU.
"""

from __future__ import annotations

import sys
import threading

import mlx.core as mx

from .settings import BOUNDARIES, CPU_DTYPES, MAX_EQUAL_RATIO, MAX_RATIO, check_ratio

ROW_MULTIPLE = 32
"""Parts are multiples of this many rows, as both units' tiles are."""
MAX_THREADS = 32
"""MLX keeps a system thread for each thread that ever used the CPU stream, so their number is bounded."""
HALF_TYPES = (mx.float16, mx.bfloat16)
FLOAT_TYPES = (mx.float32, *HALF_TYPES)

# Made once: a plain stream belongs to the thread that made it and cannot be used from a server's worker.
cpu_stream = mx.new_thread_local_stream(mx.cpu)

_TRACE_MESSAGES = ("Not allowed inside a graph transformation", "during function transformations")


class StreamBudget:
    """Counts the threads that use the CPU stream; `admit()` is False for a new one beyond the limit."""

    def __init__(self, limit: int = MAX_THREADS) -> None:
        self._limit, self._used = limit, 0
        self._lock, self._local = threading.Lock(), threading.local()

    def admit(self) -> bool:
        admitted: bool | None = getattr(self._local, "admitted", None)
        if admitted is None:
            with self._lock:
                admitted = self._used < self._limit
                self._used += admitted
            self._local.admitted = admitted
        return admitted

    def admitted_here(self) -> bool:
        """Whether the calling thread has used the CPU stream."""
        return bool(getattr(self._local, "admitted", False))


def max_ratio() -> float:
    """The largest CPU share of the pair (CPU stream, current stream)."""
    return MAX_RATIO if mx.default_device() == mx.gpu else MAX_EQUAL_RATIO


def row_multiple(rows: int) -> int:
    """What the CPU's rows are a multiple of in a call of `rows` rows: 32, less for a small batch."""
    multiple = ROW_MULTIPLE
    while multiple * 8 > rows and multiple > 1:
        multiple //= 2
    return multiple


def cpu_rows(rows: int, ratio: float) -> int:
    """The number of rows `m` that the CPU takes.

    `ratio * rows`, rounded to a multiple that both units like (32, less for a small batch). A ratio of 0
    or a single row is 0; any other ratio leaves neither part empty.
    """
    if ratio <= 0 or rows < 2:
        return 0
    multiple = row_multiple(rows)
    m = round(rows * ratio / multiple) * multiple
    return min(max(m, multiple), rows - 1)


def dtype_name(dtype: mx.Dtype) -> str:
    """As tables and results have it, e.g. `bfloat16`."""
    return str(dtype).removeprefix("mlx.core.")


def resolve_cpu_dtype(name: str, dtype: mx.Dtype) -> str:
    """`native` or `float32` for a result of `dtype`.

    `auto` is float32 for half types on macOS, where the half-precision path of the CPU's library has been
    seen to crash, and native everywhere else. Only half types are ever computed in float32: every other type
    is that already, or would lose by it.
    """
    if name == "auto":
        name = "float32" if sys.platform == "darwin" and dtype in HALF_TYPES else "native"
    return name if dtype in HALF_TYPES else "native"


def is_trace_error(error: ValueError) -> bool:
    """Whether MLX raised `error` because arrays may not be evaluated inside a graph transformation."""
    return any(message in str(error) for message in _TRACE_MESSAGES)


def materialise(arrays: list[mx.array], boundary: str) -> None:
    """The boundary: make arrays real (`eager`), on their way (`async`), or leave them lazy (`none`).

    Raises:
        ValueError: under a trace (`is_trace_error` tells it from the error of another operation).
    """
    if boundary == "none":
        return
    # async_eval refuses the tracers of every transformation, eval silently accepts those of grad.
    mx.async_eval(*arrays)
    if boundary == "eager":
        mx.eval(*arrays)


def try_boundary(arrays: list[mx.array], boundary: str) -> bool:
    """`materialise`, or False under a trace; the error of another operation passes through."""
    try:
        materialise(arrays, boundary)
    except ValueError as error:
        if not is_trace_error(error):
            raise
        return False
    return True


def given(*arrays: mx.array | None) -> list[mx.array]:
    """Those of the arrays that there are: a bias may be None."""
    return [array for array in arrays if array is not None]


def stock_linear(x: mx.array, weight: mx.array, bias: mx.array | None) -> mx.array:
    """The product as `nn.Linear` makes it, on the current stream."""
    return x @ weight.T if bias is None else mx.addmm(bias, x, weight.T)


def linear_parts(
    flat: mx.array, weight: mx.array, bias: mx.array | None, m: int, boundary: str, cpu_dtype: str
) -> tuple[mx.array, mx.array]:
    """The two lazy parts `(cpu, current)` of a row-split product.

    Args:
        flat: input `[rows, K]`.
        weight: `[N, K]`; bias: `[N]` or None.
        m: rows of the CPU part, `0 < m < rows`.
        boundary: see `materialise`.
        cpu_dtype: `native`, or `float32`: rows and weight are cast on the current stream before the
            boundary; the copies live as long as the parts.
    """
    wide = cpu_dtype == "float32"
    head, cpu_weight, cpu_bias = flat, weight, bias
    if wide:
        head, cpu_weight = flat[:m].astype(mx.float32), weight.astype(mx.float32)
        cpu_bias = None if bias is None else bias.astype(mx.float32)
    arrays = given(flat, weight, bias)
    materialise([*arrays, *(given(head, cpu_weight, cpu_bias) if wide else [])], boundary)
    dtype = mx.result_type(*arrays)
    # Slices and transposes are operations too: on the wrong stream they would bring the dependency back.
    with mx.stream(cpu_stream):
        if not wide:
            # A bias of a wider type widens the whole product, as addmm does.
            head, cpu_weight = head[:m].astype(dtype), cpu_weight.astype(dtype)
        cpu = head @ cpu_weight.T
        # Not addmm: on the CPU it has been wrong in half types.
        cpu = (cpu if cpu_bias is None else cpu + cpu_bias).astype(dtype)
    return cpu, stock_linear(flat[m:], weight, bias)


def join(cpu: mx.array, current: mx.array, shape: tuple[int, ...], settle: bool) -> mx.array:
    """Both parts as one lazy array `shape + [N]`.

    On CUDA a join in the same evaluation serialises the parts: `settle` computes them first. One evaluation
    of both, because there two dispatches can deadlock: seen with `async_eval` of the current part before the
    CPU's, or of both in one call, and a join behind them.
    """
    if settle:
        mx.eval(cpu, current)
    joined = mx.concatenate([cpu, current], axis=0)
    return joined.reshape(*shape, joined.shape[-1])


def needs_settling() -> bool:
    """Whether the current stream's backend serialises parts that are not computed before the join."""
    return bool(mx.default_device() == mx.gpu and mx.cuda.is_available())


def run_linear(
    x: mx.array, weight: mx.array, bias: mx.array | None, m: int, boundary: str, cpu_dtype: str
) -> mx.array:
    """`split_linear` for `m` CPU rows, unchecked: what the patched layers call."""
    flat = x.reshape(-1, x.shape[-1])
    cpu, current = linear_parts(flat, weight, bias, m, boundary, cpu_dtype)
    return join(cpu, current, x.shape[:-1], needs_settling())


def drain() -> None:
    """Wait until the calling thread's CPU stream has nothing left to do."""
    mx.synchronize(cpu_stream)


def split_linear(
    x: mx.array,
    weight: mx.array,
    bias: mx.array | None = None,
    *,
    ratio: float,
    boundary: str = "eager",
    cpu_dtype: str | None = None,
) -> mx.array:
    """`x @ weight.T + bias` with the first rows on the CPU and the rest on the current stream (Section 3).

    Args:
        x: input `[..., K]`, one to any number of dimensions; its rows are `x.size // K`.
        weight: `[N, K]`.
        bias: `[N]` or None.
        ratio: CPU share of the rows, 0 to 0.5 (0.9 between two CPU streams). 0 is the plain product.
        boundary: `eager` evaluates the input and the weight first, `async` sends them off without waiting,
            `none` leaves the graph lazy, which serialises the two on a GPU.
        cpu_dtype: `native` computes the CPU rows in the input's type, `float32` in float32 (with a transient
            copy of the weight); None or `auto` is float32 for half types on macOS, native elsewhere.

    Returns:
        A lazy array `[..., N]`, of the dtype that the plain product would have.

    Raises:
        ValueError: a wrong argument, or a call inside a graph transformation with a boundary.
    """
    check_ratio(ratio, max_ratio())
    _check_choice("boundary", boundary, BOUNDARIES)
    _check_choice("cpu_dtype", cpu_dtype or "auto", CPU_DTYPES)
    _check_shapes(x, weight, bias)
    m = cpu_rows(x.size // x.shape[-1] if x.size else 0, ratio)
    if m == 0:
        return stock_linear(x, weight, bias)
    dtype = mx.result_type(*given(x, weight, bias))
    return run_linear(x, weight, bias, m, boundary, resolve_cpu_dtype(cpu_dtype or "auto", dtype))


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not allowed; choose one of {', '.join(allowed)}")


def _check_shapes(x: mx.array, weight: mx.array, bias: mx.array | None) -> None:
    if x.ndim < 1 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x {x.shape} and weight {weight.shape} do not fit; x is [..., K], weight [N, K]")
    if bias is not None and bias.shape != (weight.shape[0],):
        raise ValueError(f"bias {bias.shape} does not fit; it is [N] = [{weight.shape[0]}]")
