"""The gate in the patch: real models and real arithmetic, with simulated times where times matter."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.generate import generate_step
from models import pair as small_pair
from models import tiny, tokens
from pairs import EQUAL_STREAMS, Pair, Unit

import fusionml
from fusionml import forwards, machine, patching, pressure, split
from fusionml import session as session_module
from fusionml.pressure import Reading
from fusionml.ratios import Probe, Site
from fusionml.session import PATIENCE, Session, open_table
from fusionml.sites import SiteControl
from fusionml.table import Entry, RatioTable

MIN_ROWS = 32
ROWS = 64
PROMPT = ROWS + 1
"""Tokens: one call of 64 rows for each layer, and the last token alone."""
GAINS = Pair("a split that gains", Unit(0.0, 26e-6, 1.1), Unit(0.0, 13e-6, 1.1), 5e-6)
LAYERS = 14
"""Layers of the tiny Llama that may split: two blocks of seven."""
HOPELESS = replace(GAINS, cpu=Unit(0.0, 13e-3))
"""A CPU a thousand times slower than the current stream."""

Patch = Callable[..., None]


@pytest.fixture(autouse=True)
def gated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate on, on a machine that is idle, plugged in and always the same."""
    monkeypatch.delenv("FUSIONML_GATE")
    monkeypatch.setattr(machine, "math_fingerprint", lambda: {"float32": 5.0, "bfloat16": 1.0})
    monkeypatch.setattr(machine.OtherLoad, "share", lambda self: 0.0)
    monkeypatch.setattr(pressure, "read", lambda: Reading(level="normal", free_bytes=2**40))


@dataclass
class Simulated:
    """Times of `pair` in place of the machine's: what is computed and evaluated is real."""

    pair: Pair
    timed: list[tuple[str, float, int]] = field(default_factory=list)
    """(arm or 'solo', ratio, rows) of everything that was timed."""
    _call: threading.local = field(default_factory=threading.local)

    def seconds(self, job: Any, rows: int) -> float:
        if job.solo:
            return self.pair.seconds(Probe("solo", job.solo), rows)
        return self.pair.split(job.ratio, rows) if job.arm == "split" else self.pair.stock(rows)


@pytest.fixture
def simulate(monkeypatch: pytest.MonkeyPatch, session: Session) -> Callable[[Pair], Simulated]:
    def install(pair: Pair) -> Simulated:
        world, timed = Simulated(pair), forwards.timed

        def remember(session: Session, call: Any, *rest: Any) -> Any:
            world._call.now = call.job, call.rows
            return timed(session, call, *rest)

        def stopwatch(compute: Callable[[], mx.array]) -> tuple[mx.array, float]:
            out = compute()
            mx.eval(out)
            job, rows = world._call.now
            world.timed.append(("solo" if job.solo else job.arm, job.ratio, rows))
            return out, world.seconds(job, rows)

        monkeypatch.setattr(forwards, "timed", remember)
        monkeypatch.setattr(forwards, "stopwatch", stopwatch)
        monkeypatch.setattr(Session, "boundary_seconds", lambda self: pair.boundary)
        return world

    return install


def prompt(model: nn.Module, count: int = PROMPT, seed: int = 0) -> list[int]:
    """The answer to a prompt by MLX-LM's own steps."""
    ids = (tokens(count)[0] + seed) % 160
    return [token for token, _ in generate_step(ids, model, max_tokens=4)]


def learn(model: nn.Module, prompts: int = 60) -> int:
    """Prompts until nothing is learned any more."""
    for number in range(prompts):
        if number and not patching.session().learning():
            return number
        mx.eval(model(tokens(ROWS)))
    pytest.fail(f"still learning after {prompts} prompts: {fusionml.status()['sites']}")


def known(model: nn.Module, patch: Patch, **settings: Any) -> nn.Module:
    """`model`, patched as if MLX-LM had loaded it."""
    patch(min_rows=MIN_ROWS, **settings)
    patching.session().known.add(model, from_loader=True)
    return model


def arms() -> set[str]:
    return {site["arm"] for site in fusionml.status()["sites"].values()}


# --- learning


