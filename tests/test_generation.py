"""What users of MLX-LM generate with a patched model, against stock MLX-LM's own output."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx_lm import load, stream_generate
from mlx_lm.generate import BatchGenerator, batch_generate, generation_stream, speculative_generate_step
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from models import VOCABULARY, tiny, tokens
from stock import (
    HALF_TOLERANCE,
    SETTINGS,
    TOLERANCE,
    Answer,
    answer,
    assert_same,
    assert_same_arrays,
    checkpoint,
    rows,
    split_calls,
    split_layers,
    stock_and_patched,
    text,
)

import fusionml
from fusionml import split


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float32 Llama on disk."""
    return checkpoint(tmp_path_factory.mktemp("llama"))


def prompt(count: int) -> list[int]:
    return tokens(count)[0].tolist()


# --- the models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(mx.float32, TOLERANCE), (mx.float16, HALF_TOLERANCE / 4), (mx.bfloat16, HALF_TOLERANCE)],
)
@pytest.mark.parametrize("cpu_dtype", ["native", "float32"])
def test_models_of_each_float_type_answer_as_stock(dtype: mx.Dtype, tolerance: float, cpu_dtype: str) -> None:
    model = tiny("llama")
    model.set_dtype(dtype)
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(90)), cpu_dtype=cpu_dtype)
    assert truth.cache[0].dtype == dtype
    assert_same(ours, truth, tolerance)


def test_biases_and_mixed_types_give_what_stock_gives() -> None:
    """Qwen2's projections have a bias; here blocks of three types meet, so inputs and weights differ."""
    model = tiny("qwen2", num_hidden_layers=4)
    model.model.embed_tokens.set_dtype(mx.bfloat16)
    for block, dtype in zip(model.layers, [mx.float16, mx.float32, mx.bfloat16], strict=False):
        block.set_dtype(dtype)
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(70)))
    assert "bias" in model.layers[0].self_attn.q_proj
    assert {f"model.layers.{i}.self_attn.q_proj" for i in range(3)} <= split_layers(model).keys()
    assert_same(ours, truth, HALF_TOLERANCE)


def test_mixed_models_split_their_large_dense_layers_only() -> None:
    """Quantised blocks with a few dense layers, one of them as narrow as a router."""
    model = tiny("llama")
    nn.quantize(model, group_size=32, bits=8, class_predicate=lambda path, _: path.endswith("mlp.up_proj"))
    for block in model.layers:
        block.router = nn.Linear(128, 8)
        block.mlp = _Routed(block.mlp, block.router)
    model.eval()
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(80)))
    assert_same(ours, truth)
    split_now = split_layers(model)
    assert "model.layers.0.mlp.inner.down_proj" in split_now
    assert not [path for path in split_now if "router" in path or "up_proj" in path]
    assert [reason for reason in fusionml.status()["skipped"] if "narrower" in reason]


class _Routed(nn.Module):
    def __init__(self, inner: nn.Module, router: nn.Module) -> None:
        super().__init__()
        self.inner, self.router = inner, router

    def __call__(self, x: mx.array) -> mx.array:
        return self.inner(x) * mx.softmax(self.router(x))[..., :1]


class _Doubled(nn.Linear):
    """A custom layer that is a `Linear` but computes something else."""

    def __call__(self, x: mx.array) -> mx.array:
        return 2 * (x @ self.weight.T)


class _Scaled(nn.Linear):
    """One that goes through `Linear`'s own call."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * 0.5


class _Plain(nn.Linear):
    """One that changes nothing about the call."""


class _Packed(nn.Module):
    """A `Linear` in name only, with a weight of its own kind, as bitnet's are."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = (linear.weight > 0).astype(mx.uint8)

    def __call__(self, x: mx.array) -> mx.array:
        return (x @ (self.weight.astype(x.dtype) - 0.5).T) * 0.1


