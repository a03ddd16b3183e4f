"""Where co-execution does not help: the paper's boundaries, what was measured, what a user makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import report_pictures as pictures
from benchmarks import report_svg as svg
from benchmarks import report_text as say
from benchmarks import report_traces as traces
from benchmarks.report_cells import Measured, chosen, details, paper_table, span
from benchmarks.report_page import Block, Heading, Paragraph, Picture, Pictures, Section, Table
from benchmarks.report_paper import Figure, Paper
from benchmarks.report_read import Cell, Interval, Results, as_dict, number

_FEW = 4
_PREDICTIONS = 8
"""Shown in one picture."""

Best = tuple[str, Interval] | None


@dataclass(frozen=True)
class Boundary:
    """`means` is what it comes to for a user, in one sentence; `most_rows` is where the boundary ends."""

    experiment: str
    title: str
    about: str
    means: str
    most_rows: float = math.inf


BOUNDARIES: Sequence[Boundary] = (
    Boundary(
        "decode",
        "Decoding",
        "Few rows a call: every token reads all weights once, and two units read them no faster than one.",
        "Do not expect faster answers token by token: calls of few rows are left to MLX as they are.",
        64,
    ),
    Boundary(
        "training",
        "Training",
        "Forward, backward and an optimiser step in one precision; a baseline of a wider one fakes a win.",
        "Train without the split, and be wary of a speedup that compares float16 with float32.",
    ),
    Boundary(
        "ane",
        "Neural Engine",
        "What one CoreML dispatch costs before the first row is computed.",
        "The Neural Engine is not used: asking it costs more than a layer's whole matmul takes.",
    ),
    Boundary(
        "threeway",
        "CPU, GPU and Neural Engine together",
        "Raw matmuls of feed-forward shape at batch scale, in a burst and kept up.",
        "A third unit pays only for batches far larger than one layer's, and less once the chip is warm.",
    ),
    Boundary(
        "cholesky",
        "Blocked Cholesky",
        "A factorisation whose trailing update is split, against LAPACK on the CPU.",
        "Leave an algorithm to the one unit whose own library already saturates the machine.",
    ),
    Boundary(
        "sustained",
        "Sustained load and heat",
        "The first ten seconds against the last minute of steady work.",
        "On a machine without a fan judge the gain after minutes of work, not after seconds.",
    ),
    Boundary(
        "pressure",
        "Memory pressure",
        "What a look at an inactive arm reads and costs the next call when the arms do not fit together.",
        "With a model that barely fits, close other programs: the gate then decides once and stops looking.",
    ),
)


def boundaries(results: Results, paper: Paper) -> Section:
    """A table of all, then each with its pictures and tables."""
    rows = [
        (b.title, _paper(paper.of(b.experiment)), _measured(results, paper, b), b.means) for b in BOUNDARIES
    ]
    blocks: list[Block] = [
        Paragraph(
            "The paper is as careful about where a split does not pay; a new chip may overturn any of it."
        ),
        Table("The boundaries", ("where", "paper", "measured", "what it means for you"), rows),
    ]
    for boundary in BOUNDARIES:
        blocks += _one(boundary, results, paper)
    return Section("Where it does not help", "Section 6", blocks)


def _one(boundary: Boundary, results: Results, paper: Paper) -> Iterator[Block]:
    yield Heading(boundary.title)
    yield Paragraph(boundary.about)
    yield Paragraph(boundary.means, strong="For you:")
    cells = chosen(results, boundary.experiment)
    if not cells:
        yield Paragraph(f"{say.NOT_YET.capitalize()} on any machine.")
    found = [p for machine, measured in cells.items() for p in _drawn(machine, measured, paper)]
    if found:
        yield Pictures(found)
    for machine, measured in cells.items():
        yield from details(machine, measured, paper)
        drawn = [picture for one in measured for picture in traces.drawn(machine, one.cell)]
        if drawn:
            yield Pictures(drawn, folded=f"Call by call, {machine}" if len(drawn) > _FEW else "")
        for one in measured:
            yield from traces.told(machine, one.cell)
    yield paper_table(paper.of(boundary.experiment), results, paper)


def _drawn(machine: str, measured: Sequence[Measured], paper: Paper) -> Iterator[Picture]:
    key = pictures.along(measured)
    lines = pictures.lines_of(machine, measured, key, (), paper) if key else []
    if any(len(line.points) > 2 for line in lines):
        yield from pictures.panels(lines, say.words(key or ""))
    else:
        yield from pictures.speedups(machine, measured, paper)


def _paper(figures: Sequence[Figure]) -> str:
    """The paper's figures in short; without those that only explain."""
    told = [f for f in figures if f.match.get("measure") not in ("note",)]
    return "; ".join(f"{f.what}: {f.shown}" if len(told) > 1 else f.shown for f in told)


