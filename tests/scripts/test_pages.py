"""Tables of the pages are written from the kept records."""

import json
import sys

import pytest

from scripts import pages
from specbench.paths import PROJECT

RECORD = {
    "date": "2026-11-26",
    "environment": {"git": {"commit": "0123456789abcdef"}},
    "rows": [
        {
            "label": "pld",
            "speedup": 1.234,
            "speedup_ci": [1.1, 1.5],
            "step_s": 0.0125,
            "step_s_ci": [0.012, 0.013],
            "bug": 0,
        },
        {"label": "sam", "speedup": 0.5, "speedup_ci": [0.4, 0.6], "step_s": 0.02, "bug": 1},
    ],
}
TABLE = """<!-- from: record.json
columns: speedup | step_s | -
rows: pld | sam -->

| method | speedup | ms | words |
| --- | --- | --- | --- |
| PLD | 9.99 [1.00, 2.00] | 12.5 | 7.7 |
| SAM | 0.50 [0.40, 0.60] | 13.0 | 8.8 |
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_numbers_intervals_and_units_are_the_record_s_with_date_and_commit_below(root):
    made, lost = pages.written(TABLE, root)
    assert lost == []
    assert (
        "| PLD | 1.23 [1.10, 1.50] | 12.5 | 7.7 |\n| SAM | 0.50 [0.40, 0.60] | 20.0 | 8.8 |" in made
    )
    assert made.endswith("\n\n*Measured 2026-11-26, commit 01234567.*\n")
    assert pages.written(made, root) == (made, [])


@pytest.mark.parametrize("words", ["speedup | jump_s | -", "speedup | step_s bug | -"])
def test_a_cell_whose_words_lead_nowhere_is_named(root, words):
    _, lost = pages.written(TABLE.replace("speedup | step_s | -", words), root)
    column = words.split(" | ")[1]
    assert lost == [f"pld | {column}: 12.5", f"sam | {column}: 13.0"]


def test_an_interval_has_the_unit_of_its_number(root):
    page = TABLE.replace("| 12.5 |", "| 12.5 [11.0, 14.0] |")
    assert "| 12.5 [12.0, 13.0] | 7.7 |" in pages.written(page, root)[0]


@pytest.mark.parametrize(("typed", "written"), [("0.00", "0.01"), ("0.9", None), ("500.0", None)])
def test_a_number_far_from_its_record_is_no_unit(root, typed, written):
    made, lost = pages.written(TABLE.replace("| 12.5 |", f"| {typed} |"), root)
    assert lost == ([] if written else [f"pld | step_s: {typed}"])
    assert f"| {written or typed} | 7.7 |" in made


def test_the_pages_are_what_their_records_say(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    assert pages.main() == 0, capsys.readouterr().out


def test_a_row_typed_into_the_table_of_all_methods_is_found():
    page = (PROJECT / "docs/measurements/cpu-epyc-2core.md").read_text(encoding="utf-8")
    first = page.index("<!-- made of ")
    typed = page[:first] + page[first:].replace("| `union` |", "| `onion` |", 1)
    assert typed != page == pages.written(typed)[0]
