"""Measures each shape's best CPU share under contention and fills the ratio table (paper, Section 4).

`python -m fusionml.calibrate --model M`. What is timed is the real thing: `split` itself, on evaluated
inputs, with the model's own weights, against the layer as MLX computes it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import machine, patching, pressure, split
from .known import KnownModels, Layer
from .measure import relative_error
from .ratios import DEFAULT_ROWS, PAPER_GRID, STOCK, Choice, Probe, RatioSearch, Site
from .session import BUSY, entry_of, site_of
from .table import RatioTable
from .timing import boundary_seconds

LEAST_ROWS = 16
LISTEN_SECONDS = 0.5
FEW_SAMPLES = 40
"""Calls of stock in whose time one search is done, at the fewest repeats."""
FIRST_PASS = 0.6
"""Share of the budget for the first search of every site; the rest is for a second, at another moment."""
STEADY = 0.02
"""Relative deviation of one sample up to which one search is enough."""
REPEATS = (5, 7)
"""Samples of each ratio, at the fewest and at the most."""
CACHE_BYTES = 256 * 2**20
"""Weights are taken in turn from so many bytes of layers, more than a last-level cache holds."""
TOLERANCE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 2.4e-2}
"""Largest error of a split against stock, relative to the largest output (float16's is the paper's)."""


class NothingToCalibrateError(Exception):
    """The model has no layer that may split; the message says why, for each kind of layer."""


@dataclass
class Shape:
    """All layers of a model that share one decision but for their rows."""

    kind: str
    dtype: mx.Dtype
    inputs: int
    outputs: int
    bias: bool
    layers: list[nn.Module] = field(default_factory=list)
    boundaries: float = 0.0
    """Boundaries that these layers cause: a layer that shares its input with others causes a part of one."""

    @property
    def work(self) -> int:
        """Multiply-adds for one row, all layers together."""
        return self.inputs * self.outputs * len(self.layers)

    def site(self, rows: int) -> Site:
        """The site that calls of `rows` rows look up."""
        return site_of(self, self.dtype, rows)


@dataclass(frozen=True)
class Outcome:
    """What was found for one site; `left_out` says why nothing, or not everything, was."""

    site: Site
    rows: int
    choice: Choice | None
    cpu_dtype: str
    seconds: float
    error: float | None = None
    left_out: str | None = None


# --- what to measure


def shapes(model: nn.Module, dtype: mx.Dtype | None = None) -> list[Shape]:
    """The shapes of `model` that may split, the one with the most arithmetic first.

    Args:
        model: an MLX-LM model.
        dtype: the type to take its weights for, None for their own.

    Raises:
        NothingToCalibrateError: there is none.
    """
    known = KnownModels()
    known.add(model, from_loader=True)
    layers = known.layers()
    splitting = [
        (layer, module) for layer in layers if layer.reason is None and (module := layer.ref()) is not None
    ]
    sharing = _sharing(model, {id(module) for _, module in splitting})
    found: dict[tuple[Any, ...], Shape] = {}
    for layer, module in splitting:
        key = (layer.kind, dtype or module["weight"].dtype, layer.inputs, layer.outputs, layer.bias)
        shape = found.setdefault(key, Shape(*key))
        shape.layers.append(module)
        shape.boundaries += 1 / sharing.get(id(module), 1)
    if not found:
        raise NothingToCalibrateError(_why_nothing(layers))
    return sorted(found.values(), key=lambda shape: shape.work, reverse=True)


def _why_nothing(layers: Iterable[Layer]) -> str:
    reasons: dict[str, int] = {}
    for layer in layers:
        text = f"{layer.kind} layers {layer.reason}"
        reasons[text] = reasons.get(text, 0) + 1
    return (
        "; ".join(f"{count} {text}" for text, count in sorted(reasons.items())) or "it has no linear layers"
    )


def _sharing(model: nn.Module, splitting: set[int]) -> dict[int, int]:
    """How many of the layers in `splitting` get the very input of each of them: they share one boundary.

    Seen by building the graph of a two-token prompt, which computes nothing. Empty where the model cannot
    be called so, and then every layer is charged with a boundary of its own.
    """
    inputs: dict[int, tuple[mx.array, list[int]]] = {}
    stock = nn.Linear.__call__

    def seen(self: nn.Module, x: mx.array) -> mx.array:
        if id(self) in splitting:
            inputs.setdefault(id(x), (x, []))[1].append(id(self))
        return stock(self, x)

    nn.Linear.__call__ = seen
    try:
        model(mx.zeros((1, 2), mx.int32))
    except Exception:
        return {}
    finally:
        nn.Linear.__call__ = stock
    return {layer: len(layers) for _, layers in inputs.values() for layer in layers}


# --- timing


class Bench:
    """Times the probes of one shape at one number of rows.

    Args:
        shape: what is timed; its layers' weights are used in turn.
        rows: rows of the whole call.
        cpu_dtype: `native` or `float32`, of the CPU part.
        made_up: make weights of the shape, of this type, instead of reading the layers'.
    """

    def __init__(self, shape: Shape, rows: int, cpu_dtype: str, made_up: mx.Dtype | None) -> None:
        self.rows, self.cpu_dtype = rows, cpu_dtype
        size = shape.inputs * shape.outputs * shape.dtype.size
        most = max(2, -(-CACHE_BYTES // size))
        self.weights = [
            _parameters(shape, module, made_up) for module in shape.layers[: min(most, len(shape.layers))]
        ]
        self.x = mx.random.normal((rows, shape.inputs), key=mx.random.key(0)).astype(shape.dtype)
        mx.eval(self.x, [a for pair in self.weights for a in pair if a is not None])
        self._turn = 0

    def seconds(self, probe: Probe) -> float:
        """One sample of a probe."""
        self._turn += 1
        weight, bias = self.weights[self._turn % len(self.weights)]
        start = time.perf_counter()
        mx.eval(self._compute(probe, weight, bias))
        return time.perf_counter() - start

    def _compute(self, probe: Probe, weight: mx.array, bias: mx.array | None) -> mx.array:
        if probe.kind == "stock":
            return split.stock_linear(self.x, weight, bias)
        if probe.kind == "solo":
            return split.linear_parts(self.x, weight, bias, probe.cpu_rows, "eager", self.cpu_dtype)[0]
        return split.run_linear(self.x, weight, bias, probe.cpu_rows, "eager", self.cpu_dtype)

    def error(self, cpu_rows: int) -> float:
        """Largest difference of the split from stock, relative to stock's largest output."""
        weight, bias = self.weights[0]
        both = split.run_linear(self.x, weight, bias, cpu_rows, "eager", self.cpu_dtype)
        wide = [np.array(a.astype(mx.float32)) for a in (both, split.stock_linear(self.x, weight, bias))]
        return relative_error(*wide)


