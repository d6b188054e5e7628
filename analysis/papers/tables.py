"""The papers' tables, by the kinds that ``reproductions.yaml`` names (:data:`KINDS`).

A kind is called with the reproduction, its runs and its arguments in the file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from analysis.runs import acceptance
from analysis.runs.acceptance import draft_passes, draft_tokens, drafter_count, phase_share
from analysis.runs.captions import captions
from analysis.runs.claims import NOT_RUN, OTHER_MODEL, Claim
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, conditions, make_comparisons
from analysis.runs.estimates import (
    decoded_tokens,
    mat,
    over_repeats,
    pooled_ratio,
    steps,
    tokens_per_s,
)
from analysis.runs.leaders import by_speedup, leaders
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import (
    claimed_cell,
    claimed_cells,
    comparison_table,
    context_cells,
    rows_once,
    settings_table,
    task_table,
    with_rule,
)
from analysis.tabular.table import ResultTable
from specbench.results.cells import ABSENT, Cell, NumberCell, TextCell
from specbench.results.headline_table import OUTPUTS, case_cell, leaders_text, outputs_cell
from specbench.results.names import display_name
from specbench.results.records import CaseRecord
from specbench.results.statistics.summary import timed_turns
from specbench.results.tasks import HEADINGS, OVERALL

if TYPE_CHECKING:
    from analysis.papers import Reproduction

Tables: TypeAlias = Iterable[ResultTable]
Row: TypeAlias = Mapping[str, Cell]

CONTEXT = "context"  # the columns of :func:`context_cells`
SPEEDUP = "speedup [95 %]"
# The knob of a method's store size.
_STORES = {"ssd": "buffer_tokens", "rest": "store_tokens"}


# --- columns by their headings --------------------------------------------------------------------


def _devices(entry: ComparedLabel) -> str:
    """Format the devices used: ``1 of 2`` where two were configured and one was used."""
    used, configured = drafter_count("devices"), drafter_count("devices_asked")
    counted = [(used(record), configured(record)) for record in entry.records]
    counts = sorted({(int(n), int(total or n)) for n, total in counted if n is not None})
    return ", ".join(str(n) if n == total else f"{n} of {total}" for n, total in counts) or ABSENT


def _memory(entry: ComparedLabel) -> TextCell:
    sizes = {part: size / 1e9 for part, size in entry.run.memory(entry.label).items()}
    text = " + ".join(f"{sizes[part]:.2f}" for part in ("target", "draft") if part in sizes)
    return TextCell(text, {f"{part} memory, GB": sizes[part] for part in sizes})


def _ratio(
    top: Callable[[CaseRecord], float | None], bottom: Callable[[CaseRecord], float | None]
) -> Callable[[ComparedLabel], NumberCell]:
    return lambda entry: pooled_ratio(entry.records, top, bottom, entry.run.seed)


_CELLS: Mapping[str, Callable[[ComparedLabel], Cell]] = {
    "model": lambda e: e.run.model,
    "data": lambda e: e.run.dataset,
    "method": lambda e: e.label,
    "setting": lambda e: e.label,
    "MAT [95 %]": lambda e: e.measured("mat"),
    "tokens/s [95 %]": lambda e: e.speed(),
    SPEEDUP: lambda e: e.measured("speedup"),
    "draft share of time [95 %]": phase_share,
    "hit rate [95 %]": acceptance.hit_rate,
    "draft passes [95 %]": _ratio(draft_passes, decoded_tokens),
    "draft tokens [95 %]": _ratio(draft_tokens, decoded_tokens),
    "draft passes per target pass [95 %]": _ratio(draft_passes, steps),
    "draft token-passes per token [95 %]": _ratio(draft_tokens, decoded_tokens),
    "L_new of a target pass [95 %]": lambda e: replace(acceptance.rows_of_target_pass(e), digits=1),
    "L_new of a draft pass [95 %]": lambda e: replace(acceptance.rows_of_draft_pass(e), digits=1),
    "target Params × L_new": lambda e: acceptance.load_of_pass(
        acceptance.rows_of_target_pass(e), e.run.parameters()
    ),
    "draft Params × L_new": lambda e: acceptance.load_of_pass(
        acceptance.rows_of_draft_pass(e), e.run.parameters(e.label)
    ),
    "devices": _devices,
    "memory, GB": _memory,
    "cases": lambda e: case_cell(e.overall),
    OUTPUTS: lambda e: outputs_cell(e.overall),
    "verdict": lambda e: e.verdict(),
}


def _cells(
    comparison: ComparedRuns,
    entry: ComparedLabel,
    headings: Sequence[str],
    others: Mapping[str, Cell] | None = None,
) -> dict[str, Cell]:
    """Make a row of a table; ``others`` gives the cells of headings that :data:`_CELLS` lacks."""
    row: dict[str, Cell] = {}
    for heading in headings:
        if others and heading in others:
            row[heading] = others[heading]
        elif heading == CONTEXT:
            row |= context_cells(entry.overall)
        elif heading == "run":
            row[heading] = comparison.title
        elif heading.startswith("claimed"):
            row[heading] = _cell_of_claim(entry.claim, heading)
        else:
            row[heading] = _CELLS[heading](entry)
    return row


def _cell_of_claim(claim: Claim | None, heading: str) -> Cell:
    """Make a cell of ``claimed on``, ``claimed MAT``, ``claimed hit rate`` and the like."""
    if heading == "claimed on":
        return claim.claimed_on if claim else ABSENT
    return claimed_cell(claim, heading.removeprefix("claimed ").lower().replace(" ", "_"))


def _task_cells(entry: ComparedLabel, task: str = OVERALL) -> dict[str, Cell]:
    return {
        "MAT [95 %]": entry.measured("mat", task),
        SPEEDUP: entry.measured("speedup", task),
        **context_cells(entry.rows[task]),
    }


def knob_of(entry: ComparedLabel, name: str) -> object:
    """Return a knob's value; ``store`` is the method's knob of its store's size."""
    return entry.knobs.get(_STORES.get(entry.method, "") if name == "store" else name)


