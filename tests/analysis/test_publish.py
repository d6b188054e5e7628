"""Copies of runs for Weights & Biases: same id after a resume, and never in a benchmark's way."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from analysis import figures, publish
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_json, edit_manifest


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "experiment" / "job")
    (found,) = load_runs([tmp_path])
    return found


class FakeRun:
    """Takes what a W&B run takes and remembers it."""

    url = "https://example.invalid/run"

    def __init__(self) -> None:
        self.logged: dict = {}
        self.summary: dict = {}
        self.files: list[str] = []
        self.finished = False

    def log(self, values: dict) -> None:
        self.logged |= values

    def log_artifact(self, artifact: object) -> None:
        self.files = sorted(entry.path for entry in artifact.manifest.entries.values())

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def fake(monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    made = FakeRun()
    made.arguments = {}

    def init(**arguments: object) -> FakeRun:
        made.arguments = arguments
        return made

    monkeypatch.setattr(wandb, "init", init)
    return made


def test_what_a_run_sends(run, fake):
    said = publish.publish(run, {"mode": "offline", "project": "p", "tags": ["mine"]})
    arguments = fake.arguments
    assert arguments["id"] == publish.run_id(run)
    assert (arguments["group"], arguments["name"]) == ("experiment", "job")
    assert arguments["job_type"]
    assert arguments["resume"] == "allow"
    assert {"mine", run.model, run.dataset, "pld"} <= set(arguments["tags"])
    assert arguments["config"]["config"] == run.manifest.config
    assert len(fake.logged["cases"].data) == len(run.records)
    assert "figures/mat" in fake.logged
    (comparison,) = make_comparisons([run], None)
    pld = next(entry for entry in comparison.entries if entry.label == "pld")
    assert fake.summary["pld/overall/mat"] == pytest.approx(pld.overall["mat"])
    assert fake.summary["complete"] is True
    assert {"manifest.json", "cases.jsonl"} <= set(fake.files)
    assert fake.finished
    assert "wandb sync" in said


@pytest.fixture(params=["experiment=ngrammys_figure1", None], ids=["experiment", "by hand"])
def cost_run(tmp_path, request):
    """A cost run of an experiment, or of a bare command, with passes over trees too."""
    home = shutil.copytree(EXPERIMENTS / "ngrammys_figure1", tmp_path / "x" / "c")
    edit_manifest(home, overrides=[request.param] if request.param else [])
    times = [[[0.004, 0.005, 0.006]], [[0.008, 0.009, 0.007]]]
    edit_json(
        home / "surface.json",
        prefill={"axes": {"context": [25]}, "samples_s": [[0.03, 0.01, 0.02]]},
        tree={"axes": {"rows": [1, 8], "context": [25]}, "samples_s": times},
        drafting=[{"label": "pld", "context": 25, "step_us": 7.5}, {"label": "rest"}],
    )
    return home


def test_a_cost_surface_is_sent_too(cost_run, fake, capsys):
    assert publish.main([str(cost_run.parent)]) == 0
    assert "wandb sync" in capsys.readouterr().out
    manifest = json.loads((cost_run / "manifest.json").read_text())
    arguments = fake.arguments
    assert arguments["group"] == ("ngrammys_figure1" if manifest["overrides"] else "x")
    assert (arguments["name"], arguments["job_type"]) == ("c", "cost")
    assert arguments["tags"] == ["mistral7b", "cost"]
    assert arguments["config"]["config"] == manifest["config"]
    assert ["tree", 8, None, None, 25, pytest.approx(8.0)] in fake.logged["passes"].data
    assert ["prefill", None, None, None, 25, pytest.approx(20.0)] in fake.logged["passes"].data
    assert len(fake.logged["passes"].data) == 3 + 3 * 3 * 2
    assert fake.summary["tree_ms/25_tokens/1_rows"] == pytest.approx(5.0)
    assert fake.summary["drafting_us/pld/25_tokens"] == 7.5
    assert "Synthetic CPU" in fake.summary["caption"]
    assert {"figures/passes", "figures/slowdown"} <= fake.logged.keys()
    assert set(fake.files) == {"manifest.json", "surface.json"}
    assert fake.finished


def test_a_surface_without_batch_passes_has_no_slow_downs(cost_run, fake):
    surface = json.loads((cost_run / "surface.json").read_text())
    axes = surface["batch"]["axes"] | {"k": [2, 4, 16]}  # none of one row
    for batch in (None, surface["batch"] | {"axes": axes}):
        edit_json(cost_run / "surface.json", batch=batch)
        assert publish.main([str(cost_run)]) == 0
        assert "figures/passes" in fake.logged
        assert "figures/slowdown" not in fake.logged


def test_the_likeliest_ids_are_sent_where_they_were_recorded(run, fake):
    (run.path / "candidates.jsonl").write_text("{}\n")
    publish.publish(run, {"mode": "offline"})
    assert "candidates.jsonl" in fake.files


def test_runs_of_an_experiment_share_its_name_as_their_group(run):
    run.manifest.overrides = ["experiment=cacheback_table1", "seed=1"]
    assert publish.describe_run(run).group == "cacheback_table1"


def test_pictures_are_the_figures_command_s(run, tmp_path):
    assert figures.main([str(run.path), "-o", str(tmp_path / "drawn"), "--caption"]) == 0
    (comparison,) = make_comparisons([run], None)
    made = publish.save_pictures(comparison, tmp_path / "sent")
    for name, stem in (("speedup", "speedup_by_task"), ("mat", "mat")):
        (drawn,) = (tmp_path / "drawn").glob(f"*_{stem}.png")
        assert made[name].read_bytes() == drawn.read_bytes()


def test_no_prompt_and_no_answer_is_in_the_case_table():
    assert not {"prompt_ids", "output_ids"} & set(publish.CASE_COLUMNS)


def test_the_id_of_an_older_folder_is_its_name_and_key_s(run, tmp_path):
    assert run.manifest.folder_id is None
    again = shutil.copytree(run.path, tmp_path / "elsewhere" / "job")
    other = shutil.copytree(run.path, tmp_path / "elsewhere" / "other")
    (same,), (different,) = load_runs([again]), load_runs([other])
    assert publish.run_id(same) == publish.run_id(run)  # the place may move, the job may not
    assert publish.run_id(different) != publish.run_id(run)


def test_the_same_command_on_two_machines_is_two_runs(run, tmp_path):
    def made(place, **more):
        home = shutil.copytree(run.path, tmp_path / place / "job")
        edit_manifest(home, **more)
        (found,) = load_runs([home])
        return found

    here, there = made("here", folder_id="0123456789abcdef"), made("there", folder_id="f" * 16)
    assert here.manifest.run_key == there.manifest.run_key
    assert (publish.run_id(here), publish.run_id(there)) == ("0123456789abcdef", "f" * 16)
    moved = shutil.move(here.path, tmp_path / "another_name")
    assert publish.run_id(load_runs([moved])[0]) == "0123456789abcdef"
    merged = made("merged", folder_id="0123456789abcdef", merged_from=["a", "b"])
    assert publish.run_id(merged) not in ("0123456789abcdef", publish.run_id(run))


def test_a_run_that_was_killed_and_resumed_keeps_its_id(run, fake):
    """Killed in the middle of a line and without DONE, then completed: one W&B run."""
    whole = (run.path / "cases.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run.path / "cases.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:25])
    (run.path / "DONE").unlink()
    (killed,) = load_runs([run.path])
    assert not killed.complete
    publish.publish(killed, {"mode": "offline"})
    sent = (fake.arguments["id"], fake.arguments["resume"])
    assert fake.summary["complete"] is False
    assert len(fake.logged["cases"].data) == 40

    (run.path / "cases.jsonl").write_bytes(whole)
    (run.path / "DONE").touch()
    (resumed,) = load_runs([run.path])
    assert resumed.complete
    publish.publish(resumed, {"mode": "offline"})
    assert (
        (fake.arguments["id"], fake.arguments["resume"]) == sent == (publish.run_id(run), "allow")
    )
    assert fake.summary["complete"] is True
    assert len(fake.logged["cases"].data) == len(run.records)


def test_settings_given_win_over_the_runs_own(run):
    run.manifest.config["logger"] = {"name": "wandb", "project": "own", "mode": "disabled"}
    assert publish.logger_settings(run).project == "own"
    assert publish.logger_settings(run, {"project": "given"}).project == "given"
    assert publish.logger_settings(run, {"project": "given"}).mode == "offline"


def test_a_refusal_is_reported_and_the_others_go_on(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run.path, tmp_path / "experiment" / "second")
    calls = []

    def refuse(found: object, given: object) -> str:
        calls.append(found)
        if len(calls) == 1:
            raise RuntimeError("no key")
        return "fine"

    monkeypatch.setattr(publish, "publish", refuse)
    assert publish.main([str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert "no key" in out.err
    assert "fine" in out.out


def test_without_wandb_the_message_says_what_to_install(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert publish.main([str(run.path)]) == 2
    assert "[wandb]" in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path, capsys):
    assert publish.main([str(tmp_path)]) == 2
    assert "error" in capsys.readouterr().err


def test_without_a_network_only_the_first_folder_is_waited_for(run, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    shutil.copytree(run.path, tmp_path / "experiment" / "second")
    calls = []

    def refuse(**arguments: object) -> None:
        calls.append(arguments["mode"])
        raise wandb.errors.CommError("timed out")

    monkeypatch.setattr(wandb, "init", refuse)
    online = [str(tmp_path), "--settings", json.dumps({"mode": "online"})]
    assert publish.main(online) == publish.UNREACHABLE
    assert calls == ["online"]
    said = capsys.readouterr().err
    assert "nor the 1 after it: W&B cannot be used online: CommError: timed out" in said
    assert publish.main([str(tmp_path)]) == 1  # offline there is nobody to be reached
    assert calls == ["online", "offline", "offline"]


@pytest.mark.slow
def test_a_resumed_run_adds_a_segment_offline(run):
    """The real library, offline: two publications, one id."""
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "analysis.publish", str(run.path), "--settings",
             json.dumps({"mode": "offline"})],
            env=environment, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    segments = sorted((run.path / "wandb" / "wandb").glob("offline-run-*"))
    assert len(segments) == 2
    assert all(folder.name.endswith(publish.run_id(run)) for folder in segments)