def test_a_site_without_a_table_is_stock_until_it_has_learned_and_tokens_are_stocks(
    simulate: Any, patch: Patch
) -> None:
    seeds = range(12)
    stock = tiny("llama")
    expected = [prompt(stock, seed=seed) for seed in seeds]
    world = simulate(GAINS)
    model = known(tiny("llama"), patch)
    split_before = 0
    for seed in seeds:
        assert prompt(model, seed=seed) == expected[seed]
        status = fusionml.status()
        if seed == 0:
            assert arms() == {"stock"}
            assert all(
                re.fullmatch(r"learning, \d+ prompts left", s["why"]) for s in status["sites"].values()
            )
            assert status["reasons"]["still learning what is fastest"] > 0
        timed_splits = sum(1 for arm, _, _ in world.timed if arm == "split")
        if arms() == {"stock"}:
            assert status["calls"].get("split", 0) == timed_splits, "what is split is timed"
        split_before = status["calls"].get("split", 0)
    learn(model)
    assert prompt(model) == expected[0]
    assert arms() == {"split"}
    assert all("learned from" in site["why"] for site in fusionml.status()["sites"].values())
    assert split_before > 0


def test_learning_is_paid_by_what_stock_takes(simulate: Any, patch: Patch) -> None:
    world = simulate(HOPELESS)
    model = known(tiny("llama"), patch)
    learn(model)
    status = fusionml.status()
    assert arms() == {"stock"}
    looks = [(arm, rows) for arm, _, rows in world.timed if arm == "solo"]
    assert len(looks) == 3, "one for each site"
    assert not [arm for arm, _, _ in world.timed if arm == "split"]
    assert status["probe_seconds"] < 3 * (HOPELESS.cpu.alone(32) + 4 * HOPELESS.boundary)


def test_what_was_learned_survives_unpatch_and_other_threads(simulate: Any, patch: Patch) -> None:
    world = simulate(GAINS)
    model = known(tiny("llama"), patch)
    learn(model)
    before = fusionml.status()["sites"]
    fusionml.unpatch()
    patch(min_rows=MIN_ROWS)
    after = fusionml.status()["sites"]
    assert {key: site["why"] for key, site in after.items()} == {key: s["why"] for key, s in before.items()}
    done = len(world.timed)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(prompt, model).result()
    assert arms() == {"split"}
    assert not [arm for arm, _, _ in world.timed[done:] if arm == "solo"], "no learning anew"
    assert not patching.session().learning()


def test_learning_goes_on_where_unpatch_broke_it_off(simulate: Any, patch: Patch) -> None:
    """Three prompts before and the rest after are as many looks as all at once."""
    world = simulate(GAINS)
    model = known(tiny("llama"), patch)
    learn(model)
    at_once = len(world.timed)
    fusionml.unpatch()
    assert patching.session().saver.wait(60)
    patching._session = Session()
    Path(open_table(None).path).unlink()
    known(model, patch)
    for _ in range(3):
        mx.eval(model(tokens(ROWS)))
    assert patching.session().learning()
    fusionml.unpatch()
    known(model, patch)
    learn(model)
    assert len(world.timed) - at_once == at_once


def test_other_settings_learn_anew(simulate: Any, patch: Patch, tmp_path: Path) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    learn(model)
    patch(min_rows=MIN_ROWS, gate="lock", table=str(tmp_path / "another.json"))
    prompt(model)
    assert all(site["why"].startswith("learning") for site in fusionml.status()["sites"].values())


def test_what_was_learned_is_saved_and_used_by_a_new_session(
    simulate: Any, patch: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "ratios.json")
    world = simulate(GAINS)
    saves: list[int] = []
    save = RatioTable.save
    monkeypatch.setattr(RatioTable, "save", lambda self: (saves.append(1), save(self))[1])
    model = known(tiny("llama"), patch, table=path)
    learn(model)
    learned = fusionml.status()["sites"]
    assert len(saves) == 3, "once for each site"
    entries = open_table(path).entries()
    assert {site.key(): entry.ratio for site, entry in entries.items()} == {
        key: site["ratio"] for key, site in learned.items()
    }
    assert all(entry.per_row == pytest.approx(GAINS.stock(ROWS) / ROWS) for entry in entries.values())
    fusionml.unpatch()
    monkeypatch.setattr(patching, "_session", Session())
    known(model, patch, table=path)
    done = len(world.timed)
    prompt(model)
    sites = fusionml.status()["sites"]
    assert arms() == {"split"}
    assert all(site["why"].startswith("measured") for site in sites.values())
    assert {key: site["ratio"] for key, site in sites.items()} == {k: s["ratio"] for k, s in learned.items()}
    assert len(world.timed) - done <= 3
    assert fusionml.status()["calls"]["split"] >= LAYERS - 3


