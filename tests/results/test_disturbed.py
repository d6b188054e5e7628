"""Turns that count in runs with disturbed ones, and the text about them."""

import pytest

from specbench.results.statistics.disturbed import disturbance, disturbance_text
from specbench.results.statistics.summary import summarize, untimed_blocks
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
    steals_of_case = {int(name[1:]): steals for name, steals in disturbed.items()}
    return [
        record for case in range(n) for record in block(case, steals_of_case.get(case, (0.0, 0.0)))
    ]


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
    result = disturbance(records, first, rows, "ar")
    assert rows[-1]["speedup"] == 2.0
    assert result["without_rule"]["pld"]["speedup"] == pytest.approx(18 / (8 + 7 + 6))
    assert result["without_rule"]["ar"]["speedup"] == 1.0
    assert (result["turns"], result["flagged"]) == ({"ar": 9, "pld": 9}, {"ar": 1, "pld": 1})
    assert (result["cases_again"], result["turns_again"]) == (1, 2)
    text = disturbance_text([result, None])
    assert text.endswith("first measured: 1 of 9 of each label; 1 case was measured again.")
    unlike = disturbance_text([result | {"flagged": {"ar": 0, "pld": 1}, "cases_again": 0}])
    assert unlike.endswith("first measured: ar 0 of 9, pld 1 of 9.")


def test_where_nothing_was_disturbed_the_numbers_are_the_same_and_nothing_is_said():
    records = run(6)
    rows = summarize(records, LABELS)
    result = disturbance(records, [], rows, "ar")
    (row,) = (r for r in rows if (r["label"], r["task"]) == ("pld", OVERALL))
    assert result["without_rule"]["pld"]["speedup_ci"] == row["speedup_ci"]
    assert disturbance_text([result]) == ""


def test_predicted_times_have_no_disturbance():
    records = [r.replace(timing="predicted") for r in run(3)]
    assert disturbance(records, [], summarize(records, LABELS), "ar") is None


def test_a_measurement_that_was_made_twice_again_counts_as_first_measured():
    records = [*run(4)[2:], *block(0, attempt=2)]
    earlier = [*block(0, (0.9, 0.9), seconds=(9.0, 9.0)), *block(0, (0.5, 0.5), attempt=1)]
    result = disturbance(records, earlier, summarize(records, LABELS), "ar")
    assert result["without_rule"]["pld"]["speedup"] == pytest.approx((9 + 3 * 2) / (9 + 3))
