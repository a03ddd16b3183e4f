"""What one product costs on the Neural Engine: so much a call, so much a row, and its weights' error.

By regression over row counts, one CoreML program each (Section 6, Neural Engine).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import arms, coreml, regression
from benchmarks.experiment import Cell, Experiment, Options
from fusionml.measure import order, relative_error

INPUTS, OUTPUTS = 4096, 14336
ROWS = (64, 128, 256, 512, 1024, 2048)
QUICK_ROWS = (64, 256, 1024)
LINE_OFF = 0.15
"""A row count's deviation from the line beyond which the line is said not to hold."""


def cells(options: Options) -> dict[str, Cell]:
    inputs, outputs = (max(128, n // options.scale) for n in (INPUTS, OUTPUTS))
    rows = QUICK_ROWS if options.quick else ROWS
    return {f"{inputs} x {outputs}": {"inputs": inputs, "outputs": outputs, "rows": list(rows)}}


def memory(parameters: Cell) -> int:
    weight = 2 * parameters["inputs"] * parameters["outputs"]
    widest = max(parameters["rows"])
    # Each program has a copy of the weight.
    return weight * (2 + 2 * len(parameters["rows"])) + 4 * widest * (
        parameters["inputs"] + parameters["outputs"]
    )


def measure(parameters: Cell, options: Options) -> Cell:
    """One shape, on a Mac."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((parameters["outputs"], parameters["inputs"])).astype(np.float16)
    calls, errors, engines = {}, {}, []
    for rows in parameters["rows"]:
        x = generator.standard_normal((rows, parameters["inputs"])).astype(np.float16)
        program = coreml.build(weight, rows)
        errors[rows] = error(coreml.predict(program, x), x, weight)
        engines.append(coreml.on_the_neural_engine(program))
        calls[rows] = _call(program, x)
    return result(time_all(calls, options), errors, engines)


def _call(program: Any, x: coreml.Half) -> Callable[[], Any]:
    return lambda: coreml.predict(program, x)


def error(y: coreml.Half, x: coreml.Half, weight: coreml.Half) -> float:
    """The product's error against float32 arithmetic on the same numbers, relative to its largest value."""
    truth: NDArray[np.float32] = x.astype(np.float32) @ weight.astype(np.float32).T
    return relative_error(y, truth)


def time_all(calls: dict[int, Callable[[], Any]], options: Options) -> dict[int, list[float]]:
    """Seconds of each row count, in turns, after the warm-ups."""
    samples: dict[int, list[float]] = {rows: [] for rows in calls}
    names = {str(rows): rows for rows in calls}
    for turn, name in enumerate(order(list(names), options.warm_ups + options.samples)):
        start = time.perf_counter()
        calls[names[name]]()
        if turn >= options.warm_ups * len(names):
            samples[names[name]].append(time.perf_counter() - start)
    return samples


def result(samples: dict[int, list[float]], errors: dict[int, float], engines: Sequence[bool | None]) -> Cell:
    """The cell from what was measured; each row count is an arm, compared with the smallest."""
    line = regression.fit(samples)
    least = min(samples)
    cell = arms.summarise(
        {_name(rows): samples[rows] for rows in sorted(samples)},
        baseline=_name(least),
        errors={_name(rows): found for rows, found in errors.items()},
    )
    cell["figures"] = {
        "fixed ms": line.fixed * 1e3,
        "us a row": line.per_row * 1e6,
        "largest error": max(errors.values()),
        "on the Neural Engine": None if None in engines else all(engines),
        "a line fits": line.off <= LINE_OFF,
        "line": asdict(line),
    }
    return cell


def _name(rows: int) -> str:
    return f"{rows} rows"


EXPERIMENT = Experiment(
    name="ane",
    title="A product on the Neural Engine: fixed cost and cost a row",
    paper="Section 6, Neural Engine",
    cells=cells,
    measure=measure,
    memory=memory,
    flop=2.0 * ROWS[-1] * INPUTS * OUTPUTS,
    unavailable=coreml.unavailable,
    processes=1,
)
