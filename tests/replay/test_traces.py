"""Recorded outputs of a run folder, and folders that are refused."""

import json
from pathlib import Path

import pytest

from specbench.errors import ConfigurationError
from specbench.replay.traces import load_traces
from specbench.results.records import CASES, MANIFEST
from specbench.storage import jsonl
from specbench.storage.jsonl import RecordError
from tests.small_run import case_record

MODEL = {"id": "toy/model", "eos_ids": [2], "context_length": 64, "vocab_size": 50}
MODEL["tokenizer_hash"] = "abc"


def record(label, case_id, turn=0, status="ok", output=(5, 6, 2), stream_index=0):
    ids = {"n_prompt": 2, "prompt_ids": (3, 4), "output_ids": output}
    position = {"turn": turn, "stream_index": stream_index}
    return case_record(case_id, label, len(output), status=status, seed=7, **position, **ids)


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    manifest = {
        "schema_version": 2,
        "config": {
            "model": {"name": "toy"},
            "dataset": {"name": "toys"},
            "generation": {"max_new_tokens": 8, "temperature": 0.0},
            "seed": 3,
        },
        "model": MODEL,
        "run_key": "k",
        "prompt_set_hash": "h",
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    lines = [
        record("ar", "a", stream_index=0),
        record("pld", "a", output=(5, 7, 2), stream_index=0),
        record("ar", "b", stream_index=1),
        record("pld", "b", status="failed", output=(), stream_index=1),
        record("ar", "c", turn=0, stream_index=2),
        record("ar", "c", turn=1, stream_index=2),
    ]
    jsonl.rewrite_jsonl(folder / CASES, [line.to_json() for line in lines])
    return folder


def test_a_labels_own_row_comes_first_then_plain_decodings(run):
    traces = load_traces(run)
    assert traces.find("pld", "a", 0).output_ids.tolist() == [5, 7, 2]
    assert traces.find("sam", "a", 0).output_ids.tolist() == [5, 6, 2]
    assert traces.find("pld", "c", 1).label == "ar"
    assert traces.find("pld", "c", 2) is None


def test_a_case_that_failed_is_left_out_whole_and_counted(run):
    traces = load_traces(run)
    assert list(traces.cases()) == ["a", "c"]
    assert [len(turns) for turns in traces.cases().values()] == [1, 2]
    assert traces.failed == ("b",)


def test_changed_files_are_read_again(run):
    before = load_traces(run).sha
    assert load_traces(run) is load_traces(run)
    jsonl.rewrite_jsonl(run / CASES, [record("ar", "z", output=(9, 9, 9, 9)).to_json()])
    assert load_traces(run).sha != before


def test_what_cannot_be_replayed_is_refused(run, tmp_path):
    for path in (tmp_path / "nowhere", run / CASES):
        with pytest.raises(ConfigurationError, match="must be the folder of a finished"):
            load_traces(path)
    manifest = json.loads((run / MANIFEST).read_text())
    manifest["config"]["generation"]["temperature"] = 0.7
    (run / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ConfigurationError, match=r"sampled.*temperature=0.7"):
        load_traces(run)
    manifest["config"]["generation"]["temperature"] = 0.0
    (run / MANIFEST).write_text(json.dumps(manifest))
    (run / CASES).write_text("")
    with pytest.raises(ConfigurationError, match="no finished turn"):
        load_traces(run)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("config.seed", "x", "config.seed is 'x', it must be"),
        ("config.generation", [], r"config.generation is \[\], it must be"),
        ("config.model", {}, "no field config.model.name"),
        ("model.context_length", True, "context_length is True"),
        ("model.vocab_size", None, "vocab_size is None, it must be"),
        ("model.eos_ids", None, "model.eos_ids is None, it must be"),
        ("run_key", 5, "run_key is"),
    ],
)
def test_the_damaged_key_is_named(run, key, value, message):
    manifest = json.loads((run / MANIFEST).read_text())
    *above, name = key.split(".")
    node = manifest
    for part in above:
        node = node[part]
    node[name] = value
    (run / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(RecordError, match=message) as refusal:
        load_traces(run)
    assert str(run / MANIFEST) in str(refusal.value)
