"""Which models and layers are known, how long, and that knowing them leaves no trace on them."""

import copy
import dataclasses
import gc
import io
import json
import pickle
import sys
import threading
import weakref
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import pytest
from graphs import evaluated, lazy
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers
from models import Pair, linear_layers, pair, tiny, tokens

import fusionml
from fusionml import known, liveness, machine
from fusionml.ratios import Site
from fusionml.session import Session, open_table
from fusionml.table import Entry

SPLIT = {"min_rows": 32, "ratio": 0.5}
ROWS = 40


def x(rows: int = ROWS, width: int = 128, dtype: mx.Dtype = mx.float32) -> mx.array:
    made = mx.random.normal((1, rows, width), key=mx.random.key(2)).astype(dtype)
    mx.eval(made)
    return made


# Unknown models


def test_a_model_that_nobody_handed_over_is_never_touched() -> None:
    model, given = pair(), lazy(x())
    weights = [lazy(layer.weight) for layer in (model.up, model.down)]
    model.up.weight, model.down.weight = weights
    with fusionml.patched(**SPLIT):
        out = model(given)
        assert not any(evaluated(array) for array in (given, *weights, out))
        assert fusionml.status()["calls"] == {"stock": 2}
        assert fusionml.status()["reasons"] == {known.UNKNOWN: 2}
        assert fusionml.status()["eligible"] is None


def test_a_huge_model_that_is_only_shaped_allocates_nothing() -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128256,
    }
    with fusionml.patched(**SPLIT):
        model = llama.Model(llama.ModelArgs.from_dict(config))
        model.eval()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        out = model(tokens(512))
        assert out.shape == (1, 512, 128256)
        assert mx.get_peak_memory() - before < 1 << 20


def test_two_models_are_told_apart() -> None:
    mine, other = pair(), pair()
    with fusionml.patched(**SPLIT):
        fusionml.patch(mine, **SPLIT)
        mx.eval(mine(x()), other(x()))
        calls = fusionml.status()["calls"]
    fusionml.unpatch()
    assert calls == {"split": 2, "stock": 2}


def test_a_layer_that_was_unknown_becomes_known_with_its_model(patch) -> None:
    model = pair()
    patch(**SPLIT)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 2}
    patch(model, **SPLIT)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 2, "split": 2}


def test_handing_over_twice_knows_it_once(patch, session: Session) -> None:
    model = pair()
    patch(model, **SPLIT)
    patch(model, **SPLIT)
    assert session.known.models() == [model]
    assert len(session.known.layers()) == 2


@pytest.mark.parametrize("early", [False, True], ids=["import after", "import before"])
def test_what_mlx_lm_loads_while_patched_is_known(
    tmp_path: Path, patch, early: bool, session: Session
) -> None:
    folder = checkpoint(tmp_path)
    if early:
        from mlx_lm.utils import load_model
    patch(**SPLIT)
    if not early:
        from mlx_lm.utils import load_model
    else:
        from mlx_lm import utils

        load_model = utils.load_model
    loaded, config = load_model(folder)
    assert config["model_type"] == "llama"
    assert session.known.models() == [loaded]
    loaded(tokens(ROWS))
    assert fusionml.status()["calls"]["split"] == 14


def test_what_was_loaded_before_is_stock_until_it_is_handed_over(tmp_path: Path, patch) -> None:
    from mlx_lm.utils import load_model

    loaded, _ = load_model(checkpoint(tmp_path))
    patch(**SPLIT)
    mx.eval(loaded(tokens(ROWS)))
    assert set(fusionml.status()["calls"]) == {"stock"}
    patch(loaded, **SPLIT)
    mx.eval(loaded(tokens(ROWS)))
    assert fusionml.status()["calls"]["split"] == 14


def test_nothing_is_known_of_what_is_loaded_while_off(tmp_path: Path, session: Session) -> None:
    from mlx_lm import utils

    with fusionml.patched(**SPLIT):
        pass
    loaded, _ = utils.load_model(checkpoint(tmp_path))
    assert session.known.models() == []
    assert isinstance(loaded, nn.Module)


