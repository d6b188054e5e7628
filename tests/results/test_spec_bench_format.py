"""Spec-Bench's answer files: out and in again, and its own formulas on what we write."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from scripts import spec_bench
from specbench.errors import ConfigurationError, OutputRefused, WeightsNotFound
from specbench.models import loading
from specbench.results.formats.spec_bench import (
    AnswerError,
    Source,
    from_answer,
    mean_accept_length,
    to_answers,
    usable_blocks,
)
from specbench.results.records import CASES, ERRORS, MANIFEST, CaseRecord
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import MT_BENCH_CATEGORIES
from specbench.storage import jsonl
from tests.small_run import case_record

SYNTHETIC = Path(__file__).resolve().parents[1] / "golden" / "records" / "synthetic"
LABELS = ("ar", "pld")
SOURCE = Source("pld", "pld", "toy", "specbench", "k")
EOS = 2
BOS = 1


def words(tokens):
    """A tokenizer's text: a word per token, the EOS left out."""
    return " ".join(str(token) for token in tokens if token != EOS)


def tokenize(text):
    """Its way back, with the BOS in front, as Vicuna's does."""
    return [BOS, *map(int, text.split())]


def record(label, case_id, turn, accepted, wall_s, category="qa", repeat=0, status="ok"):
    n_new = sum(accepted) + 1
    output_ids = [*range(5, 4 + n_new), EOS]
    return case_record(
        case_id, label, n_new, model="toy", dataset="specbench",
        task="mt_bench" if category in MT_BENCH_CATEGORIES else category, category=category,
        turn=turn, repeat=repeat, status=status, prompt_ids=(3, 4),
        output_ids=output_ids, committed_per_step=accepted,
        n_retokenized=len(tokenize(words(output_ids))) - 1 if label == "ar" else None,
        prefill_s=wall_s / 4, decode_s=wall_s * 3 / 4, wall_s=wall_s,
        started_at="2026-11-21T00:00:00.000+00:00",
    )  # fmt: skip


RECORDS = [
    record("ar", "81", 0, [1] * 7, 0.8, "writing"),
    record("ar", "81", 1, [1] * 3, 0.4, "writing"),
    record("pld", "81", 0, [3, 1, 3], 0.4, "writing"),
    record("pld", "81", 1, [1, 2], 0.3, "writing"),
    record("ar", "200", 0, [1] * 9, 1.0),
    record("pld", "200", 0, [4, 4, 1], 0.6),
]


def files(records=RECORDS, labels=LABELS, repeat=0):
    blocks = [block for block in usable_blocks(records, labels).blocks if block[0] == repeat]
    return {
        label: to_answers([r for r in records if r.label == label], blocks, label, words)
        for label in labels
    }


def speed(lines, base, task):
    """What ``evaluation/speed.py`` prints for a task: MAT, both speeds, their ratio.

    Written again from its formulas; the file itself is not ours to carry.
    """
    chosen = {"overall": None, "mt_bench": MT_BENCH_CATEGORIES}.get(task, {task})

    def of_task(answers):
        return [
            line["choices"][0]
            for line in answers
            if chosen is None or line["category"] in chosen
        ]  # fmt: skip

    lengths = [n for choice in of_task(lines) for n in choice["accept_lengths"]]
    method = statistics.fmean(
        sum(choice["new_tokens"]) / sum(choice["wall_time"]) for choice in of_task(lines)
    )
    plain = statistics.fmean(
        sum(len(tokenize(text)) - 1 for text in choice["turns"]) / sum(choice["wall_time"])
        for choice in of_task(base)
    )
    return statistics.fmean(lengths), method, plain, method / plain


