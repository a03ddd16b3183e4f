"""Stock and patched side by side on one model: what changed, so that nobody has to believe us."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from . import machine
from .measure import Ratio, order, paired_ratio, unstable
from .patching import patched, session, status

ARMS = ("stock", "patched")
SHORT, LONG = 512, (2048, 1024)
"""Default prompt lengths: the short one, and the first of the long ones that the machine does in time."""
WARM_UP_TOKENS = 200
LEARNING_PROMPTS = 3
"""Prompts of each length that the patched arm may learn from before anything is measured."""
LEARNING_SEED, LEARNING_TOKENS = 10**6, 4
PATIENCE = 15.0
"""Seconds that all runs of one default prompt length may take."""

_WORDS = (
    "time river stone light number garden winter letter engine paper answer window music silver machine",
    "mountain question history market science village memory pattern ocean kitchen bridge journey theory",
)


@dataclass
class Run:
    """One prompt and its answer on one arm; times in seconds, memory in bytes."""

    arm: str
    prompt_tokens: int
    ttft: float
    decode_tps: float | None
    peak_memory: int
    tokens: list[int]
    gaps: list[float]
    """For each token the gap between the two best logits there."""


def text(seed: int, words: int) -> str:
    """Sentences of random words, the same for the same seed."""
    rng = np.random.default_rng(seed)
    picked = rng.choice(" ".join(_WORDS).split(), size=words)
    return " ".join(f"{word}." if i % 11 == 10 else str(word) for i, word in enumerate(picked))


def prompt_ids(tokenizer: Any, length: int, seed: int, source: str | None) -> list[int]:
    """A prompt of `length` tokens that differs from the first word on from every other seed's.

    The first word is the seed. `source` is repeated or cut to the length; without it the words are random.
    """
    body = text(seed, length) if source is None else source
    ids: list[int] = tokenizer.encode(f"{seed} {body}")
    while len(ids) < length:
        ids += tokenizer.encode(" " + body, add_special_tokens=False)
    return ids[:length]


def generate_once(model: nn.Module, arm: str, ids: list[int], max_tokens: int) -> Run:
    """Greedy decoding of one prompt by MLX-LM's own steps, to the full number of tokens."""
    from mlx_lm.generate import generate_step, generation_stream, wired_limit

    tokens, logprobs, times = [], [], []
    mx.clear_cache()
    mx.reset_peak_memory()
    with wired_limit(model, [generation_stream]):
        start = time.perf_counter()
        for token, scores in generate_step(mx.array(ids), model, max_tokens=max_tokens):
            times.append(time.perf_counter() - start)
            tokens.append(int(token))
            logprobs.append(scores)
    peak = mx.get_peak_memory()
    decode = (len(tokens) - 1) / (times[-1] - times[0]) if len(tokens) > 1 else None
    return Run(arm, len(ids), times[0], decode, peak, tokens, [_gap(scores) for scores in logprobs])


def _gap(scores: mx.array) -> float:
    best = np.sort(np.array(scores.astype(mx.float32)).reshape(-1))[-2:]
    return float(best[1] - best[0])