def checkpoint(folder: Path) -> Path:
    """A tiny llama on disk."""
    model = tiny("llama")
    config = {
        "model_type": "llama",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 160,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    return folder


# Lifetimes


def test_models_and_layers_die(patch, session: Session) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"split": 2}
    died = [weakref.ref(module) for module in (model, model.up, model.down)]
    weight = weakref.ref(model.up)
    del model
    gc.collect()
    assert [ref() for ref in died] == [None] * 3
    assert weight() is None
    assert session.known.models() == []
    assert session.known._layers == {}


def test_a_layer_dies_alone(patch, session: Session) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    died = weakref.ref(model.up)
    model.up = nn.Linear(128, 256)
    gc.collect()
    assert died() is None
    assert len(session.known._layers) == 1


def test_what_was_never_known_dies_too(patch, session: Session) -> None:
    model = pair()
    patch(**SPLIT)
    mx.eval(model(x()))
    died = weakref.ref(model.up)
    del model
    gc.collect()
    assert died() is None
    assert session.known._layers == {}


def test_the_memory_of_a_model_comes_back(patch) -> None:
    model = pair(width=512, hidden=2048)
    patch(model, **SPLIT)
    mx.eval(model(x(width=512)))
    used = mx.get_active_memory()
    size = model.up.weight.nbytes + model.down.weight.nbytes
    del model
    gc.collect()
    assert used - mx.get_active_memory() >= size


def test_a_new_layer_at_an_old_address_is_looked_at_anew(patch, session: Session) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    ghost, stranger = session.known._layers[id(model.up)], nn.Linear(128, 256)
    stranger.eval()
    session.known._layers[id(stranger)] = ghost
    mx.eval(stranger(x()))
    assert fusionml.status()["reasons"] == {known.UNKNOWN: 1}


@pytest.mark.parametrize("look", ["layers", "add"])
def test_a_layer_that_dies_while_we_look_disturbs_nothing(session: Session, look: str) -> None:
    models = [pair(), pair(), pair()]
    for index in range(3):
        session.known.add(models[index], from_loader=False)
    session.known.scan()

    class Dropping(str):
        """A reason that drops a model when it is compared, as another thread may at any moment."""

        def __eq__(self, other: object) -> bool:
            if look == "add" and len(models) == 3:
                del models[1:2]
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            if look == "layers" and len(models) == 3:
                del models[1:2]
            return str.__ne__(self, other)

        __hash__ = str.__hash__

    next(iter(session.known._layers.values())).reason = Dropping("a reason")
    if look == "layers":
        assert session.known.layers()
    else:
        session.known.add(models[0], from_loader=False)
    assert len(models) == 2
    assert len(session.known.layers()) == 4


# Layers that are replaced after loading


def test_layers_quantised_by_a_mode_that_is_not_affine_are_named_and_stock(patch) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    nn.quantize(model, group_size=32, bits=4, mode="mxfp4", class_predicate=lambda path, module: path == "up")
    expected = model(x())
    assert fusionml.status()["skipped"] == {"quantised as mxfp4: not split": 1}
    assert fusionml.status()["eligible"] == 0.5
    assert fusionml.status()["calls"] == {"split": 3, "stock": 1}
    fusionml.unpatch()
    assert mx.allclose(model(x()), expected, atol=1e-4)


def test_a_lora_layer_splits_inside_and_keeps_its_result(patch) -> None:
    model = tiny("llama")
    patch(model, **SPLIT)
    linear_to_lora_layers(model, 3, {"rank": 4, "scale": 2.0, "dropout": 0.0})
    model.eval()
    lora = [module for _, module in model.named_modules() if isinstance(module, LoRALinear)]
    assert lora
    for module in lora:
        module.lora_b = mx.random.normal(module.lora_b.shape, key=mx.random.key(4)) * 0.05
    ours = model(tokens(ROWS))
    calls = fusionml.status()["calls"]
    fusionml.unpatch()
    assert mx.allclose(ours, model(tokens(ROWS)), atol=1e-3)
    assert calls["split"] == 14


def test_a_fused_layer_is_found(patch) -> None:
    model = pair()
    patch(model, **SPLIT)
    lora = LoRALinear.from_base(model.up, r=4)
    lora.lora_b = mx.random.normal(lora.lora_b.shape, key=mx.random.key(4)) * 0.05
    model.up = lora
    model.eval()
    before = model(x())
    assert fusionml.status()["calls"] == {"split": 2}
    model.up = lora.fuse()
    model.up.eval()
    assert mx.allclose(model(x()), before, atol=1e-4)
    assert fusionml.status()["calls"] == {"split": 4}


