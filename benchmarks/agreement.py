"""How far stock and patched are from what a quantised checkpoint stands for (beyond the paper).

The reference is the same checkpoint dequantised in float32 and run by stock. All three read the same text, so
that every position is judged on its own (teacher forcing): the largest error of the logits, relative to the
largest of them, and how often the likeliest token is the reference's. In half precision stock itself is far
off, so that tokens alone would say nothing.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from benchmarks import checkpoints
from benchmarks.experiment import Cell, Experiment, Options
from fusionml import loading, patched, status
from fusionml.compare import prompt_ids
from fusionml.measure import relative_error

TOKENS, QUICK_TOKENS = 512, 300


def arguments(parser: argparse.ArgumentParser) -> None:
    checkpoints.add_model(parser, "the small one, in 4 bits")
    parser.add_argument("--tokens", type=int, help=f"tokens that are judged (default: {TOKENS})")


def cells(options: Options) -> dict[str, Cell]:
    tokens = options.extra.get("tokens") or (QUICK_TOKENS if options.quick else TOKENS)
    return {"logits": {"model": options.extra.get("model"), "tokens": tokens}}


def memory(parameters: Cell) -> int:
    """The checkpoint, twice in float32 at most, is checked against free memory where it is loaded."""
    return 2**30


def logits(model: nn.Module, ids: mx.array) -> np.ndarray:
    """Of every position, in float32: `[tokens, vocabulary]`."""
    return np.array(model(ids)[0].astype(mx.float32))


def exact(packed: nn.Module) -> nn.Module:
    """The model that a checkpoint stands for: its weights dequantised in float32."""
    from mlx_lm.utils import dequantize_model

    packed.set_dtype(mx.float32)  # the scales: what they unpack to is then not rounded
    return dequantize_model(packed)


def judge(name: str, out: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """The largest error of an arm, the usual one, and how often the likeliest token is the reference's."""
    same = (out.argmax(axis=-1) == reference.argmax(axis=-1)).mean()
    off, size = (np.linalg.norm(each.astype(np.float64)) for each in (out - reference, reference))
    return {
        f"{name}: error": relative_error(out, reference),
        f"{name}: root mean square error": float(off / size),
        f"{name}: agreement": float(same),
    }


def measure(parameters: Cell, options: Options) -> Cell:
    """Logits of all three, one after the other; each arm with the model loaded anew."""
    path, count = parameters["model"], parameters["tokens"]
    found: dict[str, np.ndarray] = {}
    state: dict[str, Any] = {}
    for arm in ("reference", "stock", "patched"):
        within: AbstractContextManager[Any] = patched(enabled=arm == "patched", gate="off")
        with within:
            model, tokenizer, _, _ = loading.load(path)
            if path is None:
                nn.quantize(model, group_size=64, bits=4)
            model = exact(model) if arm == "reference" else model
            found[arm] = logits(model, mx.array([prompt_ids(tokenizer, count, 1, None)]))
            state = status()
    return {
        "figures": {
            "tokens": count,
            **judge("stock", found["stock"], found["reference"]),
            **judge("patched", found["patched"], found["reference"]),
            **judge("patched against stock", found["patched"], found["stock"]),
            "split calls": state["calls"].get("split", 0),
            "eligible": state["eligible"],
        }
    }


EXPERIMENT = Experiment(
    name="agreement",
    title="Logits of stock and patched against the dequantised checkpoint",
    paper="beyond the paper",
    cells=cells,
    measure=measure,
    memory=memory,
    samples=(1, 0),
    arguments=arguments,
    processes=1,
)
