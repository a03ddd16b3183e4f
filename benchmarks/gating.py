"""The no-regression gate on a real model: `python -m benchmarks.gating --model PATH`.

After the prompts it learns from, three questions: does it cost anything (gate on against gate off), does it
hold while another process keeps one core busy (against stock), and is the gain back after that process has
ended. Its own cost in microseconds a call is measured apart, on the plan alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm import load

from benchmarks.output import show
from fusionml import forwards, machine
from fusionml.compare import generate_once, prompt_ids
from fusionml.measure import order, paired_ratio
from fusionml.patching import patched, session

ON: dict[str, Any] = {"gate": "auto", "enabled": True}
OFF: dict[str, Any] = {"gate": "off", "enabled": True}
STOCK: dict[str, Any] = {"enabled": False}
LEARNING_PROMPTS = 2


class Prompts:
    """Times prompts of one length, each of them new."""

    def __init__(self, path: str, length: int) -> None:
        with patched(**ON):
            self.model, self.tokenizer = load(path)
        self._length, self._seed = length, 0

    def ttft(self, settings: dict[str, Any], seed: int | None = None) -> float:
        """Seconds to the first token under `settings`."""
        self._seed += 1
        ids = prompt_ids(self.tokenizer, self._length, seed or self._seed, None)
        with patched(**settings):
            return generate_once(self.model, "", ids, 2).ttft

    def against(self, one: dict[str, Any], other: dict[str, Any], pairs: int) -> dict[str, Any]:
        """How many times faster `other` is than `one`, in A-B-B-A order, every sample, and A/A of `one`."""
        samples: dict[str, list[float]] = {"one": [], "other": []}
        for arm in order(("one", "other"), pairs):
            samples[arm].append(self.ttft(one if arm == "one" else other))
        half = pairs // 2
        again = paired_ratio(samples["one"][:half], samples["one"][half : 2 * half]) if half else None
        ratio = paired_ratio(samples["one"], samples["other"])
        return {"ratio": asdict(ratio), "aa": again and asdict(again), "samples": samples}


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that keeps one core busy."""
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        yield
    finally:
        other.kill()
        other.wait()


def own_cost(calls: int = 5000, rounds: int = 7) -> dict[str, float]:
    """Microseconds that one call spends on asking its site, gate on and off: no arithmetic in it."""
    layer = nn.Linear(128, 128, bias=False)
    layer.eval()
    model = nn.Sequential(layer)
    model.eval()
    x = mx.zeros((1, 512, 128))
    mx.eval(x, model.parameters())
    found = {}
    for name, settings in (("on", ON), ("off", OFF)):
        with patched(**settings, ratio=0.5):
            session().known.add(model, from_loader=False)
            known = session().known.find(layer)
            control = session().control(known, x.dtype, 512)
            while control.learning:  # through its probation
                model(x)
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                for _ in range(calls):
                    forwards.ask(session(), known, layer, x)
                times.append((time.perf_counter() - start) / calls)
        found[name] = min(times) * 1e6
    return found


def measure(path: str, length: int, pairs: int) -> dict[str, Any]:
    """All of it, as one dict with every sample."""
    prompts = Prompts(path, length)
    prompts.ttft(STOCK)
    learning = [prompts.ttft(ON) for _ in range(LEARNING_PROMPTS)]
    result: dict[str, Any] = {
        "model": Path(path).name,
        "prompt_tokens": length,
        "learning": learning,
        "idle": prompts.against(STOCK, ON, pairs),
    }
    with busy_core():
        result["busy"] = prompts.against(STOCK, ON, pairs)
    result["first_after"] = prompts.ttft(ON)
    result["after"] = prompts.against(STOCK, ON, pairs)
    result["sites"] = session().sites()
    result["on_against_off"] = prompts.against(OFF, ON, 2 * pairs)
    result["own_cost_us"] = own_cost()
    result["environment"] = machine.stamp()
    return result


def render(result: dict[str, Any]) -> str:
    """For people."""
    lines = [f"{result['model']}, prompts of {result['prompt_tokens']} tokens"]
    for name, what in (
        ("idle", "patched over stock, idle machine"),
        ("busy", "patched over stock, one core kept busy by another process"),
        ("after", "patched over stock, after that process"),
        ("on_against_off", "gate on over gate off, idle machine"),
    ):
        lines.append(f"{what:60} {_text(result[name]['ratio'])}; A/A {_text(result[name]['aa'])}")
    stock = float(np.median(result["after"]["samples"]["one"]))
    lines.append(f"{'first prompt after that process, over stock':60} {stock / result['first_after']:.2f}x")
    on, off = result["own_cost_us"]["on"], result["own_cost_us"]["off"]
    lines.append(f"{'asking the site, a call':60} {on:.1f} us with the gate, {off:.1f} us without")
    return "\n".join(lines)


def _text(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "not known"
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['value']:.3f}x" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.gating", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder that mlx_lm.load accepts")
    parser.add_argument("--tokens", type=int, default=512, help="prompt length (default: 512)")
    parser.add_argument("--pairs", type=int, default=4, help="runs of each arm (default: 4)")
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write every sample and the environment here"
    )
    args = parser.parse_args(argv)
    result = measure(args.model, args.tokens, args.pairs)
    show(result, render(result), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
