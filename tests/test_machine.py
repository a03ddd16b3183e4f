"""Machine identity and environment stamp.

No text below was recorded by us. Each is in the form that its comment names: Apple's published source of the
tool, its manual page, or outputs that users published; serial numbers and the like are left out.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionml import machine

PARSERS = [
    machine.parse_pmset_therm,
    machine.parse_thermal_level,
    machine.parse_pmset_settings,
    machine.parse_pmset_batt,
    machine.parse_gpu_cores,
]

# As documented by the source of pmset.c (show_thermal_warning_level, show_thermal_cpu_power_level); users
# report the first from Apple chips, also under load.
THERM_SILENT = """\
Note: No thermal warning level has been recorded
Note: No performance warning level has been recorded
Note: No CPU power status has been recorded
"""
THERM_LIMITED = """\
2020-06-26 12:30:37 +0200 CPU Power notify
\tCPU_Scheduler_Limit \t= 100
\tCPU_Available_CPUs \t= 8
\tCPU_Speed_Limit \t= 62
"""

# As published by users of macOS 15 and 26: `pmset -g`.
SETTINGS = """\
System-wide power settings:
Currently in use:
 standby              1
 Sleep On Power Button 1
 hibernatefile        /var/vm/sleepimage
 powernap             1
 sleep                1 (sleep prevented by caffeinate, runningboardd)
 hibernatemode        3
 {line}
 womp                 1
"""

# As published by users: `pmset -g batt`, the second form from a laptop, the third from a desktop.
BATT_MAINS = (
    "Now drawing from 'AC Power'\n -InternalBattery-0 (id=1)\t85%; charged; 0:00 remaining present: true\n"
)
BATT_BATTERY = (
    "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=1)\t19%; discharging; 1:02 remaining\n"
)
BATT_DESKTOP = "Now drawing from 'AC Power'\n"

# As published by users: `ioreg -r -d 1 -c AGXAccelerator` on an M4, shortened.
IOREG = """\
+-o AGXAcceleratorG16G  <class AGXAcceleratorG16G, id 0x10000039c, registered, matched, active, retain 59>
    {
      "IOMatchedAtBoot" = Yes
      "PerformanceStatistics" = {"Alloc system memory"=2181693440,"Device Utilization %"=30}
      "model" = "Apple M4"
      "gpu-core-count" = 10
    }
