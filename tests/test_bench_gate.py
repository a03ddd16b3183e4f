"""Section 5.5 call by call: what ran is what the trace says, the busy cores are busy when they should be."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest
from checkpoints import small_checkpoint
from experiments import options, run

from benchmarks import gate
from fusionml import machine, pressure
from fusionml.gate import POLICIES
from fusionml.measure import order
from fusionml.patching import session

Fixture = pytest.MonkeyPatch
ARMS = ["stock", *POLICIES, "stock again"]
TINY = {"width": 64, "hidden": 128, "rows": 32}
SAMPLES = 4


@pytest.fixture(autouse=True)
def calm(monkeypatch: Fixture) -> None:
    """Memory enough, whatever else runs here: under pressure no gate times anything."""
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading(free_bytes=10**10))


@pytest.fixture
def tiny(monkeypatch: Fixture) -> None:
    """Blocks so small that a call takes no time to speak of."""
    monkeypatch.setattr(gate, "geometry", lambda scale: {"width": 64, "hidden": 128})
    monkeypatch.setattr(gate, "ROWS", TINY["rows"])
    monkeypatch.setattr(gate, "FEWEST", TINY["rows"])
    monkeypatch.setattr(gate, "SMALL", TINY)
    monkeypatch.setattr(gate, "LENGTHS", (32, 48))


def busy_children() -> list[psutil.Process]:
    """Processes below this one that run a busy loop."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if child.cmdline()[-1:] == ["while True: pass"]]


# --- the block under every policy


@pytest.mark.usefixtures("tiny")
def test_the_trace_is_what_ran(monkeypatch: Fixture, tmp_path: Path) -> None:
    ran: list[str] = []
    made = gate.Gated.__init__

    def spied(self: gate.Gated, *args: Any) -> None:
        made(self, *args)
        arms = self.gated._hidden.arms
        for name, arm in list(arms.items()):
            arms[name] = lambda *call, name=name, arm=arm: (ran.append(name), arm(*call))[1]

    monkeypatch.setattr(gate.Gated, "__init__", spied)
    monkeypatch.setattr(gate, "modes_errors", lambda *args: {})
    given = options(gate.EXPERIMENT, samples=SAMPLES)
    _, cells = run(monkeypatch, tmp_path, gate.EXPERIMENT, given, "the split wins")
    cell = cells["the split wins"]
    trace = cell["trace"]
    assert [entry["arm"] for entry in trace if not entry["policy"].startswith("stock")] == ran
    assert {entry["arm"] for entry in trace if entry["policy"] in ("stock", "stock again", "off")} == {
        "eager"
    }
    assert {entry["arm"] for entry in trace if entry["policy"] == "periodic"} == {
        "split",
        "compiled",
        "eager",
    }
    timed = Counter(entry["policy"] for entry in trace if entry["timed"])
    assert set(timed) == {"periodic", "lock", "auto"}
    steady = [entry for entry in trace if entry["phase"] == "steady"]
    assert [entry["policy"] for entry in steady] == order(ARMS, SAMPLES)
    for arm in ARMS:
        assert cell["arms"][arm]["samples"] == [e["seconds"] for e in steady if e["policy"] == arm]
    told = cell["figures"]["policies"]
    for policy in POLICIES:
        state, calls = told[policy]["gate"], [e for e in trace if e["policy"] == policy]
        assert state["calls"] == len(calls)
        assert told[policy]["timed"] == timed[policy]
        assert sum(told[policy]["ran"].values()) == len(calls)
        said = [line for entry in calls for line in entry["decisions"]]
        assert said or state["why"] == "nothing known yet"
        assert all(f"call {n}: " in line for n, e in enumerate(calls, 1) for line in e["decisions"])


@pytest.mark.usefixtures("tiny")
def test_learning_ends_when_every_gate_has_chosen_or_at_the_limit(monkeypatch: Fixture) -> None:
    made = gate.Made(TINY)
    turns = gate.Turns(made, {policy: gate.Gated(made, policy) for policy in POLICIES})
    turns.learn(3)
    assert [entry["policy"] for entry in turns.trace] == 3 * ARMS
    turns.learn(100)
    assert not any(gated.gated.gate.learning for gated in turns.gated.values())
    assert len(turns.trace) < 103 * len(ARMS)
    before = len(turns.trace)
    turns.learn(100)
    assert len(turns.trace) == before + len(ARMS)


@pytest.mark.usefixtures("tiny")
def test_a_mode_that_computes_something_else_fails_the_cell(monkeypatch: Fixture) -> None:
    compile_ = mx.compile
    monkeypatch.setattr(mx, "compile", lambda f, **options: lambda *call: compile_(f, **options)(*call) * 2)
    given = options(gate.EXPERIMENT)
    with pytest.raises(ValueError, match="the mode compiled differs from the block by"):
        gate.measure(gate.cells(given)["too small a block"], given)


