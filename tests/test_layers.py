"""`SplitLinear`: the layer of `nn.Linear` in everything but where its rows are computed."""

import copy
import pickle
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from graphs import evaluated, foreign_stream, lazy, operations
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

import fusionml
from fusionml import SplitLinear, layers, split


def x(*shape: int) -> mx.array:
    made = mx.random.normal(shape or (2, 40, 128), key=mx.random.key(2))
    mx.eval(made)
    return made


def both(bias: bool = True, ratio: float | None = 0.5) -> tuple[nn.Linear, SplitLinear]:
    """The plain layer and ours, with the same arrays."""
    mx.random.seed(9)
    plain = nn.Linear(128, 96, bias)
    mx.eval(plain.parameters())
    return plain, SplitLinear.from_linear(plain, ratio=ratio)


def splits(layer: nn.Module, given: mx.array) -> bool:
    return "Concatenate" in operations(layer(given))


@pytest.mark.parametrize("bias", [False, True])
def test_it_has_the_parameters_of_a_linear_layer(bias: bool) -> None:
    made, plain = SplitLinear(128, 96, bias), nn.Linear(128, 96, bias)
    shapes = {name: array.shape for name, array in tree_flatten(plain.parameters())}
    assert {name: array.shape for name, array in tree_flatten(made.parameters())} == shapes
    assert list(made) == list(plain)
    assert isinstance(made, nn.Linear)
    assert repr(made) == repr(plain).replace("Linear", "SplitLinear")


@pytest.mark.parametrize("bias", [False, True])
def test_from_linear_shares_the_arrays(bias: bool) -> None:
    plain, made = both(bias)
    assert all(made[name] is plain[name] for name in plain)
    assert list(made) == list(plain)
    for training in (False, True):
        assert SplitLinear.from_linear(plain.train(training)).training is training


def test_a_frozen_layer_stays_frozen() -> None:
    plain, _ = both()
    plain.freeze(keys="bias")
    made = SplitLinear.from_linear(plain)
    assert list(made.trainable_parameters()) == list(plain.trainable_parameters()) == ["weight"]


def test_from_linear_computes_nothing() -> None:
    plain = nn.Linear(128, 96)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    SplitLinear.from_linear(plain)
    assert mx.get_peak_memory() - before < 1024
    assert not evaluated(plain.weight)


@pytest.mark.parametrize("shape", [(128,), (1, 128), (40, 128), (2, 20, 128), (2, 2, 10, 128), (0, 128)])
@pytest.mark.parametrize("bias", [False, True])
def test_it_computes_what_the_linear_layer_does(bias: bool, shape: tuple[int, ...]) -> None:
    plain, made = both(bias)
    given = x(*shape)
    ours, theirs = made(given), plain(given)
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert mx.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_in_half_types(dtype: mx.Dtype) -> None:
    plain, made = both()
    plain.set_dtype(dtype)
    made.set_dtype(dtype)
    given = x().astype(dtype)
    assert made(given).dtype == dtype
    assert splits(made, given)
    assert mx.allclose(made(given), plain(given), rtol=2e-2, atol=2e-2)


def test_the_ratio_decides_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = both(ratio=0.25)
    seen: list[int] = []
    real = split.run_linear

    def spy(x: mx.array, weight: mx.array, bias: mx.array | None, m: int, *rest: str) -> mx.array:
        seen.append(m)
        return real(x, weight, bias, m, *rest)

    monkeypatch.setattr(split, "run_linear", spy)
    made(x(1, 512, 128))
    assert seen == [128]
    both(ratio=0)[1](x(1, 512, 128))
    assert seen == [128]


