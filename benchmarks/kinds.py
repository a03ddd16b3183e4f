"""Prompts and decoding of every kind of model that may split, beyond the paper's dense ones.

Small models of MLX-LM's own classes with random weights: a Llama, dense and quantised, and mixtures of
experts. Of each a prompt, stock and patched, and the decoding of some tokens, which FusionML must not touch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from benchmarks import arms, library
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import status

PROMPT, QUICK_PROMPT, TOKENS = 512, 300, 24
GROUP = 64

_COMMON: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "num_experts_per_tok": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixtral": {"num_local_experts": 8},
    "qwen3_moe": {
        "num_experts": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "deepseek_v3": {
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "qk_nope_head_dim": 64,
        "rope_scaling": None,
    },
    "gpt_oss": {
        "num_local_experts": 8,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
QUANTISED = {"llama": (4, 6, 8)} | {kind: (4,) for kind in CONFIGS if kind != "llama"}
TOLERANCE = 1e-3
"""Of the logits after a prompt, in float32."""


def cells(options: Options) -> dict[str, Cell]:
    made: dict[str, Cell] = {}
    for kind in CONFIGS:
        for bits in (0, *QUANTISED[kind]):
            name = f"{kind} {bits}-bit" if bits else f"{kind} dense"
            prompt = options.extra.get("prompt") or (QUICK_PROMPT if options.quick else PROMPT)
            common = {"kind": kind, "bits": bits, "prompt": prompt, "tokens": TOKENS}
            for phase in ("prompt",) if options.quick else ("prompt", "decode"):
                made[f"{name}, {phase}"] = {**common, "phase": phase}
    return made


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", type=int, help=f"tokens of the prompt (default: {PROMPT})")


def build(kind: str, bits: int) -> nn.Module:
    """The model, in float32, quantised where `bits` is not 0."""
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(7)
    model = module.Model(module.ModelArgs.from_dict(_COMMON | CONFIGS[kind] | {"model_type": kind}))
    if bits:
        nn.quantize(model, group_size=GROUP, bits=bits)
    model.eval()
    mx.eval(model.parameters())
    return model


def prompt(model: nn.Module, ids: mx.array) -> mx.array:
    """What MLX-LM's first steps compute: the caches of all but the last token, and its logits."""
    from mlx_lm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model)
    model(ids[:, :-1], cache=cache)
    mx.eval([each.state for each in cache])
    return model(ids[:, -1:], cache=cache)


def decode(model: nn.Module, tokens: int) -> mx.array:
    """So many greedy tokens after a prompt of one."""
    from mlx_lm.generate import generate_step

    steps = generate_step(mx.array([1]), model, max_tokens=tokens)
    return mx.array([int(token) for token, _ in steps])


def measure(parameters: Cell, options: Options) -> Cell:
    model = build(parameters["kind"], parameters["bits"])
    ids = mx.random.randint(0, _COMMON["vocab_size"], (1, parameters["prompt"]), key=mx.random.key(3))
    once = (
        functools.partial(prompt, model, ids)
        if parameters["phase"] == "prompt"
        else functools.partial(decode, model, parameters["tokens"])
    )
    library.know(model)
    ways = {"stock": once, "patched": library.split_arm(once)}
    result = arms.measure(ways, options, tolerance=TOLERANCE)
    state = status()
    figures = {"calls": state["calls"], "eligible": state["eligible"], "skipped": state["skipped"]}
    return {**result, "figures": figures}


def memory(parameters: Cell) -> int:
    return 2**30


EXPERIMENT = Experiment(
    name="kinds",
    title="Every kind of model that may split: its prompt, and its decoding",
    paper="beyond the paper (Section 7)",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(6, 1),
    arguments=arguments,
)
