"""The pictures of measured cells, and the tables that say the same in figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report_svg as svg
from benchmarks import report_text as say
from benchmarks.report_cells import SPEEDUP, Measured
from benchmarks.report_page import Picture, Table
from benchmarks.report_paper import Figure, Paper, spans
from benchmarks.report_read import Interval, number

LENGTHS = (
    "paper_rows",
    "rows",
    "tokens",
    "prompt_tokens",
    "length",
    "blocks",
    "depth",
    "layers",
    "n",
    "size",
    "clients",
)
"""Parameters that a picture may run along, first come first served."""
STOCK = "1: as fast as the baseline"
_MOST_SERIES = 6
_MOST_ROWS = 24
_MANY_ARMS = 3


# --- a speedup along a parameter


@dataclass(frozen=True)
class Line:
    """The speedups of one arm along one parameter, all other parameters the same.

    `panel` names the picture that it belongs in; `figures` are the paper's beside its points.
    """

    machine: str
    panel: str
    label: str
    points: tuple[svg.Point, ...]
    figures: tuple[Figure, ...]


def along(cells: Sequence[Measured], prefer: Sequence[str] = LENGTHS) -> str | None:
    """The parameter to draw along: the first that takes several values, else the first that there is."""
    values: dict[str, set[float]] = {key: set() for key in prefer}
    for one in cells:
        for key in prefer:
            found = number(one.cell.parameters.get(key))
            if found is not None:
                values[key].add(found)
    several = [key for key in prefer if len(values[key]) > 1]
    return next(iter(several or [key for key in prefer if values[key]]), None)


def lines_of(
    machine: str, cells: Sequence[Measured], key: str, panel: Sequence[str], paper: Paper
) -> list[Line]:
    """The cells as lines along `key`; parameters named in `panel` tell pictures apart, the others lines."""
    panels: dict[str, list[Measured]] = {}
    for one in cells:
        if one.cell.done and number(one.cell.parameters.get(key)) is not None:
            named = {name: one.cell.parameters[name] for name in panel if name in one.cell.parameters}
            panels.setdefault(say.parameters(named), []).append(one)
    return [line for named, found in panels.items() for line in _lines(machine, named, found, key, paper)]


def _lines(machine: str, panel: str, cells: Sequence[Measured], key: str, paper: Paper) -> Iterator[Line]:
    telling = _telling([one.cell.parameters for one in cells], key)
    points: dict[str, list[svg.Point]] = {}
    figures: dict[str, dict[str, Figure]] = {}
    for one in cells:
        values = one.cell.parameters
        rest = say.parameters({name: value for name, value in values.items() if name in telling})
        for arm, ratio in one.cell.speedups.items():
            label = f"{arm} ({rest})" if rest else arm
            point = svg.Point(float(values[key]), ratio.value, ratio.low, ratio.high)
            points.setdefault(label, []).append(point)
            beside = paper.beside(one.run.experiment, one.cell.name, arm, values)
            figures.setdefault(label, {}).update({figure.id: figure for figure in beside})
    for label, found in points.items():
        in_order = tuple(sorted(found, key=lambda point: point.x))
        yield Line(machine, panel, label, in_order, tuple(figures[label].values()))


def _telling(parameters: Sequence[dict[str, Any]], key: str) -> set[str]:
    """Parameters that tell lines apart: one alone where one is enough, none that goes along with `key`."""
    names = dict.fromkeys(name for values in parameters for name in values if name != key)
    kinds = {n: [json.dumps(values.get(n), sort_keys=True) for values in parameters] for n in names}
    at = [values.get(key) for values in parameters]
    varied = [
        name
        for name in names
        if len(set(kinds[name])) > 1 and len(set(zip(at, kinds[name], strict=True))) > len(set(at))
    ]
    groups = len(set(zip(*(kinds[name] for name in varied), strict=True)))
    enough = next(({name} for name in varied if len(set(kinds[name])) == groups), None)
    return enough or set(varied)


def panels(lines: Sequence[Line], label: str) -> Iterator[Picture]:
    """A picture for each machine and panel: curves where there are several points, else rows."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        groups.setdefault((line.machine, line.panel), []).append(line)
    for (machine, panel), found in groups.items():
        caption = f"{machine}{': ' if panel else ''}{panel}"
        for start in range(0, len(found), _MOST_SERIES):
            part = found[start : start + _MOST_SERIES]
            curves = any(len(line.points) > 1 for line in part)
            yield Picture(_curves(caption, part, label) if curves else _points(caption, part, label), caption)


def _curves(caption: str, lines: Sequence[Line], label: str) -> Any:
    bands = {f.id: f for line in lines for f in line.figures}.values()
    logarithmic = all(point.x > 0 for line in lines for point in line.points)
    return svg.lines(
        caption,
        [svg.Series(line.label, line.points) for line in lines],
        svg.Axis(label, log=logarithmic),
        svg.Axis(f"speedup (dashed: {STOCK})", reference=1.0, bands=_bands(bands)),
    )


