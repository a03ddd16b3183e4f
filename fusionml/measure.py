"""The statistics of the fairness protocol: order of the arms, ratio, overlap, stability, error (Section 5.1).

Nothing here runs or times an arm: it is told times, in any unit as long as it is one unit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

SPREAD_LIMIT = 0.10  # the protocol's limit, and pyperf's
DRIFT_LIMIT = 0.02  # a trend smaller than this changes no conclusion
TREND_Z = 2.58  # two-sided 1 %: one steady run in a hundred is warned about


@dataclass(frozen=True)
class Ratio:
    """How many times faster the treatment is: the median of the pairs' ratios, with its 95 % interval.

    `low` and `high` are None where there are fewer than two pairs; `smallest` and `largest` are the extremes.
    """

    value: float
    low: float | None
    high: float | None
    smallest: float
    largest: float
    pairs: int

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x (one pair, no interval)"
        return f"{self.value:.2f}x [{self.low:.2f}, {self.high:.2f}]"


def order(arms: Sequence[str], pairs: int, *, before: int = 0) -> list[str]:
    """The interleaved order in which to run the arms: A B, B A, A B, ...; each appears `pairs` times.

    Every second round is reversed, so that a steady drift of the machine favours no arm. With more than two
    arms a round is all of them. For an A/A run give the same arm two labels. `before` rounds were taken
    elsewhere, so that these go on from there.
    """
    if len(arms) < 2 or len(set(arms)) != len(arms):
        raise ValueError(f"arms must be at least two different labels, not {list(arms)!r}")
    if not isinstance(pairs, int) or pairs < 1:
        raise ValueError(f"pairs must be a whole number of at least 1, not {pairs!r}")
    rounds = range(before, before + pairs)
    return [arm for i in rounds for arm in (arms if i % 2 == 0 else reversed(arms))]


def paired_ratio(
    baseline: Sequence[float],
    treatment: Sequence[float],
    *,
    groups: Sequence[int] | None = None,
    seed: int = 0,
    resamples: int = 5000,
) -> Ratio:
    """Speed-up of `treatment` over `baseline`, as baseline / treatment pair by pair.

    The interval is a percentile bootstrap of the median, its tails widened for few pairs (Hesterberg 2015,
    "expanded percentile"). In simulated A/A runs it holds 1.00 in 95 to 98 % of the runs from six pairs on,
    the plain percentiles in 89 to 95 %. With two to five pairs it is the range of the pairs, or nearly, and
    reaches no 95 %.

    Pairs of one process resemble each other more than pairs of another, and an interval that takes them for
    independent is too narrow. `groups`, the numbers of pairs that each process took, in order, has whole
    processes drawn first and then pairs of each ("two-stage bootstrap"), its tails widened for so few
    processes. In simulated runs of five processes it holds the truth in 96 to 100 %, whether they differ or
    not; the other interval in 64 to 95 % where they differ by as much as the pairs of one do. Fewer processes
    that differ reach no 95 %: four 91 to 97, three 80 to 97, two 60 to 93 %. None, or one group, is one.

    ValueError for unequal lengths, no pairs, groups that do not add up, or a time that is not positive and
    finite.
    """
    before, after = _times("baseline", baseline), _times("treatment", treatment)
    if len(before) != len(after):
        raise ValueError(f"baseline and treatment must pair up: {len(before)} against {len(after)} times")
    if not isinstance(resamples, int) or resamples < 1:
        raise ValueError(f"resamples must be a whole number of at least 1, not {resamples!r}")
    ratios = before / after
    sizes = _sizes(groups, len(ratios))
    low, high = _interval(ratios, sizes, seed, resamples) if len(ratios) > 1 else (None, None)
    smallest, largest = float(ratios.min()), float(ratios.max())
    return Ratio(float(np.median(ratios)), low, high, smallest, largest, pairs=len(ratios))


def overlap(
    cpu_alone: Sequence[float],
    current_alone: Sequence[float],
    together: Sequence[float],
    *,
    groups: Sequence[int] | None = None,
) -> Ratio:
    """How much of the two units' work ran at once: (CPU alone + current alone) / together, round by round.

    2.0 is perfect for two equal parts, 1.0 is one after the other; it means the same on every machine. The
    interval and `groups` are those of `paired_ratio`, and so are the errors.
    """
    cpu, current = _times("cpu_alone", cpu_alone), _times("current_alone", current_alone)
    whole = _times("together", together)
    if not len(cpu) == len(current) == len(whole):
        raise ValueError(f"three times a round, not {len(cpu)}, {len(current)} and {len(whole)}")
    return paired_ratio((cpu + current).tolist(), whole.tolist(), groups=groups)


def spread(samples: Sequence[float]) -> float | None:
    """Sample standard deviation over the mean; None for one sample, whose spread nobody knows."""
    times = _times("samples", samples)
    if len(times) < 2:
        return None
    return float(np.std(times, ddof=1) / np.mean(times))


def drift(samples: Sequence[float]) -> float | None:
    """The change over the run as a share of the median (0.10: 10 % slower at its end); None without a trend.

    A trend is a Mann-Kendall test significant at 1 %, its size Theil and Sen's slope: neither is moved by one
    outlier. Fewer than six samples can never show one.
    """
    times = _times("samples", samples)
    n = len(times)
    early, late = np.triu_indices(n, 1)
    rise = times[late] - times[early]
    score = abs(np.sign(rise).sum())
    if score - 1 <= TREND_Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18):
        return None
    return float(np.median(rise / (late - early)) * (n - 1) / np.median(times))


def unstable(samples: Sequence[float], *, groups: Sequence[int] | None = None) -> list[str]:
    """Why these samples should not be trusted, a sentence each; empty when they are stable.

    `groups` as for `paired_ratio`: a drift is one process's, and that processes differ is none.
    """
    warnings = []
    width, ends = spread(samples), np.cumsum(_sizes(groups, len(samples)))
    if width is None:
        warnings.append("only 1 sample: its spread is unknown")
    elif width > SPREAD_LIMIT:
        warnings.append(
            f"the standard deviation is {width:.0%} of the mean (over {SPREAD_LIMIT:.0%}): "
            f"from {min(samples):.3g} to {max(samples):.3g} in {len(samples)} samples"
        )
    for part in np.split(np.asarray(samples), ends[:-1]):
        trend = drift(part.tolist())
        if trend is not None and abs(trend) > DRIFT_LIMIT:
            warnings.append(
                f"the samples drift: {'slower' if trend > 0 else 'faster'} by {abs(trend):.0%} over the run"
            )
    return list(dict.fromkeys(warnings))


def relative_error(result: ArrayLike, reference: ArrayLike) -> float:
    """max|result - reference| / max|reference|, in float64; infinity where either holds a NaN or an infinity.

    Both of one shape, real, of any dtype NumPy knows; ValueError otherwise. Only zeros match a reference of
    zeros.
    """
    given, wanted = _reals("result", result), _reals("reference", reference)
    if given.shape != wanted.shape:
        raise ValueError(f"result must have the reference's shape {wanted.shape}, not {given.shape}")
    if not (np.isfinite(given).all() and np.isfinite(wanted).all()):
        return math.inf
    with np.errstate(over="ignore"):
        difference = float(np.abs(given - wanted).max())
    scale = float(np.abs(wanted).max())
    if scale == 0:
        return 0.0 if difference == 0 else math.inf
    return difference / scale


def _interval(
    ratios: NDArray[np.float64], sizes: NDArray[np.int64], seed: int, resamples: int
) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median of two or more ratios, drawn by group."""
    random = np.random.default_rng(seed)
    if len(sizes) == 1:
        n, picks = len(ratios), random.integers(len(ratios), size=(resamples, len(ratios)))
        medians = np.median(np.sort(ratios)[picks], axis=1)
    else:
        n, medians = len(sizes), _two_stages(ratios, sizes, random, resamples)
    # A resample varies too little by sqrt((n - 1) / n), and the normal quantile is too small for n - 1
    # degrees of freedom: hence Student's, by the first terms of its expansion, scaled up.
    z, freedom = NormalDist().inv_cdf(0.975), n - 1
    student = z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    tail = NormalDist().cdf(-student * math.sqrt(n / freedom))
    low, high = np.quantile(medians, [tail, 1 - tail])
    return float(low), float(high)


