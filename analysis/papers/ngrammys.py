"""N-Grammys: Figures 1, 2 and 4, and Table 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from analysis.papers.cells import task_cells
from analysis.papers.reproduction import (
    Pictures,
    Reproduction,
    after,
    along,
    captions,
    claims_of,
    pictures,
    points,
    rows,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import slowdown_caption, slowdown_heatmaps
from analysis.plots.layout import Drawing
from analysis.plots.sweeps import figure_name
from analysis.runs.claim_verdicts import NOT_RUN, OTHER_MODEL
from analysis.runs.claims import Claim, claim_of_setting
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import over_repeats, pooled_ratio
from analysis.runs.leaders import leaders
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import claimed_cells, with_rule
from analysis.tabular.table import ResultTable
from specbench.results.decision import case_cell
from specbench.results.estimate import ABSENT, Cell, Estimate, Fact
from specbench.results.names import display_name
from specbench.results.records import CaseRecord
from specbench.results.wording import leader_words

PAPER = "ngrammys"


# --- Figures 1 and 2 ------------------------------------------------------------------------------


def figure1(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
    """What passes cost: this experiment measures no decoding."""
    slowdowns: list[dict[str, Cell]] = [
        {
            "model": run.model,
            "context (tokens)": str(context),
            "k": str(k),
            "w": str(w),
            "slow-down [95 %]": slowdown,
            "passes": str(run.surface.passes["batch"].repeats),
        }
        for run in runs
        if run.surface is not None
        for context in run.surface.passes["batch"].axes["context"]
        for (k, w), slowdown in run.surface.slowdowns(context, run.seed).items()
    ]
    text = "\n".join(slowdown_caption(run, of.text) for run in runs)
    yield ResultTable.of("N-Grammys, Figure 1: slow-down of a target pass", text, slowdowns)


def figure1_heatmaps(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """One picture per model."""
    for run in runs:
        title = after(of.place, display_name(run.model))
        yield run.model, slowdown_heatmaps(run, title, slowdown_caption(run, of.text))


def _figure2(comparisons: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
    panels = []
    for comparison in comparisons:
        names = dict.fromkeys(entry.label for entry in comparison.drafting)
        series = [_over_k(comparison, name) for name in names]
        data, unit = display_name(comparison.dataset), "tokens per call (MAT)"
        panels.append(Panel(data, "k (drafts)", unit, series, bottom=1.0))
    return curves([panels], title, text)


def _over_k(comparison: ComparedRuns, name: str) -> Series:
    drafts = along([entry for entry in comparison.drafting if entry.label == name], "k")
    source = f"{PAPER}/{name.partition('_')[0]}"
    return Series(name.replace("_", ", w = "), source, points(drafts, "mat"))


figure2_lines = pictures(_figure2, per_model=True)


# --- Figure 4: which rows win, at which rank, and who filled them ---------------------------------


def _won(record: CaseRecord, source: str, key: str) -> Counter[int]:
    """Values of a list with one entry per step, at the steps that a row of the source won."""
    steps = zip(record.drafter[key], record.drafter["won_source"], strict=True)
    return Counter(value for value, won in steps if won == source)


_SOURCES = ("context", "bigram")
# Of each part its unit, and what a turn counted for a source.
_PARTS: dict[str, tuple[str, Callable[[CaseRecord, str], Counter[int]]]] = {
    "accepted draft tokens": (
        "share of the source's wins",
        lambda record, source: _won(record, source, "accepted"),
    ),
    "rank of the winning row (0 is first)": (
        "share of the source's wins",
        lambda record, source: _won(record, source, "won_rank"),
    ),
    "rows given to the source": (
        "share of steps",
        lambda record, source: Counter(record.drafter[f"rows_{source}"]),
    ),
}


def _distribution(entry: ComparedLabel, part: str, source: str) -> list[tuple[int, Estimate]]:
    """Every value up to the largest, also those that did not occur, and its share."""
    counted = _PARTS[part][1]
    own = [record for record in entry.records if record.drafter]

    def share(value: int) -> Estimate:
        return pooled_ratio(
            own,
            lambda r: counted(r, source)[value],
            lambda r: counted(r, source).total(),
            entry.run.seed,
            at_most=1,
        )

    total = sum((counted(record, source) for record in own), Counter[int]())
    support = range(min(total, default=0), max(total, default=-1) + 1)
    return [(value, share(value)) for value in support]


def _figure4(comparison: ComparedRuns) -> Iterable[tuple[dict[str, Cell], str]]:
    for entry in comparison.drafting:
        for part in _PARTS:
            for source in _SOURCES:
                for value, share in _distribution(entry, part, source):
                    row: dict[str, Cell] = {
                        "run": comparison.title,
                        "part": part,
                        "source": source,
                        "value": str(value),
                        "share [95 %]": share,
                        "cases": case_cell(entry.overall),
                    }
                    yield row, ""


def _figure4_bars(comparisons: Sequence[ComparedRuns], title: str, text: str) -> Drawing:
    drawn = [(comparison, entry) for comparison in comparisons for entry in comparison.drafting]
    panels = [[_panel(entry, part) for _, entry in drawn] for part in _PARTS]
    panels[0] = [replace(p, title=_title(*d)) for p, d in zip(panels[0], drawn, strict=True)]
    return curves(panels, title, text)


def _panel(entry: ComparedLabel, part: str) -> Panel:
    series = [
        Series(
            source,
            f"{PAPER}/{source}",
            [Point.at(value, share) for value, share in _distribution(entry, part, source)],
        )
        for source in _SOURCES
    ]
    return Panel("", part, _PARTS[part][0], series, top=1.0, bars=True)


def _title(comparison: ComparedRuns, entry: ComparedLabel) -> str:
    dataset = display_name(comparison.dataset)
    several = len(comparison.drafting) > 1
    return f"{dataset}, {figure_name(comparison, entry)}" if several else dataset


figure4 = rows("N-Grammys, Figure 4: acceptance, rank, allocation", _figure4)
figure4_bars = pictures(_figure4_bars, per_model=True, speedup=False)


# --- Table 1 --------------------------------------------------------------------------------------


def table1(of: Reproduction, runs: Sequence[Run]) -> Iterable[ResultTable]:
    """Every setting, the best of them, and below the paper's other claims on the same data."""
    comparisons = of.comparisons(runs)
    cells: list[dict[str, Cell]] = []
    notes: list[str] = []
    for comparison in comparisons:
        where = [comparison.model, comparison.dataset]
        ranked = [e for e in comparison.ranked if e.method == PAPER]
        timed = [e for e in ranked if e.overall["speedup"] is not None]
        best = max(timed, key=lambda e: e.overall["speedup"] or 0.0, default=None)
        for entry in comparison.drafting:
            claim = entry.claim if entry.claim and entry.claim.model == where[0] else None
            cells.append(_table1_row(entry, _setting(entry), claim))
            notes += [entry.note(_setting(entry), claim)] if claim else []
        if best is not None:
            claim = claim_of_setting(claims_of(PAPER, "table1"), "best", PAPER, *where)
            cells.append(_table1_row(best, f"(k*, w*) = {_pair(best)}", claim))
            notes.append(_fastest(comparison, timed, best))
            notes += [best.note("(k*, w*)", claim)] if claim else []
    for claim in _claimed_elsewhere(comparisons):
        cells.append(
            {
                "model": claim.model,
                "data": claim.dataset,
                "setting": _claimed_setting(claim),
                "cases": "0",
                **claimed_cells(claim),
                "verdict": _why_not(claim, comparisons),
            }
        )
        notes.append(claim.note(_claimed_setting(claim), "quoted" if claim.quoted else "claimed"))
    yield ResultTable.of(of.place, captions(comparisons, of.text), cells, with_rule(notes))


