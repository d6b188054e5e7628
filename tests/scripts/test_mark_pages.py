"""Pages say which of their numbers were measured with older code, and stop saying it."""

import json

import pytest

from scripts.mark_pages import SENTENCE, marked

TABLE = "<!-- from: {record}\ncolumns: a\nrows: b -->\n\n| x | a |\n| --- | --- |\n| b | 1 |\n"
TEXT = "<!-- from: {record}\nnumbers: a -->\nIt is 1.0\nor 2.0.\n"
PAGE = f"# Page\n\n{TABLE}\nText.\n\n{TEXT}\n![p](p.png)\n\nRecord: `{{record}}`.\n"


@pytest.fixture
def record(tmp_path):
    """Writes a record measured with some code; returns the page that shows it."""

    def write(name, noted):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        if path.suffix in (".csv", ".md"):
            path.write_text(noted if "\n" in noted else "a\n1\n")
            path.with_suffix(".md").write_text(f"Code: commit 0123456789{noted}.")
        else:
            path.write_text(json.dumps(noted))
        shown = name.removesuffix("/manifest.json")
        return lambda page=PAGE, code="1" * 16: marked(page.format(record=shown), code, tmp_path)

    return write


@pytest.mark.parametrize(
    ("name", "noted"),
    [
        ("run/manifest.json", {"code": "1" * 16}),
        ("bench.json", {"environment": {"code": "1" * 16}}),
        ("table.csv", f" (code {'1' * 16})"),
        ("table.md", f" (code {'1' * 16})"),
        ("rivals.csv", f"a,code\n1,commit 0123456789 (code {'1' * 16})\n"),
    ],
)
def test_a_page_is_marked_where_the_code_has_moved_on(record, name, noted):
    page = record(name, noted)
    assert SENTENCE not in page()
    older = page(code="2" * 16)
    assert older.count(SENTENCE) == 3
    assert f"| b | 1 |\n\n{SENTENCE}\n\nText." in older
    assert page(older, code="2" * 16) == older
    assert page(older) == page()


@pytest.mark.parametrize(
    ("name", "noted"), [("run/manifest.json", {}), ("rows.json", {"rows": []}), ("t.csv", "")]
)
def test_what_does_not_say_its_code_is_older(record, name, noted):
    assert record(name, noted)().count(SENTENCE) == 3
