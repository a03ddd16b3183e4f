"""Adapters and fine-tuning with the patch on, against stock MLX-LM's own losses and answers."""

import functools
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm import load
from mlx_lm.tuner.trainer import TrainingArgs, default_loss, grad_checkpoint, train
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from models import tiny, tokens
from stock import SETTINGS, answer, assert_same, checkpoint, split_calls, split_layers, stock_and_patched

import fusionml

PARAMETERS = {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": ["self_attn.q_proj", "mlp.up_proj"]}
KINDS = ["lora", "dora"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float32 Llama on disk."""
    return checkpoint(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, Path]:
    """Trained-looking adapters for it, one folder a kind."""
    return {kind: _adapter(tmp_path_factory.mktemp(kind), folder, kind) for kind in KINDS}


def _adapter(home: Path, folder: Path, kind: str) -> Path:
    model, _ = load(str(folder))
    model.freeze()
    linear_to_lora_layers(model, 3, PARAMETERS, use_dora=kind == "dora")
    mx.random.seed(5)
    weights = {
        name: mx.random.normal(a.shape) * 0.1 for name, a in tree_flatten(model.trainable_parameters())
    }
    if kind == "dora":
        weights = {name: mx.abs(a) + 1 if name.endswith(".m") else a for name, a in weights.items()}
    mx.save_safetensors(str(home / "adapters.safetensors"), weights)
    settings = {"fine_tune_type": kind, "num_layers": 3, "lora_parameters": PARAMETERS}
    (home / "adapter_config.json").write_text(json.dumps(settings))
    return home


PROMPT = tokens(80)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_loaded_before_the_patch(folder: Path, adapters: dict[str, Path], kind: str) -> None:
    model, _ = load(str(folder), adapter_path=str(adapters[kind]))
    truth, ours = stock_and_patched(model, lambda: answer(model, PROMPT))
    assert_same(ours, truth)
    # LoRA calls the layer that it wraps; DoRA multiplies by itself.
    assert ("model.layers.0.self_attn.q_proj.linear" in split_layers(model)) == (kind == "lora")


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_loaded_while_patched(
    folder: Path, adapters: dict[str, Path], kind: str, patch: Any
) -> None:
    model, _ = load(str(folder), adapter_path=str(adapters[kind]))
    truth, plain = answer(model, PROMPT), answer(load(str(folder))[0], PROMPT)
    patch(**SETTINGS)
    loaded, _ = load(str(folder), adapter_path=str(adapters[kind]))
    assert_same(answer(loaded, PROMPT), truth)
    assert ("model.layers.0.mlp.up_proj.linear" in split_layers(loaded)) == (kind == "lora")
    # And onto a model that has answered already.
    later, _ = load(str(folder))
    assert_same(answer(later, PROMPT), plain)
    load_adapters(later, str(adapters[kind])).eval()
    assert_same(answer(later, PROMPT), truth)
    assert split_layers(later)


@pytest.mark.parametrize("kind", KINDS)
def test_fused_adapters_split_again(folder: Path, adapters: dict[str, Path], kind: str) -> None:
    """Fusing replaces layers of a known model by new ones."""

    def fused_after(first: Any) -> Any:
        model, _ = load(str(folder), adapter_path=str(adapters[kind]))
        if first is not None:
            first(model)
        model.update_modules(
            tree_unflatten([(name, m.fuse()) for name, m in model.named_modules() if hasattr(m, "fuse")])
        )
        model.eval()
        return model, answer(model, PROMPT)

    _, truth = fused_after(None)
    with fusionml.patched(**SETTINGS):
        model, ours = fused_after(lambda model: answer(model, PROMPT))
        layers = split_layers(model)
    assert_same(ours, truth)
    assert layers["model.layers.0.mlp.up_proj"] == len(PROMPT) - 1


class _Losses:
    """MLX-LM's training callback."""

    def __init__(self) -> None:
        self.train: list[float] = []
        self.validation: list[float] = []

    def on_train_loss_report(self, report: dict[str, Any]) -> None:
        self.train.append(report["train_loss"])

    def on_val_loss_report(self, report: dict[str, Any]) -> None:
        self.validation.append(report["val_loss"])


DATA = [(row, 0) for row in tokens(64, batch=8).tolist()]


def _fine_tune(home: Path, kind: str, checkpointed: bool, validation: Any, patched: bool) -> Any:
    """Four steps of MLX-LM's own trainer; its losses and the adapters it saved."""
    model = tiny("llama", num_hidden_layers=2)
    if patched:
        fusionml.patch(model, **SETTINGS)
    model.freeze()
    mx.random.seed(1)
    linear_to_lora_layers(model, 2, PARAMETERS, use_dora=kind == "dora")
    np.random.seed(2)
    losses = _Losses()
    args = TrainingArgs(
        batch_size=2,
        iters=4,
        steps_per_report=1,
        steps_per_eval=4,
        val_batches=1,
        adapter_file=str(home / "adapters.safetensors"),
        grad_checkpoint=checkpointed,
    )
    train(model, optim.SGD(0.5), DATA, val_dataset=validation, args=args, training_callback=losses)
    return model, losses, mx.load(args.adapter_file)


@pytest.fixture
def blocks_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX-LM's gradient checkpointing replaces the call of the block's class for good; undo it."""
    block = type(tiny("llama", num_hidden_layers=1).layers[0])
    monkeypatch.setattr(block, "__call__", block.__call__)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("blocks_restored")
def test_four_steps_of_fine_tuning_give_the_same_losses(
    kind: str, checkpointed: bool, tmp_path: Path, patch: Any
) -> None:
    _, truth, truth_adapters = _fine_tune(tmp_path, kind, checkpointed, None, patched=False)
    model, ours, our_adapters = _fine_tune(tmp_path, kind, checkpointed, None, patched=True)
    assert len(truth.train) == 4
    assert len(set(truth.train)) == 4
    assert ours.train == truth.train
    assert split_calls() == 0
    assert fusionml.status()["reasons"]["in training"] > 0
    assert our_adapters.keys() == truth_adapters.keys()
    assert all(bool(mx.array_equal(our_adapters[name], truth_adapters[name])) for name in truth_adapters)
    # And what was trained still splits its prompts.
    model.eval()
    fusionml.unpatch()
    expected, got = stock_and_patched(model, lambda: answer(model, PROMPT))
    assert_same(got, expected)


@pytest.mark.usefixtures("blocks_restored")
def test_validation_between_the_steps_may_split(tmp_path: Path, patch: Any) -> None:
    """MLX-LM validates in eval mode and outside of any gradient."""
    _, truth, _ = _fine_tune(tmp_path, "lora", False, DATA[:4], patched=False)
    _, ours, _ = _fine_tune(tmp_path, "lora", False, DATA[:4], patched=True)
    assert split_calls() > 0
    assert len(truth.validation) == 2
    np.testing.assert_allclose(ours.validation, truth.validation, rtol=1e-4)
    np.testing.assert_allclose(ours.train, truth.train, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.usefixtures("blocks_restored")
def test_gradients_of_a_model_in_eval_mode(checkpointed: bool, compiled: bool, patch: Any) -> None:
    """A loop of one's own that never calls `train()`: only the trace itself says that this is no prompt."""

    def four_steps(patched: bool) -> tuple[list[float], Any]:
        model = tiny("llama", num_hidden_layers=2)
        if patched:
            patch(model, **SETTINGS)
        model.freeze()
        mx.random.seed(1)
        linear_to_lora_layers(model, 2, PARAMETERS)
        model.eval()
        if checkpointed:
            grad_checkpoint(model.layers[0])
        optimizer = optim.SGD(1e-1)
        gradient = nn.value_and_grad(model, lambda model, *batch: default_loss(model, *batch)[0])
        state = [model.state, optimizer.state]

        def step(batch: mx.array, lengths: mx.array) -> mx.array:
            loss, grads = gradient(model, batch, lengths)
            optimizer.update(model, grads)
            return loss

        if compiled:
            step = functools.partial(mx.compile, inputs=state, outputs=state)(step)
        lengths, losses = mx.array([[0, 48]] * 2), []
        for number in range(4):
            loss = step(tokens(48, batch=8)[2 * number : 2 * number + 2], lengths)
            mx.eval(loss, state)
            losses.append(loss.item())
        return losses, model

    block = type(tiny("llama", num_hidden_layers=1).layers[0])
    call = block.__call__
    truth, _ = four_steps(patched=False)
    block.__call__ = call
    ours, model = four_steps(patched=True)
    assert len(set(truth)) == 4
    np.testing.assert_allclose(ours, truth, rtol=1e-5)
    assert fusionml.status()["reasons"]["under a trace"] > 0
    # Nothing is left behind that keeps the next prompt from splitting.
    before = split_calls()
    answer(model, PROMPT)
    assert split_calls() > before
