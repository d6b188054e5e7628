"""Finding and reading run folders, whole and damaged."""

import itertools
import shutil

import pytest

from analysis.runs.comparisons import conditions, make_comparisons
from analysis.runs.load import find_runs, load_runs, usable_runs
from specbench.errors import ResultsError, SpecBenchError
from tests.analysis.folders import RECORDS, copy_run, edit_manifest, edit_records


@pytest.fixture
def results(tmp_path):
    """Two copies of the synthetic run, one level and two levels deep."""
    for name in ("b", "sweep/a"):
        shutil.copytree(RECORDS / "synthetic", tmp_path / name)
    return tmp_path


def names(runs):
    return [run.path.name for run in runs]


def test_runs_are_found_at_any_depth_and_once(results):
    expected = [results / "b", results / "sweep" / "a"]
    assert find_runs([results]) == expected
    assert find_runs([results / "b", results, results / "sweep"]) == expected
    assert find_runs([results / "b"]) == [results / "b"]


def test_shorter_weights_are_conditions_of_a_comparison(results):
    """`engine.weights`: another engine, so that no table has two of them as one comparison."""
    edit_manifest(results / "b", model={"weights": "bfloat16"})
    run, plain = load_runs([results])
    assert run.dtype == f"{plain.dtype} of bfloat16 weights"
    assert conditions(run) != conditions(plain)
    titles = [comparison.title for comparison in make_comparisons([run, plain], "paired")]
    assert sorted(title.endswith(", bfloat16 weights") for title in titles) == [False, True]


def test_a_run_on_gpus(results):
    edit_manifest(results / "b", hardware={"gpus": [{"name": "NVIDIA RTX 4090"}] * 2})
    assert load_runs([results / "b"])[0].gpus == [], "the model was on the CPU"
    git = {"commit": "0123456789abcdef", "dirty": True}
    edit_manifest(results / "b", model={"device": "cuda:0"}, git=git)
    (run,) = load_runs([results / "b"])
    assert run.hardware == "2 NVIDIA RTX 4090"
    assert run.code == "commit 0123456789 with changes"


def test_incomplete_runs_are_named_and_used_on_request(results):
    (results / "b" / "DONE").unlink()
    for included, expected in ((False, (["a"], ["b"])), (True, (["b", "a"], []))):
        shown, hidden = usable_runs([results], include_incomplete=included)
        assert (names(shown), names(hidden)) == expected
    with pytest.raises(ResultsError, match=r"incomplete: .*/b\. .* --incomplete"):
        usable_runs([results / "b"])


def test_a_truncated_line_makes_a_run_incomplete(results):
    cases = results / "b" / "cases.jsonl"
    cases.write_text(cases.read_text()[:-20])
    (run,) = load_runs([results / "b"])
    assert not run.complete and len(run.records) == 223


def test_a_shard_beside_its_merge_stands_in_no_table(results):
    edit_manifest(results / "b", identity={"shard": "0/2"})
    assert len(usable_runs([results])[0]) == 2, "another run's merge is missing"
    edit_manifest(results / "sweep" / "a", merged_from=["b"])
    assert names(usable_runs([results])[0]) == ["a"]
    assert names(usable_runs([results / "b"])[0]) == ["b"], "named alone it is shown"


def test_plain_decoding_recorded_for_a_replay_stands_in_no_table(results):
    copy_run(results / "b", results / "c", "another")
    edit_manifest(results / "c", traces={"run_key": "synthetic"})
    shutil.rmtree(results / "sweep")
    assert names(usable_runs([results])[0]) == ["b", "c"], "it has other labels, too"
    edit_records(results / "b", lambda record: record if record["label"] == "ar" else None)
    assert names(usable_runs([results])[0]) == ["c"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent", "is not a folder"),
        ("sweep", r"no run at or below .*python run\.py"),
        ("b", "no run at or below"),
    ],
)
def test_no_folder_no_run_in_it_or_no_record_yet(results, name, message):
    shutil.rmtree(results / "sweep" / "a")
    (results / "b" / "cases.jsonl").write_text("")
    with pytest.raises(ResultsError, match=message):
        usable_runs([results / name])


@pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', "{}"])
def test_a_manifest_of_another_kind_or_a_damaged_record_is_named(results, text):
    lines = itertools.count(1)
    edit_records(results / "b", lambda r: r | {"n_new": r["n_new"] + (next(lines) == 5)})
    with pytest.raises(SpecBenchError, match=r"cases\.jsonl, line 5") as caught:
        load_runs([results])
    assert caught.value.exit_code == 2
    (results / "b" / "manifest.json").write_text(text)
    with pytest.raises(SpecBenchError, match=r"b/manifest\.json"):
        load_runs([results])
