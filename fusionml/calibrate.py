"""Measures each shape's best CPU share under contention and fills the ratio table (paper, Section 4).

`python -m fusionml.calibrate --model M`. What is timed is the real thing: `split` itself, on evaluated
inputs, with the model's own weights, against the layer as MLX computes it.
"""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import machine, patching, pressure, products, split
from .known import KnownModels, Layer
from .loading import first_line
from .measure import relative_error
from .plans import SPLIT, STOCK
from .products import Product
from .ratios import DEFAULT_ROWS, PAPER_GRID, Choice, RatioSearch, Site
from .search import Found, SiteSearch, Trial, Way
from .session import BUSY, entry_of, site_of
from .table import RatioTable
from .timing import boundary_seconds
from .tracing import observe

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
"""Largest error of an arm against stock, relative to the largest output (float16's is the paper's)."""


class NothingToCalibrateError(Exception):
    """The model has no layer that may split; the message says why, for each kind of layer."""


@dataclass
class Shape:
    """All layers of a model that share one decision but for their rows; see `known.Layer` for the words."""

    kind: str
    packed: str
    dtype: mx.Dtype
    inputs: int
    outputs: int
    bias: bool
    experts: int = 0
    top: int = 1
    layers: list[nn.Module] = field(default_factory=list)
    boundaries: float = 0.0
    """Boundaries that these layers cause: a layer that shares its input with others causes a part of one."""

    @property
    def work(self) -> int:
        """Multiply-adds for one token, all layers together."""
        return self.inputs * self.outputs * self.top * len(self.layers)

    def site(self, rows: int) -> Site:
        """The site that calls of `rows` tokens look up."""
        return site_of(self, self.dtype, rows)


@dataclass(frozen=True)
class Outcome:
    """What was found for one site; `left_out` says why nothing, or not everything, was."""

    site: Site
    rows: int
    found: Found | None
    seconds: float
    error: float | None = None
    left_out: str | None = None

    @property
    def choice(self) -> Choice | None:
        """What the search says of the arm that was found."""
        return None if self.found is None else self.found.choice


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
    seen = observe(model, [module for _, module in splitting])
    found: dict[tuple[Any, ...], Shape] = {}
    for layer, module in splitting:
        sharing, top = seen.get(id(module), (1, 1))
        own = dtype or _dtype(layer, module)
        geometry = (layer.inputs, layer.outputs, layer.bias, layer.experts, top)
        shape = Shape(layer.kind, layer.packed, own, *geometry)
        shape = found.setdefault((layer.kind, layer.packed, own, *geometry), shape)
        shape.layers.append(module)
        shape.boundaries += 1 / sharing
    if not found:
        raise NothingToCalibrateError(_why_nothing(layers))
    return sorted(found.values(), key=lambda shape: shape.work, reverse=True)


def _dtype(layer: Layer, module: nn.Module) -> mx.Dtype:
    """The type of a layer's product, its input being of the weight's own type."""
    if layer.packed:
        return mx.result_type(module["scales"], module["biases"])
    return module["weight"].dtype


def _why_nothing(layers: Iterable[Layer]) -> str:
    reasons: dict[str, int] = {}
    for layer in layers:
        text = f"{layer.kind} layers {layer.reason}"
        reasons[text] = reasons.get(text, 0) + 1
    return (
        "; ".join(f"{count} {text}" for text, count in sorted(reasons.items())) or "it has no linear layers"
    )


# --- timing


