"""Committed records in, byte-identical tables out.

After a change that is meant to move a number or a word, look at the difference that

    python -m analysis.tables tests/golden/records --pairs -o tests/golden/tables

makes, and commit it together with the change.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from analysis import tables
from analysis.load import load_runs

HERE = Path(__file__).parent


def test_the_records_are_what_their_generator_writes(tmp_path):
    runpy.run_path(str(HERE / "make_records.py"))["write"](tmp_path)
    for name in ("cases.jsonl", "manifest.json", "DONE"):
        committed = HERE / "records" / "synthetic" / name
        assert (tmp_path / name).read_bytes() == committed.read_bytes(), name


def test_the_fixture_says_that_it_is_made_up():
    (run,) = load_runs([HERE / "records"])
    assert run.synthetic
    assert len(run.records) >= 200


@pytest.mark.parametrize("name", ["tables.md", "tables.csv", "tables.tex"])
def test_tables_are_byte_identical(name, tmp_path, capsys):
    code = tables.main([str(HERE / "records"), "--pairs", "-o", str(tmp_path)])
    assert code == 0
    assert str(tmp_path / name) in capsys.readouterr().out
    assert (tmp_path / name).read_bytes() == (HERE / "tables" / name).read_bytes()