@pytest.mark.parametrize(
    ("backend", "cores", "cpu_dtype", "expected"),
    [
        ("cpu", 2, "native", 0.5),
        ("cpu", 1, "native", 0.0),
        ("metal", 8, "native", 0.3),
        ("metal", 8, "float32", 0.15),
        ("cuda", 8, "native", 0.0),
    ],
)
def test_the_default_ratio_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, backend: str, cores: int, cpu_dtype: str, expected: float
) -> None:
    _, made = both(ratio=None)
    monkeypatch.setattr(layers.machine, "backend", lambda: backend)
    monkeypatch.setattr(layers.machine, "cores", lambda: cores)
    assert made._cpu_rows(mx.zeros((1, 1000 * 32, 128)), cpu_dtype) == round(expected * 1000) * 32


def test_one_row_and_a_ratio_of_zero_evaluate_nothing() -> None:
    for ratio, shape in ((0.5, (1, 1, 128)), (0.5, (64, 1, 128)), (0.5, (128,)), (0.0, (1, 512, 128))):
        _, made = both(ratio=ratio)
        given = lazy(x(*shape))
        out = made(given)
        assert not evaluated(given)
        assert not evaluated(out)


def test_the_rows_of_the_cpu_are_on_the_cpu_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = both()
    monkeypatch.setattr(split, "cpu_stream", foreign_stream())
    with pytest.raises(RuntimeError, match="Stream"):
        mx.eval(made(x()))


def test_it_trains_as_the_linear_layer_does() -> None:
    plain, made = both()
    given, wanted = x(), mx.ones((2, 40, 96))
    for layer in (plain, made):
        optimizer = optim.SGD(learning_rate=0.1)
        step = nn.value_and_grad(layer, lambda a, layer=layer: (layer(a) - wanted).square().mean())
        for _ in range(3):
            _, gradients = step(given)
            optimizer.update(layer, gradients)
            mx.eval(layer.parameters())
    assert mx.array_equal(plain.weight, made.weight)
    assert mx.array_equal(plain.bias, made.bias)


def test_inside_transformations_it_is_the_linear_layer() -> None:
    plain, made = both()
    for transform in (mx.compile, mx.vmap, lambda f: mx.grad(lambda a: f(a).square().sum())):
        assert mx.array_equal(transform(lambda a: made(a))(x()), transform(lambda a: plain(a))(x()))
    assert splits(made, x())


def test_it_quantises() -> None:
    plain, made = both()
    assert mx.array_equal(made.to_quantized(64, 4)(x()), plain.to_quantized(64, 4)(x()))
    model = nn.Sequential(made)
    nn.quantize(model)
    assert isinstance(model.layers[0], nn.QuantizedLinear)


def test_adapters_go_around_it_and_fuse() -> None:
    _, made = both()
    lora = LoRALinear.from_base(made, r=4)
    assert lora.linear is made
    assert mx.allclose(lora.fuse()(x()), made(x()), atol=1e-5)


def test_it_is_copied_pickled_and_saved(tmp_path: Path) -> None:
    plain, made = both(ratio=0.25)
    for twin in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert isinstance(twin, SplitLinear)
        assert twin._ratio == 0.25
        assert mx.array_equal(twin(x()), made(x()))
    made.save_weights(str(tmp_path / "weights.safetensors"))
    plain.weight = mx.zeros_like(plain.weight)
    plain.load_weights(str(tmp_path / "weights.safetensors"))
    assert mx.array_equal(plain.weight, made.weight)


def test_under_the_patch_it_splits_once_and_by_its_own_ratio() -> None:
    _, made = both()
    made.eval()
    model = nn.Sequential(made)
    expected = made(x())
    fusionml.patch(model, min_rows=32, ratio=0.1)
    try:
        assert operations(model(x())).count("Concatenate") == 1
        assert mx.allclose(model(x()), expected, atol=1e-5)
    finally:
        fusionml.unpatch()


@pytest.mark.parametrize("ratio", [1.5, -0.1, float("nan"), "half", True])
def test_a_wrong_ratio(ratio: object) -> None:
    for make in (
        lambda: SplitLinear(128, 96, ratio=ratio),
        lambda: SplitLinear.from_linear(nn.Linear(128, 96), ratio=ratio),
    ):
        with pytest.raises(ValueError, match="ratio") as raised:
            make()
        assert repr(ratio) in str(raised.value)
