"""What a pair of units can gain from a row split, from four measured figures (paper, Sections 3 and 4).

A model, not a measurement: it says what to expect and why, and stands beside what was measured, never in its
place. Policy only: no MLX, no clock, no files.

A call of `rows` rows of which the CPU takes a share r keeps the CPU busy for a = r * rows * cpu_us and the
current stream for b = (1 - r) * rows * current_us, each alone. While both run, either takes `contention`
times as long; what the slower one has left, it does at its own pace. So the split takes

    fixed_us + max(a, b) + (contention - 1) * min(a, b)

and it can pay only while contention < 1 + current_us / cpu_us: beyond that each row that the CPU takes slows
the other unit down by more than it saves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .ratios import LARGEST_RATIO, Choice, composed_ratio

US = 1e-6


@dataclass(frozen=True)
class Figures:
    """The four figures of one shape on one machine.

    `cpu_us` and `current_us` are microseconds a row of each unit alone. `contention` is how many times as
    long a row takes on either while both run: 1 is no contention, 2 is as slow as one after the other.
    `fixed_us` is what a split call costs beyond its rows, in microseconds: the boundary and the join.

    Raises:
        ValueError: a rate that is not positive, a contention below 1 or a negative cost.
    """

    cpu_us: float
    current_us: float
    contention: float = 1.0
    fixed_us: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("cpu_us", 0.0), ("current_us", 0.0), ("contention", 1.0), ("fixed_us", 0.0)):
            value = getattr(self, name)
            positive = name.endswith("_us") and name != "fixed_us"
            if not math.isfinite(value) or value < least or (positive and value == 0):
                wanted = "above 0" if positive else f"at least {least:g}"
                raise ValueError(f"{name}={value!r} must be finite and {wanted}")


@dataclass(frozen=True)
class Prediction:
    """The best CPU share, the speedup over stock that it gives, and both calls' seconds."""

    ratio: float
    speedup: float
    seconds: float
    stock_seconds: float


def contention(cpu_alone: float, current_alone: float, together: float) -> float:
    """The contention that makes two parts, which take so many seconds alone, take `together` side by side.

    At least 1: a reading below it is noise, since no unit runs faster beside the other.

    Raises:
        ValueError: a time that is not positive.
    """
    for name, value in (
        ("cpu_alone", cpu_alone),
        ("current_alone", current_alone),
        ("together", together),
    ):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name}={value!r} must be a positive time")
    longer, shorter = max(cpu_alone, current_alone), min(cpu_alone, current_alone)
    return max(1.0, 1 + (together - longer) / shorter)


def split_seconds(figures: Figures, rows: int, ratio: float) -> float:
    """Seconds of a call of `rows` rows with a CPU share of `ratio`, 0 being stock."""
    cpu, current = ratio * rows * figures.cpu_us, (1 - ratio) * rows * figures.current_us
    if ratio == 0:
        return current * US
    both = max(cpu, current) + (figures.contention - 1) * min(cpu, current)
    return (figures.fixed_us + both) * US


def predict(figures: Figures, rows: int, *, max_ratio: float = LARGEST_RATIO) -> Prediction:
    """The best share of a call of `rows` rows and what it gains; share 0 and speedup 1 where none does.

    Args:
        figures: the four figures, of this shape.
        rows: rows of the call, at least 1.
        max_ratio: the largest share allowed.

    Raises:
        ValueError: `rows` below 1.
    """
    if rows < 1:
        raise ValueError(f"rows={rows!r} must be at least 1")
    balance = composed_ratio(1 / figures.cpu_us, 1 / figures.current_us)
    # The time is made of straight lines in the share, which meet where both units finish together.
    shares = (0.0, min(balance, max_ratio), max_ratio)
    best = min(shares, key=lambda ratio: split_seconds(figures, rows, ratio))
    stock, seconds = split_seconds(figures, rows, 0.0), split_seconds(figures, rows, best)
    return Prediction(best, stock / seconds, seconds, stock)


