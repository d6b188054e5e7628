"""Data sets on small files made here, and on the real ones where they are at hand."""

import functools
import gzip
import json
import os
import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from omegaconf import DictConfig
from pyarrow import parquet

from runners.launch.prerequisites import recording
from scripts import fetch_data
from specbench.config.compose import compose
from specbench.data.cases import Case, load_cases, prompt_set_hash
from specbench.errors import ConfigurationError, DatasetError
from specbench.paths import CONF_DIR
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
    """A node that no test changes; composing it is most of a test's time."""
    return compose([f"dataset={name}", *overrides]).dataset


def load(path: Path, *overrides: str) -> list[Case]:
    own = dataset("jsonl", *overrides).copy()
    own.path = str(path)
    return load_cases(own)


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
    words = [len(c.turns[0].split()) for c in cases if c.task == "summarization"]
    assert all(250 <= n <= 400 for n in words)
    assert all("Passage 2" in c.turns[0] for c in cases if c.task == "rag")


def test_columns_turns_and_tasks(mixed):
    cases = load(mixed, "dataset.order=file")
    assert len(cases) == 30
    assert cases[0] == Case("0", "coding", "mt_bench", ("a0", "b0"))
    assert cases[10] == Case("10", "qa", "qa", ("question 10",))


@pytest.mark.parametrize(
    ("line", "number", "reason"),
    [
        ('{"question_id": 1, "category": "qa"', 2, "not JSON"),
        ("[1, 2]", 2, "not a JSON object but a list"),
        ({"question_id": 1, "category": "qa"}, 2, "'turns' is missing"),
        ({"question_id": 1, "category": "qa", "turn": ["x"]}, 2, "nearest is 'turn'"),
        ({"category": "qa", "turns": ["x"]}, 2, "'question_id' is missing"),
        (question(1) | {"turns": "x"}, 2, "a list of texts"),
        (question(1) | {"turns": []}, 2, "a list of texts"),
        (question(1) | {"turns": ["x", 3]}, 2, "turn 1"),
        (question(1) | {"turns": ["x", "  "]}, 2, "turn 1"),
        (question(1) | {"category": None}, 2, "category"),
        (question(1) | {"question_id": None}, 2, "id must be"),
        (question(1, "overall"), 2, "rename this category"),
        (question(0), 2, "line 1 has the id '0' already"),
        ('{"turns": ' + "[" * 100_000 + "]" * 100_000 + "}", 2, "nested too deeply"),
        ('{"question_id": ' + "1" * 5000 + "}", 2, "digits"),
        (question(1) | {"turns": ["a \ud83d b"]}, 2, "half a character"),
        (question(1) | {"question_id": "\udc00"}, 2, "half a character"),
        (question(1) | {"category": "\udc00"}, 2, "half a character"),
        (question(1) | {"score": float("nan")}, 2, "NaN is not a JSON number"),
    ],
)
def test_malformed_line(tmp_path, line, number, reason):
    path = write(tmp_path / "bad.jsonl", [question(0), line, question(2)])
    with pytest.raises(DatasetError) as caught:
        load(path)
    assert caught.value.exit_code == 2
    assert f"{path}, line {number}: " in str(caught.value)
    assert reason in str(caught.value)


def test_bytes_that_are_no_text_and_bytes_that_are_harmless(tmp_path):
    path, line = tmp_path / "x.jsonl", json.dumps(question(7)).encode()
    path.write_bytes(line + b"\n\xff\xfe\n")
    with pytest.raises(DatasetError, match="line 2: not UTF-8"):
        load(path)
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\n\n\n")
    assert [case.case_id for case in load(path)] == ["7"]


