"""Committed records in, byte-identical tables out: all as CSV, one as Markdown and LaTeX too.

After a change that is meant to move a number or a word, look at the difference that

    python -m analysis.tables tests/golden/records --pairs -o tests/golden/tables
    python -m analysis.tables tests/golden/experiments --csv -o tests/golden/artifacts

make, and commit it together with the change. The records are made up, and stay as they are: what
was written once must stay readable.
"""

import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from analysis import tables
from analysis.papers import REPRODUCTIONS
from analysis.runs.load import load_runs

HERE = Path(__file__).parent
# In points: column and page of ACL's style, the narrowest of the usual ones.
COLUMN_PT, PAGE_PT = 219, 455


def test_the_fixtures_say_that_they_are_made_up():
    (run,) = load_runs([HERE / "records"])
    assert len(run.records) >= 200
    assert all(run.synthetic for run in load_runs([HERE]))


def test_tables_are_byte_identical(tmp_path, capsys):
    assert tables.main([str(HERE / "records"), "--pairs", "-o", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    for name in ("tables.md", "tables.csv", "tables.tex"):
        assert str(tmp_path / name) in output
        assert (tmp_path / name).read_bytes() == (HERE / "tables" / name).read_bytes()


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    out = tmp_path_factory.mktemp("artifacts")
    assert tables.main([str(HERE / "experiments"), "-o", str(out)]) == 0
    return out


def grids(text):
    """Rows of each table of LaTeX source, as their cells."""
    for body in re.findall(r"\\begin\{tabular\}.*?\\toprule\n(.*?)\\bottomrule", text, re.S):
        lines = [line.removesuffix(" \\\\") for line in body.splitlines() if line.endswith("\\\\")]
        yield [re.split(r"(?<!\\) & ", line) for line in lines if not line.startswith("\\multi")]


@pytest.mark.slow
def test_latex_tables_are_whole(artifacts):
    """Check structure that needs no TeX."""
    floats = 0
    for path in [*artifacts.glob("*.tex"), HERE / "tables" / "tables.tex"]:
        text = path.read_text()
        assert text.count("\\begin{table") == text.count("\\end{table")
        labels = re.findall(r"\\label\{(.*?)\}", text)
        assert len(set(labels)) == len(labels) > 0
        assert all(len(caption) < 250 for caption in re.findall(r"\\caption\{(.*?)\}", text))
        for rows in grids(text):
            assert len({len(row) for row in rows}) == 1, path.name
            assert not any(cell == "token\\_recycling" for row in rows for cell in row)
            floats += 1
    assert floats >= len(REPRODUCTIONS)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex here")
def test_latex_tables_compile_into_two_columns(artifacts, tmp_path):
    """On a page as narrow as ACL's; TeX itself says whether one is too wide or too long."""
    pages = [*sorted(artifacts.glob("*.tex")), HERE / "tables" / "tables.tex"]
    body = "".join(f"\\input{{{page}}}\\clearpage\n" for page in pages)
    (tmp_path / "all.tex").write_text(
        "\\documentclass[10pt,twocolumn]{article}\n\\usepackage{booktabs,array,graphicx}\n"
        f"\\textwidth={PAGE_PT}pt\\columnsep={PAGE_PT - 2 * COLUMN_PT}pt\n"
        f"\\columnwidth={COLUMN_PT}pt\n"
        f"\\begin{{document}}\n{body}\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    output = done.stdout.decode("latin-1")
    assert done.returncode == 0, output[-2000:]
    assert "Overfull" not in output
    assert "too large" not in output


def test_csv_files_are_one_sheet_of_plain_numbers(artifacts):
    text_columns = re.compile(
        r"table|method|model|dataset|setting|run|part|source|outputs|against_the_best|verdict|"
        r"claimed_(on|in|for|.*_qualifier)|measured_on|devices|temperature|update|label|task|"
        r"dtype|hardware|synthetic|timing|state_scope|estimator|claimed_(model|hardware|source)"
    )
    for path in [*artifacts.glob("*.csv"), HERE / "tables" / "tables.csv"]:
        frame = pd.read_csv(path)
        assert len(frame)
        assert not [name for name in frame if name.endswith((".1", "_")) or name != name.lower()]
        for name in frame:
            if not text_columns.fullmatch(name) and frame[name].notna().any():
                assert pd.api.types.is_numeric_dtype(frame[name]), (path.name, name)


@pytest.mark.parametrize("artifact", REPRODUCTIONS, ids=lambda artifact: artifact.name)
def test_every_artifact_is_byte_identical_and_says_what_it_rests_on(artifact, artifacts):
    csv = artifacts / f"{artifact.name}.csv"
    assert csv.read_bytes() == (HERE / "artifacts" / csv.name).read_bytes()
    text = csv.with_suffix(".md").read_text()
    # Passes over random ids have no cases.
    more = (" cases",) if artifact.name != "ngrammys_figure1" else ()
    for mark in ("SYNTHETIC RECORDS", "Synthetic", *more):
        assert mark in text, mark


def test_no_artifact_is_left_over(artifacts):
    csv = {path.name for path in artifacts.glob("*.csv")}
    assert csv == {path.name for path in (HERE / "artifacts").iterdir()}
