"""A label that fails in its warm-up, or in most cases, costs no other label its numbers."""

from collections import Counter

import pytest

from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from methods.ar import Autoregressive
from methods.pld import PromptLookup
from specbench.errors import WarmUpFailed
from specbench.replay.traces import load_traces
from specbench.results import records
from specbench.results.manifest import RunManifest
from specbench.storage import jsonl
from tests.small_run import interrupted_after, run_here, warning_texts

BATCHED = "batch.size=2"


@pytest.fixture
def args(small, tmp_path):
    return [
        *small,
        "compare=[suffix_decoding]",
        "measure.reruns=0",
        f"output_dir={tmp_path / 'run'}",
    ]


@pytest.fixture
def failing(monkeypatch):
    """Make a method raise on the prompts with the given indices among all that it meets."""

    def make(method, places=range(1000)):
        begin, met = method.begin, {}

        def raising(self, state):
            prompt = tuple(state.buffer[: state.n_prompt])
            if met.setdefault(prompt, len(met)) in places:
                raise AttributeError("no attribute 'look_up'")
            begin(self, state)

        monkeypatch.setattr(method, "begin", raising)

    return make


def read_results(folder):
    """Return the records by label, the rows over the whole run, and notes of left-out labels."""
    turns, _ = records.read_records(folder)
    summary = jsonl.read_json(folder / records.SUMMARY)
    rows = {row["label"]: row for row in summary["rows"] if row["task"] == "overall"}
    notes = [text for text in warning_texts(summary) if text.startswith("LEFT OUT")]
    return Counter(r.label for r in turns), rows, " ".join(notes)


@pytest.mark.slow  # over a second
@pytest.mark.parametrize("extra", [[], [BATCHED]], ids=str)
def test_who_fails_its_warm_up_is_left_out_before_anything_is_measured(
    args, tmp_path, failing, extra
):
    failing(PromptLookup)
    overrides = [*args, *extra, "measure.warmup=1"]
    with interrupted_after(1):
        run_here(overrides)
    assert run_here(overrides) == 1, "resumed without it"
    counts, rows, notes = read_results(tmp_path / "run")
    assert counts == {"ar": 7, "suffix_decoding": 7}
    assert rows.keys() == {"ar", "suffix_decoding"}
    assert {row["n_cases"] for row in rows.values()} == {5}
    assert rows["suffix_decoding"]["speedup"]
    assert "LEFT OUT: pld. It failed in its warm-up (AttributeError: no attribute" in notes
    assert RunManifest.read(tmp_path / "run").exit_code == 1


@pytest.mark.parametrize("extra", [[], [BATCHED]], ids=str)
def test_who_fails_in_all_cases_is_left_out_and_its_records_stay(args, tmp_path, failing, extra):
    failing(PromptLookup)
    assert run_here([*args, *extra]) == 1
    counts, rows, notes = read_results(tmp_path / "run")
    assert counts == {"ar": 7, "pld": 7, "suffix_decoding": 7}
    assert rows.keys() == {"ar", "suffix_decoding"}
    assert rows["suffix_decoding"]["speedup"] and rows["suffix_decoding"]["n_cases"] == 5
    assert "LEFT OUT: pld. It failed in" in notes and "look_up" in notes
    (comparison,) = make_comparisons(load_runs([tmp_path]))
    assert [entry.label for entry in comparison.entries] == ["ar", "suffix_decoding"]
    assert comparison.entries[1].overall["speedup"] == rows["suffix_decoding"]["speedup"]
    assert "LEFT OUT: pld." in caption(comparison) and "look_up" in caption(comparison)
    if BATCHED not in extra:
        traces = load_traces(tmp_path / "run")
        assert len(traces.cases()) == 5 and not traces.failed


def test_who_fails_in_less_than_half_takes_these_cases_from_all(args, tmp_path, failing):
    failing(PromptLookup, places=(0, 2))
    assert run_here([*args, "dataset.dialogue=ar"]) == 1
    _, rows, notes = read_results(tmp_path / "run")
    assert rows.keys() == {"ar", "pld", "suffix_decoding"}
    assert not notes
    assert {(row["n_cases"], row["n_dropped"]) for row in rows.values()} == {(3, 2)}


def test_a_label_that_breaks_later_keeps_what_was_measured_and_costs_the_others_nothing(
    args, tmp_path, failing
):
    """Of a label that has records a failed warm-up is no reason: every failure counts."""
    overrides = [*args, "measure.warmup=1"]
    with interrupted_after(2):
        run_here(overrides)
    before = {r.key for r in records.read_records(tmp_path / "run")[0]}
    failing(PromptLookup)
    assert run_here(overrides) == 1
    turns, _ = records.read_records(tmp_path / "run")
    assert {r.key for r in turns if r.status == "ok" and r.label == "pld"} <= before
    assert len(before) == len([r for r in turns if r.key in before and r.status == "ok"])
    _, rows, notes = read_results(tmp_path / "run")
    assert rows.keys() == {"ar", "suffix_decoding"}
    assert rows["suffix_decoding"]["n_cases"] == 5
    assert "LEFT OUT: pld. It failed in 3 of 5 cases" in notes


@pytest.mark.slow  # over a second
def test_without_plain_decoding_the_others_have_all_but_speedups(args, tmp_path, failing):
    failing(Autoregressive)
    assert run_here([*args, "measure.warmup=1"]) == 1
    counts, rows, notes = read_results(tmp_path / "run")
    assert counts == {"pld": 7, "suffix_decoding": 7}
    assert all(row["mat"] and row["tokens_per_s"] for row in rows.values())
    assert {row["speedup"] for row in rows.values()} == {None}
    assert "LEFT OUT: ar." in notes


def test_where_all_labels_fail_their_warm_up_the_run_ends_with_their_reasons(args, failing):
    for method in (Autoregressive, PromptLookup):
        failing(method)
    with pytest.raises(WarmUpFailed, match=r"ar: It failed.*pld: It failed") as raised:
        run_here([*args, "compare=[]", "measure.warmup=1"])
    assert raised.value.exit_code == 1