@pytest.mark.parametrize("task", ["mt_bench", "qa", "overall"])
def test_the_exact_estimator_prints_what_their_script_prints_of_the_export(task):
    """Their baseline loses the end token of every turn, so its speedups are larger."""
    made = files()
    rows = {
        (row["label"], row["task"]): row
        for row in summarize(RECORDS, LABELS, estimator="specbench_exact")
    }
    mat, method, plain, ratio = speed(made["pld"], made["ar"], task)
    pld, ar = rows["pld", task], rows["ar", task]
    by_ids = summarize(RECORDS, LABELS, estimator="specbench")
    theirs = next(row for row in by_ids if (row["label"], row["task"]) == ("pld", task))
    assert method == pytest.approx(theirs["tokens_per_s"])
    # The baseline counted like a method, by ids: our estimator's ratio.
    counted_alike = method / speed(made["ar"], made["ar"], task)[1]
    assert counted_alike == pytest.approx(theirs["speedup"])
    assert pld["mat"] == pytest.approx(mat, rel=1e-12)
    assert pld["tokens_per_s"] == pytest.approx(method, rel=1e-12)
    assert ar["tokens_per_s"] == pytest.approx(plain, rel=1e-12)
    assert pld["speedup"] == pytest.approx(ratio, rel=1e-12)
    assert ar["speedup"] == 1.0
    assert ratio > 1.05 * theirs["speedup"]


def test_a_baseline_that_nobody_counted_as_they_do_has_no_exact_speedup():
    uncounted = [replace(r, n_retokenized=None) for r in RECORDS]
    rows = summarize(uncounted, LABELS, estimator="specbench_exact")
    assert {(row["speedup"], row["speedup_ci"]) for row in rows if row["label"] == "pld"} == {
        (None, None)
    }


def test_a_line_has_their_fields():
    first, second = files()["pld"]
    assert list(first) == [
        "question_id", "category", "answer_id", "model_id", "choices", "tstamp",
    ]  # fmt: skip
    assert first["question_id"] == 81
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


def test_what_the_files_carry_comes_back():
    known = ("case_id", "category", "task", "turn", "n_new", "committed_per_step", "wall_s")
    for label, lines in files().items():
        back = [made for i, line in enumerate(lines) for made in from_answer(line, SOURCE, i)]
        own = [r for r in RECORDS if r.label == label]
        for name in known:
            assert [getattr(r, name) for r in back] == [getattr(r, name) for r in own], name
        assert {token for r in back for token in r.output_ids} == {-1}
        assert {r.decode_s for r in back} == {0.0}, "unknown, so no speed is made of it"
        assert back[0].started_at == "2026-11-21T00:00:00.000+00:00"
        assert [CaseRecord.from_json(r.to_json()).n_new for r in back] == [r.n_new for r in own]


turns = st.lists(st.lists(st.integers(1, 6), max_size=8), min_size=1, max_size=3)


@given(turns, st.booleans(), st.booleans())
def test_every_way_of_counting_is_read_as_the_same_steps(accepted, prompt_is_a_step, last_index):
    """With the prompt's pass as a step of its own or not; number of steps or index of the last."""
    given = [[1, *own] if prompt_is_a_step else own for own in accepted]
    line = {
        "question_id": 1, "category": "qa", "model_id": "m", "tstamp": 0,
        "choices": [
            {
                "turns": ["x"] * len(given),
                "decoding_steps": [len(own) - last_index for own in given],
                "new_tokens": [sum(own) + 1 for own in accepted],
                "wall_time": [1.0] * len(given),
                "accept_lengths": [n for own in given for n in own],
            }
        ],
    }  # fmt: skip
    back = from_answer(line, SOURCE, 0)
    assert [list(r.committed_per_step) for r in back] == accepted
    assert [r.n_target_passes for r in back] == [len(own) for own in accepted]


def test_a_first_pass_that_committed_more_keeps_the_rest():
    """A draft verified together with the prompt: the first token is the prompt's."""
    (line,) = to_answers([record("pld", "1", 0, [2, 2], 1.0)], [(0, "1")], "m", words)
    line["choices"][0]["accept_lengths"] = [3, 2]
    (back,) = from_answer(line, SOURCE, 0)
    assert back.committed_per_step == [2, 2]
    assert mean_accept_length([line]) == 2.5


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("new_tokens", [9, 9], "accept_lengths add up to 7 and new_tokens is 9"),
        ("decoding_steps", [3, 3], "do not belong to 5 accept_lengths"),
        ("accept_lengths", [3, 1, 3, 4, -1], "add up to 3"),
        ("wall_time", [0.4], "1 wall_time"),
        ("wall_time", [0.4, 0.0], "wall_time is 0.0"),
    ],
)
def test_counts_that_contradict_each_other_are_refused(name, value, said):
    line = files()["pld"][0]
    line["choices"][0][name] = value
    with pytest.raises(AnswerError, match=f"question 81.*{said}"):
        from_answer(line, SOURCE, 0)
    with pytest.raises(AnswerError, match="KeyError 'choices'"):
        from_answer({"question_id": 1}, SOURCE, 0)


