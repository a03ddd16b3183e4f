"""Runs the cells of an experiment, each in fresh processes, and keeps what is done in one JSON.

Where several processes share a cell's samples, every cell has had its first before one gets its second. The
file is whole at every moment: it is replaced after each process, so that a run which is killed loses only
what was under way.
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
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import processes
from benchmarks.cell import last_line
from benchmarks.experiment import NAMES, Cell, Experiment, Options
from fusionml import machine, pressure
from fusionml.session import BUSY
from fusionml.settings import names, variable

VERSION = 1
ROOT = Path(__file__).parent.parent
CELL_SECONDS, QUICK_CELL_SECONDS = 3600.0, 300.0
"""Longest that one process of a cell may take: one that hangs must not cost the others."""
EMPTY: Cell = {"baseline": None, "arms": {}, "ratios": {}, "aa": None, "errors": {}, "figures": {}}
COOL = (None, "nominal")
OF_A_PROCESS = ("first", "shared")
"""Options that only one process of a cell has."""

Document = dict[str, Any]
Progress = Callable[[str, int, int], None]


class RefusedError(Exception):
    """Nothing was measured; the message says why, with figures."""


@dataclass(frozen=True)
class Run:
    """What is to be run, and where its file goes.

    `command` is what the user typed; `notes` are the first of the file's warnings; `cool_down` is the rest in
    seconds for each cell, shared by its processes.
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
        progress: told (cell, processes done, processes planned) before each.

    Returns:
        The file, and what it holds.

    Raises:
        RefusedError: the machine cannot run it now, and `force` was not given. No file is made.
    """
    made = job.experiment.cells(job.options)
    cells = [_Taken(name, given, job.experiment.memory(given)) for name, given in made.items()]
    reasons = refusals(min(cell.needed for cell in cells))
    if reasons and not job.options.force:
        raise RefusedError("; ".join(reasons))
    document = _begin(job, list(made), reasons)
    file = _new_file(job.results, document)
    rest = job.cool_down / job.options.processes  # a cell rests as long whoever measures it
    turns = [
        (part, cell) for part in processes.shares(job.options, whole=job.experiment.whole) for cell in cells
    ]
    with tempfile.TemporaryDirectory() as scratch:
        for number, (part, cell) in enumerate(turns):
            progress(cell.name, number, len(turns))
            if cell.failure is not None:
                continue
            time.sleep(rest if number else 0)
            folder = Path(scratch) / str(cells.index(cell))
            folder.mkdir(exist_ok=True)
            _measure(job, cell, replace(part, shared=str(folder)), document, file)
    progress("done", len(turns), len(turns))
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
        "options": {name: value for name, value in asdict(job.options).items() if name not in OF_A_PROCESS},
        "forced": forced,
        "environment": {"start": machine.stamp(), "end": None},
        "planned": planned,
        "cells": [],
        "warnings": list(job.notes),
    }


# --- one cell


@dataclass(eq=False)
class _Taken:
    """A cell with what its processes answered so far; after a `failure` no further one is started."""

    name: str
    parameters: Cell
    needed: int
    answers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def failure(self) -> str | None:
        return self.answers[-1]["error"] if self.answers else None

    @property
    def results(self) -> list[Cell]:
        return [answer["result"] for answer in self.answers if answer["result"] is not None]


def _measure(job: Run, cell: _Taken, options: Options, document: Document, file: Path) -> None:
    """The next process of a cell, and what it brought into the document and its file."""
    answer = _answer(job, cell, options, document)
    cell.answers.append(answer)
    _keep((answer["result"] or {}).pop("transcripts", []), file)
    document["warnings"] += _disturbed(cell.name, answer["environment"])
    if answer["error"] is not None and cell.results:
        which = f"process {len(cell.answers)} of {job.options.processes}"
        document["warnings"].append(f"{cell.name}: {which}: {answer['error']}")
    told = _told(job, cell)
    names = [there["name"] for there in document["cells"]]
    if cell.name in names:
        document["cells"][names.index(cell.name)] = told
    else:
        document["cells"].append(told)
    write(file, document)


def _answer(job: Run, cell: _Taken, options: Options, document: Document) -> dict[str, Any]:
    """`result`, `error`, `seconds` and `environment` of one process."""
    before, started = machine.conditions(), time.perf_counter()
    refused = refusals(cell.needed)
    if refused and job.options.force:
        document["forced"] += [reason for reason in refused if reason not in document["forced"]]
    if refused and not job.options.force:
        answer: dict[str, Any] = {"result": None, "error": f"refused: {'; '.join(refused)}"}
    else:
        answer = _in_a_process(job, cell.parameters, options)
    return {
        "result": answer["result"],
        "error": answer["error"],
        "seconds": time.perf_counter() - started,
        "environment": {"start": before, "end": machine.conditions(), "others": answer.get("others")},
    }


def _told(job: Run, cell: _Taken) -> Cell:
    """The cell as the document keeps it: done as soon as one process was."""
    stamps, results = [answer["environment"] for answer in cell.answers], cell.results
    others = [stamp["others"] for stamp in stamps if stamp["others"] is not None]
    told: Cell = {
        "name": cell.name,
        "parameters": cell.parameters,
        "status": "done" if results else "failed",
        "error": None if results else cell.failure,
        "seconds": sum(answer["seconds"] for answer in cell.answers),
        "environment": {
            "start": stamps[0]["start"],
            "end": stamps[-1]["end"],
            "others": max(others, default=None),
        },
    }
    if not results:
        return told
    try:
        joined = {**EMPTY, **processes.join(job.experiment, cell.parameters, results)}
        json.dumps(joined, allow_nan=False)
    except Exception as error:
        # What its processes measured cannot be put together: it must not cost the other cells.
        return {**told, "status": "failed", "error": last_line(error)}
    for part, answer in zip(joined.get("processes", []), cell.answers, strict=False):
        part |= {"seconds": answer["seconds"], "environment": answer["environment"]}
    return {**told, **joined}


def _disturbed(name: str, environment: Cell) -> list[str]:
    """Warnings where the clock may have been throttled or other programs were in the way."""
    found = {environment[moment]["thermal"] for moment in ("start", "end")}
    hot, others = sorted(state for state in found if state not in COOL), environment["others"]
    warnings = [f"{name}: the thermal state was {' and '.join(hot)}"] if hot else []
    if others is not None and others > BUSY:
        warnings.append(f"{name}: other programs used {others:.0%} of the CPU")
    return warnings


# --- one process


def _in_a_process(job: Run, parameters: Cell, options: Options) -> dict[str, Any]:
    """`result` and `error` of one process, whatever becomes of it."""
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch) / "answer.json"
        request = {
            "module": NAMES[job.experiment.name],
            "parameters": parameters,
            "options": asdict(options),
            "answer": str(answer),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.cell"],
            stdin=subprocess.PIPE,
            stdout=2,  # standard error: our own output is a table
            env=cell_environment(os.environ, scratch, parameters.get("environ", {})),
            text=True,
        )
        limit = QUICK_CELL_SECONDS if options.quick else CELL_SECONDS
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


def _keep(transcripts: Sequence[Cell], file: Path) -> None:
    """Add what was asked and answered to a file beside the result: word for word, a line each."""
    if transcripts:
        beside = file.with_name(f"{file.stem}-transcripts.jsonl")
        with beside.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in transcripts)


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
