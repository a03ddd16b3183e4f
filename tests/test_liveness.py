"""The layers that prefill never reads, against what MLX really computes for a prompt chunk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
from graphs import evaluated, lazy
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
from models import CONFIGS, Pair, linear_layers, tiny, tokens

import fusionml
from fusionml import liveness
from fusionml.known import NOT_UNDERSTOOD
from fusionml.session import Session

ROWS = 40


def prefill(model: nn.Module, count: int = ROWS) -> list[mx.array]:
    """One prompt chunk as MLX-LM runs it: only the states of the caches are computed."""
    cache = make_prompt_cache(model)
    model(tokens(count), cache=cache)
    states = [part.state for part in cache]
    mx.eval(states)
    return states


def unread(model: nn.Module) -> set[str]:
    """The linear layers of stock's `model` whose weight a prompt chunk leaves uncomputed."""
    layers = linear_layers(model)
    weights = {path: lazy(layer.weight) for path, layer in layers.items()}
    for path, layer in layers.items():
        layer.weight = weights[path]
    prefill(model)
    return {path for path, weight in weights.items() if not evaluated(weight)}


@contextmanager
def recorded() -> Iterator[list[tuple[nn.Module, mx.array]]]:
    """Every call of a linear layer with its result, whatever `Linear.__call__` is at the moment."""
    calls: list[tuple[nn.Module, mx.array]] = []
    inner = nn.Linear.__call__

    def __call__(self: nn.Module, x: mx.array) -> mx.array:
        out = inner(self, x)
        calls.append((self, out))
        return out

    nn.Linear.__call__ = __call__
    try:
        yield calls
    finally:
        nn.Linear.__call__ = inner


def work(model: nn.Module) -> dict[str, int]:
    """The rows of each linear layer that a prompt chunk computes."""
    paths = {id(layer): path for path, layer in linear_layers(model).items()}
    with recorded() as calls:
        prefill(model)
    done: dict[str, int] = {}
    for layer, out in calls:
        if evaluated(out):
            path = paths[id(layer)]
            done[path] = done.get(path, 0) + out.size // out.shape[-1]
    return done


def know(session: Session, model: nn.Module) -> None:
    """As if MLX-LM had loaded `model` while patched."""
    session.known.add(model, from_loader=True)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_prefill_does_not_read_is_exempt(model_type: str) -> None:
    model = tiny(model_type)
    dead = liveness.dead_layers(model)
    assert dead is not None
    exempt = {path for path, layer in linear_layers(model).items() if id(layer) in dead}
    idle = unread(model)
    assert idle, "the oracle found nothing: it does not work"
    assert idle <= exempt
    assert len(exempt) < len(linear_layers(model)), "nothing is left to split"


def test_the_oracle_agrees_with_poisoned_weights() -> None:
    idle = unread(tiny("llama"))
    for path in linear_layers(tiny("llama")):
        model = tiny("llama")
        layer = linear_layers(model)[path]
        layer.weight = mx.full(layer.weight.shape, float("nan"))
        poisoned = any(mx.any(mx.isnan(part)).item() for state in prefill(model) for part in state)
        assert poisoned == (path not in idle), path


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "phi3", "mixtral", "deepseek_v3"])
def test_in_a_plain_transformer_only_the_last_block_and_the_head_are_exempt(model_type: str) -> None:
    model = tiny(model_type)
    dead = liveness.dead_layers(model)
    assert dead is not None
    exempt = {path for path, layer in linear_layers(model).items() if id(layer) in dead}
    last = f"model.layers.{len(model.layers) - 1}."
    assert exempt == {path for path in linear_layers(model) if path.startswith(last) or path == "lm_head"}


def test_the_final_norm_and_the_head_are_exempt() -> None:
    model = tiny("llama")
    dead = liveness.dead_layers(model)
    assert dead is not None
    assert {id(model.model.norm), id(model.lm_head)} <= set(dead)
    assert dead[id(model.lm_head)] == liveness.OUTSIDE
    assert dead[id(model.layers[-1].mlp.up_proj)] == liveness.DEAD_BLOCK


def test_shared_keys_and_values_end_the_live_part_early() -> None:
    for model_type, live in (("gemma3n", {0, 1}), ("afm7", {0, 1}), ("hunyuan", {0, 1})):
        model = tiny(model_type)
        dead = liveness.dead_layers(model)
        assert dead is not None
        assert {index for index, block in enumerate(model.layers) if id(block) not in dead} == live, (
            model_type
        )


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_patched_prefill_does_no_more_linear_work_than_stock(model_type: str, session: Session) -> None:
    stock_work = work(tiny(model_type))
    model = tiny(model_type)
    with fusionml.patched(min_rows=32, ratio=0.5):
        know(session, model)
        patched_work = work(model)
        calls = fusionml.status()["calls"]
    assert patched_work == stock_work
    assert calls["split"] > 0