def test_an_error_s_numbers_are_the_turn_before_s_and_count_nowhere():
    line = files()["pld"][0]
    line["choices"][0]["turns"][1] = "ERROR"
    assert [r.status for r in from_answer(line, SOURCE, 0)] == ["failed", "failed"]


def test_blocks_that_went_wrong_are_left_out_for_all_labels():
    records = [
        *RECORDS,
        record("ar", "201", 0, [1], 1.0),
        replace(record("pld", "201", 0, [1], 1.0), status="failed"),
        record("ar", "202", 0, [1], 1.0, status="disturbed"),
        record("pld", "202", 0, [1], 1.0),
        record("ar", "203", 0, [1], 1.0),
    ]  # five blocks, of which one may be left out of times
    usable = usable_blocks(records, LABELS)
    assert usable.blocks == ((0, "81"), (0, "200"))
    assert (usable.failed, usable.noisy) == (2, 1)
    spoilt = [replace(r, status="disturbed") for r in RECORDS]
    assert usable_blocks(spoilt, LABELS).blocks == ((0, "81"), (0, "200")), "a quarter of two"


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    jsonl.rewrite_jsonl(folder / CASES, (r.to_json() for r in RECORDS))
    config = {"model": {"name": "toy", "dtype": "float32"}, "generation": {"temperature": 0.0}}
    jsonl.write_json(folder / MANIFEST, {"schema_version": 2, "config": config})
    return folder


def imported(out, made, *more):
    named = [f"{path.name.split('-')[1]}={path}" for path in made]
    return spec_bench.main(["import", str(out), *named, "--model", "toy", *more])


def test_out_and_in_again_by_the_scripts(run, tmp_path, capsys):
    assert spec_bench.main(["export", str(run), str(tmp_path / "out"), "--no-text"]) == 0
    made = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in made] == [
        "toy-ar-float32-temp-0.0.jsonl", "toy-pld-float32-temp-0.0.jsonl",
    ]  # fmt: skip
    assert imported(tmp_path / "back", made, "--gpu", "RTX 4090", "--dtype", "float16") == 0
    out = capsys.readouterr().out
    assert "without text" in out
    (found,) = load_runs([tmp_path / "back"])
    assert found.complete
    assert (found.hardware, found.dtype, found.imported) == ("1 RTX 4090", "float16", "Spec-Bench")
    theirs = summarize(RECORDS, LABELS, estimator="specbench", n_resamples=50)
    ours = summarize(found.records, LABELS, estimator="specbench", n_resamples=50)
    for mine, yours in zip(ours, theirs, strict=True):
        for name in ("task", "label", "n_cases", "mat", "tokens_per_s", "speedup"):
            assert mine[name] == yours[name], name
    paired = summarize(found.records, LABELS, estimator="paired", n_resamples=50)
    assert {row["speedup"] for row in paired} == {None}, "decoding time is not in their files"
    text = caption(make_comparisons([found])[0])
    assert text.startswith("IMPORTED from Spec-Bench's files")
    assert "not audited" in text
    with pytest.raises(ConfigurationError, match="holds no tokens"):
        spec_bench.main(["export", str(tmp_path / "back"), str(tmp_path / "again")])


def test_the_synthetic_run_gives_its_own_table_again(tmp_path):
    """Two repeats, two-turn questions, one failed and one disturbed case."""
    assert spec_bench.main(["export", str(SYNTHETIC), str(tmp_path / "out"), "--no-text"]) == 0
    made = sorted((tmp_path / "out").glob("run_*/*.jsonl"))
    assert len(made) == 8
    assert imported(tmp_path / "back", made) == 0
    (found,) = load_runs([tmp_path / "back"])
    labels = ["ar", "cacheback", "no_frozen", "pld"]
    usable = set(usable_blocks(load_runs([SYNTHETIC])[0].records, labels).blocks)
    both = {case for _, case in usable if {(0, case), (1, case)} <= usable}
    kept = [r for r in load_runs([SYNTHETIC])[0].records if r.case_id in both]
    back = [r for r in found.records if r.case_id in both]
    for mine, yours in zip(
        summarize(back, labels, estimator="specbench", n_resamples=50),
        summarize(kept, labels, estimator="specbench", n_resamples=50),
        strict=True,
    ):
        assert (mine["mat"], mine["speedup"]) == pytest.approx((yours["mat"], yours["speedup"]))


