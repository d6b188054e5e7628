"""Data sets on small files made here, and on the real ones where they are at hand."""

import functools
import gzip
import hashlib
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import DictConfig
from pyarrow import parquet

from runners.launch.prerequisites import recording
from scripts import fetch_data
from specbench.config.compose import compose
from specbench.data.cases import Case, load_cases, prompt_set_hash
from specbench.errors import ConfigurationError, DatasetError
from specbench.results.tasks import MT_BENCH_CATEGORIES, TASKS

DATA = os.environ.get("SPECBENCH_DATA_DIR") or None  # `.ci/run` takes an empty one for none
real_data = pytest.mark.skipif(DATA is None, reason="SPECBENCH_DATA_DIR names no data folder")


def write(path: Path, rows: list[Any]) -> Path:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def question(i: int, category: str = "qa", turns: Any = None) -> dict[str, Any]:
    return {"question_id": i, "category": category, "turns": turns or [f"question {i}"]}


@functools.cache
def dataset(name: str, *overrides: str) -> DictConfig:
    """Compose a node that no test changes; that is most of a test's time."""
    return compose([f"dataset={name}", *overrides]).dataset


def load(path: Path, *overrides: str) -> list[Case]:
    config = dataset("jsonl", *overrides).copy()
    config.path = str(path)
    return load_cases(config)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Ten questions of each of three tasks, one task after the other; MT-Bench's by category."""
    rows = [question(i, sorted(MT_BENCH_CATEGORIES)[i % 8], [f"a{i}", f"b{i}"]) for i in range(10)]
    rows += [question(i, "qa") for i in range(10, 20)]
    rows += [question(i, "rag") for i in range(20, 30)]
    return write(tmp_path / "mixed.jsonl", rows)


def test_demo_has_two_prompts_a_task_and_needs_nothing():
    cases = load_cases(compose().dataset)
    assert Counter(case.task for case in cases) == dict.fromkeys(TASKS, 2)
    assert sum(len(case.turns) for case in cases) == 14
    assert len({case.case_id for case in cases}) == 12


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"question_id": 1, "category": "qa"', "not JSON"),
        ("[1, 2]", "not a JSON object but a list"),
        ("{}", "'question_id' is missing"),
        ({"question_id": 1, "category": "qa"}, "'turns' is missing"),
        ({"question_id": 1, "category": "qa", "turn": ["x"]}, "nearest is 'turn'"),
        (question(1) | {"turns": "x"}, "a list of texts"),
        (question(1) | {"turns": ["x", "  "]}, "turn 1"),
        (question(1) | {"category": None}, "category"),
        (question(1) | {"question_id": None}, "id must be"),
        (question(1, "overall"), "rename this category"),
        (question(0), "line 1 has the id '0' already"),
        ('{"question_id": ' + "1" * 5000 + "}", "digits"),
        (question(1) | {"question_id": "\udc00"}, "half a character"),
        ({"promt": "hi"}, "did you mean 'prompt'"),
        ({"prompt": 3}, "turn 0 in 'prompt'"),
        ({"prompt": " "}, "turn 0 in 'prompt'"),
    ],
)
def test_malformed_line(tmp_path, line, reason):
    path = write(tmp_path / "bad.jsonl", [question(0), line, question(2)])
    with pytest.raises(DatasetError) as caught:
        load(path)
    assert caught.value.exit_code == 2
    assert f"{path}, line 2: " in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.txt", "mine.jsonl.gz", "mine.txt.gz"])
def test_bare_prompts_have_the_number_of_their_line_and_no_byte_order_mark(tmp_path, name):
    """Concatenated files have a mark each, and one line may be a mark alone."""
    mark, questions = "\ufeff", ["why", "", "how", "", "a\ufeffb"]
    if "json" in name:
        questions = [text and json.dumps({"prompt": text}) for text in questions]
    path, packed = tmp_path / name, name.endswith(".gz")
    content = "\r\n".join(mark + text for text in questions).encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    turns = {case.case_id: case.turns for case in load(path)}
    assert turns == {"1": ("why",), "3": ("how",), "5": ("a\ufeffb",)}
    path.write_bytes(path.read_bytes()[:-12] if packed else content + b"\n\xff\xfe\n")
    with pytest.raises(DatasetError, match="not a whole gzip" if packed else "line 6: not UTF-8"):
        load(path)


def test_a_bare_prompt_may_have_a_category_and_an_id(tmp_path):
    rows = [{"prompt": "one"}, {"prompt": "two", "category": "qa", "question_id": "b"}]
    assert load(write(tmp_path / "mine.jsonl", rows)) == [
        Case("1", "jsonl", "jsonl", ("one",)),
        Case("b", "qa", "qa", ("two",)),
    ]