@pytest.mark.parametrize("custom", [_Doubled, _Scaled, _Plain, _Packed, "mxfp8", "nvfp4"])
def test_custom_linear_classes_compute_what_they_always_did(custom: Any) -> None:
    model = tiny("llama")
    mlp = model.layers[0].mlp
    if isinstance(custom, str):
        mlp.up_proj = nn.QuantizedLinear.from_linear(mlp.up_proj, mode=custom, group_size=None, bits=None)
    elif custom is _Packed:
        mlp.up_proj = _Packed(mlp.up_proj)
    else:
        made = custom(*reversed(mlp.up_proj.weight.shape), bias=False)
        mlp.up_proj = made.update({"weight": mlp.up_proj.weight})
    model.eval()
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(60)))
    assert_same(ours, truth)
    assert ("model.layers.0.mlp.up_proj" in split_layers(model)) == (custom is _Plain)


def test_quantised_activations_stay_stock() -> None:
    """`QQLinear` quantises its input as well; a CPU has no product for it, so both fail there."""
    model = tiny("llama")
    layer = nn.QQLinear.from_linear(model.layers[0].mlp.up_proj, mode="mxfp8")
    model.layers[0].mlp.up_proj = layer
    model.eval()
    x = mx.random.normal((1, 40, 128))
    truth = _result_or_error(lambda: layer(x))
    fusionml.patch(model, **SETTINGS)
    assert _result_or_error(lambda: layer(x)) == truth
    assert split_calls() == 0
    fusionml.unpatch()


def _result_or_error(run: Callable[[], mx.array]) -> Any:
    try:
        return run().tolist()
    except Exception as error:
        return repr(error)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_left_alone(tied: bool) -> None:
    """A head far wider than the blocks, tied and untied: no row of it is ever split."""
    model = tiny("llama", vocab_size=4096, tie_word_embeddings=tied)
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(90)))
    assert_same(ours, truth)
    split_now = split_layers(model)
    assert split_now
    assert not [path for path in split_now if "head" in path or "embed" in path]


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("mamba", "in_proj"),
        ("mamba2", "in_proj"),
        ("jamba", "mamba.in_proj"),
        ("qwen3_next", "linear_attn.in_proj_qkvz"),
        ("nemotron_h", "mixer.in_proj"),
    ],
)
def test_recurrent_and_hybrid_models_split_and_answer_as_stock(kind: str, layer: str) -> None:
    """Recurrent states are compared too: they depend on every token of the prompt."""
    model = tiny(kind)
    truth, ours = stock_and_patched(
        model, lambda: answer(model, prompt(70), max_tokens=3, prefill_step_size=40)
    )
    assert_same(ours, truth)
    assert [path for path in split_layers(model) if path.endswith(layer)]


def test_latent_attention_keeps_its_own_products() -> None:
    model = tiny("deepseek_v3")
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(70), prefill_step_size=40))
    assert_same(ours, truth)
    latent = {path for path, m in model.named_modules() if type(m).__name__ == "MultiLinear"}
    split_now = split_layers(model)
    assert latent
    assert not latent & split_now.keys()
    assert [path for path in split_now if path.endswith("q_b_proj")]


# --- prompts, chunks and caches -----------------------------------------------------------------------------


@pytest.mark.parametrize("step", [17, 32, 50])
def test_chunks_and_remainders_of_every_size(step: int) -> None:
    model = tiny("llama", num_hidden_layers=2)
    lengths = [2, 3, MIN_SPLIT, MIN_SPLIT + 1, *range(2 * step - 2, 3 * step + 3, 5)]

    def run() -> list[Answer]:
        return [answer(model, prompt(n), max_tokens=2, prefill_step_size=step) for n in lengths]

    truth, ours = stock_and_patched(model, run)
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same(mine, theirs)


MIN_SPLIT = SETTINGS["min_rows"]


