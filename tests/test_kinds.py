"""Quantised layers, layers of experts and what stays stock, through the patch, against stock MLX-LM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from graphs import evaluated
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import pair, tiny, tokens
from stock import answer, assert_same, checkpoint, split_layers, stock_and_patched

import fusionml
from fusionml import experts, forwards, loading, products, quantized
from fusionml.calibrate import calibrate, shapes
from fusionml.known import Layer
from fusionml.session import Session, open_table, site_of
from fusionml.table import Entry

ALL: dict[str, Any] = {"quantized": True, "moe": True}
PROMPT = 70
"""Tokens of a prompt: with two experts each, enough that MLX-LM sorts them."""
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss")


def prompt(count: int = PROMPT) -> list[int]:
    return tokens(count)[0].tolist()


def quantised(model: nn.Module, *, bits: int = 4, group_size: int = 32, **options: Any) -> nn.Module:
    nn.quantize(model, group_size=group_size, bits=bits, **options)
    mx.eval(model.parameters())
    return model


def kinds() -> dict[str, int]:
    """Sites that split, by their kind."""
    sites = fusionml.status()["sites"]
    found: dict[str, int] = {}
    for key, site in sites.items():
        if site["arm"] == "split":
            found[key.split("/")[0]] = found.get(key.split("/")[0], 0) + 1
    return found


# --- whole models


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "4-bit"])
@pytest.mark.parametrize("kind", EXPERTS)
def test_a_mixture_of_experts_answers_as_stock_does(kind: str, packed: bool) -> None:
    model = tiny(kind)
    if packed:
        quantised(model, class_predicate=lambda path, module: hasattr(module, "to_quantized"))
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt()), **ALL)
    assert_same(ours, truth)
    assert any(name.startswith("experts") for name in kinds()), fusionml.status()["sites"]
    layers = split_layers(model)
    assert any("experts" in path or "switch_mlp" in path for path in layers), layers


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_quantised_model_splits_everywhere_a_dense_one_does(bits: int, dtype: mx.Dtype) -> None:
    dense, packed = tiny("llama"), tiny("llama")
    packed.set_dtype(dtype)
    quantised(packed, bits=bits)
    fusionml.patch(dense, min_rows=16, ratio=0.4)
    fusionml.patch(packed)
    try:
        for model in (dense, packed):
            mx.eval(model(tokens(40)))
        assert set(split_layers(packed)) == set(split_layers(dense)) != set()
    finally:
        fusionml.unpatch()


def test_a_quantised_float32_model_answers_as_stock_does() -> None:
    model = quantised(tiny("qwen2"))
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(40)), **ALL)
    assert_same(ours, truth)
    assert set(kinds()) == {"quantized"}


@pytest.mark.parametrize("form", quantized.FORMS)
def test_half_precision_scales_are_no_further_from_the_truth_than_stock(form: str, session: Session) -> None:
    """The truth is the same model dequantised in float32, run by stock."""
    model = tiny("llama")
    model.set_dtype(mx.bfloat16)
    quantised(model)
    exact = tiny("llama")
    quantised(exact)
    exact.update(model.parameters())
    exact.set_dtype(mx.float32)
    ids = tokens(40)
    truth, stock = np.array(exact(ids)), np.array(model(ids).astype(mx.float32))
    fusionml.patch(model, min_rows=16, ratio=0.4)
    try:
        if form == "quantised":
            forms_only(session, form)
        ours = np.array(model(ids).astype(mx.float32))
    finally:
        fusionml.unpatch()
    assert fusionml.status()["calls"]["split"] > 0
    assert {site["form"] for site in fusionml.status()["sites"].values()} == {form}
    assert np.abs(ours - truth).max() <= 1.25 * np.abs(stock - truth).max()


def forms_only(session: Session, form: str) -> None:
    """Every site splits in this form."""
    new = session._new_control

    def control(*args: Any) -> Any:
        made = new(*args)
        object.__setattr__(made.plan, "form", form)
        return made

    session._new_control = control  # type: ignore[method-assign]


@pytest.mark.parametrize("bits", [6, 8])
def test_a_conversion_of_mlx_lm_answers_as_stock_does(bits: int, tmp_path: Path) -> None:
    folder, packed = checkpoint(tmp_path), tmp_path / "packed"
    mlx_lm.convert(str(folder), str(packed), quantize=True, q_group_size=32, q_bits=bits)
    same_when_loaded(packed)


def test_mixed_precision_answers_as_stock_does(tmp_path: Path) -> None:
    folder, packed = checkpoint(tmp_path), tmp_path / "packed"

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if "down_proj" in path:
            return {"group_size": 32, "bits": 8}
        return "o_proj" not in path

    mlx_lm.convert(
        str(folder), str(packed), quantize=True, q_group_size=32, q_bits=4, quant_predicate=predicate
    )
    sites = same_when_loaded(packed)
    assert {key.split("/")[1] for key in sites} == {"u4g32-float32", "u8g32-float32", "float32"}


def test_a_model_whose_head_alone_is_quantised_splits_its_dense_layers(tmp_path: Path) -> None:
    folder, packed = checkpoint(tmp_path), tmp_path / "packed"
    mlx_lm.convert(
        str(folder),
        str(packed),
        quantize=True,
        q_group_size=32,
        quant_predicate=lambda path, module: "lm_head" in path,
    )
    sites = same_when_loaded(packed)
    assert {key.split("/")[0] for key in sites} == {"linear"}


def same_when_loaded(folder: Path) -> dict[str, Any]:
    """Stock and patched on a checkpoint, loaded as a user does; the sites that split."""
    truth = answer(mlx_lm.load(str(folder))[0], prompt(40))
    with fusionml.patched(min_rows=16, ratio=0.4):
        model = mlx_lm.load(str(folder))[0]
        ours = answer(model, prompt(40))
        state = fusionml.status()
    assert_same(ours, truth)
    assert state["calls"]["split"] > 0
    return dict(state["sites"])


# --- which calls of experts are prefill


def routed(model: nn.Module, batch: int, length: int) -> dict[str, int]:
    """Calls by arm of one forward pass, of the expert layers alone."""
    fusionml.patch(model, min_rows=64, ratio=0.4)
    seen: dict[str, int] = {}
    count = Session.count

    def spy(self: Session, arm: str, layer: Layer, rows: int, reason: str | None = None) -> None:
        if layer.experts:
            seen[arm] = seen.get(arm, 0) + 1
            assert rows == batch * length
        count(self, arm, layer, rows, reason)

    Session.count = spy  # type: ignore[method-assign]
    try:
        mx.eval(model(tokens(length, batch)))
    finally:
        Session.count = count  # type: ignore[method-assign]
        fusionml.unpatch()
    return seen


def test_a_decode_batch_with_many_routed_rows_is_stock() -> None:
    model = tiny("qwen3_moe", num_experts_per_tok=8)
    assert routed(model, 64, 1) == {}, "512 routed rows, and one token of each sequence"


def test_a_prompt_with_too_few_tokens_is_stock_however_many_rows_it_makes() -> None:
    model = tiny("qwen3_moe", num_experts_per_tok=8)
    assert routed(model, 1, 63) == {}
    assert routed(model, 1, 64) == {"split": 6, "stock": 3}, "the last block is behind the last cache"
    assert routed(model, 4, 16) == {"split": 6}, "that the last block stands down is remembered"


def test_a_layer_of_experts_called_by_others_is_stock(patch: Any) -> None:
    """Who sorts rows of their own says nothing of tokens."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = SwitchLinear(128, 128, 4)

        def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
            return self.layer(x, indices, sorted_indices=True)

    model = Own()
    model.eval()
    x, indices = mx.random.normal((64, 1, 128)), mx.array(np.repeat(np.arange(4), 16))
    truth = model(x, indices)
    patch(model, min_rows=16, ratio=0.4)
    assert mx.array_equal(model(x, indices), truth)
    assert fusionml.status()["calls"] == {}