@pytest.mark.parametrize("name", ["mine.jsonl", "mine.txt", "mine.jsonl.gz", "mine.txt.gz"])
def test_byte_order_marks_are_no_part_of_a_question(tmp_path, name):
    """Of files that were put together: each brings its own, and one may be a mark alone."""
    mark, questions = "\ufeff", ["why", "", "how", "", "a\ufeffb"]
    if "json" in name:
        questions = [text and json.dumps({"prompt": text}) for text in questions]
    write = gzip.open if name.endswith(".gz") else open
    with write(tmp_path / name, "wb") as file:
        file.write("\r\n".join(mark + text for text in questions).encode())
    found = {case.case_id: case.turns for case in load(tmp_path / name)}
    assert found == {"1": ("why",), "3": ("how",), "5": ("a\ufeffb",)}


def test_line_number_is_the_id_where_there_is_none(tmp_path):
    rows = ['{"question": "a", "answer": "1"}', "", '{"question": "b", "answer": "2"}']
    write(tmp_path / "gsm8k.jsonl", rows)
    cases = load_cases(dataset("gsm8k"), tmp_path)
    assert [(c.case_id, c.task, c.turns, c.reference) for c in cases] == [
        ("1", "math_reasoning", ("a",), "1"),
        ("3", "math_reasoning", ("b",), "2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (
            "mine.jsonl",
            '{"prompt": "one"}\n\n{"prompt": "two", "category": "qa"}\n',
            [("1", "jsonl", ("one",)), ("3", "qa", ("two",))],
        ),
        ("mine.txt", "one\n\ntwo\n", [("1", "jsonl", ("one",)), ("3", "jsonl", ("two",))]),
    ],
)
def test_bare_prompts_take_the_line_number_as_id(tmp_path, name, content, expected):
    path = tmp_path / name
    path.write_text(content)
    assert [(case.case_id, case.category, case.turns) for case in load(path)] == expected


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"prompt": " "}'])
def test_a_bad_prompt_is_named_with_its_line(tmp_path, line):
    with pytest.raises(DatasetError, match=r"line 2: .*'prompt'"):
        load(write(tmp_path / "mine.jsonl", ['{"prompt": "one"}', line]))


# --- where the file is ----------------------------------------------------------------------------


def test_missing_file_says_what_to_place_where():
    with pytest.raises(DatasetError) as caught:
        load_cases(dataset("specbench"))
    for part in ("spec_bench.jsonl", "data_dir=FOLDER", "scripts/fetch_data.py specbench"):
        assert part in str(caught.value)


def test_missing_data_dir_is_not_passed_over(tmp_path):
    with pytest.raises(DatasetError, match=r"data_dir=.*is not a folder"):
        load_cases(dataset("gsm8k"), tmp_path / "nope")


def test_missing_path(tmp_path):
    with pytest.raises(DatasetError, match=r"dataset\.path=.*is not a file"):
        load(tmp_path / "nope.jsonl")
    with pytest.raises(DatasetError, match=r"Type dataset\.path=FILE"):
        load_cases(dataset("jsonl"))


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
    fake = hub(
        monkeypatch, [{"prompt_id": 81, "prompt": ["a", "b"], "category": "writing", "x": 1}]
    )
    cases = load_cases(dataset("mtbench"))
    assert cases == [Case("81", "writing", "mt_bench", ("a", "b"))]
    assert fake.calls == [
        ("HuggingFaceH4/mt_bench_prompts", {"name": None, "split": "train", "revision": "main"})
    ]


def test_hub_configurations_one_after_the_other(monkeypatch):
    rows = [{"question": f"q{i}", "answer_number": i} for i in range(25)]
    fake = hub(monkeypatch, rows)
    cases = load_cases(dataset("mgsm"))
    assert len(cases) == 110
    assert [case.case_id for case in cases] == [str(i) for i in range(1, 111)]
    assert [call[1]["data_dir"] for call in fake.calls][:2] == ["bn", "de"]


def test_local_file_wins_over_the_hub(tmp_path, monkeypatch):
    fake = hub(monkeypatch, RuntimeError("not to be asked"))
    write(tmp_path / "gsm8k.jsonl", [{"question": "a", "answer": "b"}])
    assert len(load_cases(dataset("gsm8k"), tmp_path)) == 1
    assert fake.calls == []


