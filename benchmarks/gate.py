"""The no-regression gate in and out of its regime (Section 5.5): `python -m benchmarks gate`.

A decoder block in `GatedBlock` under every policy, call by call, in turns with the block itself: where the
split wins, where the block is too small for it, and while other processes of ours keep all cores but one
busy. And `mx.compile` against eager. With `--model` the gate of the whole library on a real model: what it
costs, whether it holds while the cores are busy, and whether the gain is back afterwards.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import arms, checkpoints
from benchmarks.experiment import LEAST_SAMPLES, Cell, Experiment, Options
from benchmarks.leash import leashed
from fusionml import GatedBlock, forwards, loading, machine, products
from fusionml.blocks import EAGER
from fusionml.compare import generate_once, prompt_ids
from fusionml.gate import POLICIES, Decision
from fusionml.measure import order, paired_ratio, relative_error
from fusionml.patching import patched, session

STOCK, AGAIN = "stock", f"stock {arms.AGAIN}"
WIDTH, HIDDEN, HEAD = 4096, 14336, 128
"""The paper's: a block of Llama-3-8B."""
LENGTHS = (1024, 2048, 4096, 8192)
ROWS, FEWEST = 4096, 256
LEAST_WIDTH, LEAST_HEAD, LEAST_ROWS = 64, 32, 32
SMALL = {"width": 64, "hidden": 128, "rows": 64}
"""A block that is not worth its boundaries."""
LEARNING, QUICK_LEARNING = 45, 20
"""Rounds at most until the gates must have chosen: three first runs, and a probation that was stretched."""
LONGEST_PROBATION = 100
"""Calls of one layer until its site must have chosen."""
TOLERANCE = 3e-2
WARM = 0.5
"""Seconds until a process that was started keeps its core busy."""

ON: dict[str, Any] = {"gate": "auto", "enabled": True}
OFF: dict[str, Any] = {"gate": "off", "enabled": True}
NO: dict[str, Any] = {"enabled": False}
TOKENS = 512
LEARNING_PROMPTS = 2


# --- the plan


def arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser, "only blocks, and no model")
    parser.add_argument(
        "--tokens",
        type=checkpoints.at_least(checkpoints.SHORTEST),
        default=TOKENS,
        help=f"prompt length with --model (default: {TOKENS})",
    )


