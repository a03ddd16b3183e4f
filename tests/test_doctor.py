"""`fusionml doctor`: whether it is on, for which layers, why not for the others, and what to do next."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from checkpoints import small_checkpoint
from commands import Answer, assert_refused, command
from models import linear_layers, tiny

import fusionml
from fusionml import cli, doctor, loading, machine, pressure
from fusionml.pressure import Reading
from fusionml.ratios import Site
from fusionml.session import Session, open_table
from fusionml.table import Entry

Main = Callable[..., Answer]


@pytest.fixture(autouse=True)
def one_math_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "math_fingerprint", lambda: {"float32": 5.0, "bfloat16": 1.0})


@pytest.fixture
def main(capsys: pytest.CaptureFixture[str]) -> Main:
    return lambda *argv: command(capsys, "doctor", *argv)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three blocks of 128 wide layers, in a folder whose name a shell would take apart."""
    home = tmp_path_factory.mktemp("my models")
    return str(small_checkpoint(home, num_hidden_layers=3, intermediate_size=192))


def report_of(answer: Answer) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(answer.out)
    return report


def filled(path: Path | None = None, when: str = "2026-08-01T12:00:00+00:00") -> str:
    table = open_table(None if path is None else str(path))
    table.put(
        Site("linear", "bfloat16", 128, 192, False, 512),
        Entry(0.3, 0.2, when, 0.01, "mains", 30, "native", 1e-5),
    )
    table.save()
    return table.path


# --- is it on


def test_it_is_on_and_says_for_which_layers(main: Main, checkpoint: str) -> None:
    answer = main("--model", checkpoint, "--json")
    report = report_of(answer)
    assert (answer.status, report["on"], report["off_because"]) == (0, True, [])
    model = loading.load(checkpoint)[0]
    layers = linear_layers(model)
    linear = report["layers"]["linear"]
    assert linear["layers"] == len(layers) == 22
    assert linear["eligible"] == 14, "two of three blocks of seven"
    assert sum(linear["stock"].values()) == linear["layers"] - 14
    assert any("behind the last cache" in reason for reason in linear["stock"])
    assert linear["share"] == pytest.approx(1.0)
    assert report["status"]["eligible"] == pytest.approx(1.0)


def test_without_a_model_it_says_whether_it_would_be_on(main: Main) -> None:
    answer = main("--json")
    report = report_of(answer)
    assert (answer.status, report["on"], report["layers"], report["model"]) == (0, True, None, None)


def test_nothing_stays_patched_and_the_text_says_the_same(main: Main, checkpoint: str) -> None:
    stock = nn.Linear.__call__
    answer = main("--model", checkpoint)
    assert answer.status == 0
    assert nn.Linear.__call__ is stock
    assert fusionml.status()["patched"] is False
    lines = answer.out.splitlines()
    assert lines[0] == f"FusionML {fusionml.__version__} is on"
    assert any(line.startswith("linear") and "14 of 22 layers may split, 100%" in line for line in lines)
    assert any("stock: 7 behind the last cache" in line for line in lines)
    assert lines[-1].startswith("next ")


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("FUSIONML_ENABLED", "0", "FUSIONML_ENABLED=0"), ("FUSIONML_RATIO", "0", "FUSIONML_RATIO=0")],
)
def test_off_by_the_environment_is_the_only_reason(
    monkeypatch: pytest.MonkeyPatch,
    main: Main,
    checkpoint: str,
    name: str,
    value: str,
    words: str,
    model: bool,
) -> None:
    """The layers are told all the same: they would split if it were on."""
    monkeypatch.setenv(name, value)
    answer = main(*(["--model", checkpoint] if model else []), "--json")
    report = report_of(answer)
    assert (answer.status, report["on"]) == (1, False)
    assert len(report["off_because"]) == 1
    assert words in report["off_because"][0]
    assert "unset" in report["off_because"][0]
    if model:
        assert report["layers"]["linear"]["eligible"] == 14
        assert report["status"]["eligible"] == pytest.approx(1.0)
    text = main(*(["--model", checkpoint] if model else []))
    assert text.status == 1
    assert "is off" in text.out.splitlines()[0]
    assert words in text.out.splitlines()[1]


def test_a_model_of_which_nothing_may_split_is_off_with_a_reason_for_each_kind(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str
) -> None:
    load = loading.load

    def quantised(path: str) -> Any:
        model, *rest = load(path)
        nn.quantize(model, group_size=32, bits=4, mode="mxfp4")
        mx.eval(model.parameters())
        return model, *rest

    monkeypatch.setattr(loading, "load", quantised)
    answer = main("--model", checkpoint, "--json")
    report = report_of(answer)
    assert (answer.status, report["on"]) == (1, False)
    assert report["off_because"] == ["no layer of this model may split"]
    (kind,) = report["layers"]
    assert kind == "quantized"
    layers = report["layers"][kind]
    assert layers["eligible"] == 0
    assert sum(layers["stock"].values()) == layers["layers"]
    assert any("quantised" in reason for reason in layers["stock"])


