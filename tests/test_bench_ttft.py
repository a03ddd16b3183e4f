"""Figure 5: what is stock and what is split, every prompt and answer kept, and where an answer parts."""

from __future__ import annotations

import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from checkpoints import small_checkpoint
from experiments import options, run, transcripts
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import checkpoints, ttft
from benchmarks.experiment import Options
from fusionml import calibrate, machine, split
from fusionml.compare import Run
from fusionml.measure import paired_ratio
from fusionml.patching import session
from fusionml.session import open_table
from fusionml.table import Entry

Fixture = pytest.MonkeyPatch
LENGTH, ANSWER, ROUNDS = 64, 4, 3
MEASURED = 0.25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3))


@pytest.fixture
def flags(checkpoint: str) -> list[str]:
    return ["--model", checkpoint, "--lengths", str(LENGTH), "--max-tokens", str(ANSWER)]


def measured(model: str | None, rows: Iterable[int], budget: float, table: Path) -> dict[str, Any]:
    """Stands in for a calibration: a quarter of the rows for every layer."""
    found = open_table(str(table))
    when = datetime.now(timezone.utc).isoformat(timespec="seconds")
    for shape in calibrate.shapes(mlx_lm.load(model)[0]):
        for n in rows:
            found.put(shape.site(n), Entry(MEASURED, 0.2, when, 0.01, None, 9, "native"))
    found.save()
    return {"budget": budget, "sites": {}}


@pytest.fixture(autouse=True)
def no_calibration(monkeypatch: Fixture) -> None:
    monkeypatch.setattr(checkpoints, "calibrate", measured)
    # What it reads changes while others keep the machine busy.
    monkeypatch.setattr(machine, "math_fingerprint", lambda: {"float32": 5.0, "bfloat16": 5.0})


def spy_on_splits(monkeypatch: Fixture) -> dict[str, set[int]]:
    """The CPU rows of every split, by the ratio and the table that were set at the time."""
    seen: dict[str, set[int]] = defaultdict(set)
    run_linear = split.run_linear

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, m: int, *rest: Any) -> mx.array:
        now = session().settings
        seen["none" if not now.enabled else str(now.ratio or bool(now.table))].add(m)
        return run_linear(x, weight, bias, m, *rest)

    monkeypatch.setattr(split, "run_linear", spy)
    return seen


# --- one cell


def test_what_is_stock_and_what_is_split(monkeypatch: Fixture, flags: list[str], tmp_path: Path) -> None:
    seen = spy_on_splits(monkeypatch)
    _, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    cell = cells[f"{LENGTH} tokens"]
    rows = LENGTH - 1
    assert seen == {
        "0.3": {split.cpu_rows(rows, 0.30)},
        "False": {split.cpu_rows(rows, 0.50)},
        "True": {split.cpu_rows(rows, MEASURED)},
    }
    calls = cell["figures"]["calls"]
    assert calls["stock"] == calls["stock again"] == {}
    # Two of three blocks are read by a prompt: seven linear layers each, in every round.
    split_calls = {arm: calls[arm]["split"] for arm in ("fixed 0.30", "default", "calibrated")}
    assert set(split_calls.values()) == {(7 + 7) * ROUNDS}
    assert 0 < calls[ttft.GATED]["split"] <= (7 + 7) * ROUNDS
    assert list(cell["arms"]) == ["stock", *split_calls, ttft.GATED, "stock again"]
    assert all(len(arm["samples"]) == ROUNDS for arm in cell["arms"].values())
    assert all(arm["peak_bytes"] > 0 for arm in cell["arms"].values())
    assert set(cell["ratios"]) == set(cell["errors"]) == {*split_calls, ttft.GATED}
    assert cell["aa"] is not None
    assert set(cell["figures"]["decode"]) == set(cell["arms"])
    assert cell["figures"]["decode"]["default"]["ratio"]["pairs"] == ROUNDS
    assert cell["figures"]["idle"] == dict.fromkeys(cell["arms"])
    assert cell["figures"]["table"]["entries"] == 1


