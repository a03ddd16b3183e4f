"""One result of a cell from those of its processes.

Where a process lies in memory, which cores the system gives it and what else the machine does just then stay
much the same for as long as it runs: samples of one process resemble each other, and say little about the
next one. So the samples of a cell come from several, at different moments of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import arms
from benchmarks.experiment import Cell, Experiment, Options


def shares(options: Options, *, whole: bool) -> list[Options]:
    """What each process of a cell is asked for: its part of the samples and, rounded up, of the warm-ups.

    Where a cell is a `whole` it is asked for all of them.
    """
    count = options.processes
    each, more = (options.samples, 0) if whole else divmod(options.samples, count)
    warm_ups = options.warm_ups if whole else -(-options.warm_ups // count)
    return [
        replace(
            options,
            samples=each + (number < more),
            warm_ups=warm_ups,
            processes=1,
            first=number * each + min(number, more),
        )
        for number in range(count)
    ]


def join(chosen: Experiment, parameters: Cell, results: Sequence[Cell]) -> Cell:
    """The result of a cell, with `processes` where there were several.

    Samples follow one another by process; an error or a peak is the largest of any; an arm that one of them
    did not time has no samples. Figures and trace are the first process's, but for what the experiment
    concludes from all samples.

    Args:
        chosen: the experiment.
        parameters: the cell's.
        results: what `measure` returned in each process, at least one.
    """
    first = results[0]
    joined = dict(first) if len(results) == 1 else {**first, **_joined(results)}
    concluded = chosen.conclude(parameters, joined) if joined.get("arms") else {}
    # Concluded ones win, and are told first.
    return {**joined, "figures": {**concluded, **first.get("figures", {}), **concluded}}


def groups(result: Mapping[str, Any]) -> list[int] | None:
    """Samples of an arm by process, for `paired_ratio`; None where there was one process only."""
    return [each["samples"] for each in result["processes"]] if "processes" in result else None


def figures(result: Mapping[str, Any]) -> list[Cell]:
    """Those of each process."""
    return [each["figures"] for each in result.get("processes", [result])]


def told_of_each(result: Mapping[str, Any], name: str) -> str:
    """A figure that every process found for itself, of all of them, e.g. a share that it chose."""
    return ", ".join(f"{part[name]:.3g}" for part in figures(result))


def _joined(results: Sequence[Cell]) -> Cell:
    first, baseline = results[0], results[0].get("baseline")
    told = [{"samples": _count(each), "figures": each.get("figures", {})} for each in results]
    if not first.get("arms"):
        return {"processes": told}
    names = list(dict.fromkeys(name for each in results for name in each["arms"]))
    joined = arms.summarise(
        {name: _samples(results, name) for name in names},
        baseline,
        {name: _error(each["errors"].get(name) for each in results) for name in first["errors"]},
        groups=[each["samples"] for each in told],
    )
    for name, arm in joined["arms"].items():
        found = [each["arms"][name] for each in results if name in each["arms"]]
        arm["peak_bytes"] = _largest(each.get("peak_bytes") for each in found)
        if not arm["samples"]:
            arm["warnings"] = _untimed(found, len(results))
    return {**joined, "processes": told}


def _untimed(found: Sequence[Cell], processes: int) -> list[str]:
    """Why an arm has no samples."""
    every = dict.fromkeys(warning for each in found for warning in each["warnings"])
    told = [warning for warning in every if warning.startswith(arms.NOT_TIMED)]
    return told or [f"{arms.NOT_TIMED}only {len(found)} of {processes} processes had it"]


def _error(values: Iterable[float | None]) -> float | None:
    """The largest; None where one is not finite, or nothing was compared."""
    found = list(values)
    return None if None in found else max(value for value in found if value is not None)


def _count(result: Cell) -> int:
    return len(result["arms"][result["baseline"]]["samples"]) if result.get("arms") else 0


def _samples(results: Sequence[Cell], name: str) -> list[float]:
    taken = [each["arms"].get(name, {}).get("samples", []) for each in results]
    return [seconds for samples in taken for seconds in samples] if all(taken) else []


def _largest(values: Iterable[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
