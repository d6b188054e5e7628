"""Shards of a run, measured apart and joined, are the run; whatever is not that is refused."""

import json
import shutil

import pyarrow.parquet as pq
import pytest

from analysis import merge
from analysis.runs.load import load_runs
from specbench.results import records
from specbench.storage import jsonl
from tests.analysis.folders import edit_manifest, edit_records
from tests.runners.test_dispatch import comparable, no_work
from tests.small_run import run_here, warning_texts

N = 2


@pytest.fixture(scope="module")
def shards(small, tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for i in range(N):
        assert run_here(small, f"shard={i}/{N}", f"output_dir={root}/part{i}", "repeats=2") == 0
    assert run_here(small, f"output_dir={root}/whole", "repeats=2") == 0
    return root


@pytest.fixture
def parts(shards, tmp_path):
    """Copies of the shards that a test may spoil."""
    for i in range(N):
        shutil.copytree(shards / f"part{i}", tmp_path / f"part{i}")
    return [tmp_path / f"part{i}" for i in range(N)]


def refused(capsys, *arguments):
    assert merge.main([str(argument) for argument in arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ")
    return message


def change(path, name, **changes):
    edit_manifest(path, **{name: jsonl.read_json(path / records.MANIFEST)[name] | changes})


def test_merged_shards_are_the_whole_run(small, shards, tmp_path, capsys):
    out = tmp_path / "merged"
    assert merge.main([str(shards / "part1"), str(shards / "part0"), "-o", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 28 records of 5 cases\n"
    assert comparable(out) == comparable(shards / "whole")
    found = [(r.stream_index, r.turn, r.position) for r in records.read_records(out)[0]]
    assert found == sorted(found)
    whole, merged = (
        {row["task"]: row for row in jsonl.read_json(p / records.SUMMARY)["rows"]}
        for p in (shards / "whole", out)
    )
    assert whole.keys() == merged.keys()
    assert merged["overall"]["mat"] == whole["overall"]["mat"]
    assert merged["overall"]["n_cases"] == 5
    assert pq.read_table(out / records.STEPS).num_rows == sum(
        r.n_target_passes for r in records.read_records(out)[0]
    )
    manifest = jsonl.read_json(out / records.MANIFEST)
    assert manifest["identity"]["shard"] is manifest["config"]["shard"] is None
    read = [jsonl.read_json(shards / p / records.MANIFEST)["model"]["read_bytes_per_s"] for p in
            ("part0", "part1")]  # fmt: skip
    assert manifest["model"]["read_bytes_per_s"] == max(read) > 0
    assert manifest["merged_from"] == [str(shards / "part0"), str(shards / "part1")]
    assert load_runs([out])[0].complete
    # The command without a shard finds everything there.
    assert run_here(small, f"output_dir={out}", "repeats=2", launch=no_work) == 0
    assert "against the best" in capsys.readouterr().out


def recorded_twice(parts):
    text = (parts[0] / records.CASES).read_text()
    with (parts[1] / records.CASES).open("a") as file:
        file.write(text.splitlines()[0] + "\n")
    edit_manifest(parts[1], files=None)  # as runs of before hashes were kept


def edited_by_hand(parts):
    edit_records(parts[1], lambda record: record | {"wall_s": 9.0})


def of_another_run(parts):
    edit_manifest(parts[1], run_key="another", files=None)
    edit_records(parts[1], lambda record: record | {"run_key": "another"})


def without(name):
    return lambda parts: (parts[1] / name).unlink()


def other_weights(parts):
    change(parts[1], "model", weights_hash="another")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda parts: shutil.rmtree(parts[0]), ["not all shards", "shard=0/2"]),
        (
            lambda parts: shutil.copytree(parts[0], parts[0].with_name("copy")),
            ["shard=0/2 is there twice", "copy"],
        ),
        (recorded_twice, ["1 records are there twice"]),
        (edited_by_hand, ["part1/cases.jsonl was changed after the run was done"]),
        (without(records.STEPS), ["part1/steps.parquet is missing after the run was done"]),
        (without(records.DONE), ["part1 (shard=1/2) is incomplete"]),
        (
            lambda parts: edit_manifest(parts[1], run_key="another"),
            ["part1/cases.jsonl, line 1: run_key is"],
        ),
        (of_another_run, ["are not shards of one run", 'run_key: there "another"']),
        (other_weights, ['model.weights_hash: there "another"']),
    ],
)
def test_what_is_not_every_shard_of_one_run_once_is_refused(parts, tmp_path, capsys, spoil, said):
    spoil(parts)
    message = refused(capsys, tmp_path, "-o", tmp_path / "merged")
    assert all(words in message for words in said)
    assert not (tmp_path / "merged").exists()


def test_other_hardware_must_be_asked_for_and_is_noted(parts, tmp_path, capsys):
    change(parts[1], "hardware", cpu="another")
    out = tmp_path / "merged"
    message = refused(capsys, *parts, "-o", out)
    assert "hardware of shard=1/2 is not that of shard=0/2" in message
    assert "--mixed" in message
    assert merge.main([*map(str, parts), "-o", str(out), "--mixed"]) == 0
    noted = jsonl.read_json(out / records.MANIFEST)["mixed_conditions"]
    assert noted == ["hardware of shard=1/2 is not that of shard=0/2"]


def test_a_label_that_a_shard_left_out_is_left_out_of_the_whole(parts, tmp_path):
    labels = jsonl.read_json(parts[1] / records.MANIFEST)["labels"]
    del labels["pld"]
    why = {"pld": "It failed in its warm-up (made up)."}
    edit_records(parts[1], lambda record: None if record["label"] == "pld" else record)
    edit_manifest(parts[1], labels=labels, left_out=why, files=None)
    joined = merge.merge(parts, tmp_path / "joined")
    assert joined.labels == ["ar"] and joined.manifest.exit_code == 1
    summary = jsonl.read_json(joined.path / records.SUMMARY)
    assert {row["label"] for row in summary["rows"]} == {"ar"}
    (note,) = [note for note in warning_texts(summary) if note.startswith("LEFT OUT: pld")]
    assert "shard=1/2" in note and "made up" in note


def test_neither_an_existing_folder_nor_a_whole_run_will_do(shards, tmp_path, capsys):
    part, whole = shards / "part0", shards / "whole"
    assert f"{part} exists already" in refused(capsys, part, shards / "part1", "-o", part)
    assert "no shard at or below" in refused(capsys, whole, "-o", tmp_path / "merged")


def test_a_failed_case_keeps_its_reason_and_the_exit_code(parts, tmp_path):
    path = parts[0] / records.ERRORS
    line = {"label": "pld", "case_id": "81", "turn": 0, "repeat": 0, "during": "audit"}
    line |= {"type": "RuntimeError", "message": "made up"}
    path.write_text(json.dumps(line) + "\n")
    edit_manifest(parts[0], files=None)
    out = tmp_path / "merged"
    assert merge.main([str(tmp_path), "-o", str(out)]) == 0, "a folder of shards is searched"
    assert jsonl.read_jsonl(out / records.ERRORS)[0] == [line]
    assert jsonl.read_json(out / records.MANIFEST)["exit_code"] == 1
    notes = warning_texts(jsonl.read_json(out / records.SUMMARY))
    assert any("The audit itself failed for 1 turns" in note for note in notes)


def test_what_was_measured_again_in_a_shard_is_told_of_the_whole(parts, tmp_path):
    path = parts[0] / records.CASES
    lines = jsonl.read_jsonl(path)[0]
    case = lines[0]["case_id"]
    old = [line for line in lines if (line["case_id"], line["repeat"]) == (case, 0)]
    jsonl.rewrite_jsonl(parts[0] / records.DISTURBED, old)
    jsonl.rewrite_jsonl(path, [line | {"attempt": int(line in old)} for line in lines])
    edit_manifest(parts[0], files=None)
    joined = merge.merge(parts, tmp_path / "joined")
    assert len(joined.superseded) == len(old)
    summary = jsonl.read_json(joined.path / records.SUMMARY)
    assert summary["disturbed"]["turns_again"] == len(old)
    assert "1 case was measured again" in summary["conditions"]["disturbed turns"]