def _fastest(comparison: ComparedRuns, timed: Sequence[ComparedLabel], best: ComparedLabel) -> str:
    """Which settings may be the fastest: the one that was, and those that are not shown slower."""
    others = [entry for entry in leaders(timed, "speedup") if entry is not best]
    words = leader_words([_pair(entry) for entry in (best, *others)])
    unknown = ", which the data cannot part" if others else ""
    return f"(k*, w*) of {comparison.title}: {words}{unknown}."


def _claimed_elsewhere(comparisons: Sequence[ComparedRuns]) -> list[Claim]:
    """What the paper's table has on the same data and no row of ours shows."""
    ran = {
        (comparison.dataset, comparison.model, entry.method)
        for comparison in comparisons
        for entry in comparison.entries
    }
    datasets = {comparison.dataset for comparison in comparisons}
    return [
        claim
        for claim in claims_of(PAPER, "table1")
        if claim.dataset in datasets and (claim.dataset, claim.model, claim.method) not in ran
    ]


def _why_not(claim: Claim, comparisons: Sequence[ComparedRuns]) -> str:
    methods = {
        entry.method
        for comparison in comparisons
        for entry in comparison.entries
        if comparison.dataset == claim.dataset
    }
    return OTHER_MODEL if claim.method in methods else NOT_RUN


def _claimed_setting(claim: Claim) -> str:
    """``(10, 10)``, ``(k*, w*) = (25, 14)`` where both are stated, or another's method."""
    if claim.method != PAPER:
        return claim.method
    pair = f"({claim.knobs['k']}, {claim.knobs['w']})" if claim.knobs else ""
    return pair if claim.setting is None else " = ".join(filter(None, ["(k*, w*)", pair]))


def _setting(entry: ComparedLabel) -> str:
    return _pair(entry) if entry.method == PAPER else entry.label


def _pair(entry: ComparedLabel) -> str:
    return f"({entry.knobs['k']}, {entry.knobs['w']})"


def _table1_row(entry: ComparedLabel, setting: str, claim: Claim | None) -> dict[str, Cell]:
    run, measured = entry.run, task_cells(entry)
    spread = over_repeats(run.records, entry.label, run.baseline or "")
    return {
        "model": run.model,
        "data": run.dataset,
        "setting": setting,
        "tokens per call [95 %]": measured.pop("MAT [95 %]"),
        "speedup ± sd": _spread(spread) if spread else ABSENT,
        **measured,
        "cases": case_cell(entry.overall),
        **claimed_cells(claim),
        "verdict": entry.verdict(claim=claim) if claim else "",
    }


def _spread(found: tuple[float, float]) -> Fact:
    mean, sd = found
    return Fact(f"{mean:.2f} ± {sd:.2f}", {"speedup mean": mean, "speedup sd": sd})
