"""The figures of trained heads show the numbers of their records."""

from dataclasses import replace

import numpy as np
import pytest

from analysis.figures import pictures_of
from analysis.plots.heads import acceptance_picture, priced, rows_picture
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from analysis.runs.surfaces import cost_on
from specbench.results.estimate import Estimate
from tests.analysis.folders import EXPERIMENTS

# By label: draft nodes of each step, and knobs.
SIZES = {
    "eagle2": (7, {"head": "eagle", "top_k": 3}),
    "eagle3": (3, {"head": "eagle", "top_k": 3}),
    "medusa": (15, {"head": "eagle", "levels": [4, 6, 3, 2]}),
    "pld": (3, {"head": "eagle", "top_k": 1}),
}


def comparison_of(run):
    return make_comparisons([run], claims=())[0]


@pytest.fixture(scope="module")
def run():
    (found,) = load_runs([EXPERIMENTS / "specbench_board"])
    return replace(found, manifest=found.manifest.model_copy(update={"overrides": []}))


def with_knobs(run, knobs):
    labels = {
        label: info.model_copy(update={"knobs": knobs.get(label, info.knobs)})
        for label, info in run.manifest.labels.items()
    }
    return replace(run, manifest=run.manifest.model_copy(update={"labels": labels}))


@pytest.fixture(scope="module")
def heads(run):
    return with_knobs(run, {"eagle2": {"head": "eagle"}, "medusa": {"head": "medusa"}})


@pytest.fixture(scope="module")
def sizes(run):
    """All labels as sizes of one head's draft, with the model of the committed surface."""
    records = [
        replace(
            record,
            model="smollm2_135m",
            method="eagle2" if record.label in SIZES else record.method,
            n_drafted=SIZES.get(record.label, (0,))[0] * record.n_target_passes,
        )
        for record in run.records
    ]
    found = with_knobs(run, {label: knobs for label, (_, knobs) in SIZES.items()})
    hardware = {"cpu": "AMD EPYC", "cpus_usable": 1}
    config = {**found.manifest.config, "model": {"name": "smollm2_135m", "dtype": "float32"}}
    model = found.manifest.model.model_copy(update={"dtype": "float32"})
    return replace(
        found,
        records=records,
        manifest=found.manifest.model_copy(
            update={"config": config, "model": model, "hardware": hardware}
        ),
    )


def lines(axes):
    """Places and heights by the line's name in the legend."""
    return {
        container.get_label(): np.array(container.lines[0].get_data())
        for container in axes.containers
    }


def accepted(run, label):
    return np.concatenate(
        [r.committed_per_step for r in run.records if r.label == label and r.status == "ok"]
    )


def test_acceptance_is_the_records_share_by_position(heads):
    every, after = acceptance_picture(comparison_of(heads), "").axes
    for name in ("eagle2", "medusa"):
        steps = accepted(heads, name)
        for place, share in zip([1, 2, 3], lines(every)[name][1], strict=False):
            assert share == pytest.approx((steps > place).mean())
        for place, share in zip([1, 2, 3], lines(after)[name][1], strict=False):
            assert share == pytest.approx((steps > place).sum() / (steps >= place).sum())
    assert set(lines(every)) == {"eagle2", "medusa"}, "pld has no head"


def test_runs_without_heads_have_neither_figure(run):
    found = comparison_of(run)
    assert acceptance_picture(found, "") is None
    assert rows_picture(found, "") is None
    assert not {"acceptance", "tree_rows"} & {name for name, _ in pictures_of(found)}


def test_chains_and_trees_stand_at_their_rows_priced_by_the_surface(sizes):
    found = comparison_of(sizes)
    mat, predicted, measured = rows_picture(found, "").axes
    cost, words = cost_on("AMD EPYC", "smollm2_135m", "float32")
    assert words["source"] == "smollm2_135m-cpu-epyc-1thread.json"
    rows = {entry.label: entry.overall for entry in found.drafting}
    trees, chains = ["eagle3", "eagle2", "medusa"], ["pld"]
    for name, labels in (("eagle2, tree", trees), ("eagle2, chain", chains)):
        places = [SIZES[label][0] + 1 for label in labels]
        for axes, heights in (
            (mat, [rows[label]["mat"] for label in labels]),
            (predicted, [rows[x]["mat"] / cost[n] for x, n in zip(labels, places, strict=True)]),
            (measured, [rows[label]["speedup"] for label in labels]),
        ):
            assert lines(axes)[name] == pytest.approx(np.array([places, heights]))
    assert "predicted" in predicted.get_ylabel()
    assert "predicted" not in measured.get_ylabel()
    assert {"acceptance", "tree_rows"} <= {name for name, _ in pictures_of(found)}


def test_a_pass_is_priced_by_no_other_machine(sizes):
    elsewhere = replace(
        sizes, manifest=sizes.manifest.model_copy(update={"hardware": {"cpu": "Another"}})
    )
    _, measured = rows_picture(comparison_of(elsewhere), "").axes
    assert "predicted" not in measured.get_ylabel()
    assert cost_on("Another", "smollm2_135m", "float32") == ({}, {})


def test_a_price_lies_between_those_of_the_sizes_that_were_timed():
    cost = {1: 1.0, 4: 2.0, 16: 8.0}
    assert priced(Estimate(3.0, (2.0, 4.0)), 4, cost) == Estimate(1.5, (1.0, 2.0))
    assert priced(Estimate(4.0), 8, cost).value == pytest.approx(1.0)
    assert priced(Estimate(4.0), 17, cost).value is None
