"""Tables of the pages are written from the kept records."""

import json
import re
import sys

import pytest

from scripts import pages
from specbench.paths import PROJECT
from specbench.results.records import SUMMARY
from specbench.storage.jsonl import read_json

RECORD = {
    "date": "2026-11-26",
    "environment": {"git": {"commit": "0123456789abcdef"}, "hardware": {"cpu": "A CPU"}},
    "rows": [
        {
            "label": "pld",
            "speedup": 1.234,
            "speedup_ci": [1.1, 1.5],
            "step_s": 0.0125,
            "share": 0.256,
            "turns": 12345,
        },
        {"label": "sam", "speedup": 0.5, "speedup_ci": [0.4, 0.6], "step_s": 0.02, "turns": 1},
    ],
}
TABLE = """<!-- table
from: record.json
columns: method | speedup [95 %] = speedup: ci | ms = step_s: ms .1f
rows: prompt lookup = pld | sam -->
<!-- end -->
"""


@pytest.fixture
def root(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    return tmp_path


def test_a_table_is_its_records_with_machine_date_and_commit_below(root):
    page, lost = pages.render(f"before\n\n{TABLE}\nafter\n", root)
    assert lost == []
    assert page.endswith(
        "rows: prompt lookup = pld | sam -->\n\n"
        "| method | speedup [95 %] | ms |\n| --- | --- | --- |\n"
        "| prompt lookup | 1.23 [1.10, 1.50] | 12.5 |\n| `sam` | 0.50 [0.40, 0.60] | 20.0 |\n\n"
        "*Measured on A CPU, 2026-11-26, commit 01234567.*\n\n<!-- end -->\n\nafter\n"
    )
    assert pages.render(page, root) == (page, [])


def test_what_was_typed_into_a_table_is_replaced(root):
    page, _ = pages.render(TABLE, root)
    assert pages.render(page.replace("1.23", "9.99").replace("`sam`", "`ham`"), root)[0] == page


@pytest.mark.parametrize(
    ("column", "shown"),
    [("share: %", "26%"), ("share: .1%", "25.6%"), ("turns: ,d", "12,345"), ("turns", "12345")],
)
def test_a_number_is_shown_as_asked(root, column, shown):
    page = TABLE.replace("step_s: ms .1f", column).replace(" | sam", "")
    assert f"| 1.23 [1.10, 1.50] | {shown} |" in pages.render(page, root)[0]


@pytest.mark.parametrize("keywords", ["jump_s", "speedup turns", "step_s: ci"])
def test_a_cell_whose_words_lead_to_no_number_is_named(root, keywords):
    _, lost = pages.render(TABLE.replace("step_s: ms .1f", keywords), root)
    assert len(lost) == 2
    assert "pld" in lost[0]


def test_words_of_several_numbers_are_no_number(root):
    _, lost = pages.render(
        TABLE.replace("rows: prompt lookup = pld | sam", "rows: all = rows"), root
    )
    assert lost


def test_the_pages_are_what_their_records_say(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pages.py", "--check"])
    assert pages.main() == 0, capsys.readouterr().out


def test_every_method_of_a_run_stands_in_its_table_the_fastest_first():
    summary = read_json(PROJECT / "docs/measurements/cpu-xeon-2core/all_methods" / SUMMARY)
    rows = [row for row in summary["rows"] if row["task"] == "overall"]
    speedups = sorted((row["speedup"] for row in rows if row["label"] != "ar"), reverse=True)
    page = "<!-- table\nfrom: docs/measurements/cpu-xeon-2core/all_methods\ncolumns: method | "
    page += "x = overall speedup: .6f\nrows: * -->\n<!-- end -->\n"
    shown = re.findall(r"^\| `\w+`(?: \(tuned off\))? \| ([\d.]+) \|$", pages.render(page)[0], re.M)
    assert [float(number) for number in shown] == [round(number, 6) for number in speedups]
