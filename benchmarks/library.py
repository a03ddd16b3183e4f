"""Arms that go through the library itself: `fusionml.patched`, with a fixed or a calibrated CPU share."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import fusionml
from benchmarks.arms import Arm
from benchmarks.experiment import Options
from fusionml import calibrate, machine
from fusionml.ratios import default_ratio
from fusionml.session import open_table

PAPER_RATIO = 0.30
"""What the paper ran end to end, untuned (Section 5.4)."""
DTYPES = ("float16", "bfloat16", "float32")
CALLS_TO_CALIBRATE, LEAST_SECONDS = 100, 2.0


def add_dtype(parser: argparse.ArgumentParser, cpu_dtype: str = "auto") -> None:
    """The flags of an experiment with weights of its own; `cpu_dtype` is the default."""
    parser.add_argument(
        "--dtype", choices=DTYPES, default=None, help="default: float16, float32 without a GPU"
    )
    parser.add_argument(
        "--cpu-dtype",
        choices=("auto", "native", "float32"),
        default=cpu_dtype,
        help=f"what the CPU rows are computed in; the paper's is native (default: {cpu_dtype})",
    )


def dtype_name(options: Options) -> str:
    """The type that was asked for, else the paper's; the CPU backend's own is float32."""
    return options.extra.get("dtype") or ("float32" if machine.backend() == "cpu" else "float16")


def know(model: nn.Module) -> None:
    """Have a model of our own split from now on while patched, and nothing patched until then."""
    fusionml.patch(model)
    fusionml.unpatch()


def split_arm(call: Callable[[], Any], **settings: Any) -> Arm:
    """The call while patched, without a gate: what is timed is the split, not what a gate makes of it."""
    return Arm(call, lambda: fusionml.patched(gate="off", **settings))


def split_arms(call: Callable[[], Any], table: str | None, **settings: Any) -> dict[str, Arm]:
    """The call with the paper's fixed share, the built-in default where it is another, and calibrated."""
    backend, arms = machine.backend(), {}
    arms[f"fixed {PAPER_RATIO:.2f}"] = split_arm(call, ratio=PAPER_RATIO, **settings)
    usual = default_ratio(backend)
    if usual not in (0.0, PAPER_RATIO):
        arms[f"fixed {usual:.2f}"] = split_arm(call, ratio=usual, **settings)
    if table is not None:
        arms["calibrated"] = split_arm(call, table=table, **settings)
    return arms


def calibrated(
    model: nn.Module,
    rows: Sequence[int],
    seconds: float,
    cpu_dtype: str = "auto",
    shared: str | None = None,
) -> tuple[str, dict[str, Any]]:
    """Measure a model's sites into a table of its own, or take the one that an earlier process measured.

    Args:
        model: of MLX-LM.
        rows: of the calls, each at least 16.
        seconds: in all.
        cpu_dtype: the setting of that name.
        shared: folder for the table; None makes one that is gone with this process.

    Returns:
        The table's path, and by site its ratio, gain and CPU type: nothing where it was measured before.
    """
    path = str(Path(shared or _own_folder()) / "calibrated.json")
    table = open_table(path)
    if len(table):
        return path, {}
    outcomes = calibrate.calibrate(model, rows=rows, budget=seconds, table=table, cpu_dtype=cpu_dtype)
    return path, {outcome.site.key(): _found(outcome) for outcome in outcomes}


def _own_folder() -> str:
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    return folder.name


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _found(outcome: calibrate.Outcome) -> dict[str, Any]:
    found = outcome.found
    if found is None:
        return {"ratio": None, "gain": None, "cpu_dtype": None, "left_out": outcome.left_out}
    choice = found.choice
    return {
        "ratio": choice.ratio,
        "gain": choice.gain,
        "composed": choice.composed,
        "arm": found.arm,
        "form": found.way.form,
        "cpu_dtype": found.way.cpu_dtype,
        "left_out": outcome.left_out,
    }


def calibration_seconds(call: Callable[[], mx.array], options: Options) -> float:
    """What calibrating may take: the time of a hundred calls, a tenth of them in a quick run."""
    mx.eval(call())
    start = time.perf_counter()
    mx.eval(call())
    calls = CALLS_TO_CALIBRATE / (10 if options.quick else 1)
    return max(LEAST_SECONDS, calls * (time.perf_counter() - start))
