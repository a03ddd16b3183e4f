"""What a user may set, as arguments of `patch()` or as `FUSIONML_*` environment variables."""

from __future__ import annotations

import math
import numbers
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MAX_RATIO = 0.5
"""Largest CPU share on a CPU+GPU pair."""
MAX_EQUAL_RATIO = 0.9
"""Largest CPU share between two equal units (two CPU streams)."""

BOUNDARIES = ("eager", "async", "none")
CPU_DTYPES = ("auto", "native", "float32")
GATES = ("auto", "periodic", "lock", "off")


@dataclass(frozen=True)
class Settings:
    """All settings; each is also an environment variable `FUSIONML_<NAME>`.

    Arguments given in code win over the environment, and the environment over these defaults.
    """

    enabled: bool = True
    """Off: `patch()` does nothing and everything is stock."""
    ratio: float | None = None
    """A fixed CPU share for every layer; None asks the table, then the built-in default."""
    min_rows: int = 256
    """Fewest rows (tokens in one call) that may be split; below it a call is stock."""
    boundary: str = "eager"
    """How the input is made real before a split: `eager`, `async` or `none`."""
    cpu_dtype: str = "auto"
    """Arithmetic of the CPU rows: `auto`, `native` or `float32`."""
    gate: str = "auto"
    """The no-regression gate: `auto`, `periodic`, `lock` or `off`."""
    table: str | None = None
    """Path of the ratio table; None is the default place."""
    quantized: bool = True
    """Whether quantised layers may be split."""
    moe: bool = True
    """Whether expert layers may be split."""


def _flag(text: str) -> bool:
    low = text.strip().lower()
    if low in ("1", "true", "yes", "on"):
        return True
    if low in ("0", "false", "no", "off", ""):
        return False
    raise ValueError


_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "enabled": (_flag, "0 or 1"),
    "ratio": (float, "a number"),
    "min_rows": (int, "a whole number"),
    "boundary": (str, "a word"),
    "cpu_dtype": (str, "a word"),
    "gate": (str, "a word"),
    "table": (str, "a path"),
    "quantized": (_flag, "0 or 1"),
    "moe": (_flag, "0 or 1"),
}


def home() -> Path:
    """The folder of all files of ours; safe to delete."""
    given = os.environ.get("FUSIONML_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(given).expanduser() if given else Path(cache).expanduser() / "fusionml"
    except RuntimeError:  # no home directory, as for a user of a container without an entry
        return Path(tempfile.gettempdir()) / f"fusionml-{os.getuid()}"


def names() -> tuple[str, ...]:
    """The names of all settings."""
    return tuple(f.name for f in fields(Settings))


def resolve(
    given: Mapping[str, Any], *, max_ratio: float, environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings from arguments, environment and defaults, in that order.

    Args:
        given: the settings named in code; values of None count as not given.
        max_ratio: the largest CPU share that this machine's pair allows.
        environ: the environment, `os.environ` by default.

    Raises:
        ValueError: names the setting, the value and what is allowed.
        TypeError: a setting that does not exist.
    """
    environ = os.environ if environ is None else environ
    unknown = sorted(set(given) - set(names()))
    if unknown:
        raise TypeError(f"unknown setting {unknown[0]!r}; the settings are {', '.join(names())}")
    values: dict[str, Any] = {}
    for name in names():
        if given.get(name) is not None:
            values[name] = _checked(name, given[name], name, max_ratio)
        elif environ.get(variable(name), "") != "":
            values[name] = _from_text(name, environ[variable(name)], max_ratio)
    return Settings(**values)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"FUSIONML_{name.upper()}"


def _from_text(name: str, text: str, max_ratio: float) -> Any:
    parse, kind = _PARSERS[name]
    try:
        value = parse(text)
    except ValueError:
        raise ValueError(f"{variable(name)}={text!r} is not {kind}") from None
    return _checked(name, value, variable(name), max_ratio)


def _checked(name: str, value: Any, label: str, max_ratio: float) -> Any:
    """The value in its own type, or a ValueError that names it."""
    words = {"boundary": BOUNDARIES, "cpu_dtype": CPU_DTYPES, "gate": GATES}
    if name in words:
        return _word(label, value, words[name])
    if name in ("enabled", "quantized", "moe"):
        if not isinstance(value, bool):
            raise ValueError(f"{label}={value!r} is not True or False")
        return value
    if name == "table":
        return _path(label, value)
    if name == "min_rows":
        return _whole(label, value)
    return check_ratio(value, max_ratio, label)


def _word(label: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{label}={value!r} is not allowed; choose one of {', '.join(allowed)}")
    return str(value)


def _whole(label: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 2:
        raise ValueError(f"{label}={value!r} is not a whole number of at least 2")
    return int(value)


def _path(label: str, value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{label}={value!r} is not the path of a file")
    return os.path.expanduser(os.fspath(value))


def check_ratio(value: Any, max_ratio: float, label: str = "ratio") -> float:
    """The CPU share as a float in [0, max_ratio].

    Raises:
        ValueError: it is not a number or outside the range.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{label}={value!r} is not a number between 0 and {max_ratio}")
    if not 0 <= float(value) <= max_ratio:
        raise ValueError(f"{label}={value!r} is outside 0 to {max_ratio}, the range on this machine")
    return float(value)