def test_a_contradiction_is_refused_with_its_place_or_flagged(run, tmp_path, capsys):
    spec_bench.main(["export", str(run), str(tmp_path / "out"), "--no-text"])
    ar, pld = sorted((tmp_path / "out").iterdir())
    lines = [json.loads(line) for line in pld.read_text().splitlines()]
    lines[1]["choices"][0]["new_tokens"] = [99]
    jsonl.rewrite_jsonl(pld, lines)
    with pytest.raises(AnswerError, match=r"pld.*jsonl, line 2: question 200.*--flag"):
        imported(tmp_path / "back", [ar, pld])
    assert not (tmp_path / "back").exists()
    assert imported(tmp_path / "back", [ar, pld], "--flag") == 0
    assert "1 questions are marked as failed" in capsys.readouterr().out
    (line,) = map(json.loads, (tmp_path / "back" / ERRORS).read_text().splitlines())
    assert (line["label"], line["case_id"]) == ("pld", "200")
    rows = summarize(load_runs([tmp_path / "back"])[0].records, LABELS, n_resamples=50)
    assert {(row["n_cases"], row["n_dropped"]) for row in rows if row["task"] == "overall"} == {
        (1, 1)
    }


def test_answers_are_the_tokenizer_s_text_without_special_tokens(run, tmp_path, monkeypatch):
    class Tokenizer:
        def decode(self, tokens, skip_special_tokens):
            assert skip_special_tokens
            return f" {words(tokens)}\n"

    monkeypatch.setattr(loading, "load_tokenizer", lambda node: Tokenizer())
    assert spec_bench.main(["export", str(run), str(tmp_path / "out")]) == 0
    (path,) = (tmp_path / "out").glob("*-pld-*")
    first = json.loads(path.read_text().splitlines()[0])
    assert first["choices"][0]["turns"] == ["5 6 7 8 9 10 11", "5 6 7"]


def test_without_its_tokenizer_the_way_out_is_named(run, tmp_path, monkeypatch):
    def missing(node):
        raise WeightsNotFound(f"no tokenizer of {node.name}.")

    monkeypatch.setattr(loading, "load_tokenizer", missing)
    with pytest.raises(ConfigurationError, match=r"no tokenizer of toy.*--no-text"):
        spec_bench.main(["export", str(run), str(tmp_path / "out")])


def test_what_cannot_be_exported_or_imported_says_why(run, tmp_path):
    out = str(tmp_path / "out")
    untimed = [
        replace(r, timing="none", prefill_s=0.0, decode_s=0.0, drafter_setup_s=0.0, wall_s=0.0)
        for r in RECORDS
    ]
    jsonl.rewrite_jsonl(run / CASES, map(CaseRecord.to_json, untimed))
    with pytest.raises(ConfigurationError, match="replay without times"):
        spec_bench.main(["export", str(run), out, "--no-text"])
    with pytest.raises(ConfigurationError, match="is not a file"):
        spec_bench.main(["import", out, "pld=missing.jsonl", "--model", "toy"])
    path = tmp_path / "pld.jsonl"
    jsonl.rewrite_jsonl(path, files()["pld"])
    with pytest.raises(ConfigurationError, match="not one of the labels pld"):
        spec_bench.main(["import", out, str(path), "--model", "toy", "--baseline", "ar"])
    with pytest.raises(OutputRefused, match="not empty"):
        spec_bench.main(["import", str(tmp_path), str(path), "--model", "toy"])
    jsonl.rewrite_jsonl(path, files()["pld"] * 2)
    with pytest.raises(AnswerError, match="more than once: 200, 81"):
        spec_bench.main(["import", out, str(path), "--model", "toy"])
