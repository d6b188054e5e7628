"""N-Grammys (arXiv 2411.03786): Figures 1 to 9 and Table 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from analysis.papers.ngrammys_rows import FIGURE4
from analysis.papers.reproduction import (
    SPEEDUP,
    Reproduction,
    by_model,
    captions,
    claimed_groups,
    claimed_in_cells,
    drafting,
    grid,
    has_numbers,
    knob,
    label,
    point,
    sweeps,
)
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import heatmaps
from analysis.runs.claims import NOT_RUN, OTHER_MODEL, claim_of_setting, compare, load_ledger
from analysis.runs.comparisons import caption
from analysis.runs.estimates import over_repeats
from analysis.tabular.comparison_tables import (
    claimed_cells,
    context_cells,
    settings_table,
    with_rule,
)
from analysis.tabular.table import Cell, ResultTable
from specbench.results.estimate import ABSENT, Estimate
from specbench.results.statistics import OVERALL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from analysis.papers.reproduction import Pictures, Sweep
    from analysis.plots.heatmaps import HeatmapGrid
    from analysis.runs.claims import Claim
    from analysis.runs.comparisons import ComparedLabel, Comparison
    from analysis.runs.load import Run

PAPER = "ngrammys"
_MAT = "tokens per call (MAT)"
_RESAMPLES = 2000
_FIGURE1_TEXT = (
    "Time of a target pass over k rows of w + 1 tokens (a batch, as the paper runs it), relative "
    "to one of a single token. The paper's cells (Mistral-7B, bfloat16, A100-40GB) have no "
    "numbers in its text."
)
_FIGURE2_TEXT = (
    "What the model alone gives: its unigrams, bigrams, and bigrams extended to w tokens. The "
    "paper's curves have no numbers; it says about 1.5 tokens per call at k = 25, w = 2 (hollow; "
    "Mistral-7B, A100-40GB, data set not stated)."
)
_GRID_TEXT = "k rows of w draft tokens each. The paper's cells have no numbers in its text."
_TABLE1_TEXT = (
    "± is the standard deviation over the run's repeats, as in the paper, the bracket a 95 % "
    "interval over prompts. (k*, w*): the fastest of the settings that were run, chosen on the "
    "questions it is shown for, as the paper does. A claim stands beside a row of its own model; "
    "the paper's others on the same data follow below."
)


def _groups(runs: Sequence[Run]) -> list[Comparison]:
    return claimed_groups(runs, PAPER, "table1")


def _knobs(entry: ComparedLabel) -> Mapping[str, Any]:
    return entry.run.knobs(entry.label)


# --- Figure 1 -------------------------------------------------------------------------------------


def _slowdowns(run: Run, context: int) -> dict[tuple[int, int], dict[str, Any]]:
    """By (k, w): time of a batch pass over that of a pass of one token at the same context.

    The interval is that of the ratio of medians over the repeated passes (bootstrap).
    """
    batch = (run.surface or {})["batch"]
    axes = batch["axes"]
    samples = np.asarray(batch["samples_s"])[:, :, axes["context"].index(context), :]
    repeats = samples.shape[-1]
    drawn = np.random.default_rng(run.seed).integers(0, repeats, (_RESAMPLES, repeats))
    one = samples[axes["k"].index(1), axes["w"].index(0)]
    cells = {}
    for i, k in enumerate(axes["k"]):
        for j, w in enumerate(axes["w"]):
            ratios = np.median(samples[i, j][drawn], axis=-1) / np.median(one[drawn], axis=-1)
            low, high = np.quantile(ratios, (0.025, 0.975))
            value = float(np.median(samples[i, j]) / np.median(one))
            known = repeats > 1 and (k, w) != (1, 0)
            cells[int(k), int(w)] = {
                "slowdown": value,
                "slowdown_ci": (float(low), float(high)) if known else None,
            }
    return cells


def _figure1_caption(run: Run) -> str:
    made_up = "SYNTHETIC RECORDS, not a measurement. " if run.synthetic else ""
    return (
        f"{made_up}{_FIGURE1_TEXT} {run.model} ({run.dtype}), random ids. "
        f"Hardware: {run.hardware}. Medians of {_passes(run)} passes; intervals: 95 %, "
        f"bootstrap over passes. Code: {run.code}."
    )


def _passes(run: Run) -> int:
    """How often each pass was timed."""
    return len((run.surface or {})["batch"]["samples_s"][0][0][0])


def _contexts(run: Run) -> list[int]:
    return [int(context) for context in (run.surface or {})["batch"]["axes"]["context"]]


def _figure1(runs: Sequence[Run]) -> list[ResultTable]:
    rows: list[dict[str, Cell]] = [
        {
            "model": run.model,
            "context (tokens)": str(context),
            "k": str(k),
            "w": str(w),
            "slow-down [95 %]": Estimate(cell["slowdown"], cell["slowdown_ci"]),
            "passes": str(_passes(run)),
        }
        for run in runs
        for context in _contexts(run)
        for (k, w), cell in _slowdowns(run, context).items()
    ]
    text = "\n".join(_figure1_caption(run) for run in runs)
    return [ResultTable.of("N-Grammys, Figure 1: slow-down of a target pass", text, rows)]


def _figure1_figure(runs: Sequence[Run]) -> Pictures:
    for run in runs:
        figure = heatmaps(
            [
                grid(f"context of {context} tokens", _slowdowns(run, context), "slowdown", False)
                for context in _contexts(run)
            ],
            "w (draft tokens in a row)", "k (rows)", "time over that of one token",
            f"N-Grammys, Figure 1 ({run.model})", _figure1_caption(run),
        )  # fmt: skip
        yield run.model, figure


# --- Figure 2 -------------------------------------------------------------------------------------


def _figure2(runs: Sequence[Run]) -> list[ResultTable]:
    columns = {"source": label, "k": knob("k"), "w": knob("w")}
    title = "N-Grammys, Figure 2: tokens per call against k"
    return [settings_table(title, _unclaimed(runs), columns, _FIGURE2_TEXT)]


def _unclaimed(runs: Sequence[Run]) -> list[Comparison]:
    """Groups beside which the ledger's numbers, which are the mixed strategy's, cannot stand."""
    return claimed_groups(runs, PAPER, "figure2")


def _figure2_figure(runs: Sequence[Run]) -> Pictures:
    for model, groups in by_model(_unclaimed(runs)):
        panels = []
        for group in groups:
            names = list(dict.fromkeys(entry.label for entry in drafting(group)))
            panels.append(
                Panel(
                    group.runs[0].dataset, "k (drafts)", _MAT,
                    [_over_k(group, name) for name in names], bottom=1.0,
                )
            )  # fmt: skip
        text = captions(groups, _FIGURE2_TEXT)
        yield model, curves([panels], f"N-Grammys, Figure 2 ({model})", text)


def _over_k(group: Comparison, name: str) -> Series:
    own = sorted(
        (int(_knobs(entry)["k"]), str(entry.run.path), entry)
        for entry in drafting(group)
        if entry.label == name
    )
    source = f"{PAPER}/{name.partition('_')[0]}"
    points = [point(k, e, "mat") for k, _, e in own]
    widths = {int(_knobs(entry)["w"]) for _, _, entry in own}
    claimed = [
        Point(float(claim.knobs["k"]), claim.value("mat"))
        for claim in load_ledger()
        if claim.paper == PAPER and claim.setting == "bigram only" and {claim.knobs["w"]} == widths
    ]
    return Series(name.replace("_", ", w = "), source, points, claimed=claimed)


# --- Figures 3, 6, 8 and 5, 7, 9 ------------------------------------------------------------------


def _grid_table(words: str) -> Callable[[Sequence[Run]], list[ResultTable]]:
    def tables(runs: Sequence[Run]) -> list[ResultTable]:
        columns = {"method": label, "k": knob("k"), "w": knob("w")}
        title = f"N-Grammys, {words}, over (k, w)"
        return [settings_table(title, _groups(runs), columns, _GRID_TEXT)]

    return tables


def grid_figures(runs: Sequence[Run], key: str, unit: str, place: str = "over (k, w)") -> Pictures:
    """One figure per model; of each data set a heatmap per strategy, layout and other setting.

    Args:
        runs: a sweep over k and w.
        key: of the number in a summary's row.
        unit: what the number is.
        place: for the title.
    """
    for model, groups in by_model(_groups(runs)):
        found = [(group, sweep) for group in groups for sweep in sweeps(group, "k", "w")]
        grids = [_kw_grid(group, sweep, key) for group, sweep in found]
        if any(map(has_numbers, grids)):
            entries = [entry for _, sweep in found for entry in sweep.entries.values()]
            claimed = claimed_in_cells(entries, key, "k", "w")
            figure = heatmaps(
                grids, "w (draft tokens in a row)", "k (rows)", unit,
                f"N-Grammys, {place} ({model})",
                captions(groups, _GRID_TEXT, claimed, speedup=key == "speedup"),
            )  # fmt: skip
            yield model, figure


def _figure3_figure(runs: Sequence[Run]) -> Pictures:
    return grid_figures(runs, "speedup", SPEEDUP, "Figures 3, 6, 8")


def _figure5_figure(runs: Sequence[Run]) -> Pictures:
    return grid_figures(runs, "mat", _MAT, "Figures 5, 7, 9")


def _kw_grid(group: Comparison, sweep: Sweep, key: str) -> HeatmapGrid:
    title = f"{group.runs[0].dataset} (n = {group.entries[0].overall['n_cases']})"
    return grid(sweep.titled(title), sweep.rows(), key, downwards=False)


# --- Table 1 --------------------------------------------------------------------------------------


def _table1(runs: Sequence[Run]) -> list[ResultTable]:
    groups = _groups(runs)
    rows: list[dict[str, Cell]] = []
    notes: list[str] = []
    for group in groups:
        where = [group.runs[0].model, group.runs[0].dataset]
        entries = [e for e in drafting(group) if e.overall["method"] == PAPER]
        timed = [e for e in entries if e.overall["speedup"] is not None]
        best = max(timed, key=lambda e: e.overall["speedup"] or 0.0, default=None)
        for entry in drafting(group):
            claim = entry.claim if entry.claim and entry.claim.model == where[0] else None
            rows.append(_table1_row(entry, _setting(entry), claim))
            notes += [f"{_setting(entry)}: claimed by {claim.describe()}."] if claim else []
        if best is not None:
            claim = claim_of_setting(_claims(), "best", PAPER, *where)
            rows.append(_table1_row(best, f"(k*, w*) = {_pair(best)}", claim))
            notes += [f"(k*, w*): claimed by {claim.describe()}."] if claim else []
    for claim in _claimed_elsewhere(groups):
        rows.append(
            {
                "model": claim.model,
                "data": claim.dataset,
                "setting": _claimed_setting(claim),
                "cases": "0",
                **claimed_cells(claim),
                "verdict": _why_not(claim, groups),
            }
        )
        quoted = "quoted" if claim.quoted else "claimed"
        notes.append(f"{_claimed_setting(claim)}: {quoted} by {claim.describe()}.")
    text = "\n".join([_TABLE1_TEXT, *(caption(group) for group in groups)])
    return [ResultTable.of("N-Grammys, Table 1", text, rows, with_rule(notes))]


def _claimed_elsewhere(groups: Sequence[Comparison]) -> list[Claim]:
    """What the paper's table has on the same data and stands beside no row of ours."""
    ran = {
        (group.runs[0].dataset, group.runs[0].model, str(entry.overall["method"]))
        for group in groups
        for entry in group.entries
    }
    datasets = {group.runs[0].dataset for group in groups}
    return [
        claim
        for claim in _claims()
        if claim.dataset in datasets and (claim.dataset, claim.model, claim.method) not in ran
    ]


