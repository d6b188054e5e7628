"""Trace packs: what they hold, what they leave out, and files that are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from specbench.errors import ConfigurationError
from specbench.replay.traces import load_traces, write_pack
from specbench.results.records import CANDIDATES, CASES, MANIFEST
from specbench.storage import jsonl
from specbench.storage.jsonl import RecordError
from tests.small_run import case_record

MODEL = {"id": "toy/model", "eos_ids": [2], "context_length": 64, "tokenizer_hash": "abc"}


def record(label, case_id, turn=0, status="ok", output=(5, 6, 2), stream_index=0):
    ids = {"n_prompt": 2, "prompt_ids": (3, 4), "output_ids": output}
    place = {"turn": turn, "stream_index": stream_index}
    return case_record(case_id, label, len(output), status=status, seed=7, **place, **ids)


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    manifest = {
        "schema_version": 1,
        "config": {
            "model": {"name": "toy", "shape_config": {"vocab_size": 50}, "cache_dir": "/here"},
            "dataset": {"name": "toys", "path": "/here/questions.jsonl"},
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
    assert traces.model["vocab_size"] == 50, "older runs have it in their configuration"


@pytest.mark.parametrize("name", ["pack.jsonl", "pack.jsonl.gz"])
def test_a_pack_replays_like_its_run_and_names_no_place(run, tmp_path, name):
    top = {"label": "ar", "case_id": "a", "turn": 0, "repeat": 0, "top": [[5, 1], [6, 1], [2, 0]]}
    jsonl.rewrite_jsonl(run / CANDIDATES, [top])
    traces = load_traces(run)
    assert write_pack(traces, tmp_path / name) == 4
    pack = load_traces(tmp_path / name)
    assert pack.sha == traces.sha
    assert pack.failed == traces.failed
    assert pack.find("ar", "a", 0).candidates.tolist() == top["top"]
    assert pack.find("ar", "a", 0).prompt_ids.dtype == np.int64
    assert (pack.model, pack.run_key) == (traces.model, traces.run_key)
    assert "/here" not in json.dumps([dict(pack.config), dict(pack.model)])
    if name.endswith("jsonl"):
        assert "/here" not in (tmp_path / name).read_text()


def test_a_pack_of_some_labels(run, tmp_path):
    write_pack(load_traces(run), tmp_path / "pack.jsonl", ["ar"])
    assert load_traces(tmp_path / "pack.jsonl").labels == ("ar",)
    with pytest.raises(ConfigurationError, match=r"sam.*ar, pld"):
        write_pack(load_traces(run), tmp_path / "none.jsonl", ["sam"])


def test_changed_files_are_read_again(run):
    before = load_traces(run).sha
    assert load_traces(run) is load_traces(run)
    jsonl.rewrite_jsonl(run / CASES, [record("ar", "z", output=(9, 9, 9, 9)).to_json()])
    assert load_traces(run).sha != before


def test_what_cannot_be_replayed_is_refused(run, tmp_path):
    with pytest.raises(ConfigurationError, match="must be a run folder"):
        load_traces(tmp_path / "nowhere")
    torn = tmp_path / "torn.jsonl"
    torn.write_text('{"format": "something else"}\n')
    with pytest.raises(RecordError, match="not a trace pack"):
        load_traces(torn)
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
    ("place", "value", "said"),
    [
        ("config.seed", None, "config.seed is None, not a whole number"),
        ("config.seed", "x", "config.seed is 'x', not a whole number"),
        ("config.generation", [], "there is no config.generation.max_new_tokens"),
        ("config.model", {"shape_config": {"vocab_size": 50}}, "there is no config.model.name"),
        ("model.context_length", True, "context_length is True"),
        ("model.tokenizer_hash", None, "tokenizer_hash is None, not a text"),
        ("model.eos_ids", None, "model.eos_ids is None, not a list"),
        ("run_key", 5, "run_key is"),
    ],
)
def test_the_damaged_key_is_named(run, tmp_path, place, value, said):
    pack = tmp_path / "pack.jsonl"
    write_pack(load_traces(run), pack)
    for path, source in ((run / MANIFEST, run), (pack, pack)):
        first, *rest = path.read_text().splitlines()
        header = json.loads(first)
        *above, key = place.split(".")
        node = header
        for name in above:
            node = node[name]
        node[key] = value
        path.write_text("\n".join([json.dumps(header), *rest]))
        with pytest.raises(RecordError, match=said) as refusal:
            load_traces(source)
        assert str(path) in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stream_index", [], "stream_index is"),
        ("seed", None, "seed is None"),
        ("task", 1, "task is 1, it must be text"),
        ("candidates", [], "candidates is .., it must be longer"),
        ("output_ids", [2**40], "output_ids.* at most"),
    ],
)
def test_the_damaged_line_of_a_pack_is_named(run, tmp_path, field, value, said):
    pack = tmp_path / "pack.jsonl"
    write_pack(load_traces(run), pack)
    lines = pack.read_text().splitlines()
    lines[2] = json.dumps(json.loads(lines[2]) | {field: value})
    pack.write_text("\n".join(lines))
    with pytest.raises(RecordError, match=rf"pack.jsonl, line 3: .*{said}"):
        load_traces(pack)
