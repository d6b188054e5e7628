"""Copies of runs for Weights & Biases: contents, same ids after a resume, reported failures."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from analysis import publish
from analysis.runs.captions import conditions_of, warnings_of
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs, load_surfaces
from tests.analysis.folders import EXPERIMENTS, RECORDS, edit_manifest, edit_records, vouch

LONG_MODEL = "m" * 100  # as folders of fine-tuned models are called: longer than a tag may be


@pytest.fixture
def run(tmp_path):
    shutil.copytree(RECORDS / "synthetic", tmp_path / "experiment" / "job")
    (loaded,) = load_runs([tmp_path])
    return loaded


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr(publish, "pictures_of", lambda _: ())


def by_name(runs):
    return {content.name: content for content in publish.wandb_runs(runs)}


@pytest.mark.usefixtures("no_pictures")
def test_each_label_is_a_run_with_flat_numbers_and_its_turns(run):
    contents = by_name([run])
    assert list(contents) == ["ar", "cacheback", "no_frozen", "pld", "all methods"]
    assert contents["no_frozen"].job_type == contents["cacheback"].job_type == "cacheback"
    assert len({content.identity for content in contents.values()}) == 5
    pld = contents["pld"]
    assert [pld.config[key] for key in ("model", "dataset", "timing")] == [
        "vicuna7b", "specbench", "measured",
    ]  # fmt: skip
    assert pld.config["knobs"] == {"state_scope": "prompt", "max_ngram": 3, "num_tokens": 10}
    (comparison,) = make_comparisons([run])
    row = next(entry for entry in comparison.entries if entry.label == "pld").overall
    for key in ("speedup", "mat", "tokens_per_s"):
        assert pld.summary[key] == pytest.approx(row[key])
        assert (pld.summary[f"{key}_low"], pld.summary[f"{key}_high"]) == row[f"{key}_ci"]
    assert min(pld.summary["tokens_per_pass"], pld.summary["task/qa/mat"]) > 1
    turns = pld.tables["cases"]
    assert len(turns) == sum(record.label == "pld" for record in run.records)
    assert not {"prompt_ids", "output_ids"} & set(turns)
    record = next(r for r in run.records if r.label == "pld" and r.status == "ok")
    turn = turns.set_index(["repeat", "case_id", "turn"]).loc[record.key[:-1]]
    assert (turn["n_new"], turn["decode_s"]) == (record.n_new, record.decode_s)
    assert turn["verdict"] == record.lossless.verdict
    whole = contents["all methods"]
    assert {"job/manifest.json", "job/cases.jsonl"} <= set(whole.files)
    assert next(iter(whole.tables["comparison"]["method"])) == "ar"


def job(run, home, tokens, *typed):
    """Copy a job of a sweep over pld's ``num_tokens``, with plain decoding."""
    folder = shutil.copytree(run.path, home / f"pld-{tokens}")
    labels = {label: run.manifest.to_json()["labels"][label] for label in ("ar", "pld")}
    labels["pld"]["knobs"]["num_tokens"] = tokens
    edit_records(folder, lambda record: record if record["label"] in labels else None)
    edit_manifest(
        folder, labels=labels, swept=True, folder_id=f"{tokens:016x}", files=None,
        overrides=["method=pld", f"method.num_tokens={tokens}", "dataset.limit=3", *typed],
        identity={"dataset": {"limit": 3}, "method": {"num_tokens": tokens}, "seed": tokens},
        config={"method": {"name": "pld"}, "output_dir": str(home)},
    )  # fmt: skip
    return folder


def test_a_sweep_has_one_baseline_and_its_table_and_pictures_in_the_group(run, tmp_path):
    home = tmp_path / "sweep1"
    for tokens in (2, 4):
        job(run, home, tokens)
    runs = load_runs([home])
    contents = by_name(runs)
    assert list(contents) == ["ar", "pld num_tokens=2", "pld num_tokens=4", "all methods"]
    assert {publish.group_of(loaded) for loaded in runs} == {"sweep1"}
    assert {c.config["typed"] for c in contents.values()} == {"dataset.limit=3"}
    whole = contents["all methods"]
    assert any("speedup" in name for name in whole.figures)
    assert len(whole.tables["comparison"]) == 3
    assert {"pld-2/cases.jsonl", "pld-4/cases.jsonl"} <= set(whole.files)
    # What differs besides knobs stays in the names.
    edit_manifest(home / "pld-4", overrides=["method.num_tokens=4", "dataset.limit=4"])
    assert "pld num_tokens=4 dataset.limit=4" in by_name(load_runs([home]))


def test_groups_are_the_experiment_the_sweep_or_the_folder(run):
    assert publish.group_of(run) == "job"
    run.manifest.swept = True
    run.manifest.overrides = ["method=pld", "method.num_tokens=2", "logger=wandb"]
    assert publish.group_of(run) == "experiment: method, method.num_tokens"
    run.manifest.config["output_dir"] = "results/sweep1"
    assert publish.group_of(run) == "sweep1"
    run.manifest.overrides = ["experiment=cacheback_table1", "seed=1"]
    assert publish.group_of(run) == "cacheback_table1"


