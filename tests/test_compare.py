"""`compare`: what it runs, in which order, and what it says about it."""

import json
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from checkpoints import small_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import load
from models import tiny

from fusionml import compare as module
from fusionml import patching, split
from fusionml.compare import LEARNING_TOKENS, Run, compare, divergence, prompt_ids, render


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(str(small_checkpoint(tmp_path_factory.mktemp("home"))))[1]


@pytest.fixture(scope="module")
def loaded() -> nn.Module:
    return tiny("llama", vocab_size=258)


@pytest.fixture
def model(loaded: nn.Module) -> nn.Module:
    """A model that this test's session knows as loaded by MLX-LM."""
    patching.session().known.add(loaded, from_loader=True)
    return loaded


class Recorder:
    """Stands in for `generate_once`: keeps what was asked for, takes no time and answers as told."""

    def __init__(self, answer: Callable[[Run], None] = lambda run: None) -> None:
        self.asked: list[tuple[str, list[int], int]] = []
        self._answer = answer

    def __call__(self, model: nn.Module, arm: str, ids: list[int], max_tokens: int) -> Run:
        assert patching.status()["patched"] == (arm == "patched")
        self.asked.append((arm, ids, max_tokens))
        run = Run(arm, len(ids), 0.001, 50.0, 1000, list(range(max_tokens)), [0.5] * max_tokens)
        self._answer(run)
        return run

    @property
    def measured(self) -> list[tuple[str, list[int], int]]:
        """All but the warm-up and the prompts to learn from, which answer with few tokens."""
        assert self.asked[0][0] == "stock"
        return [asked for asked in self.asked[1:] if asked[2] != LEARNING_TOKENS]

    @property
    def lengths(self) -> list[int]:
        return sorted({len(ids) for _, ids, _ in self.measured})


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Recorder]:
    def install(answer: Callable[[Run], None] = lambda run: None) -> Recorder:
        made = Recorder(answer)
        monkeypatch.setattr(module, "generate_once", made)
        return made

    return install


# --- what is run


def test_arms_alternate_with_one_prompt_a_pair_and_another_for_the_next(
    recorder: Callable[..., Recorder], model: nn.Module, tokenizer: Any
) -> None:
    asked = recorder()
    compare(model, tokenizer, lengths=[40, 41, 40], max_tokens=3, pairs=3)
    arms = [arm for arm, _, _ in asked.measured]
    assert arms == ["stock", "patched", "patched", "stock", "stock", "patched"] * 3
    assert [len(ids) for _, ids, _ in asked.measured] == [40] * 6 + [41] * 6 + [40] * 6
    assert {tokens for _, _, tokens in asked.measured} == {3}
    pairs = [(asked.measured[i][1], asked.measured[i + 1][1]) for i in range(0, 18, 2)]
    assert all(first == second for first, second in pairs)
    prompts = {tuple(ids[:30]) for ids, _ in pairs} | {tuple(asked.asked[0][1][:30])}
    assert len(prompts) == 10, "nine pairs and the warm-up"
    learned_from = {tuple(ids) for _, ids, tokens in asked.asked if tokens == LEARNING_TOKENS}
    assert not learned_from & {tuple(ids) for _, ids, _ in asked.measured}


@given(length=st.integers(2, 700), seeds=st.lists(st.integers(0, 3000), min_size=2, max_size=2, unique=True))
@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("source", [None, "Straße. "])
def test_prompts_have_exactly_their_length_and_differ_from_the_first_word_on(
    tokenizer: Any, length: int, seeds: list[int], source: str | None
) -> None:
    first, second = (prompt_ids(tokenizer, length, seed, source) for seed in seeds)
    assert len(first) == len(second) == length
    assert first == prompt_ids(tokenizer, length, seeds[0], source)
    if length > 5:
        assert tokenizer.decode(first).split()[0] != tokenizer.decode(second).split()[0]


def test_a_prompt_from_a_file_is_its_text_repeated(tokenizer: Any) -> None:
    words = tokenizer.decode(prompt_ids(tokenizer, 60, 1, "alpha beta gamma")).split()
    assert words[1:8] == ["alpha", "beta", "gamma", "alpha", "beta", "gamma", "alpha"]


def test_the_beginning_of_text_comes_once() -> None:
    class Marking:
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [0] * add_special_tokens + [ord(c) for c in text]

    ids = prompt_ids(Marking(), 100, 1, "short")
    assert (ids[0], ids.count(0), len(ids)) == (0, 1, 100)


