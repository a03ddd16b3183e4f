"""Runs the cells of an experiment, each in a fresh process, and keeps what is done in one JSON.

The file is whole at every moment: it is replaced after each cell, so that a run which is killed loses only
the cell that was under way.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.experiment import NAMES, Cell, Experiment, Options
from fusionml import machine, pressure
from fusionml.session import BUSY
from fusionml.settings import names, variable

VERSION = 1
ROOT = Path(__file__).parent.parent
CELL_SECONDS, QUICK_CELL_SECONDS = 3600.0, 300.0
"""Longest that one cell may take: one that hangs must not cost the others."""
EMPTY: Cell = {"baseline": None, "arms": {}, "ratios": {}, "aa": None, "errors": {}, "figures": {}}
COOL = (None, "nominal")

Document = dict[str, Any]
Progress = Callable[[str, int, int], None]


class RefusedError(Exception):
    """Nothing was measured; the message says why, with figures."""


@dataclass(frozen=True)
class Run:
    """What is to be run, and where its file goes.

    `command` is what the user typed; `notes` are the first of the file's warnings; `cool_down` is the rest in
    seconds between two cells.
    """

    experiment: Experiment
    options: Options
    command: Sequence[str]
    results: Path
    notes: tuple[str, ...] = ()
    cool_down: float = 0.0


# --- the run


def run(job: Run, progress: Progress = lambda what, done, planned: None) -> tuple[Path, Document]:
    """Measure every cell of an experiment.

    Args:
        job: see `Run`.
        progress: told (cell, cells done, cells planned) before each.

    Returns:
        The file, and what it holds.

    Raises:
        RefusedError: the machine cannot run it now, and `force` was not given. No file is made.
    """
    cells = job.experiment.cells(job.options)
    needed = {name: job.experiment.memory(parameters) for name, parameters in cells.items()}
    reasons = refusals(min(needed.values()))
    if reasons and not job.options.force:
        raise RefusedError("; ".join(reasons))
    document = _begin(job, list(cells), reasons)
    file = _new_file(job.results, document)
    for number, (name, parameters) in enumerate(cells.items()):
        progress(name, number, len(cells))
        if number:
            time.sleep(job.cool_down)
        cell = _run_cell(job, name, parameters, needed[name], document)
        document["warnings"] += _disturbed(cell)
        document["cells"].append(cell)
        write(file, document)
    progress("done", len(cells), len(cells))
    document["environment"]["end"] = machine.stamp()
    write(file, document)
    return file, document


def refusals(needed_bytes: int) -> list[str]:
    """Why nothing of that size should be measured now, a phrase each."""
    now = pressure.read()
    reasons = machine.why_not_measurable(needed_bytes, {**machine.conditions(), "free_bytes": now.free_bytes})
    return [*reasons, f"memory pressure is {now.level}"] if now.short else reasons


def _begin(job: Run, planned: list[str], forced: list[str]) -> Document:
    experiment = job.experiment
    return {
        "version": VERSION,
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m benchmarks", *job.command]),
        "options": asdict(job.options),
        "forced": forced,
        "environment": {"start": machine.stamp(), "end": None},
        "planned": planned,
        "cells": [],
        "warnings": list(job.notes),
    }


def _run_cell(job: Run, name: str, parameters: Cell, needed: int, document: Document) -> Cell:
    """One cell, as the document keeps it."""
    before, started = machine.conditions(), time.perf_counter()
    refused = refusals(needed)
    if refused and job.options.force:
        document["forced"] += [reason for reason in refused if reason not in document["forced"]]
    if refused and not job.options.force:
        answer: dict[str, Any] = {"result": None, "error": f"refused: {'; '.join(refused)}"}
    else:
        answer = _in_a_process(job, parameters)
    result = answer["result"]
    return {
        "name": name,
        "parameters": parameters,
        "status": "failed" if result is None else "done",
        "error": answer["error"],
        "seconds": time.perf_counter() - started,
        "environment": {
            "start": before,
            "end": machine.conditions(),
            "others": answer.get("others"),
        },
        **({} if result is None else {**EMPTY, **result}),
    }


def _disturbed(cell: Cell) -> list[str]:
    """Warnings where the clock may have been throttled or other programs were in the way."""
    found = {cell["environment"][moment]["thermal"] for moment in ("start", "end")}
    hot, others = sorted(state for state in found if state not in COOL), cell["environment"]["others"]
    warnings = [f"{cell['name']}: the thermal state was {' and '.join(hot)}"] if hot else []
    if others is not None and others > BUSY:
        warnings.append(f"{cell['name']}: other programs used {others:.0%} of the CPU")
    return warnings


# --- one process


def _in_a_process(job: Run, parameters: Cell) -> dict[str, Any]:
    """`result` and `error` of one cell, whatever becomes of its process."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        request = {
            "module": NAMES[job.experiment.name],
            "parameters": parameters,
            "options": asdict(job.options),
            "answer": str(answer),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cell"],
            stdin=subprocess.PIPE,
            stdout=2,  # standard error: our own output is a table
            env=cell_environment(os.environ, scratch, parameters.get("environ", {})),
            text=True,
        )
        limit = QUICK_CELL_SECONDS if job.options.quick else CELL_SECONDS
        failure = _wait(process, json.dumps(request), limit)
        if failure is None and answer.exists():
            found: dict[str, Any] = json.loads(answer.read_text())
            return found
        return {"result": None, "error": failure or "its process ended without an answer"}


