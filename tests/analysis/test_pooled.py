"""Runs that repeat each other, summarised as one."""

import pytest

from analysis.pooled import pooled
from analysis.runs.load import load_runs
from specbench.errors import ResultsError
from tests.analysis.folders import copy_run, edit_manifest, edit_records
from tests.small_run import warning_texts


@pytest.fixture
def twice(results):
    """The run without repeats or failures, and again with another seed, in which pld is slower."""

    def first(record):
        return record if not record["repeat"] and record["case_id"] != "90" else None

    def slower(record):
        seconds = record["decode_s"] * (1.3 if record["label"] == "pld" else 1.0)
        return record | {"decode_s": seconds, "wall_s": record["prefill_s"] + seconds}

    edit_records(results / "one", first)
    copy_run(results / "one", results / "two", "again")
    edit_records(results / "two", slower)
    edit_manifest(results / "two", seed=1)
    return results


def codes(summary):
    return {line["code"] for line in summary["warnings"]}


def test_they_count_as_repeats_of_one_run(twice):
    runs = load_runs([twice])
    summary = pooled(runs)
    rows = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
    assert set(rows) == set(runs[0].labels) and summary["leaders"][0] == "cacheback"
    turns = [r for run in runs for r in run.records if r.label == "pld"]
    tokens, steps = sum(r.n_new - 1 for r in turns), sum(r.n_target_passes for r in turns)
    assert rows["pld"]["mat"] == pytest.approx(tokens / steps)
    assert sum(rows["pld"]["lossless"].values()) == len(turns)
    low, high = rows["pld"]["speedup_ci"]
    assert low < rows["pld"]["speedup"] < high
    narrow = rows["cacheback"]["speedup_ci"]
    assert high / low > 3 * narrow[1] / narrow[0], "what the runs differ in is in the interval"


def test_a_wrong_output_of_one_process_costs_the_label_its_standing(twice):
    bug = {"lossless": {"verdict": "bug", "first_diff": 2, "gap": 5.0}}
    at = ("pld", "81", 0)
    edit_records(
        twice / "two", lambda r: r | (bug if (r["label"], r["case_id"], r["turn"]) == at else {})
    )
    summary = pooled(load_runs([twice]))
    assert summary["against_best"]["pld"]["verdict"] == "wrong outputs"
    assert "pld" not in summary["leaders"]
    assert summary["verdict"].startswith("WRONG OUTPUTS of pld")


def test_a_label_that_one_process_left_out_is_left_out_with_its_reason(twice):
    edit_records(twice / "two", lambda r: None if r["label"] == "pld" else r)
    edit_manifest(twice / "two", left_out={"pld": "It failed in its warm-up (made up)."})
    summary = pooled(load_runs([twice]))
    assert {row["label"] for row in summary["rows"]} == {"ar", "cacheback", "no_frozen"}
    assert "LEFT OUT: pld, by two. It failed in its warm-up (made up)." in warning_texts(summary)


def test_what_decides_of_any_run_is_warned_of(twice):
    assert "FORCED" not in codes(pooled(load_runs([twice])))
    for name, label in (("one", "pld"), ("two", "")):
        change = {"forced_resume": True, "n_drafted": 0}
        edit_records(twice / name, lambda r, x=label, c=change: r | (c if r["label"] == x else {}))
    warned = codes(pooled(load_runs([twice])))
    assert "FORCED" in warned
    # A draft of nothing in one process is a draft of something in both.
    assert "NO_DRAFT" not in warned


def test_a_task_is_left_out(twice):
    runs = load_runs([twice])
    turns = [r for run in runs for r in run.records if r.label == "pld" and r.task != "qa"]
    rows = {(r["label"], r["task"]): r for r in pooled(runs, ["qa"])["rows"]}
    assert ("pld", "qa") not in rows
    assert sum(rows["pld", "overall"]["lossless"].values()) == len(turns)
    with pytest.raises(ResultsError, match="no case is of songs"):
        pooled(runs, ["songs"])


def test_runs_that_differ_are_refused(twice):
    with pytest.raises(ResultsError, match="1 run"):
        pooled(load_runs([twice / "one"]))
    edit_records(twice / "two", lambda r: None if r["label"] == "pld" else r)
    with pytest.raises(ResultsError, match="other labels"):
        pooled(load_runs([twice]))
