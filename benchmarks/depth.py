"""Many decoder blocks against one: whether the gain survives depth (Section 5.3, Figure 4)."""

from __future__ import annotations

import argparse

from benchmarks import block, library
from benchmarks.experiment import Cell, Experiment, Options

GEOMETRY = "Llama-3-8B"
ROWS = (2048, 4096, 8192)
QUICK_ROWS = (2048,)
BLOCKS, SMALL_BLOCKS, QUICK_BLOCKS = 32, 8, 4
"""The paper's depth, and what a machine on which sizes are divided has time for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    library.add_dtype(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="the paper's: 2048 4096 8192, then scaled")
    parser.add_argument("--blocks", type=int, help="default: 32, 8 where sizes are divided, 4 in a quick run")


def cells(options: Options) -> dict[str, Cell]:
    """For each number of rows one block and many, with the same weights' widths and the same samples."""
    rows = options.extra.get("rows") or (QUICK_ROWS if options.quick else ROWS)
    usual = QUICK_BLOCKS if options.quick else BLOCKS if options.scale == 1 else SMALL_BLOCKS
    deep = options.extra.get("blocks") or usual
    return {
        f"{n} rows, {count} block{'s' if count > 1 else ''}": block.parameters(options, GEOMETRY, n, count)
        for n in rows
        for count in (1, deep)
    }


EXPERIMENT = Experiment(
    name="depth",
    title="Many decoder blocks against one",
    paper="Section 5.3, Figure 4",
    cells=cells,
    measure=block.measure,
    memory=block.memory,
    samples=(10, 3),
    arguments=add_arguments,
    conclude=block.conclude,
)
