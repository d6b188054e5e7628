"""A label with wrong outputs has no standing, and one that always fails costs nobody numbers."""

import io

import pytest
from rich.console import Console

from specbench.results.console import print_summary
from specbench.results.manifest import RunManifest
from specbench.results.records import SCHEMA_VERSION, Lossless
from specbench.results.run_summary import exit_code, run_summary
from specbench.results.statistics.counted import failing_labels
from tests.small_run import case_record, warning_texts

SPEED = {"ar": 10.0, "pld": 6.0, "wild": 2.0}  # seconds of a case; wild is the fastest


def turn_of(label, case, wrong=(), failed=()):
    """A label's turn of case ``case``; ``wrong`` and ``failed`` hold labels with cases."""
    seconds = SPEED[label] + 0.1 * (case % 4)
    verdict = (
        Lossless(verdict="bug", first_diff=3, gap=9.0)
        if (label, case) in wrong
        else Lossless(verdict="equal")
    )
    record = case_record(
        f"c{case:02d}", label, 12, stream_index=case, lossless=verdict, prefill_s=1.0,
        decode_s=seconds, wall_s=1.0 + seconds,
    )  # fmt: skip
    if (label, case) not in failed:
        return record
    return case_record(
        f"c{case:02d}", label, 0, stream_index=case, status="failed", prefill_s=0.0, decode_s=0.0,
        wall_s=0.0, committed_per_step=[], output_ids=[],
    )  # fmt: skip


def run(n=6, **which):
    return [turn_of(label, case, **which) for case in range(n) for label in SPEED]


def summary(cases, errors=(), **changes):
    labels = {label: {"knobs": {}} for label in SPEED}
    values = {
        "run_key": "k", "schema_version": SCHEMA_VERSION, "baseline": "ar", "seed": 0,
        "labels": labels, "config": {"estimator": "paired", "repeats": 1}, "n_cases": len(cases),
    }  # fmt: skip
    return run_summary(cases, errors, RunManifest.from_json(values | changes))


def printed(run_summary):
    out = io.StringIO()
    print_summary(run_summary, Console(file=out, width=200))
    return out.getvalue()


def every(label, n=6):
    return {(label, case) for case in range(n)}


@pytest.mark.parametrize(
    ("wrong", "leaders"),
    [
        ({("wild", 4)}, ["pld"]),  # one turn of six
        (every("wild"), ["pld"]),
        ({("pld", 0)}, ["wild"]),  # who is slower than the fastest is as wrong
        ({("wild", 4), ("pld", 1)}, []),
        ({("ar", 2)}, []),  # and every speedup is over it
        (set(), ["wild"]),
    ],
    ids=["one turn", "every turn", "the slower", "both", "plain", "none"],
)
def test_who_has_a_wrong_output_has_no_standing_and_is_named_above_the_table(wrong, leaders):
    cases = run(wrong=wrong)[::-1]
    result = summary(cases)
    bugs = {label for label, _ in wrong}
    assert result["leaders"] == leaders
    assert not bugs & {name for pair in result["pairs"] for name in (pair["first"], pair["second"])}
    stands = result["against_best"]
    assert {label for label in stands if stands[label]["verdict"] == "wrong outputs"} == bugs
    assert exit_code(cases, []) == bool(wrong)
    assert exit_code([], [{"during": "decode"}]) == 1
    out = printed(result)
    above, _, below = out.partition("method")
    for label in bugs:
        first = min(case for name, case in wrong if name == label)
        count = sum(name == label for name, _ in wrong)
        assert f"WRONG OUTPUTS of {label}" in above
        assert f"{count} of 6" in above
        assert f"first in case c{first:02d}, turn 0, at token 3" in above
        assert f"{label} is " not in out, "no speedup sentence"
        assert "wrong outputs" in next(line for line in below.splitlines() if label in line)
    sentence = f"{leaders[0]} is " if leaders else "times as fast"
    assert (sentence in above) == bool(leaders)


@pytest.mark.parametrize(
    ("label", "n", "counts"),
    [
        ("wild", 6, False),
        ("pld", 6, False),
        ("wild", 4, False),
        ("wild", 3, True),
        ("ar", 6, False),
    ],
)
def test_who_fails_in_more_than_half_of_the_cases_is_left_out_and_the_others_keep_theirs(
    label, n, counts
):
    cases = run(failed={(label, case) for case in range(n)})
    errors = [
        {"label": label, "type": "AttributeError", "message": "no\nlookup", "during": "decode"}
    ]
    result = summary(cases, errors)
    rows = {row["label"]: row for row in result["rows"] if row["task"] == "overall"}
    assert (label in rows) == counts
    assert {row["n_cases"] for row in rows.values()} == {6 - n if counts else 6}
    assert exit_code(cases, errors) == 1
    messages = [note for note in warning_texts(result) if note.startswith("LEFT OUT")]
    if counts:
        assert not messages
        assert "3 of 6 cases are dropped for all labels" in " ".join(warning_texts(result))
        return
    assert f"LEFT OUT: {label}. It failed in {n} of 6 cases, more than 50%" in messages[0]
    assert "AttributeError: no" in messages[0]
    if label == "ar":
        assert {row["speedup"] for row in rows.values()} == {None}
        assert all(row["mat"] and row["tokens_per_s"] for row in rows.values())
    else:
        (other,) = {"pld", "wild"} - {label}
        assert result["leaders"] == [other]
        assert rows[other]["speedup"] == pytest.approx(
            sum(SPEED["ar"] + 0.1 * (i % 4) for i in range(6))
            / sum(SPEED[other] + 0.1 * (i % 4) for i in range(6))
        )


def test_where_all_labels_fail_none_is_left_out():
    cases = run(failed=every("ar") | every("pld") | every("wild"))
    assert not failing_labels(cases, SPEED)
    assert "6 of 6 cases are dropped" in " ".join(warning_texts(summary(cases)))


def test_who_failed_its_warm_up_is_named_with_the_reason():
    cases = [record for record in run() if record.label != "wild"]
    labels = {label: {"knobs": {}} for label in ("ar", "pld")}
    result = summary(cases, labels=labels, left_out={"wild": "It failed in its warm-up (X: y)."})
    assert "LEFT OUT: wild. It failed in its warm-up (X: y)." in printed(result)
    assert result["leaders"] == ["pld"]
