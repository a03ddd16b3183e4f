"""An experiment run as the runner does, but with its cells in this process, where a test can reach them."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runner, schema
from benchmarks.experiment import Cell, Experiment, Options


def options(experiment: Experiment, *flags: str, quick: bool = True, samples: int = 3) -> Options:
    """Options as these flags of the experiment's own make them."""
    parser = argparse.ArgumentParser()
    experiment.arguments(parser)
    return Options(quick=quick, samples=samples, warm_ups=1, extra=vars(parser.parse_args(flags)))


def run(
    monkeypatch: pytest.MonkeyPatch, folder: Path, experiment: Experiment, given: Options, *only: str
) -> tuple[Path, dict[str, Cell]]:
    """The result's file, which is as the schema wants it, and its cells by name; `only` some of them."""

    def here(job: runner.Run, parameters: Cell, options: Options) -> dict[str, Any]:
        result = json.loads(json.dumps(experiment.measure(parameters, options), allow_nan=False))
        return {"result": result, "error": None}

    chosen = experiment.cells(given)
    monkeypatch.setattr(runner, "_in_a_process", here)
    monkeypatch.setattr(runner, "refusals", lambda needed: [])
    some = replace(experiment, cells=lambda _: {name: chosen[name] for name in only or chosen})
    file, _ = runner.run(runner.Run(some, given, [experiment.name], folder))
    document = schema.read(file)
    assert [cell["status"] for cell in document["cells"]] == ["done"] * len(document["cells"])
    return file, {cell["name"]: cell for cell in document["cells"]}


def transcripts(file: Path) -> list[dict[str, Any]]:
    """What was asked and answered, from the file beside a result."""
    beside = file.with_name(f"{file.stem}-transcripts.jsonl")
    return [json.loads(line) for line in beside.read_text(encoding="utf-8").splitlines()]
