"""`python -m benchmarks report`: the results of a folder as one page, with the paper's figures beside them.

It writes `report.html`, which needs no network and no script, and `README.md` with the same tables.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from benchmarks import report_paper, report_text
from benchmarks.report_boundaries import BOUNDARIES, boundaries, predictions
from benchmarks.report_page import Section
from benchmarks.report_paper import Paper
from benchmarks.report_read import Results, read
from benchmarks.report_reservations import coverage, machines, other_files, reservations
from benchmarks.report_sections import MORE, TOPICS, Topic, draw_rows, overlap, protocol, section

HERE = Path(__file__).parent
TITLE = "FusionML: measured, beside the paper"


def about(paper: Paper) -> list[str]:
    """How to read the page."""
    return [
        f"The paper is {paper.title} ({paper.reference}). Its figures are marked as the paper's and were "
        "not measured here; a range is a range in its text.",
        "A speedup is the baseline's time over the arm's, the median of the ratios of paired runs, with a "
        "95 % bootstrap interval in brackets: above 1 the arm is faster. A/A is the baseline against itself, "
        "and shows what the machine's noise alone looks like. In pictures filled marks are measured, hollow "
        "ones the paper's, crosses predicted.",
        "python -m benchmarks all measures a machine, and python -m benchmarks report makes this page again.",
    ]


def sections(results: Results, paper: Paper) -> list[Section]:
    """The whole page."""
    there = {run.experiment for run in results.runs}
    named = {topic.experiment for topic in (*TOPICS, *MORE)} | {b.experiment for b in BOUNDARIES}
    more = [topic for topic in MORE if topic.experiment in there or paper.of(topic.experiment)]
    more += [_unnamed(results, name) for name in sorted(there - named)]
    every = [(t.experiment, t.title) for t in (*TOPICS, *more)] + [
        (b.experiment, b.title) for b in BOUNDARIES
    ]
    first, *rest = (section(topic, results, paper) for topic in TOPICS)
    return [
        coverage(results, every),
        first,
        overlap(results),
        *rest,
        *(section(topic, results, paper) for topic in more),
        boundaries(results, paper),
        predictions(results),
        reservations(results),
        protocol(results, paper),
        machines(results),
        *filter(None, [other_files(results)]),
    ]


def _unnamed(results: Results, name: str) -> Topic:
    """An experiment that this page knows nothing about."""
    run = next(run for run in reversed(results.runs) if run.experiment == name)
    return Topic(name, run.title or name, run.paper, "", draw_rows)


def pages(results: Results, paper: Paper) -> tuple[str, str]:
    """The page as HTML and as Markdown."""
    environment = _environment()
    parts = {"title": TITLE, "about": about(paper), "sections": sections(results, paper)}
    html = environment.get_template("report.html.j2").render(
        **parts, style=Markup((HERE / "report.css").read_text())
    )
    return html, environment.get_template("report.md.j2").render(**parts)


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    found.filters.update(clean=report_text.clean, markdown=report_text.markdown)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make both pages; 2 for a folder that is none."""
    parser = argparse.ArgumentParser("python -m benchmarks report", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="folder of results (default: results)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="the page of HTML (default: report.html in the results' folder)",
    )
    args = parser.parse_args(argv)
    if not args.results.is_dir():
        parser.error(f"--results {args.results} is not a folder")
    html, markdown = pages(read(args.results), report_paper.load())
    out = args.out or args.results / "report.html"
    for file, page in ((args.results / "README.md", markdown), (out, html)):
        file.write_text(page, encoding="utf-8")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