def cell_environment(environ: Mapping[str, str], scratch: str, more: Mapping[str, str]) -> dict[str, str]:
    """The environment of a cell: the user's, but what FusionML does is up to the experiment alone.

    The ratio table is an empty one of the cell's own: nothing that was learned before helps it, and nothing
    that it learns stays.
    """
    settings = {variable(name) for name in names()}
    kept = {name: value for name, value in environ.items() if name not in settings}
    found_in = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
    return {**kept, "PYTHONPATH": found_in, variable("table"): str(Path(scratch) / "ratios.json"), **more}


def _wait(process: subprocess.Popen[str], request: str, limit: float) -> str | None:
    """Why the process came to nothing within `limit` seconds; None where it ended as it should."""
    assert process.stdin is not None
    try:
        # Not communicate(): the pipe stays open until the cell has ended, which tells it that we live.
        process.stdin.write(request + "\n")
        process.stdin.flush()
        code = process.wait(limit)
    except BrokenPipeError:
        code = process.wait()
    except subprocess.TimeoutExpired:
        return f"it took more than {limit:.0f} s"
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
    if code < 0:
        return f"its process was ended by {signal.Signals(-code).name}"
    return f"its process ended with {code}" if code else None


# --- the file


def machine_name(stamp: Mapping[str, Any]) -> str:
    """The folder of a machine's results, e.g. `apple-m4-pro-14-cores-metal`."""
    chip, gpu = stamp["chip"] or "unknown-chip", stamp["gpu"] or ""
    parts = [chip, "" if gpu == chip or stamp["backend"] == "cpu" else gpu]
    text = f"{' '.join(parts)} {stamp['cores']} cores {stamp['backend']}"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", text.lower())).strip("-")


def _new_file(results: Path, document: Document) -> Path:
    """A file of its own for this run, with what is known at its start."""
    folder = results / machine_name(document["environment"]["start"])
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = f"{document['experiment']}-{document['when'][:10]}", 1
    while True:
        file = folder / (f"{stem}.json" if number == 1 else f"{stem}-{number}.json")
        try:
            file.open("x").close()
        except FileExistsError:
            number += 1
            continue
        write(file, document)
        return file


def write(file: Path, document: Document) -> None:
    """Replace the file by the document at once, without paths of this machine."""
    text = json.dumps(without_paths(document), indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}-")
    try:
        with open(handle, "w") as new:
            new.write(text)
            new.flush()
            os.fsync(new.fileno())
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise


_PATH = re.compile(r"(?<![\w:/.~-])~?(?:/[\w.+@~-]+)+/([\w.+@~-]+)")


def without_paths(value: Any) -> Any:
    """The value with every absolute path in its texts cut down to its last part: results are to be sent."""
    if isinstance(value, str):
        return _PATH.sub(r"\1", value)
    if isinstance(value, Mapping):
        return {without_paths(key): without_paths(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(item) for item in value]
    return value
