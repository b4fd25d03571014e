"""Exact bounds for what is seen on a sample: fractions, means of bounded losses, finite populations, endless streams.

Everything holds for any sample size, without a normal approximation. `confidence` is 1 − α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import count


def binomial_cdf(k: int, n: int, p: float) -> float:
    """P(X ≤ k) for X ~ Binomial(n, p)."""
    if k >= n or p <= 0:
        return 1.0
    if k < 0 or p >= 1:
        return 0.0
    return beta_cdf(1 - p, n - k, k + 1)


def lower_bound(successes: int, trials: int, confidence: float = 0.95) -> float:
    """The exact one-sided binomial bound (Clopper and Pearson): the least p for which this many successes or more still
    have the probability 1 − confidence."""
    if successes == 0:
        return 0.0
    return _root(lambda p: beta_cdf(p, successes, trials - successes + 1) - (1 - confidence))


def p_value(failures: int, trials: int, level: float) -> float:
    """Of the hypothesis that less than `level` of all cases succeed: how likely so few failures then are, at the most."""
    return binomial_cdf(failures, trials, 1 - level)


def best_level(trials: int, confidence: float = 0.95) -> float:
    """The level that is certified if no case fails."""
    return (1 - confidence) ** (1 / trials) if trials else 0.0


def trials_needed(level: float, confidence: float = 0.95, failures: int = 0) -> int:
    """The least number of cases that certify `level` with this many failures."""
    if level >= 1:
        raise ValueError("no number of images certifies a level of 1: give one below")
    return _first(lambda n: p_value(failures, n, level) <= 1 - confidence, failures + 1)


def allowed_failures(trials: int, level: float, confidence: float = 0.95) -> int:
    """With how many failures these cases still certify `level`; −1: not even with none."""
    alpha = 1 - confidence
    if p_value(0, trials, level) > alpha:
        return -1
    return _first(lambda k: p_value(k, trials, level) > alpha, 1) - 1


def power(trials: int, level: float, truth: float, confidence: float = 0.95) -> float:
    """The probability that `level` is certified where the true rate is `truth`."""
    return binomial_cdf(allowed_failures(trials, level, confidence), trials, 1 - truth)


def trials_for_power(level: float, truth: float, confidence: float = 0.95, wanted: float = 0.8) -> int | None:
    """The least number of cases from which `level` is certified with probability `wanted`, where the true rate is `truth`;
    None where none is enough. (Power rises in teeth: it falls a little until one more failure is allowed.)"""
    if truth <= level:
        return None
    for failures in count():
        trials = trials_needed(level, confidence, failures)  # the shortest sample that allows as many
        if binomial_cdf(failures, trials, 1 - truth) >= wanted:
            return trials
    raise AssertionError


def finite_lower_bound(successes: int, sample: int, population: int, confidence: float = 0.95) -> float:
    """A sample drawn without replacement: at least this fraction of the `population` are successes (hypergeometric). The
    sample itself counts."""
    failures = sample - successes
    log_all = _log_choose(population, sample)

    def at_most(bad: int) -> float:
        """P(so few failures in the sample | so many in the population)."""
        low = max(0, sample - (population - bad))
        terms = (
            math.exp(_log_choose(bad, i) + _log_choose(population - bad, sample - i) - log_all)
            for i in range(low, min(failures, bad) + 1)
        )
        return math.fsum(terms)

    low, high = failures, population - successes + 1  # `high` cannot be
    while high - low > 1:  # the most failures in the population that these few do not exclude
        middle = (low + high) // 2
        low, high = (middle, high) if at_most(middle) > 1 - confidence else (low, middle)
    return (population - low) / population


def mean_upper_bound(values: Sequence[float], low: float, high: float, confidence: float = 0.95) -> float:
    """An upper bound for the mean of losses in [low, high], by betting against every larger mean (Waudby-Smith and Ramdas,
    2024, section 4): the capital of a gambler who bets that losses stay below m is multiplied by 1 + λ_t (m − x_t), and
    grows beyond 1/α with probability α at the most if m is the mean. λ_t depends on earlier losses only. The values must be
    in random order."""
    alpha = 1 - confidence
    n = len(values)
    if not n:
        return high
    scaled = [(value - low) / (high - low) for value in values]
    if not all(0 <= x <= 1 for x in scaled):
        raise ValueError(f"losses must be in [{low:g}, {high:g}], not from {min(values):g} to {max(values):g}")
    bets, total, squares = [], 0.5, 0.25
    for t, x in enumerate(scaled, 1):
        bets.append(math.sqrt(2 * math.log(1 / alpha) / (n * squares / t)))
        total += x
        squares += (x - total / (t + 1)) ** 2

    def log_capital(m: float) -> float:
        most = 0.95 / (1 - m)
        return math.fsum(math.log1p(min(bet, most) * (m - x)) for bet, x in zip(bets, scaled, strict=True))

    wanted = math.log(1 / alpha)
    bound = _root(lambda m: log_capital(m) - wanted) if log_capital(1 - 1e-12) > wanted else 1.0
    return low + (high - low) * bound


def quantile_upper_bound(values: Sequence[float], fraction: float, confidence: float = 0.95) -> float | None:
    """A value that at least this fraction of all cases do not exceed (order statistics); None: too few values."""
    ordered = sorted(values)
    n = len(ordered)
    for k in range(n + 1):  # the (k+1)-th smallest is above the quantile unless at most k values are below it
        if 1 - binomial_cdf(k, n, fraction) <= 1 - confidence:
            return ordered[k] if k < n else None
    return None


class RateTest:
    """Watches a stream of yes and no for a rate above `rate`, however often one looks: a false alarm has probability
    1 − confidence over the whole, endless stream (Ville's inequality).

    The evidence is the likelihood ratio of higher rates against `rate`, mixed over a beta distribution of them, cut off at
    `rate`; and mixed over the time of the change, so that a long good past does not hide a bad present."""

    PRIOR = 1.0  # pseudo-failures of the beta distribution, whose mean is three times the rate
    FIRST = 64  # possible changes: now, after this many, twice as many, …

    def __init__(self, rate: float, confidence: float = 0.95) -> None:
        if not 0 < rate < 1:
            raise ValueError(f"a rate to watch is between 0 and 1, not {rate!r}")
        self.rate = rate
        self.confidence = confidence
        self.trials = 0
        self.failures = 0
        self.starts: list[tuple[int, int]] = [(0, 0)]  # trials and failures at each possible change
        self.peak = 1.0  # the most evidence so far
        mean = min(3 * rate, (1 + rate) / 2)
        self._a, self._b = self.PRIOR, self.PRIOR * (1 - mean) / mean
        self._log_prior = _log_beta(self._a, self._b) + math.log(1 - beta_cdf(rate, self._a, self._b))

    def add(self, failed: bool) -> None:
        self.trials += 1
        self.failures += failed
        if self.trials == self.FIRST * 2 ** (len(self.starts) - 1):
            self.starts.append((self.trials, self.failures))
        self.peak = max(self.peak, self.evidence)

    @property
    def evidence(self) -> float:
        """The mixed likelihood ratio; 1 / α and more is an alarm."""
        weights = [1 / ((i + 1) * (i + 2)) for i in range(len(self.starts))]
        ratios = (self._ratio(self.trials - n, self.failures - k) for n, k in self.starts)
        return math.fsum(w * r for w, r in zip(weights, ratios, strict=True)) + 1 / (len(self.starts) + 1)

    @property
    def alarm(self) -> bool:
        return self.peak >= 1 / (1 - self.confidence)

    def _ratio(self, n: int, k: int) -> float:
        a, b = self._a + k, self._b + n - k
        above = 1 - beta_cdf(self.rate, a, b)
        if above <= 0:
            return 0.0
        null = k * math.log(self.rate) + (n - k) * math.log1p(-self.rate)
        return math.exp(min(_log_beta(a, b) + math.log(above) - self._log_prior - null, 700.0))

    def interval(self) -> tuple[float, float]:
        """Bounds for a constant rate that hold together at all times, each with probability (1 + confidence) / 2: the
        rates whose likelihood is not far below the mixture's (beta-binomial)."""
        n, k, a = self.trials, self.failures, 0.5
        wanted = math.log(2 / (1 - self.confidence))

        def evidence(p: float) -> float:
            likelihood = (k * math.log(p) if k else 0.0) + ((n - k) * math.log1p(-p) if n > k else 0.0)
            return _log_beta(a + k, a + n - k) - _log_beta(a, a) - likelihood - wanted

        if n == 0:
            return 0.0, 1.0
        middle = min(max(k / n, 1e-12), 1 - 1e-12)
        low = _root(lambda p: -evidence(p), 1e-12, middle) if k and evidence(1e-12) > 0 else 0.0
        high = _root(evidence, middle, 1 - 1e-12) if k < n and evidence(1 - 1e-12) > 0 else 1.0
        return low, high

    def state(self) -> dict[str, object]:
        return {"trials": self.trials, "failures": self.failures, "starts": self.starts, "peak": self.peak}

    def restore(self, state: dict[str, object]) -> None:
        trials, failures, starts, peak = (state[name] for name in ("trials", "failures", "starts", "peak"))
        self.trials, self.failures, self.peak = int(trials), int(failures), float(peak)  # type: ignore[call-overload, arg-type]
        self.starts = [(int(n), int(k)) for n, k in starts]  # type: ignore[attr-defined]


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - beta_cdf(1 - x, b, a)
    tiny = 1e-300
    c, d = 1.0, 1 / _nonzero(1 - (a + b) * x / (a + 1), tiny)
    fraction = d
    for m in range(1, 10_000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _nonzero(1 + step * d, tiny)
            c = _nonzero(1 + step / c, tiny)
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(a * math.log(x) + b * math.log1p(-x) - _log_beta(a, b)) * fraction / a


def _nonzero(value: float, tiny: float) -> float:
    return tiny if abs(value) < tiny else value


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _root(f: Callable[[float], float], low: float = 0.0, high: float = 1.0) -> float:
    """Where a rising function crosses 0; on the side where it is still below."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if f(middle) < 0 else (low, middle)
    return low


def _first(holds: Callable[[int], bool], start: int) -> int:
    """The first whole number from `start` for which a condition holds that then holds for good."""
    step = 1
    while not holds(start + step - 1):
        step *= 2
    low, high = start - 1, start + step - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