def test_the_transcripts_hold_every_prompt_and_answer(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    file, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    lines = transcripts(file)
    told = {(line["arm"], line["round"]): line for line in lines}
    assert set(told) == {(arm, n) for arm in cell["arms"] for n in range(1, ROUNDS + 1)}
    assert len(lines) == len(told)
    _, tokenizer = mlx_lm.load(flags[1])
    for (arm, number), line in told.items():
        assert line["ttft"] == cell["arms"][arm]["samples"][number - 1]
        assert len(tokenizer.encode(line["prompt"])) == LENGTH
        assert (len(line["tokens"]), line["answer"]) == (ANSWER, tokenizer.decode(line["tokens"]))
        assert line["prompt"] == told["stock", number]["prompt"]
    assert len({line["prompt"] for line in lines}) == ROUNDS
    assert "transcripts" not in cell
    for arm in ("fixed 0.30", "default", "calibrated"):
        same = sum(told[arm, n]["tokens"] == told["stock", n]["tokens"] for n in range(1, ROUNDS + 1))
        assert cell["figures"]["answers"][arm]["identical"] == same


def test_several_processes_ask_different_prompts_and_calibrate_once(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    calibrated: list[Any] = []

    def once(*args: Any) -> dict[str, Any]:
        calibrated.append(args)
        return measured(*args)

    asked: list[tuple[int, ...]] = []
    generate = ttft.generate_once

    def spy(model: Any, arm: str, ids: list[int], tokens: int) -> Run:
        asked.append(tuple(ids))
        return generate(model, arm, ids, tokens)

    monkeypatch.setattr(ttft, "generate_once", spy)
    monkeypatch.setattr(checkpoints, "calibrate", once)
    given = replace(options(ttft.EXPERIMENT, *flags), samples=5, processes=2)
    file, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, given)
    (cell,) = cells.values()
    assert [part["samples"] for part in cell["processes"]] == [3, 2]
    assert len(calibrated) == 1
    lines = transcripts(file)
    assert {line["round"] for line in lines} == {1, 2, 3, 4, 5}
    assert len({line["prompt"] for line in lines}) == 5
    assert len(set(asked)) == 5 + 1, "those that are measured, and one to warm up"
    for line in lines:
        assert line["ttft"] == cell["arms"][line["arm"]]["samples"][line["round"] - 1]
    told = cell["figures"]
    assert told["rounds"] == 5
    assert told["answers"]["stock again"] == {"answers": 5, "identical": 5, "divergence": None}
    assert told["answers, stock again"] == "5 of 5 token-identical"
    assert len(told["decode"]["default"]["samples"]) == told["decode"]["default"]["ratio"]["pairs"] == 5
    decode = {arm: [1 / rate for rate in found["samples"]] for arm, found in told["decode"].items()}
    grouped = paired_ratio(decode["stock"], decode["default"], groups=[3, 2])
    assert told["decode"]["default"]["ratio"]["low"] == pytest.approx(grouped.low)
    assert [len(part["figures"]["decode"]["default"]) for part in cell["processes"]] == [3, 2]


def test_where_an_answer_parts_from_stocks_is_told(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    generate, stock_gaps, calls = ttft.generate_once, {}, Counter()

    def other_token(model: Any, arm: str, ids: list[int], tokens: int) -> Run:
        found = generate(model, arm, ids, tokens)
        if arm == "stock":
            stock_gaps[tuple(ids)] = found.gaps
        calls[arm] += 1
        if calls["default"] > 2 and arm == "default":  # after a warm-up, from the second round on
            found.tokens[2] += 1
        return found

    monkeypatch.setattr(ttft, "generate_once", other_token)
    _, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    answers = cell["figures"]["answers"]
    assert answers["stock again"] == {"answers": 3, "identical": 3, "divergence": None}
    parted = answers["default"]["divergence"]
    assert answers["default"]["identical"] == 1
    assert (parted["round"], parted["position"]) == (2, 2)
    assert parted["arm"][0] == parted["stock"][0] + 1
    assert (
        parted["logit_gap"] == list(stock_gaps.values())[2][2]
    )  # a warm-up's, the first round's, this one's
    assert (
        "1 of 3 token-identical; the first other one parts at token 3" in cell["figures"]["answers, default"]
    )


def test_an_arm_that_computes_something_else_is_not_timed(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    run_linear = split.run_linear

    def wrong(*args: Any) -> mx.array:
        out = run_linear(*args)
        return out + 5 if session().settings.ratio == 0.3 else out

    monkeypatch.setattr(split, "run_linear", wrong)
    file, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    assert cell["arms"]["fixed 0.30"]["samples"] == []
    (warning,) = cell["arms"]["fixed 0.30"]["warnings"]
    assert warning.startswith("not timed: it differs from stock by")
    assert "fixed 0.30" not in cell["ratios"]
    assert cell["errors"]["fixed 0.30"] > 0.1 > cell["errors"]["default"]
    assert "fixed 0.30" not in {line["arm"] for line in transcripts(file)}


def test_a_model_that_cannot_be_calibrated_has_the_other_arms(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    def refused(*args: Any) -> None:
        raise RuntimeError("it has nothing to calibrate")

    monkeypatch.setattr(checkpoints, "calibrate", refused)
    _, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    assert cell["arms"]["calibrated"]["warnings"] == ["not timed: it has nothing to calibrate"]
    assert cell["figures"]["calibration"] is None
    assert set(cell["ratios"]) == {"fixed 0.30", "default"}


def test_a_table_that_would_not_be_used_is_not_called_calibrated(
    monkeypatch: Fixture, flags: list[str], tmp_path: Path
) -> None:
    def of_another_library(*args: Any) -> dict[str, Any]:
        with monkeypatch.context() as then:
            then.setattr(machine, "math_fingerprint", lambda: {"float32": 1e6, "bfloat16": 1e6})
            return measured(*args)

    monkeypatch.setattr(checkpoints, "calibrate", of_another_library)
    _, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    (warning,) = cell["arms"]["calibrated"]["warnings"]
    assert "made with math rates" in warning


def test_on_cuda_it_stands_down_and_says_so(monkeypatch: Fixture, flags: list[str], tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "backend", lambda: "cuda")

    def nothing_gained(*args: Any) -> dict[str, Any]:
        with monkeypatch.context() as then:
            then.setattr(sys.modules[__name__], "MEASURED", 0.0)
            return measured(*args)

    monkeypatch.setattr(checkpoints, "calibrate", nothing_gained)
    seen = spy_on_splits(monkeypatch)
    _, cells = run(monkeypatch, tmp_path, ttft.EXPERIMENT, options(ttft.EXPERIMENT, *flags))
    (cell,) = cells.values()
    assert seen == {}
    assert set(cell["ratios"]) == {"default", "calibrated"}
    assert cell["figures"]["idle"]["stock"] is None
    for arm in ("default", "calibrated"):
        assert "on CUDA the CPU cannot help" in cell["figures"]["idle"][arm]
    assert "on CUDA the CPU cannot help" in cell["figures"]["stands down"]


def test_a_prompt_that_the_model_does_not_take_is_named(flags: list[str]) -> None:
    flags[3] = "398"
    given = options(ttft.EXPERIMENT, *flags)
    (parameters,) = ttft.cells(given).values()
    with pytest.raises(ValueError, match="takes 400 tokens, fewer than 398 and 4 of the answer"):
        ttft.measure(parameters, given)


# --- the plan


@pytest.mark.parametrize(
    ("backend", "arms"),
    [
        ("metal", ["stock", "fixed 0.30", "calibrated", ttft.GATED, "stock again"]),
        ("cpu", ["stock", "fixed 0.30", "default", "calibrated", ttft.GATED, "stock again"]),
        ("cuda", ["stock", "default", "calibrated", "stock again"]),
    ],
)
def test_the_arms_of_each_backend(backend: str, arms: list[str]) -> None:
    found = ttft.settings(backend, 256, Path("table"))
    assert list(found) == arms
    assert [found[arm]["enabled"] for arm in arms] == [not arm.startswith("stock") for arm in arms]
    gated = [arm for arm in arms if found[arm]["enabled"] and found[arm].get("gate") != "off"]
    assert gated == [arm for arm in arms if arm == ttft.GATED]
    assert list(ttft.settings(backend, 256, None)) == [arm for arm in arms if "calibrated" not in arm]


@given(st.floats(1, 1e4), st.floats(1e-3, 1e4), st.integers(3, 60), st.integers(1, 10))
def test_rounds_are_as_many_as_fit_and_never_fewer_than_three(
    patience: float, each: float, samples: int, warm_ups: int
) -> None:
    warm, rounds = ttft.affordable(patience, each, Options(samples=samples, warm_ups=warm_ups))
    assert 3 <= rounds <= samples
    assert 1 <= warm <= warm_ups
    assert (warm + rounds) * each <= patience or (warm, rounds) == (1, 3)
    if (samples + warm_ups) * each <= patience:
        assert (warm, rounds) == (warm_ups, samples)


@pytest.mark.parametrize(
    ("length", "least", "rows"),
    [
        (128, 64, [127]),
        (512, 256, [511]),
        (2048, 256, [2047]),
        (2100, 256, [2048]),
        (4096, 256, [2047]),
        (3000, 256, [2048, 951]),
    ],
)
def test_the_rows_that_a_prompt_makes(length: int, least: int, rows: list[int]) -> None:
    assert ttft.calibration_rows(length, least) == rows


def test_shorter_prompts_than_the_papers_are_said_to_be(monkeypatch: Fixture, checkpoint: str) -> None:
    def plan(backend: str, *flags: str, quick: bool = False) -> tuple[list[int], list[str | None]]:
        monkeypatch.setattr(machine, "backend", lambda: backend)
        cells = ttft.cells(options(ttft.EXPERIMENT, *flags, quick=quick)).values()
        return [cell["prompt_tokens"] for cell in cells], list({cell["note"] for cell in cells})

    assert plan("metal", "--model", checkpoint) == ([2048, 4096, 8192], [None])
    assert plan("metal", "--model", checkpoint, "--lengths", "300", "40") == ([300, 40], [None])
    for backend, quick in itertools.product(("cpu", "metal"), (False, True)):
        lengths, (note,) = plan(backend, quick=quick)
        assert max(lengths) < 8192
        assert note is not None
        assert note.endswith("the paper's are 2048 4096 8192")
    assert plan("cpu", quick=True)[0] == [128]


def test_a_short_prompt_may_be_split_all_the_same() -> None:
    assert checkpoints.min_rows(128) == 64
    assert checkpoints.min_rows(2048) == 256


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lengths", "31"], "'31' is not a whole number of at least 32"),
        (["--max-tokens", "0"], "'0' is not a whole number of at least 1"),
        (["--model", "/no/such/model"], "'/no/such/model': there is no such folder"),
    ],
)
def test_wrong_use_names_the_flag_and_the_value(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        options(ttft.EXPERIMENT, *flags)
    assert stopped.value.code == 2
    assert flags[0] in (said := capsys.readouterr().err)
    assert words in said