def _bands(figures: Iterable[Figure]) -> list[svg.Band]:
    """The paper's ranges; several single figures are one range, or they would cover each other."""
    ranges = [f for f in figures if f.low is not None and f.high is not None]
    wide = [svg.Band(f"paper, Apple: {f.shown}", f.low, f.high) for f in ranges if f.low != f.high]  # type: ignore[arg-type]
    single = [f.low for f in ranges if f.low == f.high and f.low is not None]
    if single:
        wide.append(
            svg.Band(
                f"paper, Apple: {say.plain(min(single))} to {say.plain(max(single))}x",
                min(single),
                max(single),
            )
        )
    return wide


def _points(caption: str, lines: Sequence[Line], label: str) -> Any:
    rows = []
    for line in lines:
        for p in line.points:
            shown = f"{say.times(p.y)}" if p.low is None or p.high is None else _with_interval(p)
            rows.append(svg.Row(f"{line.label}, {label} {p.x:g}", shown, p.y, p.low, p.high))
    figures = {f.id: f for line in lines for f in line.figures}.values()
    return svg.intervals(
        caption, [*rows, *paper_rows(figures)], svg.Axis("speedup", reference=1.0, reference_label=STOCK)
    )


def _with_interval(p: svg.Point) -> str:
    return f"{say.times(p.y)} [{say.plain(p.low or 0)}, {say.plain(p.high or 0)}]"


def paper_rows(figures: Iterable[Figure]) -> list[svg.Row]:
    """The paper's speedups as rows to stand below the measured ones."""
    return [
        svg.Row(
            f"paper: {f.what} ({', '.join(f.machines) or 'machine not named'})",
            f.shown,
            f.low if f.low == f.high else None,
            f.low,
            f.high,
            "paper",
        )
        for f in figures
        if f.low is not None and f.high is not None
    ]


def by_length(
    experiment: str,
    caption: str,
    lines: Sequence[Line],
    key: str,
    paper: Paper,
    usual: Sequence[float],
    measured: Iterable[str],
) -> Table:
    """Machines down, lengths across; the paper's machines are there before they were measured.

    `usual` are the paper's lengths, and `measured` the names of its machines that `lines` already hold.
    """
    xs = sorted({p.x for line in lines for p in line.points} or set(usual))
    rows = []
    for line in lines:
        at = {p.x: p for p in line.points}
        shown = [say.NONE if x not in at else _cell_of(at[x]) for x in xs]
        beside = "; ".join(f.shown for f in line.figures) or say.NONE
        rows.append((line.machine, ", ".join(filter(None, (line.panel, line.label))), *shown, beside))
    done = set(measured)
    for machine in paper.machines:
        if machine.name not in done:
            figures = [f for f in paper.of(experiment) if f.is_speedup and machine.name in f.machines]
            rows.append((machine.shown, "any", *([say.NOT_YET] * len(xs)), spans(figures)))
    return Table(caption, ("machine", "arm", *(f"{key} {x:g}" for x in xs), "paper, Apple"), rows)


def _cell_of(p: svg.Point) -> str:
    return say.times(p.y) if p.low is None or p.high is None else _with_interval(p)


# --- one row an arm


def speedups(machine: str, cells: Sequence[Measured], paper: Paper) -> Iterator[Picture]:
    """A picture for each cell of many arms, one for all that have few; the paper's figures below them."""
    few: list[svg.Row] = []
    beside: dict[str, Figure] = {}
    for one in cells:
        arms = one.cell.speedups
        figures = {
            figure.id: figure
            for arm in arms
            for figure in paper.beside(one.run.experiment, one.cell.name, arm, one.cell.parameters)
        }
        if len(arms) >= _MANY_ARMS:
            rows = [_row(arm, ratio) for arm, ratio in arms.items()]
            yield _rows_picture(f"{machine}: {one.cell.name}", rows, figures.values())
        else:
            few += [_row(f"{one.cell.name}: {arm}", ratio) for arm, ratio in arms.items()]
            beside |= figures
    for start in range(0, len(few), _MOST_ROWS):
        last = start + _MOST_ROWS >= len(few)
        yield _rows_picture(machine, few[start : start + _MOST_ROWS], beside.values() if last else ())


def _row(label: str, ratio: Interval) -> svg.Row:
    return svg.Row(label, say.speedup(ratio), ratio.value, ratio.low, ratio.high)


def _rows_picture(caption: str, rows: Sequence[svg.Row], figures: Iterable[Figure]) -> Picture:
    axis = svg.Axis(SPEEDUP, reference=1.0, reference_label="the same")
    return Picture(svg.intervals(caption, [*rows, *paper_rows(figures)], axis), caption)
