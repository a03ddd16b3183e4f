"""Memory pressure, swapping, heat and power at this moment, read so rarely that the readings cost nothing.

Facts only: what to do about them is the gate's affair. What cannot be read is None, and nothing here raises.
The macOS sources were not run on a Mac by us; their parsers are tested on recorded text.
"""

import math
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from fusionml.machine import attempt, command, decode_number, low_power_mode, sysctl, thermal_state

Level = Literal["normal", "warning", "critical"]

# In-process readings: 0.2 ms together on Linux, so 0.02 % of the time.
FAST_SECONDS = 1.0
# Readings that start a process, a few on a Mac at about 10 ms each.
SLOW_SECONDS = 60.0
# Per cent of the last 10 s in which some task waited for memory (Linux). A prefill that waits a tenth of the
# time is measurably slower; at four tenths nothing that is measured means anything.
PSI_WARNING, PSI_CRITICAL = 10.0, 40.0


@dataclass(frozen=True)
class Reading:
    """One look at the machine; None is unknown. `swap_in_rate` is in bytes a second since the last look.

    `thermal` is one of `machine.THERMAL_LEVELS`, or `throttled`.
    """

    level: Level | None = None
    swap_in_rate: float | None = None
    free_bytes: int | None = None
    thermal: str | None = None
    low_power: bool | None = None
    on_battery: bool | None = None

    @property
    def short(self) -> bool:
        """Whether the system says that memory is short."""
        return self.level in ("warning", "critical")


def read() -> Reading:
    """The machine now, at most FAST_SECONDS old (heat, low power and macOS swapping: SLOW_SECONDS)."""
    return _monitor.read()


def fits(reading: Reading, working_set_bytes: float) -> bool | None:
    """Whether so many further bytes fit in free memory; never under pressure, None where nobody knows."""
    if not working_set_bytes >= 0:
        raise ValueError(f"working_set_bytes must be at least 0, not {working_set_bytes!r}")
    if reading.short:
        return False
    return None if reading.free_bytes is None else working_set_bytes <= reading.free_bytes


class Monitor:
    """Keeps the last `Reading` and refreshes it when it is due; safe to share between threads.

    `fast` and `slow` return some of Reading's fields, and `swapped_in`, the bytes swapped in since boot.
    `clock` is in seconds.
    """

    def __init__(
        self,
        fast: Callable[[], dict[str, Any]],
        slow: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fast, self._slow, self._clock = fast, slow, clock
        self._fast_due = self._slow_due = -math.inf
        self._fields: dict[str, Any] = {}
        self._swapped_in: tuple[float, int] | None = None
        self._reading = Reading()
        self._lock = threading.Lock()

    def read(self) -> Reading:
        """The last reading, refreshed if due. While one thread refreshes, others get the last one at once."""
        first = self._fast_due == -math.inf
        if self._clock() >= self._fast_due and self._lock.acquire(blocking=first):
            try:
                self._refresh(self._clock())
            finally:
                self._lock.release()
        return self._reading

    def _refresh(self, now: float) -> None:
        if now < self._fast_due:
            return  # another thread was first
        self._take(self._fast, now)
        if now >= self._slow_due:
            self._take(self._slow, now)
            self._slow_due = now + SLOW_SECONDS
        self._reading = Reading(**self._fields)
        self._fast_due = now + FAST_SECONDS

    def _take(self, source: Callable[[], dict[str, Any]], now: float) -> None:
        fields = attempt(source) or {}
        if "swapped_in" in fields:
            fields["swap_in_rate"] = self._swap_in_rate(fields.pop("swapped_in"), now)
        self._fields.update(fields)

    def _swap_in_rate(self, swapped_in: int | None, now: float) -> float | None:
        before, self._swapped_in = self._swapped_in, None if swapped_in is None else (now, swapped_in)
        if before is None or swapped_in is None or now <= before[0] or swapped_in < before[1]:
            return None
        return (swapped_in - before[1]) / (now - before[0])


def _read_fast() -> dict[str, Any]:
    battery = attempt(psutil.sensors_battery)
    fields: dict[str, Any] = {
        "level": attempt(_level),
        "free_bytes": attempt(lambda: psutil.virtual_memory().available),
        "on_battery": None if battery is None or battery.power_plugged is None else not battery.power_plugged,
    }
    if sys.platform == "linux":
        fields["swapped_in"] = attempt(lambda: psutil.swap_memory().sin)
    return fields


def _read_slow() -> dict[str, Any]:
    fields: dict[str, Any] = {"thermal": attempt(thermal_state), "low_power": attempt(low_power_mode)}
    if sys.platform == "darwin":
        # psutil's own figure counts file pages there too, so loading a model would look like swapping.
        fields["swapped_in"] = parse_vm_stat(command("/usr/bin/vm_stat") or "")
    return fields


def _level() -> Level | None:
    # In this process, because `sysctl` as a process takes about a thousand times as long.
    if sys.platform == "darwin":
        return pressure_level(decode_number(sysctl("kern.memorystatus_vm_pressure_level")))
    return parse_psi(Path("/proc/pressure/memory").read_text())


def pressure_level(number: int | None) -> Level | None:
    """The macOS kernel's level: 1, 2 or 4."""
    levels: dict[int | None, Level] = {1: "normal", 2: "warning", 4: "critical"}
    return levels.get(number)


def parse_psi(text: str) -> Level | None:
    """From Linux's `/proc/pressure/memory`, by the 10-second average of its `some` line."""
    found = re.search(r"^some avg10=([0-9]{1,3}(?:\.[0-9]+)?) ", text, re.MULTILINE)
    if not found:
        return None
    waiting = float(found[1])
    if waiting >= PSI_CRITICAL:
        return "critical"
    return "warning" if waiting >= PSI_WARNING else "normal"


def parse_vm_stat(text: str) -> int | None:
    """Bytes swapped in since boot, from macOS `vm_stat`, which counts pages."""
    page = re.search(r"page size of ([0-9]{1,9}) bytes", text)
    pages = re.search(r"^Swapins:\s+([0-9]{1,18})\.?\s*$", text, re.MULTILINE)
    return int(page[1]) * int(pages[1]) if page and pages else None


_monitor = Monitor(_read_fast, _read_slow)
