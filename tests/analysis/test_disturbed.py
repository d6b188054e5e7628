"""Disturbed turns and repeated measurements are reported wherever the numbers are shown."""

import csv
import json

import pytest

from analysis import publish, tables
from analysis.runs.acceptance import phase_share
from analysis.runs.captions import conditions_of
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from specbench.results.records import DISTURBED
from tests.analysis.folders import edit_records


@pytest.fixture
def folder(results):
    """The run with a case measured again: pld was disturbed in it, and a hundred times slower."""
    run, first = results / "one", []

    def measure_again(record):
        if (record["case_id"], record["repeat"]) != ("100", 0):
            return record
        old = dict(record)
        if record["label"] == "pld":
            old |= {"status": "disturbed", "disturbed_by": "made up"}
            old["decode_s"] = 100 * record["decode_s"]
            old["wall_s"] = old["prefill_s"] + old["decode_s"]
        first.append(old)
        return record | {"attempt": 1}

    edit_records(run, measure_again)
    (run / DISTURBED).write_text("".join(json.dumps(line) + "\n" for line in first))
    return run


def test_conditions_wandb_and_csv_have_it(folder, capsys):
    (run,) = load_runs([folder])
    (comparison,) = make_comparisons([run])
    assert "1 case was measured again" in conditions_of(comparison)["disturbed turns"]
    (pld,) = (e for e in comparison.entries if e.label == "pld")
    disturbed = pld.disturbed
    assert (disturbed["flagged"]["pld"], disturbed["turns_again"]) == (1, 4)
    without = disturbed["without_rule"]["pld"]["speedup"]
    assert without < 0.95 * pld.overall["speedup"]
    contents = {content.name: content for content in publish.wandb_runs([run])}
    metrics = contents["pld"].summary
    assert metrics["speedup_without_rule"] == without
    assert metrics["speedup"] == pld.overall["speedup"] != without
    files = contents["all methods"].files  # without it the copy would give other numbers
    assert f"{run.path.name}/{DISTURBED}" in files
    assert tables.main([str(folder), "--csv"]) == 0
    lines = csv.DictReader(capsys.readouterr().out.splitlines())
    shown = {row["label"]: row["speedup_without_rule"] for row in lines if row["task"] == "overall"}
    assert float(shown["pld"]) == pytest.approx(without, rel=1e-5)


def test_shares_of_time_are_of_the_turns_that_count_in_times(results):
    """They took disturbed turns and cases that had dropped out, which the caption denied."""
    run = results / "one"
    odd = {"101": "disturbed", "102": "failed"}

    def clock(record):
        status = odd.get(record["case_id"])
        share = 0.9 if status else 0.25
        phases = {"draft": share * record["decode_s"], "verify": (1 - share) * record["decode_s"]}
        unchanged = record["status"] if record["status"] == "failed" else "ok"
        return record | {
            "phase_s": phases,
            "status": status if status and record["label"] == "ar" else unchanged,
        }

    edit_records(run, clock)
    (comparison,) = make_comparisons(load_runs([run]))
    for entry in comparison.drafting:
        assert phase_share(entry).value == pytest.approx(0.25)
        assert {r.case_id for r in entry.timed_records}.isdisjoint(odd)
        assert "102" not in {r.case_id for r in entry.records}
        assert "101" in {r.case_id for r in entry.records}, "what is no time counts all the same"
