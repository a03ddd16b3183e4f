"""Running short of memory: sizes, the real mechanism in small, and what is made of its times (simulated)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import psutil
import pytest

from benchmarks import __main__ as command
from benchmarks import confine, hog, modes, pressure
from benchmarks.experiment import Options
from benchmarks.modes import NAMES, Mode

MIB = 2**20
GB = 10**9
OPTIONS = Options(quick=True, samples=2, warm_ups=1)
STEADY, EVICTED = 1.0, 4.0


class Simulated:
    """Modes whose working sets hold one place: whoever is not in it is read back in."""

    def __init__(self, places: int = 1, **slower: float) -> None:
        self.places, self.resident = places, list[str]()
        self.ran: list[str] = []
        self.slower = {"split": 1.0, "compiled": 1.2, "eager": 1.3, **slower}

    def mode(self, name: str) -> Any:
        return SimpleNamespace(run=lambda: self.run(name))

    def run(self, name: str) -> float:
        seconds = self.slower[name] * (STEADY if name in self.resident else EVICTED)
        self.resident = [*(n for n in self.resident if n != name), name][-self.places :]
        self.ran.append(name)
        return seconds

    def modes(self) -> dict[str, Any]:
        return {name: self.mode(name) for name in NAMES}


# --- observing


def test_probes_read_too_slow_and_the_next_call_pays_where_one_set_fits() -> None:
    simulated = Simulated(places=1)
    seen = pressure.observe(simulated.modes(), "split", 3)
    assert {name: len(times) for name, times in seen["probes"].items()} == {"compiled": 3, "eager": 3}
    fresh = {name: [simulated.slower[name] * STEADY] * 3 for name in NAMES}
    told = pressure.readings(fresh, "split", seen)
    assert told["a probe reads too slow by"] == pytest.approx(EVICTED / STEADY)
    assert told["the next active call takes"] == pytest.approx(EVICTED / STEADY)
    assert told["fastest fresh"] == "split"


def test_nothing_is_too_slow_where_all_fit() -> None:
    simulated = Simulated(places=3)
    seen = pressure.observe(simulated.modes(), "split", 3)
    fresh = {name: [simulated.slower[name] * STEADY] for name in NAMES}
    told = pressure.readings(fresh, "split", seen)
    assert told["a probe reads too slow by"] == pytest.approx(1)
    assert told["the next active call takes"] == pytest.approx(1)


def test_a_probe_is_between_two_active_calls() -> None:
    simulated = Simulated()
    pressure.observe(simulated.modes(), "split", 1)
    assert simulated.ran[3:] == ["split", "compiled", "split", "split", "split", "eager", "split", "split"]


# --- the gate's policies


def test_each_policy_runs_and_the_fastest_alone_before_and_after() -> None:
    simulated = Simulated(places=1)
    found = pressure.policies(simulated.modes(), "split", 40, fits=False)
    assert list(found) == [pressure.ALONE, "auto", "periodic", "lock", "off"]
    assert [len(run["trace"]) for run in found.values()] == [40] * 5
    assert simulated.ran[:20] == simulated.ran[-20:] == ["split"] * 20
    assert found[pressure.ALONE]["trace"][5] == {
        "arm": "split",
        "timed": False,
        "learning": False,
        "seconds": STEADY,
    }


def test_probing_on_schedule_loses_where_one_set_fits_and_locking_does_not() -> None:
    """The paper's observer effect, on simulated modes and the real gate."""
    told = pressure.losses(pressure.policies(Simulated(places=1).modes(), "split", 400, fits=False))
    assert told["periodic loses after probation"] > 0.5
    assert abs(told["lock loses after probation"]) < 0.1
    assert abs(told["auto loses after probation"]) < 0.1
    roomy = pressure.losses(pressure.policies(Simulated(places=3).modes(), "split", 400, fits=True))
    assert abs(roomy["periodic loses after probation"]) < 0.1
    assert roomy["off loses"] == pytest.approx(0.3, abs=0.03), "it never leaves the baseline, 1.3x slower"
    assert told["gates"]["lock"]["arm"] == "split"


def test_a_loss_is_over_the_fastest_alone() -> None:
    def run(*seconds: float, learning: int = 0) -> dict[str, Any]:
        trace = [{"seconds": s, "learning": i < learning} for i, s in enumerate(seconds)]
        return {"trace": trace, "arm": "split", "probes": 0, "switches": 0}

    told = pressure.losses(
        {pressure.ALONE: run(1, 3), "lock": run(6, 2, 2, 2, learning=1), "auto": run(4, learning=1)}
    )
    assert told["lock loses"] == pytest.approx(0.5)
    assert told["lock loses after probation"] == pytest.approx(0)
    assert told["auto loses"] == pytest.approx(1)
    assert told["auto loses after probation"] is None


# --- modes


@pytest.mark.parametrize("name", NAMES)
def test_a_mode_reads_all_of_its_working_set(name: str, tmp_path: Path) -> None:
    file = tmp_path / "set"
    modes.write_file(file, 3 * MIB)
    assert file.stat().st_size == 3 * MIB
    assert Mode(name, 3 * MIB, file).run() > 0
    before = mx.get_active_memory()
    mode = Mode(name, 8 * MIB)
    assert mx.get_active_memory() - before >= 8 * MIB
    assert mode.run() > 0


