"""Spec-Bench's answer files: out and in again, and its own formulas on what we write."""

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from scripts import spec_bench
from scripts.spec_bench import AnswerError, from_answer, to_answers
from specbench.errors import ConfigurationError, OutputRefused, ResultsError, WeightsNotFound
from specbench.models import loading
from specbench.results.records import CASES, ERRORS, MANIFEST
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import MT_BENCH_CATEGORIES
from specbench.storage import jsonl
from tests.small_run import case_record

SYNTHETIC = Path(__file__).resolve().parents[1] / "golden" / "records" / "synthetic"
LABELS = ("ar", "pld")
SOURCE = {"label": "pld", "method": "pld", "model": "toy", "dataset": "d", "run_key": "k"}
SOURCE |= {"repeat": 0, "position": 0}
EOS, BOS = 2, 1


def detokenize(tokens):
    """A tokenizer's text: a word per token, the EOS left out."""
    return " ".join(str(token) for token in tokens if token != EOS)


def tokenize(text):
    """Its way back, with the BOS in front, as Vicuna's does."""
    return [BOS, *map(int, text.split())]


def record(label, case_id, turn, accepted, wall_s, category="qa", **changes):
    n_new = sum(accepted) + 1
    output_ids = [*range(5, 4 + n_new), EOS]
    return case_record(
        case_id, label, n_new, model="toy", dataset="specbench",
        task="mt_bench" if category in MT_BENCH_CATEGORIES else category, category=category,
        turn=turn, prompt_ids=(3, 4), output_ids=output_ids, committed_per_step=accepted,
        n_retokenized=len(tokenize(detokenize(output_ids))) - 1 if label == "ar" else None,
        prefill_s=wall_s / 4, decode_s=wall_s * 3 / 4, wall_s=wall_s,
        started_at="2026-11-21T00:00:00.000+00:00", **changes,
    )  # fmt: skip


RECORDS = [
    record("ar", "81", 0, [1] * 7, 0.8, "writing"),
    record("ar", "81", 1, [1] * 3, 0.4, "writing"),
    record("pld", "81", 0, [3, 1, 3], 0.4, "writing"),
    record("pld", "81", 1, [1, 2], 0.3, "writing"),
    record("ar", "200", 0, [1] * 9, 1.0),
    record("pld", "200", 0, [4, 4, 1], 0.6),
]


def files():
    blocks = [(0, "81"), (0, "200")]
    return {
        label: to_answers([r for r in RECORDS if r.label == label], blocks, label, detokenize)
        for label in LABELS
    }


def speed(lines, base, task):
    """Compute what ``evaluation/speed.py`` prints for a task: MAT, both speeds, their ratio.

    Written again from its formulas; the file itself is not ours to carry.
    """
    chosen = {"overall": None, "mt_bench": MT_BENCH_CATEGORIES}.get(task, {task})
    ours, plain = (
        [line["choices"][0] for line in some if chosen is None or line["category"] in chosen]
        for some in (lines, base)
    )
    mat = statistics.fmean(n for choice in ours for n in choice["accept_lengths"])
    fast = statistics.fmean(sum(c["new_tokens"]) / sum(c["wall_time"]) for c in ours)
    slow = statistics.fmean(
        sum(len(tokenize(text)) - 1 for text in c["turns"]) / sum(c["wall_time"]) for c in plain
    )
    return mat, fast, slow, fast / slow


