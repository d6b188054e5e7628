"""Replay of a tiny model's run: the live run's steps, predicted times, refusals, one process."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from methods.suffix_decoding import SuffixDecoding
from runners import replay
from specbench.config.hydra_errors import translate_hydra_error
from specbench.errors import ConfigurationError, NeedsNotMet, OutputRefused
from specbench.replay.cost_surface import CostSurface, Grid
from specbench.results import records
from specbench.storage import jsonl
from tests.analysis.folders import edit_manifest
from tests.small_run import ROOT, interrupted_after, run_here, warning_texts

COMPARE = (
    "compare=["
    "{method: pld, label: pld_turn, num_tokens: 4, state_scope: turn},"
    "{method: cacheback, label: cb_run, table: dynamic, merge: true, state_scope: run,"
    " total_draft_len: 8, chaining_reserved: 1},"
    "{method: cacheback, label: cb_turn, table: dynamic, state_scope: turn,"
    " total_draft_len: 12, chaining_reserved: 2},"
    "{method: suffix_decoding, label: suffix_run, offset: 4.0, state_scope: run},"
    "{method: ngrammys, label: rows, strategy: context, k: 3, w: 4},"
    "{method: sam, automata: dynamic},"
    "{method: random_drafts},"
    "{method: oracle, depth: 3, accuracy: 0.7},"
    "{method: union, drafters: [pld, random_drafts]}]"
)
LABELS = ("ar", "pld", "pld_turn", "cb_run", "cb_turn", "suffix_run", "rows", "sam")
LABELS += ("random_drafts", "oracle", "union")


@pytest.fixture(scope="module")
def live(small, tmp_path_factory):
    """Run the tiny model live, with every label and two repeats."""
    out = tmp_path_factory.mktemp("live") / "run"
    assert run_here([*small, COMPARE, "repeats=2", f"output_dir={out}"]) == 0
    return out


@pytest.fixture
def again(small, live, tmp_path):
    """Replay the live run; returns the exit code and the folder."""
    recorded = ("dataset", "generation", "model.d", "model.context_length")
    plain = [text for text in small if not text.startswith(recorded)]

    def run(*overrides, out="replay"):
        base = [*plain, "runner=replay", f"runner.traces={live}", f"output_dir={tmp_path / out}"]
        return run_here(base, *overrides, launch=None), tmp_path / out

    return run


@pytest.fixture(scope="module")
def surface(tmp_path_factory, checkpoint):
    """Two milliseconds a pass and one more for each row; prompts 0.1 ms a token."""
    rows, contexts, k = np.arange(1, 130), (1, 250), (1, 8)
    tree = np.repeat((1e-3 * (2 + rows))[:, None, None], 2, axis=1)
    batch = np.full((2, 2, 2, 1), 0.5)
    cost_surface = CostSurface(
        model={"name": checkpoint.name, "device": "cpu", "dtype": "float64"},
        machine={"hardware": {"cpu": "a CPU", "gpus": []}},
        prefill=Grid({"context": contexts}, 1e-4 * np.array([[1.0], [250.0]])),
        tree=Grid({"rows": tuple(rows), "context": contexts}, tree),
        batch=Grid({"k": k, "w": (0, 8), "context": contexts}, batch),
    )
    path = tmp_path_factory.mktemp("surface") / "surface.json"
    cost_surface.write(path)
    return path


def steps(folder):
    return {
        r.key: (
            list(r.committed_per_step),
            r.n_drafted,
            list(r.output_ids),
            r.finish_reason,
            r.seed,
        )
        for r in records.read_records(folder)[0]
    }


def first_repeat(folder):
    return {key: value for key, value in steps(folder).items() if key[0] == 0}


def test_steps_are_the_live_runs_for_every_label_scope_and_repeat(live, again):
    code, out = again(COMPARE, "repeats=2")
    assert code == 0
    expected = steps(live)
    assert {key[3] for key in expected} == set(LABELS)
    assert steps(out) == expected
    sped_up = {key[3] for key, (accepted, *_) in expected.items() if max(accepted, default=0) > 1}
    assert {"pld", "cb_run", "suffix_run", "rows", "oracle"} <= sped_up  # something was compared


def test_without_a_surface_there_are_steps_and_no_times(live, again):
    _, out = again()
    done = records.read_records(out)[0]
    assert {r.timing for r in done} == {"none"}
    assert {(r.prefill_s, r.decode_s, r.wall_s) for r in done} == {(0.0, 0.0, 0.0)}
    assert {r.lossless.verdict for r in done} == {"not_audited"}
    assert {r.dataset for r in done} == {"jsonl"}
    summary = jsonl.read_json(out / records.SUMMARY)
    assert {row["tokens_per_s"] for row in summary["rows"]} == {None}
    assert {row["speedup"] for row in summary["rows"]} == {None}
    theirs = {
        (row["task"], row["label"]): row["mat"]
        for row in jsonl.read_json(live / records.SUMMARY)["rows"]
    }
    for row in summary["rows"]:
        assert row["mat"] == theirs[row["task"], row["label"]]
    assert any("no times" in note for note in warning_texts(summary))
    assert summary["pairs"] == [], "labels without times cannot be compared"


def test_times_are_the_surfaces_and_say_so(again, surface, capsys):
    code, out = again(
        f"runner.surface={surface}", "compare=[{method: ngrammys, strategy: context, k: 3, w: 4}]"
    )
    assert code == 0
    for record in records.read_records(out)[0]:
        assert record.timing == "predicted"
        assert record.prefill_s == pytest.approx(1e-4 * record.n_prompt)
        passes = {
            "ar": 3e-3 * record.n_target_passes,
            "pld": 3e-3 * record.n_target_passes + 1e-3 * record.n_drafted,
            "ngrammys": 0.5 * record.n_target_passes,
        }[record.label]
        assert passes < record.decode_s < passes + 0.05 + 1e-3 * record.n_target_passes
        assert record.wall_s == record.prefill_s + record.decode_s
    summary = jsonl.read_json(out / records.SUMMARY)
    assert {row["timing"] for row in summary["rows"]} == {"predicted"}
    assert any(row["speedup"] for row in summary["rows"])
    assert warning_texts(summary)[0].startswith("PREDICTED")
    assert "PREDICTED" in capsys.readouterr().out


def test_what_drafts_in_batches_is_left_out_where_the_surface_has_no_such_passes(
    again, surface, tmp_path
):
    only_trees = jsonl.read_json(surface)
    only_trees["batch"] = None
    jsonl.write_json(tmp_path / "trees.json", only_trees)
    code, out = again(
        f"runner.surface={tmp_path / 'trees.json'}",
        "compare=[{method: ngrammys, strategy: context, k: 3, w: 4}]",
    )
    assert code == 1
    summary = jsonl.read_json(out / records.SUMMARY)
    assert {row["label"] for row in summary["rows"] if row["speedup"]} == {"ar", "pld"}
    assert any(n.startswith("LEFT OUT: ngrammys. the surface") for n in warning_texts(summary))


@pytest.mark.parametrize(
    "overrides", ["jacobi", "token_recycling", "{method: union, drafters: [pld, token_recycling]}"]
)
def test_methods_that_need_the_model_are_tried_live(again, overrides):
    refused = r"needs .*cannot be replayed and is tried live: type runner=offline"
    with pytest.raises(NeedsNotMet, match=refused) as refusal:
        again(f"compare=[{overrides}]", "strict=true")
    assert refusal.value.exit_code == 2


def test_texts_are_replayed_one_at_a_time(again, surface):
    with pytest.raises(ConfigurationError, match=r"Type batch.size=1 or runner=offline") as error:
        again(f"runner.surface={surface}", "batch.size=2")
    assert error.value.exit_code == 2


@pytest.mark.slow  # over a second
def test_plain_decoding_alone_is_recorded_for_replays(small, tmp_path):
    """By hand, and as the first half of a replay."""
    base = [*small, f"paths.results={tmp_path}", "dataset.limit=1"]
    base += ["generation.max_new_tokens=6"]
    assert run_here([*base, "method=ar", f"output_dir={tmp_path}/by_hand"]) == 0
    replay = ["runner=replay", "runner.traces=record", f"output_dir={tmp_path}/replay"]
    assert run_here([*base, *replay]) == 0
    (recorded,) = (tmp_path / "recorded").glob("*")
    assert steps(recorded) == steps(tmp_path / "by_hand") != {}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("generation.max_new_tokens=7", "recorded with generation.max_new_tokens=16"),
        ("model.path=/other/weights", "Type model.id=/"),
        ("dataset=gsm8k", "contradicts the traces"),
        ("dataset.shuffle=3", "recorded with dataset.shuffle=None"),
        ("runner.traces=/nowhere", "must be the folder of a finished greedy run"),
        ("runner.traces=null", "runner.traces=RUN"),
        ("runner.surface=/nowhere", "runner=cost"),
    ],
)
def test_what_contradicts_the_traces_is_refused(again, overrides, message):
    with pytest.raises(ConfigurationError, match=message) as refusal:
        again(overrides)
    assert refusal.value.exit_code == 2


def test_what_agrees_with_the_traces_may_be_typed_and_cases_chosen(again):
    overrides = ["generation.max_new_tokens=16", "dataset=jsonl", "dataset.tasks=[qa]"]
    _, out = again(*overrides)
    assert {r.case_id for r in records.read_records(out)[0]} == {"82", "83"}
    _, out = again("dataset.limit=1", out="one")
    assert {r.case_id for r in records.read_records(out)[0]} == {"81"}


def test_a_folder_belongs_to_the_ids_and_not_to_their_place(again, live, tmp_path):
    code, out = again()
    before = (out / records.CASES).read_bytes()
    moved = shutil.copytree(live, tmp_path / "moved")
    assert again(f"runner.traces={moved}")[0] == code == 0
    assert (out / records.CASES).read_bytes() == before
    lines = jsonl.read_jsonl(live / records.CASES)[0]
    for line in lines:
        line["output_ids"][0] += 1
    other = tmp_path / "other"
    other.mkdir()
    (other / records.MANIFEST).write_bytes((live / records.MANIFEST).read_bytes())
    jsonl.rewrite_jsonl(other / records.CASES, lines)
    with pytest.raises(OutputRefused, match="traces_sha"):
        again(f"runner.traces={other}")


@pytest.mark.slow  # over a second
def test_an_interrupted_replay_goes_on_to_the_same_files(live, again, monkeypatch):
    monkeypatch.setattr(replay, "_BLOCKS_PER_WRITE", 2)
    with interrupted_after(2):
        again(COMPARE)
    code, out = again(COMPARE)
    assert code == 0
    assert steps(out) == first_repeat(live)


def test_a_drafter_that_fails_costs_its_turn_alone(live, again, monkeypatch):
    begin = SuffixDecoding.begin

    def fail_once(self, state):
        begin(self, state)
        self.turns = getattr(self, "turns", 0) + 1
        if self.turns == 2:
            raise ValueError("on purpose")

    monkeypatch.setattr(SuffixDecoding, "begin", fail_once)
    code, out = again(COMPARE)
    assert code == 1
    failed = [r for r in records.read_records(out)[0] if r.status == "failed"]
    assert [(r.label, r.case_id, r.turn) for r in failed] == [("suffix_run", "81", 1)]
    (error,) = jsonl.read_jsonl(out / records.ERRORS)[0]
    assert (error["type"], error["message"]) == ("ValueError", "on purpose")
    others = {key: v for key, v in first_repeat(live).items() if key[3] != "suffix_run"}
    assert {key: value for key, value in steps(out).items() if key[3] != "suffix_run"} == others


def test_a_run_without_plain_rows_needs_baseline_false(small, again, live, tmp_path):
    only = tmp_path / "only"
    only.mkdir()
    (only / records.MANIFEST).write_bytes((live / records.MANIFEST).read_bytes())
    lines = [line for line in jsonl.read_jsonl(live / records.CASES)[0] if line["label"] == "pld"]
    jsonl.rewrite_jsonl(only / records.CASES, lines)
    with pytest.raises(ConfigurationError, match="baseline=false"):
        again(f"runner.traces={only}")
    code, out = again(f"runner.traces={only}", "baseline=false")
    assert code == 0
    assert {r.label for r in records.read_records(out)[0]} == {"pld"}


@pytest.mark.slow
def test_a_sweep_runs_in_one_process_without_transformers(small, live, tmp_path, environment):
    code = (
        "import sys, os, json, runpy\n"
        "pid = os.getpid()\n"
        "def no_child(*a): raise AssertionError('a child was started')\n"
        "from runners.launch import dispatch\n"
        "dispatch.run_in_child = no_child\n"
        "try:\n"
        "    runpy.run_path('run.py', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "assert 'transformers' not in sys.modules\n"
    )
    recorded = ("dataset", "generation", "model.d", "model.context_length")
    plain = [text for text in small if not text.startswith(recorded)]
    done = subprocess.run(
        [
            sys.executable, "-c", code, "-m", *plain, "runner=replay", f"runner.traces={live}",
            "method.num_tokens=1,2,3", f"output_dir={tmp_path}/sweep",
        ],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    folders = sorted(path.parent for path in (tmp_path / "sweep").rglob(records.DONE))
    assert len(folders) == 3
    mats = [
        row["mat"]
        for folder in folders
        for row in json.loads((folder / records.SUMMARY).read_text())["rows"]
        if (row["task"], row["label"]) == ("overall", "pld")
    ]
    assert len(set(mats)) > 1
    # One table and one figure for all of them, by another process: this one imports no analysis.
    assert "sweep of 3 jobs: 3 done" in done.stdout
    for n in (1, 2, 3):
        assert f"pld (num_tokens={n})" in done.stdout
    (home,) = (tmp_path / "sweep").glob("sweep-num_tokens-*")
    assert {path.suffix for path in home.iterdir()} >= {".csv", ".md", ".tex", ".png"}


@pytest.fixture
def foreign(live, tmp_path):
    """Copy the live run; a test changes one group of its recorded configuration."""
    folder = shutil.copytree(live, tmp_path / "foreign")

    def changed(group, **values):
        config = jsonl.read_json(folder / records.MANIFEST)["config"]
        config |= {group: config[group] | values} if group else values
        edit_manifest(folder, config=config)
        return f"runner.traces={folder}"

    return changed


def test_interpolations_in_a_foreign_manifest_are_text(again, foreign):
    hostile = ["${oc.env:HOME}", "\\\\${seed}", "$${x", "a${oc.env:HOME}b\\"]
    prompts = dict(zip(("default", "b", "c", "d"), hostile, strict=True))
    code, folder = again(foreign("dataset", source=hostile[0], tasks=None, prompts=prompts))
    assert code == 0
    written = jsonl.read_json(folder / records.MANIFEST)["config"]["dataset"]
    assert written["source"] == hostile[0]
    assert written["prompts"] == prompts


@pytest.mark.parametrize(
    ("group", "key", "value"),
    [
        ("generation", "top_p", "nan"),
        ("generation", "max_new_tokens", "many"),
        ("dataset", "source", "a\0b"),
        (None, "seed", None),
        (None, "generation", []),
    ],
)
def test_recorded_values_are_checked_as_typed_ones_are(again, foreign, group, key, value):
    with pytest.raises(Exception) as caught:
        again(foreign(group, **{key: value}))
    error = translate_hydra_error(caught.value)
    assert error is not None and error.exit_code == 2
    assert "foreign" in str(error) and key in str(error)