@pytest.mark.parametrize(
    ("seconds_a_token", "context", "expected"),
    [
        (1e-4, None, [512, 2048]),
        (1.0, None, [512]),
        (1e-4, 131072, [512, 2048]),
        (1e-4, 1000, [512]),
        (1e-4, 512 + 8, [512]),
        (1e-4, 512 + 7, [511]),
        (1e-4, 100, [92]),
    ],
)
def test_default_lengths_suit_the_machine_and_the_context(
    recorder: Callable[..., Recorder],
    model: nn.Module,
    tokenizer: Any,
    seconds_a_token: float,
    context: int | None,
    expected: list[int],
) -> None:
    def slow(run: Run) -> None:
        run.ttft = seconds_a_token * run.prompt_tokens

    asked = recorder(slow)
    compare(model, tokenizer, context=context, max_tokens=8, pairs=2)
    assert asked.lengths == expected
    if context is not None:
        assert max(len(ids) + 8 for _, ids, _ in asked.asked) <= context


def test_given_lengths_are_run_however_slow(
    recorder: Callable[..., Recorder], model: nn.Module, tokenizer: Any
) -> None:
    def slow(run: Run) -> None:
        run.ttft = 1000.0

    asked = recorder(slow)
    compare(model, tokenizer, lengths=[30, 60], max_tokens=2, pairs=1)
    assert asked.lengths == [30, 60]


def test_progress_counts_every_measured_run(
    recorder: Callable[..., Recorder], model: nn.Module, tokenizer: Any
) -> None:
    recorder()
    told: list[tuple[int, int]] = []
    compare(model, tokenizer, lengths=[30, 31], max_tokens=2, pairs=2, progress=lambda *at: told.append(at))
    assert told == [(done, 8) for done in range(9)]


# --- the two arms


def judged(model: nn.Module, ids: list[int], tokens: list[int]) -> tuple[list[int], list[float]]:
    """The best token at each place of an answer and its lead, by one forward pass without a cache."""
    logits = np.array(model(mx.array([ids + tokens[:-1]]))[0, len(ids) - 1 :])
    second, best = np.sort(logits)[:, -2:].T
    return logits.argmax(axis=1).tolist(), (best - second).tolist()


def test_stock_is_stock_and_patched_splits_and_both_answer_as_the_model_does(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, tokenizer: Any
) -> None:
    arm, splits, prompts = "", {"stock": [], "patched": []}, []
    original, split_once = module.generate_once, split.run_linear

    def generate(model: nn.Module, name: str, ids: list[int], tokens: int) -> Run:
        nonlocal arm
        arm = name
        prompts.append(ids)
        return original(model, name, ids, tokens)

    def run_linear(*args: Any) -> mx.array:
        splits[arm].append(args[3])
        return split_once(*args)

    monkeypatch.setattr(module, "generate_once", generate)
    monkeypatch.setattr(split, "run_linear", run_linear)
    result = compare(model, tokenizer, lengths=[300], max_tokens=4, pairs=1, settings={"ratio": 0.25})
    # Two of three blocks are live, with seven layers each; the warm-up and one run.
    assert splits["stock"] == []
    assert splits["patched"] == [split.cpu_rows(319, 0.25)] * 14 + [split.cpu_rows(299, 0.25)] * 14
    for ids, sample in zip(prompts[2:], result["samples"], strict=True):
        tokens, gaps = judged(model, ids, sample["tokens"])
        assert sample["tokens"] == tokens
        assert sample["gaps"] == pytest.approx(gaps, abs=1e-3)
        assert sample["peak_memory"] > 0
    (summary,) = result["summary"]
    assert summary["divergence"] is None
    assert "tokens identical (4 of 4)" in render(result, tokenizer)


def test_the_status_is_the_patched_arms_and_names_its_decisions(model: nn.Module, tokenizer: Any) -> None:
    result = compare(model, tokenizer, lengths=[270], max_tokens=1, pairs=2, settings={"ratio": 0.25})
    state = result["status"]
    assert state["patched"]
    assert state["settings"]["ratio"] == 0.25
    assert {(site["arm"], site["ratio"]) for site in state["sites"].values()} == {("split", 0.25)}
    shown = render(result, tokenizer)
    assert all(key in shown for key in state["sites"])
    assert json.loads(json.dumps(result)) == result


