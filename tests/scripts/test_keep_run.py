"""A run's copy in the repository tells the same numbers and holds none of its questions' words."""

import gzip
import json

import pytest

from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from scripts.keep_run import keep
from specbench.errors import ResultsError
from specbench.results.statistics.summary import summarize
from specbench.storage.jsonl import RecordError
from tests.analysis.conftest import results  # noqa: F401, a fixture
from tests.analysis.folders import copy_run, edit_manifest


def test_the_copy_tells_the_same_numbers_and_which_outputs_are_equal(results, tmp_path):  # noqa: F811
    keep(results / "one", tmp_path / "kept")
    ((run,), (copy,)) = load_runs([results / "one"]), load_runs([tmp_path / "kept"])
    assert copy.complete
    assert len(make_comparisons([run, copy])) == 1, "the same questions"
    original, copied = (summarize(loaded.records, loaded.labels) for loaded in (run, copy))
    assert original == copied
    assert len(copy.superseded) == len(run.superseded)
    both = zip(run.records, copy.records, strict=True)
    pairs = {(tuple(original.output_ids), copied.output_sha) for original, copied in both}
    assert len(pairs) == len({ids for ids, _ in pairs}) == len({sha for _, sha in pairs})


def test_the_copy_holds_no_ids_and_no_places_of_this_machine(results, tmp_path):  # noqa: F811
    root = str(tmp_path / "somewhere")
    config = json.loads((results / "one/manifest.json").read_text())["config"]
    edit_manifest(
        results / "one",
        prompt_set_hash="owner/name",
        config=config | {"output_dir": root, "data_dir": f"{root}/data"},
        overrides=[f"output_dir={root}", f"data_dir={root}/data", f"x={tmp_path}/a/surface.json"],
    )
    files = keep(results / "one", tmp_path / "kept")
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
    manifest = json.loads((tmp_path / "kept/manifest.json").read_text())
    assert manifest["overrides"] == ["output_dir=RUN", "data_dir=RUN/data", "x=…/surface.json"]
    assert manifest["prompt_set_hash"] == "owner/name"  # as of a hub: no path
    lines = gzip.decompress((tmp_path / "kept/cases.jsonl.gz").read_bytes()).splitlines()
    assert lines
    for line in map(json.loads, lines):
        assert line["prompt_ids"] == line["output_ids"] == []
        assert len(line["prompt_sha"]) == len(line["output_sha"]) == 64


def test_it_keeps_no_unfinished_run_and_no_run_over_another(results, tmp_path):  # noqa: F811
    keep(results / "one", tmp_path / "kept")
    keep(results / "one", tmp_path / "kept")
    copy_run(results / "one", tmp_path / "two", "another")
    edit_manifest(tmp_path / "two", folder_id="another")
    with pytest.raises(ResultsError, match="another run"):
        keep(tmp_path / "two", tmp_path / "kept")
    (results / "one/DONE").unlink()
    with pytest.raises(ResultsError, match="Repeat the run's command"):
        keep(results / "one", tmp_path / "new")


def test_a_spoiled_copy_is_refused(results, tmp_path):  # noqa: F811
    keep(results / "one", tmp_path / "kept")
    cases = tmp_path / "kept/cases.jsonl.gz"
    cases.write_bytes(cases.read_bytes()[:-9])
    with pytest.raises(RecordError, match="was changed"):
        load_runs([tmp_path / "kept"])
    (tmp_path / "kept/DONE").unlink()
    with pytest.raises(RecordError, match="damaged"):
        load_runs([tmp_path / "kept"])
