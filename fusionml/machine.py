"""Which machine this is and in which state: the ratio table's key and the environment stamp (Section 5.1).

What cannot be read is None, never a guess. The readings that only macOS gives (`sysctl`, `pmset`, `ioreg`,
`notifyutil`) were not run on a Mac by us: each is one call below and one parser, tested on recorded text.
"""

import ctypes
import functools
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx
import psutil

from .split import dtype_name

T = TypeVar("T")

# OSThermalPressureLevel, in the system's own words.
THERMAL_LEVELS = ("nominal", "moderate", "heavy", "trapping", "sleeping")
_STEERING = {"LD_PRELOAD", "DYLD_INSERT_LIBRARIES"}
# Not KMP_: libraries set such variables themselves when they are imported.
_STEERING_PREFIXES = ("MLX_", "VECLIB_", "OPENBLAS_", "GOTO_", "MKL_", "OMP_", "BLIS_")
# macOS <sys/qos.h>: threads below `default` may be kept on efficiency cores.
QOS_CLASSES = {
    0x21: "user-interactive",
    0x19: "user-initiated",
    0x15: "default",
    0x11: "utility",
    0x09: "background",
    0x00: "unspecified",
}


# --- what MLX sees


def backend() -> Literal["metal", "cuda", "cpu"]:
    """What the default device is at this moment; never remembered, since anyone may change it."""
    if mx.default_device() != mx.gpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def cores() -> int:
    """Logical CPU cores that this process may use: its affinity counts, where the system has one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1


def math_fingerprint() -> dict[str, float]:
    """GFLOP/s of MLX's CPU matmul in float32 and bfloat16, in less than 50 ms.

    It tells math libraries apart, a factor of ten between reference BLAS and OpenBLAS. It is no benchmark,
    and not meant to tell how many threads one uses: the variables in `identity()` do. Products of
    128 x 128 x 128 on the default CPU stream.
    """
    return {dtype_name(dtype): _gflops(dtype) for dtype in (mx.float32, mx.bfloat16)}


def _gflops(dtype: mx.Dtype, size: int = 128) -> float:
    """The best of five samples of about 1 ms: another program's work only ever slows one down.

    One product of a fast library is shorter than its dispatch, so a sample may be many.
    """
    with mx.stream(mx.cpu):
        x = mx.ones((size, size), dtype)  # not random: that would move the user's random state
        mx.eval(x @ x)
        products = max(1, min(64, int(0.001 / _seconds(x, 1))))
        seconds = min(_seconds(x, products) for _ in range(5))
    return 2 * size**3 * products / seconds / 1e9


def _seconds(x: mx.array, products: int) -> float:
    start = time.perf_counter()
    mx.eval([x @ x for _ in range(products)])
    return time.perf_counter() - start


class OtherLoad:
    """How busy other programs kept the CPU since this was made."""

    def __init__(self) -> None:
        self._start = self._now()

    def share(self) -> float:
        """Their share of all cores' time, 0 to 1; 0 where the system does not tell."""
        busy, own, wall = (b - a for a, b in zip(self._start, self._now(), strict=True))
        return min(1.0, max(0.0, busy - own) / (wall * (psutil.cpu_count() or 1))) if wall > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        times, own = psutil.cpu_times(), os.times()
        # `user` counts what guests of this machine use, and nothing else is counted twice.
        busy = times.user + times.system + getattr(times, "nice", 0.0)
        # Children count from the moment that they have ended and been waited for.
        ours = own.user + own.system + own.children_user + own.children_system
        return busy, ours, time.perf_counter()


# --- what keys the table, what is stamped on a result


def identity() -> dict[str, Any]:
    """What a measured ratio depends on: hardware, system, MLX, device and the math library's variables."""
    return {
        **_hardware(),
        "cores": cores(),
        "mlx": _version("mlx"),
        "default_device": str(mx.default_device()),
        "environment": steering_variables(os.environ),
    }


def stamp() -> dict[str, Any]:
    """Everything that a result carries: `identity()`, versions, the process, `conditions()`. JSON-able."""
    from . import __version__

    return {
        **identity(),
        "cores_by_kind": core_kinds(sysctl),
        "backend": backend(),
        "python": platform.python_version(),
        "mlx_lm": _version("mlx-lm"),
        "fusionml": __version__,
        "commit": git_commit(Path(__file__).parent),
        "blas": attempt(_math_libraries),
        "math_gflops": attempt(math_fingerprint),
        "scheduling": attempt(_scheduling),
        "qos": attempt(_qos),
        "nice": attempt(lambda: os.getpriority(os.PRIO_PROCESS, 0)),
        **conditions(),
    }