def test_a_failure_in_the_middle_leaves_nothing_patched(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, tokenizer: Any
) -> None:
    def failing(*args: Any) -> Run:
        raise RuntimeError("out of memory")

    stock = nn.Linear.__call__
    monkeypatch.setattr(module, "generate_once", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        compare(model, tokenizer, lengths=[30])
    assert nn.Linear.__call__ is stock


# --- what it says


def test_a_split_that_changes_the_answer_is_shown_with_both_continuations_and_the_gap(
    monkeypatch: pytest.MonkeyPatch, model: nn.Module, tokenizer: Any
) -> None:
    split_once = split.run_linear
    monkeypatch.setattr(split, "run_linear", lambda *args: -split_once(*args))
    result = compare(model, tokenizer, lengths=[300], max_tokens=6, pairs=1)
    stock, treated = (sample["tokens"] for sample in result["samples"])
    at = next(i for i in range(6) if stock[i] != treated[i])
    (summary,) = result["summary"]
    _, gaps = judged(model, prompt_ids(tokenizer, 300, 1, None), stock)
    found = summary["divergence"]
    assert (found["position"], found["stock"], found["patched"]) == (at, stock[at:], treated[at:])
    assert found["logit_gap"] == pytest.approx(gaps[at], abs=1e-3)
    shown = render(result, tokenizer)
    assert f"tokens differ from token {at + 1} of 6 on" in shown
    assert repr(tokenizer.decode(stock[at:])) in shown
    assert repr(tokenizer.decode(treated[at:])) in shown
    assert "identical" not in shown


def run(tokens: list[int], gaps: list[float] | None = None, **changes: Any) -> Run:
    made = Run("stock", 9, 1.0, 10.0, 100, tokens, gaps or [0.0] * len(tokens))
    for name, value in changes.items():
        setattr(made, name, value)
    return made


@given(
    same=st.lists(st.integers(0, 9), max_size=20),
    tails=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
)
def test_divergence_is_at_the_first_difference(same: list[int], tails: list[tuple[int, int]]) -> None:
    stock = run(same + [a for a, _ in tails], [float(i) for i in range(len(same) + len(tails))])
    treated = run(same + [b for _, b in tails])
    found = divergence(stock, treated)
    if stock.tokens == treated.tokens:
        assert found is None
    else:
        at = int(np.argmax(np.array(stock.tokens) != np.array(treated.tokens)))
        assert found == {
            "position": at,
            "stock": stock.tokens[at:][:16],
            "patched": treated.tokens[at:][:16],
            "logit_gap": float(at),
        }


def test_the_summary_is_of_pairs_with_stock_against_itself_beside_it() -> None:
    stock = [run([1], ttft=t, decode_tps=r, peak_memory=m) for t, r, m in [(2, 10, 5), (4, 8, 7), (6, 5, 6)]]
    treated = [
        run([1], ttft=t, decode_tps=r, peak_memory=m) for t, r, m in [(1, 20, 9), (1, 8, 8), (5, 5, 3)]
    ]
    found = module.summarise(9, stock, treated)
    assert found["ttft"] == {"stock": 4, "patched": 1}
    ratio = found["ttft_ratio"]
    assert (ratio["value"], ratio["smallest"], ratio["largest"]) == (2, pytest.approx(1.2), 4)
    assert found["ttft_aa"]["value"] == 0.5, "the first half against the second, the odd one out"
    assert found["decode_tps"] == {"stock": 8, "patched": 8}
    assert found["decode_ratio"]["value"] == 1
    assert found["decode_ratio"]["largest"] == 2, "twice the rate is twice as fast"
    assert found["decode_aa"]["value"] == 0.8
    assert found["peak_memory"] == {"stock": 7, "patched": 9}


def test_one_token_has_no_decode_rate(model: nn.Module, tokenizer: Any) -> None:
    result = compare(model, tokenizer, lengths=[30], max_tokens=1, pairs=1)
    (summary,) = result["summary"]
    assert summary["decode_tps"] == {"stock": None, "patched": None}
    assert summary["decode_ratio"] is None
    shown = render(result, tokenizer)
    assert "decode tok/s" in shown
    assert "stock against itself not known (one pair)" in shown


def test_the_table_shows_times_rates_ratios_memory_and_noise(
    recorder: Callable[..., Recorder], model: nn.Module, tokenizer: Any
) -> None:
    def answer(run: Run) -> None:
        run.ttft = 0.5 if run.arm == "patched" else 1.0
        run.decode_tps = 40.0
        run.peak_memory = (3 if run.arm == "patched" else 2) * 2**20

    recorder(answer)
    shown = render(compare(model, tokenizer, lengths=[100], max_tokens=2, pairs=2), tokenizer).split("\n")
    assert shown[1].split() == ["100", "stock", "1.00", "s", "100.0", "40.0", "2", "MiB"]
    assert shown[2].split() == ["patched", "0.50", "s", "200.0", "40.0", "3", "MiB"]
    assert "TTFT 2.00x (pairs 2.00 to 2.00); stock against itself 1.00x" in shown[3]
    assert "decode 1.00x (pairs 1.00 to 1.00); stock against itself 1.00x" in shown[4]


def test_unsteady_times_are_warned_about(
    recorder: Callable[..., Recorder], model: nn.Module, tokenizer: Any
) -> None:
    times = iter([1.0, 1.0, 1.0, 1.0, 1.0, 3.0])

    def answer(run: Run) -> None:
        run.ttft = next(times)

    recorder(answer)
    shown = render(compare(model, tokenizer, lengths=[100], max_tokens=2, pairs=2), tokenizer)
    assert "warning, stock: the standard deviation" in shown
    assert "warning, patched" not in shown
