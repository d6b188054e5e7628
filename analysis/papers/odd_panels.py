"""Tables and pictures of the papers that no kind of :mod:`analysis.papers.reproduction` makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from analysis.papers.claimed import claimed_for, claims_beside
from analysis.papers.columns import CONTEXT, SPEEDUP, cells, task_cells
from analysis.papers.reproduction import Pictures, Reproduction, Row, Tables, drawn_together
from analysis.plots.charts import Panel, Point, Series, curves, stacked_bars
from analysis.plots.heatmaps import HeatmapGrid, heatmaps
from analysis.plots.style import unit_of
from analysis.runs.acceptance import phase_share, stream_parts
from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, OTHER_MODEL, Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.estimates import mat, over_repeats, pooled_ratio, tokens_per_s
from analysis.runs.leaders import leaders
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import claimed_cells, rows_once, with_rule
from analysis.tabular.table import ResultTable
from specbench.results.decision import OUTPUTS, case_cell, leader_words
from specbench.results.estimate import ABSENT, Cell, Estimate, Fact
from specbench.results.manifest import BASELINE
from specbench.results.names import display_name
from specbench.results.records import CaseRecord
from specbench.results.statistics.summary import timed_turns
from specbench.results.tasks import HEADINGS, OVERALL


def _table_of_labels(
    of: Reproduction,
    runs: Sequence[Run],
    title: str,
    rows_of: Callable[[ComparedRuns, ComparedLabel], Iterable[Row]],
) -> Tables:
    comparisons = of.comparisons(runs)
    rows = [
        {"run": comparison.title, **row}
        for comparison in comparisons
        for entry in comparison.entries
        for row in rows_of(comparison, entry)
    ]
    yield ResultTable.of(title, captions(comparisons, of.text), rows)


# --- N-Grammys, Figure 1: what a pass costs -------------------------------------------------------


def slowdown_table(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate what passes cost: this experiment measures no decoding."""
    rows: list[Row] = [
        {
            "model": run.model,
            "context (tokens)": str(context),
            "k": str(k),
            "w": str(w),
            "slow-down [95 %]": slowdown,
            "passes": str(run.surface.repeats),
        }
        for run in runs
        if run.surface is not None
        for context in run.surface.axes["context"]
        for (k, w), slowdown in run.surface.slowdowns(context, run.seed).items()
    ]
    text = "\n".join(_slowdown_caption(run, of.text) for run in runs)
    yield ResultTable.of("N-Grammys, Figure 1: slow-down of a target pass", text, rows)