@pytest.mark.parametrize(
    ("typed", "folder", "parts"),
    [
        (["specbench"], None, ["spec_bench.jsonl", "data_dir=FOLDER", "fetch_data.py specbench"]),
        (["gsm8k"], "nope", ["nope is not a folder"]),
        (["jsonl", "dataset.path=/nope.jsonl"], None, ["dataset.path=/nope.jsonl is not a file"]),
        (["jsonl"], None, ["Type dataset.path=FILE"]),
        (["gsm8k"], None, ["openai/gsm8k", "no route to host", "gsm8k.jsonl", "data_dir=FOLDER"]),
        (
            ["gsm8k", "dataset.prompt_form=card"],
            "",
            ["gsm8k_shots.jsonl", "data_dir=FOLDER", "fetch_data.py gsm8k", "form=default"],
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(tmp_path, monkeypatch, typed, folder, parts):
    hub(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(DatasetError) as caught:
        load_cases(dataset(*typed), None if folder is None else tmp_path / folder)
    assert all(part in str(caught.value) for part in parts)


class FakeHub:
    """Stands for the ``datasets`` library; remembers how it was called."""

    def __init__(self, rows: list[dict[str, Any]] | Exception) -> None:
        self.rows, self.calls = rows, []

    def load_dataset(self, id_: str, **kwargs: Any) -> list[dict[str, Any]]:
        self.calls.append((id_, kwargs))
        if isinstance(self.rows, Exception):
            raise self.rows
        return self.rows


def hub(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]] | Exception) -> FakeHub:
    fake = FakeHub(rows)
    module = types.SimpleNamespace(load_dataset=fake.load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return fake


def test_hub_is_asked_as_pinned_with_its_own_columns(monkeypatch):
    row = {"prompt_id": 81, "prompt": ["a", "b"], "category": "writing", "x": 1}
    fake = hub(monkeypatch, [row])
    cases = load_cases(dataset("mtbench"))
    assert cases == [Case("81", "writing", "mt_bench", ("a", "b"))]
    assert fake.calls == [
        ("HuggingFaceH4/mt_bench_prompts", {"name": None, "split": "train", "revision": "main"})
    ]


def test_local_file_wins_over_the_hub(tmp_path, monkeypatch):
    fake = hub(monkeypatch, RuntimeError("not to be asked"))
    write(tmp_path / "gsm8k.jsonl", [{"question": "a", "answer": "b"}])
    assert len(load_cases(dataset("gsm8k"), tmp_path)) == 1
    assert fake.calls == []


def test_folders_of_parquet_files_as_the_real_library_reads_them(tmp_path, monkeypatch):
    """The layout of the hub's own conversion: <config>/<split>/0000.parquet."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for config in ("bn", "de"):
        folder = tmp_path / "repo" / config / "test"
        folder.mkdir(parents=True)
        rows = [{"question": f"{config}{i}", "answer_number": i} for i in range(3)]
        parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "0000.parquet")
    cfg = compose(
        ["dataset=mgsm", f"dataset.hub.id={tmp_path / 'repo'}", "dataset.hub.configs=[bn,de]",
         "dataset.hub.rows_per_config=2"]
    )  # fmt: skip
    cases = {case.case_id: case.turns[0] for case in load_cases(cfg.dataset)}
    assert cases == {"1": "bn0", "2": "bn1", "3": "de0", "4": "de1"}


SHOTS = [{"question": "1 + 1?", "answer": "2."}, {"question": "{2} + 2?", "answer": "4."}]
HEAD = 'def f(x: int) -> int:\n    """{x} [0]"""\n'
GSM8K = {"question": "3 + 3?", "answer": "#### 6"}
MGSM = {"question_id": 0, "question": "3 + 3?", "category": "en", "answer": 6}
HUMANEVAL = {"task_id": "HumanEval/0", "prompt": HEAD}
MATH = {"unique_id": "a/1", "problem": "{x}^2?", "subject": "Algebra", "level": 1, "answer": "4"}
AIME = {"id": 60, "problem": "3 + 3?", "answer": "006"}
CONTEST = {"question_id": "1_A", "question_content": "Sum.", "platform": "atcoder"}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
MBPP = {"task_id": 11, "text": "Do it. ", "test_list": ["assert f(1)", "assert g"], "code": "x"}


@pytest.mark.parametrize(
    ("name", "form", "row", "prompt"),
    [
        ("gsm8k", "default", GSM8K, "3 + 3?"),
        ("gsm8k", "card", GSM8K, "Q: 1 + 1?\nA: 2.\n\nQ: {2} + 2?\nA: 4.\n\nQ: 3 + 3?\nA:"),
        ("mgsm", "default", MGSM, "3 + 3?"),
        ("mgsm", "card", MGSM, "Question: 3 + 3?\n\nAnswer:"),
        ("humaneval", "default", HUMANEVAL, f"the whole function.\n\n```python\n{HEAD}```"),
        ("humaneval", "raw", HUMANEVAL, HEAD),
        ("humaneval", "card", HUMANEVAL, HEAD.strip()),
        ("mbpp", "default", MBPP, "pass these tests:\n\nassert f(1)\nassert g"),
        ("mbpp", "card", MBPP, "Do it."),
        (
            "mbpp_sanitized",
            "default",
            MBPP | {"prompt": "Do."},
            "these tests:\n\nassert f(1)\nassert g",
        ),
        ("math500", "default", MATH, "{x}^2?"),
        ("math500", "boxed", MATH, "{x}^2?" + BOXED),
        ("aime24", "boxed", AIME, "3 + 3?" + BOXED),
        ("aime25", "default", AIME | {"problem_idx": 1}, "3 + 3?"),
        ("livecodebench", "default", CONTEST | {"starter_code": "class S:"}, "Sum.\n\nclass S:"),
        ("livecodebench", "default", CONTEST | {"starter_code": ""}, "Sum."),
        ("alpaca_eval", "default", {"instruction": "Go.", "dataset": "koala"}, "Go."),
        ("alpaca", "default", {"instruction": "Go.", "input": "x"}, "Go."),
        ("alpaca", "with_input", {"instruction": "Go.", "input": "x"}, "Go.\n\nx"),
        (
            "mbpp",
            "token_recycling",
            MBPP,
            'for this problem:\n```python\n"""\nDo it. \nassert f(1)\n"""\n\n```',
        ),
    ],
)
def test_forms_of_prompts(name, form, row, prompt, tmp_path):
    config = dataset(name, f"dataset.prompt_form={form}")
    write(tmp_path / config.file, [row])
    write(tmp_path / "gsm8k_shots.jsonl", SHOTS)
    (case,) = load_cases(config, tmp_path)
    assert case.turns[0].endswith(prompt)
    assert case.turns[0] == prompt or not config.raw
    assert config.raw == (form in ("card", "raw"))


def speed_file(folder: Path, turns: list[str]) -> None:
    """A part of SPEED-Bench, where its authors' script writes it."""
    (folder / "speed/qualitative").mkdir(parents=True)
    rows = [
        {"question_id": f"{c}{i}", "category": c, "turns": turns, "multiturn": True}
        for c in ("coding", "rag")
        for i in range(3)
    ]
    table = pyarrow.Table.from_pylist(rows)
    parquet.write_table(table, folder / "speed/qualitative/test.parquet")


def test_speed_bench_is_read_as_it_was_resolved_and_refused_as_it_was_not(tmp_path):
    speed_file(tmp_path / "whole", ["a", "b"])
    cases = load_cases(dataset("speed", "dataset.limit=2"), tmp_path / "whole")
    assert [(c.case_id, c.turns) for c in cases] == [("coding1", ("a", "b")), ("rag1", ("a", "b"))]
    speed_file(tmp_path / "raw", ["a", "FULL BENCHMARK DATA SHOULD BE FETCHED FROM ITS SOURCE"])
    with pytest.raises(
        DatasetError, match=r"line 1: question 'coding0' .*conf/dataset/speed\.yaml"
    ):
        load_cases(dataset("speed"), tmp_path / "raw")
    (tmp_path / "raw/speed/qualitative/test.parquet").write_bytes(b"PAR1")
    with pytest.raises(DatasetError, match="not a parquet file"):
        load_cases(dataset("speed"), tmp_path / "raw")


def test_raw_files_of_the_hub_are_read_without_what_is_not_kept(tmp_path, monkeypatch):
    secret = CONTEST | {"starter_code": "", "difficulty": "easy", "private_test_cases": "x" * 99}
    fake = hub(monkeypatch, [secret])
    assert fetch_data.main(["livecodebench", "--out", str(tmp_path)]) == 0
    (call,) = fake.calls
    assert call[0] == "json" and call[1]["data_files"][1].endswith(
        "@0fe84c3912ea0c4d4a78037083943e8f0c4dd505/test2.jsonl"
    )
    assert "private" not in (tmp_path / "livecodebench.jsonl").read_text()
    (case,) = load_cases(dataset("livecodebench"), tmp_path)
    assert (case.case_id, case.category, case.task) == ("1_A", "atcoder", "code")


def test_a_hashed_sample_is_that_of_seed_and_id_alone(tmp_path):
    """First by SHA-256 of "1729:id", in the order of the file."""
    ids = sorted(range(1, 9), key=lambda i: hashlib.sha256(f"1729:{i}".encode()).hexdigest())
    for rows in (range(1, 9), range(8, 0, -1)):
        path = write(tmp_path / "q.jsonl", [question(i) for i in rows])
        cases = load(path, "dataset.sample=hashed", "dataset.limit=3")
        assert [int(case.case_id) for case in cases] == [i for i in rows if i in ids[:3]]
    others = load(path, "dataset.sample=hashed", "dataset.limit=3", "dataset.sample_seed=1")
    assert others != cases


def test_rows_are_kept_by_a_column_or_by_the_number_of_their_line(tmp_path):
    write(tmp_path / "mbpp.jsonl", [MBPP | {"task_id": i} for i in (10, 11, 510, 511)])
    assert [case.case_id for case in load_cases(dataset("mbpp"), tmp_path)] == ["11", "510"]
    write(tmp_path / "gsm8k.jsonl", [GSM8K] * 20)
    logs = compose(["experiment=card_figure6", "dataset.limit=null"]).dataset
    assert [case.case_id for case in load_cases(logs, tmp_path)] == ["11", "12", "13", "14", "15"]


@pytest.mark.parametrize(
    ("name", "form", "row", "message"),
    [
        ("gsm8k", "default", {"query": "a", "answer": "b"}, "the column 'question' is missing"),
        ("mbpp", "token_recycling", MBPP | {"test_list": []}, "the prompt cannot be built"),
        ("humaneval", "card", {"task_id": "a", "prompt": " "}, "the prompt built from it is empty"),
    ],
)
def test_a_row_that_makes_no_prompt_is_named(tmp_path, name, form, row, message):
    write(tmp_path / f"{name}.jsonl", [row])
    with pytest.raises(DatasetError, match=f"line 1: {message}"):
        load_cases(dataset(name, f"dataset.prompt_form={form}"), tmp_path)


def test_tasks_and_a_limit_choose_among_the_questions(mixed):
    assert {c.task for c in load(mixed, "dataset.tasks=[qa,rag]")} == {"qa", "rag"}
    assert {c.category for c in load(mixed, "dataset.tasks=[coding]")} == {"coding"}
    assert len(load(mixed, "dataset.tasks=[mt_bench]")) == 10
    assert [c.case_id for c in load(mixed, "dataset.limit=4")] == ["0", "1", "2", "3"]
    assert len(load(mixed, "dataset.limit=99")) == 30
    with pytest.raises(ConfigurationError, match="'mt_bench'"):
        load(mixed, "dataset.tasks=[mtbench]")
    with pytest.raises(DatasetError, match="leaves no case"):
        load(mixed, "dataset.tasks=[]")
    once = load(mixed, "dataset.shuffle=3")
    assert set(once) == set(load(mixed))
    assert once not in (load(mixed), load(mixed, "dataset.shuffle=4"))
    assert load(mixed, "dataset.shuffle=3", "dataset.limit=5") == once[:5]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    limit=st.integers(1, 40),
    shuffle=st.sampled_from([None, 1, 2]),
    order=st.sampled_from(["file", "interleaved"]),
)
def test_a_sample_is_even_over_tasks_and_spread_within_each(sizes, limit, shuffle, order, tmp_path):
    rows = [question(10 * i + k, "abcd"[i]) for i, size in enumerate(sizes) for k in range(size)]
    config = dataset("jsonl", "dataset.sample=stratified").copy()
    config.path, config.limit = str(write(tmp_path / "x.jsonl", rows)), limit
    config.shuffle, config.order = shuffle, order
    cases = load_cases(config)
    assert load_cases(config) == cases
    ids = [int(case.case_id) for case in cases]
    assert len(set(ids)) == len(ids) == min(limit, sum(sizes))
    if shuffle is None and order == "file":
        assert ids == sorted(ids)
    counts = [sum(i // 10 == task for i in ids) for task in range(len(sizes))]
    short = [count for count, size in zip(counts, sizes, strict=True) if count < size]
    assert not short or max(counts) - min(short) <= 1
    for task, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        # In each of `count` equal parts lies one, at its middle.
        positions = sorted(i % 10 for i in ids if i // 10 == task)
        assert all(k * size // count <= position < -(-(k + 1) * size // count)
                   for k, position in enumerate(positions))  # fmt: skip


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), [0, 10, 20, 1, 11, 21]),
        # What a method learns from case to case goes by the data set's order.
        (("state_scope=paper",), [0, 1, 2, 3, 4, 5]),
        (("state_scope=run",), [0, 1, 2, 3, 4, 5]),
        (("state_scope=paper", "dataset.order=interleaved"), [0, 10, 20, 1, 11, 21]),
        (("dataset.order=file",), [0, 1, 2, 3, 4, 5]),
        # The limit chooses the questions, whatever their order.
        (("dataset.limit=5",), [0, 1, 2, 3, 4]),
        # A task of two among ten: evenly spread.
        (("dataset.limit=12",), [0, 1, 2, 10, 3, 4]),
    ],
)
def test_tasks_are_interleaved_unless_methods_learn_from_case_to_case(mixed, typed, expected):
    ids = [int(case.case_id) for case in load(mixed, *typed)]
    assert ids[: len(expected)] == expected
    assert sorted(ids) == list(range(len(ids)))


def test_a_recording_has_the_order_that_a_replay_with_lasting_state_needs():
    for scope in ("prompt", "paper"):
        replay = compose(["runner=replay_recorded", f"state_scope={scope}"])
        assert recording(replay).dataset.order == "file"


def test_prompt_set_hash(mixed):
    cases = load(mixed)
    assert prompt_set_hash(cases) == prompt_set_hash(load(mixed))
    assert prompt_set_hash(cases[:-1]) != prompt_set_hash(cases)
    assert prompt_set_hash(cases[::-1]) != prompt_set_hash(cases)
    # The reference is not shown to a model.
    other = [Case(c.case_id, c.category, c.task, c.turns, reference="x") for c in cases]
    assert prompt_set_hash(other) == prompt_set_hash(cases)


def test_fetched_file_gives_the_same_cases_as_the_hub(tmp_path, monkeypatch):
    hub(monkeypatch, [{"prompt_id": 81, "prompt": ["a", "b"], "category": "writing"}])
    config = dataset("mtbench")
    from_hub = load_cases(config)
    assert fetch_data.main(["mtbench", "--out", str(tmp_path)]) == 0
    hub(monkeypatch, RuntimeError("not to be asked"))
    assert load_cases(config, tmp_path) == from_hub
    assert [path.name for path in tmp_path.iterdir()] == ["mt_bench.jsonl"]


def test_gsm8k_is_fetched_with_its_worked_examples(tmp_path, monkeypatch):
    hub(monkeypatch, [{"question": "3 + 3?", "answer": "6"}])
    samples = [{"question": f"{i}?", "target": f"The answer is {i}."} for i in range(8)]
    upstream = tmp_path / "upstream.yaml"
    upstream.write_text(json.dumps({"fewshot_config": {"samples": samples}}))
    monkeypatch.setitem(fetch_data._URLS, "gsm8k_shots", upstream.as_uri())
    assert fetch_data.main(["gsm8k", "--out", str(tmp_path)]) == 0
    config = dataset("gsm8k", "dataset.prompt_form=card")
    (case,) = load_cases(config, tmp_path)
    questions = [part.partition("?")[0] for part in case.turns[0].split("Q: ")[1:]]
    assert questions == [*"13245607", "3 + 3"], "in the order of CARD's code"


def test_fetching_a_malformed_file_leaves_nothing(tmp_path, monkeypatch, capsys):
    upstream = write(tmp_path / "upstream", [question(1), {"question_id": 2}])
    monkeypatch.setitem(fetch_data._URLS, "specbench", upstream.as_uri())
    assert fetch_data.main(["specbench", "--out", str(tmp_path / "data")]) == 2
    assert "line 2" in capsys.readouterr().err
    assert list((tmp_path / "data").iterdir()) == []
    write(upstream, [question(1)])
    assert fetch_data.main(["specbench", "--out", str(tmp_path / "data")]) == 0
    assert "changed upstream" in capsys.readouterr().err


@real_data
@pytest.mark.parametrize(
    ("name", "cases", "first", "last"),
    [
        ("specbench", 480, "81", "560"),
        ("mtbench", 80, "81", "160"),
        ("gsm8k", 1319, "1", "1319"),
        ("mbpp", 500, "11", "510"),
        ("humaneval", 164, "HumanEval/0", "HumanEval/163"),
        ("mgsm", 110, "0", "109"),
    ],
)
def test_real_file(name, cases, first, last):
    loaded = load_cases(dataset(name), DATA)
    assert len(loaded) == cases
    assert (loaded[0].case_id, loaded[-1].case_id) == (first, last)
