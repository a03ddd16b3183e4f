"""Stock MLX-LM's own answers as the truth, and how a patched answer is held against them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from models import _COMMON, CONFIGS, tiny

import fusionml
from fusionml import patching
from fusionml.demo import demo_checkpoint

MIN_ROWS = 16
SETTINGS: dict[str, Any] = {"min_rows": MIN_ROWS, "ratio": 0.4, "quantized": False, "moe": False}
"""Small enough that short prompts split, and a share of rows on every machine."""
TOLERANCE = 2e-4
"""For log-probabilities and caches of float32 models: rounding only."""
HALF_TOLERANCE = 6e-2

T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """What a generation gave: tokens, log-probabilities `[steps, vocabulary]`, and the caches it left."""

    tokens: list[int]
    logprobs: np.ndarray
    cache: list[mx.array]


def answer(
    model: nn.Module, prompt: Any, *, max_tokens: int = 5, cache: Any = None, **options: Any
) -> Answer:
    """Greedy decoding by `mlx_lm`'s own `generate_step`."""
    cache = make_prompt_cache(model, options.pop("max_kv_size", None)) if cache is None else cache
    steps = list(generate_step(mx.array(prompt), model, max_tokens=max_tokens, prompt_cache=cache, **options))
    return Answer([token for token, _ in steps], rows(p for _, p in steps), arrays(cache))


def rows(logprobs: Iterable[mx.array]) -> np.ndarray:
    """Vectors of log-probabilities as one float32 matrix."""
    return np.stack([np.array(p.astype(mx.float32)).reshape(-1) for p in logprobs])


def arrays(cache: Any) -> list[mx.array]:
    """Every array that a prompt cache holds."""
    return [a for _, a in tree_flatten([c.state for c in cache]) if isinstance(a, mx.array)]


def split_calls() -> int:
    """How many calls were split in this test so far."""
    return int(fusionml.status()["calls"].get("split", 0))


def split_layers(model: nn.Module) -> dict[str, int]:
    """The rows that each layer of `model` has split, by its path; only those that did."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen = [(layer.ref(), layer.split_rows) for layer in patching._session.known.layers()]
    return {paths[id(module)]: count for module, count in seen if count and id(module) in paths}


def stock_and_patched(
    models: nn.Module | list[nn.Module], run: Callable[[], T], **settings: Any
) -> tuple[T, T]:
    """`run()` with MLX-LM alone, then with `models` handed to the patch, which must have split something."""
    truth = run()
    before = split_calls()
    for model in models if isinstance(models, list) else [models]:
        fusionml.patch(model, **SETTINGS | settings)
    try:
        ours = run()
    finally:
        fusionml.unpatch()
    assert split_calls() > before, f"nothing was split: {fusionml.status()}"
    return truth, ours


def assert_same(ours: Answer, truth: Answer, tolerance: float = TOLERANCE) -> None:
    """Same tokens, same log-probabilities and caches but for rounding.

    Two tokens that stock itself can hardly tell apart may change places; what follows is then not compared.
    """
    for step, (mine, theirs) in enumerate(zip(ours.tokens, truth.tokens, strict=True)):
        np.testing.assert_allclose(ours.logprobs[step], truth.logprobs[step], atol=tolerance, rtol=0)
        if mine != theirs:
            gap = truth.logprobs[step][theirs] - truth.logprobs[step][mine]
            assert gap <= 2 * tolerance, f"step {step}: {mine} instead of {theirs}, {gap} apart"
            return
    assert_same_arrays(ours.cache, truth.cache, tolerance)


def assert_same_arrays(ours: list[mx.array], truth: list[mx.array], tolerance: float = TOLERANCE) -> None:
    """Arrays of the same shapes and dtypes, equal but for rounding relative to the largest entry."""
    assert [(a.shape, a.dtype) for a in ours] == [(a.shape, a.dtype) for a in truth]
    for mine, theirs in zip(ours, truth, strict=True):
        if theirs.size:
            scale = max(1.0, float(mx.abs(theirs.astype(mx.float32)).max()))
            difference = float(mx.abs(mine.astype(mx.float32) - theirs.astype(mx.float32)).max())
            assert difference <= tolerance * scale


def checkpoint(home: Path, model_type: str = "llama", **changes: Any) -> Path:
    """The folder of a small float32 model with one token a byte, as MLX-LM itself saves it."""
    tokenizer_home = demo_checkpoint(home)
    tokenizer = mlx_lm.utils.load_tokenizer(tokenizer_home)
    changes = {"vocab_size": 258} | changes
    model = tiny(model_type, **changes)
    config = _COMMON | CONFIGS[model_type] | {"model_type": model_type, "eos_token_id": 257} | changes
    folder = home / f"{model_type}-{len(list(home.iterdir()))}"
    mlx_lm.utils.save(folder, tokenizer_home, model, tokenizer, json.loads(json.dumps(config)))
    return folder


def text(count: int, seed: int = 0) -> str:
    """A prompt of `count` bytes, so of as many tokens; another seed, another prompt."""
    letters = np.random.default_rng(seed).integers(97, 123, count)
    return "".join(chr(letter) for letter in letters)
