"""The benchmarks measure what they say they measure; how fast anything is, no test asks."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import small_checkpoint

from benchmarks import linears, overhead
from fusionml import forwards, machine, measure, split

Fixture = pytest.MonkeyPatch


# --- overhead


def test_stock_is_mlxs_own_function_and_patched_is_ours(monkeypatch: Fixture) -> None:
    stock, seen = nn.Linear.__call__, []
    layer = overhead.known_layer(128)

    def seconds(call: Any, calls: int) -> float:
        seen.append(nn.Linear.__call__ is stock)
        assert call().shape == (1, 255, 128)
        return 1.0

    monkeypatch.setattr(overhead, "seconds", seconds)
    samples = overhead.sample(layer, 255, pairs=2, calls=1)
    assert seen == [True, False, True, True, False, True], "stock, patched, stock again, and back"
    assert {arm: len(times) for arm, times in samples.items()} == {"stock": 2, "patched": 2, "stock again": 2}


def test_the_calls_are_the_largest_that_stay_stock_and_one_row(monkeypatch: Fixture) -> None:
    large = []
    monkeypatch.setattr(forwards, "decide", lambda *args: large.append(args))
    result = overhead.measure(pairs=2, calls=3)
    assert [case["rows"] for case in result["cases"]] == [1, 255]
    assert large == []
    assert json.loads(json.dumps(result)) == result
    assert set(machine.stamp()) == set(result["environment"])
    shown = overhead.render(result)
    assert "1 row (decode): stock" in shown
    assert "255 rows: stock" in shown
    assert "load average" in shown


def test_the_extra_time_is_the_difference_where_times_are_steady() -> None:
    assert overhead.extra([2.0] * 8, [2.5] * 8) == pytest.approx({"value": 0.5, "low": 0.5, "high": 0.5})
    found = overhead.extra([2.0] * 8, [2.1, 2.2, 2.3, 2.4, 2.5, 2.6, 2.7, 2.8])
    assert 0.1 <= found["low"] < found["value"] < found["high"] <= 0.8
    assert found["value"] == pytest.approx(0.45, abs=0.01)
    assert overhead.extra([2.0], [3.0]) == {"value": pytest.approx(1.0), "low": None, "high": None}


def test_seconds_are_of_one_call_after_a_warm_up() -> None:
    called = []
    taken = overhead.seconds(lambda: called.append(1), 50)
    assert len(called) == 100
    assert 0 < taken < 1


# --- linears


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(small_checkpoint(tmp_path_factory.mktemp("home"), num_hidden_layers=3))


def test_every_live_layer_is_measured_stock_against_split(
    monkeypatch: Fixture, checkpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    stock, calls, splits = nn.Linear.__call__, [], []
    run_linear, seconds = split.run_linear, linears.seconds

    def counted(layers: list[nn.Linear], given: list[mx.array]) -> float:
        calls.append((nn.Linear.__call__ is stock, [tuple(layer.weight.shape) for layer in layers], given))
        before = len(splits)
        taken = seconds(layers, given)
        assert len(splits) - before == (0 if calls[-1][0] else len(layers))
        return taken

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, m: int, *rest: Any) -> mx.array:
        splits.append(m)
        return run_linear(x, weight, bias, m, *rest)

    monkeypatch.setattr(split, "run_linear", spy)
    monkeypatch.setattr(linears, "seconds", counted)
    monkeypatch.setenv("FUSIONML_RATIO", "0.25")
    file = tmp_path / "out.json"
    assert linears.main(["--model", checkpoint, "--rows", "300", "--runs", "2", "--json", str(file)]) == 0
    assert [is_stock for is_stock, _, _ in calls] == [True, False, True, False, True, True, False, True]
    # Two of three blocks are read by a prompt: four layers of attention, three of the rest, the head never.
    assert calls[0][1] == [(128, 128)] * 14
    assert {tuple(x.shape) for x in calls[0][2]} == {(1, 300, 128)}
    assert {x.dtype for x in calls[0][2]} == {mx.bfloat16}
    assert set(splits) == {split.cpu_rows(300, 0.25)}
    result = json.loads(file.read_text())
    assert (result["layers"], result["rows"]) == (14, 300)
    assert {arm: len(times) for arm, times in result["samples"].items()} == dict.fromkeys(linears.ARMS, 2)
    ratio = measure.paired_ratio(result["samples"]["stock"], result["samples"]["split"])
    assert result["ratio"]["value"] == ratio.value
    assert set(machine.stamp()) == set(result["environment"])
    out = capsys.readouterr().out
    assert "14 live linear layers, 300 rows, 2 pairs" in out
    assert "CPU share 0.25" in out


def test_layers_are_in_the_order_of_the_model_and_inputs_of_their_widths(monkeypatch: Fixture) -> None:
    layers = [nn.Linear(128, 256), nn.Linear(256, 128), nn.Linear(128, 128)]
    layers[1].set_dtype(mx.float16)
    given = linears.inputs(layers, 40)
    assert [x.shape for x in given] == [(1, 40, 128), (1, 40, 256), (1, 40, 128)]
    assert [x.dtype for x in given] == [mx.float32, mx.float16, mx.float32]
    assert given[0] is given[2]
    assert mx.std(given[0]).item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rows", "1"], "--rows 1 is less than 2"),
        (["--runs", "0"], "--runs 0 is less than 1"),
        (["--model", "/no/such/model"], "--model /no/such/model: there is no such folder"),
    ],
)
def test_wrong_use_names_the_option_and_the_value(
    capsys: pytest.CaptureFixture[str], checkpoint: str, options: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        linears.main(["--model", checkpoint, *options])
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_of_which_nothing_may_split_is_refused(
    monkeypatch: Fixture, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    narrow = str(small_checkpoint(tmp_path, hidden_size=64, intermediate_size=64))
    with pytest.raises(SystemExit) as stopped:
        linears.main(["--model", narrow])
    assert stopped.value.code == 2
    assert "nothing of it may split" in capsys.readouterr().err
