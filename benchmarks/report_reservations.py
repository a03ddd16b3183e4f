"""What a reader has to know before trusting the figures: what is missing, failed, forced or unstable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import report_text as say
from benchmarks.report_page import Block, Heading, Items, Paragraph, Section, Table
from benchmarks.report_read import Results, Run, as_dict, number, text


def coverage(results: Results, experiments: Sequence[tuple[str, str]]) -> Section:
    """Which experiment was measured on which machine; `experiments` are names with their titles."""
    machines = sorted({run.machine for run in results.runs})
    columns = list(machines)
    if not any(run.backend == "metal" for run in results.runs):
        columns.append("Apple silicon")
    rows = [
        (
            title,
            *(
                _covered([r for r in results.runs if r.experiment == name and r.machine == m])
                for m in columns
            ),
        )
        for name, title in experiments
    ]
    return Section(
        "What has been measured", "", [Table("Cells measured, by machine", ("experiment", *columns), rows)]
    )


def _covered(runs: Sequence[Run]) -> str:
    if not runs:
        return say.NOT_YET
    run = next((r for r in reversed(runs) if not r.quick), runs[-1])
    done = sum(cell.done for cell in run.cells)
    planned = max(len(run.planned), len(run.cells))
    marks = [
        mark
        for mark, holds in (
            ("quick", run.quick),
            ("forced", bool(run.forced)),
            ("ended early", bool(run.missing) or run.end is None),
        )
        if holds
    ]
    return f"{done} of {planned} cells" + (f" ({', '.join(marks)})" if marks else "")


def reservations(results: Results) -> Section:
    """Everything that a run itself says against its figures."""
    blocks: list[Block] = []
    for title, lines in (
        ("Missing: the run was ended before these cells", _missing(results.runs)),
        ("Cut short: fewer processes than planned stand behind these cells", _short(results.runs)),
        ("Failed", _failed(results.runs)),
        ("Forced: measured although it would have been refused", _forced(results.runs)),
        ("Said by the run", _said(results.runs)),
    ):
        found = list(lines)
        if found:
            blocks += [Heading(title), Items(found)]
    unstable = [
        (run.file, cell.name, say.clean(warning))
        for run in results.runs
        for cell in run.cells
        for warning in cell.warnings
    ]
    if unstable:
        blocks += [
            Heading("Unstable samples"),
            Paragraph(f"{len(unstable)} arms were timed with a spread over 10 % or a drift over their run."),
            Table("Unstable samples", ("file", "cell", "warning"), unstable, folded=True),
        ]
    if not blocks:
        blocks.append(
            Paragraph("Nothing: no cell is missing or failed, none was forced, and no samples are unstable.")
        )
    return Section("Missing, failed, forced, unstable", "", blocks)


def _missing(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.missing:
            yield f"{run.file}: {', '.join(map(say.clean, run.missing))}"
        elif run.end is None:
            yield f"{run.file}: no cell, but the run did not come to its end"


def _short(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        short = [cell for cell in run.cells if cell.done and cell.processes < run.processes]
        if short:
            told = ", ".join(f"{say.clean(cell.name)} ({cell.processes})" for cell in short)
            yield f"{run.file}: of {run.processes} processes: {told}"


def _failed(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        for cell in run.failed:
            yield f"{run.file}: {cell.name}: {cell.error or 'no reason given'}"


def _forced(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.forced:
            yield f"{run.file}: {'; '.join(run.forced)}"


def _said(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        for warning in run.warnings:
            yield f"{run.file}: {warning}"
        slow = {text(run.start.get(name)) for name in ("scheduling", "qos")} & {"background", "utility"}
        for name in sorted(filter(None, slow)):
            yield f"{run.file}: ran in the class {name}, which may be kept on efficiency cores"


# --- where the figures come from


def machines(results: Results) -> Section:
    """Every run with the state of its machine, at its start and at its end."""
    if not results.runs:
        return Section("Runs and machines", "Section 5.1", [Paragraph("No run yet.")])
    columns = (
        "file",
        "experiment",
        "when",
        "command",
        "machine",
        "system",
        "MLX",
        "MLX-LM",
        "FusionML",
        "CPU math",
        "power",
        "thermal",
        "load",
        "free memory",
    )
    rows = [_run_row(run) for run in results.runs]
    return Section(
        "Runs and machines",
        "Section 5.1",
        [
            Paragraph(
                "Two figures are those at the start and at the end; a dash is what the system does not tell."
            ),
            Table("Runs", columns, rows),
        ],
    )


def _run_row(run: Run) -> tuple[str, ...]:
    commit = text(run.start.get("commit")) or ""
    dirty = "-dirty" if commit.endswith("-dirty") else ""
    version = f"{_plain(run.start.get('fusionml'))} {commit[:9]}{dirty}".strip()
    return (
        run.file,
        run.experiment,
        run.when[:16].replace("T", " ") or say.NONE,
        run.command or say.NONE,
        run.machine,
        *(_plain(run.start.get(name)) for name in ("os_build", "mlx", "mlx_lm")),
        version,
        _math(run.start.get("math_gflops")),
        _both(run, "power_source", _plain),
        _both(run, "thermal", _plain),
        _both(run, "load_average", _load),
        _both(run, "free_bytes", lambda value: say.count_of_bytes(number(value))),
    )


def _plain(value: Any) -> str:
    return say.NONE if value is None else say.clean(value)


def _math(value: Any) -> str:
    rates = {name: number(rate) for name, rate in as_dict(value).items()}
    told = ", ".join(f"{say.clean(name)} {rate:.3g}" for name, rate in rates.items() if rate is not None)
    return f"{told} GFLOP/s" if told else say.NONE


def _load(value: Any) -> str:
    first = number(value[0]) if isinstance(value, list) and value else None
    return say.NONE if first is None else f"{first:.2f}"


def _both(run: Run, name: str, show: Any) -> str:
    start, end = show(run.start.get(name)), show(run.end.get(name)) if run.end else say.NONE
    return start if end in (start, say.NONE) else f"{start} to {end}"


def other_files(results: Results) -> Section | None:
    """Files of another shape: older measurements with what is known about them, and what cannot be read."""
    if not results.others:
        return None
    notes = as_dict(results.notes.get("files"))
    blocks: list[Block] = []
    known = [other for other in results.others if other.file in notes]
    if known:
        blocks += [
            Paragraph(say.clean(line)) for line in results.notes.get("about", []) if isinstance(line, str)
        ]
    rows = []
    for other in results.others:
        note = as_dict(notes.get(other.file))
        found = "; ".join(
            f"{say.words(where)} {say.speedup(ratio)}" for where, ratio in list(other.ratios.items())[:12]
        )
        rows.append(
            (
                other.file,
                text(note.get("shows")) or other.why,
                found or say.NONE,
                text(note.get("command")) or say.NONE,
            )
        )
    blocks.append(Table("Other files", ("file", "what it is", "speedups in it", "command"), rows))
    return Section("Earlier measurements and other files", "", blocks)