def test_a_layer_in_the_dead_part_stays_exempt_when_it_is_replaced(patch) -> None:
    model = tiny("llama")
    patch(model, **SPLIT)
    mx.eval(model(tokens(ROWS)))
    model.lm_head = nn.Linear(128, 160, bias=False)
    model.eval()
    mx.eval(model(tokens(ROWS)))
    assert fusionml.status()["calls"] == {"split": 28, "stock": 16}


def test_a_weight_of_another_type_or_size_is_used_as_it_is(patch) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    model.set_dtype(mx.float16)
    assert model(x(dtype=mx.float16)).dtype == mx.float16
    model.up = nn.Linear(256, 256)
    model.up.eval()
    mx.eval(model(x(width=256)))
    assert fusionml.status()["calls"] == {"split": 6}


# Layers that are not split


class Doubled(nn.Linear):
    """Somebody's own layer on top of `nn.Linear`."""

    def __call__(self, given: mx.array) -> mx.array:
        return 2 * super().__call__(given)


class Renamed(nn.Linear):
    """A subclass that computes as `nn.Linear` does."""


def test_a_subclass_with_a_call_of_its_own_is_stock(patch) -> None:
    model = pair()
    model.up = Doubled(128, 256)
    model.eval()
    expected = model(x())
    mx.eval(expected)
    patch(model, **SPLIT)
    assert mx.allclose(model(x()), expected, atol=1e-4)
    assert fusionml.status()["calls"] == {"split": 1, "stock": 1}
    assert fusionml.status()["skipped"] == {"Doubled: not split": 1}


def test_a_subclass_that_inherits_the_call_splits(patch) -> None:
    model = pair()
    model.up = Renamed(128, 256)
    model.eval()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"split": 2}


def test_narrow_layers_and_other_types_are_stock(patch) -> None:
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 256), nn.Linear(256, 128))
    model.layers[2].weight = model.layers[2].weight.astype(mx.complex64)
    model.eval()
    expected = model(x())
    mx.eval(expected)
    patch(model, **SPLIT)
    assert mx.array_equal(model(x()), expected)
    assert fusionml.status()["calls"] == {"stock": 2}
    assert fusionml.status()["skipped"] == {known.NARROW: 2, "weight of type mlx.core.complex64": 1}


def test_a_bias_or_a_weight_of_an_unusual_shape_is_stock(patch) -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Linear(256, 128, bias=False))
    model.layers[0].bias = mx.ones((1, 256))
    model.layers[1].weight = mx.ones((128, 256, 1))
    model.eval()
    expected = model.layers[0](x())
    mx.eval(expected)
    patch(model, **SPLIT)
    assert mx.array_equal(model.layers[0](x()), expected)
    assert fusionml.status()["skipped"] == {"weight or bias of an unusual shape": 2}


def test_a_model_in_training_is_stock(patch) -> None:
    model = pair()
    patch(model, **SPLIT)
    model.train()
    given = lazy(x())
    out = model(given)
    assert not evaluated(given)
    assert not evaluated(out)
    assert fusionml.status()["reasons"] == {"in training": 2}
    model.eval()
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 2, "split": 2}


def test_embeddings_are_not_named(patch) -> None:
    model = tiny("mixtral")
    patch(model, **SPLIT)
    mx.eval(model(tokens(ROWS)))
    assert not any("Embedding" in reason for reason in fusionml.status()["skipped"])


class Scaled(nn.Module):
    """A module whose `weight` is no matrix, in a model with an embedding."""

    def __init__(self, weight: object) -> None:
        super().__init__()
        self.embed, self.body, self.weight = nn.Embedding(160, 128), nn.Linear(128, 256), weight

    def __call__(self, given: mx.array) -> mx.array:
        return self.body(given)


@pytest.mark.parametrize(
    "weight", [[mx.array(0.5)], {"a": mx.ones((160, 128))}, nn.Linear(128, 160), mx.array(2.0), 0.5, "heavy"]
)
def test_a_weight_that_is_no_matrix_stops_nothing(patch, weight: object, caplog) -> None:
    model = Scaled(weight)
    model.eval()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"split": 1}
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


