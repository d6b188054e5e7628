"""Ratios and intervals: by hand, and by simulation against a known truth."""

import math
from dataclasses import replace

import numpy as np
import pytest

from specbench.results.statistics import bootstrap
from specbench.results.statistics.bootstrap import (
    geometric_mean,
    log_ratios,
    ratio_of_totals,
    resampled_totals,
    strata_of,
)

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
        columns = np.array([[1.0, 10.0], [3.0, 30.0]])
        totals = resampled_totals(columns, np.zeros(2, dtype=np.int64), 0, 500)
        assert set(totals[:, 0]) == {2.0, 6.0}
        assert (totals[:, 1] == 10 * totals[:, 0]).all(), "columns share the weights"

    def test_every_stratum_keeps_its_weight_and_the_variance_of_its_total(self, monkeypatch):
        monkeypatch.setattr(bootstrap, "_BLOCK", 2_000)  # so that blocks are several
        generator = np.random.default_rng(5)
        strata = strata_of(["a"] * 2 + ["b"] * 5 + ["c"] * 40)
        values = generator.normal(size=len(strata))
        members = [strata == s for s in np.unique(strata)]
        totals = resampled_totals(np.column_stack([values, *members]), strata, 2, 20_000)
        expected = sum(m.sum() * values[m].var(ddof=1) for m in members)
        assert totals[:, 0].var() == pytest.approx(expected, rel=0.04)
        assert totals[:, 0].mean() == pytest.approx(values.sum(), abs=0.15)
        assert (abs(totals[:, 1:] - [2, 5, 40]) < 1e-9).all()

    def test_the_seed_decides_and_nothing_else(self):
        strata, columns = strata_of(["a"] * 9), np.arange(9.0)[:, None]
        first = resampled_totals(columns, strata, 7, 20)
        again = resampled_totals(np.hstack([columns, columns]), strata, 7, 20)
        assert (first[:, 0] == again[:, 0]).all()
        assert (first != resampled_totals(columns, strata, 8, 20)).any()


def totals_of(*ratios, repeats=1):
    """``[1 + R, n, k]`` above and below the line of ratios given as lists of (above, below)."""
    totals = np.array(ratios, dtype=np.float64).transpose(1, 0, 2)
    stacked = np.stack([repeats * totals, *[totals] * repeats])
    return stacked[..., 0], stacked[..., 1]


class TestLogRatios:
    def test_the_interval_by_hand(self):
        """Logarithms whose mean is a plain one: error sqrt(s^2 / n), n - 1 degrees of freedom."""
        logs = np.array([[0.1], [0.3], [0.2], [0.6]])
        stacked = np.stack([logs, logs])
        ones = np.ones_like(stacked)
        ratios = log_ratios(stacked, ones, strata_of(["a"] * 4), seed=0, means=True)
        assert ratios.values == pytest.approx([0.3])
        assert ratios.errors == pytest.approx(logs.std(ddof=1) / 2, rel=0.02), "of a bootstrap"
        low, high = ratios.interval(0, 2.0)
        half = 3.1824463 * ratios.errors[0]  # Student's t for 3 degrees of freedom
        assert (low, high) == pytest.approx((2 * math.exp(-half), 2 * math.exp(half)))

    def test_a_difference_of_two_ratios_knows_that_they_go_together(self):
        slow, fast = [(10, 1), (20, 3), (30, 2)], [(20, 1), (40, 3), (60, 2)]
        ratios = log_ratios(*totals_of(slow, fast), strata_of(["a"] * 3), seed=0)
        assert (ratios.errors > 0.1).all()
        between = ratios.contrast(np.array([[-1.0, 1.0]]))
        assert between.values == pytest.approx([math.log(2)])
        assert between.errors == pytest.approx([0.0], abs=1e-9)

    @pytest.mark.parametrize(
        "ratio",
        [[], [(1, 1)], [(1, 2), (2, 1)], [(1, 1), (0, 2), (0, 3)], [(1, 0), (2, 0), (3, 0)]],
        ids=["no case", "one", "two", "a resample of nothing", "no time"],
    )
    def test_an_interval_is_absent_rather_than_invented(self, ratio):
        above, below = totals_of(ratio) if ratio else np.zeros((2, 2, 0, 1))
        assert log_ratios(above, below, strata_of(["a"] * len(ratio)), seed=0) is None

    def test_the_spread_between_repeats_by_hand(self):
        """Three repeats at 1, 2 and 4 tokens a second; prompts do not differ."""
        totals = np.array([[(1, 1)] * 3, [(2, 1)] * 3, [(4, 1)] * 3], dtype=np.float64)
        stacked = np.concatenate([totals.sum(axis=0)[None], totals])
        ratios = log_ratios(stacked[..., :1], stacked[..., 1:], strata_of(["a"] * 3), seed=0)
        assert ratios.values == pytest.approx([math.log(7 / 3)])
        assert ratios.errors == pytest.approx([math.log(2) / math.sqrt(3)]), "sd of 0, 1, 2 is 1"
        assert ratios.freedom == pytest.approx([2.0])

    def test_a_prompt_that_a_repeat_lacks_makes_no_spread(self):
        """The slow prompt was not timed in the second repeat; the others are as fast in both."""
        totals = np.array([[(1, 1)] * 3 + [(1, 50)], [(1, 1)] * 3 + [(0, 0)]], dtype=np.float64)
        stacked = np.concatenate([totals.sum(axis=0)[None], totals])
        ratios = log_ratios(stacked[..., :1], stacked[..., 1:], strata_of(["a"] * 4), seed=0)
        assert ratios.repeats == pytest.approx(np.zeros((1, 1)))


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
        truths = ((baseline, method, true_ratio), (logs, np.ones(len(logs)), true_mean))
        for i, (above, below, truth) in enumerate(truths):
            parts = (np.stack([part, part])[..., None] for part in (above, below))
            ratios = log_ratios(*parts, strata, run, n_resamples, means=i == 1)
            low, high = ratios.interval(0, math.exp(ratios.values[0]))
            hits[i] += low <= truth <= high
    return hits / runs


