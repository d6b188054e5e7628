"""What was disturbed and measured again is told wherever the numbers stand."""

import html
import json
import re

import matplotlib as mpl
import pytest

from analysis import report, tables
from analysis.figures import figures_of
from analysis.plots.style import RC
from analysis.runs.comparisons import make_comparisons
from analysis.runs.load import load_runs
from specbench.results.records import DISTURBED
from tests.analysis.folders import edit_records

AGAIN = "1 case was measured again (4 turns of all labels)"


@pytest.fixture
def folder(results):
    """The run with a case measured again: pld was disturbed in it, and a hundred times slower."""
    run, first = results / "one", []

    def measure_again(record):
        if (record["case_id"], record["repeat"]) != ("100", 0):
            return record
        old = dict(record)
        if record["label"] == "pld":
            old |= {"status": "disturbed", "disturbed_by": "made up"}
            old["decode_s"] = 100 * record["decode_s"]
        first.append(old)
        return record | {"attempt": 1}

    edit_records(run, measure_again)
    (run / DISTURBED).write_text("".join(json.dumps(line) + "\n" for line in first))
    return run


def speedup_without_rule(folder):
    (comparison,) = make_comparisons(load_runs([folder]))
    found = comparison.entries[0].disturbed
    assert (found["flagged"]["pld"], found["turns_again"]) == (1, 4)
    (kept,) = (e.overall["speedup"] for e in comparison.entries if e.label == "pld")
    without = found["without_rule"]["pld"]["speedup"]
    assert without < 0.95 * kept
    return f"pld {without:.2f} ["


def test_in_tables_figures_and_report(folder, capsys):
    pld = speedup_without_rule(folder)
    assert tables.main([str(folder), "--markdown"]) == 0
    with mpl.rc_context(RC):
        words = [text.get_text() for _, f in figures_of(load_runs([folder])) for text in f.texts]
    page = html.unescape(report.page(load_runs([folder])))
    shown = [capsys.readouterr().out, " ".join(" ".join(words).split()), page]
    for text in shown:
        assert AGAIN in text
        assert pld in text
    (warning,) = re.findall(r"<strong>Disturbed, vicuna7b on specbench</strong> (.*)</p>", page)
    assert AGAIN in warning
