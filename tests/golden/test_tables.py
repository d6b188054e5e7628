"""Committed records in, byte-identical tables out: all as CSV, one as Markdown and LaTeX too.

After a change that is meant to move a number or a word, look at the difference that

    python -m analysis.tables tests/golden/records --pairs -o tests/golden/tables
    python -m analysis.tables tests/golden/experiments --csv -o tests/golden/artifacts

make, and commit it together with the change.
"""

import runpy
from pathlib import Path

import pytest

from analysis import tables
from analysis.papers import REPRODUCTIONS
from analysis.runs.load import load_runs

HERE = Path(__file__).parent


def test_the_records_are_what_their_generator_writes(tmp_path):
    runpy.run_path(str(HERE / "make_records.py"))["write"](tmp_path)
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    committed = {
        path.relative_to(HERE)
        for folder in ("records", "experiments")
        for path in (HERE / folder).rglob("*")
        if path.is_file()
    }
    assert made == committed
    for path in sorted(made):
        assert (tmp_path / path).read_bytes() == (HERE / path).read_bytes(), path


def test_the_fixtures_say_that_they_are_made_up():
    (run,) = load_runs([HERE / "records"])
    assert len(run.records) >= 200
    assert all(run.synthetic for run in load_runs([HERE]))


@pytest.mark.parametrize("name", ["tables.md", "tables.csv", "tables.tex"])
def test_tables_are_byte_identical(name, tmp_path, capsys):
    code = tables.main([str(HERE / "records"), "--pairs", "-o", str(tmp_path)])
    assert code == 0
    assert str(tmp_path / name) in capsys.readouterr().out
    assert (tmp_path / name).read_bytes() == (HERE / "tables" / name).read_bytes()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    out = tmp_path_factory.mktemp("artifacts")
    assert tables.main([str(HERE / "experiments"), "-o", str(out)]) == 0
    return out


@pytest.mark.parametrize("artifact", REPRODUCTIONS, ids=lambda artifact: artifact.name)
def test_every_artifact_is_byte_identical(artifact, artifacts):
    made = artifacts / f"{artifact.name}.csv"
    assert made.read_bytes() == (HERE / "artifacts" / made.name).read_bytes()


def test_no_artifact_is_left_over(artifacts):
    made = {path.name for path in artifacts.glob("*.csv")}
    assert made == {path.name for path in (HERE / "artifacts").iterdir()}


@pytest.mark.parametrize("artifact", REPRODUCTIONS, ids=lambda artifact: artifact.name)
def test_every_page_says_what_it_rests_on(artifact, artifacts):
    text = (artifacts / f"{artifact.name}.md").read_text()
    assert "SYNTHETIC RECORDS" in text
    assert "Hardware:" in text
    if artifact.name != "ngrammys_figure1":  # a pass over random ids: no cases, no output
        for words in ("State kept per", "Lossless:", " cases"):
            assert words in text, words
