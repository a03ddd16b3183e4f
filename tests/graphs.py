"""What tests may know of MLX's lazy graphs and streams without looking into our code."""

import io
import re
import threading
from collections.abc import Callable

import mlx.core as mx

from fusionml import split


def evaluated(array: mx.array) -> bool:
    """Whether `array` is computed already: an array that is has no operation left behind it."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return "label" not in text.getvalue()


def foreign_stream() -> mx.Stream:
    """A CPU stream of a thread that is gone: evaluating an operation on it raises RuntimeError here."""
    made: list[mx.Stream] = []
    thread = threading.Thread(target=lambda: made.append(mx.new_stream(mx.cpu)))
    thread.start()
    thread.join()
    return made[0]


def lazy(array: mx.array) -> mx.array:
    """The same values as an array that is not computed yet."""
    return array + mx.zeros((), array.dtype)


def operations(array: mx.array) -> list[str]:
    """The names of the operations that are still to be done for `array`."""
    text = io.StringIO()
    mx.export_to_dot(text, array)
    return re.findall(r'label ="([^"]+)"', text.getvalue())


def peak(compute: Callable[[], object]) -> int:
    """Bytes that a computation needs at most, its result included."""
    mx.synchronize()
    split.drain()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(compute())
    return mx.get_peak_memory() - before
