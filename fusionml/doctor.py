"""`python -m fusionml doctor`: is it on, for which layers, and why not for the others."""

from __future__ import annotations

import os
import shlex
from dataclasses import asdict
from typing import Any

import mlx.nn as nn

from . import machine, patching, pressure
from .session import open_table
from .settings import variable

WEDGES = "MLX_METAL_FAST_SYNCH"


def examine(model: nn.Module | None, name: str | None) -> dict[str, Any]:
    """Everything that a bug report should carry, as plain data; call it while patched.

    `on` is False for a reason that the user can mend, which `off_because` gives; `next` is the one command
    to run next, as it stands.

    Args:
        model: a known model, None to look at the machine only.
        name: its folder or hub id, as the user gave it.
    """
    settings = patching.session().settings
    table = open_table(settings.table)
    if model is not None:
        patching.session().observe(model)
    state = patching.status()
    variables = _switched_off(state)
    reasons = [f"{each}={os.environ.get(each)} in the environment: unset it" for each in variables]
    hopeless = model is not None and not state["eligible"]
    reasons += ["no layer of this model may split"] if hopeless else []
    return {
        "on": not reasons,
        "off_because": reasons,
        "next": _next(variables, hopeless, len(table), name),
        "environment": machine.stamp(),
        "pressure": asdict(pressure.read()),
        "table": {
            "path": table.path,
            "entries": len(table),
            "newest": max((entry.when for entry in table.entries().values()), default=None),
            "ignored": table.ignored,
        },
        "model": name,
        "layers": None if model is None else _layers(),
        "warnings": _warnings(),
        "status": state,
    }


def _switched_off(state: dict[str, Any]) -> list[str]:
    """The variables of the environment that switch everything off."""
    settings = state["settings"]
    off = {"enabled": not settings["enabled"], "ratio": settings["ratio"] == 0}
    return [variable(setting) for setting in off if off[setting]]


def _next(variables: list[str], hopeless: bool, entries: int, name: str | None) -> str:
    command = "python -m fusionml"
    model = "" if name is None else f" --model {shlex.quote(name)}"
    if variables:
        return f"env {' '.join(f'-u {each}' for each in variables)} {command} doctor{model}"
    if hopeless:
        return f"{command} compare"  # on a model that does split
    return f"{command} {'compare' if entries else 'calibrate'}{model}"


def _layers() -> dict[str, Any]:
    """Each kind of layer: how many, their share of the model's linear arithmetic, and why they are stock."""
    layers = patching.session().known.layers()
    total = sum(layer.arithmetic for layer in layers if layer.live) or 1
    kinds: dict[str, Any] = {}
    for layer in layers:
        kind = kinds.setdefault(layer.kind, {"layers": 0, "eligible": 0, "share": 0.0, "stock": {}})
        kind["layers"] += 1
        if layer.live:
            kind["share"] += layer.arithmetic / total
        if layer.reason is None:
            kind["eligible"] += 1
        else:
            kind["stock"][layer.reason] = kind["stock"].get(layer.reason, 0) + 1
    return kinds


def _warnings() -> list[str]:
    found = []
    if os.environ.get(WEDGES) == "1":
        found.append(f"{WEDGES}=1 can hang the GPU until the next restart, users report: unset it")
    backend = machine.backend()
    if backend == "cuda":
        found.append("on CUDA the CPU cannot help: every layer stands down to stock")
    if backend == "cpu" and machine.cores() < 2:
        found.append("one CPU core: there is no second unit to share rows with")
    return found


def render(report: dict[str, Any]) -> str:
    """The report for people."""
    env, table = report["environment"], report["table"]
    lines = [
        f"FusionML {env['fusionml']} is {'on' if report['on'] else 'off'}",
        *(f"  because: {reason}" for reason in report["off_because"]),
        f"machine   {env['chip'] or 'unknown chip'}, {env['cores']} cores, {env['os_build']}",
        f"versions  Python {env['python']}, MLX {env['mlx']}, MLX-LM {env['mlx_lm']}",
        f"backend   {env['backend']}, default device {env['default_device']}",
        f"table     {table['path']}: {table['entries']} sites, newest {table['newest'] or 'none'}",
        f"now       {_conditions(report)}",
        *(f"variable  {name}={value}" for name, value in sorted(env["environment"].items())),
        *(f"warning   {text}" for text in report["warnings"]),
    ]
    if table["ignored"]:
        lines.append(f"          ignored: {table['ignored']}")
    for kind, layer in sorted((report["layers"] or {}).items()):
        lines.append(
            f"{kind:9} {layer['eligible']} of {layer['layers']} layers may split, "
            f"{layer['share']:.0%} of the linear arithmetic of prefill"
        )
        lines += [f"          stock: {count} {reason}" for reason, count in sorted(layer["stock"].items())]
    return "\n".join([*lines, f"next      {report['next']}"])


def _conditions(report: dict[str, Any]) -> str:
    now, env = report["pressure"], report["environment"]
    free = "unknown" if now["free_bytes"] is None else f"{now['free_bytes'] / 2**30:.1f} GiB"
    words = {
        "memory pressure": now["level"],
        "free memory": free,
        "thermal state": now["thermal"],
        "power": env["power_source"],
        "low-power mode": {None: None, True: "on", False: "off"}[now["low_power"]],
    }
    return ", ".join(f"{name} {value or 'unknown'}" for name, value in words.items())
