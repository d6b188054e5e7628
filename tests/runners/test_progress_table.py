"""What a user sees while a run goes on and when it is over."""

import io
import re
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from rich.console import Console

from runners.measure import measurement
from runners.measure.measurement import RunProgress
from specbench.results import console, records
from specbench.results.fitted_table import FittedTable
from specbench.storage import jsonl


def test_away_from_a_terminal_there_is_a_line_every_few_cases_with_the_time_left(
    caplog, monkeypatch
):
    now = iter(range(0, 10_000, 6))
    monkeypatch.setattr(measurement, "time", SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level("INFO"), RunProgress(60, done=20, out=io.StringIO()) as progress:
        for _ in range(40):
            progress.advance("qa 7")
    lines = [record.getMessage() for record in caplog.records]
    # Every third block, at six seconds a block; the twenty blocks of an earlier start took no time.
    assert lines[0] == "21/60 cases, 00:06 gone, about 03:54 left (qa 7)"
    assert len(lines) == 14
    assert lines[-1].startswith("60/60 cases, 04:00 gone, about 00:00 left")


def test_on_a_terminal_there_is_a_bar_and_no_lines(caplog):
    out = io.StringIO()
    out.isatty = lambda: True
    with caplog.at_level("INFO"), RunProgress(2, out=out) as progress:
        progress.advance("qa 7")
        progress.advance("[red]boo[/blue] 7")
    assert "2/2" in out.getvalue() and "[red]boo[/blue] 7" in out.getvalue()
    assert caplog.records == []


def test_brackets_in_labels_are_no_markup(monkeypatch):
    terminal = Console(width=160, file=io.StringIO())
    monkeypatch.setitem(sys.modules, "pandas", None)  # half a second, for a few rows
    rows = {"rows": [row("[bold]x[/red]", "overall")], "against_best": {}, "pairs": []}
    terminal.print(console.render({**rows, "warnings": []}))
    assert "[bold]x[/red]" in terminal.file.getvalue()


def test_a_label_that_drafted_nothing_is_called_off():
    terminal = Console(width=160, file=io.StringIO())
    rows = [row("card", "overall"), row("pld", "overall"), row("sam", "overall")]
    warned = [
        {"code": "NO_DRAFT", "values": {"label": "card", "steps": 9, "why": "tuned off"}},
        {"code": "NO_DRAFT", "values": {"label": "pld", "steps": 9}},
    ]
    summary = {"rows": rows, "against_best": {}, "pairs": [], "warnings": warned}
    terminal.print(console.render(summary))
    printed = terminal.file.getvalue()
    assert (
        "card (tuned off) " in printed and "pld (no drafts) " in printed and "sam (" not in printed
    )


def row(label, task, **changes):
    return {
        "label": label,
        "method": label,
        "task": task,
        "n_cases": 3,
        "n_timed": 3,
        "timing": "measured",
        "mat": 1.0,
        "tokens_per_s": 14.04,
        "speedup": 1.0,
        "speedup_ci": None,
        "geomean_speedup": 1.0,
        "geomean_speedup_ci": None,
        "lossless": {"equal": 3, "near_tie": 0, "bug": 0, "not_audited": 0},
    } | changes


def summary():
    """As runs write it; ``pld`` is the fastest of three, with a long name among them."""
    names = ("cacheback", "suffix_decoding_with_a_long_label")
    rows = [
        row("ar", "overall"),
        row("pld", "qa", speedup=9.99),
        row(
            "pld",
            "overall",
            mat=1.732,
            speedup=1.46,
            speedup_ci=[1.31, 1.6],
            end_to_end_speedup=1.42,
            end_to_end_speedup_ci=[1.3, 1.5],
            lossless={"equal": 2, "near_tie": 1, "bug": 0, "not_audited": 0},
        ),
        *(row(name, "overall", mat=1.5, speedup=1.3, speedup_ci=[1.2, 1.4]) for name in names),
    ]
    stands = {
        "ar": {"verdict": "slower", "p": 0.0001},
        "pld": {"verdict": "highest", "p": None},
        names[0]: {"verdict": "undecided", "p": 0.2049},
        names[1]: {"verdict": "slower", "p": 0.0123},
    }
    warned = [{"code": "LOSSY", "values": {}}, {"code": "STOLEN", "values": {"share": 0.2}}]
    return {
        "rows": rows,
        "against_best": stands,
        "verdict": "pld is faster.",
        "warnings": warned,
        "pairs": [],
        "conditions": {"model": "m", "data": "d"},
    }


def printed(summary, folder, width):
    jsonl.write_json(folder / records.SUMMARY, summary)
    out = io.StringIO()
    console.print_folder(folder, Console(file=out, width=width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_six_columns_are_whole_at_every_width(tmp_path, width):
    (tmp_path / records.CASES).write_text("{}\n")
    (tmp_path / records.ERRORS).touch()  # of a run without any
    text = printed(summary(), tmp_path, width)
    lines = text.splitlines()
    assert all(len(line) <= width for line in lines if not line.startswith(("all notes", "a page")))
    assert len(lines) <= 20 + (width < 100)  # a long label is folded
    assert "…" not in text
    line = next(line for line in lines if line.startswith("pld  "))
    assert re.split(r" {2,}", line.strip())[:5] == [
        "pld", "1.73", "1.46 [1.31, 1.60]", "1.42", "highest",
    ]  # fmt: skip
    printed_text = " ".join(text.split())
    for cell in (
        "1.30 [1.20, 1.40]",
        "undecided,",
        "0.205",
        "slower,",
        "<0.001",
        "1 near tie,",
        "2 equal",
    ):
        assert cell in printed_text
    assert ("undecided, p 0.205" in printed_text) or width < 100
    assert "1 near tie, 2 equal" in printed_text or width < 100  # folded, or left out and named
    assert "9.99" not in text, "tasks are for another table"
    assert f"python -m analysis.tables {tmp_path} --wide" in printed_text
    assert text.startswith("m; d\npld is faster.") and "! LOSSY" in text
    assert "hypervisor" not in text, "it changes no decision"


def test_columns_that_find_no_room_are_named_and_the_headline_stays():
    frame = pd.DataFrame(
        [
            {
                "method": "pld",
                **{f"word{i}": "characters" for i in range(9)},
                "speedup [95 %]": "1.46",
            }
        ]
    )
    out = io.StringIO()
    Console(file=out, width=80).print(FittedTable(frame))
    assert "1.46" in out.getvalue()
    head = "".join(out.getvalue().splitlines()[:2])
    visible = [f"word{i}" in head for i in range(9)]
    assert sorted(visible, reverse=True) == visible, "the last ones go first"
    hidden = ", ".join(f"word{i}" for i in range(9) if not visible[i])
    assert hidden
    assert f"Not shown for lack of room: {hidden}." in out.getvalue()
