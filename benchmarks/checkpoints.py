"""The model that an experiment runs: a checkpoint of the user's, or the small one made on the spot."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.experiment import Cell
from benchmarks.leash import leashed
from fusionml.settings import Settings

SHORTEST = 32
"""Tokens of a prompt that is worth splitting at all."""
OVERHEAD = 1.2
"""Memory that a model needs at once, over its weights: caches, and what a chunk of the prompt computes."""
DEMO_BYTES = 2**24


def add_model(parser: argparse.ArgumentParser, default: str = "a small one made on the spot") -> None:
    """`--model`, refused at once where it is a folder that is not there."""
    parser.add_argument("--model", type=_model, help=f"folder or hub id (default: {default})")


def _model(text: str) -> str:
    folder = Path(text).expanduser()
    if (text.startswith((".", "/", "~")) or text.count("/") > 1) and not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}: there is no such folder")
    return str(folder) if folder.is_dir() else text


def at_least(least: int) -> Callable[[str], int]:
    """A flag's type: a whole number of at least `least`."""

    def whole_number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


def min_rows(length: int) -> int:
    """The setting of that name for prompts of `length` tokens: the default, or less where it forbids all."""
    return min(Settings.min_rows, length // 2)


def name(model: str | None) -> str:
    """What a result calls the model."""
    return "demo" if model is None else Path(model).resolve().name


def needed_bytes(model: str | None) -> int:
    """Memory that the model needs, as far as its folder tells; 0 for one that is not on disk yet."""
    if model is None:
        return DEMO_BYTES
    weights = Path(model).expanduser().glob("*.safetensors")
    return int(OVERHEAD * sum(file.stat().st_size for file in weights))


def memory(cell: Cell) -> int:
    """`needed_bytes` of a cell's `model`."""
    return needed_bytes(cell["model"])


def calibrate(model: str | None, rows: Iterable[int], budget: float, table: Path) -> dict[str, Any]:
    """Measure the model's ratios into `table`, in a process of its own: nothing of it is left in ours.

    Args:
        model: folder or hub id; None is the small model.
        rows: of the calls to measure.
        budget: seconds.
        table: the file to make.

    Returns:
        The `budget` and, by the key of each `site`, its `ratio`, `gain` and `cpu_dtype`; None where nothing
        was found out.

    Raises:
        RuntimeError: it could not; the message is the command's own last line.
    """
    command = [sys.executable, "-m", "fusionml", "calibrate", "--table", str(table), "--json", "--force"]
    command += ["--budget", str(budget), "--rows", *map(str, rows)]
    command += [] if model is None else ["--model", model]
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as answered:
        with leashed(command, stdout=answered, stderr=said) as process:
            code = process.wait()
        said.seek(0)
        answered.seek(0)
        if code:
            raise RuntimeError((said.read().strip().splitlines() or [f"exit status {code}"])[-1])
        sites = json.load(answered)["sites"]
    return {"budget": budget, "sites": {site["site"]: _found(site) for site in sites}}


def _found(site: dict[str, Any]) -> dict[str, Any] | None:
    choice = site["choice"]
    if choice is None:
        return None
    return {"ratio": choice["ratio"], "gain": choice["gain"], "cpu_dtype": site["cpu_dtype"]}
