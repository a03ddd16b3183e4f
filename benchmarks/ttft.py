"""Time to a checkpoint's first token through MLX-LM (Section 5.4, Figure 5): `python -m benchmarks ttft`.

Every round is a new prompt, answered by every arm. Beside the times: decode, which must not change, and every
prompt and answer, with where an answer first parts from stock's and how near the tie was there.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks import arms, checkpoints
from benchmarks.experiment import LEAST_SAMPLES, Cell, Experiment, Options
from benchmarks.processes import figures
from fusionml import loading, machine
from fusionml.compare import Run, divergence, generate_once, prompt_ids
from fusionml.measure import order, paired_ratio, relative_error
from fusionml.patching import patched, status
from fusionml.session import bucket_of, open_table

STOCK, AGAIN, GATED = "stock", f"stock {arms.AGAIN}", "calibrated, a new gate"
RATIO = 0.30
"""The paper's: fixed and untuned, for every layer."""
CHUNK = 2048
"""Rows of MLX-LM's usual chunk of a prompt."""
LENGTHS, CPU_LENGTHS = (2048, 4096, 8192), (256, 512, 1024)
QUICK_LENGTHS, QUICK_CPU_LENGTHS = (512,), (128,)
ANSWER, QUICK_ANSWER = 64, 16
PATIENCE, DEMO_PATIENCE, QUICK_PATIENCE = 600.0, 50.0, 15.0
"""Seconds that the rounds of one length may take; each process takes the fewest samples in any case."""
BUDGET, DEMO_BUDGET, QUICK_BUDGET = 60.0, 16.0, 8.0
"""Seconds that calibrating for one length takes."""
TOLERANCE = {mx.float32: 1e-3, mx.float16: 3e-2, mx.bfloat16: 1e-1}
"""Of the first token's log-probabilities, through all blocks; the paper saw 3.9e-3 through 32 in float16."""
SEED = 10**6
"""The first prompt that nobody measures."""

Settled = dict[str, dict[str, Any]]
"""The settings of each arm."""


# --- the plan


def arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser)
    parser.add_argument(
        "--lengths",
        type=checkpoints.at_least(checkpoints.SHORTEST),
        nargs="+",
        help=f"tokens of the prompts (default: {_list(LENGTHS)}, or shorter)",
    )
    parser.add_argument(
        "--max-tokens", type=checkpoints.at_least(1), help=f"tokens of each answer (default: {ANSWER})"
    )


