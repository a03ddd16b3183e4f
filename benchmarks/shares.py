"""The CPU share of an experiment that forces a split."""

from __future__ import annotations

import argparse

import mlx.core as mx

from benchmarks.experiment import Cell
from benchmarks.library import PAPER_RATIO
from fusionml import machine, split
from fusionml.ratios import default_ratio
from fusionml.settings import check_ratio


def add_ratio(parser: argparse.ArgumentParser) -> None:
    """The flag for it."""
    parser.add_argument("--ratio", type=_ratio, help="CPU share (default: the machine's built-in)")


def _ratio(text: str) -> float:
    try:
        return check_ratio(float(text), split.max_ratio(), "--ratio")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def share(cell: Cell, dtype: mx.Dtype) -> float:
    """What the cell was told, else the machine's built-in share; the paper's where that would be none."""
    if cell["ratio"] is not None:
        return float(cell["ratio"])
    widened = split.resolve_cpu_dtype("auto", dtype) == "float32"
    return default_ratio(machine.backend(), widened=widened) or PAPER_RATIO