def conditions() -> dict[str, Any]:
    """The part of the stamp that changes while a run goes on; take it at the start and at the end.

    `power_source` is mains, battery or ups; bytes are bytes; `load_average` is over 1, 5 and 15 minutes.
    """
    battery = attempt(psutil.sensors_battery)
    return {
        "power_source": _power_source(battery),
        "battery_percent": battery.percent if battery else None,
        "low_power_mode": low_power_mode(),
        "thermal": thermal_state(),
        "free_bytes": attempt(lambda: psutil.virtual_memory().available),
        "swap_used_bytes": attempt(lambda: psutil.swap_memory().used),
        "load_average": attempt(lambda: list(os.getloadavg())),
    }


def why_not_measurable(needed_bytes: int | None, now: Mapping[str, Any] | None = None) -> list[str]:
    """Reasons to refuse a measurement, a phrase each; empty when it may run. What is unknown refuses nothing.

    `needed_bytes` is what the run will allocate beyond what is resident, None if unknown; `now` is
    `conditions()`, read here if not given.
    """
    if needed_bytes is not None and not needed_bytes >= 0:
        raise ValueError(f"needed_bytes must be at least 0 or None, not {needed_bytes!r}")
    now = conditions() if now is None else now
    free, reasons = now["free_bytes"], []
    if needed_bytes is not None and free is not None and needed_bytes > free:
        reasons.append(f"it needs {needed_bytes / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB is free")
    if now["power_source"] == "battery":
        charge = now["battery_percent"]
        reasons.append("on battery" if charge is None else f"on battery ({charge:.0f} %)")
    if now["low_power_mode"]:
        reasons.append("low-power mode is on")
    return reasons


@functools.cache
def _hardware() -> dict[str, Any]:
    """What cannot change under a running process, read once: `ioreg` takes a while."""
    registry = command("/usr/sbin/ioreg", "-r", "-d", "1", "-c", "AGXAccelerator") if _mac() else None
    return {
        "chip": _device_name(mx.cpu),
        "gpu": _device_name(mx.gpu),
        "gpu_cores": parse_gpu_cores(registry or ""),
        "memory_bytes": attempt(lambda: psutil.virtual_memory().total),
        "os_build": attempt(_os_build),
    }


def _device_name(kind: mx.DeviceType) -> str | None:
    name = attempt(lambda: mx.device_info(mx.Device(kind, 0)).get("device_name"))
    return str(name) if name else None


def _os_build() -> str:
    if _mac():
        return (
            f"macOS {decode_text(sysctl('kern.osproductversion'))} ({decode_text(sysctl('kern.osversion'))})"
        )
    name = attempt(lambda: platform.freedesktop_os_release()["PRETTY_NAME"]) or platform.system()
    return f"{name}, {platform.system()} {platform.release()}"


@functools.cache
def _version(distribution: str) -> str | None:
    """From the metadata: importing MLX-LM only to ask would take a second."""
    return attempt(lambda: metadata.version(distribution))


def _scheduling() -> str | None:
    """The policy's name on Linux; on macOS whether the process is in the background, on efficiency cores."""
    if sys.platform == "linux":
        names = ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
        return {getattr(os, name): name for name in names}.get(os.sched_getscheduler(0))
    if _mac():
        darwin_process = 4  # PRIO_DARWIN_PROCESS, which Python names from 3.12 on
        return {0: "normal", 1: "background"}.get(os.getpriority(darwin_process, 0))
    return None


def _qos() -> str | None:
    """The quality-of-service class that macOS gives to the calling thread."""
    return QOS_CLASSES.get(ctypes.CDLL(None).qos_class_self()) if _mac() else None


def _math_libraries() -> list[str] | None:
    """The names of the math libraries in this process; None where the system does not list them."""
    maps = Path("/proc/self/maps")
    return parse_math_libraries(maps.read_text()) if maps.exists() else None


def _power_source(battery: Any) -> str | None:
    if battery is not None and battery.power_plugged is not None:
        return "mains" if battery.power_plugged else "battery"
    # A desktop Mac has no battery to ask; pmset knows its source all the same.
    return parse_pmset_batt(command("/usr/bin/pmset", "-g", "batt") or "") if _mac() else None


def low_power_mode() -> bool | None:
    """Whether macOS saves power; None elsewhere. Starts a process: some milliseconds."""
    return parse_pmset_settings(command("/usr/bin/pmset", "-g") or "") if _mac() else None


def thermal_state() -> str | None:
    """One of THERMAL_LEVELS, `throttled`, or None. macOS only; starts one or two processes.

    `notifyutil` reads the level that the kernel publishes. `pmset -g therm` says nothing on most Apple chips
    and is asked only where the level cannot be had.
    """
    if not _mac():
        return None
    level = command("/usr/bin/notifyutil", "-g", "com.apple.system.thermalpressurelevel")
    return parse_thermal_level(level or "") or parse_pmset_therm(
        command("/usr/bin/pmset", "-g", "therm") or ""
    )


# --- parsers of what the system says: any text in, None for what it does not tell


