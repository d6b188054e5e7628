"""Copies of runs for Weights & Biases: same id after a resume, and never in a benchmark's way."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from analysis import figures, publish, wandb_runs
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from tests.analysis import wandb_file
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_json, edit_manifest


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "experiment" / "job")
    (found,) = load_runs([tmp_path])
    return found


class FakeRun:
    """Takes what a W&B run takes and remembers it."""

    url = "https://example.invalid/run"

    def __init__(self, arguments: dict | None = None) -> None:
        self.arguments = arguments or {}
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
    made: list[FakeRun] = []

    def init(**arguments: object) -> FakeRun:
        made.append(FakeRun(arguments))
        return made[-1]

    monkeypatch.setattr(wandb, "init", init)
    return made


def test_each_label_is_a_run_of_the_folder_s_group(run, fake):
    said = publish.publish(run, {"mode": "offline", "project": "p", "tags": ["mine"]})
    by_label = {each.arguments["config"]["label"]: each for each in fake}
    assert list(by_label) == ["ar", "cacheback", "no_frozen", "pld"]
    methods = {label: each.arguments["job_type"] for label, each in by_label.items()}
    assert methods["no_frozen"] == methods["cacheback"] == "cacheback"
    assert {each.arguments["group"] for each in fake} == {"job"}
    assert {each.arguments["resume"] for each in fake} == {"allow"}
    assert len({each.arguments["id"] for each in fake}) == 4
    assert {"mine", run.model, run.dataset, "measured", "pld"} <= set(
        by_label["pld"].arguments["tags"]
    )
    config = by_label["pld"].arguments["config"]
    assert (config["model"], config["dataset"], config["timing"]) == (
        "vicuna7b", "specbench", "measured",
    )  # fmt: skip
    assert config["knobs"] == {"state_scope": "prompt", "max_ngram": 3, "num_tokens": 10}
    assert config["config"] == run.manifest.config
    assert all(each.finished and each.summary["complete"] for each in fake)
    assert all("figures/mat" in each.logged for each in fake)
    assert "wandb sync" in said


def test_numbers_have_flat_keys_and_bounds(run, fake):
    publish.publish(run, {"mode": "offline"})
    pld = next(each for each in fake if each.arguments["config"]["label"] == "pld")
    (comparison,) = make_comparisons([run], None)
    row = next(entry for entry in comparison.entries if entry.label == "pld").overall
    for key in ("speedup", "mat", "tokens_per_s"):
        assert pld.summary[key] == pytest.approx(row[key])
        assert (pld.summary[f"{key}_low"], pld.summary[f"{key}_high"]) == row[f"{key}_ci"]
    assert pld.summary["timing"] == "measured"
    assert pld.summary["tokens_per_pass"] > 1
    assert pld.summary["task/qa/mat"] > 1


def test_cases_have_their_own_speedup_and_mat(run, fake):
    publish.publish(run, {"mode": "offline"})
    pld = next(each for each in fake if each.arguments["config"]["label"] == "pld")
    table = pld.logged["cases"]
    assert len(table.data) == sum(record.label == "pld" for record in run.records)
    column = {name: i for i, name in enumerate(table.columns)}
    record = next(r for r in run.records if r.label == "pld" and r.status == "ok")
    plain = next(r for r in run.records if r.label == "ar" and r.key[:-1] == record.key[:-1])
    (found,) = (
        row
        for row in table.data
        if (row[column["repeat"]], row[column["case_id"]], row[column["turn"]]) == record.key[:-1]
    )
    assert found[column["mat"]] == pytest.approx((record.n_new - 1) / record.n_target_passes)
    speeds = [(r.n_new - 1) / r.decode_s for r in (record, plain)]
    assert found[column["speedup"]] == pytest.approx(speeds[0] / speeds[1])


def test_the_records_are_sent_once(run, fake):
    publish.publish(run, {"mode": "offline"})
    assert {"manifest.json", "cases.jsonl"} <= set(fake[0].files)
    assert not any(each.files for each in fake[1:])


def test_jobs_of_a_sweep_are_a_group(run):
    (run.path.parent / "multirun.yaml").touch()
    assert wandb_runs.group_of(run) == "experiment"


def written_offline(run):
    """What the real library wrote of a run, by label."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    done = subprocess.run(
        [sys.executable, "-m", "analysis.publish", str(run.path), "--settings",
         json.dumps({"mode": "offline"})],
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted((run.path / "wandb" / "wandb").glob("offline-run-*/run-*.wandb"))
    return [wandb_file.read(path) for path in files]