def _setting_cell(entry: ComparedLabel, name: str) -> str:
    """Format an entry's label, temperature or knob; – if it has no such knob."""
    if name == "label":
        return entry.label
    value = f"{entry.run.temperature:g}" if name == "temperature" else knob_of(entry, name)
    return ABSENT if value is None else str(value)


def along(entries: Iterable[ComparedLabel], knob: str) -> list[tuple[int, ComparedLabel]]:
    """Sort the entries that have a knob by its value, and by folder where several share it."""
    values = [(knob_of(entry, knob), entry) for entry in entries]
    with_knob = [(int(str(value)), entry) for value, entry in values if value is not None]
    return sorted(with_knob, key=lambda item: (item[0], str(item[1].run.path)))


# --- claims ---------------------------------------------------------------------------------------


def claimed_for(claims: Iterable[Claim]) -> str:
    """List the models, hardware and sources of claims; "" without claims."""
    models: dict[str, list[str]] = {}
    for claim in claims:
        source = f"hardware: {claim.hardware} ({claim.title.partition(':')[0]})"
        models.setdefault(source, []).append(display_name(claim.model))
    parts = [f"{', '.join(dict.fromkeys(names))}, {source}" for source, names in models.items()]
    return f"Claimed for {'; '.join(parts)}." if parts else ""


def _shown_claims(comparisons: Iterable[ComparedRuns]) -> list[Claim]:
    """List the claims that a table of these comparisons shows."""
    by_comparison = [[*(entry.claim for entry in c.entries), *c.not_run] for c in comparisons]
    return [claim for claims in by_comparison for claim in claims if claim]


# --- kinds that several tables share --------------------------------------------------------------


def settings(
    reproduction: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Mapping[str, str],
    beside: Sequence[str] = (),
) -> Tables:
    """Tabulate a row per setting; ``columns`` has by heading a knob, ``label`` or ``temperature``.

    ``beside`` names claimed speeds without a data set, which follow below; the caption
    then has conditions only.
    """
    of_entry = {heading: partial(_setting_cell, name=name) for heading, name in columns.items()}
    stated = [claim for claim in reproduction.own_claims if claim.value("tokens_per_s")]
    below = [claim for claim in stated if (claim.setting or "") in beside]
    comparisons = reproduction.comparisons(runs)
    claimed = claimed_for([*_shown_claims(comparisons), *below])
    text = captions((), claimed, "" if beside else reproduction.text)
    yield settings_table(title, comparisons, of_entry, text, below)