def test_unreachable_hub(monkeypatch):
    hub(monkeypatch, ConnectionError("no route\nto host"))
    with pytest.raises(DatasetError) as caught:
        load_cases(dataset("gsm8k"))
    for part in ("openai/gsm8k", "no route to host", "gsm8k.jsonl", "data_dir=FOLDER"):
        assert part in str(caught.value)


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
    cases = load_cases(cfg.dataset)
    assert [case.turns[0] for case in cases] == ["bn0", "bn1", "de0", "de1"]


# --- prompt forms ---------------------------------------------------------------------------------


@pytest.fixture
def mbpp(tmp_path: Path) -> Path:
    rows = [
        {"task_id": i, "text": f"Do {i}.", "test_list": [f"assert f({i})", "assert g"], "code": "x"}
        for i in (10, 11, 510, 511)
    ]
    return write(tmp_path / "mbpp.jsonl", rows).parent


def test_mbpp_keeps_the_test_split(mbpp):
    cases = load_cases(dataset("mbpp"), mbpp)
    assert [case.case_id for case in cases] == ["11", "510"]
    assert cases[0].turns[0].endswith("\n\nassert f(11)\nassert g")
    assert {case.task for case in cases} == {"code"}


def test_mbpp_in_token_recyclings_form(mbpp):
    own = dataset("mbpp", "dataset.prompt_form=token_recycling")
    assert load_cases(own, mbpp)[0].turns[0] == (
        'Create a Python script for this problem:\n```python\n"""\nDo 11.\nassert f(11)\n"""\n\n```'
    )


def test_mbpp_in_token_recyclings_own_file_keeps_its_name(tmp_path):
    """As the yamls say; claims stand beside runs by the data set's name."""
    theirs = [question(2, "code", ["Create …"]), question(600, "code", ["Create another …"])]
    path = write(tmp_path / "theirs.jsonl", theirs)
    for home in ("dataset/mbpp.yaml", "experiment/paper/token_recycling_table1_mbpp.yaml"):
        words = (CONF_DIR / home).read_text().split()
        typed = [word for word in words if word.startswith("dataset.")]
        assert "dataset=jsonl" not in words
        cfg = compose(["dataset=mbpp", *(word.replace("FILE", str(path)) for word in typed)])
        cases = load_cases(cfg.dataset)
        assert (cfg.dataset.name, [case.case_id for case in cases]) == ("mbpp", ["2", "600"])
        assert [case.turns for case in cases] == [("Create …",), ("Create another …",)]
        assert {(case.task, case.category) for case in cases} == {("code", "mbpp")}


def test_humaneval_forms(tmp_path):
    head = 'def f(x: int) -> int:\n    """{x} [0]"""\n'
    write(tmp_path / "humaneval.jsonl", [{"task_id": "HumanEval/0", "prompt": head}])
    cases = load_cases(dataset("humaneval"), tmp_path)
    assert cases[0].case_id == "HumanEval/0"
    assert cases[0].turns[0].endswith(f"```python\n{head}```")
    raw = dataset("humaneval", "dataset.prompt_form=raw")
    assert load_cases(raw, tmp_path)[0].turns[0] == head


SHOTS = [{"question": "1 + 1?", "answer": "2."}, {"question": "{2} + 2?", "answer": "4."}]