def _parameters(
    shape: Shape, module: nn.Module, made_up: mx.Dtype | None
) -> tuple[mx.array, mx.array | None]:
    if made_up is None:
        return module["weight"], module.get("bias")
    scale = shape.inputs**-0.5
    weight = (mx.random.normal((shape.outputs, shape.inputs)) * scale).astype(shape.dtype)
    return weight, mx.zeros((shape.outputs,), shape.dtype) if shape.bias else None


# --- the search


def cpu_dtypes(setting: str, dtype: mx.Dtype) -> list[str]:
    """What the CPU part may compute in: both where both are safe.

    On macOS half-precision products have been seen to crash in the CPU's library, so `auto` is float32 only.
    """
    first = split.resolve_cpu_dtype(setting, dtype)
    if setting == "auto" and dtype in split.HALF_TYPES and sys.platform != "darwin":
        return ["native", "float32"]
    return [first]


def search_site(
    shape: Shape,
    rows: int,
    *,
    seconds: float,
    boundary: float,
    most: float | None = None,
    cpu_dtype: str = "auto",
    grid: Sequence[float] | None = None,
    made_up: mx.Dtype | None = None,
) -> Outcome:
    """The best share of one site within `seconds`, over all CPU types that are safe.

    Where that is too little to finish even one search, it may take up to `most`: one site that is known is
    worth more than several that were begun.

    What could not be finished counts only if it was measured to be faster than stock. A split that computes
    something else is passed over for the next best.
    """
    started, found, left_out = time.perf_counter(), [], None
    charge = boundary * shape.boundaries / len(shape.layers)
    names = cpu_dtypes(cpu_dtype, shape.dtype)
    for number, name in enumerate(names, 1):
        deadline = started + seconds * number / len(names)
        if time.perf_counter() >= deadline:
            left_out = left_out or "out of time before anything was timed"
            continue
        bench = Bench(shape, rows, name, made_up)
        each = bench.seconds(STOCK)  # the first touch of anything never counts
        if number == 1:
            deadline = max(deadline, started + min(most or seconds, FEW_SAMPLES * each))
        search = _search(rows, charge, grid, _repeats(deadline - time.perf_counter(), each))
        finished = _drive(search, bench, deadline)
        choice = search.result() if finished else search.stop_early()
        if choice.ratio > 0 or (finished and choice.seconds is not None):
            found.append((choice, name, bench))
        if not finished or choice.seconds is None:
            left_out = choice.reason if finished else f"out of time after {choice.samples} samples"
    spent, wrong = time.perf_counter() - started, None
    for choice, name, bench in sorted(found, key=lambda item: item[0].seconds or 0.0):
        outcome = _verified(shape.site(rows), choice, name, bench, spent, left_out)
        if outcome.choice is not None:
            return outcome
        wrong = wrong or outcome
    return wrong or Outcome(shape.site(rows), rows, None, names[0], spent, None, left_out)


