"""What a user sees while a run goes on and when it is over."""

import io

import pytest
from rich.console import Console

from runners.session.progress import RunProgress
from specbench.results import console, records
from specbench.results.wording import case_words, leader_words, pair_words
from specbench.storage import jsonl


def test_away_from_a_terminal_there_is_a_line_every_few_cases_with_the_time_left(caplog):
    now = iter(range(0, 10_000, 6))
    console = Console(file=io.StringIO(), force_terminal=False)
    progress = RunProgress(60, done=20, console=console, clock=lambda: float(next(now)))
    with caplog.at_level("INFO"), progress:
        for _ in range(40):
            progress.advance("qa 7")
    lines = [record.getMessage() for record in caplog.records]
    # Every third block, at six seconds a block; the twenty blocks of an earlier start took no time.
    assert lines[0] == "21/60 cases, 0:06 gone, about 3:54 left (qa 7)"
    assert len(lines) == 14
    assert lines[-1].startswith("60/60 cases, 4:00 gone, about 0:00 left")


def test_on_a_terminal_there_is_a_bar_and_no_lines(caplog):
    out = io.StringIO()
    progress = RunProgress(2, console=Console(file=out, force_terminal=True, width=80))
    with caplog.at_level("INFO"), progress:
        progress.advance("qa 7")
        progress.advance("qa 8")
    assert "2/2" in out.getvalue()
    assert caplog.records == []


def test_brackets_in_names_are_no_markup():
    out = io.StringIO()
    progress = RunProgress(2, console=Console(file=out, force_terminal=True, width=80))
    with progress:
        progress.advance("[red]boo[/blue] 7")
    assert "[red]boo[/blue] 7" in out.getvalue()
    terminal = Console(width=160, file=io.StringIO())
    terminal.print(console.render([row("[bold]x[/red]", "[/]")]))
    assert "[bold]x[/red]" in terminal.file.getvalue()


def row(label, task, **changes):
    return {
        "label": label,
        "method": label,
        "task": task,
        "n_cases": 3,
        "mat": 1.0,
        "tokens_per_s": 14.04,
        "speedup": 1.0,
        "speedup_ci": None,
        "geomean_speedup": 1.0,
        "geomean_speedup_ci": None,
        "lossless": {"equal": 3, "near_tie": 0, "bug": 0, "not_audited": 0},
    } | changes


def test_the_table_shows_every_number_and_the_whole_run_last(tmp_path):
    rows = [
        row("ar", "overall"),
        row(
            "pld",
            "overall",
            mat=1.732,
            tokens_per_s=20.5,
            speedup=1.46,
            speedup_ci=[1.31, 1.6],
            geomean_speedup=1.4,
            geomean_speedup_ci=[1.3, 1.5],
            speedup_eager=2.92,
            speedup_graph=1.46,
            bandwidth_share=0.71,
            lossless={"equal": 2, "near_tie": 1, "bug": 0, "not_audited": 0},
        ),
        row("ar", "qa"),  # as summaries were before there were columns of the baselines
        row("pld", "qa", speedup=None, geomean_speedup=None, mat=None),
    ]
    jsonl.write_json(
        tmp_path / records.SUMMARY, {"rows": rows, "caption": "tiny", "notes": ["one dropped"]}
    )
    (tmp_path / records.CASES).touch()
    out = io.StringIO()
    console.print_folder(tmp_path, Console(file=out, width=160))
    text = out.getvalue()
    assert text.index("qa") < text.index("overall")
    line = next(line for line in text.splitlines() if "1.46" in line)
    for cell in ("pld", "1.73", "20.5", "1.46 [1.31, 1.60]", "1.40 [1.30, 1.50]", "1 near tie"):
        assert cell in line
    for cell in ("2.92", "1.46", "0.71"):
        assert cell in line.partition("1.50]")[2]
    assert next(line for line in text.splitlines() if "3 equal" in line).count("–") == 3
    assert "note: one dropped" in text
    assert f"files: {tmp_path}/ (summary.json, cases.jsonl)" in text.replace("\n", " ")


def test_pairs_and_joules_are_shown_where_there_are_any(tmp_path):
    pair = {
        "first": "pld",
        "second": "sam",
        "ratio": 1.2345,
        "ratio_ci": [1.1, 1.4],
        "p_holm": 0.0123,
        "verdict": "faster",
        "margin": 0.02,
        "detectable": 1.05,
    }
    few = pair | {"first": "rest", "ratio_ci": None, "verdict": "too few", "needed": 3}
    rows = [row("ar", "overall"), row("pld", "overall", joules_per_token=0.3456)]
    summary = {"rows": [r | {"joules_per_token": r.get("joules_per_token")} for r in rows]}
    for pairs, shown in (([pair, few], True), ([], False), ([pair] * 91, False)):
        found = summary | {"pairs": pairs, "leaders": ["pld", "rest"]}
        jsonl.write_json(tmp_path / records.SUMMARY, found)
        out = io.StringIO()
        console.print_folder(tmp_path, Console(file=out, width=118))
        text = out.getvalue()
        assert "J/token" in text
        assert "0.35" in text
        assert ("1.234 [1.100, 1.400]" in text or "1.235 [1.100, 1.400]" in text) == shown
        assert ("faster" in text) == shown
        assert ("too few cases (at least 3 needed)" in " ".join(text.split())) == shown
        assert ("fastest method: pld or rest" in text) == bool(pairs)
        assert ("91 pairs" in text) == (len(pairs) == 91)


def test_cases_that_were_not_timed_are_told_apart():
    assert case_words(row("pld", "qa", n_timed=3)) == "3"
    assert case_words(row("pld", "qa", n_timed=2)) == "3 (2 timed)"
    assert case_words(row("pld", "qa", n_timed=0, timing="none")) == "3", "a replay of steps alone"
    assert case_words(row("pld", "qa")) == "3", "as summaries were before"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"verdict": "undecided", "needed": 1234}, "undecided (about 1,234 cases needed)"),
        ({"verdict": "undecided", "needed": None}, "undecided"),
        ({"verdict": "too few", "needed": 3}, "too few cases (at least 3 needed)"),
        ({"verdict": "slower", "needed": None}, "slower"),
    ],
)
def test_a_verdict_says_what_it_lacks(found, words):
    assert pair_words(found) == words


def test_many_leaders_are_counted():
    assert leader_words(["a", "b", "c", "d"]) == "a or b or c or d"
    assert leader_words([*"abcdefg"]) == "a or one of 6 others"
