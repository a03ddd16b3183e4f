"""Settings from code, environment and defaults, and what a wrong one says."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionml import settings
from fusionml.settings import Settings, resolve

NAMES = ("enabled", "ratio", "min_rows", "boundary", "cpu_dtype", "gate", "table", "quantized", "moe")

# name, value in code, text in the environment, the value that both mean
GOOD: list[tuple[str, Any, str, Any]] = [
    ("enabled", False, "0", False),
    ("enabled", True, "1", True),
    ("enabled", False, " No ", False),
    ("enabled", True, "TRUE", True),
    ("ratio", 0, "0", 0.0),
    ("ratio", 0.5, "0.5", 0.5),
    ("min_rows", 2, "2", 2),
    ("min_rows", 4096, "4096", 4096),
    *[("boundary", word, word, word) for word in ("eager", "async", "none")],
    *[("cpu_dtype", word, word, word) for word in ("auto", "native", "float32")],
    *[("gate", word, word, word) for word in ("auto", "periodic", "lock", "off")],
    ("table", "/some/table.json", "/some/table.json", "/some/table.json"),
    ("table", Path("/some/table.json"), "/some/table.json", "/some/table.json"),
    ("table", "~/t.json", "~/t.json", os.path.expanduser("~/t.json")),
    ("table", Path("~/t.json"), "~/t.json", os.path.expanduser("~/t.json")),
    ("ratio", np.float32(0.25), "0.25", 0.25),
    ("ratio", np.float64(0.5), "0.5", 0.5),
    ("ratio", np.int8(0), "0", 0.0),
    ("min_rows", np.int64(300), "300", 300),
    ("min_rows", np.uint8(32), "32", 32),
    ("quantized", False, "off", False),
    ("moe", False, "false", False),
]

# name, value in code, text in the environment or None where it cannot be written there, what is allowed
BAD: list[tuple[str, Any, str | None, str]] = [
    ("enabled", "maybe", "maybe", ""),
    ("enabled", 1, None, "True or False"),
    ("ratio", 1.5, "1.5", "0 to 0.5"),
    ("ratio", -0.01, "-0.01", "0 to 0.5"),
    ("ratio", 0.51, "0.51", "0 to 0.5"),
    ("ratio", float("nan"), "nan", "between 0 and 0.5"),
    ("ratio", float("inf"), "inf", "between 0 and 0.5"),
    ("ratio", True, None, "between 0 and 0.5"),
    ("ratio", "a third", "a third", "number"),
    ("min_rows", 1, "1", "at least 2"),
    ("min_rows", -5, "-5", "at least 2"),
    ("min_rows", 2.5, "2.5", "whole number"),
    ("min_rows", True, None, "at least 2"),
    ("min_rows", np.int64(1), None, "at least 2"),
    ("min_rows", np.float64(300), None, "whole number"),
    ("ratio", np.float32("nan"), None, "between 0 and 0.5"),
    ("ratio", np.float32(0.75), None, "0 to 0.5"),
    ("boundary", "eagre", "eagre", "eager, async, none"),
    ("boundary", ["eager"], None, "eager, async, none"),
    ("cpu_dtype", "float16", "float16", "auto, native, float32"),
    ("gate", "on", "on", "auto, periodic, lock, off"),
    ("table", 5, None, "path"),
    ("quantized", "yes", "perhaps", ""),
    ("moe", 0, "2", ""),
]


def variable(name: str) -> str:
    return f"FUSIONML_{name.upper()}"


def test_settings_given_as_numpy_scalars_are_plain_data() -> None:
    made = resolve({"ratio": np.float32(0.25), "min_rows": np.int64(300)}, max_ratio=0.5, environ={})
    assert json.loads(json.dumps(dataclasses.asdict(made)))["ratio"] == 0.25


def test_the_defaults() -> None:
    made = resolve({}, max_ratio=0.5, environ={})
    assert made == Settings(True, None, 256, "eager", "auto", "auto", None, True, True)
    assert settings.names() == NAMES


@pytest.mark.parametrize(("name", "value", "text", "meant"), GOOD)
def test_a_good_value(name: str, value: Any, text: str, meant: Any) -> None:
    expected = dataclasses.replace(Settings(), **{name: meant})
    in_code = resolve({name: value}, max_ratio=0.5, environ={})
    in_environment = resolve({}, max_ratio=0.5, environ={variable(name): text})
    assert in_code == in_environment == expected
    assert type(getattr(in_code, name)) is type(getattr(in_environment, name)) is type(meant)


@pytest.mark.parametrize(("name", "value", "text", "allowed"), BAD)
def test_a_bad_value_is_named(name: str, value: Any, text: str | None, allowed: str) -> None:
    with pytest.raises(ValueError, match=name) as raised:
        resolve({name: value}, max_ratio=0.5, environ={})
    assert repr(value) in str(raised.value)
    assert allowed in str(raised.value)
    if text is None:
        return
    with pytest.raises(ValueError, match=variable(name)) as raised:
        resolve({}, max_ratio=0.5, environ={variable(name): text})
    assert text in str(raised.value)


def test_code_wins_over_the_environment_and_none_is_not_given() -> None:
    environ = {"FUSIONML_MIN_ROWS": "64", "FUSIONML_RATIO": "0.2", "FUSIONML_GATE": "nonsense"}
    made = resolve({"min_rows": 128, "ratio": None, "gate": "off"}, max_ratio=0.5, environ=environ)
    assert (made.min_rows, made.ratio, made.gate) == (128, 0.2, "off")


def test_an_empty_variable_is_no_variable() -> None:
    assert resolve({}, max_ratio=0.5, environ={variable(name): "" for name in NAMES}) == Settings()


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONML_MIN_ROWS", "777")
    assert resolve({}, max_ratio=0.5).min_rows == 777


def test_the_largest_ratio_is_the_pairs() -> None:
    assert resolve({"ratio": 0.9}, max_ratio=0.9, environ={}).ratio == 0.9
    with pytest.raises(ValueError, match=r"ratio=0.9 is outside 0 to 0.5"):
        resolve({"ratio": 0.9}, max_ratio=0.5, environ={})


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(TypeError, match=r"'rato'.*ratio"):
        resolve({"rato": 0.3}, max_ratio=0.5, environ={})


def test_settings_do_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().ratio = 0.3  # type: ignore[misc]