def _repeats(seconds: float, each: float) -> int:
    """Samples of each ratio: as many as there is time for, within reason."""
    affordable = int(seconds / (each * len(PAPER_GRID) * 2))
    return min(max(affordable, REPEATS[0]), REPEATS[1])


def _search(rows: int, charge: float, grid: Sequence[float] | None, repeats: int) -> RatioSearch:
    return RatioSearch(
        rows=rows,
        repeats=repeats,
        max_ratio=split.max_ratio(),
        grid=grid,
        boundary_seconds=charge,
        multiple=split.row_multiple(rows),
    )


def _drive(search: RatioSearch, bench: Bench, deadline: float) -> bool:
    """Answer the search's questions until it is done (True) or there is no time for the next."""
    while (probe := search.next()) is not None:
        expected = search.expected_seconds(probe) or 0.0
        if time.perf_counter() + expected > deadline:
            return False
        search.tell(probe, bench.seconds(probe))
    return True


def _verified(
    site: Site, choice: Choice, cpu_dtype: str, bench: Bench, seconds: float, left_out: str | None
) -> Outcome:
    """The outcome, if the chosen split computes what stock does."""
    if choice.ratio == 0:
        return Outcome(site, bench.rows, choice, cpu_dtype, seconds, None, left_out)
    error = bench.error(split.cpu_rows(bench.rows, choice.ratio))
    allowed = TOLERANCE[site.dtype]
    if not error <= allowed:
        wrong = f"the split differs from stock by {error:.2g}, more than {allowed:.2g}: not used"
        return Outcome(site, bench.rows, None, cpu_dtype, seconds, error, wrong)
    return Outcome(site, bench.rows, choice, cpu_dtype, seconds, error, left_out)


def calibrate(
    model: nn.Module,
    *,
    rows: Sequence[int] = DEFAULT_ROWS,
    budget: float = 60.0,
    table: RatioTable | None = None,
    cpu_dtype: str = "auto",
    grid: Sequence[float] | None = None,
    made_up: mx.Dtype | None = None,
    progress: Callable[[str, float, float], None] = lambda what, spent, budget: None,
) -> list[Outcome]:
    """Measure every site of `model` and put what was found into `table`.

    The budget goes where the model spends its own time: the shapes with the most arithmetic first, each with
    its share of what is left. Sites whose samples were unsteady are searched a second time. What is finished
    is saved at once, so an interruption keeps it.

    Args:
        model: an MLX-LM model.
        rows: rows of the calls to measure, each at least 16.
        budget: seconds in all.
        table: what to fill and save; None only measures.
        cpu_dtype: the setting of that name.
        grid: candidate ratios instead of the search's own, to repeat the paper.
        made_up: use made-up weights of this type instead of the model's own.
        progress: told (site, seconds spent, budget).

    Raises:
        ValueError: rows below 16, or a budget that is not positive.
        NothingToCalibrateError: no layer may split.
        OSError: the table cannot be written, which is found before anything is measured.
    """
    check_options(rows, budget)
    started = time.perf_counter()
    jobs = sorted(
        ((shape, n) for shape in shapes(model, made_up) for n in set(rows)), key=_work, reverse=True
    )
    if table is not None:
        table.save()
    boundary = boundary_seconds()
    outcomes: dict[tuple[Site, int], Outcome] = {}
    for last in (started + budget * FIRST_PASS, started + budget):
        left = sum(_work(job) for job in jobs)
        for job in jobs:
            key, now = (job[0].site(job[1]), job[1]), time.perf_counter()
            # What earlier ones did not use is shared among those that are left.
            allowance = (last - now) * _work(job) / left
            left -= _work(job)
            if not _worth_it(outcomes.get(key), allowance):
                continue
            progress(key[0].key(), now - started, budget)
            outcome = search_site(
                *job,
                seconds=allowance,
                boundary=boundary,
                most=started + budget - now,
                cpu_dtype=cpu_dtype,
                grid=grid,
                made_up=made_up,
            )
            outcomes[key] = _truer(outcomes.get(key), outcome)
            _keep(table, outcomes[key])
    progress("done", time.perf_counter() - started, budget)
    patching.session().forget_plans()  # what is patched already decides again, with what was found
    return list(outcomes.values())


