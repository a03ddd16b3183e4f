"""What happened call by call, or minute by minute, within one cell: its trace as pictures and as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from benchmarks import report_svg as svg
from benchmarks import report_text as say
from benchmarks.report_page import Block, Items, Paragraph, Picture, Table
from benchmarks.report_read import Cell, number

ALONG = ("call", "minutes", "minute", "elapsed", "elapsed_seconds", "at", "index")
VALUES = ("speedup", "ratio", "seconds", "duration", "time")
PANELS = ("policy",)
KINDS = ("arm", "mode", "phase", "series", "name")
_ALONG_WORDS = {"at": "seconds since the start", "call": "call"}
_MOST_SERIES = 6
_MOST_ENTRIES = 40
_MOST_DECISIONS = 40


def drawn(machine: str, cell: Cell) -> Iterator[Picture]:
    """A picture for each policy; none where the trace holds no figures."""
    trace = [_with_speedup(entry) for entry in cell.trace]
    value = _first(trace, VALUES)
    if value is None:
        return
    panel = _named(trace, PANELS)
    for name in dict.fromkeys(_word(entry, panel) for entry in trace):
        entries = [entry for entry in trace if _word(entry, panel) == name]
        if name.endswith(" again"):
            continue
        title = ": ".join(filter(None, (machine, cell.name, name)))
        if (picture := _curve(title, entries, value)) is not None:
            yield picture


def _with_speedup(entry: dict[str, Any]) -> dict[str, Any]:
    """A look at both arms tells their ratio."""
    stock, split = number(entry.get("stock")), number(entry.get("split"))
    return {**entry, "speedup": stock / split} if stock and split else entry


def _curve(title: str, entries: Sequence[dict[str, Any]], value: str) -> Picture | None:
    along, kind = _first(entries, ALONG), _named(entries, KINDS)
    series: dict[str, list[svg.Point]] = {}
    for place, entry in enumerate(entries, 1):
        at, y = (number(entry.get(along)) if along else float(place)), number(entry.get(value))
        if at is not None and y is not None:
            series.setdefault(_word(entry, kind) or say.words(value), []).append(svg.Point(at, y))
    # Two arms take turns: a line between two calls of one would lead through those of the other.
    alone = len(series) == 1
    shown = [svg.Series(name, points, alone) for name, points in list(series.items())[:_MOST_SERIES]]
    if not shown:
        return None
    axis = svg.Axis(say.words(value), reference=1.0 if value in ("speedup", "ratio") else None)
    return Picture(
        svg.lines(title, shown, svg.Axis(_ALONG_WORDS.get(along or "call") or say.words(along or "")), axis),
        title,
    )


def told(machine: str, cell: Cell) -> Iterator[Block]:
    """A trace as a table: entry by entry where it is short, else what each arm did in each phase."""
    if not cell.trace:
        return
    caption = f"Trace of {cell.name}, {machine}"
    decisions = list(_decisions(cell.trace))
    if decisions:
        yield Paragraph("", strong=f"Decisions, {cell.name}:")
        yield Items(decisions[:_MOST_DECISIONS])
    if len(cell.trace) <= _MOST_ENTRIES:
        names = list(dict.fromkeys(name for entry in cell.trace for name in entry))[:8]
        rows = [tuple(say.figure(name, entry.get(name)) for name in names) for entry in cell.trace]
        yield Table(caption, [say.words(name) for name in names], rows, folded=True)
    else:
        yield _grouped(caption, cell.trace)


def _decisions(trace: Sequence[dict[str, Any]]) -> Iterator[str]:
    panel = _named(trace, PANELS)
    for entry in trace:
        found = entry.get("decisions", entry.get("decision"))
        for decision in found if isinstance(found, list) else [found]:
            if decision:
                yield ": ".join(filter(None, (_word(entry, panel), say.clean(decision))))


def _grouped(caption: str, trace: Sequence[dict[str, Any]]) -> Table:
    """One row for every combination of the trace's words; the entries themselves are in the JSON."""
    names = [name for name in ("policy", "phase", "arm", "mode") if _named(trace, (name,))]
    value = _first(trace, VALUES) or ""
    groups: dict[tuple[str, ...], list[float]] = {}
    for entry in trace:
        found = groups.setdefault(tuple(_word(entry, name) or say.NONE for name in names), [])
        taken = number(entry.get(value))
        if taken is not None:
            found.append(taken)
    rows = [(*key, str(len(found)), *_spread(value, found)) for key, found in groups.items()]
    what = say.words(value) or "value"
    return Table(caption, (*names, "entries", f"median {what}", "least", "most"), rows, folded=True)


def _spread(name: str, found: Sequence[float]) -> tuple[str, str, str]:
    if not found:
        return say.NONE, say.NONE, say.NONE
    middle, least, most = (say.figure(name, value) for value in (median(found), min(found), max(found)))
    return middle, least, most


def _first(trace: Sequence[dict[str, Any]], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if any(number(entry.get(key)) is not None for entry in trace)), None)


def _named(trace: Sequence[dict[str, Any]], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if any(isinstance(entry.get(key), str) for entry in trace)), None)


def _word(entry: dict[str, Any], key: str | None) -> str:
    return say.clean(entry.get(key) or "") if key else ""