def _list(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def cells(options: Options) -> dict[str, Cell]:
    """One for each length."""
    given = options.extra["lengths"]
    lengths, note = (given, None) if given else _default_lengths(options)
    demo = options.extra["model"] is None
    patience = QUICK_PATIENCE if options.quick else DEMO_PATIENCE if demo else PATIENCE
    shared = {
        "model": checkpoints.name(options.extra["model"]),
        "bytes": checkpoints.needed_bytes(options.extra["model"]),
        "answer_tokens": options.extra["max_tokens"] or (QUICK_ANSWER if options.quick else ANSWER),
        "patience": patience / options.processes,
        "budget": QUICK_BUDGET if options.quick else DEMO_BUDGET if demo else BUDGET,
        "note": note,
    }
    return {
        f"{n} tokens": {"prompt_tokens": n, "min_rows": checkpoints.min_rows(n), **shared} for n in lengths
    }


def _default_lengths(options: Options) -> tuple[Sequence[int], str | None]:
    """The paper's where the machine and the model are up to them, and what is to be said where not."""
    paper = f"the paper's are {_list(LENGTHS)}"
    slow = machine.backend() == "cpu"
    if options.quick:
        return (QUICK_CPU_LENGTHS if slow else QUICK_LENGTHS), f"short prompts because of --quick; {paper}"
    if slow:
        return CPU_LENGTHS, f"short prompts because there is no GPU; {paper}"
    if options.extra["model"] is None:
        return LENGTHS[:-1], f"no longer prompts than the small model takes; {paper}"
    return LENGTHS, None


def memory(parameters: Cell) -> int:
    return int(parameters["bytes"])


def settings(backend: str, least: int, table: Path | None) -> Settled:
    """What each arm runs under.

    Where the GPU stands alone the fixed share is left out: every call of it would copy the model. Only one
    arm has a gate, and a new one at every prompt, because arms that take turns take their settings along.

    Args:
        backend: metal, cuda or cpu.
        least: the setting `min_rows`.
        table: the ratios that were measured, None where nothing was.
    """
    found: Settled = {STOCK: {"enabled": False}}
    if backend != "cuda":
        found[f"fixed {RATIO:.2f}"] = {"ratio": RATIO, "gate": "off"}
    if backend != "metal":
        found["default"] = {"gate": "off"}
    if table is not None:
        found["calibrated"] = {"table": str(table), "gate": "off"}
    if table is not None and backend != "cuda":
        found[GATED] = {"table": str(table)}
    found[AGAIN] = {"enabled": False}
    return {name: {"enabled": True, "min_rows": least, **given} for name, given in found.items()}


# --- one length


@dataclass
class Bench:
    """One model under several settings, and what it did under each."""

    model: Any
    tokenizer: Any
    length: int
    settings: Settled
    calls: dict[str, Counter[str]] = field(default_factory=dict)
    idle: dict[str, str | None] = field(default_factory=dict)
    tables: dict[str, Cell | None] = field(default_factory=dict)

    def ids(self, seed: int) -> list[int]:
        """The prompt of that number."""
        return prompt_ids(self.tokenizer, self.length, seed, None)

    def run(self, arm: str, seed: int, tokens: int) -> Run:
        """One prompt and its answer."""
        with patched(**self.settings[arm]):
            before = Counter(status()["calls"])
            run = generate_once(self.model, arm, self.ids(seed), tokens)
            after = status()
        self.calls[arm] = self.calls.get(arm, Counter()) + (Counter(after["calls"]) - before)
        self.idle[arm] = after["idle"]
        self.tables[arm] = after["table"]
        return run

    def scores(self, arm: str) -> mx.array:
        """The first token's log-probabilities `[1, vocabulary]`, as MLX-LM's own steps find them."""
        from mlx_lm.generate import generate_step

        with patched(**self.settings[arm]):
            _, found = next(generate_step(mx.array(self.ids(SEED)), self.model, max_tokens=1))
            mx.eval(found)
        scores: mx.array = found
        return scores

    def verify(self) -> tuple[dict[str, float], dict[str, str]]:
        """Of each arm the error, and of those that compute something else why they are not timed."""
        truth = self.scores(STOCK)
        errors, wrong = {}, {}
        for arm in [arm for arm in self.settings if arm not in (STOCK, AGAIN)]:
            error = relative_error(*(np.array(a.astype(mx.float32)) for a in (self.scores(arm), truth)))
            errors[arm], allowed = error, TOLERANCE.get(truth.dtype, TOLERANCE[mx.bfloat16])
            if not error <= allowed:
                wrong[arm] = f"it differs from stock by {error:.2g}, more than {allowed:.2g}"
        return errors, wrong


def measure(parameters: Cell, options: Options) -> Cell:
    """One length: verify, warm up, then every arm in turns."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(options.shared or folder) / "calibrated.json"
        calibration, left_out = _calibrate(parameters, options, table)
        bench = _load(parameters, options, None if calibration is None else table)
        errors, wrong = bench.verify()
        left_out |= wrong
        names = [arm for arm in bench.settings if arm not in wrong]
        runs, warm_ups = _rounds(bench, names, parameters, options)
    cell = _summary(runs, errors, left_out)
    cell["figures"] = {
        "model": parameters["model"],
        **({} if parameters["note"] is None else {"note": parameters["note"]}),
        "rounds": len(runs[STOCK]),
        "warm_ups": warm_ups,
        "settings": {arm: _shareable(given) for arm, given in bench.settings.items()},
        "calibration": calibration,
        "calls": {arm: dict(counted) for arm, counted in bench.calls.items()},
        "idle": bench.idle,
        "table": bench.tables.get("calibrated"),
        "decode": {arm: [run.decode_tps for run in done if run.decode_tps] for arm, done in runs.items()},
        "answers": _answers(runs, options.first),
    }
    if bench.idle.get("default"):
        cell["figures"]["stands down"] = bench.idle["default"]
    cell["transcripts"] = _transcripts(runs, bench, parameters, options.first)
    return cell


def _calibrate(parameters: Cell, options: Options, table: Path) -> tuple[Cell | None, dict[str, str]]:
    """What was measured into the table, and which arm that leaves out where it could not be.

    Nothing is measured where an earlier process has filled it.
    """
    if len(open_table(str(table))):
        return {"budget": 0.0, "sites": {}}, {}
    rows = calibration_rows(parameters["prompt_tokens"], parameters["min_rows"])
    try:
        found = checkpoints.calibrate(options.extra["model"], rows, parameters["budget"], table)
    except RuntimeError as error:
        return None, {"calibrated": str(error)}
    opened = open_table(str(table))  # as the patch will: a machine that others keep busy may not know itself
    return (found, {}) if len(opened) else (None, {"calibrated": opened.ignored or "no site was measured"})


def calibration_rows(length: int, least: int) -> list[int]:
    """Rows of the calls that a prompt makes: whole chunks, and what is left but for the last token."""
    whole, rest = divmod(length - 1, CHUNK)
    rows = [CHUNK] * bool(whole) + [rest] * (rest >= least)
    return list({bucket_of(n): n for n in rows}.values())


def _load(parameters: Cell, options: Options, table: Path | None) -> Bench:
    length, answer = parameters["prompt_tokens"], parameters["answer_tokens"]
    with patched(enabled=True):
        model, tokenizer, config, name = loading.load(options.extra["model"])
    context = loading.context(config)
    if context is not None and length + answer > context:
        raise ValueError(f"{name} takes {context} tokens, fewer than {length} and {answer} of the answer")
    return Bench(model, tokenizer, length, settings(machine.backend(), parameters["min_rows"], table))


def _rounds(
    bench: Bench, names: Sequence[str], parameters: Cell, options: Options
) -> tuple[dict[str, list[Run]], int]:
    """The measured runs of each arm, the same prompts for all of them, and how many rounds warmed up."""
    answer = parameters["answer_tokens"]
    started = time.perf_counter()
    for arm in names:
        bench.run(arm, SEED, answer)
    each = time.perf_counter() - started
    warm_ups, rounds = affordable(parameters["patience"], each, options)
    for number in range(warm_ups - 1):
        for arm in names:
            bench.run(arm, SEED + 1 + number, answer)
    bench.calls.clear()
    runs: dict[str, list[Run]] = {arm: [] for arm in names}
    for turn, arm in enumerate(order(names, rounds, before=options.first)):
        runs[arm].append(bench.run(arm, options.first + 1 + turn // len(names), answer))
    return runs, warm_ups


def affordable(patience: float, each: float, options: Options) -> tuple[int, int]:
    """Rounds of warm-up and measured ones that fit in `patience` seconds when one takes `each`."""
    fit = int(patience / each)
    rounds = min(options.samples, max(LEAST_SAMPLES, fit - 1))
    return max(1, min(options.warm_ups, fit - rounds)), rounds


# --- what is told


def _summary(
    runs: Mapping[str, Sequence[Run]], errors: Mapping[str, float], left_out: Mapping[str, str]
) -> Cell:
    samples = {arm: [run.ttft for run in done] for arm, done in runs.items()}
    cell = arms.summarise({**samples, **{arm: [] for arm in left_out}}, STOCK, errors)
    for arm, done in runs.items():
        cell["arms"][arm]["peak_bytes"] = max(run.peak_memory for run in done)
    for arm, why in left_out.items():
        cell["arms"][arm]["warnings"].append(f"{arms.NOT_TIMED}{why}")
    return cell


def _shareable(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "its own" if name == "table" else value for name, value in given.items()}


def conclude(parameters: Cell, result: Cell) -> Cell:
    """Decoding and answers of all rounds, of the arms that every process timed."""
    parts = figures(result)
    names = [arm for arm in parts[0]["decode"] if all(arm in part["decode"] for part in parts)]
    return {
        "rounds": sum(part["rounds"] for part in parts),
        **_decode(names, [part["decode"] for part in parts]),
        **_all_answers([arm for arm in names if arm != STOCK], [part["answers"] for part in parts]),
    }


def _decode(names: Sequence[str], parts: Sequence[Mapping[str, Sequence[float]]]) -> Cell:
    """Tokens a second after the first, by arm, and how they compare with stock's, pair by pair."""
    rates = {arm: [rate for part in parts for rate in part[arm]] for arm in names}
    if not all(rates.values()):
        return {"decode": None}
    each = {arm: [1 / rate for rate in found] for arm, found in rates.items()}
    by_process = [len(part[STOCK]) for part in parts]
    ratios = {
        arm: asdict(paired_ratio(each[STOCK], each[arm], groups=by_process)) for arm in names if arm != STOCK
    }
    found = {
        arm: {
            "tokens_per_second": median(rates[arm]),
            "samples": rates[arm],
            "ratio": ratios.get(arm),
        }
        for arm in names
    }
    told = {f"decode tok/s, {arm}": row["tokens_per_second"] for arm, row in found.items()}
    return {"decode": found, **told}


def _answers(runs: Mapping[str, Sequence[Run]], before: int) -> Cell:
    """How many answers hold stock's very tokens, by arm, and where the first other one parts from it.

    `before` rounds were another process's.
    """
    found: Cell = {}
    for arm in [arm for arm in runs if arm != STOCK]:
        parted = [divergence(*pair) for pair in zip(runs[STOCK], runs[arm], strict=True)]
        first = next(((before + n, d) for n, d in enumerate(parted, 1) if d is not None), None)
        found[arm] = {"answers": len(parted), "identical": parted.count(None), "divergence": _where(first)}
    return found


def _all_answers(names: Sequence[str], parts: Sequence[Cell]) -> Cell:
    """Those of all processes, and a sentence of each arm's."""
    found: Cell = {}
    for arm in names:
        those = [part[arm] for part in parts]
        found[arm] = {
            "answers": sum(each["answers"] for each in those),
            "identical": sum(each["identical"] for each in those),
            "divergence": next(filter(None, (each["divergence"] for each in those)), None),
        }
    told = {f"answers, {arm}": _sentence(**each) for arm, each in found.items()}
    return {"answers": found, **told}


def _where(first: tuple[int, Cell] | None) -> Cell | None:
    if first is None:
        return None
    number, parted = first
    return {"round": number, **{"arm" if key == "patched" else key: v for key, v in parted.items()}}


def _sentence(answers: int, identical: int, divergence: Cell | None) -> str:
    same = f"{identical} of {answers} token-identical"
    if divergence is None:
        return same
    gap, position = divergence["logit_gap"], divergence["position"] + 1
    return f"{same}; the first other one parts at token {position}, where the two best are {gap:.3g} apart"


def _transcripts(
    runs: Mapping[str, Sequence[Run]], bench: Bench, parameters: Cell, before: int
) -> list[Cell]:
    """Every prompt and answer, a line each; `before` rounds were another process's."""
    return [
        {
            "model": parameters["model"],
            "prompt_tokens": bench.length,
            "round": number,
            "arm": arm,
            "prompt": bench.tokenizer.decode(bench.ids(number)),
            "answer": bench.tokenizer.decode(run.tokens),
            "tokens": run.tokens,
            "ttft": run.ttft,
        }
        for number in range(before + 1, before + len(runs[STOCK]) + 1)
        for arm, run in ((arm, done[number - before - 1]) for arm, done in runs.items())
    ]


EXPERIMENT = Experiment(
    name="ttft",
    title="Time to the first token through MLX-LM",
    paper="Section 5.4, Figure 5",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(10, 3),
    flop=1.0,  # lengths, not widths, are what shrinks here
    arguments=arguments,
    conclude=conclude,
)