@pytest.mark.parametrize("model_type", ["llama", "gemma3n", "hunyuan", "nemotron_h"])
def test_a_boundary_in_the_dead_part_would_show(
    model_type: str, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock_work = work(tiny(model_type))
    monkeypatch.setattr(liveness, "dead_layers", lambda model: {})
    model = tiny(model_type)
    with fusionml.patched(min_rows=32, ratio=0.5):
        know(session, model)
        forced = work(model)
    assert sum(forced.values()) > sum(stock_work.values())


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_patched_prefill_fills_the_caches_as_stock_does(model_type: str, session: Session) -> None:
    stock_states = prefill(tiny(model_type))
    model = tiny(model_type)
    with fusionml.patched(min_rows=32, ratio=0.5):
        know(session, model)
        states = prefill(model)
    for ours, theirs in zip(_arrays(states), _arrays(stock_states), strict=True):
        assert ours.shape == theirs.shape
        assert mx.allclose(ours, theirs, rtol=1e-3, atol=1e-4)


def _arrays(states: list[object]) -> list[mx.array]:
    return [leaf for _, leaf in tree_flatten(states) if isinstance(leaf, mx.array)]


# Pipelines


def test_a_pipelines_other_blocks_are_no_blocks_of_this_process(session: Session) -> None:
    model = tiny("deepseek_v3", num_hidden_layers=4)

    class Rank:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

    with fusionml.patched(min_rows=32, ratio=0.5):
        know(session, model)
        model.model.pipeline(Rank())
        assert model.model.layers[:2] == [None, None]
        dead = liveness.dead_layers(model)
        assert dead is not None
        own = [block for block in model.model.layers if block is not None]
        assert [id(block) in dead for block in own] == [False, True]
        attention = own[0].self_attn
        out = attention.q_a_proj(mx.random.normal((1, ROWS, 128)))
        assert fusionml.status()["calls"] == {"split": 1}
        assert out.shape == (1, ROWS, 128)
        skipped = fusionml.status()["skipped"]
        assert skipped[liveness.DEAD_BLOCK] > 0


def test_missing_blocks_in_the_list_of_layers_are_passed_over() -> None:
    model = tiny("mixtral")
    model.model.layers[0] = None
    dead = liveness.dead_layers(model)
    assert dead is not None
    assert [id(block) in dead for block in model.layers[1:]] == [False, True]


# Models that are not understood


class Strange(nn.Module):
    """A model that has no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(160, 128)
        self.body = Pair()
        self.head = nn.Linear(128, 160, bias=False)

    def __call__(self, ids: mx.array) -> mx.array:
        return self.head(self.body(self.embed(ids)))


class Broken(Strange):
    """A model whose cache cannot be made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [Pair(), Pair()]

    def make_cache(self) -> list[object]:
        raise RuntimeError("no cache here")


class Overfull(Broken):
    """A model with more caches than blocks."""

    def make_cache(self) -> list[object]:
        return [object()] * 3


class Detached(Strange):
    """A model whose `layers` are not modules of its own."""

    @property
    def layers(self) -> list[nn.Module]:
        return [Pair(), Pair()]


class Raising(Strange):
    """A model whose `layers` raise."""

    @property
    def layers(self) -> list[nn.Module]:
        raise KeyError("layers")


STRANGE = [Strange, Broken, Overfull, Detached, Raising]


@pytest.mark.parametrize("kind", STRANGE)
def test_a_loaded_model_that_is_not_understood_is_stock(kind: type[Strange], session: Session) -> None:
    model = kind()
    model.eval()
    assert liveness.dead_layers(model) is None
    with fusionml.patched(min_rows=32, ratio=0.5):
        know(session, model)
        mx.eval(model(tokens(ROWS)))
        status = fusionml.status()
    assert status["calls"] == {"stock": 3}
    assert status["reasons"] == {NOT_UNDERSTOOD: 3}
    assert status["skipped"] == {NOT_UNDERSTOOD: len(linear_layers(model))}
    assert status["eligible"] == 0


@pytest.mark.parametrize("kind", STRANGE)
def test_handed_over_it_splits_everywhere_but_in_the_head(kind: type[Strange], session: Session) -> None:
    model = kind()
    model.eval()
    expected = model(tokens(ROWS))
    mx.eval(expected)
    with fusionml.patched(min_rows=32, ratio=0.5):
        session.known.add(model, from_loader=False)
        out = model(tokens(ROWS))
        status = fusionml.status()
    assert mx.allclose(out, expected, atol=1e-4)
    assert status["calls"] == {"split": 2, "stock": 1}
    assert status["reasons"] == {liveness.HEAD: 1}
    assert status["skipped"] == {liveness.HEAD: 1}


def test_it_is_said_once_that_a_model_is_not_understood(
    session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    model = Strange()
    model.eval()
    with fusionml.patched(min_rows=32), caplog.at_level("INFO", logger="fusionml"):
        know(session, model)
        for _ in range(2):
            mx.eval(model(tokens(ROWS)))
            fusionml.status()
    said = [record for record in caplog.records if "Strange" in record.getMessage()]
    assert len(said) == 1
    assert NOT_UNDERSTOOD in said[0].getMessage()


class Own(llama.Model):
    """Somebody's own model that makes its caches as those of MLX-LM do."""


def own() -> nn.Module:
    model = tiny("llama")
    model.__class__ = Own
    return model


@pytest.mark.parametrize(
    "make", [lambda: tiny("mixtral"), own], ids=["of MLX-LM, without make_cache", "with make_cache"]
)
def test_a_model_that_mlx_lm_can_drive_is_understood_when_handed_over(
    make: Callable[[], nn.Module], session: Session
) -> None:
    model = make()
    with fusionml.patched(min_rows=32, ratio=0.5):
        session.known.add(model, from_loader=False)
        prefill(model)
        status = fusionml.status()
    assert {liveness.DEAD_BLOCK, liveness.OUTSIDE} <= set(status["skipped"])
    assert liveness.HEAD not in status["skipped"]
    assert status["calls"]["split"] > 0


def test_an_embedding_and_a_narrow_bias_are_no_heads() -> None:
    model = Strange()
    assert set(liveness.heads(model)) == {id(model.head)}