def compare(
    model: nn.Module,
    tokenizer: Any,
    *,
    context: int | None = None,
    lengths: list[int] | None = None,
    max_tokens: int = 64,
    pairs: int = 2,
    source: str | None = None,
    settings: dict[str, Any] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run stock and patched in A-B-B-A order and say what changed.

    Args:
        model: loaded by `mlx_lm.load` while patched, or handed to `patch(model)`.
        tokenizer: MLX-LM's.
        context: the longest prompt and answer together that the model takes.
        lengths: prompt lengths in tokens; None is 512 and 2048, or less on a slow machine.
        max_tokens: tokens of each answer.
        pairs: runs of each arm at each length.
        source: text for the prompts instead of random words.
        settings: of the patched arm.
        progress: told (runs done, runs in all).

    Returns:
        `samples` (every run), `summary` (a dict for each length, see `summarise`) and the patched arm's
        `status`.
    """
    arms = {"stock": {"enabled": False}, "patched": {**(settings or {}), "enabled": True}}
    state: dict[str, dict[str, Any]] = {}

    def once(arm: str, length: int, seed: int, tokens: int) -> Run:
        with patched(**arms[arm]):
            run = generate_once(model, arm, prompt_ids(tokenizer, length, seed, source), tokens)
            state[arm] = status()
        return run

    longest = None if context is None else context - max_tokens
    warm = once("stock", min(WARM_UP_TOKENS, longest or WARM_UP_TOKENS), 0, LEARNING_TOKENS)
    lengths = lengths or _affordable(warm, pairs, longest)
    runs: list[Run] = []
    summary, total = [], len(lengths) * pairs * len(ARMS)
    for length in lengths:
        for seed in range(LEARNING_PROMPTS):
            once("patched", length, LEARNING_SEED + seed, LEARNING_TOKENS)
            if not session().learning():
                break
        done: dict[str, list[Run]] = {arm: [] for arm in ARMS}
        for arm in order(ARMS, pairs):
            progress(len(runs), total)
            run = once(arm, length, 1 + len(runs) // len(ARMS), max_tokens)
            done[arm].append(run)
            runs.append(run)
        summary.append(summarise(length, done["stock"], done["patched"]))
    progress(total, total)
    return {
        "samples": [asdict(run) for run in runs],
        "summary": summary,
        "status": _shareable(state["patched"]),
    }


def _shareable(state: dict[str, Any]) -> dict[str, Any]:
    """The status without where on this machine the table lies: results are made to be sent."""
    table = state["table"]
    return state if table is None else {**state, "table": {**table, "path": Path(table["path"]).name}}


def _affordable(warm: Run, pairs: int, longest: int | None) -> list[int]:
    """The default prompt lengths within the model's context and this machine's speed, at least one."""
    per_token = warm.ttft / warm.prompt_tokens
    short = SHORT if longest is None else min(SHORT, longest)
    fits = [n for n in LONG if (longest is None or n <= longest) and 2 * pairs * n * per_token <= PATIENCE]
    return [short, *fits[:1]]


def summarise(length: int, stock: list[Run], treated: list[Run]) -> dict[str, Any]:
    """Medians of both arms, their ratios pair by pair, the A/A ratio of stock, and whether tokens agree."""
    both = {"stock": stock, "patched": treated}
    decoded = all(run.decode_tps for runs in both.values() for run in runs)
    # Stock's own first half against its second: what the machine's noise alone looks like.
    half = len(stock) // 2
    return {
        "prompt_tokens": length,
        "ttft": {arm: float(np.median([r.ttft for r in runs])) for arm, runs in both.items()},
        "ttft_ratio": asdict(paired_ratio([r.ttft for r in stock], [r.ttft for r in treated])),
        "ttft_aa": _aa([r.ttft for r in stock], half),
        "decode_tps": {arm: _median_rate(runs) for arm, runs in both.items()},
        "decode_ratio": asdict(paired_ratio(_decode(stock), _decode(treated))) if decoded else None,
        "decode_aa": _aa(_decode(stock), half) if decoded else None,
        "peak_memory": {arm: max(r.peak_memory for r in runs) for arm, runs in both.items()},
        "divergence": next(filter(None, map(divergence, stock, treated)), None),
        "tokens_compared": len(stock[0].tokens),
        "warnings": {arm: unstable([r.ttft for r in runs]) for arm, runs in both.items() if len(runs) > 1},
    }


def _decode(runs: list[Run]) -> list[float]:
    return [1 / run.decode_tps for run in runs if run.decode_tps]


def _median_rate(runs: list[Run]) -> float | None:
    rates = [run.decode_tps for run in runs if run.decode_tps]
    return float(np.median(rates)) if rates else None


def _aa(times: list[float], half: int) -> dict[str, Any] | None:
    return asdict(paired_ratio(times[:half], times[half : 2 * half])) if half else None


def divergence(stock: Run, treated: Run) -> dict[str, Any] | None:
    """Where two answers to the same prompt part, both continuations, and how near the tie was."""
    pairs = zip(stock.tokens, treated.tokens, strict=True)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is None:
        return None
    return {
        "position": at,
        "stock": stock.tokens[at : at + 16],
        "patched": treated.tokens[at : at + 16],
        "logit_gap": stock.gaps[at],
    }


def render(result: dict[str, Any], tokenizer: Any) -> str:
    """The result as a table for people."""
    lines = [
        f"{'prompt':>7}  {'arm':8}{'TTFT':>10}{'prompt tok/s':>14}{'decode tok/s':>14}{'peak memory':>13}"
    ]
    for row in result["summary"]:
        for arm in ARMS:
            rate = row["decode_tps"][arm]
            decode = "-" if rate is None else f"{rate:.1f}"
            prompt = row["prompt_tokens"] if arm == "stock" else ""
            lines.append(
                f"{prompt:>7}  {arm:8}{row['ttft'][arm]:>8.2f} s"
                f"{row['prompt_tokens'] / row['ttft'][arm]:>14.1f}{decode:>14}"
                f"{row['peak_memory'][arm] / 2**20:>9.0f} MiB"
            )
        lines += [f"{'':9}{line}" for line in _verdict(row, tokenizer)]
    return "\n".join([*lines, *_footer(result["status"])])


def _verdict(row: dict[str, Any], tokenizer: Any) -> Iterator[str]:
    yield f"TTFT {_faster(row['ttft_ratio'])}; stock against itself {_faster(row['ttft_aa'])}"
    if row["decode_ratio"] is not None:
        yield f"decode {_faster(row['decode_ratio'])}; stock against itself {_faster(row['decode_aa'])}"
    parted = row["divergence"]
    if parted is None:
        yield f"tokens identical ({row['tokens_compared']} of {row['tokens_compared']})"
    else:
        yield (
            f"tokens differ from token {parted['position'] + 1} of {row['tokens_compared']} on, where "
            f"stock's two best logits are {parted['logit_gap']:.3g} apart:"
        )
        yield from (f"  {arm:8}{tokenizer.decode(parted[arm])!r}" for arm in ARMS)
    yield from (f"warning, {arm}: {text}" for arm, texts in row["warnings"].items() for text in texts)


def _faster(ratio: dict[str, Any] | None) -> str:
    if ratio is None:
        return "not known (one pair)"
    r = Ratio(**ratio)
    return f"{r.value:.2f}x (pairs {r.smallest:.2f} to {r.largest:.2f})"


def _footer(state: dict[str, Any]) -> Iterator[str]:
    share = state["eligible"]
    known = (
        "no known model" if share is None else f"{share:.0%} of the linear arithmetic of prefill may split"
    )
    yield f"{machine.backend()} backend; {known}"
    if state["idle"] is not None:
        yield f"  {state['idle']}"
    for reason, layers in sorted(state["skipped"].items()):
        yield f"  stock: {layers} layers {reason}"
    for key, site in sorted(state["sites"].items()):
        yield f"  {key}: {site['arm']}, CPU share {site['ratio']:.2f} ({site['why']})"