def test_what_a_block_noted_is_gone_after_an_error(session: Session, patch: Any) -> None:
    block = SwitchGLU(128, 128, 4)
    block.eval()
    patch(block, min_rows=16, ratio=0.4)
    with pytest.raises(ValueError, match=r"shape|dim"):
        block(mx.zeros((1, 64, 100)), mx.zeros((1, 64, 2), mx.uint32))
    assert session.routed() is None


def test_experts_in_half_precision_fail_on_a_cpu_as_they_do_in_stock() -> None:
    if mx.default_device() == mx.gpu:
        pytest.skip("needs a machine whose default device is the CPU")
    model = tiny("mixtral")
    model.set_dtype(mx.bfloat16)
    errors = []
    for patch in (False, True):
        if patch:
            fusionml.patch(model, min_rows=16, ratio=0.4)
        with pytest.raises(Exception) as caught:  # noqa: PT011 - MLX's own, whichever it is
            mx.eval(model(tokens(PROMPT)))
        errors.append((type(caught.value), str(caught.value).split(" at ")[0]))
    fusionml.unpatch()
    assert errors[0] == errors[1]


# --- settings, and what stays stock


@pytest.mark.parametrize(
    ("setting", "reason"),
    [("quantized", "quantised, and quantized=False"), ("moe", "of experts, and moe=False")],
)
def test_a_setting_keeps_a_kind_stock_and_says_so(setting: str, reason: str) -> None:
    model = tiny("mixtral")
    quantised(
        model,
        class_predicate=lambda path, m: hasattr(m, "to_quantized") and (setting == "moe") != ("self" in path),
    ) if setting == "quantized" else None
    with fusionml.patched(min_rows=16, ratio=0.4, **{setting: False}):
        fusionml.patching.session().known.add(model, from_loader=True)
        mx.eval(model(tokens(PROMPT)))
        state = fusionml.status()
    assert state["skipped"][reason] > 0
    assert state["reasons"][reason] > 0
    assert 0 < state["eligible"] < 1
    assert not any(reason in site["why"] for site in state["sites"].values())
    word = "quantized" if setting == "quantized" else "experts"
    assert not any(key.startswith(word) for key in state["sites"])


