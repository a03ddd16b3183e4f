"""Figures and names as a reader sees them; `-` where nothing is known."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from benchmarks.report_read import Interval, number

NONE = "-"
NOT_YET = "not yet measured"
_TIMES = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_BYTES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
_MOST_FIGURES = 60
_SPEAKING = ("what", "geometry", "model", "dtype", "policy")
"""Parameters whose values need no name before them."""


def clean(value: object) -> str:
    """On one line, without what a page cannot hold or what would turn the text around it."""
    flat = " ".join(str(value).split())
    kept = (letter for letter in flat if unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Co", "Cn"))
    return "".join(kept)


def speedup(found: Interval | None) -> str:
    """`1.79x [1.77, 1.80]`; without an interval where there was one pair."""
    if found is None:
        return NONE
    if found.low is None or found.high is None:
        return f"{times(found.value)} (no interval)"
    return f"{times(found.value)} [{plain(found.low)}, {plain(found.high)}]"


def times(value: float) -> str:
    return f"{plain(value)}x"


def plain(value: float) -> str:
    """Two decimals, as every speedup has; more digits or fewer only where two would say nothing."""
    if value != 0 and not 0.005 <= abs(value) < 1e5:
        return f"{value:.2g}"
    return f"{value:.2f}"


def seconds(value: float | None) -> str:
    """In the unit that leaves the figure between 1 and 1000."""
    if value is None:
        return NONE
    for unit, size in _TIMES:
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if abs(value) < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value / 1e-9:.2g} ns" if value else "0 s"


def count_of_bytes(value: float | None) -> str:
    if value is None:
        return NONE
    for unit, size in _BYTES:
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def words(name: str) -> str:
    """A key of a JSON as words."""
    return clean(name.replace("_", " "))


def figure(name: str, value: Any) -> str:
    """Any value that a cell reports, with the unit that its name gives."""
    found = number(value)
    if value is None or (found is None and isinstance(value, float)):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if found is None:
        return _other(name, value)
    if re.search(r"(^|[_ ])(seconds|ttft|time|extra)([_ ]|$)", name):
        return seconds(found)
    if re.search(r"(^|_)bytes$", name):
        return count_of_bytes(found)
    if re.search(r"(^|[_ ])speedup$", name):
        return times(found)
    if isinstance(value, int) and abs(value) < 10**9:
        return str(value)
    return f"{found:.4g}"


def _other(name: str, value: Any) -> str:
    if isinstance(value, list):
        if len(value) > 8:
            return f"{len(value)} values"
        return ", ".join(figure(name, item) for item in value) or NONE
    return clean(value)[:200]


def flat(figures: dict[str, Any], before: str = "", depth: int = 2) -> Iterator[tuple[str, str]]:
    """Every figure by its words, nested ones by both names; intervals as one."""
    for name, value in list(figures.items())[:_MOST_FIGURES]:
        label = f"{before} {words(name)}".strip()
        if name == "pair model" or (isinstance(value, dict) and "predicted_speedup" in value):
            continue  # it has a section of its own
        if not isinstance(value, dict):
            yield label, figure(name, value)
        elif (found := _interval(name, value)) is not None:
            yield label, found
        elif depth:
            yield from flat(value, label, depth - 1)
        elif value:
            yield label, f"{len(value)} figures, in the file"


def _interval(name: str, value: dict[str, Any]) -> str | None:
    middle, low, high = (value.get(key) for key in ("value", "low", "high"))
    if number(middle) is None or not {"low", "high"} <= set(value):
        return None
    if "pairs" in value:
        return speedup(Interval(float(middle), number(low), number(high)))
    return f"{figure(name, middle)} [{figure(name, low)}, {figure(name, high)}]"


def error(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def share(value: float) -> str:
    return f"{value * 100:.3g} %"


def of_paper(value: Any, unit: str, says: str) -> str:
    """A figure of `paper.json`, with as many decimals as the paper's text gives it."""
    if isinstance(value, dict):
        low, high = (of_paper(value.get(key), unit, says) for key in ("low", "high"))
        return f"{low} to {high}"
    found = number(value)
    if found is None:
        return clean(f"{value} {unit}").strip()
    if unit == "share":
        return share(found)
    written = [f"{found:.2f}", f"{found:.1f}", f"{found:g}"]
    shown = next((form for form in written if form in says), f"{found:g}")
    if unit == "x":
        return f"{shown}x"
    return shown if unit == "relative error" else clean(f"{shown} {unit}")


def parameters(values: dict[str, Any]) -> str:
    """`rows 512, float32`: what a cell was measured with."""
    shown = {name: value for name, value in values.items() if name not in ("environ", "note")}
    return ", ".join(value if label in _SPEAKING else f"{label} {value}" for label, value in flat(shown))


def markdown(value: object) -> str:
    """Text that is only text in a Markdown table."""
    escaped = clean(value).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    escaped = re.sub(r"([\\`*|~#])", r"\\\1", escaped)
    escaped = re.sub(r"\](?=[(\[:])", r"\\]", escaped)  # no link; intervals keep their plain brackets
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", escaped)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round figures that cover `low` to `high`: the outermost are at or beyond both."""
    if not high > low:
        low, high = low - abs(low) / 10 - 0.05, high + abs(high) / 10 + 0.05
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]