def slowdown_pictures(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw one picture per model: a heatmap for each number of cached tokens."""
    for run in runs:
        assert run.surface is not None
        grids = [
            HeatmapGrid(f"context of {context} tokens", run.surface.slowdowns(context, run.seed))
            for context in run.surface.axes["context"]
        ]
        title = f"After {of.place} ({display_name(run.model)})"
        text = _slowdown_caption(run, of.text)
        across, unit = "w (draft tokens in a row)", "time over one token's"
        yield run.model, heatmaps(grids, across, "k (rows)", unit, title, text)


def _slowdown_caption(run: Run, text: str) -> str:
    """Words of one's own, then model, hardware, number of passes and code."""
    assert run.surface is not None
    made_up = "SYNTHETIC RECORDS, not a measurement. " if run.synthetic else ""
    return (
        f"{made_up}{text} {run.model} ({run.dtype}), random ids. Hardware: {run.hardware}. Medians "
        f"of {run.surface.repeats} passes; intervals: 95 %, bootstrap over passes. "
        f"Code: {run.code}."
    )


# --- N-Grammys, Figure 4: which rows win, at which rank, and who filled them ----------------------


_SOURCES = ("context", "bigram")
_WINS = "share of the source's wins"
# Of each part its unit, and which list a drafter keeps of it, an entry a step.
_PARTS = {
    "accepted draft tokens": (_WINS, "accepted"),
    "rank of the winning row (0 is first)": (_WINS, "won_rank"),
    "rows given to the source": ("share of steps", "rows"),
}


def _distribution(entry: ComparedLabel, part: str, source: str) -> list[tuple[int, Estimate]]:
    """Every value up to the largest, also those that did not occur, and its share."""
    key = _PARTS[part][1]
    records = [record for record in entry.records if record.drafter]

    def counted(record: CaseRecord) -> Counter[int]:
        if key == "rows":
            return Counter(record.drafter[f"rows_{source}"])
        steps = zip(record.drafter[key], record.drafter["won_source"], strict=True)
        return Counter(value for value, winner in steps if winner == source)

    def share(value: int) -> Estimate:
        counts, totals = (lambda r: counted(r)[value]), (lambda r: counted(r).total())
        return pooled_ratio(records, counts, totals, entry.run.seed, at_most=1)

    total = sum(map(counted, records), Counter[int]())
    values = range(min(total, default=0), max(total, default=-1) + 1)
    return [(value, share(value)) for value in values]


def row_table(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate acceptance, rank and allocation by source."""

    def rows_of(_: ComparedRuns, entry: ComparedLabel) -> list[Row]:
        place = [(part, source) for part in _PARTS for source in _SOURCES]
        cases = case_cell(entry.overall)
        return [
            {"part": part, "source": source, "value": str(n), "share [95 %]": share, "cases": cases}
            for part, source in place
            for n, share in _distribution(entry, part, source)
        ]

    title = "N-Grammys, Figure 4: acceptance, rank, allocation"
    return _table_of_labels(of, runs, title, rows_of)


def row_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw a row of panels for each part, a column for each label of each data set."""

    def panel(comparison: ComparedRuns, entry: ComparedLabel, part: str) -> Panel:
        series = []
        for source in _SOURCES:
            points = [Point.at(*each) for each in _distribution(entry, part, source)]
            series.append(Series(source, f"{entry.method}/{source}", points))
        title = display_name(comparison.dataset) if part == next(iter(_PARTS)) else ""
        if title and len(comparison.drafting) > 1:
            title += f", {comparison.name_of(entry)}"
        return Panel(title, part, _PARTS[part][0], series, top=1.0, bars=True)

    for stem, members, *words in drawn_together(of, runs, per_model=True):
        entries = [(comparison, entry) for comparison in members for entry in comparison.ranked]
        yield stem, curves([[panel(*each, part) for each in entries] for part in _PARTS], *words)


# --- N-Grammys, Table 1: every setting, and the best of them --------------------------------------


def best_settings_table(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate every setting, the best of them, and the paper's other claims on the same data."""
    method = of.claims[0]
    comparisons = of.comparisons(runs)
    rows: list[Row] = []
    notes: list[str] = []

    def add(entry: ComparedLabel, setting: str, name: str, claim: Claim | None) -> None:
        rows.append(_setting_row(entry, setting, claim))
        notes.extend([entry.note(name, claim)] if claim else [])

    for comparison in comparisons:
        model, dataset = comparison.model, comparison.dataset
        for entry in comparison.drafting:
            setting = _pair(entry.knobs) if entry.method == method else entry.label
            same_model = entry.claim is not None and entry.claim.model == model
            add(entry, setting, setting, entry.claim if same_model else None)
        ranked = [entry for entry in comparison.ranked if entry.method == method]
        timed = [entry for entry in ranked if entry.overall["speedup"] is not None]
        if not timed:
            continue
        best = max(timed, key=lambda entry: entry.overall["speedup"] or 0.0)
        others = [entry for entry in leaders(timed, "speedup") if entry is not best]
        words = leader_words([_pair(entry.knobs) for entry in (best, *others)])
        unknown = ", which the data cannot part" if others else ""
        notes.append(f"(k*, w*) of {comparison.title}: {words}{unknown}.")
        place = ("best", method, model, dataset)
        stated = [c for c in of.own_claims if (c.setting, c.method, c.model, c.dataset) == place]
        add(best, f"(k*, w*) = {_pair(best.knobs)}", "(k*, w*)", next(iter(stated), None))
    run_here = [(c.dataset, e.method, e.run.model) for c in comparisons for e in c.entries]
    for claim in of.own_claims:
        models = [model for *place, model in run_here if place == [claim.dataset, claim.method]]
        if claim.model in models or claim.dataset not in {dataset for dataset, *_ in run_here}:
            continue
        # ``(10, 10)``, ``(k*, w*) = (25, 14)`` where both are stated, or another's method.
        pair = _pair(claim.knobs) if claim.knobs else ""
        best_pair = " = ".join(filter(None, ["(k*, w*)", pair]))
        setting = claim.method if claim.method != method else best_pair if claim.setting else pair
        where: Row = {"model": claim.model, "data": claim.dataset, "setting": setting}
        verdict = OTHER_MODEL if models else NOT_RUN
        rows.append({**where, "cases": "0", **claimed_cells(claim), "verdict": verdict})
        notes.append(claim.note(setting, "quoted" if claim.quoted else "claimed"))
    text = captions(comparisons, claimed_for(claims_beside(comparisons)), of.text)
    yield ResultTable.of(of.place, text, rows, with_rule(notes))


def _pair(knobs: Mapping[str, object]) -> str:
    return f"({knobs['k']}, {knobs['w']})"


def _setting_row(entry: ComparedLabel, setting: str, claim: Claim | None) -> Row:
    run, measured = entry.run, task_cells(entry)
    spread: Cell = ABSENT
    if repeats := over_repeats(run.records, entry.label, run.baseline or ""):
        mean, sd = repeats
        spread = Fact(f"{mean:.2f} ± {sd:.2f}", {"speedup mean": mean, "speedup sd": sd})
    return {
        "model": run.model,
        "data": run.dataset,
        "setting": setting,
        "tokens per call [95 %]": measured.pop("MAT [95 %]"),
        "speedup ± sd": spread,
        **measured,
        "cases": case_cell(entry.overall),
        **claimed_cells(claim),
        "verdict": entry.verdict(claim=claim) if claim else "",
    }


# --- SSD: over the stream of requests -------------------------------------------------------------

_STREAM_PARTS = 5  # parts of the stream; its interval needs several requests in each


def _over_stream(entry: ComparedLabel) -> Iterator[tuple[float, dict[str, tuple[int, Estimate]]]]:
    """Tokens in the store, and of MAT and tokens/s how many requests count, and the number."""
    run = entry.run
    timed = {(record.repeat, record.case_id) for record in timed_turns(run.records, run.labels)}
    own = [record for record in run.records if record.label == entry.label]
    for size, turns in stream_parts(own, _STREAM_PARTS):
        clocked = [turn for turn in turns if (turn.repeat, turn.case_id) in timed]
        speed = tokens_per_s(clocked, run.seed)
        numbers = {"mat": (len(turns), mat(turns, run.seed)), "tokens_per_s": (len(clocked), speed)}
        yield size, numbers


def stream_table(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate MAT and tokens/s in each part of the stream."""

    def rows_of(comparison: ComparedRuns, entry: ComparedLabel) -> list[Row]:
        return [
            {
                "method": comparison.name_of(entry),
                "tokens of finished requests": f"{size:.0f}",
                "requests": str(numbers["mat"][0]),
                "MAT [95 %]": numbers["mat"][1],
                "timed": str(numbers["tokens_per_s"][0]),
                "tokens/s [95 %]": numbers["tokens_per_s"][1],
            }
            for size, numbers in _over_stream(entry)
        ]

    return _table_of_labels(of, runs, "SSD over the stream of requests", rows_of)


def stream_lines(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw MAT and tokens/s over the tokens of finished requests."""

    def panel(comparison: ComparedRuns, key: str) -> Panel:
        series = [
            Series(
                comparison.name_of(entry),
                entry.method,
                [Point.at(size, numbers[key][1]) for size, numbers in _over_stream(entry)],
            )
            for entry in comparison.entries
            if entry.ranked
        ]
        return Panel.of(key, comparison.timing, series, "tokens of finished requests")

    place = "SSD, over the stream of requests"
    for stem, (shown,), *words in drawn_together(of, runs, place=place, by_data=True):
        yield stem, curves([[panel(shown, key) for key in ("mat", "tokens_per_s")]], *words)


# --- Token Recycling, Figure 4: the time of a step by its parts -----------------------------------

# The paper's words for the phases of a step, in its order.
_PHASES = {
    "draft": "retrieve draft",
    "verify": "forward pass",
    "accept": "verify",
    "cache": "update KV cache",
    "observe": "update matrix",
    "other": "other",
}


def phase_table(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate each part's share of the time of all steps."""

    def rows_of(comparison: ComparedRuns, entry: ComparedLabel) -> list[Row]:
        return [
            {
                "method": comparison.name_of(entry),
                "part": part,
                # Most parts are below a hundredth.
                "share of the steps' time [95 %]": replace(phase_share(entry, phase), digits=4),
                "cases": case_cell(entry.overall),
            }
            for phase, part in _PHASES.items()
        ]

    return _table_of_labels(of, runs, "Token Recycling, Figure 4: time of a step", rows_of)


def phase_bars(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw a stacked bar per label.

    Plain decoding drafts nothing: what its clock reads there is the clock itself.
    """
    for stem, (comparison,), *words in drawn_together(of, runs):
        shares = {
            comparison.name_of(entry): {
                part: phase_share(entry, phase)
                for phase, part in _PHASES.items()
                if entry.method != BASELINE or phase not in ("draft", "observe")
            }
            for entry in comparison.entries
            if entry.ranked
        }
        yield stem, stacked_bars(shares, "share of the time of all steps", *words)


# --- Spec-Bench's leaderboard ---------------------------------------------------------------------

_MEASURED = ("method", "MAT [95 %]", SPEEDUP, CONTEXT, OUTPUTS, "cases")


def board_tables(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate of each comparison the board, and the board by task."""
    boards: dict[str, dict[str, Claim]] = {}  # by model and hardware, then by method
    for claim in sorted(of.own_claims, key=lambda claim: (claim.size or 0.0, claim.place)):
        boards.setdefault(claim.place, {})[claim.method] = claim

    def claimed(method: str, task: str = OVERALL) -> dict[str, Cell]:
        return {place: _board_cell(place, of.get(method), task) for place, of in boards.items()}

    for comparison in of.comparisons(runs):
        entries = _fastest_first(comparison)
        rows: list[Row] = []
        for entry in entries:
            measured = cells(comparison, entry, _MEASURED)
            rows.append({**measured, **claimed(entry.method), "verdict": entry.verdict()})
        methods = {entry.method for entry in entries}
        for method in dict.fromkeys(m for board in boards.values() for m in board):
            if method not in methods:
                row = {"method": method, "cases": "0", **claimed(method), "verdict": NOT_RUN}
                rows.append(row)
        title, text = f"Spec-Bench's board ({comparison.title})", captions([comparison], of.text)
        notes = with_rule([entry.note(entry.label) for entry in entries])
        short = ("method", "MAT", SPEEDUP, "verdict", *boards)
        yield ResultTable.of(title, text, rows, notes, short)
        by_task: list[Row] = [
            {
                "task": HEADINGS.get(task, task),
                "method": entry.label,
                **task_cells(entry, task),
                "cases": case_cell(entry.rows[task]),
                **claimed(entry.method, task),
            }
            for task in comparison.tasks
            for entry in entries
            if task in entry.rows
        ]
        title = f"Spec-Bench's board by task ({comparison.title})"
        text = "By task: speedups over ar; in the columns headed by a model what the board claims."
        short = ("task", "method", "MAT", SPEEDUP, *boards)
        yield ResultTable.of(title, text, by_task, short=short, groups=1)


def _board_cell(place: str, claim: Claim | None, task: str) -> Cell:
    speedup = claim.value("speedup", task) if claim else None
    accepted = claim.value("mat", task) if claim else None
    parts = {f"{place}: claimed speedup": speedup, f"{place}: claimed MAT": accepted}
    words = [f"{value:.2f}" for value in (speedup, accepted) if value is not None]
    return Fact(" / ".join(words) or ABSENT, parts)


def _fastest_first(comparison: ComparedRuns) -> list[ComparedLabel]:
    """As the board has them; plain decoding is what they are relative to."""
    entries = [entry for entry in rows_once(comparison) if entry in comparison.drafting]
    return sorted(entries, key=lambda entry: -(entry.overall["speedup"] or 0.0))


def board_heatmaps(of: Reproduction, runs: Sequence[Run]) -> Pictures:
    """Draw of each comparison speedup and MAT, a row per method and a column per task."""
    for key, even in (("speedup", 1.0), ("mat", None)):
        for stem, (comparison,), title, text in drawn_together(of, runs, claimed=(key,)):
            numbers = {
                (comparison.name_of(entry), HEADINGS.get(task, task)): entry.measured(key, task)
                for entry in reversed(_fastest_first(comparison))  # the first is drawn below
                if entry.ranked
                for task in (*comparison.tasks, OVERALL)
            }
            grid, unit = HeatmapGrid("", numbers), unit_of(key, comparison.timing)
            yield f"{stem}_{key}", heatmaps([grid], "task", "method", unit, title, text, even)


# --- The methods with a draft model: what each gains and takes ------------------------------------

_DRAFT_COLUMNS = (
    "model", "method", "MAT [95 %]", SPEEDUP, CONTEXT, "draft share [95 %]", "hit rate [95 %]",
    "draft passes [95 %]", "draft tokens [95 %]", "target Params × L_new", "draft Params × L_new",
    "devices", "memory, GB", "cases", OUTPUTS,
)  # fmt: skip
_DRAFT_SHORT = (
    "method", "MAT", SPEEDUP, "draft share", "hit rate", "draft passes", "draft tokens", "devices",
    "memory, GB", "outputs",
)  # fmt: skip


def draft_model_tables(of: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate what each method gains and what it takes.

    The clock inside the steps costs time: speeds come from runs without it, if there are any.
    """
    timed = make_comparisons([run for run in runs if not run.phases] or runs, claims=())
    phased = make_comparisons([run for run in runs if run.phases], claims=())
    inside = {_key(entry): entry for comparison in phased for entry in comparison.drafting}
    rows = []
    for comparison in timed:
        for entry in comparison.drafting:
            clocked = inside.get(_key(entry))
            known = clocked is not None and clocked.run.tells_draft_time(entry.label)
            share: Cell = phase_share(clocked) if clocked and known else Estimate(None)
            rows.append(cells(comparison, entry, _DRAFT_COLUMNS, {"draft share [95 %]": share}))
    text = captions(timed, of.text)
    yield ResultTable.of("Draft models: gains and resources", text, rows, short=_DRAFT_SHORT)


def _key(entry: ComparedLabel) -> tuple[object, ...]:
    run = entry.run
    return (run.model, run.dataset, conditions(run), run.manifest.prompt_set_hash, entry.label)
