"""Lines of rooms against their budgets."""

import tomllib

from scripts import budgets

SOURCE = '''"""A file.

Of three lines."""

import os  # and a comment


def call():
    """A function."""
    # A comment.
    text = """Not a
docstring."""
    return text


class Empty:
    "Nothing."
'''


def test_code_is_what_is_neither_blank_nor_comment_nor_docstring():
    # import, def, two lines of text, return, class
    assert budgets.code_lines(SOURCE) == 6


def test_a_room_is_counted_with_its_tables_and_the_tests_of_its_name(tmp_path):
    for name in ("specbench/data/__init__.py", "specbench/data/kinds.py", "analysis/claims.yaml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(SOURCE if name.endswith("kinds.py") else "")
    (tmp_path / "analysis" / "claims.yaml").write_text("a: 1\nb: 2\n")
    for name in ("data/test_kinds.py", "contract/driver.py", "conftest.py"):
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\n")
    counts = budgets.rooms(tmp_path)
    assert counts["specbench/data"] == {"source": 17, "code": 6, "tests": 1}
    assert counts["analysis"] == {"source": 2, "code": 0, "tests": 0}
    assert counts["tests"] == {"source": 0, "code": 0, "tests": 2}


def test_what_is_above_its_budget_is_told():
    lines = {"methods": {"source": 105, "code": 106, "tests": 2}, "new": {"source": 1}}
    least = {"methods": {"source": 100, "code": 100, "tests": 9}}
    assert budgets.over_budget(lines, least) == [
        "methods: code must be at most 105 lines, got 106",
        "new: source must be at most 0 lines, got 1",
    ]
    assert tomllib.loads(budgets.to_toml(lines)) == lines
