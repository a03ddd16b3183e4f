"""What lies in a folder of results, as plain objects: anything missing or of the wrong kind is simply absent.

A result may come from another machine, another version or a killed run, so nothing here trusts its shape: a
report that shows what is there beats one that fails over what is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VERSION = 1
REFERENCE = ("paper.json", "notes.json")
"""Files of a results folder that no run wrote."""


@dataclass(frozen=True)
class Interval:
    """A speedup: the median of the pairs' ratios with its 95 % interval."""

    value: float
    low: float | None = None
    high: float | None = None
    pairs: int | None = None


@dataclass(frozen=True)
class Arm:
    """Seconds a run; `count` samples stand behind the median."""

    median: float | None
    count: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cell:
    """One cell of one run; see `schema.json`."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    status: str = "done"
    error: str | None = None
    baseline: str | None = None
    arms: dict[str, Arm] = field(default_factory=dict)
    ratios: dict[str, Interval] = field(default_factory=dict)
    aa: Interval | None = None
    errors: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    trace: list[dict[str, Any]] = field(default_factory=list)
    processes: int = 1

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def speedups(self) -> dict[str, Interval]:
        """The ratios of arms that compute what the baseline computes.

        An arm whose result was not compared does another work, a part of it: its ratio would mislead.
        """
        return {arm: ratio for arm, ratio in self.ratios.items() if not self.errors or arm in self.errors}

    @property
    def warnings(self) -> list[str]:
        """Every arm's, with the arm named."""
        return [f"{name}: {warning}" for name, arm in self.arms.items() for warning in arm.warnings]


@dataclass(frozen=True)
class Run:
    """One JSON of one experiment; `file` is relative to the results folder."""

    file: str
    experiment: str
    title: str
    paper: str
    when: str
    command: str
    options: dict[str, Any]
    forced: tuple[str, ...]
    start: dict[str, Any]
    end: dict[str, Any] | None
    planned: tuple[str, ...]
    cells: tuple[Cell, ...]
    warnings: tuple[str, ...]

    @property
    def quick(self) -> bool:
        return self.options.get("quick") is True

    @property
    def processes(self) -> int:
        """That were to share the samples of each cell."""
        return int(number(self.options.get("processes")) or 1)

    @property
    def missing(self) -> list[str]:
        """Planned cells that neither finished nor failed: the run was ended before them."""
        there = {cell.name for cell in self.cells}
        return [name for name in self.planned if name not in there]

    @property
    def failed(self) -> list[Cell]:
        return [cell for cell in self.cells if not cell.done]

    @property
    def backend(self) -> str | None:
        return text(self.start.get("backend"))

    @property
    def machine(self) -> str:
        """For people; runs with another math library count as another machine."""
        return _machine(self.start) or self.file.rpartition("/")[0] or "an unnamed machine"


@dataclass(frozen=True)
class OtherFile:
    """A file that is no result of this version: why, and the speedups it holds by where they stand in it."""

    file: str
    why: str
    ratios: dict[str, Interval] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """A folder of results: runs oldest first, then the rest by name."""

    runs: list[Run]
    others: list[OtherFile]
    notes: dict[str, Any] = field(default_factory=dict)


def read(folder: Path) -> Results:
    """Everything in `folder` and the folders in it; an empty or missing folder holds nothing."""
    runs, others = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        if name in REFERENCE or path.name.startswith("."):  # a dot: a run is writing it at this moment
            continue
        found = read_file(path, name)
        if isinstance(found, Run):
            runs.append(found)
        elif found is not None:
            others.append(found)
    notes = read_json(folder / "notes.json") if (folder / "notes.json").is_file() else {}
    return Results(sorted(runs, key=lambda run: (run.when, run.file)), others, as_dict(notes))


def read_file(path: Path, name: str) -> Run | OtherFile | None:
    """The run in one file, or why there is none; None for a file that belongs to a run (transcripts)."""
    data = read_json(path)
    if isinstance(data, str):
        return OtherFile(name, data)
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("cells"), list)
        or not text(data.get("experiment"))
    ):
        return OtherFile(name, "another shape", dict(ratios_within(data)))
    if data.get("version") != VERSION:
        return OtherFile(name, f"another version of the format than {VERSION}")
    return run(data, name)


