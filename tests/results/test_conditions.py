"""The table of a run's conditions."""

from specbench.results.conditions import accepted_by_part
from tests.small_run import case_record


def test_the_conditions_say_which_part_accepted_tokens_came_from():
    counts = {"accepted_from_a": 30, "accepted_from_b": 10, "found_by_a": 30, "found_by_b": 20}
    done = [
        case_record("a", "both", drafter=counts),
        case_record("b", "both", drafter=counts),
        case_record("c", "both", drafter=counts, status="failed"),
        case_record("d", "other", drafter={"stale_tokens": 7}),
    ]
    assert accepted_by_part(done) == ["80 of both: a 75% (had 75%), b 25% (had 50%)"]