@pytest.mark.parametrize("task", ["mt_bench", "qa", "overall"])
def test_the_exact_estimator_prints_what_their_script_prints_of_the_export(task):
    """Their baseline loses the end token of every turn, so its speedups are larger."""
    exports = files()
    exact, by_ids = (
        {
            row["label"]: row
            for row in summarize(RECORDS, LABELS, estimator=e)
            if row["task"] == task
        }
        for e in ("specbench_exact", "specbench")
    )
    mat, method, plain, ratio = speed(exports["pld"], exports["ar"], task)
    pld, ar = exact["pld"], exact["ar"]
    assert method == pytest.approx(by_ids["pld"]["tokens_per_s"])
    # The baseline counted like a method, by ids: our estimator's ratio.
    counted_alike = method / speed(exports["ar"], exports["ar"], task)[1]
    assert counted_alike == pytest.approx(by_ids["pld"]["speedup"])
    assert pld["mat"] == pytest.approx(mat, rel=1e-12)
    assert pld["tokens_per_s"] == pytest.approx(method, rel=1e-12)
    assert ar["tokens_per_s"] == pytest.approx(plain, rel=1e-12)
    assert pld["speedup"] == pytest.approx(ratio, rel=1e-12)
    assert ratio > 1.05 * by_ids["pld"]["speedup"]


def test_a_baseline_that_nobody_counted_as_they_do_has_no_exact_speedup():
    uncounted = [r.replace(n_retokenized=None) for r in RECORDS]
    rows = summarize(uncounted, LABELS, estimator="specbench_exact")
    assert {row["speedup"] for row in rows if row["label"] == "pld"} == {None}


def test_a_line_has_their_fields():
    first, second = files()["pld"]
    assert [*first] == ["question_id", "category", "answer_id", "model_id", "choices", "tstamp"]
    assert first["choices"] == [
        {
            "index": 0,
            "turns": ["5 6 7 8 9 10 11", "5 6 7"],
            "decoding_steps": [3, 2],
            "new_tokens": [8, 4],
            "wall_time": [0.4, 0.3],
            "accept_lengths": [3, 1, 3, 1, 2],
        }
    ]
    assert first["answer_id"] != second["answer_id"]
    assert first["tstamp"] == 1795219200.0


@pytest.mark.parametrize("case_id", ["81", "007", "7", "²", "٣", "-1", "9" * 38, "demo_01"])
def test_an_id_is_a_number_only_where_it_prints_as_the_id(case_id):
    (line,) = to_answers([record("pld", case_id, 0, [2], 1.0)], [(0, case_id)], "m", detokenize)
    assert str(line["question_id"]) == case_id
    assert isinstance(line["question_id"], int) == (case_id in ("81", "7"))
    assert from_answer(json.loads(json.dumps(line)), SOURCE, 0)[0].case_id == case_id


def test_ids_that_are_numbers_too_long_for_tables_are_read(tmp_path):
    path = tmp_path / "m-pld.jsonl"
    lines, ids = files()["pld"], (10**37 + 1, "10")
    answers = [{**line, "question_id": i} for line, i in zip(lines, ids, strict=True)]
    jsonl.rewrite_jsonl(path, answers)
    assert imported(tmp_path / "back", [path]) == 0
    (run,) = load_runs([tmp_path / "back"])
    assert {r.case_id for r in run.records} == {*map(str, ids)}


@pytest.mark.parametrize("wrong", ["", "{", '{"question_id": 7.0}', '{"question_id": null}'])
def test_a_line_that_is_no_answer_is_refused_with_its_place(tmp_path, wrong):
    path = tmp_path / "m-pld.jsonl"
    path.write_text(f"{wrong}\n")
    with pytest.raises(AnswerError, match="line 1: "):
        imported(tmp_path / "back", [path])


def test_labels_that_no_file_name_takes_have_a_file_each(write, tmp_path):
    odd = ["a/b", "a_b", "../up", "x:*?|y", "l" * 300]
    records = [record(label, "1", 0, [2], 1.0) for label in odd]
    out = tmp_path / "out"
    assert spec_bench.main(["export", str(write(records)), str(out), "--no-text"]) == 0
    paths = [path for path in tmp_path.rglob("*.jsonl") if path.name != CASES]
    assert len(paths) == len(odd)
    assert {path.parent for path in paths} == {out}


turns = st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=3)


