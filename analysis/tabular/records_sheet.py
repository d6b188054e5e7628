"""A line for a program per run, label and task: every number, its bounds, claims and verdicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from analysis.runs.comparisons import ComparedLabel, ComparedRuns, run_names
from analysis.runs.leaders import standings
from analysis.runs.settings import typed_value, varied_knobs
from specbench.results.records import DIFFERS, OWN_ENGINE
from specbench.results.summary_schema import Standing, SummaryRow, interval
from specbench.results.tasks import OVERALL

# KNOBS: those in which labels of one name differ.
_COLUMNS = (
    "run model dtype dataset hardware synthetic timing task label KNOBS method state_scope n_cases "
    "n_timed n_dropped n_disturbed mat mat_low mat_high tokens_per_s tokens_per_s_low "
    "tokens_per_s_high end_to_end_tokens_per_s estimator speedup speedup_low speedup_high "
    "speedup_without_rule end_to_end_speedup end_to_end_speedup_low end_to_end_speedup_high "
    "against_the_best p_against_the_best geomean_speedup geomean_speedup_low "
    "geomean_speedup_high speedup_eager speedup_eager_low speedup_eager_high speedup_graph "
    "speedup_graph_low speedup_graph_high bandwidth_share equal near_tie bug not_audited "
    "claimed_speedup claimed_mat claimed_model claimed_hardware claimed_source verdict"
)
# Of them, those that name a line.
WHERE = ("run", "model", "dataset", "task", "label")
# Numbers of a row with bounds beside them.
_WITH_BOUNDS = (
    "mat", "tokens_per_s", "speedup", "end_to_end_speedup", "geomean_speedup", "speedup_eager",
    "speedup_graph",
)  # fmt: skip


def records_sheet(comparisons: Sequence[ComparedRuns]) -> pd.DataFrame:
    """A line per run, label and task, for a program."""
    names = run_names(run for comparison in comparisons for run in comparison.runs)
    stands = {k: v for comparison in comparisons for k, v in standings(comparison).items()}
    knobs = [knob_columns(comparison) for comparison in comparisons]
    varied = list(dict.fromkeys(knob for each in knobs for own in each for knob in own))
    varied += ["settings"] if any(comparison.told for comparison in comparisons) else []
    several = any(run.engine != OWN_ENGINE for comparison in comparisons for run in comparison.runs)
    varied += [*_ANSWERED] if several else []
    frame = pd.DataFrame(
        {
            "run": names[entry.run.path],
            **own,
            **({"settings": comparison.told} if comparison.told else {}),
            **({name: of(entry, row) for name, of in _ANSWERED.items()} if several else {}),
            **_csv_cells(entry, task, row, stands.get((entry.run.path, entry.label))),
        }
        for comparison, each in zip(comparisons, knobs, strict=True)
        for entry, own in zip(comparison.entries, each, strict=True)
        for task, row in entry.rows.items()
    )
    before, after = (part.split() for part in _COLUMNS.split("KNOBS"))
    return frame[[*before, *varied, *after]]


# Where an engine of others answered.
_ANSWERED: Mapping[str, Callable[[ComparedLabel, SummaryRow], object]] = {
    "engine": lambda entry, _: entry.run.engine,
    "concurrency": lambda entry, _: entry.run.concurrency,
    DIFFERS: lambda _, row: row["lossless"].get(DIFFERS, 0),
}


def knob_columns(comparison: ComparedRuns) -> list[dict[str, str]]:
    """For each entry, the knobs that tell it from others of its label, by column."""
    found = varied_knobs([(entry.run, entry.label) for entry in comparison.entries])
    taken = _COLUMNS.split()
    return [
        {f"method.{k}" if k in taken else k: typed_value(v) for k, v in own.items()}
        for own in found
    ]


def _csv_cells(
    entry: ComparedLabel, task: str, row: SummaryRow, standing: Standing | None
) -> dict[str, object]:
    run, claim = entry.run, entry.claim
    bounds = {
        f"{key}_{end}": bound
        for key in _WITH_BOUNDS
        for end, bound in zip(("low", "high"), interval(row, key) or (None, None), strict=True)
    }
    return {
        **row,
        **row["lossless"],
        **bounds,
        "speedup_without_rule": entry.without_rule if task == OVERALL else None,
        "against_the_best": standing["verdict"] if standing and task == OVERALL else None,
        "p_against_the_best": standing["p"] if standing and task == OVERALL else None,
        "model": run.model,
        "dtype": run.dtype,
        "dataset": run.dataset,
        "hardware": run.hardware,
        "synthetic": run.synthetic,
        "claimed_speedup": claim and claim.value("speedup", task),
        "claimed_mat": claim and claim.value("mat", task),
        "claimed_model": claim and claim.model,
        "claimed_hardware": claim and claim.hardware,
        "claimed_source": claim and f"{claim.title}, {claim.source}",
        "verdict": entry.verdict(task),
    }