def _two_stages(
    ratios: NDArray[np.float64], sizes: NDArray[np.int64], random: np.random.Generator, resamples: int
) -> NDArray[np.float64]:
    """Medians of resamples: as many groups, drawn with replacement, and in each as many of its pairs."""
    starts = np.cumsum(sizes) - sizes
    groups = random.integers(len(sizes), size=(resamples, len(sizes)))
    places = random.random((resamples, len(sizes), sizes.max()))
    picks = starts[groups][..., None] + (places * sizes[groups][..., None]).astype(np.int64)
    drawn = np.where(np.arange(sizes.max()) < sizes[groups][..., None], ratios[picks], np.nan)
    return np.asarray(np.nanmedian(drawn.reshape(resamples, -1), axis=1))


def _sizes(groups: Sequence[int] | None, pairs: int) -> NDArray[np.int64]:
    """The sizes of the groups, those without a pair left out."""
    sizes = np.array([pairs] if groups is None else [size for size in groups if size], dtype=np.int64)
    if (sizes < 0).any() or sizes.sum() != pairs:
        raise ValueError(f"groups must add up to {pairs} pairs, not {list(groups or [])!r}")
    return sizes


def _times(name: str, values: Sequence[float]) -> NDArray[np.float64]:
    times = _reals(name, values)
    if times.ndim != 1:
        raise ValueError(f"{name} must be a list of times, not an array of shape {times.shape}")
    wrong = times[~(np.isfinite(times) & (times > 0))]
    if len(wrong):
        raise ValueError(f"{name} must be positive, finite times; it holds {float(wrong[0])!r}")
    return times


def _reals(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """As float64; complex numbers, text and nothing at all are refused."""
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise ValueError(f"{name} must be an array of real numbers: {error}") from None
    if array.dtype.kind not in "biuf" or array.size == 0:
        raise ValueError(f"{name} must be real numbers, at least one, not {array.size} of {array.dtype}")
    return array.astype(np.float64)