def cells(options: Options) -> dict[str, Cell]:
    """The block in and out of regime, compiled at each length, the gate's own cost, and the model's cells."""
    block = geometry(options.scale)
    regime = {**block, "rows": max(FEWEST, ROWS // options.scale)}
    lengths = sorted({max(LEAST_ROWS, n // options.scale) for n in LENGTHS})
    found: dict[str, Cell] = {
        "the split wins": {"what": "policies", "busy": False, **regime},
        "too small a block": {"what": "policies", "busy": False, **SMALL},
        "busy cores": {"what": "policies", "busy": True, **regime},
        **{f"compiled, {n} rows": {"what": "compiled", **block, "rows": n} for n in lengths},
        "own cost": {"what": "own cost"},
    }
    if options.extra["model"] is not None:
        model = {
            "model": checkpoints.name(options.extra["model"]),
            "prompt_tokens": options.extra["tokens"],
            "min_rows": checkpoints.min_rows(options.extra["tokens"]),
            "bytes": checkpoints.needed_bytes(options.extra["model"]),
        }
        found["model, busy cores"] = {"what": "model busy", **model}
        found["model, gate on and off"] = {"what": "model on and off", **model}
    return found


def geometry(scale: int) -> dict[str, int]:
    """Width and hidden width of the block, the paper's divided by `scale`."""
    width = max(LEAST_WIDTH, WIDTH // scale)
    return {"width": width, "hidden": HIDDEN * width // WIDTH}


def memory(parameters: Cell) -> int:
    """Of a block: its weights, and the intermediate results of one mode at a time."""
    if "width" not in parameters:
        return int(parameters.get("bytes", 0))
    width, hidden = parameters["width"], parameters["hidden"]
    weights = 4 * width * width + 3 * width * hidden
    return 2 * (weights + parameters["rows"] * (5 * width + 3 * hidden))


def measure(parameters: Cell, options: Options) -> Cell:
    """One cell, by what it is about."""
    return MEASURES[parameters["what"]](parameters, options)


# --- a block under every policy


@dataclass
class Made:
    """A decoder block of Llama's geometry and its input `[1, rows, width]`, random, in bfloat16."""

    block: nn.Module
    x: mx.array

    def __init__(self, parameters: Cell) -> None:
        from mlx_lm.models import llama

        width = parameters["width"]
        heads = max(1, width // max(LEAST_HEAD, HEAD * width // WIDTH))
        sizes = {
            "model_type": "llama",
            "hidden_size": width,
            "intermediate_size": parameters["hidden"],
            "num_hidden_layers": 1,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "rms_norm_eps": 1e-5,
            "vocab_size": 1,
        }
        mx.random.seed(0)
        self.block = llama.TransformerBlock(llama.ModelArgs.from_dict(sizes))
        self.block.set_dtype(mx.bfloat16)
        self.block.eval()
        self.x = mx.random.normal((1, parameters["rows"], width)).astype(mx.bfloat16)
        mx.eval(self.block.parameters(), self.x)

    def run(self, call: Callable[..., mx.array]) -> mx.array:
        """The block's output, computed in one of its ways; lazy."""
        return call(self.x, "causal", None)


class Gated:
    """A block behind a gate, and what the gate decided for its latest call."""

    def __init__(self, made: Made, policy: str) -> None:
        self.made, self.gated = made, GatedBlock(made.block, policy=policy, min_rows=1)
        self.decision = Decision(EAGER, False)
        choose = self.gated.gate.choose

        def watched(*args: Any, **options: Any) -> Decision:
            self.decision = choose(*args, **options)
            return self.decision

        self.gated.gate.choose = watched  # type: ignore[method-assign]

    def __call__(self) -> Cell:
        """One call: the arm, its seconds, whether the gate timed it, and what the gate then decided."""
        seconds = timed(lambda: self.made.run(self.gated))
        events = self.gated.gate.events
        said = [events.popleft() for _ in range(len(events))]
        return {"arm": self.decision.arm, "seconds": seconds, "timed": self.decision.timed, "decisions": said}


def timed(call: Callable[[], mx.array]) -> float:
    """Seconds of one evaluation."""
    start = time.perf_counter()
    mx.eval(call())
    return time.perf_counter() - start


def policies(parameters: Cell, options: Options) -> Cell:
    """The block behind each gate in turns with the block itself, from the first call on."""
    made = Made(parameters)
    gated = {policy: Gated(made, policy) for policy in POLICIES}
    errors = modes_errors(made, gated["off"].gated)
    turns = Turns(made, gated)
    turns.learn(QUICK_LEARNING if options.quick else LEARNING)
    if parameters["busy"]:
        each, main = max(LEAST_SAMPLES, options.samples // 4), "busy"
        turns.phase("idle", each)
        with busy_cores():
            turns.phase("busy", each)
        turns.phase("after", each)
    else:
        main = "steady"
        turns.phase(main, options.samples)
    cell = arms.summarise(turns.seconds(main), STOCK, errors)
    phases = dict.fromkeys(entry["phase"] for entry in turns.trace)
    cell["figures"] = {
        **turns.told(),
        "policies": {policy: turns.summary(policy) for policy in POLICIES},
        "phases": {phase: turns.against_stock(phase) for phase in phases},
    }
    cell["trace"] = turns.trace
    return cell


def modes_errors(made: Made, gated: GatedBlock) -> dict[str, float]:
    """Each mode's error against the block itself.

    Raises:
        ValueError: a mode computes something else.
    """
    every = gated._hidden.arms
    found = {name: np.array(made.run(arm).astype(mx.float32)) for name, arm in every.items()}
    errors = {name: relative_error(out, found[EAGER]) for name, out in found.items() if name != EAGER}
    for name, error in errors.items():
        if not error <= TOLERANCE:
            raise ValueError(f"the mode {name} differs from the block by {error:.2g}, more than {TOLERANCE}")
    return errors


class Turns:
    """Calls of all arms in turns, and the trace of them."""

    def __init__(self, made: Made, gated: Mapping[str, Gated]) -> None:
        self.made, self.gated = made, gated
        self.trace: list[Cell] = []

    def learn(self, most: int) -> None:
        """Rounds until every gate has chosen, or `most`."""
        timed(lambda: self.made.run(self.made.block))
        for _ in range(most):
            self.phase("learning", 1)
            if not any(gated.gated.gate.learning for gated in self.gated.values()):
                break

    def phase(self, name: str, rounds: int) -> None:
        """So many rounds, under that name in the trace."""
        calls: dict[str, Callable[[], Cell]] = {STOCK: self._stock, **self.gated, AGAIN: self._stock}
        for policy in order(list(calls), rounds):
            self.trace.append({"phase": name, "policy": policy, **calls[policy]()})

    def _stock(self) -> Cell:
        seconds = timed(lambda: self.made.run(self.made.block))
        return {"arm": EAGER, "seconds": seconds, "timed": False, "decisions": []}

    def seconds(self, phase: str) -> dict[str, list[float]]:
        """The seconds of each call in a phase, by policy."""
        found: dict[str, list[float]] = {policy: [] for policy in (STOCK, *self.gated, AGAIN)}
        for entry in self.trace:
            if entry["phase"] == phase:
                found[entry["policy"]].append(entry["seconds"])
        return found

    def against_stock(self, phase: str) -> Cell:
        """How many times faster than stock: `typical`, pair by pair, and `whole`, by all seconds together.

        What a gate spends on probes is in a few calls only, so it shows in the second alone.
        """
        seconds = self.seconds(phase)
        stock = seconds.pop(STOCK)
        return {
            policy: {"typical": asdict(paired_ratio(stock, times)), "whole": sum(stock) / sum(times)}
            for policy, times in seconds.items()
        }

    def summary(self, policy: str) -> Cell:
        """The gate's own words at the end, which arms ran, and after how many calls it had chosen."""
        calls = [entry for entry in self.trace if entry["policy"] == policy]
        return {
            "gate": self.gated[policy].gated.gate.state(),
            "ran": dict(Counter(entry["arm"] for entry in calls)),
            "timed": sum(entry["timed"] for entry in calls),
            "learning": sum(entry["phase"] == "learning" for entry in calls),
        }

    def told(self) -> Cell:
        """For people: what each policy came to."""
        found = {}
        for policy in self.gated:
            state = self.gated[policy].gated.gate.state()
            switches, probes = state["switches"], state["probes"]
            found[policy] = f"{state['arm']}, {switches} switches, {probes} probes; {state['why']}"
        return found


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Other processes that keep all cores but one busy, and at least one."""
    with contextlib.ExitStack() as running:
        for _ in range(max(1, machine.cores() - 1)):
            loop = [sys.executable, "-c", "while True: pass"]
            running.enter_context(leashed(loop, stderr=subprocess.DEVNULL))
        time.sleep(WARM)
        yield


# --- compiled


def compiled(parameters: Cell, options: Options) -> Cell:
    """`mx.compile` against eager, the block being the same; the paper saw it lose 6 % at 8192."""
    made = Made(parameters)
    block = made.block
    quick = mx.compile(block.__call__, inputs=block.state)
    both: dict[str, Callable[[], mx.array]] = {
        STOCK: lambda: made.run(block),
        "compiled": lambda: made.run(quick),
    }
    return arms.measure(both, options, tolerance=TOLERANCE)


# --- the gate's own cost


def own_cost(parameters: Cell, options: Options, calls: int = 2000) -> Cell:
    """Seconds that one call spends on asking its site, with the gate and without: no arithmetic in it."""
    layer = nn.Linear(128, 128, bias=False)
    model = nn.Sequential(layer)
    model.eval()
    x = mx.zeros((1, 512, 128))
    mx.eval(x, model.parameters())
    session().known.add(model, from_loader=False)
    settings = {"gate off": OFF, "gate on": ON, "gate off again": OFF}
    samples: dict[str, list[float]] = {name: [] for name in settings}
    for name in order(list(settings), options.samples):
        with patched(**settings[name], ratio=0.5):
            samples[name].append(_asking(layer, x, calls))
    return arms.summarise(samples, "gate off")


def _asking(layer: nn.Linear, x: mx.array, calls: int) -> float:
    """Seconds of one call's question, once the site has chosen; short of memory it never does."""
    known = session().known.find(layer)
    control = session().control(known, x.dtype, x.shape[-2])
    for _ in range(LONGEST_PROBATION):
        if not control.learning:
            break
        mx.eval(layer(x))
    product, rows = products.of(known.kind, layer, x, None), x.shape[-2]
    start = time.perf_counter()
    for _ in range(calls):
        forwards.ask(session(), known, product, rows, id(layer))
    return (time.perf_counter() - start) / calls


# --- the whole library on a model


class Prompts:
    """Times prompts of one length, each of them new."""

    def __init__(self, parameters: Cell, options: Options) -> None:
        with patched(**ON):
            self.model, self.tokenizer, _, _ = loading.load(options.extra["model"])
        self.length, self.least = parameters["prompt_tokens"], parameters["min_rows"]
        self.pairs = max(LEAST_SAMPLES, options.samples // 10)
        self._seed = 0

    def ttft(self, given: Mapping[str, Any]) -> float:
        """Seconds to the first token under these settings."""
        self._seed += 1
        ids = prompt_ids(self.tokenizer, self.length, self._seed, None)
        with patched(**given, min_rows=self.least):
            return generate_once(self.model, "", ids, 2).ttft

    def learn(self) -> list[float]:
        """What the first prompts take, from which it learns; one of stock goes before."""
        self.ttft(NO)
        return [self.ttft(ON) for _ in range(LEARNING_PROMPTS)]

    def turns(self, every: Mapping[str, Mapping[str, Any]]) -> dict[str, list[float]]:
        """Seconds by the name of the settings, in turns."""
        found: dict[str, list[float]] = {name: [] for name in every}
        for name in order(list(every), self.pairs):
            found[name].append(self.ttft(every[name]))
        return found


def model_busy(parameters: Cell, options: Options) -> Cell:
    """Patched against stock: on an idle machine, with busy cores, and after that."""
    prompts = Prompts(parameters, options)
    both = {STOCK: NO, "patched": ON, AGAIN: NO}
    learning = prompts.learn()
    phases = {"idle": prompts.turns(both)}
    with busy_cores():
        phases["busy"] = prompts.turns(both)
    first = prompts.ttft(ON)
    phases["after"] = prompts.turns(both)
    cell = arms.summarise(phases["busy"], STOCK)
    cells = {phase: arms.summarise(samples, STOCK) for phase, samples in phases.items()}
    told = {f"patched, {phase}": _text(found["ratios"]["patched"]) for phase, found in cells.items()}
    stock = float(np.median(phases["after"][STOCK]))
    cell["figures"] = {
        **told,
        "first prompt after the busy cores, over stock": stock / first,
        "learning": learning,
        "phases": cells,
        "sites": session().sites(),
    }
    return cell


def model_on_and_off(parameters: Cell, options: Options) -> Cell:
    """What the gate costs where nothing happens: the same plans with it and without."""
    prompts = Prompts(parameters, options)
    learning = prompts.learn()
    samples = prompts.turns({"gate off": OFF, "gate on": ON, "gate off again": OFF})
    cell = arms.summarise(samples, "gate off")
    cell["figures"] = {"learning": learning}
    return cell


def _text(ratio: Mapping[str, Any]) -> str:
    low, high = ratio["low"], ratio["high"]
    return f"{ratio['value']:.3f}x" + ("" if low is None else f" [{low:.3f}, {high:.3f}]")


MEASURES: dict[str, Callable[[Cell, Options], Cell]] = {
    "policies": policies,
    "compiled": compiled,
    "own cost": own_cost,
    "model busy": model_busy,
    "model on and off": model_on_and_off,
}

EXPERIMENT = Experiment(
    name="gate",
    title="The no-regression gate, in and out of its regime",
    paper="Section 5.5",
    cells=cells,
    measure=measure,
    memory=memory,
    arguments=arguments,
    processes=3,
    whole=True,
)
