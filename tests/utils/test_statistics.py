"""Every bound against scipy, or against a simulation of what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from tokenmerge.utils import statistics as st

CASES = [(0, 1), (1, 1), (0, 30), (3, 266), (29, 30), (30, 30), (5, 1000), (2000, 100_000)]


@pytest.mark.parametrize(("k", "n"), CASES)
def test_binomial_against_scipy(k: int, n: int) -> None:
    for p in (1e-4, 0.01, 0.05, 0.3, 0.9):
        assert st.binomial_cdf(k, n, p) == pytest.approx(stats.binom.cdf(k, n, p), rel=1e-9, abs=1e-14)
    if k < n:
        expected = stats.binomtest(n - k, n, alternative="greater").proportion_ci(0.95, "exact").low
        assert st.lower_bound(n - k, n) == pytest.approx(expected, rel=1e-9)
    assert st.p_value(k, n, 0.98) == pytest.approx(stats.binomtest(k, n, 0.02, alternative="less").pvalue, rel=1e-9)


@pytest.mark.parametrize("a", [0.5, 1.0, 4.0, 300.0])
@pytest.mark.parametrize("b", [0.5, 3.0, 5000.0])
def test_beta_against_scipy(a: float, b: float) -> None:
    for x in (1e-6, 0.003, 0.2, 0.5, 0.97):
        assert st.beta_cdf(x, a, b) == pytest.approx(stats.beta.cdf(x, a, b), rel=1e-9, abs=1e-300)


def test_the_bound_and_the_test_agree() -> None:
    """A level is certified by its p-value exactly if the lower bound reaches it."""
    for n in (100, 266, 299, 500):
        for failures in range(6):
            for level in (0.95, 0.98, 0.99):
                assert (st.p_value(failures, n, level) <= 0.05) == (st.lower_bound(n - failures, n) >= level - 1e-12)


def test_how_many_images_a_level_needs() -> None:
    assert st.trials_needed(0.99) == 299
    assert st.best_level(299) == pytest.approx(0.05 ** (1 / 299))
    assert st.best_level(298) < 0.99 < st.best_level(299)
    assert st.allowed_failures(298, 0.99) == -1
    assert st.allowed_failures(299, 0.99) == 0
    for failures in range(5):
        n = st.trials_needed(0.98, failures=failures)
        assert st.p_value(failures, n, 0.98) <= 0.05 < st.p_value(failures, n - 1, 0.98)
    with pytest.raises(ValueError, match="no number of images certifies a level of 1"):
        st.trials_needed(1.0)


@pytest.mark.parametrize("truth", [0.995, 0.9975, 0.999])
def test_power_against_the_binomial(truth: float) -> None:
    n = st.trials_for_power(0.99, truth)
    assert n is not None
    assert st.power(n, 0.99, truth) >= 0.8
    allowed = max(k for k in range(50) if stats.binom.cdf(k, n, 0.01) <= 0.05)
    assert st.power(n, 0.99, truth) == pytest.approx(stats.binom.cdf(allowed, n, 1 - truth), rel=1e-9)
    shorter = [m for m in range(1, n) if st.power(m, 0.99, truth) >= 0.8]
    assert not shorter
    assert st.trials_for_power(0.99, 0.99) is None


@pytest.mark.parametrize(
    ("population", "sample", "failures"), [(1000, 100, 0), (1000, 100, 3), (50, 50, 4), (10**6, 2000, 5)]
)
def test_finite_populations_against_scipy(population: int, sample: int, failures: int) -> None:
    bound = st.finite_lower_bound(sample - failures, sample, population)
    bad = round((1 - bound) * population)
    assert stats.hypergeom.cdf(failures, population, bad, sample) > 0.05 or bad == failures
    assert stats.hypergeom.cdf(failures, population, bad + 1, sample) <= 0.05 or bad + 1 > population - (sample - failures)
    assert bound >= st.lower_bound(sample - failures, sample) - 1 / population, "a finite job is known better"
    assert st.finite_lower_bound(sample, sample, sample) == 1


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_bound_holds(seed: int) -> None:
    """Small losses with rare large ones, where a normal approximation fails."""
    rng = np.random.default_rng(seed)
    wrong, bounds = 0, []
    for _ in range(400):
        values = np.where(rng.random(200) < 0.01, 0.9, rng.exponential(0.002, 200).clip(max=0.05))
        bounds.append(st.mean_upper_bound(values.tolist(), 0.0, 2.0))
        wrong += bounds[-1] < 0.01 * 0.9 + 0.99 * 0.002
    assert wrong <= stats.binom.ppf(0.999, 400, 0.05)
    assert np.median(bounds) < 0.1


def test_the_mean_bound_narrows() -> None:
    rng = np.random.default_rng(0)
    short, long = (st.mean_upper_bound(rng.beta(2, 50, n).tolist(), 0, 1) for n in (100, 4000))
    assert 2 / 52 < long < short
    assert long < 2 / 52 + 0.004
    assert st.mean_upper_bound([], 0, 2) == 2
    assert st.mean_upper_bound([1.0] * 50, 0, 1) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"losses must be in \[0, 1\]"):
        st.mean_upper_bound([1.5], 0, 1)


def test_quantiles_by_order_statistics() -> None:
    values = [float(v) for v in range(1, 101)]
    bound = st.quantile_upper_bound(values, 0.95)
    assert bound is not None
    k = int(bound)  # the k-th smallest: P(at most k − 1 values are below the quantile) ≥ 95 %
    assert stats.binom.cdf(k - 1, 100, 0.95) >= 0.95 > stats.binom.cdf(k - 2, 100, 0.95)
    assert st.quantile_upper_bound(values[:58], 0.95) is None, "58 values know no such quantile: 0.95^58 > 5 %"
    assert st.quantile_upper_bound(values[:59], 0.95) == 59


def test_evidence_against_a_rate() -> None:
    """The mixture, recomputed by integration; with a change after 64 trials."""
    test = st.RateTest(0.02)
    outcomes = [i % 17 == 3 for i in range(150)]
    for failed in outcomes:
        test.add(failed)
    prior = stats.beta(test._a, test._b)
    grid = np.linspace(0.02, 1, 200_001)[1:-1]
    weight = prior.pdf(grid) / prior.sf(0.02)

    def ratio(part: list[bool]) -> float:
        k, n = sum(part), len(part)
        log = k * np.log(grid / 0.02) + (n - k) * np.log((1 - grid) / 0.98)
        return float(np.trapezoid(weight * np.exp(log), grid))

    expected = ratio(outcomes) / 2 + ratio(outcomes[64:]) / 6 + ratio(outcomes[128:]) / 12 + 1 / 4
    assert test.evidence == pytest.approx(expected, rel=1e-3)
    again = st.RateTest(0.02)
    again.restore(test.state())
    assert again.evidence == test.evidence


def test_intervals_of_a_stream_hold_at_all_times() -> None:
    rng = np.random.default_rng(0)
    left = 0
    for _ in range(300):
        test, outside = st.RateTest(0.5), False
        for n, failed in enumerate(rng.random(300) < 0.03, 1):
            test.trials, test.failures = n, test.failures + bool(failed)
            low, high = test.interval() if n % 10 == 0 else (0.0, 1.0)
            outside |= not low <= 0.03 <= high
        left += outside
    assert left <= stats.binom.ppf(0.999, 300, 0.05)
    assert st.RateTest(0.5).interval() == (0, 1)


def simulate(rates: np.ndarray, streams: int, rate: float, seed: int = 0) -> np.ndarray:
    """When each of many streams raises the alarm, all of them at once, with scipy; the length of the stream if never."""
    fails = np.random.default_rng(seed).random((streams, len(rates))) < rates
    test = st.RateTest(rate)
    a, b = test._a, test._b
    when, total = np.full(streams, len(rates)), np.zeros(streams, dtype=int)
    starts = [(0, total.copy())]
    for t in range(len(rates)):
        total += fails[:, t]
        if t + 1 == test.FIRST * 2 ** (len(starts) - 1):
            starts.append((t + 1, total.copy()))
        evidence = np.full(streams, 1 / (len(starts) + 1))
        for i, (n0, k0) in enumerate(starts):
            n, k = t + 1 - n0, total - k0
            log = special.betaln(a + k, b + n - k) - special.betaln(a, b) - k * np.log(rate) - (n - k) * np.log1p(-rate)
            above = special.betaincc(a + k, b + n - k, rate) / special.betaincc(a, b, rate)
            evidence += np.exp(log) * above / ((i + 1) * (i + 2))
        when[(evidence >= 20) & (when == len(rates))] = t
    return when


def test_the_simulation_is_the_test() -> None:
    rates = np.concatenate((np.full(150, 0.01), np.full(300, 0.05)))
    fails = np.random.default_rng(3).random((20, 450)) < rates
    found = []
    for row in fails:
        test = st.RateTest(0.01)
        when = 450
        for n, failed in enumerate(row):
            test.add(bool(failed))
            if test.alarm:
                when = n
                break
        found.append(when)
    assert found == simulate(rates, 20, 0.01, seed=3).tolist()
    assert min(found) < 450


@pytest.mark.slow
def test_false_alarms_and_delays() -> None:
    """2,000 endless-looking streams at the promised rate, and streams that jump."""
    length = 4000
    alarms = (simulate(np.full(length, 0.01), 2000, 0.01) < length).sum()
    assert alarms <= stats.binom.ppf(0.999, 2000, 0.05)
    assert np.median(simulate(np.full(length, 0.03), 400, 0.01)) <= 525
    assert np.median(simulate(np.full(length, 0.02), 400, 0.01)) <= 1800
    late = np.concatenate((np.full(2000, 0.01), np.full(length, 0.03)))
    assert np.median(simulate(late, 200, 0.01)) - 2000 <= 2 * 525
