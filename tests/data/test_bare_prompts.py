"""A user's own prompts, without the columns of a data set."""

import pytest

from specbench.config import compose
from specbench.data import cases
from specbench.errors import DatasetError


def load(path):
    cfg = compose.compose(["dataset=jsonl", f"dataset.path={path}"])
    return cases.load_cases(compose.typed(cfg).dataset)


def test_objects_with_a_prompt_take_the_line_number_as_id(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n\n{"prompt": "two", "category": "qa"}\n')
    found = load(path)
    assert [(c.case_id, c.category, c.turns) for c in found] == [
        ("1", "jsonl", ("one",)),
        ("3", "qa", ("two",)),
    ]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("one\n\ntwo\n")
    assert [(c.case_id, c.turns) for c in load(path)] == [("1", ("one",)), ("3", ("two",))]


@pytest.mark.parametrize("line", ['{"prompt": 3}', '{"prompt": " "}'])
def test_a_bad_prompt_is_named_with_its_line(tmp_path, line):
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "one"}\n' + line + "\n")
    with pytest.raises(DatasetError, match=r"line 2: .*'prompt'"):
        load(path)