def test_the_modes_compute_the_same_each_in_its_own_way() -> None:
    x, weight = mx.random.normal((64, 32)), mx.random.normal((48, 32))
    results = [product(x, weight) for product in modes.products().values()]
    assert set(modes.products()) == set(NAMES)
    assert all(mx.allclose(result, x @ weight.T, atol=1e-4) for result in results)


def test_a_fresh_process_measures_one_mode(tmp_path: Path) -> None:
    file = tmp_path / "set"
    modes.write_file(file, MIB)
    for where in (file, None):
        found = modes.fresh("eager", MIB, where, 2)
        assert len(found) == 2
        assert min(found) > 0


# --- sizes and refusals


def test_one_working_set_fits_and_two_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GB, total=16 * GB))
    for confined in (False, True):
        monkeypatch.setattr(confine, "available", lambda confined=confined: confined)
        room, pressed = pressure.cells(Options()).values()
        assert (room["pressed"], pressed["pressed"]) == (False, True)
        assert pressed["working_set"] < pressed["left"] < 2 * pressed["working_set"]
        assert pressed["confined"] is confined
        if confined:
            assert room["cap"] + room["left"] > 3 * room["working_set"] + 256 * MIB, (
                "room for all without the hog"
            )
            assert pressure.memory(pressed) == pressed["cap"] + pressed["left"]
        else:
            assert hog.why_not(pressed["cap"], 12 * GB, 16 * GB) is None
            assert pressure.memory(pressed) == pressed["cap"] + hog.reserve(16 * GB)
            assert pressure.memory(pressed) <= 12 * GB


@pytest.mark.parametrize(
    ("cap", "words"),
    [
        ("30", r"a hog of 30.00 GB does not fit: 12.00 GB is free and 1.61 GB must stay free"),
        ("1", "a hog of 1.00 GB leaves 11.00 GB, which is not short"),
        ("much", "'much' is not a number of GB"),
        ("1e400", "'1e400' is not a number of GB"),
        ("0", "smaller than"),
    ],
)
def test_a_cap_that_does_not_fit_is_refused_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cap: str, words: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GB, total=16 * GB))
    with pytest.raises(SystemExit) as stopped:
        command.main(["pressure", "--cap", cap, "--force", "--results", str(tmp_path)])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_cap_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=12 * GB, total=16 * GB))
    cap = pressure._gigabytes("8.5")
    pressed = pressure.cells(Options(extra={"cap": cap}))["pressed"]
    assert (pressed["cap"], pressed["left"], pressed["confined"]) == (8.5 * GB, 3.5 * GB, False)


def test_a_cell_never_starts_a_hog_that_does_not_fit(tmp_path: Path) -> None:
    free = psutil.virtual_memory().available
    parameters = {
        "cap": free,
        "left": MIB,
        "working_set": MIB,
        "confined": False,
        "calls": 2,
        "pressed": True,
    }
    with pytest.raises(ValueError, match="does not fit"):
        pressure.measure(parameters, OPTIONS)


# --- the whole thing, in small


@pytest.mark.parametrize("pressed", [False, True])
def test_a_cell_is_plain_data(pressed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a limit: a hog of 128 MB makes no machine short, but everything runs."""
    parameters = {
        "cap": 128 * MIB,
        "left": GB,
        "working_set": MIB,
        "confined": False,
        "calls": 3,
        "pressed": pressed,
    }
    held: list[int] = []
    check = hog.Hog.check
    monkeypatch.setattr(hog.Hog, "check", lambda self: (held.append(self.held_bytes), check(self))[1])
    cell = pressure.measure(parameters, OPTIONS)
    assert json.loads(json.dumps(cell, allow_nan=False)) == cell
    assert all(size <= 128 * MIB for size in held)
    assert bool(held) is pressed
    assert len(cell["arms"][pressure.NEXT]["samples"]) == len(cell["arms"][pressure.ACTIVE]["samples"]) == 4
    assert len(cell["trace"]) == 4 * 3 + 2
    assert cell["figures"]["fastest fresh"] in NAMES
    assert not psutil.Process().children()


needs_groups = pytest.mark.skipif(
    not (sys.platform == "linux" and confine.available()), reason="no memory control group can be made here"
)


@needs_groups
def test_a_limit_holds_for_this_program_and_its_children_and_leaves_nothing() -> None:
    """A child that takes more than the limit is ended, and the kernel is told which one to end."""
    script = (
        "import os, subprocess, sys\n"
        "from benchmarks import confine\n"
        "hungry = \"open('/proc/self/oom_score_adj', 'w').write('1000'); b = b'x' * (300 << 20)\"\n"
        "with confine.confined(120 << 20):\n"
        "    inside = open('/proc/self/cgroup').read()\n"
        "    print(subprocess.run([sys.executable, '-c', hungry]).returncode)\n"
        "print(subprocess.run([sys.executable, '-c', 'b = bytes(300 << 20)']).returncode)\n"
        "after = open('/proc/self/cgroup').read()\n"
        "print(f'fusionml-{os.getpid()}' in inside, 'fusionml-' in after, os.getpid())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=True,
    )
    *found, pid = done.stdout.split()
    assert found == ["-9", "0", "True", "False"]
    assert not list(confine.ROOT.glob(f"**/fusionml-{pid}"))


def test_where_no_group_can_be_made_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(confine, "ROOT", tmp_path)
    assert confine.available() is False
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="no memory control group"), confine.confined(MIB):
        pass
