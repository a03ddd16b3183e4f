"""The samples of a cell, shared by several processes and joined again."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import toys
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import arms, library
from benchmarks.experiment import Options
from benchmarks.processes import groups, join, shares
from fusionml.measure import order, paired_ratio


@given(st.integers(1, 60), st.integers(0, 12), st.integers(1, 7))
def test_the_shares_are_the_whole(samples: int, warm_ups: int, processes: int) -> None:
    given = Options(samples=samples, warm_ups=warm_ups, processes=processes)
    whole = shares(given, whole=True)
    assert {(part.samples, part.warm_ups, part.processes) for part in whole} == {(samples, warm_ups, 1)}
    assert [part.first for part in whole] == [number * samples for number in range(processes)]
    found = shares(given, whole=False)
    assert [part.first for part in found] == [
        sum(part.samples for part in found[:number]) for number in range(processes)
    ]
    assert len(found) == processes
    each = [part.samples for part in found]
    assert sum(each) == samples
    assert max(each) - min(each) <= 1
    assert {part.processes for part in found} == {1}
    assert processes * found[0].warm_ups >= warm_ups > processes * (found[0].warm_ups - 1)


def part(stock: list[float], other: list[float], error: float = 0.0, **figures: Any) -> dict[str, Any]:
    """What one process measured."""
    made = arms.summarise({"stock": stock, "other": other, "stock again": stock}, errors={"other": error})
    for arm in made["arms"].values():
        arm["peak_bytes"] = int(100 * stock[0])
    return {**made, "figures": figures, "trace": [figures]}


FIRST = part([2.0, 2.2], [1.0, 1.0], 1e-7, share=0.5)
SECOND = part([3.0, 3.0, 3.3], [2.0, 1.5, 1.1], 3e-7, share=0.4)


def test_joined_samples_follow_one_another() -> None:
    found = join(toys.EXPERIMENT, {}, [FIRST, SECOND])
    stock, other = (found["arms"][name]["samples"] for name in ("stock", "other"))
    assert stock == [2.0, 2.2, 3.0, 3.0, 3.3]
    assert other == [1.0, 1.0, 2.0, 1.5, 1.1]
    assert found["arms"]["stock"]["median"] == 3.0
    assert found["arms"]["stock"]["peak_bytes"] == 300
    assert found["errors"] == {"other": 3e-7}
    whole = paired_ratio(stock, other, groups=[2, 3])
    assert (found["ratios"]["other"]["low"], found["ratios"]["other"]["high"]) == (whole.low, whole.high)
    assert found["aa"]["value"] == 1.0
    assert groups(found) == [2, 3]
    assert found["figures"] == {"share": 0.5, "concluded": 5}
    assert found["trace"] == [{"share": 0.5}]
    assert [each["figures"] for each in found["processes"]] == [{"share": 0.5}, {"share": 0.4}]


def test_one_process_is_left_as_it_is() -> None:
    found = join(toys.EXPERIMENT, {}, [FIRST])
    assert groups(found) is None
    assert found == {**FIRST, "figures": {"share": 0.5, "concluded": 2}}


SILENT = replace(toys.EXPERIMENT, conclude=lambda *_: {})


def test_an_arm_that_one_process_did_not_have_says_so() -> None:
    lacking = part([3.0], [1.0])
    del lacking["arms"]["other"], lacking["errors"]["other"]
    for results in ([FIRST, lacking], [lacking, FIRST]):
        other = join(SILENT, {}, results)["arms"]["other"]
        assert other["samples"] == []
        assert other["warnings"] == ["not timed: only 1 of 2 processes had it"]


def test_an_error_that_is_not_finite_stays_unknown() -> None:
    assert join(SILENT, {}, [part([2.0], [1.0], math.inf), SECOND])["errors"] == {"other": None}


def test_a_drift_is_one_processs_and_no_difference_between_them() -> None:
    def found(*every: list[float]) -> list[str]:
        return join(SILENT, {}, [part(times, times) for times in every])["arms"]["other"]["warnings"]

    rising = [1 + 0.015 * n for n in range(10)]
    assert found(rising, rising) == ["the samples drift: slower by 13% over the run"]
    assert found([1.0] * 10, [1.05] * 10, [1.1] * 10) == []


def test_rounds_go_on_where_the_last_process_ended() -> None:
    """So that no arm comes first more often than the others, however odd the shares are."""
    every: list[str] = []
    for each in shares(Options(samples=10, warm_ups=0, processes=3), whole=False):
        every += order(["a", "b"], each.samples, before=each.first)
    assert every == order(["a", "b"], 10)


def test_an_arm_that_one_process_did_not_time_has_no_samples() -> None:
    """Half of its samples would be held against another process's stock."""
    refused = part([3.0], [1.0])
    refused["arms"]["other"] = {"samples": [], "median": None, "warnings": ["not timed: it differs"]}
    found = join(SILENT, {}, [FIRST, refused])
    assert found["arms"]["other"]["samples"] == []
    assert found["arms"]["other"]["warnings"] == ["not timed: it differs"]
    assert "other" not in found["ratios"]
    assert found["aa"]["pairs"] == 3


def test_a_cell_without_arms_keeps_the_figures_of_every_process() -> None:
    found = join(toys.EXPERIMENT, {}, [{"figures": {"a": 1}}, {"figures": {"a": 2}}])
    assert found["figures"] == {"a": 1}
    assert [each["figures"]["a"] for each in found["processes"]] == [1, 2]


def test_a_cells_processes_share_what_the_first_calibrated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(library.calibrate, "calibrate", lambda *_, **given: made.append(given) or [])
    monkeypatch.setattr(library, "open_table", lambda path: [path] if made else [])
    made: list[Any] = []
    first = library.calibrated(None, [64], 1.0, shared=str(tmp_path))
    second = library.calibrated(None, [64], 1.0, shared=str(tmp_path))
    assert first == second == (str(tmp_path / "calibrated.json"), {})
    assert len(made) == 1
