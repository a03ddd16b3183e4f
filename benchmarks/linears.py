"""`python -m benchmarks.linears --model PATH`: the linear part of a model's prompt phase alone.

Every live linear layer of the model, in the order of the model, on evaluated inputs of one number of rows:
all stock, then all split, in A-B-B-A order after a warm-up of each, with stock against itself beside it. It
is the share of a prompt that the split can touch at all; attention, norms and the rest are not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from tqdm import tqdm

from benchmarks.output import show
from fusionml import loading, machine, patched, status
from fusionml.measure import Ratio, order, paired_ratio, unstable
from fusionml.patching import session

ARMS = ("stock", "split", "stock again")
# Off: what is compared is the split itself, not what the gate would make of it.
SETTINGS: dict[str, dict[str, Any]] = {
    "stock": {"enabled": False},
    "split": {"gate": "off"},
    "stock again": {"enabled": False},
}

Samples = dict[str, list[float]]


def live_layers(model: nn.Module) -> list[nn.Linear]:
    """The linear layers of a known model that its prompt phase reads, each once, in the model's order."""
    live = {id(layer.ref()) for layer in session().known.layers() if layer.live}
    return [m for _, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in live]


def inputs(layers: Sequence[nn.Linear], rows: int) -> list[mx.array]:
    """An evaluated input `[1, rows, K]` for each layer, of its weight's type; equal ones are one array."""
    made: dict[tuple[int, mx.Dtype], mx.array] = {}
    for layer in layers:
        key = (layer.weight.shape[1], layer.weight.dtype)
        if key not in made:
            made[key] = mx.random.normal((1, rows, key[0]), key=mx.random.key(key[0])).astype(key[1])
    mx.eval(made)
    return [made[layer.weight.shape[1], layer.weight.dtype] for layer in layers]


def seconds(layers: Sequence[nn.Linear], given: Sequence[mx.array]) -> float:
    """Seconds of all layers, one after the other, each evaluated."""
    start = time.perf_counter()
    for layer, x in zip(layers, given, strict=True):
        mx.eval(layer(x))
    return time.perf_counter() - start


def sample(layers: Sequence[nn.Linear], rows: int, runs: int) -> tuple[Samples, dict[str, Any]]:
    """Seconds of each arm, `runs` samples in turns after a warm-up, and the status of the split arm."""
    given = inputs(layers, rows)
    samples: Samples = {arm: [] for arm in ARMS}
    warm_up = list(ARMS[:2])
    for count, arm in enumerate(tqdm([*warm_up, *order(ARMS, runs)], desc="linears", disable=None)):
        with patched(**SETTINGS[arm]):
            taken = seconds(layers, given)
            if arm == "split":
                state = status()
        if count >= len(warm_up):
            samples[arm].append(taken)
    return samples, state


def summarise(samples: Samples) -> dict[str, Any]:
    """Both ratios, with intervals, and what speaks against the samples."""
    stock = samples["stock"]
    return {
        "ratio": asdict(paired_ratio(stock, samples["split"])),
        "aa": asdict(paired_ratio(stock, samples["stock again"])),
        "warnings": {arm: unstable(times) for arm, times in samples.items() if len(times) > 1},
    }


def render(result: dict[str, Any]) -> str:
    """The result for people."""
    ratio, aa = Ratio(**result["ratio"]), Ratio(**result["aa"])
    what = f"{result['layers']} live linear layers, {result['rows']} rows, {ratio.pairs} pairs"
    lines = [
        f"{result['model']}: {what}",
        f"  split          {ratio}, pairs {ratio.smallest:.2f} to {ratio.largest:.2f}",
        f"  stock to itself {aa}, pairs {aa.smallest:.2f} to {aa.largest:.2f}",
    ]
    for key, site in sorted(result["status"]["sites"].items()):
        lines.append(f"  {key}: {site['arm']}, CPU share {site['ratio']:.2f} ({site['why']})")
    warnings = result["warnings"].items()
    return "\n".join([*lines, *(f"  warning, {arm}: {text}" for arm, texts in warnings for text in texts)])


def measure(path: str, rows: int, runs: int) -> dict[str, Any]:
    """Load a model and measure it; plain data, with every sample and the environment.

    Raises:
        UsageError: the model cannot be loaded, or nothing of it may split.
    """
    with patched(enabled=True):
        model, _, _, name = loading.load(path)
    layers, environment = live_layers(model), machine.stamp()
    coverage = session().coverage()
    if not coverage["eligible"]:
        raise loading.UsageError(f"--model {path}: nothing of it may split: {coverage['skipped']}")
    samples, state = sample(layers, rows, runs)
    head = {"model": name, "rows": rows, "layers": len(layers)}
    return {**head, **summarise(samples), "samples": samples, "status": state, "environment": environment}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and write the samples where asked."""
    parser = argparse.ArgumentParser("benchmarks.linears", description="The linear part of a prompt alone.")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument(
        "--rows", type=int, default=511, help="rows of each call (default: 511, a prompt of 512)"
    )
    parser.add_argument("--runs", type=int, default=10, help="runs of each arm (default: 10)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every sample and the environment here"
    )
    args = parser.parse_args(argv)
    for option, least in (("rows", 2), ("runs", 1)):
        if getattr(args, option) < least:
            parser.error(f"--{option} {getattr(args, option)} is less than {least}")
    try:
        result = measure(args.model, args.rows, args.runs)
    except loading.UsageError as error:
        parser.error(str(error))
    show(result, render(result), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