@pytest.mark.parametrize(
    ("size", "bounds"),
    [
        # 120 runs: the bounds are four standard errors of a coverage of 95 %.
        ({"per_category": 80, "runs": 120, "n_resamples": 250, "seed": 0}, (0.87, 1.0)),
        # 12 prompts, as in the data set that is shipped; the percentile interval covers 78 %.
        ({"per_category": 2, "runs": 250, "n_resamples": 300, "seed": 1}, (0.895, 1.0)),
        pytest.param(
            {"per_category": 80, "runs": 2000, "n_resamples": 500, "seed": 2},
            (0.93, 0.97),
            marks=[pytest.mark.slow, pytest.mark.timeout(600)],
        ),
    ],
    ids=["120 runs", "small samples", "2000 runs"],
)
def test_intervals_cover_the_truth(size, bounds):
    for share in coverage(**size):
        print(f"covered: {share:.2%}")
        assert bounds[0] <= share <= bounds[1]


def repeated(generator, runs, n, repeats, run_sd):
    """Logarithms of ``runs`` benchmarks ``[runs, repeats, n]``: prompts, repeats, timing noise."""
    prompts = generator.normal(0.3, 0.2, (runs, 1, n))
    drift = generator.normal(0.0, run_sd, (runs, repeats, 1))
    return prompts + drift + generator.normal(0.0, 0.03, (runs, repeats, n))


@pytest.mark.parametrize("run_sd", [0.0, 0.02, 0.1])
@pytest.mark.parametrize(
    ("repeats", "runs"), [(2, 200), pytest.param(5, 3000, marks=pytest.mark.slow)]
)
def test_intervals_over_repeats_cover_the_truth(run_sd, repeats, runs):
    """The truth is the mean over prompts and runs; 12 prompts, as in the data that is shipped."""
    generator = np.random.default_rng(repeats)
    strata = np.zeros(12, dtype=np.int64)
    hits = {True: 0, False: 0}
    for run, logs in enumerate(repeated(generator, runs, 12, repeats, run_sd)):
        stacked = np.concatenate([logs.sum(axis=0)[None], logs])[..., None]
        ones = np.concatenate([np.full((1, 12, 1), repeats), np.ones((repeats, 12, 1))])
        whole = log_ratios(stacked, ones, strata, run, n_resamples=200, means=True)
        blind = replace(whole, repeats=np.zeros((1, 1)))
        for ratios, aware in ((whole, True), (blind, False)):
            low, high = ratios.interval(0, 1.0)
            hits[aware] += low <= math.exp(0.3 - whole.values[0]) <= high
    print(f"covered: {hits[True] / runs:.2%}; prompts alone: {hits[False] / runs:.2%}")
    assert 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5 <= hits[True] / runs
    if run_sd == 0.1:
        assert hits[False] / runs < 0.9, "the part for repeats was not needed"
