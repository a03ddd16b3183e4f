"""The experiments on quantised models and mixtures of experts measure what they say."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from models import tiny

from benchmarks import agreement, experiment, kinds
from benchmarks.experiment import Options
from fusionml import loading

FEW = Options(quick=True, samples=1, warm_ups=0)


def test_every_architecture_has_a_dense_and_a_quantised_cell_and_decoding_is_left_to_the_full_run() -> None:
    quick, full = kinds.cells(FEW), kinds.cells(Options())
    assert {name.split(",")[0] for name in full} == {name.split(",")[0] for name in quick}
    for kind in kinds.CONFIGS:
        assert {f"{kind} dense, decode", f"{kind} 4-bit, decode"} <= set(full)
    assert not any("decode" in name for name in quick)


@pytest.mark.parametrize("name", ["llama 6-bit, prompt", "qwen3_moe 4-bit, prompt"])
def test_the_patched_arm_splits_and_the_stock_arm_does_not(name: str) -> None:
    cell = kinds.measure(kinds.cells(FEW)[name], FEW)
    assert cell["figures"]["calls"]["split"] > 0
    assert cell["errors"]["patched"] <= kinds.TOLERANCE
    assert set(cell["arms"]) == {"stock", "patched", "stock again"}


def test_decoding_splits_nothing() -> None:
    cell = kinds.measure({"kind": "mixtral", "bits": 4, "prompt": 300, "tokens": 3, "phase": "decode"}, FEW)
    assert cell["figures"]["calls"] == {}
    assert cell["errors"]["patched"] == 0


def test_the_reference_is_what_the_checkpoint_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock on the very weights, dequantised by hand in float32, at every position."""

    class Tokenizer:
        def encode(self, text: str, **options: Any) -> list[int]:
            return [ord(letter) % 160 for letter in text]

    def load(path: str | None) -> Any:
        model = tiny("llama")
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, group_size=32, bits=4)
        model.eval()
        from fusionml import patching

        patching.session().known.add(model, from_loader=True)
        return model, Tokenizer(), {}, "tiny"

    monkeypatch.setattr(loading, "load", load)
    figures = agreement.measure({"model": "a checkpoint", "tokens": 300}, FEW)["figures"]
    packed, by_hand = load(None)[0], tiny("llama")
    for (_, theirs), (_, mine) in zip(packed.named_modules(), by_hand.named_modules(), strict=True):
        if "scales" in theirs:
            wide = [theirs[name].astype(mx.float32) for name in ("scales", "biases")]
            mine.weight = mx.dequantize(theirs.weight, *wide, theirs.group_size, theirs.bits)
    ids = mx.array([agreement.prompt_ids(Tokenizer(), 300, 1, None)])
    truth, stock = np.array(by_hand(ids)[0]), np.array(packed(ids)[0].astype(mx.float32))
    expected = np.abs(stock - truth).max() / np.abs(truth).max()
    assert figures["stock: error"] == pytest.approx(expected, rel=1e-3)
    assert figures["stock: agreement"] == pytest.approx((stock.argmax(-1) == truth.argmax(-1)).mean())
    assert figures["split calls"] > 0
    assert figures["patched: error"] <= 1.25 * figures["stock: error"]


def test_both_are_experiments() -> None:
    for name in ("kinds", "agreement"):
        assert experiment.load(name).name == name