def _worth_it(before: Outcome | None, seconds: float) -> bool:
    """Whether to search a site: the first time, and again if its samples were unsteady and there is time."""
    if before is None:
        return True
    choice = before.choice
    return choice is not None and (choice.spread or 0.0) > STEADY and seconds >= before.seconds


def _truer(before: Outcome | None, now: Outcome) -> Outcome:
    """The outcome whose split was faster: what disturbs a machine comes in runs, and only ever slows."""
    if before is None or before.choice is None:
        return now
    if now.choice is None or (now.choice.seconds or 0.0) >= (before.choice.seconds or 0.0):
        return before
    return now


def _keep(table: RatioTable | None, outcome: Outcome) -> None:
    if table is not None and outcome.choice is not None:
        table.put(outcome.site, entry_of(outcome.choice, outcome.rows, outcome.cpu_dtype))
        table.save()


def check_options(rows: Sequence[int], budget: float) -> None:
    """Refuse what cannot be measured.

    Raises:
        ValueError: names the option, the value and what is allowed.
    """
    for n in rows:
        if n < LEAST_ROWS:
            raise ValueError(f"rows={n} is below {LEAST_ROWS}, fewer than can be split")
    if not 0 < budget < float("inf"):
        raise ValueError(f"budget={budget} is not a positive number of seconds")


def _work(job: tuple[Shape, int]) -> int:
    return job[0].work * job[1]


def why_not() -> list[str]:
    """Reasons not to measure now, a phrase each: battery, low power, short memory, a busy machine."""
    reasons = machine.why_not_measurable(None)
    now = pressure.read()
    if now.short:
        reasons.append(f"memory pressure is {now.level}")
    others = machine.OtherLoad()
    time.sleep(LISTEN_SECONDS)
    if others.share() > BUSY:
        reasons.append(f"other programs use {others.share():.0%} of the CPU, more than {BUSY:.0%}")
    return reasons


# --- telling


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain data; an error that is no number is None, which JSON can hold."""
    error = outcome.error if outcome.error is not None and math.isfinite(outcome.error) else None
    return {**asdict(outcome), "site": outcome.site.key(), "error": error}


def render(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table for people."""
    head = f"{'site':54}{'CPU share':>10}{'in':>9}{'gain':>7}{'stock':>11}{'split':>11}  why"
    return "\n".join([head, *map(_line, outcomes)])


def _line(outcome: Outcome) -> str:
    choice = outcome.choice
    if choice is None:
        return f"{outcome.site.key():54}{'-':>10}{'':38}  left out: {outcome.left_out}"
    why = choice.reason if outcome.left_out is None else f"{choice.reason} ({outcome.left_out})"
    return (
        f"{outcome.site.key():54}{choice.ratio:>10.2f}{outcome.cpu_dtype:>9}{choice.gain:>7.0%}"
        f"{_milliseconds(choice.stock_seconds):>11}{_milliseconds(choice.seconds):>11}  {why}"
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def render_table(table: RatioTable) -> str:
    """What a table holds for this machine as it is now."""
    lines = [f"{table.path}: {len(table)} sites" + (f"; {table.ignored}" if table.ignored else "")]
    for site, entry in table.entries().items():
        spread = "unknown" if entry.spread is None else f"{entry.spread:.1%}"
        lines.append(
            f"{site.key():54} CPU share {entry.ratio:.2f} in {entry.cpu_dtype}, gain {entry.gain:.0%}, "
            f"{entry.samples} samples, spread {spread}, on {entry.power or 'unknown power'}, {entry.when}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["calibrate", *sys.argv[1:]]))
