"""The runner of experiments: a cell that fails costs one cell, a run that is killed costs one cell."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st
from processes import ended

from benchmarks import cell, experiment, runner, schema
from benchmarks.experiment import Experiment, Options
from fusionml import machine, pressure

Fixture = pytest.MonkeyPatch
TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def toy(monkeypatch: Fixture) -> None:
    """`overhead` is the toy, here and in the cells' processes; the machine is calm."""
    monkeypatch.setitem(experiment.NAMES, "overhead", "toys")
    monkeypatch.setenv("PYTHONPATH", TESTS)
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading(free_bytes=10**9))
    monkeypatch.setattr(runner, "BUSY", 1.0)


def job(folder: Path, *kinds: str, made: Experiment = toys.EXPERIMENT, **extra: Any) -> runner.Run:
    options = Options(quick=True, samples=3, warm_ups=1, extra={"kinds": list(kinds), **extra})
    return runner.Run(made, options, ["overhead", "--quick"], folder)


# --- every cell for itself


def test_a_cell_that_fails_costs_one_cell(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    file, document = runner.run(job(tmp_path, "error", "crash", "nan", "fine"), lambda *now: told.append(now))
    assert json.loads(file.read_text()) == runner.without_paths(document)
    assert schema.problems(json.loads(file.read_text())) == []
    found = {c["name"]: (c["status"], c["error"]) for c in schema.read(file)["cells"]}
    assert found["error"] == ("failed", "and the file weights.npz is not there")
    assert found["crash"] == ("failed", "its process was ended by SIGSEGV")
    assert found["nan"][0] == "failed"
    assert "not JSON compliant" in found["nan"][1]
    assert found["fine"] == ("done", None)
    assert told == [("error", 0, 4), ("crash", 1, 4), ("nan", 2, 4), ("fine", 3, 4), ("done", 4, 4)]
    assert document["environment"]["end"] is not None
    fine = document["cells"][-1]
    assert [len(arm["samples"]) for arm in fine["arms"].values()] == [3, 3, 3]
    assert fine["errors"] == {"other": 0.0}


def test_a_cell_sees_its_own_environment_and_nothing_that_steers_fusionml(
    monkeypatch: Fixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSIONML_GATE", "lock")
    monkeypatch.setenv("FUSIONML_TABLE", "/somewhere/ratios.json")
    _, document = runner.run(job(tmp_path, "environment"))
    (found,) = document["cells"]
    assert found["figures"]["MLX_MAX_OPS_PER_BUFFER"] == "1"
    assert found["figures"]["FUSIONML_GATE"] is None
    assert found["figures"]["FUSIONML_TABLE"] not in (None, "/somewhere/ratios.json")
    assert found["arms"] == {}


def test_a_cell_that_hangs_is_ended(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "QUICK_CELL_SECONDS", 5.0)
    _, document = runner.run(job(tmp_path, "wait", started=str(tmp_path / "started")))
    assert document["cells"][0]["error"] == "it took more than 5 s"
    _gone(int((tmp_path / "started").read_text()))


def test_the_file_has_no_path_of_this_machine(tmp_path: Path) -> None:
    extra = {"model": str(tmp_path / "models" / "tiny"), "started": str(tmp_path / "started")}
    file, _ = runner.run(job(tmp_path, "error", **extra))
    assert str(tmp_path) not in file.read_text()
    assert json.loads(file.read_text())["options"]["extra"]["model"] == "tiny"


# --- killed in the middle

PROGRAM = """
import sys
from pathlib import Path
import toys
from benchmarks import experiment, runner
from benchmarks.experiment import Options
experiment.NAMES["overhead"] = "toys"
extra = {"kinds": ["fine", "wait", "error"], "started": sys.argv[2]}
options = Options(samples=3, warm_ups=1, extra=extra)
runner.run(runner.Run(toys.EXPERIMENT, options, ["overhead"], Path(sys.argv[1])))
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_run_that_is_killed_leaves_the_cells_that_were_done(tmp_path: Path, how: signal.Signals) -> None:
    started = tmp_path / "started"
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "results"), str(started)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([TESTS, str(runner.ROOT)])}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    _until(started.exists)
    _until(lambda: started.read_text() != "")
    process.send_signal(how)
    assert process.wait(30) != 0
    _gone(int(started.read_text()))
    (file,) = (tmp_path / "results").glob("*/*.json")
    document = schema.read(file)
    assert [c["name"] for c in document["cells"]] == ["fine"]
    assert document["planned"] == ["fine", "wait", "error"]
    assert document["environment"]["end"] is None


# --- several processes


def several(folder: Path, *kinds: str, **extra: Any) -> runner.Run:
    options = Options(samples=5, warm_ups=1, processes=2, extra={"kinds": list(kinds), **extra})
    return runner.Run(toys.EXPERIMENT, options, ["overhead"], folder)


def test_every_cell_has_its_first_process_before_one_has_its_second(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    job = several(tmp_path, "fine", "folder", "error")
    file, document = runner.run(job, lambda *now: told.append(now))
    assert [name for name, _, _ in told] == ["fine", "folder", "error"] * 2 + ["done"]
    assert {planned for _, _, planned in told} == {6}
    assert schema.problems(json.loads(file.read_text())) == []
    fine, folder, error = document["cells"]
    assert [len(arm["samples"]) for arm in fine["arms"].values()] == [5, 5, 5]
    assert [part["samples"] for part in fine["processes"]] == [3, 2]
    assert fine["seconds"] == sum(part["seconds"] for part in fine["processes"])
    assert fine["environment"]["start"] == fine["processes"][0]["environment"]["start"]
    assert fine["environment"]["end"] == fine["processes"][1]["environment"]["end"]
    assert fine["figures"]["concluded"] == 5
    assert (error["status"], "processes" in error) == ("failed", False)
    # One folder for a cell's processes, and a ratio table for each.
    first, second = (part["figures"] for part in folder["processes"])
    assert (first["found"], second["found"]) == ([], ["left"])
    assert first["table"] != second["table"]


def test_a_process_that_fails_leaves_what_others_measured(tmp_path: Path) -> None:
    _, document = runner.run(several(tmp_path, "once", "fine"))
    once, fine = document["cells"]
    assert (once["status"], once["error"]) == ("done", None)
    assert len(once["arms"]["stock"]["samples"]) == 3
    assert "processes" not in once
    assert document["warnings"] == ["once: process 2 of 2: its process was ended by SIGSEGV"]
    assert len(fine["processes"]) == 2
    assert schema.problems(document) == []


def test_a_conclusion_that_cannot_be_drawn_costs_one_cell(tmp_path: Path) -> None:
    def conclude(parameters: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        if parameters["kind"] == "once":
            raise ValueError("no sample of split")
        return {}

    job = replace(several(tmp_path, "once", "fine"), experiment=replace(toys.EXPERIMENT, conclude=conclude))
    _, document = runner.run(job)
    once, fine = document["cells"]
    assert (once["status"], once["error"]) == ("failed", "ValueError: no sample of split")
    assert (fine["status"], len(fine["processes"])) == ("done", 2)
    assert document["environment"]["end"] is not None
    assert schema.problems(document) == []


def test_a_run_killed_between_two_processes_keeps_the_first(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def progress(what: str, done: int, planned: int) -> None:
        if done == 3:
            raise Killed

    with pytest.raises(Killed):
        runner.run(several(tmp_path, "fine", "folder"), progress)
    (file,) = tmp_path.glob("*/*.json")
    fine, folder = schema.read(file)["cells"]
    assert len(fine["processes"]) == 2
    assert "processes" not in folder


def _until(done: Any) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.02)


def _gone(process: int) -> None:
    """Within some seconds: no cell outlives its runner."""
    _until(lambda: ended(process))


def test_the_file_is_whole_at_every_moment(monkeypatch: Fixture, tmp_path: Path) -> None:
    """A write that breaks off leaves the file as it was."""
    file, document = runner.run(job(tmp_path, "fine"))
    before = file.read_text()

    def broken(descriptor: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="no space"):
        runner.write(file, {**document, "title": "another"})
    assert file.read_text() == before
    assert list(file.parent.iterdir()) == [file]


def test_runs_of_one_day_have_files_of_their_own(tmp_path: Path) -> None:
    files = [runner.run(job(tmp_path, "error"))[0].name for _ in range(3)]
    day = files[0].removesuffix(".json")
    assert re.fullmatch(r"overhead-\d{4}-\d\d-\d\d", day)
    assert files == [f"{day}.json", f"{day}-2.json", f"{day}-3.json"]


# --- refusing


def test_a_machine_on_battery_is_refused_with_figures(monkeypatch: Fixture, tmp_path: Path) -> None:
    calm = machine.conditions()
    low = {**calm, "power_source": "battery", "battery_percent": 40.0, "low_power_mode": True}
    monkeypatch.setattr(machine, "conditions", lambda: low)
    with pytest.raises(runner.RefusedError, match=r"on battery \(40 %\); low-power mode is on"):
        runner.run(job(tmp_path, "fine"))
    assert list(tmp_path.iterdir()) == []
    forced = job(tmp_path, "fine")
    _, document = runner.run(replace(forced, options=replace(forced.options, force=True)))
    assert document["forced"] == ["on battery (40 %)", "low-power mode is on"]
    assert document["cells"][0]["status"] == "done"


def test_only_the_cells_that_do_not_fit_are_refused(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading(free_bytes=10**5))
    _, document = runner.run(job(tmp_path, "fine", "environment"))
    fine, other = document["cells"]
    assert fine["status"] == "done"
    assert other["status"] == "failed"
    assert other["error"] == "refused: it needs 0.0 GB of memory and 0.0 GB is free"
    assert document["forced"] == []
    with pytest.raises(runner.RefusedError, match="memory"):
        runner.run(job(tmp_path, "environment"))


def test_short_memory_is_refused(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading("critical", free_bytes=10**9))
    with pytest.raises(runner.RefusedError, match="memory pressure is critical"):
        runner.run(job(tmp_path, "fine"))


def test_heat_is_a_warning(monkeypatch: Fixture, tmp_path: Path) -> None:
    calm = machine.conditions()
    monkeypatch.setattr(machine, "conditions", lambda: {**calm, "thermal": "heavy"})
    _, document = runner.run(job(tmp_path, "error"))
    assert document["warnings"] == ["error: the thermal state was heavy"]


def test_other_programs_in_the_way_are_a_warning(monkeypatch: Fixture, tmp_path: Path) -> None:
    answers = iter([0.5, 0.1, None])
    monkeypatch.setattr(runner, "BUSY", 0.15)
    monkeypatch.setattr(
        runner, "_in_a_process", lambda *_: {"result": {}, "error": None, "others": next(answers)}
    )
    _, document = runner.run(job(tmp_path, "fine", "error", "nan"))
    assert document["warnings"] == ["fine: other programs used 50% of the CPU"]
    assert [c["environment"]["others"] for c in document["cells"]] == [0.5, 0.1, None]
    assert schema.problems(document) == []


# --- names and paths


@pytest.mark.parametrize(
    ("chip", "gpu", "cores", "backend", "name"),
    [
        ("AMD EPYC 7R13", None, 2, "cpu", "amd-epyc-7r13-2-cores-cpu"),
        ("Apple M4 Pro", "Apple M4 Pro", 14, "metal", "apple-m4-pro-14-cores-metal"),
        ("Intel(R) Xeon(R)", "NVIDIA H200", 16, "cuda", "intel-xeon-nvidia-h200-16-cores-cuda"),
        ("Intel(R) Xeon(R)", "NVIDIA H200", 16, "cpu", "intel-xeon-16-cores-cpu"),
        (None, None, 1, "cpu", "unknown-chip-1-cores-cpu"),
    ],
)
def test_the_folder_of_a_machine(chip: Any, gpu: Any, cores: int, backend: str, name: str) -> None:
    stamp = {"chip": chip, "gpu": gpu, "cores": cores, "backend": backend}
    assert runner.machine_name(stamp) == name


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("--model /Users/somebody/models/Qwen2.5-7B", "--model Qwen2.5-7B"),
        ("no such file: '/home/a/c'", "no such file: 'c'"),
        ("~/models/tiny is missing", "tiny is missing"),
        ("linear/bfloat16/576x1536/nobias/rows=512", "linear/bfloat16/576x1536/nobias/rows=512"),
        ("5 tok/s and 3/4", "5 tok/s and 3/4"),
        ("Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
    ],
)
def test_paths_are_cut_down_to_names(text: str, left: str) -> None:
    assert runner.without_paths({"a": [text]}) == {"a": [left]}


@given(st.text())
def test_text_without_a_slash_is_left_alone(text: str) -> None:
    assert runner.without_paths(text.replace("/", "")) == text.replace("/", "")


def test_the_last_line_of_an_error() -> None:
    assert cell.last_line(KeyError("x")) == "KeyError: 'x'"
    assert cell.last_line(ValueError("one\ntwo")) == "two"


# --- the schema


def test_the_schema_refuses_what_is_no_result(tmp_path: Path) -> None:
    _, document = runner.run(job(tmp_path, "fine"))
    assert schema.problems(document) == []
    fine = document["cells"][0]
    for broken in (
        {**document, "planned": []},
        {**document, "surprise": 1},
        {**document, "environment": {"start": None, "end": None}},
        {**document, "cells": [{**fine, "status": "failed"}]},
        {**document, "cells": [{**fine, "ratios": {"other": {"value": 1}}}]},
        {**document, "cells": [{key: value for key, value in fine.items() if key != "aa"}]},
        {**document, "cells": [{**fine, "arms": {"stock": {"samples": [], "median": None, "warnings": []}}}]},
    ):
        assert schema.problems(broken) != []


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is no JSON"):
        schema.read(file)
    file.write_text("{}")
    with pytest.raises(ValueError, match=r"a\.json: \(all\): '.*' is a required property"):
        schema.read(file)
