"""Several ways to compute one thing, timed in an order that favours none (the paper's Section 5.1)."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.experiment import Options
from fusionml import split
from fusionml.measure import order, paired_ratio, relative_error, unstable

AGAIN = "again"
NOT_TIMED = "not timed: "
Call = Callable[[], Any]


@dataclass(frozen=True)
class Arm:
    """One way: `call` returns an array, or a tree of arrays, that is evaluated inside the timing.

    `within` is entered before the clock starts and left after it stops, e.g. `fusionml.patched`. An arm that
    does a part of the work only is not to `compare`: its result is not the baseline's.
    """

    call: Call
    within: Callable[[], AbstractContextManager[Any]] = nullcontext
    compare: bool = True


@dataclass
class Checked:
    """What one untimed run of an arm told: its largest error, its peak memory, or why it is not timed."""

    error: float | None = None
    peak_bytes: int | None = None
    refused: str | None = None


def measure(
    arms: Mapping[str, Arm | Call],
    options: Options,
    *,
    baseline: str = "stock",
    tolerance: float | None,
    again: bool = True,
    cool_down: float = 0.0,
) -> dict[str, Any]:
    """Verify every arm against the baseline, then time them all in turns: A B, B A, A B, ...

    Args:
        arms: by name; the baseline among them.
        options: its `warm_ups` rounds are thrown away, its `samples` rounds are kept.
        baseline: what the others are compared with.
        tolerance: largest max|arm - baseline| / max|baseline| with which an arm is timed; None times every
            arm, and the error is told all the same.
        again: time the baseline a second time, under another name: what the machine's noise alone looks like.
        cool_down: seconds to rest before each round.

    Returns:
        `baseline`, `arms`, `ratios`, `aa` and `errors` of a cell (see `schema.json`). An arm that MLX refuses
        or that computes something else has no samples, and its warning says why.

    Raises:
        ValueError: no such baseline, or nothing to compare with it.
    """
    made = {name: arm if isinstance(arm, Arm) else Arm(arm) for name, arm in arms.items()}
    if baseline not in made:
        raise ValueError(f"baseline={baseline!r} is not one of the arms {', '.join(made)}")
    checked = verify(made, baseline, tolerance)
    timed = {name: arm for name, arm in made.items() if checked[name].refused is None}
    if again:
        timed[f"{baseline} {AGAIN}"] = made[baseline]
    for _ in range(options.warm_ups):
        for arm in timed.values():
            seconds(arm)
    samples = sample(timed, options.samples, cool_down, options.first)
    errors = {name: found.error for name, found in checked.items() if name != baseline}
    result = summarise({name: samples.get(name, []) for name in [*made, *timed]}, baseline, errors)
    for name, found in checked.items():
        result["arms"][name]["peak_bytes"] = found.peak_bytes
        if found.refused is not None:
            result["arms"][name]["warnings"].append(f"{NOT_TIMED}{found.refused}")
    return result


def seconds(arm: Arm) -> float:
    """One sample."""
    with arm.within():
        start = time.perf_counter()
        mx.eval(arm.call())
        return time.perf_counter() - start


def sample(arms: Mapping[str, Arm], rounds: int, cool_down: float, before: int = 0) -> dict[str, list[float]]:
    """Seconds of each arm, in turns, with the garbage collector out of the way.

    `before` rounds were another process's.
    """
    taken: dict[str, list[float]] = {name: [] for name in arms}
    turns = order(list(arms), rounds, before=before) if len(arms) > 1 else list(arms) * rounds
    gc.collect()
    gc.disable()
    try:
        for turn, name in enumerate(turns):
            if cool_down and turn % len(arms) == 0:
                time.sleep(cool_down)
            taken[name].append(seconds(arms[name]))
    finally:
        gc.enable()
    return taken


def summarise(
    samples: Mapping[str, Sequence[float]],
    baseline: str = "stock",
    errors: Mapping[str, float | None] | None = None,
    groups: Sequence[int] | None = None,
) -> dict[str, Any]:
    """A cell from samples that were taken in turns: `baseline`, `arms`, `ratios`, `aa` and `errors`.

    An arm named `<baseline> again` is the baseline's A/A twin and becomes `aa`; an arm without samples has no
    ratio. `groups` are the numbers of samples that each process took, where there were several.
    """
    twin = f"{baseline} {AGAIN}"
    ratios = {
        name: asdict(paired_ratio(samples[baseline], times, groups=groups))
        for name, times in samples.items()
        if times and name != baseline
    }
    return {
        "baseline": baseline,
        "arms": {name: _arm(times, groups) for name, times in samples.items()},
        "aa": ratios.pop(twin, None),
        "ratios": ratios,
        "errors": {name: _finite(error) for name, error in (errors or {}).items()},
    }


def _finite(error: float | None) -> float | None:
    """JSON has no infinity, which is the error of a result that is not finite."""
    return error if error is not None and math.isfinite(error) else None


def _arm(times: Sequence[float], groups: Sequence[int] | None) -> dict[str, Any]:
    if not times:
        return {"samples": [], "median": None, "warnings": []}
    return {"samples": list(times), "median": median(times), "warnings": unstable(times, groups=groups)}


def cpu_types(dtype: mx.Dtype) -> tuple[str, ...]:
    """What the CPU's rows may be computed in: half types in float32 as well."""
    return ("native", "float32") if dtype in split.HALF_TYPES else ("native",)


# --- verification


def verify(arms: Mapping[str, Arm], baseline: str, tolerance: float | None) -> dict[str, Checked]:
    """Every arm run once, untimed, and compared with the baseline.

    An error of the baseline itself is passed on.
    """
    reference, peak = _run(arms[baseline])
    checked = {baseline: Checked(peak_bytes=peak)}
    for name, arm in arms.items():
        if name != baseline:
            checked[name] = _check(arm, reference, tolerance)
    return checked


def _check(arm: Arm, reference: Sequence[np.ndarray], tolerance: float | None) -> Checked:
    try:
        found, peak = _run(arm)
    except (RuntimeError, ValueError) as refusal:
        return Checked(refused=str(refusal))
    error = max(map(relative_error, found, reference), default=None) if arm.compare else None
    checked = Checked(error, peak)
    if tolerance is not None and error is not None and not error <= tolerance:
        checked.refused = f"it differs from the baseline by {error:.2g}, more than {tolerance:.2g}"
    return checked


def _run(arm: Arm) -> tuple[list[np.ndarray], int]:
    """The arm's arrays in float32, and the bytes that it needed beyond what was there."""
    split.drain()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    with arm.within():
        out = arm.call()
        mx.eval(out)
    peak = mx.get_peak_memory() - before
    arrays = [array for _, array in tree_flatten([out]) if isinstance(array, mx.array)]
    return [np.array(array.astype(mx.float32)) for array in arrays], peak