def steering_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that change what the math library or MLX does, sorted by name."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in _STEERING or name.endswith("_NUM_THREADS") or name.startswith(_STEERING_PREFIXES)
    }


def parse_math_libraries(maps: str) -> list[str]:
    """Names of the libraries with a BLAS in `/proc/self/maps`, sorted, each once."""
    found = re.findall(r"/([^/\n]*(?:blas|mkl_|blis)[^/\n]*\.so[^/\n ]*)$", maps, re.MULTILINE)
    return sorted(set(found))


def parse_pmset_therm(text: str) -> str | None:
    """`nominal` or `throttled` from `pmset -g therm`; its notes that nothing was recorded tell nothing."""
    limits = [int(n) for n in re.findall(r"CPU_(?:Speed|Scheduler)_Limit[ \t]*=[ \t]*([0-9]{1,3})\b", text)]
    if not limits:
        return None
    return "nominal" if min(limits) >= 100 else "throttled"


def parse_thermal_level(text: str) -> str | None:
    """From `notifyutil -g com.apple.system.thermalpressurelevel`: the name, then a number."""
    found = re.fullmatch(r"\s*com\.apple\.system\.thermalpressurelevel\s+([0-4])\s*", text)
    return THERMAL_LEVELS[int(found[1])] if found else None


def parse_pmset_settings(text: str) -> bool | None:
    """Low-power mode from `pmset -g`: `lowpowermode 1`, on newer systems `powermode 1` (2: high power)."""
    found = re.search(r"^\s*(?:low)?powermode[ \t]+([0-2])\b", text, re.MULTILINE)
    return found[1] == "1" if found else None


def parse_pmset_batt(text: str) -> str | None:
    """`mains`, `battery` or `ups` from `pmset -g batt`."""
    found = re.search(r"drawing from '(AC|Battery|UPS) Power'", text)
    return {"AC": "mains", "Battery": "battery", "UPS": "ups"}[found[1]] if found else None


def parse_gpu_cores(text: str) -> int | None:
    """From `ioreg`'s entry of the GPU; one GPU, so the first count."""
    found = re.search(r'"gpu-core-count"\s*=\s*([0-9]{1,6})\b', text)
    return int(found[1]) if found else None


def core_kinds(read: Callable[[str], bytes | None]) -> dict[str, int] | None:
    """Physical cores by the system's own name of their kind, fastest first, e.g. Performance and Efficiency.

    `read` is `sysctl`. Kinds of one name are added up; None where the system tells no kinds.
    """
    kinds: dict[str, int] = {}
    for level in range(decode_number(read("hw.nperflevels")) or 0):
        name = decode_text(read(f"hw.perflevel{level}.name")) or f"perflevel{level}"
        count = decode_number(read(f"hw.perflevel{level}.physicalcpu"))
        if count is None:
            return None
        kinds[name] = kinds.get(name, 0) + count
    return kinds or None


def decode_number(raw: bytes | None) -> int | None:
    """A 4- or 8-byte integer of `sysctl`."""
    return int.from_bytes(raw, "little", signed=True) if raw is not None and len(raw) in (4, 8) else None


def decode_text(raw: bytes | None) -> str | None:
    """A zero-terminated text of `sysctl`."""
    return (raw.split(b"\0")[0].decode("utf-8", "replace") or None) if raw is not None else None


def git_commit(package: Path) -> str | None:
    """The commit of the checkout that `package` lies at the top of, `-dirty` with uncommitted changes.

    A virtual environment inside somebody's own repository is not a checkout of ours: None.
    """
    top = command("git", "-C", str(package), "rev-parse", "--show-toplevel")
    if top is None or Path(top.strip()) != package.resolve().parent:
        return None
    found = command(
        "git", "-C", str(package), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"
    )
    return found.strip() if found else None


# --- the one layer that asks the system


def attempt(read: Callable[[], T]) -> T | None:
    """What `read` returns, or None if it fails in any way: a reading must never stop a run."""
    try:
        return read()
    except Exception:
        return None


def command(*arguments: str, timeout: float = 5.0) -> str | None:
    """The standard output of a command; None if it is missing, fails or takes over `timeout` seconds.

    Inherited descriptors stay open so that macOS spawns instead of forking a process full of weights.
    """
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout,
            check=True,
            close_fds=False,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace")


def sysctl(name: str) -> bytes | None:
    """The raw value of a macOS `sysctl`, in this process; None elsewhere and for a name it does not know."""
    if not _mac():
        return None
    read = ctypes.CDLL(None).sysctlbyname
    read.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_void_p,
        ctypes.c_size_t,
    ]
    size = ctypes.c_size_t(0)
    if read(name.encode(), None, size, None, 0) != 0:
        return None
    value = ctypes.create_string_buffer(size.value)
    return value.raw[: size.value] if read(name.encode(), value, size, None, 0) == 0 else None


def _mac() -> bool:
    return sys.platform == "darwin"
