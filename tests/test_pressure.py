"""Memory pressure, heat and power: parsers on published forms of text, the monitor on a fake clock."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionml import pressure
from fusionml.pressure import FAST_SECONDS, SLOW_SECONDS, Monitor, Reading, fits

# As documented in the kernel's Documentation/accounting/psi.rst.
PSI = (
    "some avg10={some} avg60=1.00 avg300=0.10 total=123456\nfull avg10=90.00 avg60=0.00 avg300=0.00 total=0\n"
)

# As published by users of macOS: `vm_stat`, shortened.
VM_STAT = """\
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10069.
Pages active:                            432859.
"Translation faults":                1935466161.
Pageins:                               39333690.
Pageouts:                                264615.
Swapins:                                8847092.
Swapouts:                               9440713.
"""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Source:
    """Returns its fields and counts how often it was asked."""

    def __init__(self, **fields) -> None:
        self.fields, self.calls = fields, 0

    def __call__(self) -> dict:
        self.calls += 1
        return dict(self.fields)


# --- parsers


@given(st.text())
def test_any_text_is_parsed_without_an_error(text):
    pressure.parse_psi(text)
    pressure.parse_vm_stat(text)


@given(st.integers(0, 200), st.text(max_size=5))
@pytest.mark.parametrize("text", [PSI, VM_STAT])
def test_a_damaged_text_is_parsed_without_an_error(text, place, junk):
    damaged = text[:place] + junk + text[place + 3 :]
    pressure.parse_psi(damaged)
    pressure.parse_vm_stat(damaged)


@pytest.mark.parametrize(
    ("some", "level"),
    [
        ("0.00", "normal"),
        ("9.99", "normal"),
        ("10.00", "warning"),
        ("39.99", "warning"),
        ("40.00", "critical"),
        ("100.00", "critical"),
        ("-1.00", None),
        ("nan", None),
        ("", None),
    ],
)
def test_psi_thresholds(some, level):
    assert pressure.parse_psi(PSI.replace("{some}", some)) == level


@pytest.mark.parametrize(
    ("number", "level"),
    [(1, "normal"), (2, "warning"), (4, "critical"), (0, None), (3, None), (-1, None), (None, None)],
)
def test_the_kernels_levels(number, level):
    assert pressure.pressure_level(number) == level


def test_swapped_in_bytes_are_pages_times_their_size():
    assert pressure.parse_vm_stat(VM_STAT) == 8847092 * 16384
    assert pressure.parse_vm_stat(VM_STAT.replace("Swapins", "Other")) is None
    assert pressure.parse_vm_stat(VM_STAT.replace("page size", "other")) is None
    assert pressure.parse_vm_stat(VM_STAT.replace("8847092", "9" * 5000)) is None


# --- the monitor


def test_readings_are_rate_limited():
    clock, fast, slow = Clock(), Source(level="normal"), Source(thermal="nominal")
    monitor = Monitor(fast, slow, clock)
    for _ in range(100):
        assert monitor.read() == Reading(level="normal", thermal="nominal")
    assert (fast.calls, slow.calls) == (1, 1)
    clock.now += FAST_SECONDS * 0.99
    monitor.read()
    assert fast.calls == 1
    clock.now += FAST_SECONDS * 0.02
    monitor.read()
    assert (fast.calls, slow.calls) == (2, 1)
    clock.now += SLOW_SECONDS
    monitor.read()
    assert (fast.calls, slow.calls) == (3, 2)


def test_a_change_and_a_recovery_are_seen():
    clock, fast, slow = Clock(), Source(level="normal"), Source(low_power=False)
    monitor = Monitor(fast, slow, clock)
    levels = []
    for level in ("normal", "critical", "warning", "normal"):
        fast.fields["level"] = level
        levels.append(monitor.read().level)
        clock.now += FAST_SECONDS
    assert levels == ["normal", "critical", "warning", "normal"]
    slow.fields["low_power"] = True
    assert monitor.read().low_power is False  # not due yet
    clock.now += SLOW_SECONDS
    assert monitor.read().low_power is True


def test_swap_in_rate_is_bytes_a_second_between_looks():
    clock, fast = Clock(), Source(swapped_in=1000)
    monitor = Monitor(fast, Source(), clock)
    assert monitor.read().swap_in_rate is None  # one look gives no rate
    rates = []
    for swapped_in in (1000, 5000, 4000, 4500, None, 4500, 4500):
        clock.now += 2.0
        fast.fields["swapped_in"] = swapped_in
        rates.append(monitor.read().swap_in_rate)
    assert rates == [0.0, 2000.0, None, 250.0, None, None, 0.0]


def test_a_slow_swap_counter_keeps_its_rate_between_looks():
    clock, slow = Clock(), Source(swapped_in=0)
    monitor = Monitor(Source(), slow, clock)
    monitor.read()
    clock.now += SLOW_SECONDS
    slow.fields["swapped_in"] = 600
    assert monitor.read().swap_in_rate == 600 / SLOW_SECONDS
    clock.now += FAST_SECONDS
    assert monitor.read().swap_in_rate == 600 / SLOW_SECONDS


def test_a_source_that_fails_never_raises():
    def broken() -> dict:
        raise OSError("gone")

    assert Monitor(broken, broken, Clock()).read() == Reading()


def test_while_one_thread_refreshes_others_do_not_wait():
    clock, entered, release = Clock(), threading.Event(), threading.Event()
    fast = Source(level="normal")
    monitor = Monitor(fast, Source(), clock)
    monitor.read()
    clock.now += FAST_SECONDS

    def stuck() -> dict:
        entered.set()
        assert release.wait(30)
        return {"level": "critical"}

    monitor._fast = stuck
    refreshing = threading.Thread(target=monitor.read)
    refreshing.start()
    assert entered.wait(30)
    assert monitor.read().level == "normal"
    release.set()
    refreshing.join(30)
    assert monitor.read().level == "critical"


def test_the_first_reading_is_waited_for_by_all_and_taken_once():
    release, fast = threading.Event(), Source(level="warning")

    def slow() -> dict:
        assert release.wait(30)
        return {}

    monitor, seen = Monitor(fast, slow, Clock()), []
    threads = [threading.Thread(target=lambda: seen.append(monitor.read().level)) for _ in range(4)]
    for thread in threads:
        thread.start()
    release.set()
    for thread in threads:
        thread.join(30)
    assert seen == ["warning"] * 4
    assert fast.calls == 1


# --- fits


def test_fits():
    assert fits(Reading(free_bytes=100), 100) is True
    assert fits(Reading(free_bytes=100, level="normal"), 101) is False
    assert fits(Reading(), 1) is None
    assert fits(Reading(free_bytes=100, level="warning"), 1) is False
    assert fits(Reading(level="critical"), 1) is False


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_fits_refuses(bad):
    with pytest.raises(ValueError, match="working_set_bytes"):
        fits(Reading(free_bytes=1), bad)


# --- the machine at hand


def test_a_live_reading():
    reading = pressure.read()
    assert reading.level in ("normal", "warning", "critical", None)
    assert 0 < reading.free_bytes <= psutil.virtual_memory().total
    assert pressure.read() is reading or pressure.read().free_bytes > 0


@pytest.mark.skipif(
    not Path("/proc/pressure/memory").exists(), reason="needs Linux with pressure stall information"
)
def test_linux_tells_its_level_and_its_swapping():
    fields = pressure._read_fast()
    assert fields["level"] in ("normal", "warning", "critical")
    assert fields["swapped_in"] >= 0


def test_a_missing_source_leaves_the_rest(monkeypatch):
    def broken(*_: object) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(pressure, "_level", broken)
    monkeypatch.setattr(psutil, "sensors_battery", broken)
    monkeypatch.setattr(psutil, "swap_memory", broken)
    fields = pressure._read_fast()
    assert fields["level"] is fields["on_battery"] is None
    assert fields["free_bytes"] > 0


@pytest.mark.parametrize(("plugged", "on_battery"), [(True, False), (False, True), (None, None)])
def test_on_battery(monkeypatch, plugged, on_battery):
    class Battery:
        power_plugged = plugged

    monkeypatch.setattr(psutil, "sensors_battery", Battery)
    assert pressure._read_fast()["on_battery"] is on_battery


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs an Apple-silicon Mac")
def test_a_mac_tells_its_level():
    printed = subprocess.check_output(["sysctl", "-n", "kern.memorystatus_vm_pressure_level"], text=True)
    assert pressure._level() == pressure.pressure_level(int(printed))
    assert pressure._read_slow()["swapped_in"] >= 0
