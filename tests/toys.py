"""An experiment whose cells do what their parameters say, for the tests of the runner."""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path

import mlx.core as mx

from benchmarks import arms
from benchmarks.experiment import Cell, Experiment, Options

KINDS = ("fine", "error", "nan", "crash", "wait", "environment", "folder", "once")


def cells(options: Options) -> dict[str, Cell]:
    found = {kind: {"kind": kind} for kind in options.extra.get("kinds", KINDS)}
    if "environment" in found:
        found["environment"]["environ"] = {"MLX_MAX_OPS_PER_BUFFER": "1"}
    return found


def measure(parameters: Cell, options: Options) -> Cell:
    kind = parameters["kind"]
    print("what a library prints")
    if kind == "error":
        raise RuntimeError("several lines\nand the file /home/somebody/model/weights.npz is not there")
    if kind == "nan":
        return {"figures": {"overlap": math.nan}}
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if kind == "wait":
        with open(options.extra["started"], "w") as file:
            file.write(str(os.getpid()))
        time.sleep(600)
    if kind == "environment":
        names = ("MLX_MAX_OPS_PER_BUFFER", "FUSIONML_GATE", "FUSIONML_TABLE")
        return {"figures": {name: os.environ.get(name) for name in names}}
    if kind == "folder":
        found = os.listdir(options.shared)
        Path(options.shared, "left").touch()
        return {"figures": {"found": found, "table": os.environ["FUSIONML_TABLE"]}}
    if kind == "once":
        try:
            Path(options.shared, "there").touch(exist_ok=False)
        except FileExistsError:
            os.kill(os.getpid(), signal.SIGSEGV)
    x = mx.ones((8, 8))
    return arms.measure({"stock": lambda: x @ x, "other": lambda: x @ x}, options, tolerance=1e-3)


def memory(parameters: Cell) -> int:
    return {"fine": 10**3}.get(parameters["kind"], 10**6)


def conclude(parameters: Cell, result: Cell) -> Cell:
    return {"concluded": result["ratios"]["other"]["pairs"]}


EXPERIMENT = Experiment(
    "overhead", "A toy", "Section 0", cells, measure, memory, samples=(4, 1), conclude=conclude
)
"""Under the name of a real one: names are fixed."""