@given(turns, st.booleans(), st.booleans())
def test_every_way_of_counting_is_read_as_the_same_steps(accepted, prompt_is_a_step, last_index):
    """With the prompt's pass as a step of its own or not; number of steps or index of the last."""
    given = [[1, *lengths] if prompt_is_a_step else lengths for lengths in accepted]
    choice = {
        "turns": ["x"] * len(given),
        "decoding_steps": [len(lengths) - last_index for lengths in given],
        "new_tokens": [sum(lengths) + 1 for lengths in accepted],
        "wall_time": [1.0] * len(given),
        "accept_lengths": [n for lengths in given for n in lengths],
    }
    back = from_answer({"question_id": 1, "category": "qa", "choices": [choice]}, SOURCE, 0)
    assert [list(r.committed_per_step) for r in back] == accepted


def test_a_first_pass_that_committed_more_keeps_the_rest():
    """A draft verified together with the prompt: the first token is the prompt's."""
    (line,) = to_answers([record("pld", "1", 0, [2, 2], 1.0)], [(0, "1")], "m", detokenize)
    line["choices"][0]["accept_lengths"] = [3, 2]
    assert from_answer(line, SOURCE, 0)[0].committed_per_step == [2, 2]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("new_tokens", [9, 9], "accept_lengths add up to 7 and new_tokens is 9"),
        ("decoding_steps", [3, 3], "do not belong to 5 accept_lengths"),
        ("accept_lengths", [3, 1, 3, 3, 0], "is 0, it must be at least 1"),
        ("new_tokens", ["8", 4], "must be a whole number"),
        ("wall_time", [0.4], "1 wall_time"),
        ("wall_time", [0.4, 0.0], "is 0.0, it must be above 0"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(name, value, message):
    line = files()["pld"][0]
    line["choices"][0][name] = value
    with pytest.raises(AnswerError, match=f"question 81.*{message}"):
        from_answer(line, SOURCE, 0)


def test_an_error_s_numbers_are_the_turn_before_s_and_count_nowhere():
    line = files()["pld"][0]
    line["choices"][0]["turns"][1] = "ERROR"
    assert [r.status for r in from_answer(line, SOURCE, 0)] == ["failed", "failed"]


@pytest.fixture
def write(tmp_path):
    """Writes a run folder."""

    def folder(records):
        path = tmp_path / "run"
        path.mkdir(exist_ok=True)
        jsonl.rewrite_jsonl(path / CASES, (r.to_json() for r in records))
        config = {"model": {"name": "toy", "dtype": "float32"}, "generation": {"temperature": 0.0}}
        jsonl.write_json(path / MANIFEST, {"schema_version": 2, "config": config})
        return path

    return folder


def exported(run, out):
    assert spec_bench.main(["export", str(run), str(out), "--no-text"]) == 0
    return sorted(out.rglob("*.jsonl"))


def imported(out, paths, *more):
    named = [f"{path.name.split('-')[1]}={path}" for path in paths]
    return spec_bench.main(["import", str(out), *named, "--model", "toy", *more])


def test_out_and_in_again_by_the_scripts(write, tmp_path):
    paths = exported(write(RECORDS), tmp_path / "out")
    assert [path.name for path in paths] == [
        "toy-ar-float32-temp-0.0.jsonl", "toy-pld-float32-temp-0.0.jsonl",
    ]  # fmt: skip
    assert imported(tmp_path / "back", paths, "--gpu", "RTX 4090", "--dtype", "float16") == 0
    (loaded,) = load_runs([tmp_path / "back"])
    assert (loaded.hardware, loaded.dtype, loaded.manifest.imported["from"]) == (
        "1 RTX 4090",
        "float16",
        "Spec-Bench",
    )
    fields = ("case_id", "category", "task", "turn", "n_new", "committed_per_step", "wall_s")
    by_key = {r.key: r for r in RECORDS}
    for back in loaded.records:
        assert all(getattr(back, k) == getattr(by_key[back.key], k) for k in fields)
        assert {*back.output_ids} == {-1}
    paired = summarize(loaded.records, LABELS, estimator="paired", n_resamples=50)
    assert {row["speedup"] for row in paired} == {None}, "decoding time is not in their files"
    text = caption(make_comparisons([loaded])[0])
    assert text.startswith("IMPORTED from Spec-Bench's files")
    with pytest.raises(ResultsError, match="holds no tokens"):
        exported(tmp_path / "back", tmp_path / "again")


def test_a_run_with_repeats_failed_and_disturbed_cases_gives_its_own_table_again(tmp_path):
    paths = exported(SYNTHETIC, tmp_path / "out")
    assert len(paths) == 8
    assert imported(tmp_path / "back", paths) == 0
    back, recorded = (load_runs([path])[0].records for path in (tmp_path / "back", SYNTHETIC))
    spoilt = {r.case_id for r in recorded if r.status != "ok"}
    labels = ["ar", "cacheback", "no_frozen", "pld"]
    ours, theirs = (
        summarize([r for r in some if r.case_id not in spoilt], labels, estimator="specbench")
        for some in (back, recorded)
    )
    for mine, yours in zip(ours, theirs, strict=True):
        assert (mine["mat"], mine["speedup"]) == pytest.approx((yours["mat"], yours["speedup"]))


def test_contradictions_are_refused_with_their_place_and_errors_drop_out(write, tmp_path, capsys):
    ar, pld = exported(write(RECORDS), tmp_path / "out")
    lines = [json.loads(line) for line in pld.read_text().splitlines()]
    lines[1]["choices"][0]["new_tokens"] = [99]
    jsonl.rewrite_jsonl(pld, lines)
    with pytest.raises(AnswerError, match=r"pld.*jsonl, line 2: question 200"):
        imported(tmp_path / "back", [ar, pld])
    assert not (tmp_path / "back").exists()
    lines[1]["choices"][0]["turns"] = ["ERROR"]
    jsonl.rewrite_jsonl(pld, lines)
    assert imported(tmp_path / "back", [ar, pld]) == 0
    assert "1 questions are marked as failed" in capsys.readouterr().out
    (line,) = map(json.loads, (tmp_path / "back" / ERRORS).read_text().splitlines())
    assert (line["label"], line["case_id"]) == ("pld", "200")
    rows = summarize(load_runs([tmp_path / "back"])[0].records, LABELS, n_resamples=50)
    assert {(row["n_cases"], row["n_dropped"]) for row in rows if row["task"] == "overall"} == {
        (1, 1)
    }


def test_answers_are_the_tokenizer_s_text_without_special_tokens(write, tmp_path, monkeypatch):
    class Tokenizer:
        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            return f" {detokenize(tokens)}\n"

    def missing(node):
        raise WeightsNotFound(f"no tokenizer of {node.name}.")

    monkeypatch.setattr(loading, "load_tokenizer", lambda node: Tokenizer())
    run = write(RECORDS)
    assert spec_bench.main(["export", str(run), str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*-pld-*")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["choices"][0]["turns"] == ["5 6 7 8 9 10 11", "5 6 7"]
    monkeypatch.setattr(loading, "load_tokenizer", missing)
    with pytest.raises(ConfigurationError, match=r"no tokenizer of toy.*--no-text"):
        spec_bench.main(["export", str(run), str(tmp_path / "out")])


UNTIMED = {"timing": "none", "prefill_s": 0.0, "decode_s": 0.0, "wall_s": 0.0}


def test_what_cannot_be_exported_or_imported_says_why(write, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ResultsError, match="replay without times"):
        exported(write([r.replace(**UNTIMED) for r in RECORDS]), out)
    with pytest.raises(ConfigurationError, match="is not a file"):
        imported(out, [tmp_path / "toy-pld.jsonl"])
    path = tmp_path / "toy-pld.jsonl"
    jsonl.rewrite_jsonl(path, files()["pld"])
    with pytest.raises(ConfigurationError, match="baseline must be pld"):
        imported(out, [path], "--baseline", "ar")
    with pytest.raises(OutputRefused, match="not empty"):
        imported(tmp_path, [path])
    jsonl.rewrite_jsonl(path, files()["pld"] * 2)
    with pytest.raises(AnswerError, match="more than once: 200, 81"):
        imported(out, [path])