@pytest.mark.parametrize(
    ("name", "row", "prompt"),
    [
        (
            "gsm8k",
            {"question": "3 + 3?", "answer": "#### 6"},
            "Q: 1 + 1?\nA: 2.\n\nQ: {2} + 2?\nA: 4.\n\nQ: 3 + 3?\nA:",
        ),
        (
            "mgsm",
            {"question_id": 0, "question": "3 + 3?", "category": "en", "answer": 6},
            "Question: 3 + 3?\n\nAnswer:",
        ),
        (
            "humaneval",
            {"task_id": "HumanEval/0", "prompt": "\ndef f():\n    pass\n"},
            "def f():\n    pass",
        ),
        ("mbpp", {"task_id": 11, "text": "Add. ", "test_list": [], "code": ""}, "Add."),
    ],
)
def test_cards_forms_are_its_code_s_and_have_no_chat_template(name, row, prompt, tmp_path):
    own = dataset(name, "dataset.prompt_form=card")
    write(tmp_path / own.file, [row])
    write(tmp_path / "gsm8k_shots.jsonl", SHOTS)
    (case,) = load_cases(own, tmp_path)
    assert case.turns == (prompt,)
    assert own.raw
    assert not dataset(name).raw


@pytest.mark.parametrize("folder", [True, False], ids=["not there", "no data_dir"])
def test_worked_examples_that_are_missing_say_what_to_place(folder, tmp_path):
    write(tmp_path / "gsm8k.jsonl", [{"question": "3 + 3?", "answer": "6"}])
    own = dataset("gsm8k", "dataset.prompt_form=card")
    with pytest.raises(DatasetError) as refused:
        load_cases(own, tmp_path if folder else None)
    for word in ("gsm8k_shots.jsonl", "data_dir=FOLDER", "scripts/fetch_data.py gsm8k"):
        assert word in str(refused.value)
    write(tmp_path / "gsm8k_shots.jsonl", [{"question": "1 + 1?"}])
    with pytest.raises(DatasetError, match=r"gsm8k_shots.jsonl, line 1: the column 'answer'"):
        load_cases(own, tmp_path)


def test_rows_by_line_number(tmp_path):
    write(tmp_path / "gsm8k.jsonl", [{"question": f"{i}?", "answer": ""} for i in range(20)])
    logs = compose(["experiment=card_figure6", "dataset.limit=null"]).dataset
    assert [case.case_id for case in load_cases(logs, tmp_path)] == ["11", "12", "13", "14", "15"]


@pytest.mark.parametrize(
    ("chosen", "row", "said"),
    [
        (("gsm8k",), {"query": "a", "answer": "b"}, "the column 'question' is missing"),
        (
            ("mbpp", "dataset.prompt_form=token_recycling"),
            {"task_id": 11, "text": "x", "test_list": [], "code": ""},
            "the prompt cannot be built",
        ),
    ],
)
def test_a_row_that_makes_no_prompt_is_named(tmp_path, chosen, row, said):
    write(tmp_path / f"{chosen[0]}.jsonl", [row])
    with pytest.raises(DatasetError, match=f"line 1: {said}"):
        load_cases(dataset(*chosen), tmp_path)


# --- selection ------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("limit", [1, 2, 7, 29])
def test_stratified_limit_is_even_over_tasks(mixed, limit):
    cases = load(mixed, f"dataset.limit={limit}", "dataset.sample=stratified", "dataset.order=file")
    assert len(cases) == len({c.case_id for c in cases}) == limit
    counts = Counter(c.task for c in cases)
    assert max(counts.values()) - min(counts.get(t, 0) for t in ("mt_bench", "qa", "rag")) <= 1
    assert [int(c.case_id) for c in cases] == sorted(int(c.case_id) for c in cases)


def test_stratified_limit_is_spread_within_a_task(mixed):
    cases = load(mixed, "dataset.limit=6", "dataset.sample=stratified", "dataset.order=file")
    assert [c.case_id for c in cases] == ["2", "7", "12", "17", "22", "27"]


def test_stratified_limit_where_a_task_is_small(tmp_path):
    rows = [question(0, "rag"), *(question(i, "qa") for i in range(1, 9))]
    path = write(tmp_path / "x.jsonl", rows)
    cases = load(path, "dataset.limit=5", "dataset.sample=stratified")
    assert Counter(c.task for c in cases) == {"rag": 1, "qa": 4}