class Subclass(nn.QuantizedLinear):
    """Arithmetic of its own."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * super().__call__(x)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_other_modes_are_stock_and_counted(mode: str, patch: Any) -> None:
    model = pair()
    defaults = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
    group_size, bits = defaults[mode]
    nn.quantize(model, group_size=group_size, bits=bits, mode=mode)
    x = mx.random.normal((1, 64, 128))
    truth = model(x)
    patch(model, min_rows=16, ratio=0.4)
    assert mx.array_equal(model(x), truth)
    state = fusionml.status()
    assert state["skipped"] == {f"quantised as {mode}: not split": 2}
    assert state["eligible"] == 0


def test_a_subclass_is_stock_and_counted(patch: Any) -> None:
    model = pair()
    own = Subclass(128, 256)
    model.up = own
    model.eval()
    x = mx.random.normal((1, 64, 128))
    truth = model(x)
    patch(model, min_rows=16, ratio=0.4)
    assert mx.allclose(model(x), truth, atol=1e-4)
    assert fusionml.status()["skipped"] == {"Subclass: not split": 1}


class Foreign(nn.Module):
    """Scales, and a notion of bits of its own."""

    def __init__(self, bits: Any) -> None:
        super().__init__()
        self.weight, self.scales, self.bits = mx.zeros((128, 128)), mx.zeros((128, 2)), bits


@pytest.mark.parametrize("bits", [None, "4", 0, 1.58])
def test_what_others_mean_by_bits_costs_a_model_nothing(bits: Any, patch: Any) -> None:
    model = pair()
    model.foreign = Foreign(bits)
    x = mx.random.normal((1, 64, 128))
    truth = model(x)
    patch(model, min_rows=16, ratio=0.4)
    assert mx.allclose(model(x), truth, atol=1e-4)
    state = fusionml.status()
    assert state["calls"] == {"split": 2}
    assert state["skipped"] == {"Foreign: not split": 1}
    assert state["eligible"] == pytest.approx(4 / 5), "128 x 128 beside two of 128 x 256"


# --- arms


@pytest.mark.parametrize("kind", ["linear", "quantized", "experts"])
def test_what_is_charged_is_what_is_waited_for(kind: str) -> None:
    """Each arm waits for its input; one whose result is real when it returns waited for that too."""
    layer = SwitchLinear(128, 128, 4) if kind == "experts" else nn.Linear(128, 128)
    layer = layer if kind == "linear" else layer.to_quantized(32, 4)
    x, indices = mx.random.normal((64, 1, 128)), mx.array(np.repeat(np.arange(4), 16))
    mx.eval(layer.parameters(), x, indices)
    product = products.of(kind, layer, x, indices)
    for form in products.forms(kind, kind != "linear", "metal"):
        out = product.split(32, form, "eager", "native")
        assert products.boundaries(kind, form) == 1 + evaluated(out), form
    if kind != "linear":
        assert products.boundaries(kind, None) == 1 + evaluated(product.dense("eager"))


def entry(**changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "ratio": 0.5,
        "gain": 9.0,
        "when": "2026-08-01T12:00:00+00:00",
        "spread": 0.01,
        "power": None,
        "samples": 30,
        "cpu_dtype": "native",
        "per_row": 1e-4,
        "dense_per_row": 2e-5,
    }
    return Entry(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "arm", "form"),
    [
        ({}, "split", "dense"),
        ({"form": "quantised"}, "split", "quantised"),
        ({"ratio": 0.0, "dense": True, "gain": 4.0}, "dense", None),
        ({"ratio": 0.0, "gain": 0.0}, "stock", None),
        ({"form": "of another version"}, "split", "dense"),
    ],
)
def test_a_table_says_which_arm_and_form_a_site_takes(
    changes: dict[str, Any], arm: str, form: str | None, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONML_GATE", "auto")
    model = quantised(pair())
    x = mx.random.normal((1, 64, 128))
    truth = model(x)
    table = session.table("cpu" if mx.default_device() == mx.cpu else "metal")
    layer = Layer(lambda: None, "quantized", 128, 256, True, packed="u4g32")  # type: ignore[arg-type]
    for shape in (layer, Layer(lambda: None, "quantized", 256, 128, packed="u4g32")):  # type: ignore[arg-type]
        table.put(site_of(shape, mx.float32, 64), entry(**changes))
    fusionml.patch(model, min_rows=16)
    try:
        out = model(x)
        states = fusionml.status()["sites"].values()
    finally:
        fusionml.unpatch()
    assert mx.allclose(out, truth, atol=1e-3)
    if changes.get("form") == "of another version":
        assert all("learning" in state["why"] for state in states), "nothing was measured that holds"
        return
    assert {(state["arm"], state["form"]) for state in states} == {(arm, form)}
    for state in states:
        arms = set() if state["gate"] is None else set(state["gate"]["estimates"])
        expected = {"stock": set(), "dense": {"stock", "dense"}, "split": {"stock", "dense", "split"}}
        assert arms == expected[arm]


@pytest.mark.parametrize("packed", [True, False])
def test_a_site_learns_over_all_its_arms_and_stays_right(
    packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every arm and form is timed once at least, each answers as stock does, and one is chosen."""
    monkeypatch.setenv("FUSIONML_GATE", "auto")
    monkeypatch.setattr("fusionml.sites.LEARNING_SHARE", 1e9)
    model = tiny("mixtral")
    if packed:
        quantised(model)
    truth = model(tokens(PROMPT))
    jobs = set()
    timed = forwards.timed

    def spy(session: Session, call: Any, *rest: Any) -> Any:
        jobs.add((call.known.kind, call.job.arm, call.job.form if call.job.arm == "split" else None))
        return timed(session, call, *rest)

    monkeypatch.setattr(forwards, "timed", spy)
    fusionml.patch(model, min_rows=16)
    try:
        for _ in range(120):
            assert mx.allclose(model(tokens(PROMPT)), truth, atol=1e-3)
            if not fusionml.patching.session().learning():
                break
    finally:
        fusionml.unpatch()
    kind = "quantized" if packed else "linear"
    forms = {"experts": set(experts.FORMS) if packed else {"gather", "each"}, kind: {"dense"}}
    forms[kind] |= {"quantised"} if packed else set()
    for each, expected in forms.items():
        assert {(each, "stock", None)} <= jobs
        assert ((each, "dense", None) in jobs) == (each != "linear")
        assert {form for k, arm, form in jobs if k == each and arm == "split"} <= expected


