"""The paper's figures (`results/paper.json`), and which of them stands beside a measured one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import report_text as say
from benchmarks.report_read import Run, as_dict, number, read_json, text, texts

PAPER = Path(__file__).parent.parent / "results" / "paper.json"


@dataclass(frozen=True)
class Machine:
    """One of the paper's machines; `chip` is what MLX calls it."""

    name: str
    chip: str
    memory_gb: int
    cooling: str | None = None

    @property
    def shown(self) -> str:
        return f"{self.chip}, {self.memory_gb} GB"

    def is_of(self, run: Run) -> bool:
        return run.start.get("chip") == self.chip


@dataclass(frozen=True)
class Figure:
    """One figure of the text: a number, a range, or words.

    `match` tells the arms and parameters that it was measured with, or the name of the figure that it is
    compared with; `measure` marks what stands for itself.
    """

    id: str
    experiment: str
    section: str
    machines: tuple[str, ...]
    what: str
    value: Any
    unit: str
    says: str
    match: dict[str, Any] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        return say.of_paper(self.value, self.unit, self.says)

    @property
    def low(self) -> float | None:
        return number(self.value.get("low")) if isinstance(self.value, dict) else number(self.value)

    @property
    def high(self) -> float | None:
        return number(self.value.get("high")) if isinstance(self.value, dict) else number(self.value)

    @property
    def is_speedup(self) -> bool:
        """Whether it is the speedup of an arm, and no other figure."""
        return self.unit == "x" and self.low is not None and not {"measure", "figures"} & set(self.match)

    def stands_beside(self, cell: str, arm: str, parameters: dict[str, Any]) -> bool:
        """Whether it is the speedup of this arm with these parameters."""
        wanted = {key: value for key, value in self.match.items() if key != "arms"}
        arms = self.match.get("arms")
        named = arms is None or _bare(arm) in {_bare(name) for name in arms}
        return (
            self.is_speedup
            and named
            and all(_agrees(key, value, cell, arm, parameters) for key, value in wanted.items())
        )

    def is_figure(self, name: str) -> bool:
        """Whether it is what a cell reports under this name."""
        return name in self.match.get("figures", ())


@dataclass(frozen=True)
class Paper:
    title: str
    reference: str
    machines: tuple[Machine, ...]
    figures: tuple[Figure, ...]

    def of(self, experiment: str) -> list[Figure]:
        return [figure for figure in self.figures if figure.experiment == experiment]

    def beside(self, experiment: str, cell: str, arm: str, parameters: dict[str, Any]) -> list[Figure]:
        return [f for f in self.of(experiment) if f.stands_beside(cell, arm, parameters)]

    def beside_figure(self, experiment: str, name: str) -> list[Figure]:
        return [f for f in self.of(experiment) if f.is_figure(name)]


def load(file: Path = PAPER) -> Paper:
    """The paper's figures as they lie in the repository."""
    data = as_dict(read_json(file))
    return Paper(
        title=str(data["title"]),
        reference=str(data["reference"]),
        machines=tuple(Machine(**machine) for machine in data["machines"]),
        figures=tuple(_figure(figure) for figure in data["figures"]),
    )


def _figure(data: dict[str, Any]) -> Figure:
    rest = {key: data[key] for key in ("id", "experiment", "section", "what", "value", "unit", "says")}
    return Figure(machines=texts(data["machines"]), match=as_dict(data.get("for")), **rest)


def spans(figures: Iterable[Figure]) -> str:
    """The figures beside a measured one, each once; their range where there are many."""
    found = list({figure.shown: figure for figure in figures}.values())
    if len(found) <= 2:
        return "; ".join(figure.shown for figure in found) or say.NONE
    lowest = min(found, key=lambda figure: figure.low or 0.0)
    highest = max(found, key=lambda figure: figure.high or 0.0)
    return f"{lowest.shown} to {highest.shown}"


def _agrees(key: str, wanted: Any, cell: str, arm: str, parameters: dict[str, Any]) -> bool:
    """A parameter decides where the cell has it; else the names of arm and cell."""
    given = parameters.get(key)
    if isinstance(wanted, bool):
        return given is wanted if isinstance(given, bool) else (key in _bare(f"{arm} {cell}")) is wanted
    if isinstance(wanted, str):
        where = given if text(given) else f"{arm} {cell}"
        return _bare(wanted) in _bare(str(where))
    found = number(parameters.get(f"paper_{key}", given))  # sizes may be scaled: the paper's is kept
    if key == "blocks" and found is not None:
        return (found > 1) == (wanted > 1)  # a small machine stacks fewer
    return found == number(wanted)


def _bare(name: str) -> str:
    """`GPT-2-XL` and `gpt2 xl` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())
