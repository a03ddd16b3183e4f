"""Policy: which arm a site takes, how many of its rows go to the CPU and in which form, and why."""

from __future__ import annotations

from dataclasses import dataclass

from .ratios import default_ratio
from .settings import Settings
from .table import Entry

STOCK, DENSE, SPLIT = "stock", "dense", "split"
"""The arms: as MLX computes it; by a dense weight made once, on the current stream; by both units."""


@dataclass(frozen=True)
class Plan:
    """One decision.

    `ratio` is the CPU share of `arm` split, and 0 otherwise; `cpu_dtype` the arithmetic of the CPU's rows;
    `form` how the parts of a split are computed, a word of the layer's kind.
    """

    arm: str
    ratio: float
    cpu_dtype: str
    why: str
    form: str = DENSE


@dataclass(frozen=True)
class Pair:
    """The two units: the CPU stream and the current stream of `backend` (metal, cuda or cpu)."""

    backend: str
    cores: int


def decide(settings: Settings, pair: Pair, entry: Entry | None, *, cpu_dtype: str, form: str = DENSE) -> Plan:
    """The plan of a site before its gate knows better: the user's ratio, else the table's, else built in.

    Args:
        settings: `ratio` wins where it is given.
        pair: the units that would share the rows.
        entry: what was measured for the site and `counts`, None where nothing was.
        cpu_dtype: `native` or `float32`: what the CPU rows are computed in without a table.
        form: of a split, without a table.
    """
    if settings.ratio is not None:
        return _plan(settings.ratio, cpu_dtype, form, f"ratio={settings.ratio} was given")
    if entry is not None:
        why = f"measured {entry.when}, gain {entry.gain:.0%}"
        return Plan(entry.arm, entry.ratio, entry.cpu_dtype, why, entry.form)
    return without_table(pair, cpu_dtype=cpu_dtype, form=form)


def counts(settings: Settings, entry: Entry, cpu_dtype: str, forms: tuple[str, ...] = (DENSE,)) -> bool:
    """Whether an entry holds for the arithmetic that the settings come to for the site, `cpu_dtype`.

    Under `auto` a float32 one always does; a native one only where `auto` would be native too. Its form must
    be one of `forms`, those that this version knows for the layer.
    """
    if entry.form not in forms:
        return False
    return entry.cpu_dtype == cpu_dtype or (settings.cpu_dtype == "auto" and entry.cpu_dtype == "float32")


def without_table(pair: Pair, *, cpu_dtype: str, form: str = DENSE) -> Plan:
    """The built-in default, where nothing was measured."""
    if pair.backend == "cpu" and pair.cores < 2:
        return _plan(0.0, cpu_dtype, form, "one CPU core: there is no second unit")
    ratio = default_ratio(pair.backend, widened=cpu_dtype == "float32")
    return _plan(ratio, cpu_dtype, form, f"built-in default for {pair.backend}")


def _plan(ratio: float, cpu_dtype: str, form: str, why: str) -> Plan:
    return Plan(SPLIT if ratio > 0 else STOCK, ratio, cpu_dtype, why, form)
