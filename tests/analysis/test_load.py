"""Finding and reading run folders, whole and damaged."""

import itertools
import shutil

import pytest

from analysis.runs.comparisons import conditions, make_comparisons
from analysis.runs.load import find_runs, load_runs, usable_runs
from specbench.errors import ResultsError
from specbench.storage.jsonl import RecordError
from tests.analysis.folders import RECORDS, edit_manifest, edit_records


@pytest.fixture
def results(tmp_path):
    """Two copies of the synthetic run, one level and two levels deep."""
    for name in ("b", "sweep/a"):
        shutil.copytree(RECORDS / "synthetic", tmp_path / name)
    return tmp_path


def test_runs_are_found_at_any_depth_and_once(results):
    expected = [results / "b", results / "sweep" / "a"]
    assert find_runs([results]) == expected
    assert find_runs([results / "b", results, results / "sweep"]) == expected
    assert find_runs([results / "b"]) == [results / "b"]


def test_what_a_run_knows(results):
    (run,) = load_runs([results / "b"])
    assert run.complete and run.synthetic
    assert run.labels == ["ar", "cacheback", "no_frozen", "pld"]
    assert run.baseline == "ar"
    assert (run.model, run.dataset, run.dtype) == ("vicuna7b", "specbench", "float16")
    assert run.knobs("no_frozen")["table"] == "dynamic"
    assert run.hardware == "Synthetic CPU, 2 CPUs"
    assert run.gpus == []
    assert len(run.records) == 224


def test_shorter_weights_are_conditions_of_a_comparison(results):
    """`engine.weights`: another engine, so that no table has two of them as one comparison."""
    plain = load_runs([results / "b"])[0]
    edit_manifest(results / "b", model={"weights": "bfloat16"})
    (run,) = load_runs([results / "b"])
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
    for asked, names in ((False, (["a"], ["b"])), (True, (["b", "a"], []))):
        shown, hidden = usable_runs([results], include_incomplete=asked)
        assert ([run.path.name for run in shown], [run.path.name for run in hidden]) == names
    with pytest.raises(ResultsError, match=r"incomplete: .*/b\. .* --incomplete"):
        usable_runs([results / "b"])


def test_a_truncated_line_makes_a_run_incomplete(results):
    cases = results / "b" / "cases.jsonl"
    cases.write_text(cases.read_text()[:-20])
    (run,) = load_runs([results / "b"])
    assert not run.complete and len(run.records) == 223


class TestPartsOfOthers:
    """Records that a second run here holds as well stand in no table by themselves."""

    def test_shards_beside_their_merge(self, results):
        edit_manifest(results / "b", identity={"shard": "0/2"})
        assert len(usable_runs([results])[0]) == 2, "another run's merge is missing"
        edit_manifest(results / "sweep" / "a", merged_from=["b"])
        assert [run.path.name for run in usable_runs([results])[0]] == ["a"]
        assert len(usable_runs([results / "b"])[0]) == 1, "named alone it is shown"

    def test_plain_decoding_recorded_for_a_replay(self, results):
        (run, _) = load_runs([results])
        traces = {"run_key": run.manifest.run_key}
        edit_manifest(results / "sweep" / "a", traces=traces, run_key="another")
        edit_records(results / "sweep" / "a", lambda record: record | {"run_key": "another"})
        assert len(usable_runs([results])[0]) == 2, "it has other labels, too"
        edit_records(results / "b", lambda record: record if record["label"] == "ar" else None)
        assert [run.path.name for run in usable_runs([results])[0]] == ["a"]


class TestUnusable:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("absent", "is not a folder"),
            ("sweep", r"no run at or below .*python run\.py"),
            ("b", "no run at or below"),
        ],
    )
    def test_no_folder_no_run_in_it_or_no_record_yet(self, results, name, message):
        shutil.rmtree(results / "sweep" / "a")
        (results / "b" / "cases.jsonl").write_text("")
        with pytest.raises(ResultsError, match=message):
            usable_runs([results / name])

    @pytest.mark.parametrize("text", ["{", "[]", '{"schema_version": 99}', "{}"])
    def test_a_manifest_of_another_kind(self, results, text):
        (results / "b" / "manifest.json").write_text(text)
        with pytest.raises(RecordError, match=r"b/manifest\.json"):
            load_runs([results])

    def test_a_damaged_record_names_file_and_line(self, results):
        lines = itertools.count(1)
        edit_records(results / "b", lambda r: r | {"n_new": r["n_new"] + (next(lines) == 5)})
        with pytest.raises(Exception, match=r"cases\.jsonl, line 5") as caught:
            load_runs([results])
        assert caught.value.exit_code == 2
