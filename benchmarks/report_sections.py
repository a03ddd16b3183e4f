"""The page's sections: each figure of the paper, then what it left open, with what was measured beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks import report_pictures as pictures
from benchmarks import report_svg as svg
from benchmarks import report_text as say
from benchmarks import report_traces as traces
from benchmarks.report_cells import Measured, chosen, details, paper_table
from benchmarks.report_page import Block, Paragraph, Picture, Pictures, Section, Table
from benchmarks.report_paper import Paper
from benchmarks.report_read import Results, as_dict, backend_name, number

Cells = dict[str, list[Measured]]
Draw = Callable[["Topic", Cells, Paper], Iterator[Block]]


@dataclass(frozen=True)
class Topic:
    """One experiment's section.

    `panel` are the parameters that tell its pictures apart, `usual` the paper's lengths.
    """

    experiment: str
    title: str
    source: str
    about: str
    draw: Draw
    panel: tuple[str, ...] = ()
    usual: tuple[float, ...] = ()


def section(topic: Topic, results: Results, paper: Paper) -> Section:
    """The pictures, what was measured on each machine, and the paper's figures."""
    cells = chosen(results, topic.experiment)
    blocks: list[Block] = [Paragraph(topic.about)]
    if not cells:
        blocks.append(Paragraph(f"{say.NOT_YET.capitalize()} on any machine."))
    blocks += topic.draw(topic, cells, paper)
    for machine, found in cells.items():
        blocks += details(machine, found, paper)
    figures = paper.of(topic.experiment)
    if figures:
        blocks.append(paper_table(figures, results, paper))
    return Section(topic.title, topic.source, blocks)


# --- how the topics are drawn


def draw_rows(topic: Topic, cells: Cells, paper: Paper) -> Iterator[Block]:
    """One line an arm."""
    found = [p for machine, measured in cells.items() for p in pictures.speedups(machine, measured, paper)]
    if found:
        yield Pictures(found)


def draw_lengths(topic: Topic, cells: Cells, paper: Paper) -> Iterator[Block]:
    """Curves along the sequence length or the depth, and the same as a table of machines."""
    measured = [one for found in cells.values() for one in found]
    key = pictures.along(measured) or "rows"
    along = "the paper's rows" if key == "paper_rows" else say.words(key)
    lines = [
        line
        for machine, found in cells.items()
        for line in pictures.lines_of(machine, found, key, topic.panel, paper)
    ]
    if lines:
        yield Pictures(list(pictures.panels(lines, along)))
    there = {m.name for m in paper.machines for one in measured if m.is_of(one.run)}
    yield pictures.by_length(
        topic.experiment, f"{topic.title}, all machines", lines, along, paper, topic.usual, there
    )


def draw_timeline(topic: Topic, cells: Cells, paper: Paper) -> Iterator[Block]:
    """Figure 1: the paper's bars, then each machine's, on a time axis of its own."""
    at = {f.id: f for f in paper.of(topic.experiment)}
    tracks = [
        svg.Track(f"{letter} {f.what}", f.shown, [svg.Bar("", 0.0, f.low)], "paper")
        for letter, f in zip(
            ("(a)", "(b)", "(c)"),
            (at.get(f"mechanism-{name}") for name in ("gpu-only", "lazy-ms", "eager-ms")),
            strict=True,
        )
        if f is not None and f.low is not None
    ]
    found = [Picture(svg.timeline("The paper's timeline", tracks), "The paper, M1")] if tracks else []
    for machine, measured in cells.items():
        for one in measured:
            if (picture := _timeline(machine, one)) is not None:
                found.append(picture)
    yield Pictures(found)
    yield from draw_rows(topic, cells, paper)


def _timeline(machine: str, one: Measured) -> Picture | None:
    """Each arm's median, or its units' own times where the trace has them."""
    lanes = _lanes(one)
    tracks = []
    for name, arm in one.cell.arms.items():
        if name.endswith(" again") or arm.median is None:
            continue
        bars = lanes.get(name) or [svg.Bar("", 0.0, arm.median * 1e3)]
        ratio = one.cell.speedups.get(name)
        shown = say.seconds(arm.median) + (f" ({say.times(ratio.value)})" if ratio else "")
        tracks.append(svg.Track(name, shown, bars))
    if not tracks:
        return None
    caption = f"{machine}: {one.cell.name}"
    return Picture(svg.timeline(caption, tracks), caption)


def _lanes(one: Measured) -> dict[str, list[svg.Bar]]:
    """Bars from trace entries that name an arm, a unit, a start and an end in seconds."""
    found: dict[str, list[svg.Bar]] = {}
    for entry in one.cell.trace:
        start, end = number(entry.get("start")), number(entry.get("end"))
        if start is not None and end is not None and end >= start >= 0:
            lane = str(entry.get("unit") or entry.get("stream") or "")
            found.setdefault(str(entry.get("arm")), []).append(svg.Bar(lane, start * 1e3, end * 1e3))
    return found


def draw_traces(topic: Topic, cells: Cells, paper: Paper) -> Iterator[Block]:
    """What happened call by call, beside the speedups."""
    yield from draw_rows(topic, cells, paper)
    every = [(machine, one.cell) for machine, found in cells.items() for one in found]
    drawn = [picture for machine, cell in every for picture in traces.drawn(machine, cell)]
    if drawn:
        yield Pictures(drawn)
    for machine, cell in every:
        yield from traces.told(machine, cell)


