"""The labels that may be the best, in one run and over several."""

import json

import pytest
from matplotlib.text import Text

from analysis.figures import pictures_of
from analysis.runs.comparisons import make_comparisons
from analysis.runs.leaders import by_speedup, leaders, standings, verdict_of
from analysis.runs.load import load_runs
from analysis.tabular.comparison_tables import comparison_table
from specbench.results.statistics.pairs import rank_labels
from tests.analysis.folders import copy_run, edit_manifest, edit_records


def only(cases, factor=1.0, repeats=(0,)):
    """Keep some cases of some repeats; pld takes ``factor`` times as long in them."""

    def change(record):
        if record["case_id"] not in cases or record["repeat"] not in repeats:
            return None
        if record["label"] == "pld":
            record["decode_s"] *= factor
            record["wall_s"] = record["prefill_s"] + record["decode_s"]
        return record

    return change


def other_settings(folder):
    """Change a knob of the run's pld, so that it is no second measurement of the first."""
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["labels"]["pld"]["knobs"]["max_ngram"] = 9
    edit_manifest(folder, labels=manifest["labels"])


@pytest.fixture
def case_ids(results):
    (run,) = load_runs([results])
    failed = {record.case_id for record in run.records if record.status != "ok"}
    return sorted({record.case_id for record in run.records} - failed)


def only_comparison(results):
    (comparison,) = make_comparisons(load_runs([results]), claims=())
    return comparison


def led(results, key="speedup"):
    comparison = only_comparison(results)
    return [comparison.name_of(e) for e in leaders(comparison.drafting, key)]


def decided(comparison):
    """Return the first table's cells against the best, by method."""
    frame = comparison_table(comparison).in_short().frame
    return frame.set_index("method")["against the best"].map(str)


def test_in_one_run_they_are_those_of_its_summary(results):
    (run,) = load_runs([results])
    best = led(results)
    assert best == rank_labels(run.records, run.labels, run.baseline, run.seed).leaders
    assert best[0] == "cacheback"


@pytest.mark.parametrize("repeats", [(0,), (0, 1)], ids=["one repeat", "two in one of them"])
def test_two_runs_are_compared_case_by_case(results, case_ids, repeats):
    edit_records(results / "one", only(case_ids, repeats=repeats))
    copy_run(results / "one", results / "two", "other")
    edit_records(results / "two", only(case_ids))
    alike = led(results)
    assert {"cacheback (one)", "cacheback (two)"} <= set(alike), "nothing parts a run from its copy"
    edit_records(results / "two", only(case_ids, factor=0.4))
    assert len(led(results)) > 1, "runs of the same settings differ as much as the methods do"
    other_settings(results / "two")
    assert led(results) == ["pld (max_ngram=9)"]


def test_two_cases_part_nothing_and_the_table_says_so(results, case_ids):
    edit_records(results / "one", only(case_ids[:2], factor=0.01))
    for key, first in (("speedup", {"pld"}), ("mat", {"cacheback", "no_frozen"})):
        best = led(results, key)
        assert set(best) == {"cacheback", "no_frozen", "pld"} and best[0] in first
    comparison = only_comparison(results)
    assert set(decided(comparison)) == {"too few cases"}
    assert all(entry.measured("speedup").interval is None for entry in comparison.entries)


def test_the_table_names_one_where_the_data_do(results, case_ids):
    edit_records(results / "one", only(case_ids, factor=0.2))
    cells = decided(only_comparison(results))
    assert cells["pld"] == "best"
    assert all(text.startswith("slower, p ") for text in cells.drop("pld"))


def with_bugs(folder, *wrong):
    """Make the output of each of these labels' first turn wrong."""
    left = set(wrong)

    def change(record):
        if record["label"] in left and record["status"] == "ok":
            left.remove(record["label"])
            record["lossless"] = {"verdict": "bug", "first_diff": 2, "gap": 5.0}
        return record

    edit_records(folder, change)


@pytest.mark.parametrize("two_runs", [False, True], ids=["one run", "with another run"])
def test_a_label_with_a_wrong_output_is_in_no_ranking(results, two_runs):
    run = results / "one"
    if two_runs:
        copy_run(run, results / "two", "two")
        other_settings(results / "two")
    with_bugs(run, "cacheback")
    comparison = only_comparison(results)
    best = leaders(comparison.drafting, "speedup")
    assert not any(e.run.path == run and e.label == "cacheback" for e in best)
    assert standings(comparison)[run, "cacheback"]["verdict"] == "wrong outputs"
    first, _, rest = verdict_of(comparison).partition("\n")
    assert first.startswith("WRONG OUTPUTS of cacheback") and "at token 2" in first
    assert not rest.startswith("cacheback is ") or two_runs
    assert len(by_speedup(comparison)) == len(comparison.drafting) - 1


def test_a_label_with_a_wrong_output_is_in_no_picture_of_who_is_faster(results):
    with_bugs(results / "one", "cacheback")
    drawn = dict(pictures_of(only_comparison(results)))
    for name in ("speedup_by_task", "mat", "ranked"):
        texts = {text.get_text() for text in drawn[name].findobj(Text)}
        assert "pld" in texts and "cacheback" not in texts
        assert "Not drawn: WRONG OUTPUTS of cacheback" in " ".join(drawn[name].caption.split())


def test_where_all_methods_have_wrong_outputs_none_is_named(results):
    with_bugs(results / "one", "cacheback", "no_frozen", "pld")
    comparison = only_comparison(results)
    assert comparison.ranked == leaders(comparison.drafting, "speedup") == []
    assert "times as fast" not in verdict_of(comparison)
    cells = {*decided(comparison)}
    assert "wrong outputs" in cells and not cells & {"best", "highest"}
