"""Run folders that something damaged: every reader refuses them with exit code 2, or is right."""

import io
import json
import random
import shutil
import traceback
from dataclasses import replace

import pytest
from rich.console import Console

from analysis.runs.load import load_runs
from runners.measure import measurement
from specbench.errors import OutputRefused, SpecBenchError
from specbench.replay.traces import load_traces
from specbench.results import console, records
from specbench.results.jsonl_schema import read_steps
from specbench.results.manifest import RunManifest
from specbench.storage import jsonl
from specbench.storage.jsonl import RecordError
from specbench.system import environment
from tests.analysis.folders import edit_manifest, edit_records
from tests.small_run import run_here

FILES = (
    *(records.MANIFEST, records.CASES, records.ERRORS, records.DISTURBED, records.DIALOGUE),
    *(records.STEPS_LOG, records.SUMMARY),
)
VALUES = (
    *(None, True, -1, 0, 1, 2.5, -0.5, "", "x", [], {}, [[]], [1, "x"], {"a": 1}, 10**25, 10**400),
    *(float("nan"), float("inf"), "HALF", "DEEP", "DIGITS"),
)
RAW = {'"HALF"': '"\\ud800"', '"DEEP"': "[" * 100_000 + "]" * 100_000, '"DIGITS"': "1" * 5000}


@pytest.fixture(scope="module")
def overrides(small):
    return [*small, "dataset.limit=2", "measure.rerun_share=1"]


@pytest.fixture(scope="module")
def finished(overrides, tmp_path_factory):
    """Make a finished run; its side files are filled by hand where a quiet run leaves none."""
    out = tmp_path_factory.mktemp("damage") / "run"
    assert run_here([*overrides, f"output_dir={out}"]) == 0
    steps = read_steps(out / records.STEPS)
    jsonl.rewrite_jsonl(out / records.STEPS_LOG, (trace.to_json() for trace in steps))
    first = jsonl.read_jsonl(out / records.CASES)[0]
    case = [line for line in first if line["case_id"] == first[0]["case_id"]]
    jsonl.rewrite_jsonl(out / records.DISTURBED, case)
    edit_records(out, lambda line: line | {"attempt": int(line["case_id"] == case[0]["case_id"])})
    turn = {key: case[0][key] for key in ("label", "case_id", "turn", "repeat")}
    error = {**turn, "during": "audit", "type": "ValueError", "message": "made up"}
    jsonl.rewrite_jsonl(out / records.ERRORS, [error])
    answer = {"case_id": "81", "turn": 0, "prompt_sha": "0", "output_ids": [1, 2]}
    jsonl.rewrite_jsonl(out / records.DIALOGUE, [answer])
    edit_manifest(out, files=None)
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def job(overrides, finished, tmp_path_factory):
    """Return the job that a start of that run hands to its child."""
    handed = []
    empty = tmp_path_factory.mktemp("job")
    run_here([*overrides, f"output_dir={empty}"], launch=lambda work, job: handed.append(job) or 0)
    return handed[0]


@pytest.fixture(autouse=True)
def same_machine(monkeypatch):
    machine = environment.describe()
    monkeypatch.setattr(environment, "describe", lambda: machine)


def resume(job, path):
    """Open the folder as a start does, measure nothing, and close it."""
    (path / records.DONE).unlink(missing_ok=True)
    for run in measurement.attempts(replace(job, folder=path)):
        with run:
            pass
    return run.exit_code


def show(job, path):
    RunManifest.read(path).check_files(path)
    console.print_folder(path, Console(file=io.StringIO()))


def tabulate(job, path):
    for run in load_runs([path]):
        assert run.labels and run.hardware and run.code and run.superseded is not None


READERS = (show, tabulate, lambda job, path: load_traces(path), resume)  # the last one writes


