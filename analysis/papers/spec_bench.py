"""Spec-Bench's leaderboard (hemingkx/Spec-Bench): all methods by task."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.papers.cells import CONTEXT, cells, task_cells
from analysis.papers.claimed import claimed_words
from analysis.papers.reproduction import Pictures, Reproduction, after, captions, claims_of
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.style import unit_of
from analysis.plots.sweeps import figure_name
from analysis.runs.claim_verdicts import NOT_RUN
from analysis.runs.claims import Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import rows_once, with_rule
from analysis.tabular.table import ResultTable
from specbench.results.decision import OUTPUTS, case_cell
from specbench.results.estimate import ABSENT, Cell, Fact
from specbench.results.tasks import HEADINGS, OVERALL

_TASK_TEXT = "By task: speedups over ar; in the columns headed by a model what the board claims."

# By model and hardware, then by method.
_Claims = dict[str, dict[str, Claim]]


def _claims(of: Reproduction) -> _Claims:
    columns: _Claims = {}
    boards = sorted(claims_of(*of.claims), key=lambda claim: (claim.size or 0.0, claim.place))
    for claim in boards:
        columns.setdefault(claim.place, {})[claim.method] = claim
    return columns


def _claimed(claims: _Claims, method: str, task: str = OVERALL) -> dict[str, Cell]:
    return {place: _cell(place, rows.get(method), task) for place, rows in claims.items()}


def _cell(place: str, claim: Claim | None, task: str) -> Cell:
    speedup = claim.value("speedup", task) if claim else None
    mat = claim.value("mat", task) if claim else None
    parts = {f"{place}: claimed speedup": speedup, f"{place}: claimed MAT": mat}
    words = [f"{value:.2f}" for value in (speedup, mat) if value is not None]
    return Fact(" / ".join(words) or ABSENT, parts)


def board(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
    """Of each comparison the board, and the board by task."""
    claims = _claims(of)
    claimed = list(dict.fromkeys(method for rows in claims.values() for method in rows))
    for comparison in of.comparisons(runs):
        entries = _ordered(comparison)
        rows = [
            {
                **cells(comparison, entry, _MEASURED),
                **_claimed(claims, entry.method),
                "verdict": entry.verdict(),
            }
            for entry in entries
        ]
        run = {entry.method for entry in entries}
        rows += [
            {"method": method, "cases": "0", **_claimed(claims, method), "verdict": NOT_RUN}
            for method in claimed
            if method not in run
        ]
        title = f"Spec-Bench's board ({comparison.title})"
        text = captions([comparison], of.text)
        notes = with_rule([entry.note(entry.label) for entry in entries])
        yield ResultTable.of(title, text, rows, notes, ("method", *_SHORT, *claims))
        yield _by_task(comparison, entries, claims)


_MEASURED = ("method", "MAT [95 %]", "speedup [95 %]", CONTEXT, OUTPUTS, "cases")
_SHORT = ("MAT", "speedup [95 %]", "verdict")


def _by_task(
    comparison: ComparedRuns, entries: Sequence[ComparedLabel], claims: _Claims
) -> ResultTable:
    rows: list[dict[str, Cell]] = [
        {
            "task": HEADINGS.get(task, task),
            "method": entry.label,
            **task_cells(entry, task),
            "cases": case_cell(entry.rows[task]),
            **_claimed(claims, entry.method, task),
        }
        for task in comparison.tasks
        for entry in entries
        if task in entry.rows
    ]
    title = f"Spec-Bench's board by task ({comparison.title})"
    short = ("task", "method", "MAT", "speedup [95 %]", *claims)
    return ResultTable.of(title, _TASK_TEXT, rows, (), short, groups=1)


def _ordered(comparison: ComparedRuns) -> list[ComparedLabel]:
    """The fastest first, as the board has them; plain decoding is what they are relative to."""
    entries = [entry for entry in rows_once(comparison) if entry in comparison.drafting]
    return sorted(entries, key=lambda entry: -(entry.overall["speedup"] or 0.0))


def board_heatmaps(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Of each comparison speedup and MAT, a row per method and a column per task."""
    for comparison in of.comparisons(runs):
        tasks = [*comparison.tasks, OVERALL]
        entries = _ordered(comparison)[::-1]  # the first row is drawn at the bottom
        for key in ("speedup", "mat"):
            grid = HeatmapGrid(
                "",
                [[entry.measured(key, task) for task in tasks] for entry in entries],
                [figure_name(comparison, entry) for entry in entries],
                [HEADINGS.get(task, task) for task in tasks],
            )
            where = after("Spec-Bench's board", comparison.printed_title)
            claims = claimed_words([comparison], key)
            words = captions([comparison], claims, speedup=key == "speedup")
            figure = heatmaps(
                [grid], "task", "method", unit_of(key, comparison.timing), where, words,
                1.0 if key == "speedup" else None,
            )  # fmt: skip
            yield f"{comparison.model}_{key}", figure
