"""Which measured cells count, and the tables that every experiment shares."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks import report_text as say
from benchmarks.report_page import Block, Heading, Paragraph, Table
from benchmarks.report_paper import Figure, Paper, spans
from benchmarks.report_read import Arm, Cell, Results, Run, number

SPEEDUP = "speedup over the baseline"
_OPEN_ROWS = 24


@dataclass(frozen=True)
class Measured:
    """A cell with the run that it comes from."""

    run: Run
    cell: Cell


def chosen(results: Results, experiment: str) -> dict[str, list[Measured]]:
    """Of each machine, every cell once: the newest, and from full runs where there is a full run.

    A cell that failed counts only where it never succeeded.
    """
    machines: dict[str, list[Run]] = {}
    for run in results.runs:
        if run.experiment == experiment:
            machines.setdefault(run.machine, []).append(run)
    found = {}
    for machine, runs in sorted(machines.items()):
        full = [run for run in runs if not run.quick] or runs
        best: dict[str, Measured] = {}
        for run in full:
            for cell in run.cells:
                key = cell.name + json.dumps(cell.parameters, sort_keys=True)
                if cell.done or key not in best:
                    best[key] = Measured(run, cell)
        found[machine] = list(best.values())
    return {machine: cells for machine, cells in found.items() if cells}


# --- tables


def details(machine: str, cells: Sequence[Measured], paper: Paper) -> Iterator[Block]:
    """Everything that one machine measured in one experiment."""
    yield Heading(machine)
    yield Paragraph(provenance(cells))
    yield Table(
        f"Every arm, {machine}",
        ("cell", "arm", "median", SPEEDUP, "paper", "error", "unstable"),
        [row for one in cells for row in _arm_rows(one, paper)],
        folded=True,
    )
    yield from _figures(machine, cells, paper)


def _figures(machine: str, cells: Sequence[Measured], paper: Paper) -> Iterator[Block]:
    """What the cells report beside their arms; what is nested, or long, is folded."""
    plain, nested = [], []
    for one in cells:
        given = {name: value for name, value in one.cell.figures.items() if name not in one.cell.parameters}
        for name, value in given.items():
            beside = spans(paper.beside_figure(one.run.experiment, name))
            told = [(one.cell.name, *line, beside) for line in say.flat({name: value})]
            (nested if isinstance(value, dict) and len(told) > 1 else plain).extend(told)
    columns = ("cell", "figure", "value", "paper")
    if plain:
        yield Table(f"Figures, {machine}", columns, plain, folded=len(plain) > _OPEN_ROWS)
    if nested:
        rows = [row[:3] for row in nested]
        yield Table(f"Further figures, {machine}", columns[:3], rows, folded=True)


def provenance(cells: Sequence[Measured]) -> str:
    """When, how much of it and under which reservations."""
    runs = list({one.run.file: one.run for one in cells}.values())
    return " ".join(_provenance(run) for run in runs)


def _provenance(run: Run) -> str:
    marks = []
    if run.quick:
        marks.append("quick run with few samples")
    scale = number(run.options.get("scale"))
    if scale is not None and scale > 1:
        marks.append(f"the paper's sizes divided by {scale:g}")
    if run.processes > 1:
        marks.append(f"{run.processes} processes a cell")
    marks += [f"forced although {reason}" for reason in run.forced]
    told = f"; {'; '.join(marks)}" if marks else ""
    return f"{run.file}: {run.when[:10] or 'undated'}{told}."


def _arm_rows(one: Measured, paper: Paper) -> Iterator[tuple[str, ...]]:
    cell = one.cell
    if not cell.done:
        yield (
            cell.name,
            "failed",
            say.NONE,
            say.clean(cell.error or "no reason given"),
            say.NONE,
            say.NONE,
            say.NONE,
        )
        return
    for name, arm in cell.arms.items():
        yield cell.name, name, say.seconds(arm.median), *_against(one, name, arm, paper)
    for name in [name for name in cell.ratios if name not in cell.arms]:
        yield cell.name, name, say.NONE, *_against(one, name, Arm(None, 0), paper)


def _against(one: Measured, name: str, arm: Arm, paper: Paper) -> tuple[str, str, str, str]:
    cell = one.cell
    found = cell.ratios.get(name)
    if name == f"{cell.baseline} again" and cell.aa is not None:
        shown = f"{say.speedup(cell.aa)} (A/A)"
    elif name == cell.baseline:
        shown = "baseline"
    elif found is None:
        shown = "not timed"
    else:
        shown = say.speedup(found) + ("" if name in cell.speedups else " (other work)")
    beside = spans(paper.beside(one.run.experiment, cell.name, name, cell.parameters))
    error = cell.errors.get(name)
    told = "; ".join(say.clean(warning) for warning in arm.warnings)
    return shown, beside, say.NONE if error is None else say.error(error), told or "no"


def paper_table(figures: Sequence[Figure], results: Results, paper: Paper) -> Table:
    """The paper's figures of one experiment, and how far its own machines were measured again."""
    rows = [
        (f.what, ", ".join(f.machines) or "not named", f.shown, f.section, _again(f, results, paper))
        for f in figures
    ]
    return Table(
        "The paper's figures", ("what", "the paper's machine", "paper", "where", "measured there"), rows
    )


def _again(figure: Figure, results: Results, paper: Paper) -> str:
    if figure.match.get("measure") in ("note", "setting"):
        return say.NONE  # it explains another figure, or is a choice: there is nothing to measure
    machines = [m for m in paper.machines if m.name in figure.machines or not figure.machines]
    runs = [
        r for r in results.runs if r.experiment == figure.experiment and any(m.is_of(r) for m in machines)
    ]
    cells = [cell for run in runs for cell in run.cells]
    found = [
        ratio.value
        for cell in cells
        for arm, ratio in cell.speedups.items()
        if figure.stands_beside(cell.name, arm, cell.parameters)
    ]
    if found:
        return span(found)
    told = [say.figure(n, v) for cell in cells for n, v in cell.figures.items() if figure.is_figure(n)]
    return "; ".join(told) or ("see the tables above" if runs else say.NOT_YET)


def span(values: Sequence[float]) -> str:
    """`1.70x to 1.79x`; one figure where they are the same."""
    low, high = say.times(min(values)), say.times(max(values))
    return low if low == high else f"{low} to {high}"
