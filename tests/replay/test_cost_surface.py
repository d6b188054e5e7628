"""Cost surfaces: the monotone fit, prediction, its error, and files that are refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specbench.errors import ConfigurationError
from specbench.replay.cost_surface import CostSurface, Grid, monotone_fit

ROWS, CONTEXTS = (1, 2, 4, 8), (16, 64)
MACHINE = {"hardware": {"cpu": "a CPU", "gpus": []}}
MODEL = {"name": "toy", "device": "cpu", "dtype": "float32"}


def grid(function, *axes, repeats=3):
    points = np.meshgrid(*(np.array(v, float) for v in axes), indexing="ij")
    names = ("rows", "context") if len(axes) == 2 else ("k", "w", "context")
    names = names if len(axes) > 1 else ("context",)
    values = np.repeat(function(*points)[..., None], repeats, axis=-1)
    return Grid(dict(zip(names, axes, strict=True)), values)


def surface(batch=True):
    return CostSurface(
        model=MODEL,
        machine=MACHINE,
        prefill=grid(lambda c: 1e-3 * c, CONTEXTS),
        tree=grid(lambda r, c: 0.05 + 1e-3 * r + 1e-4 * c, ROWS, CONTEXTS),
        batch=grid(lambda k, w, c: 0.1 + 0.01 * k + 1e-3 * w + 0 * c, (1, 4), (0, 3), CONTEXTS)
        if batch
        else None,
    )


values = arrays(
    np.float64,
    st.tuples(st.integers(1, 5), st.integers(1, 4)),
    elements=st.floats(0, 100, width=32),
)


@given(values)
def test_the_fit_never_decreases_and_leaves_monotone_values_alone(measured):
    fit = monotone_fit(measured)
    assert all((np.diff(fit, axis=axis) >= -1e-6).all() for axis in range(2))
    rising = np.maximum.accumulate(np.maximum.accumulate(measured, 0), 1)
    np.testing.assert_allclose(monotone_fit(rising), rising, atol=1e-9)


@given(values, st.integers(0, 2**16))
def test_no_other_monotone_array_is_closer(measured, seed):
    """The definition of a projection: the sum of squares grows towards any monotone array."""
    fit = monotone_fit(measured)
    rng = np.random.default_rng(seed)
    other = rng.random(measured.shape).cumsum(0).cumsum(1) * rng.choice([0.1, 10, 50])
    assert np.sum((fit - measured) ** 2) <= np.sum((other - measured) ** 2) + 1e-6
    assert np.sum((fit - measured) * (other - fit)) >= -1e-3 * (1 + np.abs(other).max() ** 2)


def test_predictions_are_exact_for_a_plane_also_between_and_beyond():
    seconds = surface().pass_s(np.ones(4), np.array([1, 3, 6, 16]), np.array([16, 40, 64, 100]))
    expected = [0.05 + 1e-3 * r + 1e-4 * c for r, c in [(1, 16), (3, 40), (6, 64), (16, 100)]]
    # Fitted in logarithms, predicted in seconds: the grid values themselves are exact.
    np.testing.assert_allclose(seconds, expected, rtol=1e-6)
    assert surface().prefill_s(40) == pytest.approx(0.04)


def test_batch_passes_are_predicted_by_their_own_grid():
    seconds = surface().pass_s(np.array([1, 2]), np.array([4, 4]), np.array([16, 16]))
    assert seconds == pytest.approx([0.05 + 4e-3 + 16e-4, 0.1 + 0.02 + 3e-3])
    with pytest.raises(ConfigurationError, match="no batch passes"):
        surface(batch=False).pass_s(np.array([2]), np.array([4]), np.array([16]))


def test_nodes_within_budget_are_those_within_a_tenth_of_the_single_row():
    # 1 row: 51 ms + 1.6; free up to 10 % more, 5.26 ms: five more rows.
    assert surface().nodes_within_budget(16) == 5
    flat = grid(lambda r, c: 0.05 + 0 * r, ROWS, CONTEXTS)
    assert CostSurface(MODEL, MACHINE, surface().prefill, flat).nodes_within_budget(16) == 7


def test_the_error_counts_noise():
    assert surface().tree.error < 1e-9
    rng = np.random.default_rng(0)
    noisy = surface().tree.samples * rng.lognormal(0, 0.1, surface().tree.samples.shape)
    assert Grid(surface().tree.axes, noisy).error > 0.02


@pytest.mark.parametrize(
    ("axes", "samples"),
    [
        ({"context": (1, 2)}, np.ones((3, 2))),
        ({"context": (2, 1)}, np.ones((2, 2))),
        ({"context": (1, 2)}, np.array([[1.0, 0.0], [1.0, 1.0]])),
        ({"context": (1, 2)}, np.array([[1.0, np.nan], [1.0, 1.0]])),
    ],
)
def test_impossible_grids_are_refused(axes, samples):
    with pytest.raises(ValueError, match=r"axes|axis|time"):
        Grid(axes, samples)


def test_a_file_gives_the_surface_back_and_others_are_refused(tmp_path):
    path = tmp_path / "surface.json"
    with pytest.raises(ConfigurationError, match="runner=cost"):
        CostSurface.read(path)
    path.write_text('{"format": "specbench-surface", "version": 99}')
    with pytest.raises(ConfigurationError, match="version 99"):
        CostSurface.read(path)
    surface().write(path)
    again = CostSurface.read(path)
    np.testing.assert_array_equal(again.tree.fitted, surface().tree.fitted)
    np.testing.assert_array_equal(again.batch.samples, surface().batch.samples)
    assert again.machine == MACHINE
    node = json.loads(path.read_text())
    node["tree"]["samples_s"].pop()
    path.write_text(json.dumps(node))
    with pytest.raises(ConfigurationError, match="damaged"):
        CostSurface.read(path)