def damage(path, rng):
    """Replace, drop or add one value somewhere in a file of json."""
    lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    at = rng.randrange(len(lines))
    value = json.loads(lines[at])
    node = value
    while True:
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        if not isinstance(node[key], (dict, list)) or not node[key] or rng.random() < 0.5:
            break
        node = node[key]
    if rng.random() < 0.3:
        del node[key]
        done = f"without {key}"
    else:
        node[key] = rng.choice(VALUES)
        done = f"{key} = {str(node[key])[:20]}"
    lines[at] = json.dumps(value)
    for word, text in RAW.items():
        lines[at] = lines[at].replace(word, text)
    path.write_text("\n".join(lines) + "\n")
    return f"{path.name}, line {at + 1}: {done}"


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("n", [20, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_damage_ends_in_a_traceback(job, finished, tmp_path, n):
    rng = random.Random(n)
    refused, tracebacks = 0, []
    for number in range(n):
        path = shutil.copytree(finished, tmp_path / f"run-{number}")
        change = damage(path / rng.choice(FILES), rng)
        for reader in READERS:
            try:
                reader(job, path)
            except SpecBenchError as error:
                assert error.exit_code == 2, change
                refused += 1
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                tracebacks.append(f"{number}: {change}: {error!r}, {where.filename}:{where.lineno}")
        shutil.rmtree(path)
    assert not tracebacks
    assert refused > n // 2


def test_what_is_whole_is_shown_and_resumed(job, run):
    saved = records.read_records(run)[0]
    for reader in READERS:
        reader(job, run)
    assert records.read_records(run)[0] == saved
    assert (run / records.DONE).exists()


def last_line(path):
    return path.read_text().splitlines()[-1] + "\n"


def append(path, text):
    with path.open("a") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"line 7: label \w+, case \w+, turn \d, repeat 0 is in line 6 already"),
        ({"run_key": "deadbeef"}, "line 7: run_key is 'deadbeef', this folder's run is"),
        ({"label": "foreign"}, "line 7: label 'foreign' is not one of ar, pld"),
        ({"case_id": "99"}, "line 7: case 99, turn 0, repeat 0 does not belong to this run"),
        ({"repeat": 1}, "line 7: case 82, turn 0, repeat 1 does not belong to this run"),
    ],
)
def test_a_line_of_another_run_or_there_twice_is_refused(job, run, change, message):
    path = run / records.CASES
    append(path, json.dumps(json.loads(last_line(path)) | change) + "\n")
    with pytest.raises(RecordError, match=rf"{path}, {message}.*fresh=true") as refusal:
        resume(job, run)
    assert refusal.value.exit_code == 2


def test_files_of_a_finished_run_that_were_changed_are_told(job, run, tmp_path):
    (run / records.DONE).unlink()
    assert resume(job, run) == 1  # the error made up above
    for name, spoil in {
        records.CASES: lambda path: path.unlink(),
        records.SUMMARY: lambda path: path.write_text("{}"),
        records.STEPS: lambda path: path.write_bytes(path.read_bytes()[:-1]),
        records.ERRORS: lambda path: path.write_text(""),
    }.items():
        copy = shutil.copytree(run, tmp_path / name)
        spoil(copy / name)
        with pytest.raises(RecordError, match=rf"{copy / name} .* after the run was done"):
            show(job, copy)


def test_steps_survive_a_done_that_was_removed(job, run):
    (run / records.STEPS_LOG).unlink()
    steps = read_steps(run / records.STEPS)
    resume(job, run)
    assert read_steps(run / records.STEPS) == steps != []


def test_a_block_without_its_steps_is_measured_again(job, run):
    path = run / records.STEPS_LOG
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    resume(job, run)
    assert {record.case_id for record in records.read_records(run)[0]} == {"81"}


@pytest.mark.slow  # over a second
def test_questions_that_changed_are_noticed_wherever_they_lie(small, questions, tmp_path):
    """Also in data_dir, of a finished run, and of one that lacks nothing but its end."""
    file = tmp_path / "spec_bench.jsonl"
    file.write_text(questions.read_text())
    plain = [text for text in small if not text.startswith(("dataset", "generation"))]
    out = tmp_path / "run"
    overrides = [*plain, "dataset=specbench", f"data_dir={tmp_path}", "dataset.limit=1"]
    overrides += ["generation.max_new_tokens=2", f"output_dir={out}"]
    assert run_here(overrides) == 0
    file.write_text(questions.read_text().replace("seven", "eight"))
    with pytest.raises(OutputRefused, match=r"specbench in data_dir=.* has changed since") as error:
        run_here(overrides)
    assert error.value.exit_code == 2
    done = (out / records.DONE).rename(tmp_path / "kept")
    with pytest.raises(OutputRefused, match="prompt_set_hash"):
        run_here(overrides)
    file.unlink()
    done.rename(out / records.DONE)
    assert run_here(overrides, "data_dir=null") == 0


@pytest.mark.parametrize("edited", [records.MANIFEST, records.SUMMARY, records.STEPS])
def test_what_a_finished_run_vouches_for_cannot_be_changed(run, overrides, edited):
    """A model's other name, another number in the summary, steps of another run."""
    RunManifest.read(run).finish(run, records.LEFT)
    assert load_runs([run])
    path = run / edited
    path.write_bytes(path.read_bytes().replace(b"pld", b"sam"))
    with pytest.raises(RecordError, match=f"{path} was changed after the run was done"):
        load_runs([run])
    with pytest.raises(RecordError, match="was changed"):
        run_here([*overrides, f"output_dir={run}"])