# Nothing is left on a model


def test_a_patched_model_looks_and_saves_as_in_stock(tmp_path: Path, patch) -> None:
    plain, model = pair(), pair()
    patch(model, **SPLIT)
    out = model(x())
    mx.eval(out)
    assert fusionml.status()["calls"] == {"split": 2}
    assert repr(model) == repr(plain)
    assert type(model.up) is nn.Linear
    assert isinstance(model.up, nn.Linear)
    assert vars(model.up) == vars(plain.up)
    assert list(model.up) == list(plain.up)
    assert [name for name, _ in tree_flatten(model.parameters())] == [
        name for name, _ in tree_flatten(plain.parameters())
    ]
    assert pickle.dumps(model) == pickle.dumps(plain)
    for name, module in (("ours", model), ("theirs", plain)):
        module.save_weights(str(tmp_path / f"{name}.safetensors"))
    ours, theirs = (tmp_path / f"{name}.safetensors" for name in ("ours", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()
    plain.load_weights(str(ours))
    fusionml.unpatch()
    assert mx.allclose(plain(x()), out, atol=1e-4)


def test_copies_of_a_known_model_are_models_of_their_own(patch, session: Session) -> None:
    model = pair()
    patch(model, **SPLIT)
    mx.eval(model(x()))
    for twin in (copy.deepcopy(model), pickle.load(io.BytesIO(pickle.dumps(model)))):
        assert mx.allclose(twin(x()), model(x()), atol=1e-4)
        assert session.known.models() == [model]
    assert fusionml.status()["calls"] == {"split": 6, "stock": 4}


# What status() says


def test_eligible_is_the_share_of_the_live_arithmetic(patch) -> None:
    model = tiny("llama")
    patch(model, **SPLIT)
    assert fusionml.status()["eligible"] == 1.0
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 64, bias=False)
    model.model.layers[0].mlp.down_proj = nn.Linear(64, 128, bias=False)
    block = 4 * 128 * 128 + 3 * 128 * 192
    changed = block - 2 * 128 * 192 + 2 * 128 * 64
    assert fusionml.status()["eligible"] == pytest.approx(
        (block + changed - 2 * 128 * 64) / (block + changed)
    )


def test_status_is_plain_data(patch) -> None:
    model = tiny("llama")
    patch(model, **SPLIT)
    mx.eval(model(tokens(ROWS)))
    status = json.loads(json.dumps(fusionml.status()))
    wanted = "patched backend settings table calls reasons sites skipped eligible probe_seconds"
    assert set(wanted.split()) <= set(status)
    assert status["patched"] is True
    assert status["settings"]["min_rows"] == 32
    assert all(site["ratio"] == 0.5 and site["arm"] == "split" for site in status["sites"].values())


STOCK = {"min_rows": 32, "ratio": 0}
GIVEN = "ratio=0.0 was given"


def test_calls_that_stand_down_are_counted_exactly(patch, session: Session) -> None:
    model = tiny("llama")
    patch(model, **SPLIT)
    for _ in range(5):
        mx.eval(model(tokens(ROWS)))
    dead = {liveness.DEAD_BLOCK: 7 * 5, liveness.OUTSIDE: 5}
    for _ in range(2):
        assert fusionml.status()["calls"] == {"split": 14 * 5, "stock": 8 * 5}
        assert fusionml.status()["reasons"] == dead
    assert session.shared() == (5 * ROWS, 1.0)
    patch(**STOCK)
    for rows in (ROWS, ROWS + 8, ROWS, ROWS, ROWS + 8):
        mx.eval(model(tokens(rows)))
    assert fusionml.status()["calls"] == {"split": 14 * 5, "stock": 8 * 10 + 14 * 5}
    assert fusionml.status()["reasons"] == {key: 2 * count for key, count in dead.items()} | {GIVEN: 14 * 5}
    split, stock = 5 * ROWS, 5 * ROWS + 2 * 8
    assert session.shared() == (split + stock, pytest.approx(split / (split + stock)))


def test_calls_that_stood_down_are_counted_after_the_model_is_gone(patch, session: Session) -> None:
    model = pair()
    patch(model, **STOCK)
    for _ in range(6):
        mx.eval(model(x()))
    del model
    gc.collect()
    assert session.known._layers == {}
    assert fusionml.status()["calls"] == {"stock": 12}
    assert fusionml.status()["reasons"] == {GIVEN: 12}
    assert session.shared() == (6 * ROWS, 0.0)


def test_calls_that_stand_down_are_counted_whatever_changes_meanwhile(patch) -> None:
    """Another type with the same shape, or other settings: what was counted before is kept."""
    model = pair()
    patch(model, **STOCK)
    for dtype in (mx.float32, mx.float32, mx.float16, mx.float16, mx.float32, mx.float32):
        mx.eval(model(x(dtype=dtype)))
    assert fusionml.status()["calls"] == {"stock": 12}
    patch(min_rows=33, ratio=0)
    mx.eval(model(x()), model(x()))
    patch(**STOCK)
    mx.eval(model(x()), model(x()))
    assert fusionml.status()["calls"] == {"stock": 20}


def test_calls_that_stand_down_in_many_threads_are_counted_while_somebody_polls(patch) -> None:
    model, calls, done = pair(), 400, threading.Event()
    patch(model, **STOCK)
    given = [x(rows) for rows in (ROWS, ROWS + 8)]

    def work() -> None:
        for call in range(calls):
            model(given[call % 2])  # never evaluated: only counted

    def poll() -> None:
        while not done.is_set():
            fusionml.status()

    threads = [threading.Thread(target=work) for _ in range(3)]
    poller = threading.Thread(target=poll)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in (*threads, poller):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        poller.join()
    finally:
        sys.setswitchinterval(interval)
    assert fusionml.status()["calls"] == {"stock": 2 * 3 * calls}
    assert fusionml.status()["reasons"] == {GIVEN: 2 * 3 * calls}


def test_two_threads_that_decide_at_once_lose_no_call(patch, session: Session) -> None:
    """The second one to decide finds the first one's decision, and what it has counted since."""
    model = pair()
    patch(model, **STOCK)
    real, first = session.control, [True]

    def control(*args: object) -> object:
        if first and first.pop():
            for _ in range(3):
                model.up(x())
        return real(*args)

    session.control = control  # type: ignore[method-assign]
    model.up(x())
    model.up(x())
    assert fusionml.status()["calls"] == {"stock": 5}


def test_a_decision_made_twice_is_the_first_one_which_may_be_counting(patch, session: Session) -> None:
    model = pair()
    patch(model, **STOCK)
    model.up(x())
    layer = session.known.find(model.up)
    ((shape, first),) = layer.standing.items()
    session.known.stand(layer, shape, dataclasses.replace(first), session.known.age)
    assert layer.standing[shape] is first


def test_reasons_do_not_grow_with_the_shapes_of_inputs(patch) -> None:
    model = pair()
    patch(model, **SPLIT)
    for rows in range(40, 60):
        model.up(mx.zeros((1, rows, 128), dtype=mx.int32))
        with pytest.raises(ValueError, match=r"addmm|matmul"):
            model.up(mx.zeros((1, rows, 130 + rows)))
    assert fusionml.status()["reasons"] == {"input of type mlx.core.int32": 20, "input of another width": 20}


def test_what_is_remembered_of_a_layer_does_not_grow_with_the_shapes_of_inputs(
    patch, session: Session
) -> None:
    model = pair()
    patch(model, **STOCK)
    for rows in (*range(40, 240), *range(40, 240)):
        model.up(mx.zeros((1, rows, 128)))
    (layer,) = [each for each in session.known.layers() if each.outputs == 256]
    assert 16 <= len(layer.standing) <= 100
    assert fusionml.status()["calls"] == {"stock": 400}
    assert session.shared()[0] == 2 * sum(range(40, 240))


# What stands until something changes


def test_a_decision_stands_until_the_settings_change(patch, session: Session, monkeypatch) -> None:
    model, asked = pair(), []
    real = session.control
    monkeypatch.setattr(session, "control", lambda *args: (asked.append(1), real(*args))[1])
    patch(model, **STOCK)
    for _ in range(5):
        mx.eval(model(x()))
    assert len(asked) == 2, "each layer asked once"
    patch(**SPLIT)
    mx.eval(model(x()))
    patch(**STOCK)
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 12, "split": 2}