class Mixed(nn.Module):
    """A layer for each reason not to split, and one that may."""

    def __init__(self) -> None:
        super().__init__()
        self.good = nn.Linear(128, 256)
        self.narrow = nn.Linear(128, 64)
        self.quantised = nn.QuantizedLinear(128, 256, mode="mxfp4")
        self.integers = nn.Linear(128, 128, bias=False)
        self.integers.weight = mx.zeros((128, 128), mx.int32)
        self.convolution = nn.Conv1d(128, 256, 3)
        self.embedding = nn.Embedding(500, 128)
        self.head = nn.Linear(128, 500)


def test_every_exclusion_has_its_reason(session: Session) -> None:
    model = Mixed()
    model.eval()
    with fusionml.patched():
        session.known.add(model, from_loader=False)
        report = doctor.examine(model, "mixed")
    stock = {
        (kind, reason): count
        for kind, layers in report["layers"].items()
        for reason, count in layers["stock"].items()
    }
    words = {
        ("linear", "narrower than 128"): 1,
        ("linear", "weight of type"): 1,
        ("quantized", "quantised as mxfp4"): 1,
        ("Conv1d", "Conv1d: not split"): 1,
        ("linear", "as wide as the vocabulary"): 1,
    }
    for (kind, word), count in words.items():
        assert sum(n for (k, reason), n in stock.items() if k == kind and word in reason) == count, word
    assert sum(stock.values()) == 5
    assert "Embedding" not in report["layers"]
    assert report["layers"]["linear"]["eligible"] == 1
    shares = sum(layers["share"] for layers in report["layers"].values())
    assert shares == pytest.approx(1.0)
    text = doctor.render(report)
    for _, reason in stock:
        assert reason in text


def test_experts_count_as_often_as_a_token_goes_to_them(session: Session) -> None:
    model = tiny("qwen3_moe", num_experts_per_tok=4)
    with fusionml.patched():
        session.known.add(model, from_loader=True)
        layers = doctor.examine(model, "experts")["layers"]
    attention, experts, router = 4 * 128 * 128, 4 * 3 * 128 * 128, 128 * 8
    assert layers["experts"]["share"] == pytest.approx(experts / (attention + experts + router))
    assert layers["experts"]["eligible"] == 6


# --- wrong use


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("FUSIONML_BOUNDARY", "eagre", "eager, async, none"),
        ("FUSIONML_CPU_DTYPE", "float64", "auto, native, float32"),
        ("FUSIONML_GATE", "on", "auto, periodic, lock, off"),
        ("FUSIONML_MIN_ROWS", "many", "a whole number"),
        ("FUSIONML_RATIO", "1.5", "0 to"),
        ("FUSIONML_ENABLED", "maybe", "0 or 1"),
    ],
)
def test_a_wrong_variable_is_one_line(
    monkeypatch: pytest.MonkeyPatch, main: Main, name: str, value: str, allowed: str
) -> None:
    monkeypatch.setenv(name, value)
    assert_refused(main(), "fusionml doctor: ", f"{name}=", value, allowed)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/no/such/model"], ["--model /no/such/model", "no such folder"]),
        (["--model"], ["--model"]),
        (["--josn"], ["--josn"]),
        (["compare"], ["compare"]),
    ],
)
def test_wrong_use_is_one_line(main: Main, options: list[str], words: list[str]) -> None:
    assert_refused(main(*options), *words)