# --- overlap by backend


def overlap(results: Results) -> Section:
    """How much of two units' work ran at once, on every backend."""
    rows, points = [], []
    for machine, cells in chosen(results, "mechanism").items():
        for one in cells:
            main = number(one.cell.figures.get("overlap"))
            for arm, value, low, high in _overlaps(one):
                shown = say.plain(value) + (f" [{say.plain(low)}, {say.plain(high)}]" if low and high else "")
                backend = backend_name(one.run.backend or "not known")
                rows.append((backend, machine, one.cell.name, arm or "split", shown))
                if main is None or main == value:
                    points.append(svg.Row(f"{machine}: {one.cell.name}", shown, value, low, high))
    missing = [name for name in ("Metal", "CUDA", "CPU") if name not in {row[0] for row in rows}]
    rows += [(name, say.NONE, say.NONE, say.NONE, say.NOT_YET) for name in missing]
    blocks: list[Block] = [
        Paragraph(
            "Overlap is (CPU alone + current stream alone) / together, and means the same on every machine: "
            "2 is two equal parts wholly at once, 1 is one after the other. The paper gives no overlap."
        )
    ]
    if points:
        caption = "Overlap behind the eager boundary"
        axis = svg.Axis("overlap", reference=1.0, reference_label="one after the other")
        blocks.append(Pictures([Picture(svg.intervals(caption, points, axis), caption)]))
    blocks.append(Table("Overlap by backend", ("backend", "machine", "cell", "arm", "overlap"), rows))
    return Section("Overlap by backend", "Section 3", blocks)


def _overlaps(one: Measured) -> Iterator[tuple[str, float, float | None, float | None]]:
    """The cell's overlap, by arm where it tells that: one number each, or one with an interval."""
    figures = one.cell.figures
    told = as_dict(figures.get("overlaps")) or as_dict(figures.get("overlap"))
    if not told or "value" in told:
        told = {"": figures.get("overlap")}
    for arm, found in told.items():
        held = as_dict(found) or {"value": found}
        middle = number(held.get("value"))
        if middle is not None:
            yield say.words(arm), middle, number(held.get("low")), number(held.get("high"))


# --- the experiments in the order of the page

TOPICS: Sequence[Topic] = (
    Topic(
        "mechanism",
        "Timeline of one split matmul",
        "Section 3, Figure 1",
        "One matmul whose rows are split between two units. Inside one lazy graph the two may run one after "
        "the other; making the input real first, the boundary, is what lets them run at once.",
        draw_timeline,
    ),
    Topic(
        "block",
        "Speedup by sequence length",
        "Section 5.2, Figure 3",
        "One decoder block with made-up weights, every linear layer split, against the same block of MLX in "
        "the same precision.",
        draw_lengths,
        ("geometry", "model", "dtype"),
        (1024, 2048, 4096, 8192),
    ),
    Topic(
        "depth",
        "Speedup at full depth",
        "Section 5.3, Figure 4",
        "Blocks on top of each other: whether the boundary in front of every layer adds up.",
        draw_lengths,
        ("geometry", "model", "dtype"),
        (2048, 4096, 8192),
    ),
    Topic(
        "ttft",
        "Time to first token",
        "Section 5.4, Figure 5",
        "A real checkpoint through stock MLX-LM with the patch, from the prompt to the first token, and "
        "whether the answer is the same.",
        draw_lengths,
        ("model", "dtype"),
        (2048, 4096, 8192),
    ),
    Topic(
        "gate",
        "The gate, call by call",
        "Sections 4 and 5.5",
        "Which arm the gate chose at each call, how long it took, and what the looks at the other arms cost.",
        draw_traces,
    ),
    Topic(
        "overhead",
        "Calls that are left alone",
        "Section 5.4",
        "What the patch adds to a call that stays stock, such as those of decoding.",
        draw_rows,
    ),
    Topic(
        "serve",
        "A server under load",
        "left open",
        "mlx_lm.server with several clients and long prompts, stock and patched.",
        draw_rows,
    ),
)
MORE: Sequence[Topic] = (
    Topic(
        "linears",
        "The linear layers alone",
        "nothing",
        "Every linear layer of a model on inputs that are "
        "ready: the share of a prompt that a split can touch.",
        draw_rows,
    ),
    Topic(
        "calibration",
        "Calibration against a full grid",
        "Section 4",
        "The ratio that the calibrator finds, and how far it is from the best of an exhaustive grid.",
        draw_rows,
    ),
    Topic("quantized", "Quantised layers", "nothing", "Ways to compute a quantised layer.", draw_rows),
    Topic("experts", "Expert layers", "nothing", "Ways to compute a mixture of experts.", draw_rows),
)


def protocol(results: Results, paper: Paper) -> Section:
    """The fairness protocol's figures."""
    about = Paragraph(
        "Arms of one precision, in turns A B B A in one run, one process at a time; every arm's output is "
        "compared with the baseline's before it is timed. Where several processes share a cell's samples, "
        "the interval is drawn from whole processes first and then from the pairs of each. A run is refused "
        "on battery, in low-power mode or short of memory."
    )
    return Section("The protocol", "Section 5.1", [about, paper_table(paper.of("protocol"), results, paper)])
