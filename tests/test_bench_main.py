"""`python -m benchmarks`: flags, exit codes, and what `all` makes of an experiment that cannot run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import __main__ as command
from benchmarks import experiment, runner, scale, schema, table
from benchmarks.experiment import Experiment, Options
from fusionml import pressure

Fixture = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def toy(monkeypatch: Fixture) -> None:
    """The toy is all there is; `pressure` says that it cannot run here and `serve` is not installed."""
    monkeypatch.setattr(
        experiment, "NAMES", {"overhead": "toys", "pressure": "toys", "serve": "no_such_module"}
    )
    monkeypatch.setattr(runner, "NAMES", {"overhead": "toys"})
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading(free_bytes=10**9))
    monkeypatch.setattr(runner, "BUSY", 1.0)
    only_fine = replace(toys.EXPERIMENT, arguments=add_kinds)
    monkeypatch.setattr(toys, "EXPERIMENT", only_fine)
    elsewhere = replace(only_fine, name="pressure", unavailable=lambda: "it needs a Mac")

    def load(name: str) -> Experiment:
        if name == "serve":
            raise ImportError("No module named 'no_such_module'")
        return elsewhere if name == "pressure" else only_fine

    monkeypatch.setattr(experiment, "load", load)


def add_kinds(parser: Any) -> None:
    parser.add_argument("--kinds", nargs="+", default=["fine"])


def test_one_experiment(tmp_path: Path, capsys: Capture) -> None:
    arguments = ["overhead", "--quick", "--scale", "4", "--results", str(tmp_path / "out")]
    assert command.main(arguments) == 0
    (file,) = (tmp_path / "out").glob("*/*.json")
    document = schema.read(file)
    assert document["command"] == "python -m benchmarks overhead --quick --scale 4 --results out"
    assert document["options"]["scale"] == 4
    assert document["options"]["samples"] == 3
    assert document["options"]["extra"] == {"kinds": ["fine"]}
    assert document["warnings"] == ["the paper's sizes divided by 4, as asked for"]
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == str(file)
    assert out[0] == "A toy (Section 0)"
    assert any(line.strip().startswith("other") and "x [" in line for line in out)


def test_a_failed_cell_is_exit_1(tmp_path: Path, capsys: Capture) -> None:
    assert command.main(["overhead", "--quick", "--kinds", "error", "fine", "--results", str(tmp_path)]) == 1
    assert "error: failed: and the file" in capsys.readouterr().out


def test_a_cell_whose_second_process_fails_is_exit_1_and_keeps_the_first(
    tmp_path: Path, capsys: Capture
) -> None:
    flags = ["--samples", "6", "--scale", "1", "--cool-down", "0", "--results", str(tmp_path)]
    assert command.main(["overhead", *flags, "--kinds", "once"]) == 1
    out = capsys.readouterr().out
    assert "warning: once: process 2 of 2: its process was ended by SIGSEGV" in out
    assert "x [" in out
    assert command.main(["overhead", *flags, "--kinds", "fine"]) == 0


def test_all_runs_what_can_run_and_says_of_the_others_why(tmp_path: Path, capsys: Capture) -> None:
    assert command.main(["all", "--quick", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        "--- overhead",
        "--- pressure",
        "--- serve",
    ]
    assert "pressure: cannot run here: it needs a Mac\n" in err
    assert "serve: cannot run here: No module named 'no_such_module'\n" in err
    assert len(list(tmp_path.glob("*/*.json"))) == 1


def test_all_goes_on_after_a_failure(monkeypatch: Fixture, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "_one", lambda name, rest: {"overhead": 1, "pressure": 2, "serve": 0}[name])
    assert command.main(["all"]) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "NAME"),
        (["fast"], "'fast'"),
        (["overhead", "--scale", "-1"], "'-1' is not a whole number of at least 0"),
        (["overhead", "--samples", "0"], "'0' is not a whole number of at least 1"),
        (["all", "--kinds", "fine"], "--kinds"),
    ],
)
def test_wrong_use(arguments: list[str], words: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_what_cannot_run_here_is_exit_2(capsys: Capture) -> None:
    assert command.main(["pressure"]) == 2
    assert "it needs a Mac" in capsys.readouterr().err
    assert command.main(["serve"]) == 2


def test_a_refused_run_is_exit_2_and_says_how_to_force_it(
    monkeypatch: Fixture, tmp_path: Path, capsys: Capture
) -> None:
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading("warning", free_bytes=10**9))
    assert command.main(["overhead", "--quick", "--results", str(tmp_path)]) == 2
    assert "refused: memory pressure is warning (--force runs it" in capsys.readouterr().err
    assert command.main(["overhead", "--quick", "--force", "--results", str(tmp_path)]) == 0
    (file,) = tmp_path.glob("*/*.json")
    assert json.loads(file.read_text())["forced"] == ["memory pressure is warning"]


def test_an_interrupted_run_says_so(monkeypatch: Fixture, capsys: Capture) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run", interrupted)
    assert command.main(["overhead", "--scale", "1"]) == 130
    assert "what was finished is kept" in capsys.readouterr().err


def test_help_names_every_experiment_and_imports_none() -> None:
    code = (
        "import sys\nfrom benchmarks.__main__ import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\nprint('loaded', 'mlx_lm' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=runner.ROOT
    )
    assert "mechanism, block, depth" in done.stdout
    assert done.stdout.endswith("loaded False\n")


# --- samples and scale


@pytest.mark.parametrize(
    ("usual", "quick", "asked", "scaled", "found"),
    [
        ((50, 10), False, None, False, (50, 10)),
        ((50, 10), False, None, True, (20, 4)),
        ((10, 3), False, None, True, (10, 3)),
        ((6, 1), False, None, True, (6, 1)),
        ((50, 10), True, None, True, (5, 1)),
        ((10, 3), True, None, False, (3, 1)),
        ((50, 10), False, 30, True, (30, 6)),
        ((50, 10), True, 1, False, (1, 1)),
        ((150, 0), False, None, False, (150, 0)),
    ],
)
def test_counts(
    usual: tuple[int, int], quick: bool, asked: int | None, scaled: bool, found: tuple[int, int]
) -> None:
    made = replace(toys.EXPERIMENT, samples=usual)
    assert experiment.counts(made, quick, asked, scaled=scaled) == found


@pytest.mark.parametrize(
    ("most", "quick", "samples", "found"),
    [
        *((5, False, 50, 5), (5, False, 20, 5), (5, False, 10, 3), (5, False, 6, 2), (5, False, 2, 1)),
        *((5, True, 50, 1), (1, False, 50, 1)),
    ],
)
def test_samples_are_shared_by_processes(most: int, quick: bool, samples: int, found: int) -> None:
    made = replace(toys.EXPERIMENT, processes=most)
    assert experiment.processes(made, quick, samples) == found
    assert experiment.processes(replace(made, whole=True), quick, samples) == (1 if quick else most)


def test_fewer_samples_than_the_papers_are_said(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(scale, "gflops", lambda: 6.0)
    usual = replace(toys.EXPERIMENT, samples=(50, 10))
    made, notes = command.options(usual, command.parse(usual, []))
    assert (made.samples, made.warm_ups) == (20, 4)
    assert notes[1] == "20 samples of each arm instead of 50: the machine is small"
    assert len(command.options(usual, command.parse(usual, ["--samples", "20"]))[1]) == 1


def test_machines_of_the_papers_kind_are_not_scaled() -> None:
    assert scale.choose(2600.0, experiment.BLOCK_FLOP, quick=False) == 1
    assert scale.choose(720.0, 100 * experiment.BLOCK_FLOP, quick=False) == 1


@given(st.floats(0.5, 700), st.floats(1e9, 1e13), st.booleans())
def test_a_smaller_machine_is_scaled_just_enough(rate: float, flop: float, quick: bool) -> None:
    factor = scale.choose(rate, flop, quick)
    aim = scale.QUICK_SECONDS if quick else scale.SMALL_SECONDS
    seconds = flop / (rate * 1e9)
    assert seconds / factor**3 <= aim
    assert factor == 1 or seconds / (factor / 2) ** 3 > aim
    assert scale.choose(rate, flop, True) >= scale.choose(rate, flop, False)


def test_the_rate_is_measured_and_said(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(scale, "gflops", lambda: 6.0)
    args = command.parse(toys.EXPERIMENT, [])
    made, notes = command.options(toys.EXPERIMENT, args)
    assert made == Options(scale=16, samples=4, warm_ups=1, processes=1, extra={"kinds": ["fine"]})
    assert notes == ["the paper's sizes divided by 16: its slower unit computes 6.0 GFLOP/s"]


def test_the_rate_is_positive() -> None:
    assert 0.1 < scale.gflops() < 1e6


@pytest.mark.parametrize(
    ("value", "text"), [(2.0, "2 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"), (3e-9, "3 ns")]
)
def test_times_for_people(value: float, text: str) -> None:
    assert table.seconds(value) == text
