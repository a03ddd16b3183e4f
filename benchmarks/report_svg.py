"""Pictures as inline SVG, told apart by shape and by words, never by colour alone.

Every picture is 360 units wide, about the width of a phone, so that its text stays readable there; the page's
style sheet gives the colours, in light and in dark. Whatever text comes in is escaped.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from markupsafe import Markup

from benchmarks.report_text import clean, nice_ticks

WIDTH = 360.0
LEFT, RIGHT = 8.0, 352.0
LINE = 14.0
Kind = Literal["measured", "paper", "predicted"]
MARKS = ("circle", "square", "triangle", "diamond", "cross", "plus")
_MOST_NAMED = 8
_LETTERS = 56
"""Letters of the pictures' text that fit across one."""


@dataclass(frozen=True)
class Row:
    """One line of `intervals`: a point, a range, or a point with its interval."""

    label: str
    shown: str
    value: float | None
    low: float | None = None
    high: float | None = None
    kind: Kind = "measured"


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Series:
    """`joined` by a line, where what lies between the points is more of the same."""

    label: str
    points: Sequence[Point]
    joined: bool = True


@dataclass(frozen=True)
class Band:
    """A range that the paper gives, across the whole picture."""

    label: str
    low: float
    high: float


@dataclass(frozen=True)
class Axis:
    """`log`: powers of two take equal room, as for sequence lengths."""

    label: str
    log: bool = False
    reference: float | None = None
    reference_label: str = ""
    bands: Sequence[Band] = field(default_factory=tuple)


@dataclass(frozen=True)
class Bar:
    """Work of one unit from `start` to `end`, in milliseconds."""

    lane: str
    start: float
    end: float


@dataclass(frozen=True)
class Track:
    """One arm of a timeline, with its bars; `kind` as in `Row`."""

    label: str
    shown: str
    bars: Sequence[Bar]
    kind: Kind = "measured"


def intervals(title: str, rows: Sequence[Row], axis: Axis) -> Markup:
    """One line for each row: its words, and below them the point with its interval on a common axis."""
    ends = [v for row in rows for v in (row.value, row.low, row.high) if v is not None]
    if axis.reference is not None:
        ends.append(axis.reference)
    ticks = nice_ticks(min(ends), max(ends))
    scale = _Scale(ticks[0], ticks[-1], LEFT + 6, RIGHT - 6)
    parts, y = [], 6.0
    for row in rows:
        y = _words(parts, row.label, row.shown, y)
        parts.append(_mark_row(row, scale, y + 6))
        y += 18
    grid = _vertical_grid(ticks, scale, y, axis)
    return _svg(title, y + 2 * LINE + 6, [*grid, *parts])


def lines(title: str, series: Sequence[Series], axis_x: Axis, axis_y: Axis) -> Markup:
    """Points with their intervals, joined, each series with a mark and a dash of its own; a key below."""
    points = [point for one in series for point in one.points]
    ys = [v for p in points for v in (p.y, p.low, p.high) if v is not None]
    ys += [v for band in axis_y.bands for v in (band.low, band.high)]
    if axis_y.reference is not None:
        ys.append(axis_y.reference)
    ticks = nice_ticks(min(ys), max(ys))
    top, bottom = 24.0, 196.0
    up = _Scale(ticks[0], ticks[-1], bottom, top)
    xs = sorted({point.x for point in points})
    across = _Scale(xs[0], xs[-1], 60, RIGHT - 20, log=axis_x.log)
    parts = [_text(LEFT, 12, axis_y.label), *_bands(axis_y.bands, up)]
    for tick in ticks:
        parts.append(_line(44, up(tick), RIGHT, up(tick), "grid"))
        parts.append(_text(40, up(tick) + 4, f"{tick:.4g}", "end"))
    if axis_y.reference is not None:
        parts.append(_line(44, up(axis_y.reference), RIGHT, up(axis_y.reference), "reference"))
    for x in _ticks_along(xs, across, axis_x.log):
        parts.append(_text(across(x), bottom + 15, f"{x:.6g}", "middle"))
    parts.append(_text((44 + RIGHT) / 2, bottom + 31, axis_x.label, "middle"))
    y = bottom + 42
    for place, one in enumerate(series):
        # A little apart, so that intervals that lie on each other can be told.
        shift = 5.0 * (place - (len(series) - 1) / 2) if one.joined else 0.0
        parts.append(_series(one, place, across, up, shift))
        y = _key(parts, one.label, _sample(place, y + 6, one.joined), y)
    for band in axis_y.bands:
        y = _key(parts, band.label, [_box(LEFT, y + 1, 28, 10, "band")], y)
    return _svg(title, y + 4, parts)