def by_task(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate each comparison's methods, and with several tasks a second table of tasks."""
    for comparison in reproduction.comparisons(runs):
        table = comparison_table(comparison, not_run=True)
        text = captions((), claimed_for(_shown_claims([comparison])), table.caption)
        yield replace(table, caption=text)
        if len(comparison.tasks) > 1:
            yield task_table(comparison, f"{reproduction.title} by task ({comparison.title})")


def columns(
    reproduction: Reproduction,
    runs: Sequence[Run],
    *,
    title: str,
    columns: Sequence[str],
    knob: Sequence[str] = (),
    short: Sequence[str] = (),
    not_run: bool = False,
) -> Tables:
    """Tabulate a row for each method or each value of a knob (its name, its column's heading).

    ``not_run``: whether claims about methods that were not run follow.
    """
    comparisons = reproduction.comparisons(runs)
    rows: list[Row] = []
    notes: list[str] = []
    for comparison in comparisons:
        values = along(comparison.drafting, knob[0]) if knob else enumerate(comparison.drafting)
        for value, entry in values:
            others = {knob[1]: str(value)} if knob else {}
            rows.append(_cells(comparison, entry, columns, others))
            notes.append(entry.note(f"{knob[1]} = {value}" if knob else entry.label))
        methods = {entry.method for entry in comparison.entries}
        for claim in reproduction.own_claims if not_run else ():
            if claim.method not in methods:
                row: dict[str, Cell] = {"model": claim.model, "method": claim.method, "cases": "0"}
                row |= {h: _cell_of_claim(claim, h) for h in columns if h.startswith("claimed")}
                rows.append(row | {"verdict": NOT_RUN})
                notes.append(claim.note(claim.method))
    claims = _shown_claims(comparisons) + (reproduction.own_claims if not_run else [])
    claimed = claimed_for(claims if SPEEDUP in columns else [])
    text = captions(comparisons, claimed, reproduction.text)
    notes = with_rule(notes if SPEEDUP in columns else [])
    yield ResultTable.from_rows(title, text, rows, notes, short)


def _table_of_labels(
    reproduction: Reproduction,
    runs: Sequence[Run],
    title: str,
    rows_of: Callable[[ComparedRuns, ComparedLabel], Iterable[Row]],
) -> Tables:
    comparisons = reproduction.comparisons(runs)
    rows = [
        {"run": comparison.title, **row}
        for comparison in comparisons
        for entry in comparison.entries
        for row in rows_of(comparison, entry)
    ]
    yield ResultTable.from_rows(title, captions(comparisons, reproduction.text), rows)


# --- N-Grammys, Figure 1: what a pass costs -------------------------------------------------------


def slowdown_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
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
    text = "\n".join(slowdown_caption(run, reproduction.text) for run in runs)
    yield ResultTable.from_rows("N-Grammys, Figure 1: slow-down of a target pass", text, rows)


def slowdown_caption(run: Run, text: str) -> str:
    """Format a caption: ``text``, then model, hardware, number of passes and code."""
    assert run.surface is not None
    made_up = "SYNTHETIC RECORDS, not a measurement. " if run.synthetic else ""
    return (
        f"{made_up}{text} {run.model} ({run.dtype}), random ids. Hardware: {run.hardware}. Medians "
        f"of {run.surface.repeats} passes; intervals: 95 %, bootstrap over passes. "
        f"Code: {run.code}."
    )


# --- N-Grammys, Figure 4: which rows win, at which rank, and who filled them ----------------------

SOURCES = ("context", "bigram")
_WINS = "share of the source's wins"
# Per part: its unit, and the drafter's list that has an entry per step.
PARTS = {
    "accepted draft tokens": (_WINS, "accepted"),
    "rank of the winning row (0 is first)": (_WINS, "won_rank"),
    "rows given to the source": ("share of steps", "rows"),
}


def distribution(entry: ComparedLabel, part: str, source: str) -> list[tuple[int, NumberCell]]:
    """Return every value up to the largest, even if it did not occur, with its share."""
    key = PARTS[part][1]
    records = [record for record in entry.records if record.drafter]

    def counted(record: CaseRecord) -> Counter[int]:
        if key == "rows":
            return Counter(record.drafter[f"rows_{source}"])
        of_steps = zip(record.drafter[key], record.drafter["won_source"], strict=True)
        return Counter(value for value, winner in of_steps if winner == source)

    def share(value: int) -> NumberCell:
        counts, totals = (lambda r: counted(r)[value]), (lambda r: counted(r).total())
        return pooled_ratio(records, counts, totals, entry.run.seed, at_most=1)

    total = sum(map(counted, records), Counter[int]())
    values = range(min(total, default=0), max(total, default=-1) + 1)
    return [(value, share(value)) for value in values]


def row_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate acceptance, rank and allocation by source."""

    def rows_of(_: ComparedRuns, entry: ComparedLabel) -> list[Row]:
        cases = case_cell(entry.overall)
        return [
            {"part": part, "source": source, "value": str(n), "share [95 %]": share, "cases": cases}
            for part in PARTS
            for source in SOURCES
            for n, share in distribution(entry, part, source)
        ]

    title = "N-Grammys, Figure 4: acceptance, rank, allocation"
    return _table_of_labels(reproduction, runs, title, rows_of)


# --- N-Grammys, Table 1: every setting, and the best of them --------------------------------------


def best_settings_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate every setting, the best of them, and the paper's other claims on the same data."""
    method = reproduction.claims[0]
    comparisons = reproduction.comparisons(runs)
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
        timed = [entry for entry in by_speedup(comparison) if entry.method == method]
        if not timed:
            continue
        best = timed[0]
        others = [entry for entry in leaders(timed, "speedup") if entry is not best]
        best_text = leaders_text([_pair(entry.knobs) for entry in (best, *others)])
        unknown = ", which the data cannot part" if others else ""
        notes.append(f"(k*, w*) of {comparison.title}: {best_text}{unknown}.")
        key = ("best", method, model, dataset)
        claims = reproduction.own_claims
        stated = [c for c in claims if (c.setting, c.method, c.model, c.dataset) == key]
        add(best, f"(k*, w*) = {_pair(best.knobs)}", "(k*, w*)", next(iter(stated), None))
    run_here = [(c.dataset, e.method, e.run.model) for c in comparisons for e in c.entries]
    for claim in reproduction.own_claims:
        models = [model for *key, model in run_here if key == [claim.dataset, claim.method]]
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
    text = captions(comparisons, claimed_for(_shown_claims(comparisons)), reproduction.text)
    yield ResultTable.from_rows(reproduction.title, text, rows, with_rule(notes))


def _pair(knobs: Mapping[str, object]) -> str:
    return f"({knobs['k']}, {knobs['w']})"


def _setting_row(entry: ComparedLabel, setting: str, claim: Claim | None) -> Row:
    run, measured = entry.run, _task_cells(entry)
    spread: Cell = ABSENT
    if repeats := over_repeats(run.records, entry.label, run.baseline or ""):
        mean, sd = repeats
        spread = TextCell(f"{mean:.2f} ± {sd:.2f}", {"speedup mean": mean, "speedup sd": sd})
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


def over_stream(entry: ComparedLabel) -> Iterator[tuple[float, dict[str, tuple[int, NumberCell]]]]:
    """Yield, by tokens in the store, MAT and tokens/s with the number of requests they count."""
    run = entry.run
    timed = {(record.repeat, record.case_id) for record in timed_turns(run.records, run.labels)}
    label_records = [record for record in run.records if record.label == entry.label]
    for size, turns in acceptance.stream_parts(label_records, _STREAM_PARTS):
        clocked = [turn for turn in turns if (turn.repeat, turn.case_id) in timed]
        speed = tokens_per_s(clocked, run.seed)
        numbers = {"mat": (len(turns), mat(turns, run.seed)), "tokens_per_s": (len(clocked), speed)}
        yield size, numbers


def stream_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
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
            for size, numbers in over_stream(entry)
        ]

    return _table_of_labels(reproduction, runs, "SSD over the stream of requests", rows_of)