def read_json(path: Path) -> Any:
    """What the file holds, or in words why it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"unreadable: {type(error).__name__}"


def run(data: dict[str, Any], file: str) -> Run:
    """A run from the JSON of one."""
    environment, end = as_dict(data.get("environment")), None
    if isinstance(environment.get("end"), dict):
        end = environment["end"]
    return Run(
        file=file,
        experiment=str(data["experiment"]),
        title=text(data.get("title")) or "",
        paper=text(data.get("paper")) or "",
        when=text(data.get("when")) or "",
        command=text(data.get("command")) or "",
        options=as_dict(data.get("options")),
        forced=texts(data.get("forced")),
        start=as_dict(environment.get("start")),
        end=end,
        planned=texts(data.get("planned")),
        cells=tuple(_cell(cell) for cell in data["cells"] if isinstance(cell, dict)),
        warnings=texts(data.get("warnings")),
    )


def _cell(data: dict[str, Any]) -> Cell:
    errors = {name: number(value) for name, value in as_dict(data.get("errors")).items()}
    trace = data.get("trace")
    return Cell(
        name=text(data.get("name")) or "unnamed",
        parameters=as_dict(data.get("parameters")),
        status=text(data.get("status")) or "unknown",
        error=text(data.get("error")),
        baseline=text(data.get("baseline")),
        arms={name: _arm(arm) for name, arm in as_dict(data.get("arms")).items() if isinstance(arm, dict)},
        ratios=dict(_intervals(data.get("ratios"))),
        aa=interval(data.get("aa")),
        errors={name: value for name, value in errors.items() if value is not None},
        figures=as_dict(data.get("figures")),
        trace=[entry for entry in trace if isinstance(entry, dict)] if isinstance(trace, list) else [],
        processes=len(shared) if isinstance(shared := data.get("processes"), list) and shared else 1,
    )


def _arm(data: dict[str, Any]) -> Arm:
    samples = data.get("samples")
    count = len(samples) if isinstance(samples, list) else 0
    return Arm(number(data.get("median")), count, texts(data.get("warnings")))


def _intervals(data: Any) -> Iterator[tuple[str, Interval]]:
    for name, value in as_dict(data).items():
        found = interval(value)
        if found is not None:
            yield name, found


def interval(data: Any) -> Interval | None:
    """A speedup from `{"value", "low", "high", "pairs"}`."""
    value = number(as_dict(data).get("value"))
    if value is None:
        return None
    pairs = data.get("pairs")
    low, high = number(data.get("low")), number(data.get("high"))
    return Interval(value, low, high, pairs if isinstance(pairs, int) else None)


def ratios_within(data: Any, where: str = "", depth: int = 6) -> Iterator[tuple[str, Interval]]:
    """Every speedup anywhere in `data`, by its path; a speedup is told from other figures by its pairs."""
    if depth == 0:
        return
    found = interval(data)
    if found is not None and found.pairs is not None:
        yield where, found
        return
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(data, dict):
        inside = data.items()
    elif isinstance(data, list):
        inside = enumerate(data[:100], 1)
    for key, value in inside:
        yield from ratios_within(value, f"{where} {key}".strip(), depth - 1)


def _machine(stamp: dict[str, Any]) -> str | None:
    chip, gpu, backend = (text(stamp.get(key)) for key in ("chip", "gpu", "backend"))
    name = gpu if backend == "cuda" and gpu else chip
    if not name:
        return None
    parts = [name]
    cores, memory = number(stamp.get("cores")), number(stamp.get("memory_bytes"))
    if backend == "metal" and memory:
        parts.append(f"{memory / 2**30:.0f} GB")
    elif backend != "cuda" and cores:
        parts.append(f"{cores:.0f} cores")
    library = math_library(stamp)
    return (
        ", ".join(parts)
        + (f", MLX {backend_name(backend)}" if backend else "")
        + (f", {library}" if library else "")
    )


def backend_name(backend: str) -> str:
    """MLX's backends as they are written."""
    return {"metal": "Metal", "cuda": "CUDA", "cpu": "CPU"}.get(backend, backend)


def math_library(stamp: dict[str, Any]) -> str | None:
    """The variables that steer the arithmetic, as one phrase; a preloaded library by its file's name."""
    variables = as_dict(stamp.get("environment"))
    shown = [f"{name}={str(value).rpartition('/')[2]}" for name, value in sorted(variables.items())]
    return " ".join(shown) or None


# --- anything to what it should be


def as_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def texts(value: Any) -> tuple[str, ...]:
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None