def test_settings_that_change_while_a_call_decides_hold_for_the_next_call(
    patch, session: Session, monkeypatch
) -> None:
    model = pair()
    patch(model, **STOCK)
    real, first = session.control, [True]

    def control(*args: object) -> object:
        made = real(*args)
        if first and first.pop():
            patch(**SPLIT)  # as another thread may, after this one was told what to do
        return made

    monkeypatch.setattr(session, "control", control)
    model.up(x())
    model.up(x())
    assert fusionml.status()["calls"] == {"stock": 1, "split": 1}


def test_a_decision_stands_on_its_own_device_only(patch, monkeypatch) -> None:
    model = pair()
    patch(model, min_rows=32)
    with monkeypatch.context() as on_cuda:
        on_cuda.setattr(mx, "default_device", lambda: mx.Device(mx.gpu, 0))
        on_cuda.setattr(mx.metal, "is_available", lambda: False)
        for _ in range(2):
            mx.eval(model(x()))
        assert fusionml.status()["backend"] == "cuda"
        assert fusionml.status()["calls"] == {"stock": 4}
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 4, "split": 2}


def test_where_no_call_can_split_a_layers_own_call_stays_stocks(patch, monkeypatch, stock_functions) -> None:
    """On CUDA nothing is worth even asking, unless somebody says or measured otherwise."""
    calls = {owner: call for (owner, name), call in stock_functions.items() if name == "__call__"}

    def stocks_own() -> list[bool]:
        return [owner.__call__ is call for owner, call in calls.items()]

    with monkeypatch.context() as on_cuda:
        on_cuda.setattr(machine, "backend", lambda: "cuda")
        patch()
        assert fusionml.status()["idle"] is not None
        assert all(stocks_own())
        patch(ratio=0.4)
        assert fusionml.status()["idle"] is None
        assert not any(stocks_own())
        patch()
        assert all(stocks_own())
    patch()
    assert not any(stocks_own())
    fusionml.unpatch()
    assert all(stocks_own())


