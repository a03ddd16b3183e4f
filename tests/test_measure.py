"""The statistics of the fairness protocol, against hand-computed values and simulated runs."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusionml.measure import Ratio, drift, order, overlap, paired_ratio, relative_error, spread, unstable

times = st.floats(min_value=1e-6, max_value=1e6)


def lognormal(seed: int, n: int, sigma: float = 0.03) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, sigma, n))


# --- order


def test_order_is_a_b_b_a():
    assert "".join(order("AB", 4)) == "ABBAABBA"
    assert "".join(order("AB", 3)) == "ABBAAB"
    assert "".join(order("ABC", 2)) == "ABCCBA"


@given(st.integers(1, 10).map(lambda half: 2 * half))
def test_a_linear_drift_favours_no_arm(pairs):
    labels = order(["stock", "split"], pairs)
    place = {arm: sum(i for i, label in enumerate(labels) if label == arm) for arm in ("stock", "split")}
    assert place["stock"] == place["split"]
    assert labels.count("stock") == labels.count("split") == pairs


@pytest.mark.parametrize(
    ("arms", "pairs"), [(["A"], 2), (["A", "A"], 2), ([], 1), (["A", "B"], 0), (["A", "B"], 1.5)]
)
def test_order_refuses(arms, pairs):
    with pytest.raises(ValueError, match=r"arms|pairs"):
        order(arms, pairs)


# --- paired_ratio


def test_ratio_is_the_median_of_the_pairs_not_the_ratio_of_medians():
    ratio = paired_ratio([1.0, 2.0, 9.0], [1.0, 1.0, 3.0])
    assert ratio.value == 2.0
    assert (ratio.smallest, ratio.largest, ratio.pairs) == (1.0, 3.0, 3)
    assert paired_ratio([1.0, 4.0, 6.0], [1.0, 8.0, 2.0]).value == 1.0  # the ratio of medians is 2


def test_a_speed_up_is_above_one():
    assert paired_ratio([2.0, 2.0], [1.0, 1.0]).value == 2.0


def test_one_pair_has_no_interval():
    ratio = paired_ratio([3.0], [2.0])
    assert (ratio.value, ratio.low, ratio.high, ratio.pairs) == (1.5, None, None, 1)
    assert str(ratio) == "1.50x (one pair, no interval)"


def test_two_pairs_give_their_range():
    ratio = paired_ratio([1.0, 3.0], [1.0, 1.0])
    assert (ratio.low, ratio.high) == (ratio.smallest, ratio.largest) == (1.0, 3.0)


def test_ratio_as_text():
    assert str(Ratio(1.8312, 1.794, 1.8761, 1.7, 2.0, 9)) == "1.83x [1.79, 1.88]"


@given(st.lists(st.tuples(times, times), min_size=2, max_size=30), st.integers(0, 5))
def test_interval_holds_the_median_and_stays_within_the_pairs(pairs, seed):
    baseline, treatment = zip(*pairs, strict=True)
    ratio = paired_ratio(baseline, treatment, seed=seed, resamples=200)
    assert ratio.smallest <= ratio.low <= ratio.value <= ratio.high <= ratio.largest
    assert ratio.value == statistics.median(b / t for b, t in pairs)


def test_the_interval_depends_on_the_seed_alone():
    baseline, treatment = lognormal(1, 40), lognormal(2, 40)
    first = paired_ratio(baseline, treatment, seed=3)
    assert first == paired_ratio(baseline, treatment, seed=3)


def test_more_pairs_narrow_the_interval():
    def width(n: int) -> float:
        ratio = paired_ratio(lognormal(1, n), lognormal(2, n))
        return ratio.high - ratio.low

    assert width(400) < width(25) / 2


def holds_one(pairs: int, seed: int) -> bool:
    noise = lognormal(seed, 2 * pairs)
    ratio = paired_ratio(noise[:pairs], noise[pairs:], seed=seed, resamples=1000)
    return ratio.low <= 1.0 <= ratio.high


@pytest.mark.parametrize("pairs", [10, 50])  # the protocol's counts: at full depth, and for one block
def test_an_a_a_run_gives_one(pairs):
    assert sum(holds_one(pairs, seed) for seed in range(20)) >= 19


@pytest.mark.parametrize(
    ("pairs", "least", "most"),
    [(6, 0.95, 0.98), (7, 0.95, 0.995), (10, 0.95, 0.98), (15, 0.95, 0.98), (50, 0.94, 0.97)],
)
def test_the_interval_covers_what_it_says(pairs, least, most):
    """The plain percentile bootstrap covers 0.89 to 0.94 here, the range of 50 pairs all."""
    covered = sum(holds_one(pairs, seed) for seed in range(100, 600)) / 500
    assert least <= covered <= most


def of_processes(seed, differ, each, processes=5, noise=0.13):
    """Pairs' ratios around 1: those of one process share an offset of their own."""
    random = np.random.default_rng(seed)
    offsets = np.repeat(random.normal(0, differ, processes), each)
    return np.exp(offsets + random.normal(0, noise, processes * each))


