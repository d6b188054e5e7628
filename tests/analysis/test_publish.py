"""Copies of runs for Weights & Biases: same id after a resume, and never in a benchmark's way."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from PIL import Image

from analysis import publish
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from analysis.runs.published_names import group_of, run_id
from tests.analysis import wandb_file
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_json, edit_manifest, vouch


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "experiment" / "job")
    (loaded,) = load_runs([tmp_path])
    return loaded


class FakeRun:
    """Takes what a W&B run takes and remembers it."""

    url = "https://example.invalid/run"

    def __init__(self, arguments: dict) -> None:
        self.arguments = arguments
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
def fake(monkeypatch, tmp_path):
    """The W&B runs that are made; pictures are a dot, since drawing them takes seconds."""
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    made: list[FakeRun] = []
    Image.new("RGB", (1, 1)).save(tmp_path / "dot.png")
    monkeypatch.setattr(publish, "save", lambda *_, **__: [tmp_path / "dot.png"])
    monkeypatch.setattr(wandb, "init", lambda **given: made.append(FakeRun(given)) or made[-1])
    return made


def by_label(fake):
    return {each.arguments["config"]["label"]: each for each in fake}


def test_each_label_is_a_run_of_the_folder_s_group_with_flat_numbers_and_its_cases(run, fake):
    said = publish.publish(run, {"mode": "offline", "project": "p", "tags": ["mine"]})
    assert "wandb sync" in said
    sent = by_label(fake)
    assert list(sent) == ["ar", "cacheback", "no_frozen", "pld"]
    methods = {label: each.arguments["job_type"] for label, each in sent.items()}
    assert methods["no_frozen"] == methods["cacheback"] == "cacheback"
    assert {each.arguments["group"] for each in fake} == {"job"}
    assert {each.arguments["resume"] for each in fake} == {"allow"}
    assert len({each.arguments["id"] for each in fake}) == 4
    assert {"manifest.json", "cases.jsonl"} <= set(fake[0].files)
    assert not any(each.files for each in fake[1:]), "the records are sent once"
    assert all(each.finished and each.summary["complete"] for each in fake)
    assert all({"figures/mat", "figures/speedup"} <= each.logged.keys() for each in fake)

    pld = sent["pld"]
    assert {"mine", run.model, run.dataset, "measured", "pld"} <= set(pld.arguments["tags"])
    config = pld.arguments["config"]
    assert [config[key] for key in ("model", "dataset", "timing")] == [
        "vicuna7b", "specbench", "measured",
    ]  # fmt: skip
    assert config["knobs"] == {"state_scope": "prompt", "max_ngram": 3, "num_tokens": 10}
    assert config["config"] == run.manifest.config
    (comparison,) = make_comparisons([run], None)
    row = next(entry for entry in comparison.entries if entry.label == "pld").overall
    for key in ("speedup", "mat", "tokens_per_s"):
        assert pld.summary[key] == pytest.approx(row[key])
        assert (pld.summary[f"{key}_low"], pld.summary[f"{key}_high"]) == row[f"{key}_ci"]
    assert pld.summary["timing"] == "measured"
    assert min(pld.summary["tokens_per_pass"], pld.summary["task/qa/mat"]) > 1
    tasks = [
        dict(zip(pld.logged["tasks"].columns, r, strict=True)) for r in pld.logged["tasks"].data
    ]
    assert {task["label"] for task in tasks} == {"pld"}
    assert tasks[-1]["task"] == "overall"
    assert tasks[-1]["speedup"] == pytest.approx(row["speedup"])

    table = pld.logged["cases"]
    assert not {"prompt_ids", "output_ids"} & set(table.columns)
    turns = [dict(zip(table.columns, row, strict=True)) for row in table.data]
    assert len(turns) == sum(record.label == "pld" for record in run.records)
    record = next(r for r in run.records if r.label == "pld" and r.status == "ok")
    plain = next(r for r in run.records if r.label == "ar" and r.key[:-1] == record.key[:-1])
    (turn,) = (t for t in turns if (t["repeat"], t["case_id"], t["turn"]) == record.key[:-1])
    assert turn["mat"] == pytest.approx((record.n_new - 1) / record.n_target_passes)
    speeds = [(r.n_new - 1) / r.decode_s for r in (record, plain)]
    assert turn["speedup"] == pytest.approx(speeds[0] / speeds[1])


def test_groups_are_the_experiment_the_sweep_or_the_folder(run):
    (run.path.parent / "multirun.yaml").touch()  # Hydra's, of whichever sweep came last
    assert group_of(run) == "job"
    run.manifest.swept = True
    run.manifest.overrides = ["method=pld", "method.num_tokens=2", "logger=wandb"]
    assert group_of(run) == "experiment: method, method.num_tokens"
    run.manifest.config["output_dir"] = "results/sweep1"
    assert group_of(run) == "sweep1"
    run.manifest.overrides = ["experiment=cacheback_table1", "seed=1"]
    assert group_of(run) == "cacheback_table1"


def test_settings_of_one_label_stay_apart_in_bars(run, fake):
    """What bars are grouped by says the knobs that were typed, wherever they were."""
    manifest = run.manifest
    manifest.config |= {
        "method": {"name": "cacheback", "label": None},
        "compare": [{"method": "pld", "num_tokens": 5}],
    }
    manifest.identity = {"method": {"leader_len": 1}, "generation": {"max_new_tokens": 8}}
    knobs = manifest.labels["cacheback"].knobs
    knobs["leader_len"] = 1
    found = {}
    for length in (1, 5):
        manifest.overrides = [
            "method=cacheback", f"method.leader_len={length}", "+generation.max_new_tokens=8",
        ]  # fmt: skip
        fake.clear()
        publish.publish(run, {"mode": "offline"})
        found[length] = {
            label: each.arguments["config"]["setting"] for label, each in by_label(fake).items()
        }
    tokens = "generation.max_new_tokens=8"
    assert found[1]["cacheback"] == f"cacheback leader_len=1, {tokens}"
    assert found[5]["cacheback"] == f"cacheback leader_len=5, {tokens}"
    for settings in found.values():
        assert settings["pld"] == f"pld num_tokens=5, {tokens}"
        assert settings["ar"] == f"ar {tokens}"
    assert all(each.arguments["name"].endswith(" (job)") for each in fake)


def written_offline(run):
    """What the real library wrote of a run."""
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
def test_what_wandb_wrote_offline_is_read_back_and_again_is_a_segment_more(run):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    once = written_offline(run)
    sent = {written.config["label"]: written for written in once}
    assert set(sent) == {"ar", "cacheback", "no_frozen", "pld"}
    (comparison,) = make_comparisons([run], None)
    for entry in comparison.entries:
        written = sent[entry.label]
        assert written.run.run_group == "job"
        assert written.config["setting"] == entry.label
        assert written.run.job_type == entry.method
        assert written.config["model"] == "vicuna7b"
        assert written.summary["mat"] == pytest.approx(entry.overall["mat"])
        assert written.summary["speedup"] == pytest.approx(entry.overall["speedup"])
        assert written.summary["cases/_type"] == "table-file"
        assert written.summary["figures/speedup/_type"] == "image-file"
    assert [a.type for written in once for a in written.artifacts].count("records") == 1
    twice = [written.run.run_id for written in written_offline(run)]
    assert len(twice) == 2 * len(once) == 8
    assert set(twice) == {written.run.run_id for written in once}


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
    (sent,) = fake
    arguments = sent.arguments
    assert arguments["group"] == ("ngrammys_figure1" if manifest["overrides"] else "c")
    assert (arguments["name"], arguments["job_type"]) == ("c", "cost")
    assert arguments["tags"] == ["mistral7b", "cost"]
    assert arguments["config"]["config"] == manifest["config"]
    assert ["tree", 8, None, None, 25, pytest.approx(8.0)] in sent.logged["passes"].data
    assert ["prefill", None, None, None, 25, pytest.approx(20.0)] in sent.logged["passes"].data
    assert len(sent.logged["passes"].data) == 3 + 3 * 3 * 2
    assert sent.summary["tree_ms/25_tokens/1_rows"] == pytest.approx(5.0)
    assert sent.summary["drafting_us/pld/25_tokens"] == 7.5
    assert "Synthetic CPU" in sent.summary["caption"]
    assert {"figures/passes", "figures/slowdown"} <= sent.logged.keys()
    assert set(sent.files) == {"manifest.json", "surface.json"}
    assert sent.finished
    surface = json.loads((cost_run / "surface.json").read_text())
    axes = surface["batch"]["axes"] | {"k": [2, 4, 16]}  # none of one row: no slow-downs
    for batch in (None, surface["batch"] | {"axes": axes}):
        edit_json(cost_run / "surface.json", batch=batch)
        assert publish.main([str(cost_run)]) == 0
        assert "figures/passes" in fake[-1].logged
        assert "figures/slowdown" not in fake[-1].logged


def test_ids_follow_the_folder_not_its_place_or_command(run, tmp_path):
    def made(place, name="job", **more):
        home = shutil.copytree(run.path, tmp_path / place / name)
        edit_manifest(home, **more)
        return run_id(load_runs([home])[0])

    assert run.manifest.folder_id is None  # an older folder: by its name and key
    assert made("elsewhere") == run_id(run)
    assert made("elsewhere", "other") != run_id(run)
    assert made("here", folder_id="0123456789abcdef") == "0123456789abcdef"
    assert made("there", folder_id="f" * 16) == "f" * 16
    moved = shutil.move(tmp_path / "here" / "job", tmp_path / "another_name")
    assert run_id(load_runs([moved])[0]) == "0123456789abcdef"
    merged = made("merged", folder_id="0123456789abcdef", merged_from=["a", "b"])
    assert merged not in ("0123456789abcdef", run_id(run))


def test_a_run_that_was_killed_and_resumed_keeps_its_id(run, fake):
    """Killed in the middle of a line and without DONE, then completed: one W&B run."""

    def published():
        fake.clear()
        (loaded,) = load_runs([run.path])
        publish.publish(loaded, {"mode": "offline"})
        assert {each.summary["complete"] for each in fake} == {loaded.complete}
        ids = {label: each.arguments["id"] for label, each in by_label(fake).items()}
        return ids, sum(len(each.logged["cases"].data) for each in fake)

    whole = (run.path / "cases.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run.path / "cases.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:25])
    (run.path / "DONE").unlink()
    ids, turns = published()
    assert turns == 40
    (run.path / "cases.jsonl").write_bytes(whole)
    vouch(run.path)
    assert published() == (ids, len(run.records))


def test_settings_given_win_over_the_runs_own(run):
    run.manifest.config["logger"] = {"name": "wandb", "project": "own", "mode": "disabled"}
    assert publish.logger_settings(run).project == "own"
    given = publish.logger_settings(run, {"project": "given"})
    assert (given.project, given.mode) == ("given", "offline")


def test_what_goes_wrong_is_reported_and_the_others_go_on(run, tmp_path, monkeypatch, capsys):
    shutil.copytree(run.path, tmp_path / "experiment" / "second")
    answers = iter([RuntimeError("no key"), "fine"])

    def refuse(_, __):
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with monkeypatch.context() as patched:
        patched.setattr(publish, "publish", refuse)
        assert publish.main([str(tmp_path)]) == 1
    out = capsys.readouterr()
    assert "no key" in out.err
    assert "fine" in out.out
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert publish.main([str(run.path)]) == 2
    assert "[wandb]" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert publish.main([str(tmp_path / "empty")]) == 2
    assert "error" in capsys.readouterr().err


def test_without_a_network_only_the_first_folder_is_waited_for(run, tmp_path, monkeypatch, capsys):
    wandb = pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    monkeypatch.setattr(publish, "label_figures", lambda _: {})
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
