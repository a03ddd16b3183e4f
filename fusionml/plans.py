"""Policy: which arm a site takes and how many of its rows go to the CPU, and why."""

from __future__ import annotations

from dataclasses import dataclass

from .ratios import Site, default_ratio
from .settings import Settings

STOCK, SPLIT = "stock", "split"


@dataclass(frozen=True)
class Plan:
    """One decision: `ratio` is the CPU share of `arm` split, and 0 for stock."""

    arm: str
    ratio: float
    why: str


@dataclass(frozen=True)
class Pair:
    """The two units: the CPU stream and the current stream of `backend` (metal, cuda or cpu)."""

    backend: str
    cores: int


def decide(site: Site, settings: Settings, pair: Pair, *, widened: bool) -> Plan:
    """The plan of a site without measurements: the user's ratio, else the built-in default.

    Args:
        site: what is decided.
        settings: `ratio` wins where it is given.
        pair: the units that would share the rows.
        widened: whether the CPU would compute half-precision rows in float32.
    """
    if settings.ratio is not None:
        return _plan(settings.ratio, f"ratio={settings.ratio} was given")
    return without_table(pair, widened=widened)


def without_table(pair: Pair, *, widened: bool) -> Plan:
    """The built-in default, where nothing was measured."""
    if pair.backend == "cpu" and pair.cores < 2:
        return _plan(0.0, "one CPU core: there is no second unit")
    ratio = default_ratio(pair.backend, widened=widened)
    return _plan(ratio, f"built-in default for {pair.backend}")


def _plan(ratio: float, why: str) -> Plan:
    return Plan(SPLIT if ratio > 0 else STOCK, ratio, why)