def test_what_probes_cost_shows_in_the_whole_and_not_in_the_typical_call() -> None:
    made = gate.Made(TINY)
    turns = gate.Turns(made, {"auto": gate.Gated(made, "auto")})
    for seconds in (1.0, 1.0, 11.0, 1.0, 1.0):
        for policy, taken in (("stock", 2.0), ("auto", seconds), ("stock again", 2.0)):
            turns.trace.append({"phase": "steady", "policy": policy, "seconds": taken})
    found = turns.against_stock("steady")
    assert found["auto"]["typical"]["value"] == 2.0
    assert found["auto"]["whole"] == pytest.approx(10 / 15)
    assert found["stock again"]["whole"] == 1.0


@pytest.mark.usefixtures("tiny")
def test_the_cores_are_busy_in_that_phase_alone(monkeypatch: Fixture, tmp_path: Path) -> None:
    phases: list[tuple[str, int]] = []
    phase = gate.Turns.phase

    def watched(self: gate.Turns, name: str, rounds: int) -> None:
        phases.append((name, len(busy_children())))
        phase(self, name, rounds)

    monkeypatch.setattr(gate.Turns, "phase", watched)
    given = options(gate.EXPERIMENT, samples=SAMPLES)
    _, cells = run(monkeypatch, tmp_path, gate.EXPERIMENT, given, "busy cores")
    others = max(1, machine.cores() - 1)
    # Each of ours is two processes: the loop, and the one that holds its leash.
    seen = [(name, count > 0) for name, count in phases if name != "learning"]
    assert seen == [("idle", False), ("busy", True), ("after", False)]
    assert dict(phases)["busy"] == 2 * others
    assert busy_children() == []
    cell = cells["busy cores"]
    assert list(cell["figures"]["phases"]) == ["learning", "idle", "busy", "after"]
    busy = [e["seconds"] for e in cell["trace"] if (e["phase"], e["policy"]) == ("busy", "auto")]
    assert cell["arms"]["auto"]["samples"] == busy


def test_busy_cores_are_idle_again_after_an_error() -> None:
    seen = []

    def interrupted() -> None:
        with gate.busy_cores():
            seen.extend(busy_children())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert seen
    assert busy_children() == []


# --- compiled


@pytest.mark.usefixtures("tiny")
def test_compiled_is_against_the_very_block(monkeypatch: Fixture, tmp_path: Path) -> None:
    compiled: list[Any] = []
    compile_ = mx.compile
    monkeypatch.setattr(mx, "compile", lambda f, **more: compiled.append(f) or compile_(f, **more))
    given = options(gate.EXPERIMENT)
    names = ["compiled, 32 rows", "compiled, 48 rows"]
    assert [name for name in gate.cells(given) if name.startswith("compiled")] == names
    _, cells = run(monkeypatch, tmp_path, gate.EXPERIMENT, given, *names)
    assert len(compiled) == 2
    for name in names:
        assert list(cells[name]["arms"]) == ["stock", "compiled", "stock again"]
        assert cells[name]["errors"]["compiled"] < 1e-2


# --- the plan


def test_the_papers_block_divided_by_the_scale() -> None:
    assert gate.geometry(1) == {"width": 4096, "hidden": 14336}
    assert gate.geometry(16) == {"width": 256, "hidden": 896}
    made = gate.Made({**gate.geometry(32), "rows": 8})
    attention = made.block.self_attn
    assert (attention.n_heads, attention.n_kv_heads) == (4, 1)
    assert made.block(made.x, "causal", None).shape == (1, 8, 128)


def test_memory_is_of_the_block_or_of_the_model() -> None:
    whole = {**gate.geometry(1), "rows": 8192}
    weights = 2 * (4 * 4096**2 + 3 * 4096 * 14336)
    assert weights < gate.memory(whole) < 2 * 2**30
    assert gate.memory({"what": "own cost"}) == 0
    assert gate.memory({"what": "model busy", "bytes": 7}) == 7


# --- the gate's own cost


def test_own_cost_asks_the_site_with_the_gate_and_without(monkeypatch: Fixture) -> None:
    asked = Counter[str]()
    ask = gate.forwards.ask

    def counted(*args: Any) -> Any:
        asked[session().settings.gate] += 1
        return ask(*args)

    monkeypatch.setattr(gate.forwards, "ask", counted)
    stock = nn.Linear.__call__
    cell = gate.own_cost({}, options(gate.EXPERIMENT), calls=5)
    assert nn.Linear.__call__ is stock
    assert asked["off"] == 2 * 3 * 5
    assert asked["auto"] > 3 * 5  # through its probation first
    assert list(cell["arms"]) == ["gate off", "gate on", "gate off again"]
    assert all(len(found["samples"]) == 3 for found in cell["arms"].values())
    assert cell["baseline"] == "gate off"
    assert cell["aa"] is not None