def timeline(title: str, tracks: Sequence[Track], unit: str = "ms") -> Markup:
    """Bars from a common start: which unit worked when (Figure 1)."""
    longest = max(bar.end for track in tracks for bar in track.bars)
    ticks = nice_ticks(0.0, longest)
    scale = _Scale(0.0, ticks[-1], LEFT + 6, RIGHT - 6)
    parts, y = [], 6.0
    for track in tracks:
        y = _words(parts, track.label, track.shown, y)
        lanes = list(dict.fromkeys(bar.lane for bar in track.bars))
        for bar in track.bars:
            parts.append(_bar(bar, track.kind, scale, y + 15 * lanes.index(bar.lane), len(lanes)))
        y += 15 * len(lanes) + 8
    grid = _vertical_grid(ticks, scale, y, Axis(f"time ({unit})"))
    return _svg(title, y + 2 * LINE + 6, [*grid, *parts])


# --- pieces


class _Scale:
    """From figures to places; a logarithm where there are only positive figures."""

    def __init__(self, low: float, high: float, start: float, stop: float, log: bool = False) -> None:
        self._log = log and low > 0
        self._low, self._high = self._of(low), self._of(high)
        self._start, self._stop = start, stop

    def _of(self, value: float) -> float:
        return math.log2(value) if self._log else value

    def __call__(self, value: float) -> float:
        span = self._high - self._low
        share = (self._of(value) - self._low) / span if span else 0.5
        return self._start + share * (self._stop - self._start)


def _svg(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    """The picture; its title is what a screen reader says."""
    head = Markup('<svg viewBox="0 0 {:.0f} {:.0f}" role="img" aria-label="{}">').format(
        WIDTH, height, clean(title)
    )
    return head + Markup("").join(parts) + Markup("</svg>")


def _text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> Markup:
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" class="{}">{}</text>').format(
        x, y, anchor, kind, clean(words)
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" class="{}"/>').format(
        x1, y1, x2, y2, kind
    )


def _words(parts: list[Markup], label: str, shown: str, y: float) -> float:
    """The label on the left and the figure on the right of one line, on more lines where it is long."""
    first = max(16, _LETTERS - len(shown) - 2)
    found = textwrap.wrap(clean(label), first) or [""]
    for place, line in enumerate(found[:4]):
        parts.append(_text(LEFT, y + 10 + LINE * place, line, kind="halo"))
    parts.append(_text(RIGHT, y + 10, shown, "end", "value halo"))
    return y + LINE * min(len(found), 4)


def _mark_row(row: Row, scale: _Scale, y: float) -> Markup:
    parts = [_line(LEFT, y, RIGHT, y, "rail")]
    low, high = row.low, row.high
    if low is not None and high is not None:
        if row.value is None:
            parts.append(_box(scale(low), y - 4, max(2.0, scale(high) - scale(low)), 8, "paper"))
        else:
            parts.append(_whisker(scale(low), scale(high), y))
    if row.value is not None:
        mark = {"measured": "circle", "paper": "diamond", "predicted": "cross"}[row.kind]
        parts.append(_mark(mark, scale(row.value), y, row.kind))
    return Markup("").join(parts)


def _box(x: float, y: float, width: float, height: float, kind: str) -> Markup:
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}" class="{}"/>').format(
        x, y, width, height, kind
    )


def _whisker(x1: float, x2: float, y: float) -> Markup:
    ends = [_line(x, y - 4, x, y + 4, "interval") for x in (x1, x2)]
    return Markup("").join([_line(x1, y, x2, y, "interval"), *ends])


