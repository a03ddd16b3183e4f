"""Made-up results in the form that the experiments write, for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusionml import machine
from fusionml.measure import paired_ratio

Json = dict[str, Any]

STAMP: Json = machine.stamp() | {
    "chip": "Made-up Chip",
    "gpu": None,
    "gpu_cores": None,
    "cores": 2,
    "cores_by_kind": None,
    "memory_bytes": 24 * 2**30,
    "os_build": "Some System 1.0",
    "python": "3.11.7",
    "mlx": "0.32.4",
    "mlx_lm": "0.32.2",
    "fusionml": "0.1.0",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "backend": "cpu",
    "default_device": "Device(cpu, 0)",
    "environment": {},
    "scheduling": "SCHED_OTHER",
    "qos": None,
    "nice": 0,
    "power_source": None,
    "battery_percent": None,
    "low_power_mode": None,
    "thermal": None,
    "free_bytes": 20 * 2**30,
    "swap_used_bytes": 0,
    "load_average": [0.5, 0.4, 0.3],
}
APPLE: Json = STAMP | {
    "chip": "Apple M4",
    "gpu": "Apple M4",
    "gpu_cores": 10,
    "cores": 10,
    "backend": "metal",
    "power_source": "mains",
    "thermal": "nominal",
}
CONDITIONS = (
    *("power_source", "battery_percent", "low_power_mode", "thermal"),
    *("free_bytes", "swap_used_bytes", "load_average"),
)


def arm(seconds: float, samples: int = 6, warnings: Sequence[str] = ()) -> Json:
    taken = [seconds * (1 + 0.01 * (place % 3)) for place in range(samples)]
    return {"samples": taken, "median": seconds * 1.01, "warnings": list(warnings), "peak_bytes": 1000}


def cell(
    name: str, parameters: Json, seconds: dict[str, float], figures: Json | None = None, **more: Any
) -> Json:
    """A finished cell; the first of `seconds` is the baseline, which is timed again."""
    baseline = next(iter(seconds))
    arms = {
        **{key: arm(value) for key, value in seconds.items()},
        f"{baseline} again": arm(seconds[baseline]),
    }
    times = {key: found["samples"] for key, found in arms.items()}
    ratios = {
        key: vars(paired_ratio(times[baseline], taken, resamples=200))
        for key, taken in times.items()
        if key != baseline
    }
    conditions = {key: STAMP[key] for key in CONDITIONS}
    return {
        "name": name,
        "parameters": parameters,
        "status": "done",
        "error": None,
        "seconds": 1.5,
        "environment": {"start": conditions, "end": conditions, "others": 0.01},
        "baseline": baseline,
        "arms": arms,
        "aa": ratios.pop(f"{baseline} again"),
        "ratios": ratios,
        "errors": dict.fromkeys(ratios, 0.0012),
        "figures": figures or {},
    } | more


def failed(name: str, error: str, parameters: Json | None = None) -> Json:
    conditions = {key: STAMP[key] for key in CONDITIONS}
    return {
        "name": name,
        "parameters": parameters or {},
        "status": "failed",
        "error": error,
        "seconds": 0.1,
        "environment": {"start": conditions, "end": conditions, "others": 0.01},
    }


def run(experiment: str, cells: Sequence[Json], stamp: Json = STAMP, **more: Any) -> Json:
    """A run that came to its end with all that it planned."""
    return {
        "version": 1,
        "experiment": experiment,
        "title": f"The title of {experiment}",
        "paper": "Section 5",
        "when": "2026-11-30T10:00:00+00:00",
        "command": f"python -m benchmarks {experiment}",
        "options": {"quick": False, "scale": 8, "force": False, "samples": 6, "warm_ups": 1, "extra": {}},
        "forced": [],
        "environment": {"start": stamp, "end": stamp},
        "planned": [found["name"] for found in cells],
        "cells": list(cells),
        "warnings": [],
    } | more


def write(folder: Path, *runs: Json, slug: str = "made-up-chip-2-cores-cpu") -> list[Path]:
    """The runs as files, named as the runner names them."""
    files = []
    for found in runs:
        stem, number = f"{found['experiment']}-{found['when'][:10]}", 1
        (folder / slug).mkdir(parents=True, exist_ok=True)
        file = folder / slug / f"{stem}.json"
        while file.exists():
            number += 1
            file = folder / slug / f"{stem}-{number}.json"
        file.write_text(json.dumps(found))
        files.append(file)
    return files


# --- one of each


PAIR = {
    "rows": 512,
    "cpu_us": 20.0,
    "current_us": 20.0,
    "contention": 1.1,
    "fixed_us": 90.0,
    "predicted_ratio": 0.5,
    "predicted_speedup": 1.84,
}


def mechanism() -> list[Json]:
    seconds = {
        "stock": 0.0202,
        "cpu alone": 0.030,
        "ready": 0.0146,
        "lazy": 0.031,
        "eager": 0.0152,
        "async": 0.0153,
    }
    units = [
        {"arm": "eager", "unit": unit, "start": 0.0005, "end": end}
        for unit, end in (("CPU", 0.0131), ("current", 0.0152))
    ]
    figures = {
        "overlap": 1.91,
        "pair_model": PAIR,
        "rates": {"cpu_us_per_row": 12.0, "current_us_per_row": 13.2},
    }
    return [cell("float32", {"rows": 2048, "dtype": "float32"}, seconds, figures, trace=units)]


def block() -> list[Json]:
    return [
        cell(
            f"{geometry}, {rows} rows",
            {"geometry": geometry, "rows": rows, "dtype": "float32"},
            {"stock": rows * 1e-4, "fixed 0.30": rows * 0.75e-4, "calibrated": rows * 0.57e-4 + 1e-3},
            {"predicted": PAIR},
        )
        for geometry in ("llama-3-8b", "gpt2-xl", "qwen2.5-7b")
        for rows in (128, 256, 512, 1024)
    ]


def depth() -> list[Json]:
    return [
        cell(
            f"{blocks} blocks, {rows} rows",
            {"geometry": "llama-3-8b", "blocks": blocks, "rows": rows},
            {"stock": blocks * rows * 1e-4, "split": blocks * rows * 0.8e-4},
        )
        for blocks in (1, 8)
        for rows in (256, 512, 1024)
    ]


def ttft() -> list[Json]:
    return [
        cell(
            f"{tokens} tokens",
            {"model": "demo-1", "prompt_tokens": tokens},
            {"stock": tokens * 1e-3, "fixed 0.30": tokens * 0.8e-3, "calibrated": tokens * 0.6e-3},
            {"decode": {"stock": 7.1, "calibrated": 7.2}, "identical": True, "note": None},
        )
        for tokens in (256, 512, 1024)
    ]


def gate() -> list[Json]:
    trace = [
        {"call": call, "arm": "split" if call % 10 else "stock", "seconds": 0.01 + 0.005 * (call % 10 == 0)}
        for call in range(1, 41)
    ]
    return [
        cell(
            "periodic",
            {"policy": "periodic", "rows": 512},
            {"stock": 0.015, "gated": 0.0104},
            {"probes": 4},
            trace=trace,
        )
    ]


def sustained() -> list[Json]:
    trace = [{"minutes": n / 4, "speedup": 1.79 - 0.03 * n} for n in range(1, 13)]
    figures = {"phase": "both", "burst": {"speedup": 1.79}, "sustained": {"speedup": 1.43}}
    return [cell("matmul", {"minutes": 3}, {"stock": 0.02, "split": 0.0125}, figures, trace=trace)]


def decode() -> list[Json]:
    return [
        cell(f"{rows} rows", {"rows": rows}, {"stock": 1e-3 + rows * 1e-5, "split": 2e-3 + rows * 5e-6})
        for rows in (1, 2, 4, 8, 16, 32, 64)
    ]


def training() -> list[Json]:
    return [
        cell("float32", {"dtype": "float32", "mixed": False}, {"stock": 0.1, "split": 0.11}),
        cell("mixed precision", {"dtype": "float16", "mixed": True}, {"stock": 0.1, "mixed": 0.08}),
    ]


def pressure() -> list[Json]:
    return [
        cell(
            "probe",
            {"cap_bytes": 2**30},
            {"fresh": 0.1, "probe": 0.14},
            {"probe_too_slow": 1.4, "reload": 1.7},
        )
    ]


def simple(name: str) -> list[Json]:
    return [cell(name, {"rows": 256}, {"stock": 0.1, "split": 0.09}, {"some_seconds": 0.25, "count": 3})]


def each() -> dict[str, list[Json]]:
    """Cells of every experiment that has a place of its own on the page, and one that has none."""
    made = {
        made.__name__: made()
        for made in (mechanism, block, depth, ttft, gate, decode, training, sustained, pressure)
    }
    others = (
        "overhead",
        "serve",
        "linears",
        "calibration",
        "quantized",
        "experts",
        "ane",
        "threeway",
        "cholesky",
    )
    return made | {name: simple(name) for name in (*others, "unheardof")}