def fails(*args: Any) -> Any:
    raise RuntimeError("out of memory, say")


@pytest.mark.parametrize("name", ["dense", "dense_parts"])
def test_an_arm_that_fails_is_tried_once_and_the_others_are_learned(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSIONML_GATE", "auto")
    monkeypatch.setattr("fusionml.sites.LEARNING_SHARE", 1e9)
    monkeypatch.setattr(quantized, name, fails)
    model, x = quantised(pair()), mx.random.normal((1, 64, 128))
    truth = model(x)
    fusionml.patch(model, min_rows=16)
    try:
        for _ in range(1000):  # a noisy machine needs more samples
            assert mx.allclose(model(x), truth, atol=1e-3)
            if not fusionml.patching.session().learning():
                break
        state = fusionml.status()
        assert not any("learning" in site["why"] for site in state["sites"].values())
    finally:
        fusionml.unpatch()
    assert state["reasons"]["a split that failed"] == 2, "once for each of the two sites"


# --- the calibrator and configurations


def test_what_fails_leaves_the_other_arms_and_sites_to_the_calibrator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantized, "dense_parts", fails)
    outcomes = calibrate(quantised(tiny("llama")), rows=[64], budget=60.0)
    assert all(outcome.found is not None for outcome in outcomes)
    assert all("out of memory" in str(outcome.left_out) for outcome in outcomes)


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="a GPU gathers experts in half precision")
def test_experts_that_stock_cannot_compute_are_left_out_by_the_calibrator() -> None:
    model = tiny("qwen3_moe")
    model.set_dtype(mx.bfloat16)
    outcomes = {o.site.kind: o for o in calibrate(model, rows=[64], budget=60.0)}
    assert outcomes["linear"].found is not None
    assert "only supports float32" in str(outcomes["experts8top2"].left_out)