def _mark(shape: str, x: float, y: float, kind: str) -> Markup:
    """A mark about 8 units across."""
    if shape == "circle":
        return Markup('<circle cx="{:.1f}" cy="{:.1f}" r="4" class="{}"/>').format(x, y, kind)
    if shape == "square":
        return _box(x - 3.5, y - 3.5, 7, 7, kind)
    if shape in ("cross", "plus"):
        turn = 45 if shape == "cross" else 0
        return Markup(
            '<path d="M-5 0H5M0 -5V5" transform="translate({:.1f} {:.1f}) rotate({})" class="{} stroke"/>'
        ).format(x, y, turn, kind)
    path = {"triangle": "M0 -5L5 4H-5Z", "diamond": "M0 -5.5L5.5 0L0 5.5L-5.5 0Z"}[shape]
    return Markup('<path d="{}" transform="translate({:.1f} {:.1f})" class="{}"/>').format(path, x, y, kind)


def _vertical_grid(ticks: Sequence[float], scale: _Scale, bottom: float, axis: Axis) -> list[Markup]:
    parts = [_line(scale(tick), 4, scale(tick), bottom, "grid") for tick in ticks]
    parts += [_text(scale(t), bottom + 13, f"{t:.4g}", _anchor(t, ticks)) for t in ticks]
    if axis.reference is not None:
        parts.append(_line(scale(axis.reference), 4, scale(axis.reference), bottom, "reference"))
    label = f"{axis.label}; dashed: {axis.reference_label}" if axis.reference_label else axis.label
    return [*parts, _text(WIDTH / 2, bottom + 28, label, "middle")]


def _anchor(tick: float, ticks: Sequence[float]) -> str:
    return "start" if tick == ticks[0] else "end" if tick == ticks[-1] else "middle"


def _bands(bands: Sequence[Band], up: _Scale) -> list[Markup]:
    parts = []
    for band in bands:
        top, bottom = up(band.high), up(band.low)
        parts.append(_box(44, top, RIGHT - 44, max(2.0, bottom - top), "band"))
    return parts


def _ticks_along(xs: Sequence[float], across: _Scale, log: bool) -> list[float]:
    """The x to name: the measured ones where they are few, else round ones; as many as there is room for."""
    if len(xs) > _MOST_NAMED and not log:
        xs = [x for x in nice_ticks(xs[0], xs[-1]) if xs[0] <= x <= xs[-1]]
    shown: list[float] = []
    for x in xs:
        if not shown or across(x) - across(shown[-1]) >= 40:
            shown.append(x)
    return shown


def _series(one: Series, place: int, across: _Scale, up: _Scale, shift: float) -> Markup:
    points = sorted(one.points, key=lambda point: point.x)
    path = " ".join(f"{across(p.x) + shift:.1f},{up(p.y):.1f}" for p in points)
    line = Markup('<polyline points="{}" class="series dash{}"/>').format(path, place % 4)
    parts = [line] if one.joined else []
    for point in points:
        x = across(point.x) + shift
        if point.low is not None and point.high is not None:
            low, high = up(point.low), up(point.high)
            ends = [_line(x - 3, y, x + 3, y, "interval") for y in (low, high)]
            parts += [_line(x, low, x, high, "interval"), *ends]
        parts.append(_mark(MARKS[place % len(MARKS)], x, up(point.y), "measured"))
    return Markup("").join(parts)


def _sample(place: int, y: float, joined: bool) -> list[Markup]:
    """How a series is drawn, for the key."""
    line = Markup('<polyline points="{},{} {},{}" class="series dash{}"/>')
    stroke = line.format(LEFT, y, LEFT + 28, y, place % 4)
    mark = _mark(MARKS[place % len(MARKS)], LEFT + 14, y, "measured")
    return [stroke, mark] if joined else [mark]


def _key(parts: list[Markup], label: str, sample: Sequence[Markup], y: float) -> float:
    parts += sample
    found = textwrap.wrap(clean(label), _LETTERS - 8)[:3] or [""]
    for line, words in enumerate(found):
        parts.append(_text(LEFT + 36, y + 10 + LINE * line, words))
    return y + LINE * len(found) + 2


def _bar(bar: Bar, kind: Kind, scale: _Scale, y: float, lanes: int) -> Markup:
    x, width = scale(bar.start), max(1.5, scale(bar.end) - scale(bar.start))
    shape = _box(x, y, width, 12, "paper" if kind == "paper" else "bar")
    named = bar.lane if lanes > 1 or bar.lane else ""
    fits = len(named) * 6.2 + 6 < width
    place = x + 4 if fits else min(x + width + 4, RIGHT - len(named) * 6.2)
    inside = "inside" if fits and kind != "paper" else "halo"
    return shape + _text(place, y + 10, named, "start", inside) if named else shape