def test_only_chunks_with_many_rows_split() -> None:
    """Chunks of 40, 40 and 9 rows, then decoding: two of them split in each layer that may."""
    model = tiny("llama")
    fusionml.patch(model, **SETTINGS)
    answer(model, prompt(90), max_tokens=6, prefill_step_size=40)
    fusionml.unpatch()
    rows_split = split_layers(model)
    assert set(rows_split.values()) == {80}
    assert len(rows_split) == 2 * 7


def test_cache_hits_with_short_and_long_suffixes() -> None:
    """A conversation: each turn finds the earlier ones in the cache."""
    model = tiny("llama")

    def run() -> list[Answer]:
        cache = make_prompt_cache(model)
        turns = [prompt(100), prompt(5), prompt(45), prompt(2)]
        return [answer(model, turn, max_tokens=3, cache=cache) for turn in turns]

    truth, ours = stock_and_patched(model, run)
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same(mine, theirs)


def test_trimmed_caches() -> None:
    """A prompt edited in its middle: the cache is cut back and the rest computed again."""
    model = tiny("llama")

    def run() -> Answer:
        cache = make_prompt_cache(model)
        answer(model, prompt(80), cache=cache)
        assert trim_prompt_cache(cache, 40) == 40
        return answer(model, prompt(60)[::-1], cache=cache)

    truth, ours = stock_and_patched(model, run)
    assert_same(ours, truth)


@pytest.mark.parametrize("length", [40, 90, 150])
def test_rotating_caches(length: int) -> None:
    """`max_kv_size` smaller than the prompt: old entries are overwritten while the prompt is read."""
    model = tiny("qwen2")
    assert isinstance(make_prompt_cache(model, 48)[0], RotatingKVCache)
    truth, ours = stock_and_patched(
        model, lambda: answer(model, prompt(length), max_kv_size=48, prefill_step_size=33)
    )
    assert_same(ours, truth)


@pytest.mark.parametrize("start", [0, 40])
def test_quantised_caches(start: int) -> None:
    model = tiny("llama")
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start, "prefill_step_size": 30}
    caches: list[Any] = []

    def run() -> Answer:
        caches[:] = make_prompt_cache(model)
        got = answer(model, prompt(80), cache=caches, **options)
        return Answer(got.tokens, got.logprobs, [])  # a rounding may move an entry to the next level

    truth, ours = stock_and_patched(model, run)
    assert isinstance(caches[0], QuantizedKVCache)
    assert_same(ours, truth, 5e-3)


def test_prompt_caches_saved_by_one_are_read_by_the_other(tmp_path: Path) -> None:
    model = tiny("llama")

    def first(name: str) -> None:
        cache = make_prompt_cache(model)
        answer(model, prompt(60), cache=cache)
        save_prompt_cache(str(tmp_path / name), cache)

    def second(name: str) -> Answer:
        return answer(model, prompt(40), cache=load_prompt_cache(str(tmp_path / name)))

    first("stock.safetensors")
    stock_and_patched(model, lambda: first("ours.safetensors"))
    truth, ours = stock_and_patched(model, lambda: second("stock.safetensors"))
    assert_same(ours, truth)
    assert_same(second("ours.safetensors"), truth)


def test_prompts_longer_than_the_context_go_on_as_in_stock() -> None:
    model = tiny("llama", max_position_embeddings=64)
    truth, ours = stock_and_patched(model, lambda: answer(model, prompt(150), prefill_step_size=60))
    assert_same(ours, truth)


# --- batches ------------------------------------------------------------------------------------------------


def batch(model: nn.Module, prompts: list[list[int]], **options: Any) -> list[Answer]:
    """Every prompt's answer from MLX-LM's own batch generator."""
    generator = BatchGenerator(model, max_tokens=4, **options)
    got: dict[int, list[Any]] = {uid: [] for uid in generator.insert(prompts)}
    while responses := generator.next_generated():
        for response in responses:
            got[response.uid].append(response)
    generator.close()
    return [Answer([r.token for r in rs], rows(r.logprobs for r in rs), []) for rs in got.values()]


