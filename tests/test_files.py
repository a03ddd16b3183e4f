"""Saving, converting, quantising, fusing and copying a patched model, against stock MLX-LM's own files."""

import copy
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.fuse
import pytest
from mlx.utils import tree_flatten
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import tiny, tokens
from stock import SETTINGS, answer, assert_same, checkpoint, split_calls, split_layers, stock_and_patched

import fusionml

PROMPT = tokens(70)[0].tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float32 Llama on disk."""
    return checkpoint(tmp_path_factory.mktemp("llama"))


def used(path: Path) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A model that was loaded and has answered; patched if we are, and then it split."""
    model, tokenizer, config = load(str(path), return_config=True)
    answer(model, PROMPT)
    assert bool(split_layers(model)) == fusionml.status()["patched"]
    return model, tokenizer, config


def same_files(write: Callable[[Path], object], tmp_path: Path) -> Path:
    """What `write(folder)` writes while patched must be what it writes without us; returns our folder.

    To the byte, except for a file that stock itself does not write twice alike.
    """
    first, second, ours = (tmp_path / name for name in ("stock", "stock_again", "ours"))
    write(first)
    write(second)
    with fusionml.patched(**SETTINGS):
        write(ours)
    names = sorted(path.name for path in first.iterdir())
    assert sorted(path.name for path in ours.iterdir()) == names
    assert any(name.endswith(".safetensors") for name in names)
    for name in names:
        bytes_now = [(of / name).read_bytes() for of in (first, second, ours)]
        if bytes_now[0] == bytes_now[1]:
            assert bytes_now[2] == bytes_now[0], name
        else:
            _same_content(first / name, ours / name)
    return ours


def _same_content(stock: Path, ours: Path) -> None:
    assert stock.suffix == ".safetensors", f"{stock.name} is not the same twice"
    truth, got = mx.load(str(stock)), mx.load(str(ours))
    assert list(got) == list(truth)
    assert all(bool(mx.array_equal(got[name], truth[name])) for name in truth)


def test_saving_a_model_that_has_answered(folder: Path, tmp_path: Path) -> None:
    def write(target: Path) -> None:
        model, tokenizer, config = used(folder)
        mlx_lm.utils.save(target, folder, model, tokenizer, config, donate_model=False)

    ours = same_files(write, tmp_path)
    # And either reads what the other wrote.
    truth, got = stock_and_patched(load(str(folder))[0], lambda: answer(load(str(ours))[0], PROMPT))
    assert_same(got, truth)


