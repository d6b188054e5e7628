"""The output folder: owner, lock, resume of growing files."""

import errno
import importlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runners.measure import measurement
from runners.run_folder import folder, manifest
from runners.run_folder.reproduce_note import write_reproduce_note
from runners.run_folder.resumable_files import BlockResult, ResultFiles
from specbench.errors import OutputRefused
from specbench.results import records
from specbench.results.manifest import ModelInfo, RunManifest
from specbench.storage import jsonl
from tests.runners.test_blocks import TWO
from tests.runners.toy import Recorder, make_job, make_runner
from tests.small_run import ROOT


def measure(job, files, only=None):
    runner, _, _ = make_runner(job, [Recorder("ar"), Recorder("a")], files.done)
    present = {record.key for record in files.done}
    blocks = [b for b in job.blocks() if not b.record_keys(job.labels) <= present]
    for block in blocks[:only]:
        result = runner.run([block])
        files.append(result)


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path, ["ar", "a"], TWO)


def keys(path):
    return [record.key for record in records.read_records(path)[0]]


def test_a_folder_without_a_run_is_anybodys_and_records_without_a_manifest_are_nobodys(tmp_path):
    folder.check_owner(tmp_path / "absent", "k", {})
    (tmp_path / "note.txt").touch()
    folder.check_owner(tmp_path, "k", {})
    (tmp_path / records.CASES).touch()
    with pytest.raises(OutputRefused, match="no manifest"):
        folder.check_owner(tmp_path, "k", {})


def test_a_folder_of_another_configuration_is_refused_by_naming_the_keys(tmp_path):
    theirs = {"model": {"name": "tiny", "dtype": "float32"}, "seed": 0, "compare": []}
    ours = {"model": {"name": "tiny", "dtype": "float64"}, "seed": 0, "compare": ["pld"]}
    RunManifest(run_key="theirs", identity=theirs).write(tmp_path)
    folder.check_owner(tmp_path, "theirs", ours)
    with pytest.raises(OutputRefused) as refusal:
        folder.check_owner(tmp_path, "ours", ours)
    message = str(refusal.value)
    assert "model.dtype: there 'float32', here 'float64'" in message
    assert "compare: there [], here ['pld']" in message
    assert "seed" not in message
    assert "fresh=true" in message


def test_a_run_killed_while_it_opens_its_files_can_be_resumed(job, tmp_path, monkeypatch):
    def killed(job):
        folder.jsonl.append_jsonl(tmp_path / records.CASES, [])
        raise KeyboardInterrupt

    monkeypatch.setattr(measurement, "build_method_runs", lambda job, given: [])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(measurement, "ResultFiles", killed)
        next(measurement.attempts(job))
    folder.check_owner(tmp_path, job.run_key, job.identity)


def test_fresh_takes_the_first_free_name(tmp_path):
    path = tmp_path / "run"
    assert folder.fresh_folder(path) == path
    for name in ("run", "run-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / records.CASES).touch()
    assert folder.fresh_folder(path) == tmp_path / "run-3"


def test_a_path_below_a_regular_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputRefused, match=r"is too long a path\. Type a shorter one"):
        folder.make_folder(tmp_path / ("long" * 100))
    with pytest.raises(OutputRefused, match=r"output_dir=.*file/run cannot be used"):
        folder.make_folder(tmp_path / "file" / "run")


def test_a_full_disk_is_no_mistake_of_the_configuration(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(jsonl.DiskError) as refusal:
        folder.make_folder(tmp_path / "run")
    assert refusal.value.exit_code == 1


def test_a_second_process_is_told_who_holds_the_folder(tmp_path):
    program = (
        "import sys; from pathlib import Path; from runners.run_folder import folder\n"
        "with folder.hold_folder(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(OutputRefused, match=f"process {os.getpid()} .child {holder.pid}. on host"):
        folder.hold_folder(tmp_path).__enter__()
    holder.kill()
    holder.communicate()
    with folder.hold_folder(tmp_path):
        pass


@pytest.mark.parametrize("lost_lines", [None, 1, 2, 3])
def test_a_block_that_was_cut_off_is_redone_whole_and_nothing_else(
    job, tmp_path, caplog, lost_lines
):
    """Within a line (None), or between lines."""
    measure(job, ResultFiles(job), only=2)
    path = tmp_path / records.CASES
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-lost_lines]) if lost_lines else whole[:-30])
    with caplog.at_level("INFO"):
        files = ResultFiles(job)
    assert files.redone == 1 and "1 incomplete block is dropped" in caplog.text
    assert {record.case_id for record in files.done} == {"d0"}
    assert {line["case_id"] for line in jsonl.read_jsonl(tmp_path / records.STEPS_LOG)[0]} == {"d0"}
    measure(job, files)
    assert len(keys(tmp_path)) == len(set(keys(tmp_path))) == 12


def test_traces_and_errors_of_a_block_that_does_not_count_are_dropped(job, tmp_path):
    runner, _, _ = make_runner(job, [Recorder("ar"), Recorder("a", fail_at={0})])
    files = ResultFiles(job)
    result = runner.run([job.blocks()[0]])
    # As if killed between the files: the records, which make the block count, are missing.
    files.append(BlockResult([], result.errors, result.steps))
    ResultFiles(job)
    assert (tmp_path / records.ERRORS).read_text() == ""
    assert (tmp_path / records.STEPS_LOG).read_text() == ""