def test_what_a_busy_machine_taught_is_not_kept_for_good(
    simulate: Any, patch: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ratios.json"
    simulate(GAINS)
    monkeypatch.setattr(machine.OtherLoad, "share", lambda self: 0.5)
    learn(known(tiny("llama"), patch, table=str(path)))
    assert not path.exists()
    assert arms() == {"split"}


def test_a_table_that_cannot_be_written_is_one_warning(
    simulate: Any, patch: Patch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    simulate(GAINS)
    with caplog.at_level(logging.WARNING, logger="fusionml"):
        learn(known(tiny("llama"), patch, table=str(tmp_path / "file" / "ratios.json")))
    written = [record.message for record in caplog.records if "cannot be written" in record.message]
    assert len(written) == 1
    assert "this run only" in written[0]
    assert arms() == {"split"}


def test_a_measured_share_of_zero_is_stock_without_a_gate(simulate: Any, patch: Patch) -> None:
    world = simulate(HOPELESS)
    model = known(tiny("llama"), patch)
    learn(model)
    done = len(world.timed)
    for _ in range(3):
        prompt(model)
    assert len(world.timed) == done
    assert fusionml.status()["calls"].get("split", 0) == 0


# --- entries that hold, and entries that do not


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "ratio": 0.25,
        "gain": 0.3,
        "when": "2026-08-01T12:00:00+00:00",
        "spread": 0.01,
        "power": "mains",
        "samples": 30,
        "cpu_dtype": "native",
        "per_row": 1e-5,
    }
    return Entry(**fields | changes)


def filled(path: Path, dtype: str, **changes: Any) -> str:
    table = open_table(str(path))
    table.put(Site("linear", dtype, 128, 256, True, ROWS), entry(**changes))
    table.save()
    return str(path)


def half(model: nn.Module) -> nn.Module:
    model.set_dtype(mx.bfloat16)
    mx.eval(model.parameters())
    return model


def up_site(model: nn.Module, patch: Patch, **settings: Any) -> dict[str, Any]:
    """The state of the first layer's site after one call of 64 rows."""
    patch(model, min_rows=MIN_ROWS, **settings)
    dtype = model.up["weight"].dtype
    mx.eval(model.up(mx.zeros((1, ROWS, 128), dtype)))
    (state,) = fusionml.status()["sites"].values()
    return dict(state)


def test_an_entry_of_another_cpu_type_does_not_count_and_is_no_prior(
    simulate: Any, patch: Patch, tmp_path: Path
) -> None:
    """Asked for float32 where native was measured: nothing is known, so it is learned."""
    simulate(GAINS)
    path = filled(tmp_path / "t.json", "bfloat16")
    state = up_site(half(small_pair()), patch, table=path, cpu_dtype="float32")
    assert state["why"].startswith("learning")
    assert (state["arm"], state["cpu_dtype"], state["gate"]) == ("stock", "float32", None)


def test_the_cpu_type_of_a_float32_model_is_what_it_is(simulate: Any, patch: Patch, tmp_path: Path) -> None:
    """A float32 layer is computed natively whatever the setting says, and so its entries hold."""
    simulate(GAINS)
    path = filled(tmp_path / "t.json", "float32")
    state = up_site(small_pair(), patch, table=path, cpu_dtype="float32")
    assert (state["arm"], state["ratio"]) == ("split", 0.25)
    assert state["why"].startswith("measured 2026-08-01")


@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
def test_auto_takes_the_cpu_type_that_was_measured_to_be_best(
    simulate: Any, patch: Patch, tmp_path: Path, cpu_dtype: str
) -> None:
    simulate(GAINS)
    path = filled(tmp_path / "t.json", "bfloat16", cpu_dtype=cpu_dtype)
    state = up_site(half(small_pair()), patch, table=path)
    assert (state["arm"], state["cpu_dtype"]) == ("split", cpu_dtype)


def test_a_given_ratio_overrules_the_table_and_goes_through_probation(
    simulate: Any, patch: Patch, tmp_path: Path
) -> None:
    simulate(GAINS)
    path = filled(tmp_path / "t.json", "float32")
    state = up_site(small_pair(), patch, table=path, ratio=0.5)
    assert state["gate"]["phase"] == "probation"
    assert "ratio=0.5 was given" in state["why"]


@pytest.mark.parametrize("settings", [{"gate": "off"}, {"gate": "off", "ratio": 0.5}])
def test_off_is_the_plan_from_the_first_call(patch: Patch, simulate: Any, settings: dict[str, Any]) -> None:
    world = simulate(HOPELESS)
    model = known(tiny("llama"), patch, **settings)
    prompt(model)
    assert arms() == {"split"}
    assert world.timed == []
    assert fusionml.status()["calls"]["split"] == LAYERS
    assert fusionml.status()["probe_seconds"] == 0


# --- the gate at work


def test_a_site_where_the_cpu_cannot_help_ends_on_stock_within_its_probation(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real clock: every split sleeps ten times as long as anything else takes."""
    slept: list[int] = []
    run = split.run_linear

    def slow(x: mx.array, *rest: Any) -> mx.array:
        slept.append(x.size // x.shape[-1])
        time.sleep(0.2)
        return run(x, *rest)

    monkeypatch.setattr(split, "run_linear", slow)
    model = tiny("llama")
    expected = prompt(model)
    known(model, patch, ratio=0.5)
    # The first prompt touches, probation takes four samples of stock for each of three sites.
    for _ in range(4):
        assert prompt(model) == expected
    assert arms() == {"stock"}
    assert not patching.session().learning()
    assert 3 <= len(slept) <= 2 * 3, "one clean sample for each site, and one more where stock was slow once"
    for site in fusionml.status()["sites"].values():
        assert "gate" in site["why"]
        assert site["ratio"] == 0
    assert fusionml.status()["reasons"]["the gate found stock to be as fast"] > 0
    done = len(slept)
    prompt(model)
    assert len(slept) - done <= 3


def test_the_first_touch_of_a_layer_never_counts(patch: Patch, simulate: Any) -> None:
    world = simulate(GAINS)
    model = known(tiny("llama"), patch)
    mx.eval(model(tokens(ROWS)))
    assert world.timed == []
    mx.eval(model(tokens(ROWS)))
    assert len(world.timed) > 0


def test_a_call_beside_another_thread_never_counts(patch: Patch, simulate: Any) -> None:
    world = simulate(GAINS)
    model = known(tiny("llama"), patch)
    prompt(model)
    done = len(world.timed)
    turns = threading.Semaphore(1), threading.Semaphore(0)

    def work(me: int) -> None:
        for _ in range(6):
            turns[me].acquire()
            mx.eval(model.model.layers[0].mlp.up_proj(mx.zeros((1, ROWS, 128))))
            turns[1 - me].release()

    threads = [threading.Thread(target=work, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(world.timed) == done


def test_another_thread_in_the_middle_of_a_timed_call_spoils_it(
    patch: Patch, simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch, ratio=0.5)
    layer, given = model.model.layers[0].mlp.up_proj, mx.zeros((1, ROWS, 128))
    mx.eval(layer(given))
    stopwatch = forwards.stopwatch

    def disturbed(compute: Callable[[], mx.array]) -> tuple[mx.array, float]:
        monkeypatch.setattr(forwards, "stopwatch", stopwatch)
        other = threading.Thread(target=lambda: mx.eval(layer(given)))
        other.start()
        other.join(60)
        return stopwatch(compute)

    monkeypatch.setattr(forwards, "stopwatch", disturbed)
    mx.eval(layer(given))
    (site,) = fusionml.status()["sites"].values()
    assert site["gate"]["rejected"].get("another thread", 0) >= 1
    assert sum(track["samples"] for track in site["gate"]["estimates"].values()) == 0


def traced_calls(model: Any, given: mx.array) -> dict[str, Callable[[], mx.array]]:
    return {
        "compile": lambda: mx.compile(lambda a: model(a))(given),
        "vmap": lambda: mx.vmap(lambda a: model(a))(given),
        "grad": lambda: mx.grad(lambda a: model(a).sum())(given),
        "jvp": lambda: mx.jvp(lambda a: model(a), [given], [mx.ones_like(given)])[0][0],
        "grad of the weights": lambda: nn.value_and_grad(model, lambda m, a: m(a).sum())(model, given)[0],
    }


@pytest.mark.parametrize("kind", list(traced_calls(None, mx.zeros(1))))
@pytest.mark.parametrize("settings", [{}, {"ratio": 0.5}], ids=["learning", "probation"])
def test_a_timed_call_under_a_trace_is_stock(
    kind: str, settings: dict[str, Any], patch: Patch, simulate: Any
) -> None:
    world = simulate(GAINS)
    model = small_pair()
    given = mx.random.normal((2, ROWS, 128), key=mx.random.key(1))
    expected = traced_calls(model, given)[kind]()
    mx.eval(expected)
    patch(model, min_rows=MIN_ROWS, **settings)
    mx.eval(model(given))
    for _ in range(3):
        out = traced_calls(model, given)[kind]()
        assert mx.allclose(out, expected, rtol=1e-4, atol=1e-4)
    assert world.timed == []
    assert fusionml.status()["reasons"]["under a trace"] >= 2
    for _ in range(60):
        mx.eval(model(given))
    assert world.timed, "it goes on afterwards"


def test_decoding_and_short_prompts_ask_nobody(
    patch: Patch, simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    monkeypatch.setattr(pressure, "read", lambda: pytest.fail("asked"))
    prompt(model, count=MIN_ROWS)
    assert fusionml.status()["sites"] == {}


# --- conditions


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The session's clock, which tests move by hand."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(session_module, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def measured_model(patch: Patch, path: Path, **settings: Any) -> nn.Module:
    """A tiny Llama whose sites are all in the table."""
    table = open_table(str(path))
    for inputs, outputs in ((128, 128), (128, 192), (192, 128)):
        table.put(Site("linear", "float32", inputs, outputs, False, ROWS), entry())
    table.save()
    return known(tiny("llama"), patch, table=str(path), **settings)


def test_under_pressure_nothing_is_probed_it_stands_down_when_it_lasts_and_recovers(
    patch: Patch,
    simulate: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    clock: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = simulate(GAINS)
    model = measured_model(patch, tmp_path / "t.json")
    prompt(model)
    level: pressure.Level = "warning"
    monkeypatch.setattr(pressure, "read", lambda: Reading(level=level, free_bytes=2**40))
    done = len(world.timed)
    with caplog.at_level(logging.INFO, logger="fusionml"):
        for _ in range(3):
            prompt(model)
        assert len(world.timed) == done
        assert arms() == {"split"}
        clock.seconds = PATIENCE + 1
        prompt(model)
        assert arms() == {"stock"}
        before = fusionml.status()["calls"]["split"]
        prompt(model)
        assert fusionml.status()["calls"]["split"] == before
        assert fusionml.status()["reasons"]["stood down: memory is short"] >= LAYERS
        level = "normal"
        prompt(model)
    assert arms() == {"split"}
    for words in ("no probes", f"memory pressure for more than {PATIENCE:.0f} s", "is over"):
        assert len([r for r in caplog.records if words in r.message]) == 3, "one line for each site"


def test_swapping_counts_as_pressure(
    patch: Patch, simulate: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(GAINS)
    model = measured_model(patch, tmp_path / "t.json")
    monkeypatch.setattr(pressure, "read", lambda: Reading(level="normal", swap_in_rate=50e6))
    prompt(model)
    assert {s["gate"]["phase"] for s in fusionml.status()["sites"].values()} == {"locked under pressure"}


@pytest.mark.parametrize(
    ("reading", "phase"),
    [
        (Reading(level="normal", free_bytes=2**40), "tracking"),
        (Reading(level="normal", free_bytes=2**40, thermal="nominal", low_power=False), "tracking"),
        (Reading(level="normal", free_bytes=1000), "locked"),
        (Reading(level="normal", free_bytes=None), "locked"),
        (Reading(level="normal", free_bytes=2**40, on_battery=True), "locked"),
        (Reading(level="normal", free_bytes=2**40, low_power=True), "locked"),
        (Reading(level="normal", free_bytes=2**40, thermal="heavy"), "locked"),
    ],
)
def test_probes_are_scheduled_only_where_they_are_welcome(
    patch: Patch,
    simulate: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reading: Reading,
    phase: str,
) -> None:
    simulate(GAINS)
    model = measured_model(patch, tmp_path / "t.json")
    monkeypatch.setattr(pressure, "read", lambda: reading)
    prompt(model)
    assert {site["gate"]["phase"] for site in fusionml.status()["sites"].values()} == {phase}


# --- what it says


def test_the_status_is_json_and_holds_what_a_person_asks(patch: Patch, simulate: Any) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    for count in range(12):
        if count:
            prompt(model)
        status = json.loads(json.dumps(fusionml.status(), allow_nan=False))
        assert status["probe_seconds"] >= 0
        for key, site in status["sites"].items():
            assert Site.parse(key).rows == ROWS
            assert site["arm"] in ("stock", "split")
            assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", site["since"])
            assert site["why"]
    learn(model)
    status = fusionml.status()
    assert status["probe_seconds"] > 0
    for site in status["sites"].values():
        for arm in ("stock", "split"):
            assert 0 < site["gate"]["estimates"][arm]["seconds_per_row"] < math.inf


def test_every_decision_is_one_line_with_its_site(
    patch: Patch, simulate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    with caplog.at_level(logging.INFO, logger="fusionml"):
        learn(model)
        prompt(model)
    lines = [record.message for record in caplog.records if record.message.startswith("linear/")]
    for key in fusionml.status()["sites"]:
        own = [line.removeprefix(f"{key}: ") for line in lines if line.startswith(f"{key}: ")]
        assert own[0] == "stock, CPU share 0.00: learning, 2 prompts left"
        assert own[1] == "learning on live prompts, at most 10% of stock's time"
        assert re.match(r"split, CPU share 0\.\d\d, gain \d+%: learned from \d+ calls", own[2])
        assert len(own) == 3, own


def test_without_a_table_one_line_says_how_to_make_one(
    patch: Patch, simulate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    with caplog.at_level(logging.INFO, logger="fusionml"):
        prompt(model)
        prompt(model)
    assert len([r for r in caplog.records if "python -m fusionml.calibrate" in r.message]) == 1


# --- whatever fails


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the gate broke")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (SiteControl, "choose"),
        (SiteControl, "record"),
        (SiteControl, "drain"),
        (SiteControl, "stock_reason"),
        (Session, "conditions"),
        (Session, "crowded"),
        (Session, "boundary_seconds"),
        (Session, "table"),
        (pressure, "read"),
        (pressure, "fits"),
        (forwards, "stopwatch"),
        (RatioTable, "save"),
        (machine.OtherLoad, "share"),
    ],
)
def test_an_error_of_the_gate_never_reaches_the_users_call(
    owner: Any,
    name: str,
    patch: Patch,
    simulate: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = prompt(tiny("llama"))
    simulate(GAINS)
    monkeypatch.setattr(owner, name, broken)
    model = known(tiny("llama"), patch)
    with caplog.at_level(logging.WARNING, logger="fusionml"):
        for _ in range(12):
            assert prompt(model) == expected
    assert len([r for r in caplog.records if "the gate broke" in r.message]) == 1


def test_an_interrupt_in_a_timed_call_is_the_users(
    patch: Patch, simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(compute: Any) -> Any:
        raise KeyboardInterrupt

    simulate(GAINS)
    model = known(tiny("llama"), patch)
    prompt(model)
    monkeypatch.setattr(forwards, "stopwatch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prompt(model)
    monkeypatch.undo()


# --- threads


def test_asking_for_the_status_while_a_site_saves_what_it_learned_locks_nobody_out(
    patch: Patch, simulate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that decides needs the session, and the session's status needs the site."""
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    asked: list[bool] = []
    table = Session.table

    def slow(self: Session, backend: str) -> RatioTable:
        other = threading.Thread(target=lambda: asked.append(self.probe_seconds() >= 0), daemon=True)
        other.start()
        time.sleep(0.05)
        return table(self, backend)

    prompt(model)
    monkeypatch.setattr(Session, "table", slow)
    worker = threading.Thread(target=learn, args=(model,), daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), "locked out"
    assert asked


def test_pressure_while_a_site_saves_what_it_learned_locks_nobody_out(
    patch: Patch, simulate: Any, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    simulate(GAINS)
    model = known(tiny("llama"), patch)
    table = Session.table

    def slow(self: Session, backend: str) -> RatioTable:
        monkeypatch.setattr(pressure, "read", lambda: Reading(level="critical"))
        self.conditions(0)
        clock.seconds += PATIENCE + 1
        threading.Thread(target=self.conditions, args=(0,), daemon=True).start()
        time.sleep(0.05)
        monkeypatch.setattr(pressure, "read", lambda: Reading(level="normal", free_bytes=2**40))
        return table(self, backend)

    prompt(model)
    monkeypatch.setattr(Session, "table", slow)
    worker = threading.Thread(target=learn, args=(model,), daemon=True)
    worker.start()
    worker.join(60)
    assert not worker.is_alive(), "locked out"


def test_many_threads_prompt_while_sites_learn(patch: Patch, simulate: Any) -> None:
    simulate(EQUAL_STREAMS)
    model = tiny("llama")
    given = tokens(ROWS)
    expected = model(given)
    mx.eval(expected)
    known(model, patch)

    def work(_: int) -> bool:
        out = model(given)
        mx.eval(out)
        fusionml.status()
        return bool(mx.allclose(out, expected, atol=1e-3))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(24)))
    assert "a split that failed" not in fusionml.status()["reasons"]
