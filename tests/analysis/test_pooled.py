"""Runs that repeat each other, summarised as one."""

import pytest

from analysis.pooled import pooled
from analysis.runs.load import load_runs
from specbench.errors import ResultsError
from tests.small_run import run_here


@pytest.fixture(scope="module")
def twice(small, tmp_path_factory):
    """The folder of two runs of other seeds, and of a third with another method."""
    folder = tmp_path_factory.mktemp("twice")
    typed = [*small, "measure.exclusive=false"]
    for seed in (0, 1):
        run_here([*typed, f"seed={seed}", f"dataset.shuffle={seed}", f"output_dir={folder}/{seed}"])
    run_here([*typed, "compare=[suffix_decoding]", f"output_dir={folder}/other"])
    return folder


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