def test_shuffle_is_seeded_and_before_a_head_limit(mixed):
    once, again = (load(mixed, "dataset.shuffle=3") for _ in range(2))
    assert once == again
    assert once != load(mixed)
    assert set(once) == set(load(mixed))
    assert load(mixed, "dataset.shuffle=4") != once
    assert load(mixed, "dataset.shuffle=3", "dataset.limit=5") == once[:5]


def test_shuffle_mixes_a_stratified_sample_and_keeps_its_questions(mixed):
    sample = ("dataset.limit=12", "dataset.sample=stratified")
    in_order, shuffled = load(mixed, *sample), load(mixed, *sample, "dataset.shuffle=1")
    assert set(shuffled) == set(in_order)
    assert shuffled != in_order


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ((), [0, 10, 20, 1, 11, 21]),
        (("state_scope=turn",), [0, 10, 20, 1, 11, 21]),
        # What a method learns from case to case goes by the data set's order.
        (("state_scope=paper",), [0, 1, 2, 3, 4, 5]),
        (("state_scope=run",), [0, 1, 2, 3, 4, 5]),
        (("state_scope=paper", "dataset.order=interleaved"), [0, 10, 20, 1, 11, 21]),
        (("dataset.order=file",), [0, 1, 2, 3, 4, 5]),
        # The limit chooses the questions, whatever their order.
        (("dataset.limit=5",), [0, 1, 2, 3, 4]),
        (("dataset.limit=13",), [0, 1, 10, 2, 3, 4]),
        # A task of two among ten: evenly spread.
        (("dataset.limit=12",), [0, 1, 2, 10, 3, 4]),
    ],
)
def test_tasks_are_interleaved_unless_methods_learn_from_case_to_case(mixed, typed, expected):
    found = [int(case.case_id) for case in load(mixed, *typed)]
    assert found[: len(expected)] == expected
    assert sorted(found) == list(range(len(found)))


def test_a_recording_has_the_order_that_a_replay_with_lasting_state_needs():
    for scope in ("prompt", "paper"):
        replay = compose(["runner=replay_recorded", f"state_scope={scope}"])
        assert recording(replay).dataset.order == "file"


def test_a_shuffled_order_stays_unless_tasks_are_to_be_interleaved(mixed):
    shuffled = load(mixed, "dataset.shuffle=3")
    mixed_more = load(mixed, "dataset.shuffle=3", "dataset.order=interleaved")
    assert len({c.task for c in shuffled[:3]}) < 3 == len({c.task for c in mixed_more[:3]})
    assert [c for c in mixed_more if c.task == "qa"] == [c for c in shuffled if c.task == "qa"]


def test_prompt_set_hash(mixed):
    cases = load(mixed)
    assert prompt_set_hash(cases) == prompt_set_hash(load(mixed))
    assert prompt_set_hash(cases[:-1]) != prompt_set_hash(cases)
    assert prompt_set_hash(cases[::-1]) != prompt_set_hash(cases)
    # The reference is not shown to a model.
    other = [Case(c.case_id, c.category, c.task, c.turns, reference="x") for c in cases]
    assert prompt_set_hash(other) == prompt_set_hash(cases)


# --- fetching -------------------------------------------------------------------------------------


def test_fetched_file_gives_the_same_cases_as_the_hub(tmp_path, monkeypatch):
    hub(monkeypatch, [{"prompt_id": 81, "prompt": ["a", "b"], "category": "writing"}])
    own = dataset("mtbench")
    from_hub = load_cases(own)
    assert fetch_data.main(["mtbench", "--out", str(tmp_path)]) == 0
    hub(monkeypatch, RuntimeError("not to be asked"))
    assert load_cases(own, tmp_path) == from_hub
    assert [path.name for path in tmp_path.iterdir()] == ["mt_bench.jsonl"]