@pytest.mark.slow
def test_what_wandb_wrote_offline_is_read_back(run):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    found = {written.config["label"]: written for written in written_offline(run)}
    assert set(found) == {"ar", "cacheback", "no_frozen", "pld"}
    (comparison,) = make_comparisons([run], None)
    for entry in comparison.entries:
        written = found[entry.label]
        assert written.run.run_group == "job"
        assert written.run.job_type == entry.method
        assert written.config["model"] == "vicuna7b"
        assert written.summary["mat"] == pytest.approx(entry.overall["mat"])
        assert written.summary["speedup"] == pytest.approx(entry.overall["speedup"])
        assert written.summary["cases/_type"] == "table-file"
        assert written.summary["figures/speedup/_type"] == "image-file"
    assert [a.type for written in found.values() for a in written.artifacts].count("records") == 1


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
    (fake,) = fake
    arguments = fake.arguments
    assert arguments["group"] == ("ngrammys_figure1" if manifest["overrides"] else "c")
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
        assert "figures/passes" in fake[-1].logged
        assert "figures/slowdown" not in fake[-1].logged


def test_the_likeliest_ids_are_sent_where_they_were_recorded(run, fake):
    (run.path / "candidates.jsonl").write_text("{}\n")
    publish.publish(run, {"mode": "offline"})
    assert "candidates.jsonl" in fake[0].files


def test_runs_of_an_experiment_share_its_name_as_their_group(run):
    run.manifest.overrides = ["experiment=cacheback_table1", "seed=1"]
    assert wandb_runs.group_of(run) == "cacheback_table1"


def test_pictures_are_the_figures_command_s(run, tmp_path):
    assert figures.main([str(run.path), "-o", str(tmp_path / "drawn"), "--caption"]) == 0
    (comparison,) = make_comparisons([run], None)
    made = wandb_runs.save_pictures(comparison, tmp_path / "sent")
    for name, stem in (("speedup", "speedup_by_task"), ("mat", "mat")):
        (drawn,) = (tmp_path / "drawn").glob(f"*_{stem}.png")
        assert made[name].read_bytes() == drawn.read_bytes()


def test_no_prompt_and_no_answer_is_in_the_case_table():
    assert not {"prompt_ids", "output_ids"} & set(wandb_runs.CASE_COLUMNS)


def test_the_id_of_an_older_folder_is_its_name_and_key_s(run, tmp_path):
    assert run.manifest.folder_id is None
    again = shutil.copytree(run.path, tmp_path / "elsewhere" / "job")
    other = shutil.copytree(run.path, tmp_path / "elsewhere" / "other")
    (same,), (different,) = load_runs([again]), load_runs([other])
    assert wandb_runs.run_id(same) == wandb_runs.run_id(run)  # the place may move, the job may not
    assert wandb_runs.run_id(different) != wandb_runs.run_id(run)


def test_the_same_command_on_two_machines_is_two_runs(run, tmp_path):
    def made(place, **more):
        home = shutil.copytree(run.path, tmp_path / place / "job")
        edit_manifest(home, **more)
        (found,) = load_runs([home])
        return found

    here, there = made("here", folder_id="0123456789abcdef"), made("there", folder_id="f" * 16)
    assert here.manifest.run_key == there.manifest.run_key
    assert (wandb_runs.run_id(here), wandb_runs.run_id(there)) == ("0123456789abcdef", "f" * 16)
    moved = shutil.move(here.path, tmp_path / "another_name")
    assert wandb_runs.run_id(load_runs([moved])[0]) == "0123456789abcdef"
    merged = made("merged", folder_id="0123456789abcdef", merged_from=["a", "b"])
    assert wandb_runs.run_id(merged) not in ("0123456789abcdef", wandb_runs.run_id(run))


def test_a_run_that_was_killed_and_resumed_keeps_its_id(run, fake):
    """Killed in the middle of a line and without DONE, then completed: one W&B run."""
    whole = (run.path / "cases.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run.path / "cases.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:25])
    (run.path / "DONE").unlink()
    (killed,) = load_runs([run.path])
    assert not killed.complete
    publish.publish(killed, {"mode": "offline"})
    sent = {each.arguments["config"]["label"]: each.arguments["id"] for each in fake}
    assert not any(each.summary["complete"] for each in fake)
    assert sum(len(each.logged["cases"].data) for each in fake) == 40

    (run.path / "cases.jsonl").write_bytes(whole)
    (run.path / "DONE").touch()
    (resumed,) = load_runs([run.path])
    assert resumed.complete
    fake.clear()
    publish.publish(resumed, {"mode": "offline"})
    again = {each.arguments["config"]["label"]: each.arguments["id"] for each in fake}
    assert again == sent
    assert all(each.summary["complete"] for each in fake)
    assert sum(len(each.logged["cases"].data) for each in fake) == len(run.records)


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
    """The real library, offline: two publications, the same ids."""
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    once = [written.run.run_id for written in written_offline(run)]
    twice = [written.run.run_id for written in written_offline(run)]
    assert len(twice) == 2 * len(once) == 8
    assert set(twice) == set(once)
