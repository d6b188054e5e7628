"""Several methods at once: by hand, and by simulation against a known truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specbench.results.statistics.bootstrap import LogRatios
from specbench.results.statistics.multiple import against, against_best, selection
from specbench.results.statistics.pairs import Ranking, pair_outcome

_LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


def of_samples(samples):
    """Means of ``[n, k]`` logarithms with the covariance that is known exactly of means."""
    n, k = samples.shape
    covariance = np.atleast_2d(np.cov(samples, rowvar=False)) / n
    return LogRatios(samples.mean(axis=0), covariance, np.zeros((k, k)), n, n - 1, 0)


def benchmark(generator, n, effects, own_sd=0.1, shared_sd=0.2):
    """``[n, k]`` logarithms of speeds; prompts are easy or hard for all methods alike."""
    shared = generator.normal(0.0, shared_sd, (n, 1))
    return np.asarray(effects) + shared + generator.normal(0.0, own_sd, (n, len(effects)))


@st.composite
def sampled(draw, most=5):
    k = draw(st.integers(2, most))
    n = draw(st.integers(3, 20))
    generator = np.random.default_rng(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))
    return of_samples(benchmark(generator, n, generator.normal(0.0, spread, k)))


class TestAgainstOne:
    def test_a_single_comparison_is_student_s_own(self):
        samples = np.random.default_rng(0).normal(0.2, 0.3, (9, 1))
        (result,) = against(of_samples(samples))
        expected = stats.ttest_1samp(samples[:, 0], 0.0)
        assert (result.low, result.high) == pytest.approx(tuple(expected.confidence_interval(0.95)))
        assert result.p == result.p_family == pytest.approx(expected.pvalue)

    def test_four_comparisons_have_a_quarter_of_the_level_each(self):
        ratios = LogRatios(np.zeros(4), np.eye(4), np.zeros((4, 4)), 11, 10, 0)
        assert [result.high for result in against(ratios)] == pytest.approx([3.0382] * 4, abs=1e-4)

    @given(sampled())
    def test_verdict_p_and_interval_agree(self, speeds):
        k = len(speeds.values)
        contrasts = np.column_stack([np.eye(k - 1), -np.ones(k - 1)])
        for result in against(speeds.contrast(contrasts)):
            decided = result.low > 0 or result.high < 0
            assert decided == (result.p_family < 0.05)
            assert result.p <= result.p_family + 1e-12
            outcome = pair_outcome(result.interval, margin=0.0)
            assert outcome == ("faster" if result.low > 0 else "slower" if decided else "undecided")

    @pytest.mark.parametrize("runs", [150, pytest.param(4000, marks=_LONG)])
    def test_all_intervals_hold_together(self, runs):
        generator = np.random.default_rng(1)
        truth = np.array([0.0, 0.1, 0.3, -0.2, 0.0])
        contrasts = np.column_stack([np.eye(4), -np.ones(4)])
        held = 0
        for _ in range(runs):
            results = against(of_samples(benchmark(generator, 12, truth)).contrast(contrasts))
            inside = zip(results, contrasts @ truth, strict=True)
            held += all(result.low <= true <= result.high for result, true in inside)
        print(f"all held: {held / runs:.2%}")
        assert held / runs >= 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5
        assert held / runs <= 0.985, "wider than need be"


class TestAgainstTheBest:
    def test_a_sure_loser_to_a_runner_up_is_slower_than_the_best(self):
        """The first varies so much that nothing can be said of it alone."""
        values, errors = np.array([0.3, 0.2, 0.0]), np.array([0.5, 0.01, 0.01])
        speeds = LogRatios(values, np.diag(errors**2), np.zeros((3, 3)), 12, 11, 0)
        results = against_best(speeds)
        assert (results[1].high > 0, results[2].high < 0) == (True, True)
        assert Ranking.compare(speeds, None, [], plain=False).leaders == [0, 1]

    @given(sampled())
    def test_verdict_p_and_interval_agree(self, speeds):
        top = int(speeds.values.argmax())
        results = against_best(speeds)
        assert set(results) == set(range(len(speeds.values))) - {top}
        for i, result in results.items():
            assert result.log_ratio == pytest.approx(speeds.values[i] - speeds.values[top])
            assert result.low <= result.log_ratio <= result.high + 1e-12
            assert result.log_ratio <= 0
            assert (result.high < 0) == (result.p_family < 0.05)
            expected = "slower" if result.high < 0 else "undecided"
            assert pair_outcome(result.interval, margin=0.0) == expected
        slower = {i for i, result in results.items() if pair_outcome(result.interval) == "slower"}
        ranking = Ranking.compare(speeds, None, [], plain=False)
        assert set(ranking.leaders) == set(range(len(speeds.values))) - slower

    @pytest.mark.parametrize(
        "effects",
        [[0.0] * 5, [0.0, 0.0, -0.1, -0.1, -0.3]],
        ids=["all alike", "two"],
    )
    @pytest.mark.parametrize("runs", [100, pytest.param(3000, marks=_LONG)])
    def test_the_truly_best_leads_and_each_interval_holds(self, runs, effects):
        """With methods alike, comparing the winner in the usual way says too much too often."""
        generator = np.random.default_rng(2)
        led, missed, naive = 0, np.zeros(5), 0
        for _ in range(runs):
            samples = benchmark(generator, 12, effects)
            speeds = of_samples(samples)
            results = against_best(speeds)
            slower = {i for i, result in results.items() if result.high < 0}
            led += 0 not in slower
            for i, result in results.items():
                truth = effects[i] - max(np.delete(effects, i))
                missed[i] += not result.low <= truth <= result.high
            winner = int(speeds.values.argmax())
            behind = np.delete(samples, winner, axis=1) - samples[:, [winner]]
            naive += bool((stats.ttest_1samp(behind, 0.0).pvalue < 0.05).any())
        print(f"best led: {led / runs:.2%}; missed: {missed / runs}; naive: {naive / runs:.2%}")
        bound = 0.95 - 3 * (0.95 * 0.05 / runs) ** 0.5
        assert led / runs >= bound
        assert (1 - missed / runs >= bound).all()
        if not any(effects):
            assert naive / runs > 0.15, "the comparison needs no correction"


class TestCasesNeeded:
    def test_more_prompts_narrow_their_part_of_the_error_only(self):
        """Error 0.1 of 9 prompts; 0.3 is (t + t) x 0.1 / sqrt(n / 9) at the n needed."""
        ones = np.ones((1, 1))
        (result,) = against(LogRatios(0.2 * ones[0], 0.01 * ones, 0 * ones, 9, 8, 0))
        reach = stats.t.ppf(0.975, 8) + stats.t.ppf(0.8, 8)
        assert result.needed == math.ceil(9 * (reach * 0.1 / 0.2) ** 2)
        assert result.detectable == pytest.approx(math.exp(reach * 0.1))
        (noisy,) = against(LogRatios(0.2 * ones[0], 0.01 * ones, 0.01 * ones, 9, 8, 3))
        assert noisy.needed is None, "repeats differ too much, whatever the number of prompts"


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((0.99, 1.01), "tie"),
        ((1.005, 1.015), "tie"),
        ((0.9805, 1.0), "tie"),
        ((0.975, 1.01), "undecided"),
        ((0.97, 1.0), "undecided"),
        ((1.01, 1.05), "faster"),
        ((0.90, 0.97), "slower"),
        ((0.90, 1.10), "undecided"),
        (None, "too few"),
    ],
)
def test_verdict(interval, expected):
    assert pair_outcome(interval, margin=0.02) == expected


def ranked(*rows):
    """Methods with a log speedup and its error each, uncorrelated, of many cases."""
    values, errors = (np.array(column) for column in zip(*rows, strict=True))
    ratios = LogRatios(values, np.diag(errors**2), np.zeros((len(rows),) * 2), 1000, 999, 0)
    return Ranking.compare(ratios, ratios, [])


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (
            [(0.4, 0.02), (0.38, 0.02), (-0.2, 0.02)],
            "A is 1.42 to 1.57 times as fast as plain decoding (95 % for all 3 together); B may be "
            "as fast.",
        ),
        (
            [(0.4, 0.02), (0.1, 0.02)],
            "A is 1.43 to 1.56 times as fast as plain decoding (95 % for all 2 together); the "
            "other methods are slower than it.",
        ),
        ([(0.4, 0.02)], "A is 1.43 to 1.55 times as fast as plain decoding."),
        (
            [(0.1, 0.1)],
            "Nothing is shown faster than plain decoding; A, the fastest here, is 0.91 to 1.34 "
            "times as fast.",
        ),
        # A's interval by itself would exclude 1; the one for both does not.
        (
            [(0.1, 0.048), (0.0, 0.001)],
            "Nothing is shown faster than plain decoding; A, the fastest here, is 0.99 to 1.23 "
            "times as fast (95 % for all 2 together).",
        ),
    ],
)
def test_the_sentence_prints_the_interval_that_decides(rows, expected):
    assert ranked(*rows).sentence("ABC"[: len(rows)]) == expected


@pytest.mark.parametrize(
    "rows", [[(0.5, 0.4), (0.2, 0.02)], [(0.2, 0.02), (0.5, 0.4)], [(0.3, 0.3), (0.25, 0.01)]]
)
def test_the_fastest_is_named_first_though_only_another_is_shown_faster(rows):
    names = ["wide", "sure"] if rows[0][0] > rows[1][0] else ["sure", "wide"]
    sentence = ranked(*rows).sentence(names)
    assert sentence.startswith("wide, the fastest here, is 0.")
    assert sentence.index("wide") < sentence.index("sure is 1.") and "wide may" not in sentence


@pytest.mark.parametrize(("k", "gap"), [(28, 0.0), (10, 0.05), (2, 0.0), (4, 1.0)])
def test_the_bias_of_the_picked_method_is_bracketed(k, gap):
    """The mean excess of the winner's estimate lies between the two means that are stated."""
    generator = np.random.default_rng(4)
    truth = -gap * np.arange(k)
    excess, stated = [], []
    for _ in range(150):
        speeds = of_samples(benchmark(generator, 24, truth, own_sd=0.2, shared_sd=0.1))
        top = int(speeds.values.argmax())
        excess.append(math.expm1(speeds.values[top] - truth[top]))
        bias = selection(speeds, 500)
        stated.append((bias.bias, bias.if_equal))
    low, high = np.mean(stated, axis=0)
    noise = 3 * np.std(excess) / 150**0.5
    assert low - noise <= np.mean(excess) <= high + noise
    if gap == 0:
        assert np.mean(excess) == pytest.approx(high, abs=noise)


def test_a_ranking_of_too_few_cases_or_without_times_says_no_more():
    few = Ranking.compare(None, None, [1.0, 7.41])
    assert few.order == [1, 0]
    assert few.sentence("AB").startswith("Too few cases to say what is faster")
    assert few.sentence("AB", "predicted").startswith("Predicted, not measured: Too few")
    assert few.sentence("AB", "none") == Ranking([], [], {}).sentence([]) == ""


def test_many_methods_say_how_much_the_first_owes_to_being_picked():
    many = ranked(*[(0.3 + 0.001 * i, 0.1) for i in range(28)])
    assert "Picked as the fastest of 28 by the same cases, m27 is expected" in many.sentence(
        [f"m{i}" for i in range(28)]
    )
    assert "Picked" not in ranked((0.3, 0.01), (0.2, 0.01)).sentence("AB")
