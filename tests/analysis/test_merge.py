"""Joined shards equal the whole run; anything else is refused."""

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
        assert run_here(small, f"shard={i}/{N}", f"output_dir={root}/part{i}") == 0
    assert run_here(small, f"output_dir={root}/whole") == 0
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
    assert capsys.readouterr().out == f"{out}: 14 records of 5 cases\n"
    assert comparable(out) == comparable(shards / "whole")
    lines = records.read_records(out)[0]
    places = [(r.stream_index, r.turn, r.position) for r in lines]
    assert places == sorted(places)
    whole, merged = (
        {row["task"]: (row["mat"], row["n_cases"]) for row in jsonl.read_json(path)["rows"]}
        for path in (shards / "whole" / records.SUMMARY, out / records.SUMMARY)
    )
    assert whole == merged and merged["overall"][1] == 5
    assert pq.read_table(out / records.STEPS).num_rows == sum(r.n_target_passes for r in lines)
    manifest = jsonl.read_json(out / records.MANIFEST)
    assert manifest["identity"]["shard"] is manifest["config"]["shard"] is None
    assert manifest["merged_from"] == [str(shards / "part0"), str(shards / "part1")]
    runs = load_runs([shards / "part0", shards / "part1"])
    reads = [run.manifest.model.read_bytes_per_s for run in runs]
    assert manifest["model"]["read_bytes_per_s"] == max(reads) > 0
    assert load_runs([out])[0].complete
    # The command without a shard finds everything there.
    assert run_here(small, f"output_dir={out}", launch=no_work) == 0
    assert "against the best" in capsys.readouterr().out


def recorded_twice(parts):
    text = (parts[0] / records.CASES).read_text()
    with (parts[1] / records.CASES).open("a") as file:
        file.write(text.splitlines()[0] + "\n")
    edit_manifest(parts[1], files=None)  # as runs of before hashes were kept


def of_another_run(parts):
    edit_manifest(parts[1], run_key="another", files=None)
    edit_records(parts[1], lambda record: record | {"run_key": "another"})


@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda parts: shutil.rmtree(parts[0]), "with shard=0/2"),
        (
            lambda parts: edit_manifest(parts[1], identity={"shard": "1/3"}),
            "with shard=1/2, shard=0/3, shard=2/3",
        ),
        (lambda parts: shutil.copytree(parts[0], parts[0].with_name("x")), "=0/2 is there twice"),
        (recorded_twice, "1 records are there twice"),
        (
            lambda parts: edit_records(parts[1], lambda record: record | {"wall_s": 9.0}),
            "part1/cases.jsonl was changed after the run was done",
        ),
        (lambda parts: (parts[1] / records.STEPS).unlink(), "part1/steps.parquet is missing after"),
        (lambda parts: (parts[1] / records.DONE).unlink(), "part1 (shard=1/2) is incomplete"),
        (
            lambda parts: edit_manifest(parts[1], run_key="another"),
            "part1/cases.jsonl, line 1: run_key is",
        ),
        (of_another_run, 'run_key: there "another"'),
        (
            lambda parts: change(parts[1], "model", weights_hash="another"),
            'model.weights_hash: there "another"',
        ),
        (
            lambda parts: change(parts[1], "hardware", cpu="another"),
            "hardware of shard=1/2 is not that of shard=0/2",
        ),
    ],
)
def test_what_is_not_every_shard_of_one_run_once_is_refused(parts, tmp_path, capsys, spoil, error):
    spoil(parts)
    assert error in refused(capsys, tmp_path, "-o", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_other_hardware_is_noted_where_it_was_asked_for(parts, tmp_path):
    change(parts[1], "hardware", cpu="another")
    out = tmp_path / "merged"
    assert merge.main([*map(str, parts), "-o", str(out), "--mixed"]) == 0
    noted = jsonl.read_json(out / records.MANIFEST)["mixed_conditions"]
    assert noted == ["hardware of shard=1/2 is not that of shard=0/2"]


def test_neither_an_existing_folder_nor_a_whole_run_will_do(shards, tmp_path, capsys):
    part, whole = shards / "part0", shards / "whole"
    assert f"{part} exists already" in refused(capsys, part, shards / "part1", "-o", part)
    assert "no shard at or below" in refused(capsys, whole, "-o", tmp_path / "merged")


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


def test_a_failed_case_keeps_its_reason_and_the_exit_code(parts, tmp_path):
    line = {"label": "pld", "case_id": "81", "turn": 0, "repeat": 0, "during": "audit"}
    line |= {"type": "RuntimeError", "message": "made up"}
    (parts[0] / records.ERRORS).write_text(json.dumps(line) + "\n")
    edit_manifest(parts[0], files=None)
    out = merge.merge([tmp_path], tmp_path / "merged").path  # a folder of shards is searched
    assert jsonl.read_jsonl(out / records.ERRORS)[0] == [line]
    assert jsonl.read_json(out / records.MANIFEST)["exit_code"] == 1
    notes = warning_texts(jsonl.read_json(out / records.SUMMARY))
    assert any("The audit itself failed for 1 turns" in note for note in notes)


def test_what_was_measured_again_in_a_shard_is_told_of_the_whole(parts, tmp_path):
    path = parts[0] / records.CASES
    lines = jsonl.read_jsonl(path)[0]
    old = [line for line in lines if line["case_id"] == lines[0]["case_id"]]
    jsonl.rewrite_jsonl(parts[0] / records.DISTURBED, old)
    jsonl.rewrite_jsonl(path, [line | {"attempt": int(line in old)} for line in lines])
    edit_manifest(parts[0], files=None)
    joined = merge.merge(parts, tmp_path / "joined")
    assert len(joined.superseded) == len(old)
    summary = jsonl.read_json(joined.path / records.SUMMARY)
    assert summary["disturbed"]["turns_again"] == len(old)
    assert "1 case was measured again" in summary["conditions"]["disturbed turns"]