def _measured(results: Results, paper: Paper, boundary: Boundary) -> str:
    """Each machine's speedups, and its figures that the paper has too."""
    told = []
    for machine, cells in chosen(results, boundary.experiment).items():
        inside = [
            one for one in cells if (number(one.cell.parameters.get("rows")) or 0) <= boundary.most_rows
        ]
        named = [
            f"{one.cell.name}: {say.words(name)} {say.figure(name, value)}"
            for one in inside
            for name, value in one.cell.figures.items()
            if paper.beside_figure(boundary.experiment, name)
        ]
        told.append("; ".join([f"{machine}: {_speedups(inside)}", *named]))
    return "; ".join(told) or say.NOT_YET


def _speedups(cells: Sequence[Measured]) -> str:
    """Each arm's where they are few, else their range; `failed` where there is none because of that."""
    every = [(one.cell.name, arm, ratio) for one in cells for arm, ratio in one.cell.speedups.items()]
    done = sum(one.cell.done for one in cells)
    if not every:
        return "no speedup" if done else "failed"
    if len(every) <= _FEW:
        return ", ".join(f"{cell} {arm} {say.times(ratio.value)}" for cell, arm, ratio in every)
    return f"{span([ratio.value for _, _, ratio in every])} ({done} of {len(cells)} cells)"


# --- the pair model


def predictions(results: Results) -> Section:
    """What four measured figures predict, beside what came out."""
    blocks: list[Block] = [
        Paragraph(
            "The pair model predicts the best speedup of one split matmul from four measured figures: the "
            "time a row takes on each unit alone, how much the two slow each other down, and the fixed cost "
            "of a call. A cell that computes more than one matmul gains less than that."
        )
    ]
    found = [
        (run.machine, " ".join(filter(None, (run.experiment, cell.name, where))), told, _best(cell))
        for run in results.runs
        for cell in run.cells
        for where, told in _predicted(cell.figures)
    ]
    if not found:
        blocks.append(Paragraph(f"{say.NOT_YET.capitalize()}."))
        return Section("Prediction and measurement", "Sections 3 and 4", blocks)
    axis = svg.Axis("speedup", reference=1.0, reference_label="the same")
    for start in range(0, len(found), _PREDICTIONS):
        points = [row for one in found[start : start + _PREDICTIONS] for row in _prediction_rows(*one)]
        caption = "Predicted (crosses) and measured (circles)"
        blocks.append(Pictures([Picture(svg.intervals(caption, points, axis), caption)]))
    columns = ("machine", "cell", "predicted", "best measured", "predicted CPU share", *_INPUTS.values())
    blocks.append(Table("The pair model", columns, [_prediction_line(*one) for one in found]))
    return Section("Prediction and measurement", "Sections 3 and 4", blocks)


def _prediction_rows(machine: str, name: str, told: dict[str, Any], best: Best) -> Iterator[svg.Row]:
    speedup = told["predicted_speedup"]
    yield svg.Row(f"predicted: {machine}, {name}", say.times(speedup), speedup, kind="predicted")
    if best:
        arm, ratio = best
        yield svg.Row(f"measured: {arm}", say.speedup(ratio), ratio.value, ratio.low, ratio.high)


def _prediction_line(machine: str, name: str, told: dict[str, Any], best: Best) -> tuple[str, ...]:
    ratio = number(told.get("predicted_ratio"))
    return (
        machine,
        name,
        say.times(told["predicted_speedup"]),
        f"{say.speedup(best[1])} ({best[0]})" if best else say.NONE,
        say.NONE if ratio is None else say.share(ratio),
        *_inputs(told),
    )


def _best(cell: Cell) -> Best:
    """The fastest arm, of those that are named a split where there are such."""
    splits = {name: ratio for name, ratio in cell.speedups.items() if "split" in name} or cell.speedups
    return max(splits.items(), key=lambda item: item[1].value, default=None)


_INPUTS = {
    "cpu_us": "CPU us/row",
    "current_us": "current us/row",
    "contention": "contention",
    "fixed_us": "fixed us a call",
}


def _inputs(told: dict[str, Any]) -> list[str]:
    found = [number(told.get(name)) for name in _INPUTS]
    return [say.NONE if value is None else f"{value:.3g}" for value in found]


def _predicted(figures: Any, where: str = "", depth: int = 4) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every prediction within a cell's figures, with the name it stands under."""
    held = as_dict(figures)
    if (speedup := number(held.get("predicted_speedup"))) is not None:
        yield where, {**held, "predicted_speedup": speedup}
    elif depth:
        for name, value in held.items():
            named = "" if name in ("pair", "pair_model", "model", "prediction") else say.words(name)
            yield from _predicted(value, f"{where} {named}".strip(), depth - 1)
