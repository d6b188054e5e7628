"""Runs that repeat each other, summarised as one."""

import shutil

import pytest

from analysis.pooled import pooled
from analysis.runs.load import load_runs
from specbench.errors import ResultsError
from tests.analysis.folders import edit_manifest, edit_records
from tests.small_run import run_here, warning_texts


@pytest.fixture(scope="module")
def twice(small, tmp_path_factory):
    """The folder of two runs of other seeds, and of a third with another method."""
    folder = tmp_path_factory.mktemp("twice")
    typed = [*small, "measure.exclusive=false"]
    for seed in (0, 1):
        run_here([*typed, f"seed={seed}", f"dataset.shuffle={seed}", f"output_dir={folder}/{seed}"])
    run_here([*typed, "compare=[suffix_decoding]", f"output_dir={folder}/other"])
    return folder


@pytest.mark.slow  # over a second
def test_they_count_as_repeats_of_one_run(twice):
    runs = load_runs([twice / "0", twice / "1"])
    made = pooled(runs)
    rows = {row["label"]: row for row in made["rows"]}
    assert set(rows) == set(runs[0].labels) and made["leaders"]
    turns = [r for run in runs for r in run.records if r.label == "pld"]
    tokens, steps = sum(r.n_new - 1 for r in turns), sum(r.n_target_passes for r in turns)
    assert rows["pld"]["mat"] == pytest.approx(tokens / steps)
    low, high = rows["pld"]["speedup_ci"]
    assert low < rows["pld"]["speedup"] < high
    assert sum(rows["pld"]["lossless"].values()) == len(turns)


def test_a_wrong_output_of_one_process_costs_the_label_its_standing(twice, tmp_path):
    folder = shutil.copytree(twice, tmp_path / "twice")
    spoilt = set()

    def spoil(record):
        if record["label"] == "pld" and not spoilt:
            spoilt.add("pld")
            record["lossless"] = {"verdict": "bug", "first_diff": 2, "gap": 5.0}
        return record

    edit_records(folder / "1", spoil)
    edit_manifest(folder / "1", files=None)
    made = pooled(load_runs([folder / "0", folder / "1"]))
    assert made["against_best"]["pld"]["verdict"] == "wrong outputs"
    assert "pld" not in made["leaders"]
    assert made["verdict"].startswith("WRONG OUTPUTS of pld")


def test_a_label_that_one_process_left_out_is_left_out_with_its_reason(twice, tmp_path):
    folder = shutil.copytree(twice, tmp_path / "twice")
    edit_records(folder / "1", lambda record: None if record["label"] == "pld" else record)
    why = {"pld": "It failed in its warm-up (made up)."}
    edit_manifest(folder / "1", left_out=why, files=None)
    made = pooled(load_runs([folder / "0", folder / "1"]))
    assert {row["label"] for row in made["rows"]} == {"ar"}
    assert "LEFT OUT: pld, by 1. It failed in its warm-up (made up)." in warning_texts(made)


def test_what_decides_of_any_run_is_warned_of(twice, tmp_path):
    folder = shutil.copytree(twice, tmp_path / "twice")
    assert "FORCED" not in codes(pooled(load_runs([folder / "0", folder / "1"])))
    edit_records(folder / "1", lambda record: record | {"forced_resume": True})
    edit_manifest(folder / "1", files=None)
    made = pooled(load_runs([folder / "0", folder / "1"]))
    assert "FORCED" in codes(made)
    # A draft of nothing in one process is a draft of something in both.
    assert "NO_DRAFT" not in codes(made)


def codes(summary):
    return {line["code"] for line in summary["warnings"]}


def test_a_task_is_left_out(twice):
    runs = load_runs([twice / "0", twice / "1"])
    tasks = {r.task for r in runs[0].records}
    assert len(tasks) > 1
    out, *others = sorted(tasks)
    turns = [r for run in runs for r in run.records if r.label == "pld" and r.task in others]
    rows = {(r["label"], r["task"]): r for r in pooled(runs, [out])["rows"]}
    assert ("pld", out) not in rows
    assert sum(rows["pld", "overall"]["lossless"].values()) == len(turns)
    with pytest.raises(ResultsError, match="no case is of songs"):
        pooled(runs, ["songs"])


def test_runs_that_differ_are_refused(twice):
    with pytest.raises(ResultsError, match="other labels"):
        pooled(load_runs([twice / "0", twice / "other"]))
    with pytest.raises(ResultsError, match="1 run"):
        pooled(load_runs([twice / "0"]))