def test_batches_of_prompts_with_padding() -> None:
    """Rows of padding are split among the others; nobody's answer may notice."""
    model = tiny("llama")
    prompts = [prompt(60)[:n] for n in (60, 23, 41, 2, 9, 55)]
    truth, ours = stock_and_patched(model, lambda: batch(model, prompts, prefill_step_size=32))
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same(mine, theirs)


def test_batch_generate_gives_the_same_text(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    prompts = [tokenizer.encode(text(n, seed=n)) for n in (70, 30, 50)]
    truth, ours = stock_and_patched(
        model, lambda: batch_generate(model, tokenizer, prompts, max_tokens=6, return_token_ids=True)
    )
    assert ours.token_ids == truth.token_ids
    assert ours.texts == truth.texts


@pytest.mark.parametrize("size", [16, 64])
def test_batched_decoding_is_never_split(size: int) -> None:
    """64 sequences are 64 rows, but one of each sequence: decoding, which is stock's."""
    model = tiny("llama", num_hidden_layers=2)
    prompts = [prompt(80)[n % 7 : 30 + n % 5] for n in range(size)]
    fusionml.patch(model, **SETTINGS)
    generator = BatchGenerator(model, max_tokens=30, completion_batch_size=size, prefill_batch_size=8)
    generator.insert(prompts)
    decoded_alone = 0
    for _ in range(200):
        before = split_calls()
        reading, writing = generator.next()
        if len(writing) == size and not reading:
            assert split_calls() == before
            decoded_alone += 1
        if decoded_alone == 3:
            break
    assert split_calls() > 0
    assert decoded_alone == 3
    generator.close()
    fusionml.unpatch()


@pytest.mark.parametrize("agree", [True, False])
def test_speculative_decoding(agree: bool) -> None:
    """Draft and target both split their prompt; a draft that agrees and one that does not."""
    target = tiny("llama")
    draft = tiny("llama") if agree else tiny("llama", num_hidden_layers=2, intermediate_size=256)

    def run() -> tuple[list[bool], Answer]:
        steps = list(
            speculative_generate_step(
                tokens(90)[0], target, draft, num_draft_tokens=3, max_tokens=10, prefill_step_size=40
            )
        )
        drafted = [from_draft for *_, from_draft in steps]
        return drafted, Answer([t for t, *_ in steps], rows(p for _, p, _ in steps), [])

    truth, ours = stock_and_patched([target, draft], run)
    assert_same(ours[1], truth[1])
    assert ours[0] == truth[0]
    assert any(truth[0]) == agree
    # 40, 40 and 9 rows of prompt; the rows to verify are too few.
    assert set(split_layers(target).values()) == {80}
    assert set(split_layers(draft).values()) == {80}


# --- threads ------------------------------------------------------------------------------------------------


def test_two_models_on_two_threads_at_once() -> None:
    models = [tiny("llama"), tiny("qwen2")]
    work = [(model, prompt(n)) for n in (60, 90, 75) for model in models]
    truth = [answer(*item) for item in work]
    start = threading.Barrier(2)

    def mine(of: nn.Module) -> list[Answer]:
        start.wait(timeout=30)
        return [answer(model, words) for model, words in work if model is of]

    for model in models:
        fusionml.patch(model, **SETTINGS)
    with ThreadPoolExecutor(2) as pool:
        llama, qwen = pool.map(mine, models, timeout=120)
    layers = [split_layers(model) for model in models]
    fusionml.unpatch()
    for ours, theirs in zip([a for ab in zip(llama, qwen, strict=True) for a in ab], truth, strict=True):
        assert_same(ours, theirs)
    # Each counted its own rows, all of them.
    assert [set(of.values()) for of in layers] == [{59 + 89 + 74}, {59 + 89 + 74}]


def test_calls_from_asyncio_to_thread() -> None:
    model = tiny("llama")
    lengths = [50, 80, 65, 95]
    truth = [answer(model, prompt(n)) for n in lengths]

    async def at_once() -> list[Answer]:
        calls = [asyncio.to_thread(answer, model, prompt(n)) for n in lengths]
        return await asyncio.wait_for(asyncio.gather(*calls), timeout=120)

    fusionml.patch(model, **SETTINGS)
    ours = asyncio.run(at_once())
    counted = split_layers(model)
    fusionml.unpatch()
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same(mine, theirs)
    assert set(counted.values()) == {sum(lengths) - len(lengths)}


# --- the order of things ------------------------------------------------------------------------------------


def test_a_load_imported_before_the_patch_gives_known_models(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    words = tokenizer.encode(text(80))
    truth = answer(model, words)
    fusionml.patch(**SETTINGS)
    loaded, _ = load(str(folder))
    ours = answer(loaded, words)
    known = split_layers(loaded)
    untouched = answer(model, words)
    strange = split_layers(model)
    fusionml.unpatch()
    assert_same(ours, truth)
    assert known
    # The model from before was never handed over.
    assert not strange
    assert_same(untouched, truth)


def test_a_model_loaded_before_and_handed_over_splits(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    truth, ours = stock_and_patched(model, lambda: answer(model, tokenizer.encode(text(80))))
    assert_same(ours, truth)


def test_a_model_nobody_handed_over_is_stock() -> None:
    known, stranger = tiny("llama"), tiny("llama")
    truth = answer(stranger, prompt(80))
    fusionml.patch(known, **SETTINGS)
    ours = answer(stranger, prompt(80))
    assert split_calls() == 0
    fusionml.unpatch()
    assert ours.tokens == truth.tokens
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(ours.cache, truth.cache, strict=True))


PATCH_FIRST = """
import sys
import fusionml
assert not [name for name in sys.modules if name.startswith("mlx_lm")], "imported too early to be the first"
fusionml.patch(min_rows=16, ratio=0.4)
import json
from mlx_lm import load, stream_generate
model, tokenizer = load(sys.argv[1])
tokens = [r.token for r in stream_generate(model, tokenizer, sys.argv[2], max_tokens=6)]
print(json.dumps({"tokens": tokens, "calls": fusionml.status()["calls"]}))
"""


def test_a_patch_before_mlx_lm_is_imported(folder: Path) -> None:
    model, tokenizer = load(str(folder))
    truth = [r.token for r in stream_generate(model, tokenizer, text(80), max_tokens=6)]
    done = subprocess.run(
        [sys.executable, "-c", PATCH_FIRST, str(folder), text(80)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout.splitlines()[-1])
    assert got["tokens"] == truth
    assert got["calls"]["split"] > 0


# --- what goes wrong ----------------------------------------------------------------------------------------


@pytest.fixture
def wired() -> Iterator[list[tuple[Any, ...]]]:
    """MLX as on a Mac, where MLX-LM sets the wired limit; what was waited for and set, in order.

    MLX's own functions are put back before anybody looks whether they are in place.
    """
    order: list[tuple[Any, ...]] = []
    synchronize, info = mx.synchronize, mx.device_info()

    def wait(*streams: Any) -> None:
        synchronize(*streams)
        order.append(("waited", *streams))

    def limit(size: int) -> int:
        order.append(("limit", size))
        return 7

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(mx, "device_info", lambda: info | {"max_recommended_working_set_size": 1 << 40})
        patches.setattr(mx, "set_wired_limit", limit)
        patches.setattr(mx, "synchronize", wait)
        yield order


class Stop(Exception):
    """What a user's callback raises."""


def stop(processed: int, total: int) -> None:
    if 0 < processed < total:
        raise Stop(processed)


def interrupt(processed: int, total: int) -> None:
    if 0 < processed < total:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("callback", "error"), [(stop, Stop), (interrupt, KeyboardInterrupt)])
def test_an_exception_in_the_middle_of_a_prompt(
    folder: Path, wired: list[tuple[Any, ...]], callback: Any, error: type[BaseException]
) -> None:
    """It reaches the user, our stream is waited for before the limit changes, and the next prompt works."""
    model, tokenizer = load(str(folder))
    words = tokenizer.encode(text(120))
    truth = answer(model, words)
    fusionml.patch(model, **SETTINGS)
    response = stream_generate(
        model, tokenizer, words, prefill_step_size=40, prompt_progress_callback=callback
    )
    with pytest.raises(error):
        next(response)
    assert split_calls() > 0
    assert wired[0] == ("limit", 1 << 40)
    assert wired[-3:] == [("waited", generation_stream), ("waited", split.cpu_stream), ("limit", 7)]
    ours = answer(model, words)
    fusionml.unpatch()
    assert_same(ours, truth)


def test_ctrl_c_inside_a_split_is_not_swallowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load(str(folder))
    words = tokenizer.encode(text(120))
    truth = answer(model, words)
    fusionml.patch(model, **SETTINGS)
    with monkeypatch.context() as patches:
        join = split.join

        def interrupted(*args: Any) -> mx.array:
            signal.raise_signal(signal.SIGINT)
            return join(*args)

        patches.setattr(split, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(model, words)
    ours = answer(model, words)
    fusionml.unpatch()
    assert_same(ours, truth)


def test_a_batch_that_is_closed_waits_for_our_stream(wired: list[tuple[Any, ...]]) -> None:
    model = tiny("llama")
    fusionml.patch(model, **SETTINGS)
    batch(model, [prompt(60), prompt(30)])
    assert split_calls() > 0
    fusionml.unpatch()
    assert wired[-2:] == [("waited", split.cpu_stream), ("limit", 7)]


def test_a_missing_model_is_stocks_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for path in (tmp_path / "absent", tmp_path / "empty", tmp_path / "bare"):
        with pytest.raises(Exception) as stock:  # noqa: PT011 - whatever stock raises is the truth
            load(str(path))
        with fusionml.patched(**SETTINGS), pytest.raises(type(stock.value)) as ours:
            load(str(path))
        assert str(ours.value) == str(stock.value)


@pytest.mark.parametrize(
    ("setting", "value", "allowed"),
    [("ratio", 1.5, "0 to "), ("boundary", "eagre", "eager, async, none"), ("min_rows", 0, "at least 2")],
)
def test_a_wrong_setting_leaves_the_running_patch_as_it_is(setting: str, value: Any, allowed: str) -> None:
    model = tiny("llama")
    truth = answer(model, prompt(60))
    fusionml.patch(model, **SETTINGS)
    settings = fusionml.status()["settings"]
    with pytest.raises(ValueError, match=allowed) as error:
        fusionml.patch(**{setting: value})
    assert setting in str(error.value)
    assert repr(value) in str(error.value)
    assert fusionml.status()["settings"] == settings
    ours = answer(model, prompt(60))
    assert split_calls() > 0
    fusionml.unpatch()
    assert_same(ours, truth)


def test_a_wrong_setting_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSIONML_BOUNDARY", "eagre")
    with pytest.raises(ValueError, match="FUSIONML_BOUNDARY='eagre' is not allowed; choose one of eager"):
        fusionml.patch()
    assert not fusionml.status()["patched"]


def test_arrays_are_what_they_should_be() -> None:
    """The comparison itself must notice a wrong entry, a wrong type and a wrong shape."""
    model = tiny("llama")
    truth = answer(model, prompt(20))
    for wrong in ([a + 1 for a in truth.cache], [a.astype(mx.float16) for a in truth.cache], truth.cache[1:]):
        with pytest.raises((AssertionError, ValueError)):
            assert_same_arrays(wrong, truth.cache)
    assert max(truth.tokens) < VOCABULARY
    assert mlx_lm.__version__
