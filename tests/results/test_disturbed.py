"""What counts where turns were disturbed, and what is said of it."""

from dataclasses import replace

import pytest

from specbench.results.statistics.aggregate import most_harmed, untimed_blocks
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


def speedup(records):
    return summarize(records, LABELS, n_resamples=10)[-1]["speedup"]


def left_out(records):
    return sorted(int(case) for _, case in untimed_blocks(records))


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_one_more_disturbed_case_changes_what_counts_by_one_at_most(share):
    """There is no share of disturbed cases at which the result jumps."""
    before: set[int] = set()
    for k in range(41):
        records = [r for case in range(40) for r in block(case, (share * (case < k), 0.0))]
        now = set(left_out(records))
        assert len(now) == min(k, 10)
        assert len(before ^ now) <= 2
        before = now


def test_cases_whose_labels_were_disturbed_unequally_are_left_out_first():
    records = run(8, c1=(0.5, 0.5), c3=(0.9, 0.9), c5=(0.0, 0.2), c6=(0.1, 0.1))
    assert left_out(records) == [3, 5]
    blocks = [records[2 * i : 2 * i + 2] for i in (1, 3, 5, 6)]
    assert [int(case) for _, case in most_harmed(blocks)] == [5, 3, 1, 6]


def test_times_have_no_say_in_what_is_left_out():
    records = run(8, c1=(0.5, 0.0), c3=(0.4, 0.0), c5=(0.3, 0.0))
    slow = [replace(r, decode_s=90.0) if r.case_id == "005" else r for r in records]
    assert left_out(records) == left_out(slow) == [1, 3]


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
    assert "ar 1 of 9, pld 1 of 9" in said
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
    ("n_ar", "n_pld", "n_both", "p"),
    [
        (0, 6, 0, 2 * 0.5**6),
        (0, 5, 9, None),  # 2 * 0.5**5 is over 5 %
        (4, 12, 0, None),
        (1, 10, 20, 2 * 12 * 0.5**11),
        (12, 0, 0, 2 * 0.5**12),
    ],
)
def test_labels_disturbed_unequally_often_by_more_than_chance(n_ar, n_pld, n_both, p):
    kinds = [(0.5, 0.0)] * n_ar + [(0.0, 0.5)] * n_pld + [(0.5, 0.5)] * n_both
    records = [record for case, steals in enumerate(kinds) for record in block(case, steals)]
    found = unequal_shares(records, LABELS)
    if p is None:
        assert found is None
    else:
        more = "pld" if n_pld > n_ar else "ar"
        assert (found["more"], found["p"]) == (more, pytest.approx(p))
        whole = disturbance(records, [], summarize(records, LABELS, n_resamples=10), "ar")
        assert "LABELS DISTURBED UNEQUALLY: " + more in " ".join(disturbance_words([whole], []))


def test_three_labels_are_three_tests():
    records = [record for case in range(7) for record in block(case, (0.0, 0.5))]
    records += [case_record(f"{case:03}", "sam") for case in range(7)]
    found = unequal_shares(records, [*LABELS, "sam"])
    assert found == {"more": "pld", "less": "ar", "p": pytest.approx(3 * 2 * 0.5**7)}