def grouped(ratios, groups):
    return paired_ratio(ratios, np.ones(len(ratios)), groups=groups, resamples=1000)


@pytest.mark.parametrize("differ", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("each", [2, 4, 10])
def test_the_interval_of_several_processes_covers_the_truth(differ, each):
    found = [grouped(of_processes(seed, differ, each), [each] * 5) for seed in range(200)]
    assert sum(ratio.low <= 1 <= ratio.high for ratio in found) >= 190
    first, second = found[::2], found[1::2]
    apart = sum(a.low > b.high or b.low > a.high for a, b in zip(first, second, strict=True))
    assert apart <= 2, "two runs of 100 whose intervals do not overlap"


def test_pairs_of_a_process_are_not_taken_for_independent():
    """The same pairs, told whose they are, say less."""
    ratios = of_processes(3, 0.15, 10)
    whole, one = grouped(ratios, [10] * 5), grouped(ratios, None)
    assert one == grouped(ratios, [50])
    assert whole.value == one.value
    assert whole.low < one.low < one.high < whole.high


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any), st.integers(0, 9))
def test_the_interval_of_groups_of_any_size_lies_within_the_pairs(groups, seed):
    ratios = np.random.default_rng(seed).lognormal(0, 0.2, sum(groups))
    found = grouped(ratios, groups)
    if len(ratios) > 1:
        assert found.smallest <= found.low <= found.high <= found.largest
    assert found.value == pytest.approx(np.median(ratios))


@pytest.mark.parametrize("groups", [[], [3], [2, 3], [5, -1], [4, 1, -1]])
def test_groups_must_add_up(groups):
    with pytest.raises(ValueError, match="groups must add up to 4 pairs"):
        paired_ratio([1.0] * 4, [1.0] * 4, groups=groups)


def test_a_real_difference_is_found():
    ratio = paired_ratio(1.3 * lognormal(1, 20), lognormal(2, 20))
    assert 1.0 < ratio.low < 1.3 < ratio.high


@pytest.mark.parametrize(
    ("baseline", "treatment"),
    [
        ([], []),
        ([1.0], [1.0, 2.0]),
        ([1.0, math.nan], [1.0, 1.0]),
        ([1.0, 1.0], [1.0, 0.0]),
        ([1.0, -1.0], [1.0, 1.0]),
        ([1.0, math.inf], [1.0, 1.0]),
        (["fast"], ["slow"]),
        ([[1.0, 2.0]], [[1.0, 2.0]]),
    ],
)
def test_paired_ratio_refuses(baseline, treatment):
    with pytest.raises(ValueError, match=r"baseline|treatment"):
        paired_ratio(baseline, treatment)


@pytest.mark.parametrize("resamples", [0, -1, 2.5])
def test_paired_ratio_refuses_resamples(resamples):
    with pytest.raises(ValueError, match="resamples"):
        paired_ratio([1.0, 2.0], [1.0, 2.0], resamples=resamples)


# --- overlap


def test_overlap_by_hand():
    assert overlap([5.12], [2.97], [6.02]).value == pytest.approx(1.3439, abs=1e-4)
    assert overlap([1], [1], [1]).value == 2.0
    found = overlap([1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [1.0, 4.0, 2.5])
    assert (found.value, found.smallest, found.largest, found.pairs) == (1.6, 1.0, 2.0, 3)


def test_overlap_is_drawn_by_process():
    one, two = [1.0] * 8, [1.0] * 4 + [2.0] * 4
    apart = overlap(one, one, two)
    assert apart == overlap(one, one, two, groups=[8])
    assert overlap(one, one, two, groups=[4, 4]) == paired_ratio([2.0] * 8, two, groups=[4, 4])


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "1", None])
@pytest.mark.parametrize("place", range(3))
def test_overlap_refuses(bad, place):
    values = [[1.0], [1.0], [1.0]]
    values[place] = [bad]
    with pytest.raises(ValueError, match=("cpu_alone", "current_alone", "together")[place]):
        overlap(*values)
    values[place] = [1.0, 1.0]
    with pytest.raises(ValueError, match="three times a round"):
        overlap(*values)