def test_own_cost_comes_to_an_end_where_nothing_may_be_timed(monkeypatch: Fixture) -> None:
    short = pressure.Reading(free_bytes=10**10, level="critical")
    assert short.short
    monkeypatch.setattr(pressure, "read", lambda: short)
    cell = gate.own_cost({}, options(gate.EXPERIMENT), calls=5)
    assert len(cell["arms"]["gate on"]["samples"]) == 3


# --- the whole library on a model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3))


@pytest.fixture
def prompts(monkeypatch: Fixture) -> list[tuple[str, str, bool, tuple[int, ...]]]:
    """Of every prompt: arm, gate, whether the cores were busy, and its tokens."""
    seen: list[tuple[str, str, bool, tuple[int, ...]]] = []
    generate, stock = gate.generate_once, nn.Linear.__call__

    def spy(model: Any, arm: str, ids: list[int], tokens: int) -> Any:
        now = session().settings
        arm = "stock" if nn.Linear.__call__ is stock else "patched"
        assert now.enabled == (arm == "patched")
        seen.append((arm, now.gate if now.enabled else "-", bool(busy_children()), tuple(ids)))
        return generate(model, arm, ids, tokens)

    monkeypatch.setattr(gate, "generate_once", spy)
    return seen


def test_a_model_with_busy_cores_and_after_them(
    monkeypatch: Fixture, prompts: list[Any], checkpoint: str, tmp_path: Path
) -> None:
    given = options(gate.EXPERIMENT, "--model", checkpoint, "--tokens", "64")
    _, cells = run(monkeypatch, tmp_path, gate.EXPERIMENT, given, "model, busy cores")
    cell = cells["model, busy cores"]
    phases = [
        (arm, busy, len(list(group)))
        for (arm, busy), group in itertools.groupby(prompts, key=lambda seen: (seen[0], seen[2]))
    ]
    assert phases[:2] == [("stock", False, 1), ("patched", False, gate.LEARNING_PROMPTS)]
    each = order(("stock", "patched", "stock again"), 3)
    wanted = ["stock" if arm.startswith("stock") else arm for arm in each]
    rest = [(seen[0], seen[2]) for seen in prompts[1 + gate.LEARNING_PROMPTS :]]
    assert rest[:9] == [(arm, False) for arm in wanted]
    assert rest[9:18] == [(arm, True) for arm in wanted]
    assert rest[18] == ("patched", False)
    assert rest[19:] == [(arm, False) for arm in wanted]
    assert {seen[1] for seen in prompts} == {"-", "auto"}
    assert len({seen[3] for seen in prompts}) == len(prompts), "every prompt is new"
    assert list(cell["figures"]["phases"]) == ["idle", "busy", "after"]
    assert cell["arms"]["patched"] == cell["figures"]["phases"]["busy"]["arms"]["patched"]
    assert len(cell["figures"]["learning"]) == gate.LEARNING_PROMPTS
    assert cell["figures"]["sites"]


def test_a_model_with_the_gate_on_and_off(
    monkeypatch: Fixture, prompts: list[Any], checkpoint: str, tmp_path: Path
) -> None:
    given = options(gate.EXPERIMENT, "--model", checkpoint, "--tokens", "64")
    _, cells = run(monkeypatch, tmp_path, gate.EXPERIMENT, given, "model, gate on and off")
    cell = cells["model, gate on and off"]
    wanted = order(("off", "auto", "again"), 3)
    assert [seen[1] for seen in prompts[3:]] == ["off" if gate == "again" else gate for gate in wanted]
    assert cell["baseline"] == "gate off"
    assert set(cell["ratios"]) == {"gate on"}
    assert cell["aa"] is not None


def test_the_models_cells_are_there_with_a_model_only(checkpoint: str) -> None:
    without = gate.cells(options(gate.EXPERIMENT))
    with_model = gate.cells(options(gate.EXPERIMENT, "--model", checkpoint, "--tokens", "100"))
    assert set(with_model) - set(without) == {"model, busy cores", "model, gate on and off"}
    assert with_model["model, busy cores"]["prompt_tokens"] == 100
    assert with_model["model, busy cores"]["min_rows"] == 50


def test_all_cells_can_be_measured() -> None:
    given = options(gate.EXPERIMENT)
    assert {cell["what"] for cell in gate.cells(given).values()} < set(gate.MEASURES)
