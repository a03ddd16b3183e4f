"""What a load that goes on for minutes looks like: looks at a ratio over time, cold and hot.

No MLX and no clock: it is told when each look was and what it read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fusionml.measure import paired_ratio

BURST_SECONDS, SUSTAINED_SECONDS = 10.0, 60.0
LEAST_LOOKS = 3
COOL = (None, "nominal")


@dataclass(frozen=True)
class Look:
    """One look: `at` seconds after the load began, seconds of a stock and a split call, and the machine.

    `thermal` is as of `machine.thermal_state`, `clock_mhz` of the CPU; both None where they cannot be read.
    """

    at: float
    stock: float
    split: float
    thermal: str | None = None
    clock_mhz: float | None = None


def burst(looks: Sequence[Look]) -> list[Look]:
    """The looks of the first ten seconds; at least three, since a slow machine has no more by then."""
    early = [look for look in looks if look.at <= BURST_SECONDS]
    return early if len(early) >= LEAST_LOOKS else list(looks[:LEAST_LOOKS])


def sustained(looks: Sequence[Look]) -> list[Look]:
    """The looks of the last minute, or of the last half of a run that is shorter than two."""
    end = looks[-1].at
    start = max(end - SUSTAINED_SECONDS, end / 2)
    late = [look for look in looks if look.at >= start]
    return late if len(late) >= LEAST_LOOKS else list(looks[-LEAST_LOOKS:])


def part(looks: Sequence[Look]) -> dict[str, Any]:
    """Speedup of some looks, with its interval, and what the machine was like during them; plain data."""
    clocks = [look.clock_mhz for look in looks if look.clock_mhz is not None]
    return {
        "from": looks[0].at,
        "to": looks[-1].at,
        "speedup": asdict(paired_ratio([look.stock for look in looks], [look.split for look in looks])),
        "thermal": sorted({look.thermal for look in looks if look.thermal is not None}) or None,
        "hot": any(look.thermal not in COOL for look in looks),
        "clock_mhz": sum(clocks) / len(clocks) if clocks else None,
    }


def by_state(looks: Sequence[Look]) -> dict[str, Any]:
    """Cold and hot looks apart, by the system's own thermal state; None where it was never so, or unknown."""
    known = [look for look in looks if look.thermal is not None]
    cold = [look for look in known if look.thermal in COOL]
    hot = [look for look in known if look.thermal not in COOL]
    return {name: part(some) if some else None for name, some in (("cold", cold), ("hot", hot))}