def test_gsm8k_is_fetched_with_its_worked_examples(tmp_path, monkeypatch):
    hub(monkeypatch, [{"question": "3 + 3?", "answer": "6"}])
    samples = [{"question": f"{i}?", "target": f"The answer is {i}."} for i in range(8)]
    upstream = tmp_path / "upstream.yaml"
    upstream.write_text(json.dumps({"fewshot_config": {"samples": samples}}))
    monkeypatch.setitem(fetch_data._URLS, "gsm8k_shots", upstream.as_uri())
    assert fetch_data.main(["gsm8k", "--out", str(tmp_path)]) == 0
    own = dataset("gsm8k", "dataset.prompt_form=card")
    (case,) = load_cases(own, tmp_path)
    questions = [part.partition("?")[0] for part in case.turns[0].split("Q: ")[1:]]
    assert questions == [*"13245607", "3 + 3"], "in the order of CARD's code"


def test_fetching_an_unknown_or_unreachable_one(tmp_path, monkeypatch, capsys):
    assert fetch_data.main(["specbnch", "--out", str(tmp_path)]) == 2
    assert "'specbench'" in capsys.readouterr().err
    nowhere = (tmp_path / "nowhere").as_uri()
    monkeypatch.setitem(fetch_data._URLS, "specbench", nowhere)
    assert fetch_data.main(["specbench", "--out", str(tmp_path)]) == 2
    assert "spec_bench.jsonl" in capsys.readouterr().err


def test_fetching_a_malformed_file_leaves_nothing(tmp_path, monkeypatch, capsys):
    upstream = write(tmp_path / "upstream", [question(1), {"question_id": 2}])
    monkeypatch.setitem(fetch_data._URLS, "specbench", upstream.as_uri())
    assert fetch_data.main(["specbench", "--out", str(tmp_path / "data")]) == 2
    assert "line 2" in capsys.readouterr().err
    assert list((tmp_path / "data").iterdir()) == []
    write(upstream, [question(1)])
    assert fetch_data.main(["specbench", "--out", str(tmp_path / "data")]) == 0
    assert "changed upstream" in capsys.readouterr().err


# --- the real files -------------------------------------------------------------------------------


@real_data
def test_a_small_sample_takes_every_category_and_language():
    talk = load_cases(dataset("mtbench", "dataset.limit=8"), DATA)
    assert len({case.category for case in talk}) == 8
    # Ten problems of each of eleven languages, one language after the other.
    maths = load_cases(dataset("mgsm", "dataset.limit=11"), DATA)
    assert [int(case.case_id) // 10 for case in maths] == list(range(11))


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


@real_data
def test_real_specbench_sample_is_mixed():
    own = dataset("specbench", "dataset.limit=24")
    cases = load_cases(own, DATA)
    assert Counter(case.task for case in cases) == dict.fromkeys(TASKS, 4)
    assert all(len(case.turns) == (2 if case.task == "mt_bench" else 1) for case in cases)
    whole = load_cases(dataset("specbench"), DATA)
    assert Counter(case.task for case in whole) == dict.fromkeys(TASKS, 80)


@real_data
def test_real_token_recycling_prompts_have_our_form():
    """Where the sanitized edition left the wording as it was, our form gives the same prompt."""
    theirs = {
        row["question_id"]: row["turns"][0]
        for row in map(json.loads, (Path(DATA) / "mbpp_tokenrecycling.jsonl").open())
    }
    own = dataset("mbpp", "dataset.prompt_form=token_recycling", "dataset.rows=null")
    ours = {int(case.case_id): case.turns[0] for case in load_cases(own, DATA)}
    assert set(theirs) <= set(ours)
    assert sum(theirs[i] == ours[i] for i in theirs) > 100


def test_compressed_questions_are_read_and_broken_ones_refused(tmp_path):
    plain = write(tmp_path / "few.jsonl", [question(1), question(2)])
    packed = tmp_path / "few.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert load(packed) == load(plain)
    packed.write_bytes(packed.read_bytes()[:-12])
    with pytest.raises(DatasetError, match="not a whole gzip file"):
        load(packed)
