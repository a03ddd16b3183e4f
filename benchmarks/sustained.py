"""A split product for minutes: what becomes of its speedup when the machine gets warm (Section 6, Thermal).

The split runs without a pause. Now and then comes a look, one call of stock and one of the split, in
alternating order: stock, too, is timed on a machine that is as warm as the split has made it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import psutil

from benchmarks import arms, library, overtime, pair_model
from benchmarks.arms import Arm
from benchmarks.experiment import Cell, Experiment, Options
from benchmarks.overtime import Look
from benchmarks.shares import add_ratio, share
from fusionml import machine, split
from fusionml.calibrate import TOLERANCE
from fusionml.machine import attempt
from fusionml.pair_model import sentence

ROWS, INPUTS, OUTPUTS = 2048, 4096, 14336
LEAST = 256
MINUTES, QUICK_MINUTES = 5.0, 0.5
LOOK_SECONDS = 1.0
THERMAL_SECONDS = 5.0
"""Between two readings of the heat, each of which starts a process."""


def cells(options: Options) -> dict[str, Cell]:
    minutes = options.extra.get("minutes") or (QUICK_MINUTES if options.quick else MINUTES)
    rows, inputs, outputs = (max(LEAST, n // options.scale) for n in (ROWS, INPUTS, OUTPUTS))
    dtype = library.dtype_name(options)
    name = f"{rows} x {inputs} x {outputs}, {minutes:g} minutes"
    sizes = {"rows": rows, "inputs": inputs, "outputs": outputs, "dtype": dtype}
    return {name: {**sizes, "minutes": minutes, "ratio": options.extra.get("ratio")}}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, help="how long the load lasts (default: 5, quick: 0.5)")
    parser.add_argument("--dtype", choices=library.DTYPES, help="default: float16, float32 without a GPU")
    add_ratio(parser)


def memory(parameters: Cell) -> int:
    rows, inputs, outputs = (parameters[name] for name in ("rows", "inputs", "outputs"))
    return 4 * (rows * inputs + inputs * outputs + 4 * rows * outputs)


def measure(parameters: Cell, options: Options) -> Cell:
    """The whole run."""
    dtype = getattr(mx, parameters["dtype"])
    x = mx.random.normal((parameters["rows"], parameters["inputs"]), key=mx.random.key(0)).astype(dtype)
    weight = mx.random.normal((parameters["outputs"], parameters["inputs"])).astype(dtype)
    ratio = share(parameters, dtype)
    told = pair_model.beside(x, weight)
    ways = {
        "stock": Arm(lambda: split.stock_linear(x, weight, None)),
        "split": Arm(lambda: split.split_linear(x, weight, ratio=ratio)),
    }
    checked = arms.verify(ways, "stock", TOLERANCE[parameters["dtype"]])["split"]
    if checked.refused is not None:
        raise ArithmeticError(f"split: {checked.refused}")
    looks = watch(ways["stock"], ways["split"], 60 * parameters["minutes"])
    samples = {"stock": [look.stock for look in looks], "split": [look.split for look in looks]}
    result = arms.summarise(samples, errors={"split": checked.error})
    result["figures"] = {**summary(looks), "ratio": ratio, "pair": told, "pair model": sentence(told)}
    result["trace"] = [vars(look) for look in looks]
    return result


def watch(
    stock: Arm, split: Arm, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[Look]:
    """Keep `split` running for so many seconds, with a look a second."""
    looks: list[Look] = []
    start = due = heat_due = clock()
    thermal: str | None = None
    while clock() < start + seconds or not looks:
        if clock() < due:
            arms.seconds(split)
            continue
        if clock() >= heat_due:
            thermal, heat_due = machine.thermal_state(), clock() + THERMAL_SECONDS
        at, turn = clock() - start, [("stock", stock), ("split", split)]
        taken = {name: arms.seconds(arm) for name, arm in (turn if len(looks) % 2 == 0 else turn[::-1])}
        looks.append(Look(at, taken["stock"], taken["split"], thermal, _clock_mhz()))
        due = clock() + LOOK_SECONDS
    return looks


def summary(looks: list[Look]) -> dict[str, Any]:
    """Burst against sustained, cold against hot; figures for people first."""
    first, last = overtime.part(overtime.burst(looks)), overtime.part(overtime.sustained(looks))
    return {
        "burst speedup": first["speedup"]["value"],
        "sustained speedup": last["speedup"]["value"],
        "hot at the end": last["hot"] if last["thermal"] else None,
        "burst": first,
        "sustained": last,
        **overtime.by_state(looks),
    }


def _clock_mhz() -> float | None:
    """Of the CPU, where the system tells it as it is now; on Apple silicon it does not."""
    found = attempt(psutil.cpu_freq)
    return found.current if found and found.current and found.current != found.max else None


EXPERIMENT = Experiment(
    name="sustained",
    title="A split product for minutes, burst against sustained",
    paper="Section 6, Thermal envelope",
    cells=cells,
    measure=measure,
    memory=memory,
    flop=2.0 * ROWS * INPUTS * OUTPUTS,
    arguments=arguments,
    processes=1,
)