def _why_not(claim: Claim, groups: Sequence[Comparison]) -> str:
    methods = {
        str(entry.overall["method"])
        for group in groups
        for entry in group.entries
        if group.runs[0].dataset == claim.dataset
    }
    return OTHER_MODEL if claim.method in methods else NOT_RUN


def _claimed_setting(claim: Claim) -> str:
    """``(10, 10)``, ``(k*, w*) = (25, 14)`` where both are stated, or another's method."""
    if claim.method != PAPER:
        return claim.method
    pair = f"({claim.knobs['k']}, {claim.knobs['w']})" if claim.knobs else ""
    return pair if claim.setting is None else " = ".join(filter(None, ["(k*, w*)", pair]))


def _setting(entry: ComparedLabel) -> str:
    return _pair(entry) if entry.overall["method"] == PAPER else entry.label


def _pair(entry: ComparedLabel) -> str:
    return f"({_knobs(entry)['k']}, {_knobs(entry)['w']})"


def _claims() -> list[Claim]:
    return [c for c in load_ledger() if c.paper == PAPER and c.artifact == "table1"]


def _table1_row(entry: ComparedLabel, setting: str, claim: Claim | None) -> dict[str, Cell]:
    row, run = entry.overall, entry.run
    spread = over_repeats(run.records, entry.label, run.baseline or "")
    return {
        "model": run.model,
        "data": run.dataset,
        "setting": setting,
        "tokens per call [95 %]": entry.measured("mat"),
        "speedup ± sd": f"{spread[0]:.2f} ± {spread[1]:.2f}" if spread else ABSENT,
        "speedup [95 %]": entry.measured("speedup"),
        **context_cells(row),
        "cases": str(row["n_cases"]),
        **claimed_cells(claim),
        "verdict": compare(claim, row, run.model, run.gpus, OVERALL),
    }


ARTIFACTS = (
    Reproduction("ngrammys_figure1", "N-Grammys, Figure 1", _figure1, _figure1_figure),
    Reproduction("ngrammys_figure2", "N-Grammys, Figure 2", _figure2, _figure2_figure),
    Reproduction(
        "ngrammys_figure3", "N-Grammys, Figures 3, 6, 8", _grid_table("speedup"), _figure3_figure
    ),
    Reproduction(
        "ngrammys_figure5",
        "N-Grammys, Figures 5, 7, 9",
        _grid_table("tokens per call"),
        _figure5_figure,
        instead=("ngrammys_figure3",),  # the same grid, with speeds beside
    ),
    Reproduction("ngrammys_table1", "N-Grammys, Table 1", _table1),
    FIGURE4,
)