"""

# As published by users: `sysctl hw` on an M1 Pro, and on a chip of three kinds.
SYSCTL_TWO = """\
hw.nperflevels: 2
hw.perflevel0.physicalcpu: 8
hw.perflevel0.name: Performance
hw.perflevel1.physicalcpu: 2
hw.perflevel1.name: Efficiency
"""
SYSCTL_THREE = """\
hw.nperflevels: 3
hw.perflevel0.name: Performance
hw.perflevel0.physicalcpu: 4
hw.perflevel1.name: Performance
hw.perflevel1.physicalcpu: 4
hw.perflevel2.name: Efficiency
hw.perflevel2.physicalcpu: 2
"""


def fake_sysctl(text: str):
    """A `sysctl` that answers from a printed listing, in the raw form that the system call gives."""
    values = dict(line.split(": ") for line in text.splitlines())

    def read(name: str) -> bytes | None:
        value = values.get(name)
        if value is None:
            return None
        return int(value).to_bytes(4, "little") if value.isdigit() else value.encode() + b"\0"

    return read


# --- parsers


@given(st.text())
@pytest.mark.parametrize("parse", PARSERS)
def test_any_text_is_parsed_without_an_error(parse, text):
    parse(text)


@given(st.integers(0, 200), st.text(max_size=5))
@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", [THERM_LIMITED, SETTINGS, BATT_BATTERY, IOREG])
def test_a_damaged_text_is_parsed_without_an_error(parse, text, place, junk):
    parse(text[:place] + junk + text[place + 3 :])


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize("text", ["", "\0", "command not found", "{}", "9" * 5000])
def test_what_tells_nothing_is_unknown(parse, text):
    assert parse(text) is None


def test_thermal_from_pmset():
    assert machine.parse_pmset_therm(THERM_LIMITED) == "throttled"
    assert machine.parse_pmset_therm(THERM_LIMITED.replace("62", "100")) == "nominal"
    assert (
        machine.parse_pmset_therm("\tCPU_Scheduler_Limit \t= 40\n\tCPU_Speed_Limit \t= 100\n") == "throttled"
    )


def test_notes_that_nothing_was_recorded_are_not_taken_for_cool():
    assert machine.parse_pmset_therm(THERM_SILENT) is None


# As users document it: `notifyutil -g` prints the key and a number from 0 to 4.
@pytest.mark.parametrize(
    ("number", "level"), list(enumerate(["nominal", "moderate", "heavy", "trapping", "sleeping"]))
)
def test_thermal_level(number, level):
    assert machine.parse_thermal_level(f"com.apple.system.thermalpressurelevel {number}\n") == level


@pytest.mark.parametrize("text", ["com.apple.system.thermalpressurelevel 5", "com.apple.system.other 0", "0"])
def test_an_unknown_thermal_level_is_unknown(text):
    assert machine.parse_thermal_level(text) is None


@pytest.mark.parametrize(
    ("line", "on"),
    [
        ("lowpowermode         1", True),
        ("lowpowermode         0", False),
        ("powermode            0", False),
        ("powermode            1", True),
        ("powermode            2", False),  # high-power mode
        ("displaysleep         10", None),
        ("lowpowermode         x", None),
    ],
)
def test_low_power_mode(line, on):
    assert machine.parse_pmset_settings(SETTINGS.replace("{line}", line)) is on


def test_power_source():
    assert machine.parse_pmset_batt(BATT_MAINS) == "mains"
    assert machine.parse_pmset_batt(BATT_BATTERY) == "battery"
    assert machine.parse_pmset_batt(BATT_DESKTOP) == "mains"
    assert machine.parse_pmset_batt("Now drawing from 'UPS Power'\n") == "ups"


def test_gpu_cores():
    assert machine.parse_gpu_cores(IOREG) == 10
    assert machine.parse_gpu_cores(IOREG.replace("gpu-core-count", "other")) is None


def test_core_kinds():
    assert machine.core_kinds(fake_sysctl(SYSCTL_TWO)) == {"Performance": 8, "Efficiency": 2}
    assert machine.core_kinds(fake_sysctl(SYSCTL_THREE)) == {"Performance": 8, "Efficiency": 2}
    assert machine.core_kinds(fake_sysctl("hw.ncpu: 16")) is None  # Intel
    assert machine.core_kinds(fake_sysctl("hw.nperflevels: 2\nhw.perflevel0.physicalcpu: 8")) is None


@given(st.none() | st.binary(max_size=20))
def test_sysctl_values_are_decoded_without_an_error(raw):
    number, text = machine.decode_number(raw), machine.decode_text(raw)
    assert (number is None) == (raw is None or len(raw) not in (4, 8))
    assert text is None or "\0" not in text


def test_sysctl_values():
    assert machine.decode_number((8589934592).to_bytes(8, "little")) == 8589934592
    assert machine.decode_number(b"\xff\xff\xff\xff") == -1
    assert machine.decode_text(b"Apple M1\0\0") == "Apple M1"
    assert machine.decode_text(b"\0") is None


def test_steering_variables():
    environ = {
        "OMP_NUM_THREADS": "2",
        "VECLIB_MAXIMUM_THREADS": "1",
        "MLX_ENABLE_TF32": "0",
        "LD_PRELOAD": "/lib/libopenblas.so",
        "DYLD_INSERT_LIBRARIES": "/a.dylib",
        "OPENBLAS_CORETYPE": "Zen",
        "OMP_PROC_BIND": "true",
        "HF_TOKEN": "secret",
        "NUM_THREADS_": "1",
        "FUSIONML_RATIO": "0.3",
    }
    found = machine.steering_variables(environ)
    assert list(found) == sorted(list(environ)[:7])
    assert found["OMP_NUM_THREADS"] == "2"


# Two mappings of one library, one whose folder only looks like one, and the program itself.
MAPS = """\
7f00-7f10 r-xp 00000000 08:01 42    /usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0
7f10-7f20 r--p 00001000 08:01 42    /usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0
7f20-7f30 r-xp 00000000 08:01 43    /venv/numpy.libs/libscipy_openblas64_-32a4b2a6.so
7f30-7f40 r-xp 00000000 08:01 44    /usr/lib/openblas-pthread/libc.so.6
7f40-7f50 r-xp 00000000 08:01 45    /venv/mlx/lib/libblas-9f2d.so.3
7f50-7f60 rw-p 00000000 00:00 0     [heap]
"""


def test_math_libraries_of_a_process():
    assert machine.parse_math_libraries(MAPS) == [
        "libblas-9f2d.so.3",
        "libopenblas.so.0",
        "libscipy_openblas64_-32a4b2a6.so",
    ]
    assert machine.parse_math_libraries("") == []


def test_the_quality_of_service_of_a_thread(monkeypatch):
    class Library:
        def __init__(self, name: None) -> None:
            self.qos_class_self = lambda: 0x09

    monkeypatch.setattr(machine.ctypes, "CDLL", Library)
    monkeypatch.setattr(machine, "_mac", lambda: True)
    assert machine._qos() == "background"
    monkeypatch.setattr(machine, "_mac", lambda: False)
    assert machine._qos() is None


# --- the layer that asks the system


def test_a_command_that_fails_is_unknown():
    assert machine.command(sys.executable, "-c", "print('ä')") == "ä\n"
    assert machine.command(sys.executable, "-c", "print(1); exit(1)") is None
    assert machine.command("/no/such/program") is None
    assert machine.command("a\0b") is None
    assert machine.command(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.2) is None


def test_a_command_may_print_anything():
    print_bytes = "import sys; sys.stdout.buffer.write(bytes(range(256)))"
    assert len(machine.command(sys.executable, "-c", print_bytes)) == 256


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has sysctl")
def test_without_sysctl_all_is_unknown():
    assert machine.sysctl("hw.memsize") is None
    assert machine.thermal_state() is None
    assert machine.low_power_mode() is None


@pytest.mark.metal
@pytest.mark.skipif(sys.platform != "darwin", reason="needs an Apple-silicon Mac")
def test_a_mac_tells_its_parts():
    stamp = machine.stamp()
    assert stamp["memory_bytes"] == machine.decode_number(machine.sysctl("hw.memsize"))
    assert machine.sysctl("no.such.name") is None
    assert sum(stamp["cores_by_kind"].values()) == psutil.cpu_count(logical=False)
    assert stamp["gpu_cores"] > 0
    assert stamp["thermal"] in (*machine.THERMAL_LEVELS, "throttled")
    assert stamp["power_source"] in ("mains", "battery", "ups")


def test_attempt_turns_failure_into_unknown():
    assert machine.attempt(lambda: 1 // 0) is None
    assert machine.attempt(lambda: 3) == 3


# --- the machine at hand


def test_backend_follows_the_default_device():
    before = mx.default_device()
    try:
        mx.set_default_device(mx.cpu)
        assert machine.backend() == "cpu"
    finally:
        mx.set_default_device(before)
    on_gpu = before.type == mx.DeviceType.gpu
    assert machine.backend() == (("metal" if mx.metal.is_available() else "cuda") if on_gpu else "cpu")


@pytest.mark.parametrize(("metal", "expected"), [(True, "metal"), (False, "cuda")])
def test_backend_of_a_gpu(monkeypatch, metal, expected):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    assert machine.backend() == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs CPU affinity")
def test_cores_follow_the_affinity():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from fusionml.machine import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert machine.cores() == len(os.sched_getaffinity(0))


def test_math_fingerprint_is_a_rate_and_leaves_the_random_state_alone():
    mx.random.seed(7)
    expected = mx.random.uniform().item()
    mx.random.seed(7)
    rates = machine.math_fingerprint()
    assert mx.random.uniform().item() == expected
    assert set(rates) == {"float32", "bfloat16"}
    assert all(0.01 < rate < 1e5 for rate in rates.values())


def test_the_fingerprint_counts_the_work(monkeypatch):
    """At a clock that moves 1/4096 s a look, a sample is four products of 2 * 128^3 operations."""
    ticks = iter(range(1000))
    monkeypatch.setattr(machine.time, "perf_counter", lambda: next(ticks) / 4096)
    assert machine.math_fingerprint()["float32"] == 2 * 128**3 * 4 * 4096 / 1e9


def test_identity_is_stable_and_json():
    first = machine.identity()
    assert first == machine.identity()
    assert json.loads(json.dumps(first)) == first
    assert first["memory_bytes"] == psutil.virtual_memory().total
    assert first["chip"] == mx.device_info(mx.cpu)["device_name"]
    assert first["mlx"] == mx.__version__
    assert first["os_build"]


def test_identity_sees_the_default_device_and_the_variables(monkeypatch):
    before = machine.identity()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 1))
    after = machine.identity()
    assert after["environment"]["OPENBLAS_NUM_THREADS"] == "3"
    assert after["default_device"] == "Device(gpu, 1)" != before["default_device"]


def test_the_stamp_holds_what_the_protocol_asks_and_is_json():
    stamp = machine.stamp()
    asked = {"chip", "cores", "cores_by_kind", "gpu_cores", "memory_bytes", "os_build"}
    asked |= {"python", "mlx", "mlx_lm", "fusionml", "commit", "environment", "default_device", "backend"}
    asked |= {"power_source", "battery_percent", "low_power_mode", "thermal", "free_bytes"}
    asked |= {"swap_used_bytes", "load_average", "scheduling", "qos", "nice", "blas", "math_gflops"}
    assert asked <= set(stamp)
    assert json.loads(json.dumps(stamp, allow_nan=False)) == stamp
    assert 0 < stamp["free_bytes"] <= stamp["memory_bytes"]
    assert stamp["nice"] == psutil.Process().nice()
    assert stamp["python"] == ".".join(map(str, sys.version_info[:3]))


def test_a_source_that_fails_is_null_in_the_stamp(monkeypatch):
    def broken() -> None:
        raise RuntimeError("no such thing here")

    for name in ("sensors_battery", "swap_memory", "virtual_memory"):
        monkeypatch.setattr(psutil, name, broken)
    now = machine.conditions()
    assert now["free_bytes"] is now["swap_used_bytes"] is now["battery_percent"] is None


@pytest.mark.parametrize(("plugged", "source"), [(True, "mains"), (False, "battery")])
def test_power_from_the_battery(monkeypatch, plugged, source):
    class Battery:
        percent, power_plugged = 42.0, plugged

    monkeypatch.setattr(psutil, "sensors_battery", Battery)
    now = machine.conditions()
    assert (now["power_source"], now["battery_percent"]) == (source, 42.0)


def test_importing_machine_does_not_import_mlx_lm():
    code = "import sys, fusionml.machine; print([m for m in sys.modules if m.split('.')[0] == 'mlx_lm'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# --- the commit


def git(*arguments: str, where: Path) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *arguments], cwd=where, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    package = tmp_path / "fusionml"
    package.mkdir()
    (package / "file.py").write_text("1")
    git("init", "-q", where=tmp_path)
    git("add", ".", where=tmp_path)
    git("commit", "-qm", "one", where=tmp_path)
    git("tag", "-a", "v1", "-m", "v1", where=tmp_path)
    return package


def test_commit_of_a_checkout(checkout):
    commit = git("rev-parse", "HEAD", where=checkout)
    assert machine.git_commit(checkout) == commit
    (checkout / "file.py").write_text("2")
    assert machine.git_commit(checkout) == f"{commit}-dirty"


def test_no_commit_of_somebody_elses_repository(checkout, tmp_path):
    installed = tmp_path / ".venv" / "site-packages" / "fusionml"
    installed.mkdir(parents=True)
    assert machine.git_commit(installed) is None


def test_no_commit_without_a_repository(tmp_path):
    assert machine.git_commit(tmp_path / "missing") is None


# --- why not

CALM = {
    "free_bytes": 8_000_000_000,
    "power_source": "mains",
    "battery_percent": 90.0,
    "low_power_mode": False,
}


def test_a_calm_machine_may_measure():
    assert machine.why_not_measurable(8_000_000_000, CALM) == []
    assert machine.why_not_measurable(None, CALM) == []


def test_what_is_unknown_refuses_nothing():
    assert machine.why_not_measurable(10**15, dict.fromkeys(CALM)) == []


def test_every_reason_with_its_figures():
    now = CALM | {"power_source": "battery", "low_power_mode": True}
    assert machine.why_not_measurable(15_600_000_000, now) == [
        "it needs 15.6 GB of memory and 8.0 GB is free",
        "on battery (90 %)",
        "low-power mode is on",
    ]
    assert machine.why_not_measurable(None, now | {"battery_percent": None, "low_power_mode": None}) == [
        "on battery"
    ]


def test_the_machine_at_hand_is_asked_by_default():
    (reason,) = (r for r in machine.why_not_measurable(10**15) if "memory" in r)
    assert re.fullmatch(r"it needs 1000000\.0 GB of memory and [0-9.]+ GB is free", reason)


@pytest.mark.parametrize("bad", [-1, float("nan")])
def test_why_not_refuses(bad):
    with pytest.raises(ValueError, match="needed_bytes"):
        machine.why_not_measurable(bad, CALM)