def test_the_calibrator_covers_every_kind(tmp_path: Path) -> None:
    model = quantised(tiny("qwen3_moe"))
    table = open_table(str(tmp_path / "ratios.json"))
    outcomes = calibrate(model, rows=[64], budget=60.0, table=table)
    assert {outcome.site.kind for outcome in outcomes} == {"quantized", "experts8top2"}
    assert all(outcome.found is not None for outcome in outcomes)
    assert {site.dtype for site in table.entries()} == {"u4g32-float32"}


def test_what_was_calibrated_is_what_a_prompt_looks_up(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantised(tiny("mixtral"))
    expected = {shape.site(64).key() for shape in shapes(model)}
    fusionml.patch(model, min_rows=16, ratio=0.4)
    try:
        mx.eval(model(tokens(64)))
        assert set(fusionml.status()["sites"]) == expected
    finally:
        fusionml.unpatch()


def test_a_configuration_says_how_its_layers_are_quantised(tmp_path: Path) -> None:
    model_folder = checkpoint(tmp_path)
    config = json.loads((model_folder / "config.json").read_text())
    config["quantization"] = {
        "group_size": 32,
        "bits": 4,
        "model.layers.0.mlp.down_proj": {"group_size": 64, "bits": 8},
        "model.layers.1.mlp.down_proj": False,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    model, made_up, _ = loading.from_config(str(path))
    found = {(shape.kind, shape.packed) for shape in shapes(model, made_up)}
    assert found == {("quantized", "u4g32"), ("quantized", "u8g64"), ("linear", "")}
    outcomes = calibrate(model, rows=[32], budget=60.0, made_up=made_up)
    assert {outcome.site.kind for outcome in outcomes} == {"quantized", "linear"}
    assert any(outcome.found is not None for outcome in outcomes)


def test_the_status_says_how_much_of_the_prompt_phase_may_split(session: Session) -> None:
    """By arithmetic: an expert layer counts as often as a token goes through it."""
    model = quantised(tiny("qwen3_moe"))
    with fusionml.patched(min_rows=16, ratio=0.4):
        session.known.add(model, from_loader=True)
        mx.eval(model(tokens(PROMPT)))
        state = fusionml.status()
    attention, experts_each, router = 4 * 128 * 128, 2 * 3 * 128 * 128, 128 * 8
    assert state["eligible"] == pytest.approx(1 - router / (attention + experts_each + router))
    assert state["skipped"]["narrower than 128"] == 2


@pytest.mark.parametrize("kind", [*EXPERTS, "qwen3_next"])
def test_how_often_a_token_meets_an_expert_is_seen_without_a_prompt(kind: str, session: Session) -> None:
    """Also among convolutions and latent attention, whose weights have three dimensions too."""
    model = tiny(kind)
    with fusionml.patched(min_rows=16, ratio=0.4):
        session.known.add(model, from_loader=True)
        session.observe(model)
        before = fusionml.status()["eligible"]
        assert {layer.top for layer in session.known.layers() if layer.kind == "experts"} == {2}
        mx.eval(model(tokens(PROMPT)))
        assert fusionml.status()["eligible"] == before


def test_a_layer_of_many_weights_counts_as_often_as_a_token_goes_through_it(session: Session) -> None:
    model = tiny("deepseek_v3")
    session.known.add(model, from_loader=True)
    heads, latent, each = 4, 128, 32
    counted = {layer.arithmetic for layer in session.known.layers() if layer.kind == "MultiLinear"}
    assert counted == {heads * latent * each}


def test_adapted_experts_are_calibrated_where_a_prompt_looks_them_up() -> None:
    """An adapter stands between the block that routes and the layer of experts."""
    model = tiny("qwen3_moe")
    plain = {shape.site(64) for shape in shapes(model)}
    keys = ["mlp.switch_mlp.gate_proj", "mlp.switch_mlp.down_proj", "self_attn.q_proj"]
    linear_to_lora_layers(model, 3, {"rank": 8, "scale": 10.0, "dropout": 0.0, "keys": keys})
    model.eval()
    assert {shape.site(64) for shape in shapes(model)} == plain