def measured(path: Path, ratio: float, dtype: str = "float32") -> str:
    """A table that knows the layers of `pair()` in calls of few rows."""
    table = open_table(str(path))
    for inputs, outputs, bias in ((128, 256, True), (256, 128, False)):
        entry = Entry(ratio, 0.5, "2026-08-01T12:00:00+00:00", 0.02, None, 41, "native")
        table.put(Site("linear", dtype, inputs, outputs, bias, 16), entry)
    table.save()
    return str(path)


@pytest.mark.parametrize("names", [("a.json", "b.json"), ("a.json", "a.json")])
def test_a_decision_stands_until_the_table_changes(
    patch, session: Session, monkeypatch, tmp_path: Path, names: tuple[str, str]
) -> None:
    monkeypatch.setattr(machine, "math_fingerprint", dict)
    model, (old, new) = pair(), names
    patch(model, min_rows=32, table=measured(tmp_path / old, 0.0))
    for _ in range(2):
        mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 4}
    patch(min_rows=32, table=measured(tmp_path / new, 0.5))
    if old == new:
        session.forget_plans()
    mx.eval(model(x()))
    assert fusionml.status()["calls"] == {"stock": 4, "split": 2}


def test_a_decision_stands_for_its_own_type_only(patch, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "math_fingerprint", dict)
    model = pair()
    model.set_dtype(mx.float16)
    measured(tmp_path / "t.json", 0.0, "float32")
    patch(model, min_rows=32, table=measured(tmp_path / "t.json", 0.5, "float16"))
    for dtype in (mx.float32, mx.float32, mx.float16):
        model.up(x(dtype=dtype))
    assert fusionml.status()["calls"] == {"stock": 2, "split": 1}


def test_the_lists_of_two_threads_do_not_tear(patch, session: Session) -> None:
    patch(**SPLIT)
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                model = pair()
                session.known.add(model, from_loader=False)
                fusionml.status()
                model(x())
                del model
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert fusionml.status()["calls"]["split"] == 4 * 30 * 2
    assert linear_layers(Pair()).keys() == {"up", "down"}
