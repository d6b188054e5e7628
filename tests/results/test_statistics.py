"""Ratios, intervals and paired tests: by hand, and by simulation against a known truth."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats

from specbench.results.statistics.bootstrap import (
    Resamples,
    geometric_mean,
    log_interval,
    minimum_detectable_ratio,
    ratio_of_totals,
    strata_of,
)
from specbench.results.statistics.paired import equivalence, holm, sign_flip_p

N_CATEGORIES = 6


def test_ratio_of_totals():
    assert ratio_of_totals([10, 30], [2, 6]) == 5
    assert ratio_of_totals([1, 1], [1, 3]) == 0.5, "not the mean of 1 and 1/3"
    assert ratio_of_totals([1], [0]) == math.inf
    assert math.isnan(ratio_of_totals([], []))


def test_geometric_mean():
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert geometric_mean([0.5, 2]) == pytest.approx(1)
    assert math.isnan(geometric_mean([]))


def test_lone_categories_share_a_stratum():
    assert strata_of(["b", "a", "b", "a"]).tolist() == [1, 0, 1, 0]
    assert strata_of(["x", "a", "y", "a"]).tolist() == [1, 0, 1, 0], "x and y together"
    assert strata_of(["a", "a", "b", "b", "b", "x"]).tolist() == [0, 0, 1, 1, 1, 0], "x joins a"
    assert strata_of(["x", "y", "z"]).tolist() == [0, 0, 0]
    assert strata_of(["x"]).tolist() == [0]
    assert strata_of([]).tolist() == []


class TestResamples:
    def test_two_prompts_by_hand(self):
        """n - 1 = 1 prompt is drawn and weighted 2 / 1: a total is twice one or twice the other."""
        resamples = Resamples(np.zeros(2, dtype=np.int64), seed=0, n_resamples=500)
        totals = resamples.totals(np.array([[1.0, 10.0], [3.0, 30.0]]))
        assert set(totals[:, 0]) == {2.0, 6.0}
        assert (totals[:, 1] == 10 * totals[:, 0]).all(), "columns share the weights"

    def test_every_stratum_keeps_its_weight(self):
        strata = strata_of(["a"] * 3 + ["b"] * 7)
        totals = Resamples(strata, seed=1, n_resamples=50).totals(
            np.column_stack([strata == 0, strata == 1]).astype(float)
        )
        assert totals == pytest.approx(np.tile([3.0, 7.0], (50, 1)))

    def test_the_variance_is_that_of_a_stratified_total(self):
        generator = np.random.default_rng(5)
        strata = strata_of(["a"] * 2 + ["b"] * 5 + ["c"] * 40)
        values = generator.normal(size=len(strata))
        totals = Resamples(strata, seed=2, n_resamples=40_000).totals(values[:, None])[:, 0]
        expected = sum(
            (strata == s).sum() * values[strata == s].var(ddof=1) for s in np.unique(strata)
        )
        assert totals.var() == pytest.approx(expected, rel=0.03)
        assert totals.mean() == pytest.approx(values.sum(), abs=0.1)

    def test_the_seed_decides_and_nothing_else(self):
        strata, columns = strata_of(["a"] * 9), np.arange(9.0)[:, None]
        np.random.seed(1)
        first = Resamples(strata, seed=7, n_resamples=20).totals(columns)
        np.random.seed(2)
        again = Resamples(strata, seed=7, n_resamples=20).totals(np.hstack([columns, columns]))
        assert (first[:, 0] == again[:, 0]).all()
        other = Resamples(strata, seed=8, n_resamples=20).totals(columns)
        assert (first != other).any()

    @pytest.mark.parametrize("n", [0, 1])
    def test_too_few_to_resample(self, n):
        resamples = Resamples(np.zeros(n, dtype=np.int64), seed=0)
        assert resamples.degrees_of_freedom == 0
        with pytest.raises(ValueError, match="cannot be resampled"):
            resamples.totals(np.ones((n, 1)))

    def test_a_benchmark_is_resampled_in_under_a_second(self):
        """In several blocks, which cover all resamples."""
        strata = np.arange(960, dtype=np.int64) % 2
        columns = np.column_stack([np.random.default_rng(0).random((960, 3)), np.ones(960)])
        before = time.perf_counter()
        totals = Resamples(strata, seed=0, n_resamples=10_000).totals(columns)
        assert time.perf_counter() - before < 1.0
        assert totals[:, 3] == pytest.approx(np.full(10_000, 960.0))


def test_log_interval_by_hand():
    spread = np.exp(np.array([-0.1, 0.1]))  # standard deviation of the logarithm: 0.1 * sqrt(2)
    low, high = log_interval(2.0, spread, degrees_of_freedom=4)
    half = 2.7764451 * 0.1 * math.sqrt(2)  # Student's t for 4 degrees of freedom
    assert (low, high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))


@pytest.mark.parametrize(
    ("value", "resampled", "freedom"),
    [
        (2.0, [1.0, 3.0], 0),
        (math.nan, [1.0, 3.0], 5),
        (0.0, [1.0, 3.0], 5),
        (2.0, [1.0, math.inf], 5),
        (2.0, [1.0, 0.0], 5),
    ],
)
def test_an_interval_is_absent_rather_than_invented(value, resampled, freedom):
    assert log_interval(value, np.array(resampled), freedom) is None


# ------------------------------------------------------------------ simulation of a benchmark


def simulated_run(generator, per_category):
    """Seconds of baseline and method, ``[6, per_category]``.

    Answers differ in length by a lot, tasks in speedup (1.1 to 2.5), prompts of a task around
    that with heavy tails; longer answers gain more.
    """
    shape = (N_CATEGORIES, per_category)
    tokens = np.exp(generator.normal(5, 0.8, shape)).clip(5, 1024)
    gain = np.linspace(0.1, 0.9, N_CATEGORIES)[:, None]
    gain = gain + 0.25 * generator.standard_t(5, shape) / 1.3 + 0.1 * (np.log(tokens) - 5)
    baseline = tokens * 0.02 * np.exp(0.03 * generator.normal(size=shape))
    return baseline, baseline / np.exp(gain)


def coverage(per_category, runs, n_resamples, seed):
    """Share of runs whose intervals hold the truth: of the ratio of totals, of the geomean."""
    generator = np.random.default_rng(seed)
    baseline, method = simulated_run(generator, 200_000)
    true_ratio = baseline.sum() / method.sum()
    true_mean = math.exp(np.log(baseline / method).mean())
    strata = np.repeat(np.arange(N_CATEGORIES), per_category)
    hits = np.zeros(2)
    for run in range(runs):
        baseline, method = (part.ravel() for part in simulated_run(generator, per_category))
        logs = np.log(baseline / method)
        resamples = Resamples(strata, seed=run, n_resamples=n_resamples)
        totals = resamples.totals(np.column_stack([baseline, method, logs]))
        freedom = resamples.degrees_of_freedom
        low, high = log_interval(
            ratio_of_totals(baseline, method), totals[:, 0] / totals[:, 1], freedom
        )
        hits[0] += low <= true_ratio <= high
        low, high = log_interval(
            geometric_mean(baseline / method), np.exp(totals[:, 2] / len(logs)), freedom
        )
        hits[1] += low <= true_mean <= high
    return hits / runs


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        # 200 runs: the bounds are four standard errors of a coverage of 95 %.
        ({"per_category": 80, "runs": 200, "n_resamples": 500, "seed": 0}, (0.888, 1.0)),
        # 12 prompts, as in the data set that is shipped; the percentile interval covers 78 %.
        ({"per_category": 2, "runs": 400, "n_resamples": 400, "seed": 1}, (0.91, 1.0)),
        pytest.param(
            {"per_category": 80, "runs": 2000, "n_resamples": 2000, "seed": 2},
            (0.93, 0.97),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["200 runs", "small samples", "2000 runs"],
)
def test_intervals_cover_the_truth(size, bounds):
    for share in coverage(**size):
        print(f"covered: {share:.2%}")
        assert bounds[0] <= share <= bounds[1]


# ------------------------------------------------------------------ two methods


class TestSignFlip:
    def test_three_cases_by_hand(self):
        """Of the 8 sign patterns of 1, 2, 4 two have |sum| >= 7 and four have |sum| >= 5."""
        assert sign_flip_p([1, 2, 4]) == 2 / 8
        assert sign_flip_p([-1, 2, 4]) == 4 / 8
        assert sign_flip_p([]) == 1.0
        assert sign_flip_p([0.0, 0.0]) == 1.0

    def test_against_a_plain_enumeration(self):
        values = np.random.default_rng(3).normal(0.3, 1, 9)
        sums = [
            abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
            for signs in itertools.product((1, -1), repeat=9)
        ]
        expected = np.mean(np.array(sums) >= abs(values.sum()) - 1e-9)
        assert sign_flip_p(values) == expected

    def test_the_order_of_cases_does_not_matter(self):
        values = [0.1] * 3 + [0.3, 0.2, -0.4]
        orders = {sign_flip_p(list(order)) for order in itertools.permutations(values)}
        assert len(orders) == 1, "rounding decided whether a pattern was as far from zero"

    def test_sampled_patterns_agree_with_all_patterns(self, monkeypatch):
        values = np.random.default_rng(4).normal(0.4, 1, 14)
        exact = sign_flip_p(values)
        monkeypatch.setattr("specbench.results.statistics.paired._EXACT_CASES", 0)
        assert sign_flip_p(values, seed=1, n_permutations=20_000) == pytest.approx(exact, abs=0.01)

    def test_a_sampled_p_value_is_never_zero(self):
        assert sign_flip_p([1.0] * 40, n_permutations=99) == 1 / 100

    @pytest.mark.parametrize(
        ("n", "runs"),
        [(12, 400), (40, 400), pytest.param(480, 2000, marks=pytest.mark.slow)],
    )
    def test_p_values_are_uniform_under_the_null(self, n, runs):
        generator = np.random.default_rng(n)
        p_values = np.array(
            [
                sign_flip_p(generator.standard_t(4, n) * 0.1, seed=run, n_permutations=999)
                for run in range(runs)
            ]
        )
        uniform = stats.kstest(p_values, "uniform").pvalue
        print(f"p = {uniform:.2f};", *(f"{(p_values <= p).mean():.2%}" for p in (0.05, 0.01)))
        assert uniform > 0.01
        # As many are called different at the 5 % level, to two standard errors.
        assert abs((p_values <= 0.05).mean() - 0.05) < 0.45 / runs**0.5

    def test_a_real_difference_is_found(self):
        differences = np.random.default_rng(0).normal(0.05, 0.1, 200)
        assert sign_flip_p(differences) < 0.001


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.99, 1.01), "tie"),
        ((1.005, 1.015), "tie"),
        ((0.9805, 1.0), "tie"),
        ((0.975, 1.01), "undecided"),
        ((1.01, 1.05), "faster"),
        ((0.90, 0.97), "slower"),
        ((0.90, 1.10), "undecided"),
        (None, "undecided"),
    ],
)
def test_equivalence(interval, verdict):
    assert equivalence(interval, margin=0.02) == verdict


class TestMinimumDetectableRatio:
    def test_by_hand(self):
        """Two strata of three, variance 0.01 each: error sqrt(6 * 0.01) / 6, 4 degrees."""
        logs = [-0.1, 0.0, 0.1, 0.4, 0.5, 0.6]
        quantiles = 2.7764451 + 0.9409646
        expected = math.exp(quantiles * math.sqrt(6 * 0.01) / 6)
        assert minimum_detectable_ratio(logs, strata_of(["a"] * 3 + ["b"] * 3)) == pytest.approx(
            expected, rel=1e-6
        )

    def test_such_a_difference_is_found_as_often_as_promised(self):
        generator = np.random.default_rng(0)
        strata = np.zeros(60, dtype=np.int64)
        ratio = minimum_detectable_ratio(generator.normal(0, 0.1, 60), strata)
        found = [
            stats.ttest_1samp(generator.normal(math.log(ratio), 0.1, 60), 0).pvalue < 0.05
            for _ in range(600)
        ]
        assert 0.70 <= np.mean(found) <= 0.90

    @pytest.mark.parametrize("logs", [[], [0.1]])
    def test_too_few_cases(self, logs):
        assert minimum_detectable_ratio(logs, strata_of(["a"] * len(logs))) is None
