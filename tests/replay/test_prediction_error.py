"""What live and predicted speedups say of predictions: by hand, and of planted errors."""

import math

import numpy as np
import pytest
from scipy import stats

from runners.search.halving import Candidate, CaseCost
from runners.search.intervals import error_noise, predicted
from specbench.errors import ResultsError
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.replay.prediction_error import (
    UNKNOWN,
    PredictionError,
    fitted,
    keep_error,
    known_error,
)

CASES = [f"c{i}" for i in range(8)]
TASKS = dict.fromkeys(CASES, "qa")


def test_the_fit_is_what_a_plain_computation_gives():
    errors, noise = [0.1, -0.02, 0.05, 0.3, 0.0, -0.04], [0.03, 0.01, 0.02, 0.0, 0.05, 0.0]
    methods = ["a", "a", "b", "b", "c", "c"]
    found = fitted(errors, noise, methods)
    assert (found.pairs, found.bias) == (6, pytest.approx(0.39 / 6))
    squares = 0.01 + 0.0004 + 0.0025 + 0.09 + 0.0016 - (0.0009 + 0.0001 + 0.0004 + 0.0025)
    assert found.rms == pytest.approx(math.sqrt(squares / 6))

    def share(others_of):
        inside = 0
        for i, error in enumerate(errors):
            others = [j for j in range(6) if others_of(i, j)]
            beyond = sum(errors[j] ** 2 - noise[j] ** 2 for j in others) / len(others)
            reach = stats.t.ppf(0.975, len(others))
            inside += error**2 <= reach**2 * (max(0, beyond) + noise[i] ** 2)
        return inside / 6

    assert found.coverage == share(lambda i, j: methods[i] != methods[j]) == 5 / 6
    assert found.coverage_by_pair == share(lambda i, j: i != j) == 5 / 6


def costs(speed, rng, noise=0.1):
    """A setting measured on the cases, a plain turn taking a second."""
    one = Candidate("pld", {})
    for case in CASES:
        seconds = math.exp(rng.normal(0, noise)) / speed
        one.costs[case] = CaseCost(40, seconds, 40, 1.0)
    return one


def test_a_planted_bias_is_found_and_covered():
    """Predictions of 12 % too fast; each also errs by 2 %, and questions by 1 %."""
    rng = np.random.default_rng(0)
    live = {i: costs(float(rng.uniform(0.8, 1.8)), rng) for i in range(44)}
    guesses = {}
    for i, one in live.items():
        wrong = 0.12 + rng.normal(0, 0.02)
        guesses[i] = Candidate("pld", {})
        for case, cost in one.costs.items():
            seconds = cost.seconds * math.exp(rng.normal(0, 0.01) - wrong)
            guesses[i].costs[case] = CaseCost(40, seconds, 40, 1.0)
    errors = [math.log(guesses[i].speedup(CASES) / live[i].speedup(CASES)) for i in live]
    noise = [error_noise(guesses[i], live[i], CASES, TASKS) for i in live]
    # The same questions: what they differ in is not in the noise of the error.
    assert np.mean(noise) == pytest.approx(0.01 / math.sqrt(8), rel=0.2)
    found = fitted(errors, noise, [f"m{i % 11}" for i in live])
    assert found.bias == pytest.approx(0.12, abs=0.01)
    assert found.rms == pytest.approx(math.hypot(0.12, 0.02), abs=0.01)
    assert found.coverage == found.coverage_by_pair == 1.0
    value, (low, high) = predicted(guesses[0], CASES, TASKS, found.within())
    assert low < live[0].speedup(CASES) < value < high
    # The interval over questions alone leaves the truth out where these agree.
    steady = costs(1.5, rng, noise=0.001)
    assert predicted(steady, CASES, TASKS, 0.0)[1][0] > 1.5 * math.exp(-0.12)


def test_errors_that_noise_explains_are_none_of_the_prediction_s():
    rng = np.random.default_rng(1)
    errors = rng.normal(0, 0.05, 400)
    found = fitted(errors, [0.05] * 400, [f"m{i % 20}" for i in range(400)])
    assert found.rms < 0.015
    assert found.coverage == pytest.approx(0.95, abs=0.03)


def test_a_method_that_errs_unlike_all_others_is_not_covered_by_them():
    errors = [0.01, -0.01, 0.02, -0.02, 0.3, 0.31]
    found = fitted(errors, [0.0] * 6, ["a", "a", "b", "b", "wide", "wide"])
    assert found.coverage == 4 / 6
    with pytest.raises(ResultsError, match="at least 2"):
        fitted(errors, [0.0] * 6, ["a"] * 6)
    with pytest.raises(ResultsError, match="at least 5"):
        fitted(errors[:4], [0.0] * 4, ["a", "b", "c", "d"])


def surface(cpu="a cpu", **model):
    grid = Grid({"context": (1, 2)}, np.ones((2, 3)))
    tree = Grid({"rows": (1, 2), "context": (1, 2)}, np.ones((2, 2, 3)))
    machine = {"hardware": {"cpu": cpu, "gpus": []}}
    return CostSurface(
        {"name": "m", "dtype": "float32", "threads": 2, **model}, machine, grid, tree
    )


def test_an_error_holds_for_its_model_on_its_machine(tmp_path):
    path = tmp_path / "errors.json"
    assert known_error(surface(), path) == PredictionError()
    assert f"{UNKNOWN:.0%}, a cautious guess" in known_error(surface(), path).words
    first = PredictionError(44, 0.01, 0.05, 0.95, 0.96, "2026-11-23", "abc", "pairs.json")
    keep_error(surface(), first, path)
    keep_error(surface("another cpu"), PredictionError(5), path)
    assert known_error(surface(), path) == first
    assert "over 44 settings" in first.words
    for other in (surface("a third"), surface(threads=1), surface(name="n")):
        assert known_error(other, path).pairs == 0
    keep_error(surface(), PredictionError(50), path)
    assert known_error(surface(), path).pairs == 50, "in place of the earlier one"
    assert first.within() == pytest.approx(0.05 * stats.t.ppf(0.975, 44) / stats.norm.ppf(0.975))
    assert first.within(0.2) == 0.2, "the surface claims less for itself"
    path.write_text('{"errors": [{"of": {}}]}')
    with pytest.raises(ResultsError, match="damaged"):
        known_error(surface(), path)