class Bench:
    """Times the trials of one shape at one number of rows.

    Args:
        shape: what is timed; its layers' weights are used in turn.
        tokens: tokens of the whole call, each of which makes `shape.top` rows.
        made_up: make weights of the shape instead of reading the layers'.
    """

    def __init__(self, shape: Shape, tokens: int, made_up: bool) -> None:
        self.rows = tokens * shape.top
        most = max(2, -(-CACHE_BYTES // _bytes(shape)))
        layers = shape.layers[:most]
        if made_up:
            layers = [_made_up(shape, layer) for layer in layers]
        x = mx.random.normal((self.rows, shape.inputs), key=mx.random.key(0)).astype(shape.dtype)
        indices = _routing(shape, tokens)
        x = x if indices is None else x[:, None]
        self.products = [products.of(shape.kind, layer, x, indices) for layer in layers]
        mx.eval([product.arrays for product in self.products])
        self._turn = 0

    def seconds(self, trial: Trial) -> float:
        """One sample of a trial."""
        self._turn += 1
        product = self.products[self._turn % len(self.products)]
        start = time.perf_counter()
        mx.eval(
            self._compute(product, trial.arm, trial.way, trial.probe.cpu_rows, trial.probe.kind == "solo")
        )
        return time.perf_counter() - start

    def _compute(self, product: Product, arm: str, way: Way | None, m: int, solo: bool) -> mx.array:
        if way is None:
            return product.stock() if arm == STOCK else product.dense("eager")
        if solo:
            return product.cpu_part(m, way.form, way.cpu_dtype)
        return product.split(m, way.form, "eager", way.cpu_dtype)

    def error(self, found: Found) -> tuple[float, float]:
        """Largest difference of an arm from what is right, relative to the largest value; and the largest
        that is allowed.

        Right is stock, but for quantised weights the product by the same weight in float32: there stock
        itself rounds more than any dense product, and an arm may be as wrong as stock is.
        """
        product = self.products[0]
        m = split.cpu_rows(self.rows, found.choice.ratio)
        out = self._compute(product, found.arm, found.way if found.arm == SPLIT else None, m, False)
        stock, exact = product.stock(), product.exact()
        allowed = TOLERANCE[split.dtype_name(product.dtype)]
        if exact is None:
            return _error(out, stock), allowed
        return _error(out, exact), max(allowed, _error(stock, exact))


def _error(out: mx.array, reference: mx.array) -> float:
    return relative_error(*(np.array(a.astype(mx.float32)) for a in (out, reference)))


def _bytes(shape: Shape) -> int:
    """Of one layer's weight, scales left out."""
    bits = int(shape.packed[1:].split("g")[0]) if shape.packed else 8 * shape.dtype.size
    return max(1, shape.inputs * shape.outputs * max(1, shape.experts) * bits // 8)


def _routing(shape: Shape, tokens: int) -> mx.array | None:
    """The expert of each row, sorted, as a router without preferences would choose."""
    if not shape.experts:
        return None
    order = np.random.default_rng(0).random((tokens, shape.experts)).argsort(axis=1)
    return mx.array(np.sort(order[:, : shape.top].reshape(-1)).astype(np.uint32))


def _made_up(shape: Shape, like: nn.Module) -> nn.Module:
    """A layer of the shape with random weights, quantised as `like` is."""
    if shape.experts:
        from mlx_lm.models.switch_layers import SwitchLinear

        layer = SwitchLinear(shape.inputs, shape.outputs, shape.experts, shape.bias)
    else:
        layer = nn.Linear(shape.inputs, shape.outputs, shape.bias)
    layer.set_dtype(shape.dtype)
    return layer.to_quantized(like.group_size, like.bits) if shape.packed else layer


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
    made_up: bool = False,
) -> Outcome:
    """The best arm of one site within `seconds`, over all forms, and all CPU types that are safe.

    Where that is too little to finish even one search, it may take up to `most`: one site that is known is
    worth more than several that were begun.

    What could not be finished counts only if it was measured to be faster than stock. An arm that computes
    something else is passed over for the next best.
    """
    started, site = time.perf_counter(), shape.site(rows)
    if seconds <= 0:
        return Outcome(site, rows, None, 0.0, None, "out of time before anything was timed")
    bench = Bench(shape, rows, made_up)
    try:
        each = bench.seconds(Trial(STOCK))  # the first touch of anything never counts
    except (RuntimeError, ValueError) as error:
        return Outcome(site, rows, None, 0.0, None, f"stock itself fails: {first_line(error)}")
    first = min(most or seconds, FEW_SAMPLES * each)
    search = _search(shape, bench.rows, boundary, grid, cpu_dtype, _repeats(max(seconds, first), each))
    left_out = _drive(search, bench, started, seconds, first)
    wrong = None
    for found in search.candidates():
        if found.arm == STOCK and (wrong or found.choice.seconds is None or not search.finished):
            left_out = left_out or found.choice.reason
            break
        outcome = _verified(site, rows, found, bench, time.perf_counter() - started, left_out)
        if outcome.found is not None:
            return outcome
        wrong = wrong or outcome
    return wrong or Outcome(site, rows, None, time.perf_counter() - started, None, left_out)


def _repeats(seconds: float, each: float) -> int:
    """Samples of each ratio: as many as there is time for, within reason."""
    affordable = int(seconds / (each * len(PAPER_GRID) * 2))
    return min(max(affordable, REPEATS[0]), REPEATS[1])


def _search(
    shape: Shape, rows: int, boundary: float, grid: Sequence[float] | None, cpu_dtype: str, repeats: int
) -> SiteSearch:
    forms = products.forms(shape.kind, bool(shape.packed), machine.backend())
    return SiteSearch(
        [Way(form, name) for form in forms for name in cpu_dtypes(cpu_dtype, shape.dtype)],
        dense=products.has_dense(shape.kind),
        boundary_seconds=boundary,
        waits=functools.partial(_waits, shape),
        make=lambda: RatioSearch(
            rows=rows,
            repeats=repeats,
            max_ratio=split.max_ratio(),
            grid=grid,
            multiple=split.row_multiple(rows),
        ),
    )


def _waits(shape: Shape, form: str | None) -> float:
    """Boundaries that one layer causes: those that share an input wait for it once, each for its result."""
    return shape.boundaries / len(shape.layers) + products.boundaries(shape.kind, form) - 1


def _drive(search: SiteSearch, bench: Bench, started: float, seconds: float, first: float) -> str | None:
    """Answer the search's questions; each way has its share of `seconds`, the first at least `first`.

    Returns:
        Why not everything was timed, None where all was.
    """
    left_out = None
    share = seconds / len(search.ways)
    while (trial := search.next()) is not None:
        deadline = started + max(share * (search.at + 1), 0.0 if search.at else first)
        expected = search.expected_seconds(trial) or 0.0
        if time.perf_counter() + expected <= deadline:
            left_out = _time(search, bench, trial) or left_out
        elif search.racing:
            search.end_race()
        else:
            samples = search.end_way().samples
            words = (
                f"out of time after {samples} samples" if samples else "out of time before anything was timed"
            )
            left_out = left_out or words
    return left_out


def _time(search: SiteSearch, bench: Bench, trial: Trial) -> str | None:
    """Tell the search what a trial took, or that it cannot be computed; why not."""
    try:
        search.tell(trial, bench.seconds(trial))
    except (RuntimeError, ValueError) as error:
        search.drop()
        return f"the {trial.arm} arm fails: {first_line(error)}"
    return None


def _verified(
    site: Site, rows: int, found: Found, bench: Bench, seconds: float, left_out: str | None
) -> Outcome:
    """The outcome, if the arm computes what it should."""
    if found.arm == STOCK:
        return Outcome(site, rows, found, seconds, None, left_out)
    error, allowed = bench.error(found)
    if not error <= allowed:
        wrong = f"the {found.arm} arm differs from stock by {error:.2g}, more than {allowed:.2g}: not used"
        return Outcome(site, rows, None, seconds, error, wrong)
    return Outcome(site, rows, found, seconds, error, left_out)


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
                made_up=made_up is not None,
            )
            outcomes[key] = _truer(outcomes.get(key), outcome)
            _keep(table, outcomes[key], job[0].top)
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


def _keep(table: RatioTable | None, outcome: Outcome, top: int) -> None:
    if table is not None and outcome.found is not None:
        table.put(outcome.site, entry_of(outcome.found, outcome.rows * top))
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
    found = outcome.found
    return {
        "site": outcome.site.key(),
        "rows": outcome.rows,
        "arm": None if found is None else found.arm,
        "form": None if found is None else found.way.form,
        "cpu_dtype": None if found is None else found.way.cpu_dtype,
        "choice": None if found is None else asdict(found.choice),
        "dense_seconds": None if found is None else found.dense_seconds,
        "seconds": outcome.seconds,
        "error": error,
        "left_out": outcome.left_out,
    }


def render(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table for people."""
    head = (
        f"{'site':58}{'arm':>6}{'CPU share':>10}{'form':>10}{'in':>9}{'gain':>7}{'stock':>11}{'arm':>11}  why"
    )
    return "\n".join([head, *map(_line, outcomes)])


def _line(outcome: Outcome) -> str:
    found = outcome.found
    if found is None:
        return f"{outcome.site.key():58}{'-':>6}{'-':>10}{'':48}  left out: {outcome.left_out}"
    choice, way = found.choice, found.way
    why = choice.reason if outcome.left_out is None else f"{choice.reason} ({outcome.left_out})"
    return (
        f"{outcome.site.key():58}{found.arm:>6}{choice.ratio:>10.2f}{way.form:>10}{way.cpu_dtype:>9}"
        f"{choice.gain:>7.0%}{_milliseconds(choice.stock_seconds):>11}"
        f"{_milliseconds(choice.seconds):>11}  {why}"
    )


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.2f} ms"


def render_table(table: RatioTable) -> str:
    """What a table holds for this machine as it is now."""
    lines = [f"{table.path}: {len(table)} sites" + (f"; {table.ignored}" if table.ignored else "")]
    for site, entry in table.entries().items():
        spread = "unknown" if entry.spread is None else f"{entry.spread:.1%}"
        lines.append(
            f"{site.key():58} {entry.arm}, CPU share {entry.ratio:.2f} in {entry.cpu_dtype} ({entry.form}), "
            f"gain {entry.gain:.0%}, "
            f"{entry.samples} samples, spread {spread}, on {entry.power or 'unknown power'}, {entry.when}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    from .cli import main

    sys.exit(main(["calibrate", *sys.argv[1:]]))