# --- Token Recycling, Figure 4: the time of a step by its parts -----------------------------------

# The paper's names for the phases of a step, in its order.
PHASES = {
    "draft": "retrieve draft",
    "verify": "forward pass",
    "accept": "verify",
    "cache": "update KV cache",
    "observe": "update matrix",
    "other": "other",
}


def phase_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
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
            for phase, part in PHASES.items()
        ]

    title = "Token Recycling, Figure 4: time of a step"
    return _table_of_labels(reproduction, runs, title, rows_of)


# --- Spec-Bench's leaderboard ---------------------------------------------------------------------

_MEASURED = ("method", "MAT [95 %]", SPEEDUP, CONTEXT, OUTPUTS, "cases")


def board_tables(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate each comparison's board, and the board by task."""
    boards: dict[str, dict[str, Claim]] = {}  # by model and hardware, then by method
    for claim in sorted(reproduction.own_claims, key=lambda c: (c.size or 0.0, c.claimed_on)):
        boards.setdefault(claim.claimed_on, {})[claim.method] = claim

    def claimed(method: str, task: str = OVERALL) -> dict[str, Cell]:
        return {name: _board_cell(name, board.get(method), task) for name, board in boards.items()}

    for comparison in reproduction.comparisons(runs):
        entries = [entry for entry in rows_once(comparison) if entry in comparison.drafting]
        entries.sort(key=lambda entry: -(entry.overall["speedup"] or 0.0))
        rows: list[Row] = []
        for entry in entries:
            measured = _cells(comparison, entry, _MEASURED)
            rows.append({**measured, **claimed(entry.method), "verdict": entry.verdict()})
        methods = {entry.method for entry in entries}
        for method in dict.fromkeys(m for board in boards.values() for m in board):
            if method not in methods:
                rows.append({"method": method, "cases": "0", **claimed(method), "verdict": NOT_RUN})
        title = f"Spec-Bench's board ({comparison.title})"
        text = captions([comparison], reproduction.text)
        notes = with_rule([entry.note(entry.label) for entry in entries])
        short = ("method", "MAT", SPEEDUP, "verdict", *boards)
        yield ResultTable.from_rows(title, text, rows, notes, short)
        by_task: list[Row] = [
            {
                "task": HEADINGS.get(task, task),
                "method": entry.label,
                **_task_cells(entry, task),
                "cases": case_cell(entry.rows[task]),
                **claimed(entry.method, task),
            }
            for task in comparison.tasks
            for entry in entries
            if task in entry.rows
        ]
        title = f"Spec-Bench's board by task ({comparison.title})"
        text = "By task: speedups over ar; columns headed by a model show the board's claims."
        short = ("task", "method", "MAT", SPEEDUP, *boards)
        yield ResultTable.from_rows(title, text, by_task, short=short, groups=1)


def _board_cell(heading: str, claim: Claim | None, task: str) -> Cell:
    speedup = claim.value("speedup", task) if claim else None
    accepted = claim.value("mat", task) if claim else None
    parts = {f"{heading}: claimed speedup": speedup, f"{heading}: claimed MAT": accepted}
    numbers = [f"{value:.2f}" for value in (speedup, accepted) if value is not None]
    return TextCell(" / ".join(numbers) or ABSENT, parts)


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


def draft_model_table(reproduction: Reproduction, runs: Sequence[Run]) -> Tables:
    """Tabulate each method's gains and the resources that it takes.

    Measuring phases costs time, so speeds come from runs without phases if there are any.
    """
    timed = make_comparisons([run for run in runs if not run.phases] or runs, claims=())
    phased = make_comparisons([run for run in runs if run.phases], claims=())
    inside = {_key(entry): entry for comparison in phased for entry in comparison.drafting}
    rows = []
    for comparison in timed:
        for entry in comparison.drafting:
            clocked = inside.get(_key(entry))
            separable = clocked is not None and clocked.run.tells_draft_time(entry.label)
            share: Cell = phase_share(clocked) if clocked and separable else NumberCell(None)
            rows.append(_cells(comparison, entry, _DRAFT_COLUMNS, {"draft share [95 %]": share}))
    text = captions(timed, reproduction.text)
    yield ResultTable.from_rows("Draft models: gains and resources", text, rows, short=_DRAFT_SHORT)


def _key(entry: ComparedLabel) -> tuple[object, ...]:
    run = entry.run
    return (run.model, run.dataset, conditions(run), run.manifest.prompt_set_hash, entry.label)


KINDS: Mapping[str, Callable[..., Tables]] = {
    kind.__name__: kind
    for kind in (
        settings, by_task, columns, slowdown_table, row_table, best_settings_table, stream_table,
        phase_table, board_tables, draft_model_table,
    )
}  # fmt: skip
