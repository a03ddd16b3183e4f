"""`patch`, `unpatch` and `patched`: what they replace, what comes back, and which calls they touch."""

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from conftest import REPLACED
from graphs import evaluated, lazy, operations
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from models import Pair, pair, tiny, tokens

import fusionml
from fusionml import forwards, machine, patching, pressure, sites, split
from fusionml import session as session_module
from fusionml.session import Session
from fusionml.settings import Settings

SPLIT: dict[str, Any] = {"min_rows": 32, "ratio": 0.5}
TARGETS = REPLACED


def x(*shape: int) -> mx.array:
    made = mx.random.normal(shape or (1, 40, 128), key=mx.random.key(2))
    mx.eval(made)
    return made


def current() -> list[Any]:
    return [getattr(owner, name) for owner, name in TARGETS]


def splits(model: Pair) -> bool:
    """Whether a prompt-sized call of the first layer is split now."""
    return "Concatenate" in operations(model.up(x()))


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The evaluations that anybody asks MLX for."""
    asked: list[str] = []
    real = {name: getattr(mx, name) for name in ("eval", "async_eval")}
    for name, function in real.items():
        setattr(mx, name, lambda *a, name=name, function=function: (asked.append(name), function(*a))[1])
    try:
        yield asked
    finally:
        for name, function in real.items():
            setattr(mx, name, function)


# Putting in and taking out


def test_patch_and_unpatch(stock_functions: dict[Any, Any]) -> None:
    stock = list(stock_functions.values())
    assert current() == stock
    model = pair()
    fusionml.patch(model, **SPLIT)
    assert not any(now is was for now, was in zip(current(), stock, strict=True))
    assert fusionml.status()["patched"] is True
    assert splits(model)
    assert fusionml.unpatch() is True
    assert all(now is was for now, was in zip(current(), stock, strict=True))
    assert fusionml.status()["patched"] is False
    assert not splits(model)


def test_it_is_in_place_on_mlxs_own_class(patch: Callable[..., None]) -> None:
    early = nn.Linear
    model = pair()
    bound = model.up.__call__
    patch(model, **SPLIT)
    assert nn.Linear is early
    assert early.__call__ is not bound.__func__
    assert early.__call__.__wrapped__ is bound.__func__
    assert early.__call__.__name__ == "__call__"
    assert early.__call__.__doc__ == bound.__func__.__doc__


def test_patch_twice_unpatch_twice(stock_functions: dict[Any, Any], session: Session) -> None:
    model = pair()
    fusionml.patch(model, **SPLIT)
    once = current()
    fusionml.patch(min_rows=64)
    assert all(now is was for now, was in zip(current(), once, strict=True))
    assert session.settings.min_rows == 64
    assert not splits(model)
    assert fusionml.unpatch() is True
    assert fusionml.unpatch() is True
    assert current() == list(stock_functions.values())
    fusionml.patch(**SPLIT)
    assert splits(model)
    fusionml.unpatch()


def test_unpatch_without_patch(stock_functions: dict[Any, Any]) -> None:
    assert fusionml.unpatch() is True
    assert current() == list(stock_functions.values())


@pytest.mark.parametrize(("owner", "name"), TARGETS)
def test_it_refuses_to_remove_what_somebody_wrapped(owner: Any, name: str) -> None:
    model = pair()
    fusionml.patch(model, **SPLIT)
    ours = getattr(owner, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    setattr(owner, name, theirs)
    try:
        assert splits(model)
        with pytest.warns(RuntimeWarning, match="wrapped by somebody") as warned:
            assert fusionml.unpatch() is False
        assert f"{owner.__name__}.{name}" in str(warned[0].message)
        assert warned[0].filename == __file__
        assert getattr(owner, name) is theirs
        assert fusionml.status()["patched"] is False
        given = lazy(x())
        assert not evaluated(model(given))
        assert not evaluated(given)
        assert fusionml.status()["calls"] == {"split": 1}
    finally:
        setattr(owner, name, ours)
    assert fusionml.unpatch() is True


def test_patching_again_under_somebodys_wrapper_uses_ours_inside() -> None:
    model = pair()
    fusionml.patch(model, **SPLIT)
    ours = nn.Linear.__call__
    nn.Linear.__call__ = lambda self, given: ours(self, given)
    with pytest.warns(RuntimeWarning, match=r"Linear.__call__"):
        fusionml.unpatch()
    fusionml.patch(model, **SPLIT)
    assert operations(model.up(x())).count("Concatenate") == 1
    nn.Linear.__call__ = ours
    assert fusionml.unpatch() is True


def test_somebody_else_put_the_original_back(stock_functions: dict[Any, Any]) -> None:
    model = pair()
    fusionml.patch(model, **SPLIT)
    nn.Linear.__call__ = stock_functions[nn.Linear, "__call__"]
    fusionml.patch(**SPLIT)
    assert splits(model)
    nn.Linear.__call__ = stock_functions[nn.Linear, "__call__"]
    assert fusionml.unpatch() is True
    assert current() == list(stock_functions.values())


def test_somebody_wrapped_before_us_and_put_the_original_back(
    stock_functions: dict[Any, Any], recwarn: pytest.WarningsRecorder
) -> None:
    """They wrapped, we patched, they put stock back: there is nothing of ours left until we patch again."""
    stock, model = stock_functions[nn.Linear, "__call__"], pair()
    for again in (True, False):
        nn.Linear.__call__ = lambda self, given: stock(self, given)
        fusionml.patch(model, **SPLIT)
        nn.Linear.__call__ = stock
        assert not splits(model)
        if again:
            fusionml.patch(**SPLIT)
            assert splits(model)
        assert fusionml.unpatch() is True
        assert current() == list(stock_functions.values())
        assert not splits(model)
    assert list(recwarn) == []


def test_a_wrapper_below_ours_stays(stock_functions: dict[Any, Any]) -> None:
    stock = nn.Linear.__call__
    seen: list[int] = []

    def theirs(self: nn.Linear, given: mx.array) -> mx.array:
        seen.append(1)
        return stock(self, given)

    nn.Linear.__call__ = theirs
    try:
        fusionml.patch(**SPLIT)
        mx.eval(pair()(x()))
        assert len(seen) == 2
        assert fusionml.unpatch() is True
        assert nn.Linear.__call__ is theirs
    finally:
        nn.Linear.__call__ = stock


# The context manager


def test_patched_for_a_block(stock_functions: dict[Any, Any], session: Session) -> None:
    model = pair()
    session.known.add(model, from_loader=False)
    with fusionml.patched(**SPLIT) as entered:
        assert isinstance(entered, fusionml.patched)
        assert splits(model)
    assert current() == list(stock_functions.values())
    assert not splits(model)


def test_patched_ends_with_an_exception(stock_functions: dict[Any, Any]) -> None:
    with pytest.raises(KeyError), fusionml.patched(**SPLIT):
        raise KeyError("theirs")
    assert current() == list(stock_functions.values())


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_an_interrupted_block_leaves_nothing_behind(
    moment: str, monkeypatch: pytest.MonkeyPatch, stock_functions: dict[Any, Any], session: Session
) -> None:
    where = {
        "before": (patching, "_install"),
        "between": (patching._replacements[1], "install"),
        "after": (session, "configure"),
    }
    block, entered = fusionml.patched(**SPLIT), []
    with monkeypatch.context() as ctrl_c:
        real, interrupts = getattr(*where[moment]), [KeyboardInterrupt]

        def interrupted(*args: Any) -> Any:
            if interrupts:
                raise interrupts.pop()
            return real(*args)

        ctrl_c.setattr(*where[moment], interrupted)
        with pytest.raises(KeyboardInterrupt), block:
            entered.append(1)
    assert entered == []
    assert current() == list(stock_functions.values())
    assert fusionml.status()["patched"] is False
    assert patching._contexts == {}
    model = pair()
    fusionml.patch(model, **SPLIT)
    with block:
        assert splits(model)
    assert splits(model)
    assert fusionml.unpatch() is True
    assert current() == list(stock_functions.values())


def test_an_interrupted_block_inside_a_patch_leaves_the_patch(
    patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    model, real, interrupts = pair(), session.configure, [KeyboardInterrupt]
    patch(model, **SPLIT)

    def interrupted(settings: Settings) -> None:
        real(settings)
        if interrupts:
            raise interrupts.pop()

    monkeypatch.setattr(session, "configure", interrupted)
    with pytest.raises(KeyboardInterrupt), fusionml.patched(enabled=False):
        pass
    assert session.settings.min_rows == 32
    assert splits(model)


def test_what_runs_after_it_returns_is_not_decorated() -> None:
    async def coroutine() -> None: ...

    async def asynchronous() -> Any:
        yield

    def generator() -> Any:
        yield

    for function in (coroutine, asynchronous, generator):
        with pytest.raises(TypeError, match=rf"{function.__name__}.*with patched"):
            fusionml.patched(**SPLIT)(function)


def test_patched_decorates(stock_functions: dict[Any, Any], session: Session) -> None:
    model = pair()
    session.known.add(model, from_loader=False)

    @fusionml.patched(**SPLIT)
    def inside(depth: int) -> list[bool]:
        return [splits(model), *(inside(depth - 1) if depth else [])]

    assert inside(2) == [True] * 3
    assert inside(0) == [True]
    assert inside.__name__ == "inside"
    assert current() == list(stock_functions.values())


def test_nested_blocks_use_the_innermost_settings(session: Session, stock_functions: dict[Any, Any]) -> None:
    fusionml.patch(min_rows=100)
    with fusionml.patched(min_rows=200):
        with fusionml.patched(min_rows=300):
            assert session.settings.min_rows == 300
        assert session.settings.min_rows == 200
        with fusionml.patched(enabled=False):
            assert fusionml.status()["patched"] is False
            assert session.smallest > 1 << 40
        assert session.settings.min_rows == 200
        fusionml.patch(min_rows=150)
        assert session.settings.min_rows == 200
    assert session.settings.min_rows == 150
    assert fusionml.status()["patched"] is True
    fusionml.unpatch()
    assert current() == list(stock_functions.values())


def test_unpatch_inside_a_block_ends_with_the_block(stock_functions: dict[Any, Any]) -> None:
    fusionml.patch(**SPLIT)
    with fusionml.patched(**SPLIT):
        fusionml.unpatch()
        assert fusionml.status()["patched"] is True
    assert current() == list(stock_functions.values())


def test_blocks_in_two_threads_at_once(stock_functions: dict[Any, Any], session: Session) -> None:
    model = pair()
    session.known.add(model, from_loader=False)
    entered, left = threading.Barrier(2), threading.Event()
    seen: dict[str, bool] = {}

    def first() -> None:
        with fusionml.patched(**SPLIT):
            entered.wait(10)
            seen["first"] = splits(model)
        left.set()

    def second() -> None:
        with fusionml.patched(**SPLIT):
            entered.wait(10)
            left.wait(10)
            seen["second"] = splits(model)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {"first": True, "second": True}
    assert current() == list(stock_functions.values())


def test_many_threads_patch_and_unpatch(stock_functions: dict[Any, Any]) -> None:
    def work(index: int) -> None:
        for _ in range(20):
            if index % 2:
                fusionml.patch(**SPLIT)
                fusionml.unpatch()
            else:
                with fusionml.patched(**SPLIT):
                    pass

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert fusionml.unpatch() is True
    assert current() == list(stock_functions.values())


# Settings


WRONG: list[tuple[dict[str, Any], dict[str, str], tuple[str, ...]]] = [
    ({"ratio": 1.5}, {}, ("ratio", "1.5", "0.")),
    ({"boundary": "eagre"}, {}, ("boundary", "'eagre'", "eager, async, none")),
    ({"min_rows": 0}, {}, ("min_rows", "0", "at least 2")),
    ({"cpu_dtype": "bf16"}, {}, ("cpu_dtype", "'bf16'", "auto, native, float32")),
    ({"gate": "never"}, {}, ("gate", "'never'", "auto, periodic, lock, off")),
    ({"table": 5}, {}, ("table", "5", "path")),
    ({}, {"FUSIONML_RATIO": "1.5"}, ("FUSIONML_RATIO", "1.5", "0.")),
    ({}, {"FUSIONML_BOUNDARY": "eagre"}, ("FUSIONML_BOUNDARY", "'eagre'", "eager, async, none")),
    ({}, {"FUSIONML_MIN_ROWS": "many"}, ("FUSIONML_MIN_ROWS", "'many'", "whole number")),
    ({}, {"FUSIONML_ENABLED": "perhaps"}, ("FUSIONML_ENABLED", "'perhaps'", "0 or 1")),
]


@pytest.mark.parametrize(("given", "environment", "words"), WRONG)
def test_a_wrong_setting_leaves_nothing_patched(
    given: dict[str, Any],
    environment: dict[str, str],
    words: tuple[str, ...],
    stock_functions: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
    session: Session,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    model = pair()
    for attempt in (lambda: fusionml.patch(model, **given), lambda: fusionml.patched(**given)):
        with pytest.raises(ValueError, match=words[0]) as raised:
            attempt()
        assert all(word in str(raised.value) for word in words), raised.value
        assert current() == list(stock_functions.values())
        assert fusionml.status()["patched"] is False
        assert session.known.models() == []


def test_a_wrong_setting_keeps_the_right_ones_of_before(patch: Callable[..., None], session: Session) -> None:
    patch(min_rows=77)
    with pytest.raises(ValueError, match="ratio"):
        patch(ratio=7)
    assert session.settings.min_rows == 77
    assert fusionml.status()["patched"] is True


def test_what_is_no_model_and_what_is_no_setting(stock_functions: dict[Any, Any]) -> None:
    with pytest.raises(TypeError, match="str"):
        fusionml.patch("a/path")
    with pytest.raises(TypeError, match="'rato'"):
        fusionml.patch(rato=0.3)
    assert current() == list(stock_functions.values())


def test_handing_a_model_over_keeps_the_settings_and_what_was_learned(
    patch: Callable[..., None], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = pair(), pair()
    patch(ratio=0.3, gate="auto", min_rows=32)
    patch(model)
    for _ in range(5):
        mx.eval(model(x()))
    settings, controls = session.settings, dict(session._controls)
    assert controls
    samples = [control.state() for control in controls.values()]
    monkeypatch.setenv("FUSIONML_MIN_ROWS", "77")
    patch(other)
    assert session.settings == settings
    assert (settings.ratio, settings.gate, settings.min_rows) == (0.3, "auto", 32)
    assert all(session._controls[key] is control for key, control in controls.items())
    assert [control.state() for control in controls.values()] == samples
    assert len(session.known.models()) == 2
    patch(model, ratio=0.25)
    assert (session.settings.ratio, session.settings.min_rows) == (0.25, 77)
    assert session._controls == {}
    patch()
    assert session.settings.ratio is None, "without a model, patch() is the defaults"


def test_the_first_model_handed_over_patches_with_the_environment_and_the_defaults(
    patch: Callable[..., None], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pair()
    monkeypatch.setenv("FUSIONML_MIN_ROWS", "32")
    monkeypatch.setenv("FUSIONML_RATIO", "0.25")
    patch(model)
    assert session.settings == dataclasses.replace(Settings(), min_rows=32, ratio=0.25, gate="off")
    assert splits(model)
    assert fusionml.unpatch() is True
    monkeypatch.delenv("FUSIONML_RATIO")
    patch(model)
    assert session.settings.ratio is None, "what was before unpatch() is over"


def test_every_setting_is_accepted(patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "enabled": True,
        "ratio": 0.25,
        "min_rows": 64,
        "boundary": "async",
        "cpu_dtype": "native",
        "gate": "lock",
        "table": "/a/table.json",
        "quantized": False,
        "moe": False,
    }
    patch(**given)
    assert fusionml.status()["settings"] == given
    for name, value in given.items():
        text = str(int(value)) if isinstance(value, bool) else str(value)
        monkeypatch.setenv(f"FUSIONML_{name.upper()}", text)
    patch()
    assert fusionml.status()["settings"] == given


@pytest.mark.parametrize("text", ["0", "false", "off"])
def test_off_by_the_environment(
    text: str, monkeypatch: pytest.MonkeyPatch, stock_functions: dict[Any, Any]
) -> None:
    monkeypatch.setenv("FUSIONML_ENABLED", text)
    model = pair()
    fusionml.patch(model, **SPLIT)
    with fusionml.patched(**SPLIT):
        assert current() == list(stock_functions.values())
        assert not splits(model)
    assert fusionml.status()["patched"] is False
    fusionml.unpatch()


def test_switched_off_while_patched(patch: Callable[..., None]) -> None:
    model = pair()
    patch(model, **SPLIT)
    assert splits(model)
    patch(enabled=False)
    assert not splits(model)
    assert fusionml.status()["patched"] is False
    patch(**SPLIT)
    assert splits(model)


def test_another_ratio_holds_from_the_next_call_on(
    patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    real = split.run_linear
    monkeypatch.setattr(
        split, "run_linear", lambda x, w, b, m, *rest: (seen.append(m), real(x, w, b, m, *rest))[1]
    )
    model = pair()
    for ratio in (0.5, 0.25, 0):
        patch(model, min_rows=32, ratio=ratio)
        model.up(x(1, 512, 128))
    assert seen == [256, 128]


@pytest.mark.parametrize("boundary", split.BOUNDARIES)
@pytest.mark.parametrize("cpu_dtype", split.CPU_DTYPES)
def test_the_settings_reach_the_split(
    patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch, boundary: str, cpu_dtype: str
) -> None:
    seen: list[tuple[int, str, str]] = []
    real = split.run_linear

    def spy(x: mx.array, w: mx.array, b: mx.array | None, m: int, boundary: str, dtype: str) -> mx.array:
        seen.append((m, boundary, dtype))
        return real(x, w, b, m, boundary, dtype)

    monkeypatch.setattr(split, "run_linear", spy)
    model = pair()
    model.set_dtype(mx.float16)
    given = x(1, 512, 128).astype(mx.float16)
    expected = model(given)
    patch(model, min_rows=32, ratio=0.25, boundary=boundary, cpu_dtype=cpu_dtype)
    out = model(given)
    dtype = split.resolve_cpu_dtype(cpu_dtype, mx.float16)
    assert seen == [(128, boundary, dtype)] * 2
    assert out.dtype == mx.float16
    assert mx.allclose(out, expected, rtol=1e-2, atol=1e-2)


def test_one_line_says_that_it_is_on(caplog: pytest.LogCaptureFixture, patch: Callable[..., None]) -> None:
    with caplog.at_level(logging.INFO, logger="fusionml"):
        patch(**SPLIT)
        patch(**SPLIT)
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "patched" in caplog.text


# Which calls are touched


@pytest.mark.parametrize(
    ("shape", "split_it"),
    [
        ((1, 31, 128), False),
        ((1, 32, 128), True),
        ((1, 33, 128), True),
        ((32, 128), True),
        ((31, 128), False),
        ((8, 4, 128), True),
        ((2, 2, 8, 128), True),
        ((2, 15, 128), False),
        ((64, 1, 128), False),
        ((32, 2, 1, 128), False),
        ((1, 8, 128), False),
        ((1, 1, 128), False),
        ((128,), False),
        ((0, 128), False),
        ((4, 0, 128), False),
    ],
)
def test_only_many_rows_in_the_sequence_split(
    shape: tuple[int, ...], split_it: bool, patch: Callable[..., None]
) -> None:
    model, given = pair(), x(*shape)
    expected = model.up(given)
    patch(model, **SPLIT)
    waiting = lazy(given) if given.size else given
    with counted() as asked:
        out = model.up(waiting)
    assert ("Concatenate" in operations(out)) == split_it
    assert bool(asked) == split_it
    assert evaluated(waiting) == (split_it or not given.size)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    assert mx.allclose(out, expected, atol=1e-5)
    assert fusionml.status()["calls"] == ({"split": 1} if split_it else {})


def test_a_long_vector_is_one_row(patch: Callable[..., None]) -> None:
    model = pair(width=4096, hidden=128)
    patch(model, min_rows=2, ratio=0.5)
    given = lazy(x(4096))
    assert model.up(given).shape == (128,)
    assert not evaluated(given)
    assert fusionml.status()["calls"] == {}


def test_the_default_is_256_rows(patch: Callable[..., None]) -> None:
    model = pair()
    patch(model, ratio=0.5)
    assert "Concatenate" not in operations(model.up(x(1, 255, 128)))
    assert "Concatenate" in operations(model.up(x(1, 256, 128)))


@pytest.mark.parametrize("batch", [1, 64])
def test_decoding_evaluates_nothing(batch: int, patch: Callable[..., None], session: Session) -> None:
    model = tiny("llama")
    patch(**SPLIT)
    session.known.add(model, from_loader=True)
    cache = make_prompt_cache(model)
    model(tokens(ROWS_OF_A_CHUNK, batch), cache=cache)
    mx.eval([part.state for part in cache])
    before = fusionml.status()["calls"]
    with counted() as asked:
        logits = model(tokens(1, batch), cache=cache)
    assert asked == []
    assert not evaluated(logits)
    assert fusionml.status()["calls"] == before


ROWS_OF_A_CHUNK = 40


@pytest.mark.parametrize("length", [2, 31, 32, 33, 34, 64, 65, 66, 96, 97, 98, 130])
def test_chunks_and_remainders_of_every_size_give_the_same_tokens(
    length: int, patch: Callable[..., None], session: Session
) -> None:
    def generated(model: nn.Module) -> list[int]:
        steps = generate_step(tokens(length)[0], model, max_tokens=6, prefill_step_size=64)
        return [token for token, _ in steps]

    expected = generated(tiny("llama"))
    model = tiny("llama")
    patch(**SPLIT)
    session.known.add(model, from_loader=True)
    assert generated(model) == expected
    chunks = [min(64, length - 1 - start) for start in range(0, length - 1, 64)]
    large = sum(1 for chunk in chunks if chunk >= 32)
    assert fusionml.status()["calls"].get("split", 0) == 14 * large


def test_a_ratio_of_zero_is_the_original_call(patch: Callable[..., None]) -> None:
    model, given = pair(), lazy(x())
    patch(model, min_rows=32, ratio=0)
    with counted() as asked:
        out = model(given)
    assert asked == []
    assert not evaluated(given)
    assert "Concatenate" not in operations(out)
    assert fusionml.status()["calls"] == {"stock": 2}


# When something of ours fails


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("something of ours broke")


@pytest.mark.parametrize("where", ["run_linear", "cpu_rows", "control", "find", "admit"])
def test_a_failure_of_ours_is_stock_and_said_once(
    where: str,
    patch: Callable[..., None],
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = pair()
    expected = model(x())
    mx.eval(expected)
    owners = {"control": session, "find": session.known, "admit": session.budget}
    monkeypatch.setattr(owners.get(where, split), where, failing)
    patch(model, **SPLIT)
    with caplog.at_level(logging.WARNING, logger="fusionml"):
        for _ in range(3):
            assert mx.array_equal(model(x()), expected)
    status = fusionml.status()
    assert status["calls"] == {"stock": 6}
    assert status["reasons"] == {"a split that failed": 6}
    assert len(caplog.records) == 1
    assert "something of ours broke" in caplog.text


def test_an_interrupt_is_not_swallowed(patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    model = pair()
    patch(model, **SPLIT)
    monkeypatch.setattr(split, "run_linear", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model(x())
    monkeypatch.undo()


# Threads


def test_a_pool_of_threads(patch: Callable[..., None]) -> None:
    model = pair()
    inputs = [x(1, 32 + 8 * index, 128) for index in range(16)]
    expected = [model(given) for given in inputs]
    mx.eval(expected)
    patch(model, **SPLIT)

    def work(given: mx.array) -> mx.array:
        out = model(given)
        mx.eval(out)
        return out

    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(work, inputs))
    for out, wanted in zip(outs, expected, strict=True):
        assert mx.allclose(out, wanted, atol=1e-5)
    assert fusionml.status()["calls"] == {"split": 32}


def test_asyncio_to_thread(patch: Callable[..., None]) -> None:
    model, expected = pair(), pair()(x())
    mx.eval(expected)
    patch(model, **SPLIT)

    def work() -> mx.array:
        out = model(x())
        mx.eval(out)
        return out

    async def all_of_them() -> list[mx.array]:
        return await asyncio.gather(*(asyncio.to_thread(work) for _ in range(6)))

    assert all(mx.allclose(out, expected, atol=1e-5) for out in asyncio.run(all_of_them()))
    assert fusionml.status()["calls"] == {"split": 12}


def test_two_models_on_two_threads(patch: Callable[..., None], session: Session) -> None:
    def generated(model: nn.Module) -> list[int]:
        stream = mx.new_thread_local_stream(mx.default_device())
        with mx.stream(stream):
            steps = generate_step(tokens(70)[0], model, max_tokens=5, prefill_step_size=64)
            return [token for token, _ in steps]

    kinds = ("llama", "qwen2")
    expected = [generated(tiny(kind)) for kind in kinds]
    models = [tiny(kind) for kind in kinds]
    patch(**SPLIT)
    for model in models:
        session.known.add(model, from_loader=True)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(generated, models)) == expected
    assert fusionml.status()["calls"]["split"] == 28


def test_the_33rd_thread_is_stock(patch: Callable[..., None]) -> None:
    model, results = pair(), []
    expected = model(x())
    mx.eval(expected)
    patch(model, **SPLIT)

    def work() -> None:
        out = model(x())
        results.append((splits(model), mx.allclose(out, expected, atol=1e-5).item()))

    for _ in range(34):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert results == [(True, True)] * 32 + [(False, True)] * 2
    assert fusionml.status()["reasons"] == {"more than 32 threads": 6}


def chain(width: int) -> nn.Sequential:
    """Twelve layers, each a site of its own."""
    sizes = [(width + n, width + n + 1) for n in range(12)]
    model = nn.Sequential(*(nn.Linear(*size) for size in sizes))
    model.eval()
    mx.eval(model.parameters())
    return model


def together(*works: Callable[[], None], poll: Callable[[], Any]) -> None:
    """Run `works` on threads of their own while another polls; none may wait for ever."""
    done, failed = threading.Event(), list[BaseException]()

    def guarded(work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    def polling() -> None:
        while not done.wait(0.001):
            poll()

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in (*works, polling)]
    for thread in threads:
        thread.start()
    for thread in threads[:-1]:
        thread.join(PATIENCE)
    done.set()
    threads[-1].join(PATIENCE)
    if any(thread.is_alive() for thread in threads):
        patching._session = Session()  # what tidies up after the test must not wait as well
        pytest.fail("they wait for each other")
    assert failed == []


PATIENCE = 20.0
"""Seconds after which threads are taken to wait for ever."""


def slowly(function: Callable[..., Any], seconds: float = 0.01) -> Callable[..., Any]:
    """The same, and so slow that another thread is sure to come by meanwhile."""
    return lambda *args: (time.sleep(seconds), function(*args))[1]


def two_known_chains(patch: Callable[..., None], session: Session) -> list[nn.Module]:
    """Two models of 12 layers each, of shapes of their own, known and watched by the gate."""
    models = [chain(128), chain(160)]
    patch(gate="auto", min_rows=32)
    for model in models:
        session.known.add(model, from_loader=False)
    return models


def test_learning_and_status_do_not_wait_for_each_other(
    patch: Callable[..., None], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sites, "LEARNING_SHARE", 1e9)
    monkeypatch.setattr(session, "crowded", lambda: False)
    monkeypatch.setattr(machine.OtherLoad, "share", slowly(lambda self: 0.0))
    monkeypatch.setattr(session, "_learning", slowly(session._learning))
    models = two_known_chains(patch, session)

    def generate(model: nn.Module, width: int) -> None:
        for _ in range(300):
            mx.eval(model(mx.ones((32, width))))
            controls = session._all_controls()
            if len(controls) == 24 and not any(control._learn for control in controls):
                break

    together(
        lambda: generate(models[0], 128),
        lambda: generate(models[1], 160),
        poll=lambda: (fusionml.status(), session.learning()),
    )
    status = fusionml.status()
    assert len(status["sites"]) == 24
    assert all("learned from" in site["why"] for site in status["sites"].values())
    assert session.saver.wait(PATIENCE)


def test_generating_under_lasting_memory_pressure_waits_for_nobody(
    patch: Callable[..., None], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "PATIENCE", 0.0)
    monkeypatch.setattr(pressure, "read", lambda: pressure.Reading(level="critical"))
    monkeypatch.setattr(session, "_learning", slowly(session._learning))
    models = two_known_chains(patch, session)

    def generate(model: nn.Module, width: int) -> None:
        for _ in range(5):
            mx.eval(model(mx.ones((32, width))))

    together(
        lambda: generate(models[0], 128), lambda: generate(models[1], 160), poll=lambda: fusionml.status()
    )
    status = fusionml.status()
    assert status["calls"] == {"stock": 2 * 5 * 12}
    assert {site["arm"] for site in status["sites"].values()} == {"stock"}


# The wired limit


def test_the_cpu_stream_is_drained_before_the_wired_limit_changes(
    patch: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    stock = mx.set_wired_limit
    mx.set_wired_limit = lambda limit: order.append(f"limit {limit}") or 7
    made = [patching.Replacement(each.owner, each.name, each.make) for each in patching._replacements]
    monkeypatch.setattr(patching, "_replacements", made)
    try:
        monkeypatch.setattr(split, "drain", lambda: order.append("drain"))
        model = pair()
        patch(model, **SPLIT)
        assert mx.set_wired_limit(5) == 7
        assert order == ["limit 5"]
        mx.eval(model(x()))
        mx.set_wired_limit(6)
        assert order == ["limit 5", "drain", "limit 6"]
        thread = threading.Thread(target=lambda: mx.set_wired_limit(8))
        thread.start()
        thread.join()
        assert order[3:] == ["limit 8"]
        fusionml.unpatch()
    finally:
        mx.set_wired_limit = stock


def test_draining_waits_for_the_cpu_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(mx, "synchronize", waited.append)
    split.drain()
    assert waited == [split.cpu_stream]


def test_a_loader_that_returns_something_else_is_left_alone(session: Session) -> None:
    for result in (None, (), (1, 2), "model"):
        assert forwards.replace_load_model(session, lambda result=result: result)() is result
    assert session.known.models() == []
