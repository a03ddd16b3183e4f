"""Policy: which arm a site takes and how many of its rows go to the CPU, and why."""

from __future__ import annotations

from dataclasses import dataclass

from .ratios import default_ratio
from .settings import Settings
from .table import Entry

STOCK, SPLIT = "stock", "split"


@dataclass(frozen=True)
class Plan:
    """One decision: `ratio` is the CPU share of `arm` split, and 0 for stock; the CPU rows' arithmetic."""

    arm: str
    ratio: float
    cpu_dtype: str
    why: str


@dataclass(frozen=True)
class Pair:
    """The two units: the CPU stream and the current stream of `backend` (metal, cuda or cpu)."""

    backend: str
    cores: int


def decide(settings: Settings, pair: Pair, entry: Entry | None, *, cpu_dtype: str) -> Plan:
    """The plan of a site before its gate knows better: the user's ratio, else the table's, else built in.

    Args:
        settings: `ratio` wins where it is given.
        pair: the units that would share the rows.
        entry: what was measured for the site and `counts`, None where nothing was.
        cpu_dtype: `native` or `float32`: what the CPU rows are computed in without a table.
    """
    if settings.ratio is not None:
        return _plan(settings.ratio, cpu_dtype, f"ratio={settings.ratio} was given")
    if entry is not None:
        return _plan(entry.ratio, entry.cpu_dtype, f"measured {entry.when}, gain {entry.gain:.0%}")
    return without_table(pair, cpu_dtype=cpu_dtype)


def counts(settings: Settings, entry: Entry, cpu_dtype: str) -> bool:
    """Whether an entry holds for the arithmetic that the settings come to for the site, `cpu_dtype`.

    Under `auto` a float32 one always does; a native one only where `auto` would be native too.
    """
    return entry.cpu_dtype == cpu_dtype or (settings.cpu_dtype == "auto" and entry.cpu_dtype == "float32")


def without_table(pair: Pair, *, cpu_dtype: str) -> Plan:
    """The built-in default, where nothing was measured."""
    if pair.backend == "cpu" and pair.cores < 2:
        return _plan(0.0, cpu_dtype, "one CPU core: there is no second unit")
    ratio = default_ratio(pair.backend, widened=cpu_dtype == "float32")
    return _plan(ratio, cpu_dtype, f"built-in default for {pair.backend}")


def _plan(ratio: float, cpu_dtype: str, why: str) -> Plan:
    return Plan(SPLIT if ratio > 0 else STOCK, ratio, cpu_dtype, why)