@pytest.mark.slow
def test_what_wandb_wrote_offline_holds_it_all_and_again_is_a_segment_more(run, tmp_path):
    pytest.importorskip("wandb", reason="the extra [wandb] is not installed")
    folder, home = job(run, tmp_path / "sweep1", 2), tmp_path / "wandb"
    edit_records(folder, lambda record: record | {"model": LONG_MODEL})
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    settings = json.dumps({"mode": "offline", "tags": ["mine"], "folder": str(home)})
    twice = "import sys; from analysis.publish import main; sys.exit(main(None) or main(None))"
    done = subprocess.run(
        [sys.executable, "-c", twice, str(folder), "--settings", settings],
        env=environment, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wandb sync") == 2
    sent = sorted(home.glob("wandb/offline-run-*"))
    assert (len({path.name.rpartition("-")[2] for path in sent}), len(sent)) == (3, 6)
    (comparison,) = make_comparisons(load_runs([folder]))
    conditions = conditions_of(comparison)
    contents = {content.identity: content for content in publish.wandb_runs(load_runs([folder]))}
    for path in sent:
        content = contents[path.name.rpartition("-")[2]]
        written = b"".join(log.read_bytes() for log in path.glob("run-*.wandb"))
        expected = [content.name, content.job_type, "sweep1", "mine", "m" * 64, LONG_MODEL]
        for word in [*expected, *conditions, *content.summary]:
            assert word.encode() in written
        tables = {p.name.split("_")[0]: p for p in path.glob("files/media/table/*")}
        assert tables.keys() == content.tables.keys()
        for name, file in tables.items():
            table, frame = json.loads(file.read_text()), content.tables[name]
            assert (table["columns"], len(table["data"])) == ([*frame], len(frame))
        pictures = [*path.glob("files/media/images/figures/*.png")]
        assert len(pictures) == len(content.figures)
    warned = [[warning.code, warning.text, warning.decides] for warning in warnings_of(comparison)]
    assert ["SYNTHETIC", "SYNTHETIC RECORDS, not a measurement.", True] in warned
    (path,) = home.glob("wandb/latest-run/files/media/table/warnings*")
    assert json.loads(path.read_text())["data"] == warned


def test_a_cost_surface_is_published_too(tmp_path):
    home = shutil.copytree(EXPERIMENTS / "ngrammys_figure1", tmp_path / "c")
    (content,) = publish.wandb_runs(load_surfaces([home], by_hand=True))
    assert (content.name, content.job_type) == ("c", "cost")
    assert {"c/manifest.json", "c/surface.json"} <= set(content.files)


def test_ids_follow_the_folder_not_its_path(run, tmp_path):
    def copied_id(parent, name="job", **more):
        home = shutil.copytree(run.path, tmp_path / parent / name)
        edit_manifest(home, **more)
        return publish.run_id(load_runs([home])[0])

    assert run.manifest.folder_id is None  # made by hand: by its name and key
    assert copied_id("elsewhere") == publish.run_id(run)
    assert copied_id("elsewhere", "other") != publish.run_id(run)
    assert copied_id("here", folder_id="0123456789abcdef") == "0123456789abcdef"
    moved = shutil.move(tmp_path / "here" / "job", tmp_path / "another_name")
    assert publish.run_id(load_runs([moved])[0]) == "0123456789abcdef"
    merged = copied_id("merged", folder_id="0123456789abcdef", merged_from=["a", "b"])
    assert merged not in ("0123456789abcdef", publish.run_id(run))


@pytest.mark.usefixtures("no_pictures")
def test_a_run_that_was_killed_and_resumed_keeps_its_ids(run):
    """Killed in the middle of a line and without DONE, then completed."""

    def published():
        contents = by_name(load_runs([run.path]))
        assert len({content.summary["complete"] for content in contents.values()}) == 1
        turns = sum(len(content.tables.get("cases", ())) for content in contents.values())
        return {name: content.identity for name, content in contents.items()}, turns

    whole = (run.path / "cases.jsonl").read_bytes()
    lines = whole.splitlines(keepends=True)
    (run.path / "cases.jsonl").write_bytes(b"".join(lines[:40]) + lines[40][:25])
    (run.path / "DONE").unlink()
    ids, turns = published()
    assert turns == 40
    (run.path / "cases.jsonl").write_bytes(whole)
    vouch(run.path)
    assert published() == (ids, len(run.records))


@pytest.mark.usefixtures("no_pictures")
def test_what_cannot_be_sent_is_written_offline_and_the_exit_code_tells(run, monkeypatch, capsys):
    modes = []

    def refuse(content, settings, _):
        modes.append(settings["mode"])
        if settings["mode"] == "online" or content.name == "pld":
            raise OSError("timed out")
        return "address"

    monkeypatch.setattr(publish, "send", refuse)
    run.manifest.config["logger"] = {"project": "own", "mode": "disabled"}
    assert publish.logger_settings(run)["project"] == "own"
    online = ["--settings", json.dumps({"mode": "online"})]
    assert publish.main([str(run.path), *online]) == 1
    assert modes.count("online") == 1, "nobody waits twice"
    assert "timed out" in capsys.readouterr().err
    monkeypatch.setattr(publish, "send", lambda *_: "address")
    assert publish.main([str(run.path), *online]) == 0
    assert "address" in capsys.readouterr().out


def test_without_wandb_or_runs_it_exits_2(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert publish.main([str(run.path)]) == 2
    assert "[wandb]" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert publish.main([str(tmp_path / "empty")]) == 2
