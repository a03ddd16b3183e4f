"""The result of an experiment as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fusionml.measure import Ratio


def render(document: Mapping[str, Any]) -> str:
    """Of each cell: every arm's median, its ratio to the baseline with the interval, its error; figures."""
    lines = [f"{document['title']} ({document['paper']})"]
    for cell in document["cells"]:
        lines += ["", *_cell(cell)]
    lines += [f"forced: {reason}" for reason in document["forced"]]
    return "\n".join([*lines, *(f"warning: {text}" for text in document["warnings"])])


def _cell(cell: Mapping[str, Any]) -> Iterator[str]:
    if cell["status"] == "failed":
        yield f"{cell['name']}: failed: {cell['error']}"
        return
    width = 2 + max(map(len, [cell["name"], *cell["arms"]]))
    yield (
        f"{cell['name']:{width + 2}}{'median':>10}  against {cell['baseline']}"
        if cell["arms"]
        else cell["name"]
    )
    for name, arm in cell["arms"].items():
        yield _arm(cell, name, arm, width)
    for name, value in cell["figures"].items():
        if not isinstance(value, dict | list):
            yield f"  {name}: {_figure(value)}"
    for name, arm in cell["arms"].items():
        yield from (f"  warning, {name}: {text}" for text in arm["warnings"])


def _arm(cell: Mapping[str, Any], name: str, arm: Mapping[str, Any], width: int) -> str:
    twin = name == f"{cell['baseline']} again"
    ratio, error = cell["aa"] if twin else cell["ratios"].get(name), cell["errors"].get(name)
    middle = "-" if arm["median"] is None else seconds(arm["median"])
    against = "" if ratio is None else str(Ratio(**ratio))
    return (
        f"  {name:{width}}{middle:>10}  {against:24}{'' if error is None else f'error {error:.1e}'}".rstrip()
    )


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"


def _figure(value: Any) -> str:
    return "not known" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