def as_dict(figures: Figures, rows: int, *, max_ratio: float = LARGEST_RATIO) -> dict[str, Any]:
    """The four figures and what they predict for `rows` rows, as plain data."""
    found = predict(figures, rows, max_ratio=max_ratio)
    return {
        "rows": rows,
        "cpu_us": figures.cpu_us,
        "current_us": figures.current_us,
        "contention": figures.contention,
        "fixed_us": figures.fixed_us,
        "predicted_ratio": found.ratio,
        "predicted_speedup": found.speedup,
    }


def sentence(told: dict[str, Any]) -> str:
    """`as_dict` in one line for people."""
    return (
        f"CPU {told['cpu_us']:.1f} us/row, current {told['current_us']:.1f} us/row, "
        f"contention {told['contention']:.2f}, fixed {told['fixed_us']:.0f} us a call: "
        f"{told['predicted_speedup']:.2f}x at a CPU share of {told['predicted_ratio']:.2f} expected"
    )


# --- beside what a calibration found


@dataclass(frozen=True)
class Searched:
    """One site of a calibration: its name, the rows of its calls, and what the search found for it."""

    name: str
    rows: int
    choice: Choice


def explain(
    sites: Sequence[Searched], fixed_seconds: float, *, max_ratio: float
) -> dict[str, dict[str, Any]]:
    """What the model says of each site whose units were both timed alone, by name, beside what was measured.

    The contention of a site is the median of what the *other* sites' splits came to, so that the prediction
    does not rest on what it is compared with; `contention_from` says so, or where else it is from.

    Args:
        sites: what was found.
        fixed_seconds: what a boundary costs.
        max_ratio: the largest share allowed.

    Returns:
        Of each site `as_dict` with `contention_from`, `measured_ratio` and `measured_speedup` (1 for stock).
    """
    alone = {site.name: rates for site in sites if (rates := _alone(site.choice)) is not None}
    timed = [site for site in sites if site.name in alone]
    seen = {site.name: slowed(site, fixed_seconds) for site in timed}
    told = {}
    for site in timed:
        at, origin = _contention_for(site.name, seen)
        figures = Figures(*alone[site.name], at, fixed_seconds / US)
        told[site.name] = {
            **as_dict(figures, site.rows, max_ratio=max_ratio),
            "contention_from": origin,
            "measured_ratio": site.choice.ratio,
            "measured_speedup": 1 + site.choice.gain,
        }
    return told


def _alone(choice: Choice) -> tuple[float, float] | None:
    """Microseconds a row of (CPU, current stream) alone; None where the search did not time both."""
    if not choice.cpu_rate or not choice.current_rate:
        return None
    return 1 / choice.cpu_rate / US, 1 / choice.current_rate / US


def _contention_for(name: str, seen: Mapping[str, float | None]) -> tuple[float, str]:
    """A site's contention and where it is from."""
    others = [found for other, found in seen.items() if other != name and found is not None]
    if others:
        return median(others), "the other sites"
    own = seen[name]
    if own is not None:
        return own, "this site's own split"
    return 1.0, "nowhere, no split was timed: what is expected is a bound"


def slowed(site: Searched, fixed_seconds: float) -> float | None:
    """The contention that a site's chosen split came to; None where it is stock."""
    choice = site.choice
    if not (choice.ratio and choice.seconds and choice.cpu_rate and choice.current_rate):
        return None
    cpu = choice.ratio * site.rows / choice.cpu_rate
    current = (1 - choice.ratio) * site.rows / choice.current_rate
    return contention(cpu, current, max(choice.seconds - fixed_seconds, US))


def render(told: Mapping[str, dict[str, Any]]) -> str:
    """`explain` for people."""
    columns = f"{'CPU us/row':>11}{'current':>9}{'contention':>11}{'fixed us':>9}"
    head = f"{'site':60}{columns}  {'expected':14}measured"
    lines = [
        f"{name:60}{site['cpu_us']:>11.1f}{site['current_us']:>9.1f}{site['contention']:>11.2f}"
        f"{site['fixed_us']:>9.0f}  {_at(site, 'predicted'):14}{_at(site, 'measured')}"
        for name, site in told.items()
    ]
    origins = sorted({site["contention_from"] for site in told.values()})
    return "\n".join([head, *lines, *(f"contention is from {origin}" for origin in origins)])


def _at(site: dict[str, Any], what: str) -> str:
    return f"{site[f'{what}_speedup']:.2f}x at {site[f'{what}_ratio']:.2f}"