# --- spread, drift, unstable


@given(st.lists(times, min_size=2, max_size=20))
def test_spread_is_deviation_over_mean(samples):
    assert spread(samples) == pytest.approx(statistics.stdev(samples) / statistics.mean(samples), abs=1e-9)


def test_one_sample_has_no_spread():
    assert spread([1.0]) is None
    assert unstable([1.0]) == ["only 1 sample: its spread is unknown"]


def test_steady_samples_raise_no_warning():
    assert unstable([1.0] * 50) == []
    assert unstable(lognormal(0, 50).tolist()) == []


def test_a_wide_spread_is_named_with_its_figure():
    (warning,) = unstable([1.0, 1.5, 1.0, 1.5, 1.0, 1.5])
    assert "22% of the mean" in warning
    assert "from 1 to 1.5 in 6 samples" in warning


def test_a_drift_is_named_with_its_figure():
    samples = (lognormal(1, 50, 0.01) * np.linspace(1.0, 1.08, 50)).tolist()
    (warning,) = unstable(samples)
    assert warning == "the samples drift: slower by 7% over the run"
    (warning,) = unstable(samples[::-1])
    assert warning == "the samples drift: faster by 7% over the run"


def test_noise_rarely_looks_like_a_drift():
    assert sum(drift(lognormal(seed, 50)) is not None for seed in range(300)) <= 0.03 * 300


def test_a_drift_too_small_to_matter_is_not_warned_about():
    samples = np.linspace(1.0, 1.01, 50).tolist()
    assert drift(samples) == pytest.approx(0.01, rel=0.02)
    assert unstable(samples) == []


def test_one_outlier_is_no_drift():
    assert drift([1.0] * 30 + [9.0]) is None


def test_few_samples_cannot_drift():
    assert drift([1.0, 2.0, 3.0, 4.0, 5.0]) is None
    assert drift([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == pytest.approx(5 / 3.5)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [0.0], [-1.0], ["x"]])
@pytest.mark.parametrize("function", [spread, drift, unstable])
def test_samples_are_checked(function, bad):
    with pytest.raises(ValueError, match="samples"):
        function(bad)


# --- relative_error


def test_relative_error_by_hand():
    assert relative_error([1.0, 2.5], [1.0, -2.0]) == 4.5 / 2.0
    assert relative_error([[1.0]], [[1.0]]) == 0.0


def test_relative_error_is_computed_in_float64():
    reference = np.array([60000.0], dtype=np.float16)
    assert relative_error(-reference, reference) == 2.0  # the difference overflows float16


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_passes(bad):
    assert relative_error([bad, 1.0], [1.0, 1.0]) == math.inf
    assert relative_error([1.0, 1.0], [bad, 1.0]) == math.inf
    assert relative_error([bad], [bad]) == math.inf


def test_a_zero_reference_is_matched_by_zeros_only():
    assert relative_error([0.0], [0.0]) == 0.0
    assert relative_error([1e-30], [0.0]) == math.inf
    assert relative_error([1e308], [-1e308]) == math.inf


@given(st.lists(st.tuples(times, times), min_size=1, max_size=10), st.floats(0.5, 2.0))
def test_relative_error_does_not_depend_on_the_scale(pairs, scale):
    result, reference = map(np.array, zip(*pairs, strict=True))
    plain = relative_error(result, reference)
    assert relative_error(result * scale, reference * scale) == pytest.approx(plain, rel=1e-9)


@pytest.mark.parametrize(
    ("result", "reference"),
    [
        ([1.0], [1.0, 2.0]),
        ([], []),
        (["a"], ["b"]),
        ([1j], [1.0]),
        ([1.0], [None]),
        ([[1.0], [1.0, 2.0]], [1.0]),
    ],
)
def test_relative_error_refuses(result, reference):
    with pytest.raises(ValueError, match=r"result|reference"):
        relative_error(result, reference)
