"""What an experiment is, with what options it runs, and which ones there are."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Cell = dict[str, Any]
"""One cell's parameters or its result: plain data that JSON can hold."""

QUICK_SHARE = 10
BLOCK_FLOP = 3.6e12
"""One Llama-3-8B block at 8192 rows."""
LEAST_SAMPLES, SMALL_SAMPLES = 3, 10
PROCESSES, LEAST_EACH = 5, 3
"""Processes that share the samples of a cell, and the fewest samples for which one is worth its start."""

NAMES = {
    name: f"benchmarks.{name}"
    for name in (
        *("mechanism", "block", "depth", "ttft", "decode", "gate", "overhead", "serve"),
        *("linears", "calibration", "quantized", "experts", "kinds", "agreement"),
        *("training", "ane", "threeway", "cholesky", "sustained", "pressure"),
    )
}
"""The module of each experiment, in the order in which `all` runs them."""


@dataclass(frozen=True)
class Options:
    """How an experiment is to run; JSON-able, and handed to the process of every cell.

    `scale` divides the paper's sizes and is at least 1 when an experiment sees it. `samples` and `warm_ups`
    are those of one arm in one cell, measured by so many `processes`; an experiment sees its process's part.
    `first` is how many of a cell's samples earlier processes took, `shared` a folder of the cell, the same
    for each of them. `extra` holds the experiment's own flags by name.
    """

    quick: bool = False
    scale: int = 1
    force: bool = False
    samples: int = 50
    warm_ups: int = 10
    processes: int = 1
    first: int = 0
    shared: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """An experiment without flags of its own."""


def available() -> str | None:
    """An experiment that runs everywhere."""
    return None


def nothing(parameters: Cell, result: Cell) -> Cell:
    """An experiment that concludes nothing beyond the ratios."""
    return {}


@dataclass(frozen=True)
class Experiment:
    """One figure or table.

    Attributes:
        name: what `python -m benchmarks` calls it.
        title: one line.
        paper: the section and figure.
        cells: from the options to the parameters of each cell by its name, in order; computes nothing. The
            parameter `environ`, if there is one, is set in the environment of the cell's process.
        measure: one cell, in its own process: from parameters and options to what `arms.measure` or
            `arms.summarise` returns, with `figures` and `trace` where there is more to tell; `transcripts`, a
            list of dicts, go into a file of their own beside the result.
        memory: bytes that a cell with these parameters needs at once.
        samples: of each arm in one cell, and how many to throw away before them (Section 5.1).
        flop: floating-point operations of the largest thing that is timed many times, at the paper's size:
            by them `--scale 0` chooses.
        arguments: adds flags of its own; none of them may be required.
        unavailable: why this machine cannot run it at all.
        processes: that share the samples of a cell.
        whole: each of them takes all samples instead: a cell is a story that cannot be cut.
        conclude: figures that follow from the arms and ratios of a whole cell, by its parameters and result.
    """

    name: str
    title: str
    paper: str
    cells: Callable[[Options], dict[str, Cell]]
    measure: Callable[[Cell, Options], Cell]
    memory: Callable[[Cell], int]
    samples: tuple[int, int] = (50, 10)
    flop: float = BLOCK_FLOP
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    unavailable: Callable[[], str | None] = available
    processes: int = PROCESSES
    whole: bool = False
    conclude: Callable[[Cell, Cell], Cell] = nothing


def load(name: str) -> Experiment:
    """The experiment of that name; only its own module is imported.

    Raises:
        ImportError: what it needs is not installed.
    """
    experiment: Experiment = importlib.import_module(NAMES[name]).EXPERIMENT
    return experiment


def counts(experiment: Experiment, quick: bool, samples: int | None, *, scaled: bool) -> tuple[int, int]:
    """Samples and warm-ups of each arm: the experiment's own, a tenth of them, or as asked for.

    Where sizes are divided, because the machine is small, two in five of them: it has the time for no more.
    """
    usual, warm_ups = experiment.samples
    if samples is None and quick:
        samples = max(LEAST_SAMPLES, usual // QUICK_SHARE)
    elif samples is None:
        samples = min(usual, max(SMALL_SAMPLES, usual * 2 // 5)) if scaled else usual
    return samples, min(warm_ups, max(1, round(samples * warm_ups / usual)))


def processes(experiment: Experiment, quick: bool, samples: int) -> int:
    """How many processes measure a cell of so many samples; a quick run starts one only."""
    if quick:
        return 1
    if experiment.whole:
        return experiment.processes
    return max(1, min(experiment.processes, samples // LEAST_EACH))