def test_saving_weights_by_mlx_alone(folder: Path, tmp_path: Path) -> None:
    def write(target: Path) -> None:
        target.mkdir()
        used(folder)[0].save_weights(str(target / "weights.safetensors"))

    same_files(write, tmp_path)


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16"},
        {"quantize": True, "q_group_size": 32, "q_bits": 4},
        {"quantize": True, "q_group_size": 32, "q_bits": 4, "quant_predicate": "mixed_3_6"},
        {"quantize": True, "q_mode": "mxfp8"},
    ],
)
def test_converting(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    same_files(lambda target: mlx_lm.convert(str(folder), str(target), **options), tmp_path)


def test_dequantising(folder: Path, tmp_path: Path) -> None:
    quantised = tmp_path / "quantised"
    mlx_lm.convert(str(folder), str(quantised), quantize=True, q_group_size=32, q_bits=8)
    same_files(lambda target: mlx_lm.convert(str(quantised), str(target), dequantize=True), tmp_path)


def test_quantising_a_model_that_has_answered(folder: Path, tmp_path: Path) -> None:
    answers = []

    def write(target: Path) -> None:
        model, tokenizer, config = used(folder)
        model, config = mlx_lm.utils.quantize_model(model, config, group_size=32, bits=8)
        answers.append(answer(model, PROMPT))
        mlx_lm.utils.save(target, folder, model, tokenizer, config, donate_model=False)

    same_files(write, tmp_path)
    assert_same(answers[-1], answers[0])


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_fusing_adapters(folder: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlx_lm.fuse` itself, on adapters as `mlx_lm.lora` saves them."""
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    model, _ = load(str(folder))
    model.freeze()
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, parameters, use_dora=kind == "dora")
    mx.random.seed(3)
    trained = tree_flatten(model.trainable_parameters())
    weights = {name: mx.abs(mx.random.normal(a.shape)) * 0.1 for name, a in trained}
    mx.save_safetensors(str(adapters / "adapters.safetensors"), weights)
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": parameters}
    (adapters / "adapter_config.json").write_text(json.dumps(settings))

    def write(target: Path) -> None:
        arguments = ["--model", folder, "--adapter-path", adapters, "--save-path", target]
        monkeypatch.setattr(sys, "argv", ["mlx_lm.fuse", *map(str, arguments)])
        mlx_lm.fuse.main()

    same_files(write, tmp_path)


def _state(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, type(value).__name__) for name, value in tree_flatten(model.state)]


def test_nothing_is_left_on_a_model(patch: Any) -> None:
    """No parameter, no attribute and no other class: a module is a dictionary, and it is saved as it is."""
    model = tiny("llama")

    def seen() -> Any:
        modules = dict(model.named_modules())
        return (
            repr(model),
            _state(model),
            {path: (type(m), sorted(m), sorted(vars(m))) for path, m in modules.items()},
            [id(layer) for layer in modules.values()],
        )

    before = seen()
    patch(model, **SETTINGS)
    answer(model, PROMPT)
    assert split_calls() > 0
    assert seen() == before


def test_deep_copies(patch: Any) -> None:
    model = tiny("llama")
    truth = answer(model, PROMPT)
    patch(model, **SETTINGS)
    assert_same(answer(model, PROMPT), truth)
    twin = copy.deepcopy(model)
    assert _state(twin) == _state(model)
    assert type(twin.layers[0].mlp.up_proj) is nn.Linear
    assert_same(answer(twin, PROMPT), truth)
    # They share nothing: what becomes of one is not seen in the other.
    twin.layers[0].mlp.up_proj.weight = twin.layers[0].mlp.up_proj.weight * 0
    assert_same(answer(model, PROMPT), truth)


def test_pickles(patch: Any) -> None:
    model = tiny("llama").layers[0].mlp
    truth = pickle.dumps(model)
    patch(model, **SETTINGS)
    x = mx.random.normal((1, 40, 128))
    y = model(x)
    assert split_calls() > 0
    assert pickle.dumps(model) == truth
    back = pickle.loads(truth)
    assert _state(back) == _state(model)
    assert mx.allclose(back(x), y, atol=1e-5)


def test_new_weights_in_a_known_model_count_at_once(folder: Path, patch: Any) -> None:
    """Loading other weights, another type or a change by hand: what is remembered of a layer is no weight."""
    model, _ = load(str(folder))
    patch(model, **SETTINGS)
    answer(model, PROMPT)
    mx.random.seed(9)
    changed = [(name, a + 0.02 * mx.random.normal(a.shape)) for name, a in tree_flatten(model.parameters())]
    model.load_weights(changed)
    ours = answer(model, PROMPT)
    model.set_dtype(mx.bfloat16)
    half = answer(model, PROMPT)
    fusionml.unpatch()
    fresh, _ = load(str(folder))
    before = answer(fresh, PROMPT)
    fresh.load_weights(changed)
    truth = answer(fresh, PROMPT)
    assert abs(truth.logprobs - before.logprobs).max() > 0.05
    assert_same(ours, truth)
    fresh.set_dtype(mx.bfloat16)
    assert_same(half, answer(fresh, PROMPT), 6e-2)


def test_lazy_weights_are_read_when_they_are_needed(folder: Path, patch: Any) -> None:
    truth = answer(load(str(folder))[0], PROMPT)
    patch(**SETTINGS)
    model, _ = load(str(folder), lazy=True)
    assert_same(answer(model, PROMPT), truth)
    assert split_layers(model)
