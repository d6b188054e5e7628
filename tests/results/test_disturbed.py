"""What counts where turns were disturbed, and what is said of it."""

from dataclasses import replace

import numpy as np
import pytest

from specbench.results.statistics.aggregate import untimed_blocks
from specbench.results.statistics.disturbed import (
    disturbance,
    disturbance_words,
    first_measurements,
    unequal_shares,
    without_rule,
)
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import OVERALL
from tests.small_run import case_record

LABELS = ["ar", "pld"]


def block(case, steals=(0.0, 0.0), seconds=(2.0, 1.0), **changes):
    """A case of both labels; a share of stolen time is its disturbance."""
    return [
        case_record(
            f"{case:03}", label, stream_index=case, decode_s=taken, wall_s=taken, cpu_steal=steal,
            status="disturbed" if steal else "ok",
            disturbed_by="stolen" if steal else "", **changes,
        )
        for label, steal, taken in zip(LABELS, steals, seconds, strict=True)
    ]  # fmt: skip


def run(n, **disturbed):
    """``n`` cases; ``disturbed``: by the number after the letter, the steals of both labels."""
    found = {int(name[1:]): steals for name, steals in disturbed.items()}
    return [record for case in range(n) for record in block(case, found.get(case, (0.0, 0.0)))]


@pytest.mark.parametrize(
    ("n", "noisy", "left_out"),
    [(40, 1, 1), (40, 2, 2), (40, 3, 0), (40, 40, 0), (8, 1, 1), (8, 2, 0), (4, 1, 1), (3, 1, 0)],
)
def test_disturbed_cases_are_left_out_where_they_are_few_and_else_none(n, noisy, left_out):
    """Never the worst of them: those are the short ones."""
    records = [r for case in range(n) for r in block(case, (0.1 * (case < noisy), 0.0))]
    assert len(untimed_blocks(records)) == left_out
    row = summarize(records, LABELS, n_resamples=10)[-1]
    assert (row["n_timed"], row["n_disturbed"]) == (n - left_out, noisy)
    assert row["disturbed_counted"] == (left_out == 0)


def test_the_numbers_without_the_rule_are_of_the_first_measurements():
    first = block(0, (0.5, 0.0), seconds=(2.0, 8.0))
    again = block(0, seconds=(2.0, 1.0), attempt=1)
    rest = [record for case in range(1, 8) for record in block(case)]
    stayed = block(8, (0.0, 0.5), seconds=(2.0, 6.0))
    records = [*again, *rest, *stayed]
    rows = summarize(records, LABELS)
    found = disturbance(records, first, rows, "ar")
    assert rows[-1]["speedup"] == 2.0
    assert found["without_rule"]["pld"]["speedup"] == pytest.approx(18 / (8 + 7 + 6))
    assert found["without_rule"]["ar"]["speedup"] == 1.0
    assert (found["turns"], found["flagged"]) == ({"ar": 9, "pld": 9}, {"ar": 1, "pld": 1})
    assert (found["cases_again"], found["turns_again"]) == (1, 2)
    said = " ".join(
        disturbance_words([found], [("pld", 2.0, found["without_rule"]["pld"])])
    )  # fmt: skip
    assert "when first measured: 1 of 9 of each label." in said
    (unlike, *_) = disturbance_words([found | {"flagged": {"ar": 0, "pld": 1}}], [])
    assert "ar 0 of 9, pld 1 of 9" in unlike
    assert "1 case was measured again (2 turns of all labels)" in said
    assert "without the rule, each turn counted as first measured: pld 0.86 [" in said


def test_where_nothing_was_disturbed_the_numbers_are_the_same_and_nothing_is_said():
    records = run(6)
    rows = summarize(records, LABELS)
    found = disturbance(records, [], rows, "ar")
    (row,) = (r for r in rows if (r["label"], r["task"]) == ("pld", OVERALL))
    assert found["without_rule"]["pld"]["speedup_ci"] == row["speedup_ci"]
    assert disturbance_words([found], [("pld", 2.0, found["without_rule"]["pld"])]) == []


def test_predicted_times_have_no_disturbance():
    records = [replace(r, timing="predicted") for r in run(3)]
    assert disturbance(records, [], summarize(records, LABELS), "ar") is None


def test_a_measurement_that_was_made_twice_again_counts_as_first_measured():
    kept = block(0, attempt=2)
    earlier = [*block(0, (0.9, 0.9), seconds=(9.0, 9.0)), *block(0, (0.5, 0.5), attempt=1)]
    first = first_measurements(kept, earlier)
    assert [r.decode_s for r in first] == [9.0, 9.0]
    assert {r.status for r in without_rule(first)} == {"ok"}


@pytest.mark.parametrize(
    ("shares", "more"),
    [
        ({"ar": 0.05, "pld": 0.2}, "pld"),
        ({"ar": 0.2, "pld": 0.05}, "ar"),
        ({"ar": 0.2, "pld": 0.2}, None),
        ({"ar": 0.004, "pld": 0.011}, None),  # the system counts no finer
    ],
)
def test_labels_of_whose_time_others_took_unequal_shares_are_named(shares, more):
    noise = np.random.default_rng(0).uniform(0.5, 1.5, (40, 2))
    records = [
        record
        for case, factors in enumerate(noise)
        for record in block(case, [shares[x] * f for x, f in zip(LABELS, factors, strict=True)])
    ]
    found = unequal_shares(records, LABELS)
    assert (found and found["more"]) == more
    if found:
        assert found["shares"][0] == pytest.approx(0.2, rel=0.1)
        whole = disturbance(records, [], summarize(records, LABELS, n_resamples=10), "ar")
        said = " ".join(disturbance_words([whole], []))
        assert f"of {more}'s time and" in said[said.index("LABELS DISTURBED UNEQUALLY") :]


def test_short_bursts_do_not_make_labels_unequal_by_the_length_of_their_turns():
    """The same seconds are a larger share of a short turn, and a long turn is hit more often."""
    rng, records = np.random.default_rng(1), []
    for case in range(200):
        hit = [float(rng.random() < seconds / 10) for seconds in (2.0, 0.5)]
        shares = [0.3 * hit[0] / 2.0, 0.3 * hit[1] / 0.5]
        records += block(case, shares, seconds=(2.0, 0.5))
    assert unequal_shares(records, LABELS) is None


def test_three_labels_are_three_tests():
    one = [record for case in range(9) for record in block(case, (0.0, 0.1 * (case % 3)))]
    both = [replace(r, label="sam", cpu_steal=0.0) for r in one if r.label == "ar"]
    pair, three = unequal_shares(one, LABELS), unequal_shares([*one, *both], [*LABELS, "sam"])
    assert three["p"] == pytest.approx(3 * pair["p"])
