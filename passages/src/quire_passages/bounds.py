"""Bounds of 95 % confidence for figures of answers, whose tokens depend on each other within a prompt.

Prompts are drawn, not tokens: of a ratio over prompts the variance is that between prompts (Taylor linearization,
Cochran, Sampling Techniques, 1977, section 6.4). Agreement is near 1, where a normal interval is wrong: its bounds are
those of Clopper and Pearson for the effective number of tokens (Korn and Graubard, 1998, Survey Methodology 24).

No scipy is needed: quantiles of the beta distribution are found by bisection on a continued fraction.
"""

from math import exp, lgamma, log, sqrt

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.float64]

_LEAST_CORRELATION = 0.05
"""Correlation of a prompt's tokens that is assumed where the prompts seen show less: few show none by chance."""

_SKEWED = 1.2
"""Errors of skewed means are taken so many times as large."""

_UNSEEN = 2.0
"""Few prompts have most of the nats: one that is so many times as bad as the worst may not have been seen."""

_TAIL = 0.025
_NORMAL = 1.959963984540054
"""The two-sided 95 % quantile of the normal distribution."""


def agreement_bounds(tokens: Counts, agreed: Counts) -> tuple[float, float, float]:
    """Return the share of tokens that agree, and its lower and upper bound, of prompts `[n]` with at least one."""
    count, total = len(tokens), float(tokens.sum())
    share = float(agreed.sum()) / total
    spread = share * (1 - share) / total
    correlated = 1 + (total / count - 1) * _LEAST_CORRELATION
    design = correlated
    if count > 1 and spread:
        design = max(_variance(tokens, agreed, share) / spread, correlated)
    effective = total / design
    if count > 1:
        effective *= (_NORMAL / _t_quantile(count - 1)) ** 2
    hits = share * effective
    low = _beta_quantile(_TAIL, hits, effective - hits + 1) if hits else 0.0
    high = _beta_quantile(1 - _TAIL, hits + 1, effective - hits) if hits < effective else 1.0
    return share, min(low, share), max(high, share)


def mean_bounds(tokens: Counts, sums: Counts) -> tuple[float, float, float]:
    """Return a mean over tokens of what is not negative, and its bounds: normal for its logarithm.

    The upper bound is that of these prompts and one more, `_UNSEEN` times as bad as the worst of them.
    """
    mean = float(sums.sum()) / float(tokens.sum())
    if not mean or len(tokens) < 2:
        return mean, 0.0, mean if len(tokens) > 1 else float("inf")
    worst = int(sums.argmax())
    more = np.append(tokens, tokens[worst]), np.append(sums, _UNSEEN * sums[worst])
    return mean, mean / _factor(tokens, sums), float(more[1].sum() / more[0].sum()) * _factor(*more)


def bootstrap(
    tokens: Counts, sums: Counts, *, seed: int = 0, draws: int = 2000
) -> tuple[float, float, float]:
    """Return a ratio of sums over prompts, and its percentiles over prompts drawn anew: of a measurement, no promise."""
    drawn = np.random.default_rng(seed).integers(len(tokens), size=(draws, len(tokens)))
    ratios = sums[drawn].sum(1) / tokens[drawn].sum(1)
    low, high = np.quantile(ratios, [_TAIL, 1 - _TAIL])
    return float(sums.sum() / tokens.sum()), float(low), float(high)


def _factor(tokens: Counts, sums: Counts) -> float:
    """Return the factor between a skewed mean over tokens and its bounds."""
    mean = float(sums.sum()) / float(tokens.sum())
    error = sqrt(_variance(tokens, sums, mean)) / mean
    return exp(min(_SKEWED * _t_quantile(len(tokens) - 1) * error, 700.0))


def _variance(tokens: Counts, sums: Counts, ratio: float) -> float:
    """Return the variance of a ratio of sums over prompts."""
    count = len(tokens)
    left = sums - ratio * tokens
    return float((left**2).sum()) * count / (count - 1) / float(tokens.sum()) ** 2


def _t_quantile(freedom: float) -> float:
    """Return the two-sided 95 % quantile of Student's t: Cornish and Fisher's expansion, right to 1 % from 3 on."""
    z = _NORMAL
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    return z + (z**3 + z) / (4 * freedom) + second + third


def _beta_quantile(level: float, a: float, b: float) -> float:
    """Return where the distribution function of Beta(a, b) is `level`."""
    if b <= 0:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        if _beta_below(middle, a, b) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _beta_below(x: float, a: float, b: float) -> float:
    """Return the regularized incomplete beta function (Lentz's continued fraction, Numerical Recipes, section 6.4)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(1 - x))
    if x > (a + 1) / (a + b + 2):
        return 1 - front * _fraction(1 - x, b, a) / b
    return front * _fraction(x, a, b) / a


def _fraction(x: float, a: float, b: float) -> float:
    tiny = 1e-300
    c, d = 1.0, 1 - (a + b) * x / (a + 1)
    d = 1 / (d if abs(d) > tiny else tiny)
    value = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 + term * d
            d = 1 / (d if abs(d) > tiny else tiny)
            c = 1 + term / c
            c = c if abs(c) > tiny else tiny
            value *= d * c
        if abs(d * c - 1) < 1e-9:
            break
    return value