def test_the_exit_status_is_the_processs(tmp_path: Path) -> None:
    root = str(Path(fusionml.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "FUSIONML_ENABLED": "0"}
    doctor_command = [sys.executable, "-m", "fusionml", "doctor", "--json"]
    done = subprocess.run(doctor_command, env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["on"] is False


# --- what it tells


def test_the_json_is_what_a_bug_report_should_carry(main: Main, checkpoint: str) -> None:
    report = report_of(main("--model", checkpoint, "--json"))
    assert set(report) == {
        "on",
        "off_because",
        "next",
        "environment",
        "pressure",
        "table",
        "model",
        "layers",
        "warnings",
        "status",
    }
    environment = report["environment"]
    versions = {"python", "mlx", "mlx_lm", "fusionml"}
    assert set(environment) >= versions | {"chip", "cores", "os_build", "backend", "default_device"}
    assert set(report["pressure"]) == set(Reading.__dataclass_fields__)
    assert report["status"]["patched"] is True
    assert set(report["status"]["settings"]) == set(fusionml.settings.names())


def test_the_conditions_are_told_and_the_unknown_is_unknown(
    main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pressure, "read", lambda: Reading())
    line = next(line for line in main().out.splitlines() if line.startswith("now "))
    for name in ("memory pressure", "free memory", "thermal state", "low-power mode"):
        assert f"{name} unknown" in line
    reading = Reading(level="warning", free_bytes=3 * 2**30, thermal="heavy", low_power=False)
    monkeypatch.setattr(pressure, "read", lambda: reading)
    line = next(line for line in main().out.splitlines() if line.startswith("now "))
    for words in (
        "pressure warning",
        "free memory 3.0 GiB",
        "thermal state heavy",
        "low-power mode off",
    ):
        assert words in line


@pytest.mark.parametrize(("value", "warned"), [("1", True), ("0", False), (None, False)])
def test_the_variable_that_can_hang_the_gpu_is_warned_about(
    main: Main, monkeypatch: pytest.MonkeyPatch, value: str | None, warned: bool
) -> None:
    monkeypatch.delenv("MLX_METAL_FAST_SYNCH", raising=False)
    if value is not None:
        monkeypatch.setenv("MLX_METAL_FAST_SYNCH", value)
    answer = main()
    assert answer.status == 0, "a warning is no reason to be off"
    found = [line for line in answer.out.splitlines() if line.startswith("warning") and "FAST_SYNCH" in line]
    assert bool(found) == warned
    assert (f"MLX_METAL_FAST_SYNCH={value}" in answer.out) == (value is not None)


@pytest.mark.parametrize(
    ("backend", "cores", "words"),
    [("cuda", 8, "CUDA"), ("cpu", 1, "one CPU core"), ("cpu", 2, None), ("metal", 8, None)],
)
def test_a_machine_that_cannot_gain_is_warned_about(
    main: Main, monkeypatch: pytest.MonkeyPatch, backend: str, cores: int, words: str | None
) -> None:
    monkeypatch.delenv("MLX_METAL_FAST_SYNCH", raising=False)
    monkeypatch.setattr(machine, "backend", lambda: backend)
    monkeypatch.setattr(machine, "cores", lambda: cores)
    warnings = report_of(main("--json"))["warnings"]
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


def test_the_table_and_its_age_are_told(main: Main) -> None:
    path = open_table(None).path
    assert f"table     {path}: 0 sites, newest none" in main().out
    filled(when="2026-05-01T08:00:00+00:00")
    table = report_of(main("--json"))["table"]
    assert table == {
        "path": path,
        "entries": 1,
        "newest": "2026-05-01T08:00:00+00:00",
        "ignored": None,
    }
    assert f"table     {path}: 1 sites, newest 2026-05-01T08:00:00+00:00" in main().out


def test_what_of_the_table_is_ignored_is_told(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    filled()
    identity = machine.identity()
    monkeypatch.setattr(machine, "identity", lambda: identity | {"mlx": "0.0.1"})
    report = report_of(main("--json"))
    assert report["table"]["entries"] == 0
    assert "1 entries ignored" in report["table"]["ignored"]
    assert "mlx" in report["table"]["ignored"]
    assert "ignored: 1 entries" in main().out


def test_the_table_of_the_environment_is_the_one_that_is_told(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = filled(tmp_path / "mine.json")
    monkeypatch.setenv("FUSIONML_TABLE", path)
    assert report_of(main("--json"))["table"]["path"] == path
    assert report_of(main("--json"))["table"]["entries"] == 1


# --- the next command


def parsed(line: str) -> Any:
    """The arguments of a command line as the command itself would read them."""
    words = shlex.split(line)
    while words[0] == "env" or words[0].startswith(("-u", "FUSIONML_")):
        words.pop(0)
    assert words[:3] == ["python", "-m", "fusionml"], line
    return cli._parser().parse_args(words[3:])


@pytest.mark.parametrize("model", [False, True])
@pytest.mark.parametrize(("measured", "name"), [(False, "calibrate"), (True, "compare")])
def test_the_next_command_can_be_run_as_it_stands(
    main: Main, checkpoint: str, model: bool, measured: bool, name: str
) -> None:
    if measured:
        filled()
    report = report_of(main(*(["--model", checkpoint] if model else []), "--json"))
    args = parsed(report["next"])
    assert args.name == name
    assert args.model == (checkpoint if model else None)


@pytest.mark.parametrize("name", ["FUSIONML_ENABLED", "FUSIONML_RATIO"])
def test_the_next_command_mends_what_is_off(
    main: Main, monkeypatch: pytest.MonkeyPatch, checkpoint: str, name: str, tmp_path: Path
) -> None:
    """Run as it stands, with the environment that was found wanting."""
    monkeypatch.setenv(name, "0")
    line = report_of(main("--model", checkpoint, "--json"))["next"]
    assert parsed(line).model == checkpoint
    root = str(Path(fusionml.__file__).parents[1])
    line = line.replace("python", shlex.quote(sys.executable), 1)
    environment = os.environ | {"PYTHONPATH": root}
    done = subprocess.run(line, shell=True, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "is on" in done.stdout


def test_with_nothing_to_split_the_next_command_is_about_another_model(
    main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small = small_checkpoint(tmp_path, hidden_size=64, intermediate_size=64)
    report = report_of(main("--model", str(small), "--json"))
    assert report["on"] is False
    assert parsed(report["next"]).model is None