def test_a_full_disk_in_the_middle_of_a_block_leaves_whole_blocks(job, tmp_path, monkeypatch):
    files = ResultFiles(job)
    measure(job, files, only=1)
    write = os.write

    def full(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith(records.CASES):
            write(fd, bytes(data)[:40])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(jsonl.os, "write", full)
    with pytest.raises(jsonl.DiskError, match="No space left"):
        measure(job, files, only=1)
    monkeypatch.undo()
    assert not (tmp_path / records.DONE).exists()
    files = ResultFiles(job)
    assert {record.case_id for record in files.done} == {"d0"}
    measure(job, files)
    files.finish({"rows": []}, RunManifest())
    assert len(set(keys(tmp_path))) == 12
    assert (tmp_path / records.DONE).exists()
    assert not (tmp_path / records.STEPS_LOG).exists()


ENVIRONMENT = {
    "hardware": {"cpu": "one", "cpus_usable": 2, "pinned_to": "all", "threads_set": {}, "gpus": []},
    "versions": {"python": "3.11", "torch": "2.13.0", "transformers": "5.23.0", "numpy": "2"},
    "git": {"commit": "abc", "dirty": False},
}


@pytest.mark.parametrize(
    ("part", "change", "named"),
    [
        ("hardware", {"cpu": "another"}, "cpu: there 'one', here 'another'"),
        ("versions", {"torch": "2.14.0"}, "torch: there '2.13.0', here '2.14.0'"),
        ("git", {"commit": "def"}, "commit: there 'abc', here 'def'"),
        ("hardware", {"pinned_to": "0"}, "pinned_to: there 'all', here '0'"),
        ("hardware", {"threads_set": {"OMP_NUM_THREADS": "1"}}, "OMP_NUM_THREADS: there absent"),
    ],
)
def test_a_run_is_not_resumed_elsewhere_unless_forced(part, change, named):
    then, now = RunManifest(**ENVIRONMENT), ENVIRONMENT | {part: ENVIRONMENT[part] | change}
    assert not manifest.check_resume(then, ENVIRONMENT, force=False)
    with pytest.raises(OutputRefused) as refusal:
        manifest.check_resume(then, now, force=False)
    assert named in str(refusal.value)
    assert "resume=force" in str(refusal.value)
    assert manifest.check_resume(then, now, force=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"threads": 1}, "threads: there 2, here 1"),
        (
            {"packed": {"pass": "the gate is gelu"}},
            "pass: there 'one call', here 'the gate is gelu'",
        ),
    ],
)
def test_passes_on_other_threads_or_kernels_must_be_forced(change, named):
    facts = {"threads": 2, "packed": {"pass": "one call"}}
    then = RunManifest(model=ModelInfo.from_json(facts))
    read_back = RunManifest.from_json(json.loads(json.dumps(then.to_json())))
    assert not manifest.check_passes(read_back, ModelInfo.from_json(facts), force=False)
    now = ModelInfo.from_json(facts | change)
    with pytest.raises(OutputRefused, match=named):
        manifest.check_passes(then, now, force=False)
    assert manifest.check_passes(then, now, force=True)


def test_a_folder_says_how_to_repeat_its_run_and_holds_methods_from_elsewhere(
    tmp_path, monkeypatch
):
    (tmp_path / "from_elsewhere.py").write_text("class Mine:\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    mine = importlib.import_module("from_elsewhere").Mine
    (tmp_path / "with_parts/tables").mkdir(parents=True)
    (tmp_path / "with_parts/__init__.py").write_text("class Parted:\n    pass\n")
    (tmp_path / "with_parts/tables/fast.py").write_text("ROWS = 1\n")
    package_class = importlib.import_module("with_parts").Parted
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    manifest = RunManifest(**ENVIRONMENT, overrides=["compare=[pld,mine]"])
    methods = {"mine": mine, "parted": package_class, "recorder": Recorder, "builtin": int}
    write_reproduce_note(tmp_path, manifest, methods)
    text = (tmp_path / records.REPEAT).read_text()
    assert "\npython run.py 'compare=[pld,mine]'\n" in text
    assert "Commit abc. Versions: python 3.11, torch 2.13.0" in text
    assert "version = {" in text
    copies = tmp_path / records.SOURCES
    assert {path.relative_to(copies).as_posix() for path in copies.rglob("*.py")} == {
        "mine.py", "parted/__init__.py", "parted/tables/fast.py"
    }  # fmt: skip
    write_reproduce_note(tmp_path, manifest, {}, from_command=False)
    assert "run.py" not in (tmp_path / records.REPEAT).read_text()


@pytest.mark.parametrize("args", [["seed=1"], ["output_dir=all", "seed=1"]])
def test_a_job_of_a_sweep_is_repeated_in_its_own_folder_on_its_threads(tmp_path, monkeypatch, args):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    for swept, path in ((True, tmp_path), (None, args[0].partition("=")[2])):
        write_reproduce_note(tmp_path, RunManifest(**ENVIRONMENT, overrides=args, swept=swept), {})
        line = (tmp_path / records.REPEAT).read_text().split("```")[1].splitlines()[1]
        arguments = shlex.split(line)
        assert arguments[:3] == ["OMP_NUM_THREADS=3", "python", "run.py"]
        folders = [word for word in arguments if word.startswith("output_dir=")]
        assert folders == ([f"output_dir={path}"] if swept or len(args) == 2 else [])
