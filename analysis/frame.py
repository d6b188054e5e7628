"""One frame of all runs: a line per run, label and task, a column per metric and bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import pandas as pd

from analysis.runs.comparisons import ComparedLabel, ComparedRuns, run_names
from analysis.runs.leaders import standings
from analysis.runs.settings import typed_value, varied_knobs
from specbench.results.metrics import METRICS
from specbench.results.records import DIFFERS, OWN_ENGINE, VERDICTS
from specbench.results.summary_schema import Standing, SummaryRow, interval, number
from specbench.results.tasks import OVERALL

# The sheet's columns; KNOBS: those in which labels of one name differ.
_SHEET = (
    "run model dtype dataset hardware synthetic timing task label KNOBS method state_scope n_cases "
    "n_timed n_dropped n_disturbed mat mat_low mat_high tokens_per_s tokens_per_s_low "
    "tokens_per_s_high end_to_end_tokens_per_s estimator speedup speedup_low speedup_high "
    "speedup_without_rule end_to_end_speedup end_to_end_speedup_low end_to_end_speedup_high "
    "against_the_best p_against_the_best geomean_speedup geomean_speedup_low "
    "geomean_speedup_high speedup_eager speedup_eager_low speedup_eager_high speedup_graph "
    "speedup_graph_low speedup_graph_high bandwidth_share equal near_tie bug not_audited "
    "claimed_speedup claimed_mat claimed_model claimed_hardware claimed_source verdict"
)


def records_sheet(comparisons: Sequence[ComparedRuns]) -> pd.DataFrame:
    """Make a line per run, label and task: who was measured, each metric and its bounds, claims."""
    names = run_names(run for comparison in comparisons for run in comparison.runs)
    engines = any(run.engine != OWN_ENGINE for each in comparisons for run in each.runs)
    lines: list[dict[str, object]] = []
    varied: dict[str, None] = {}
    for comparison in comparisons:
        stands = standings(comparison)
        knobs = varied_knobs([(entry.run, entry.label) for entry in comparison.entries])
        for entry, differing in zip(comparison.entries, knobs, strict=True):
            run = entry.run
            standing = stands.get((run.path, entry.label))
            for task, row in entry.rows.items():
                more: dict[str, object] = {
                    f"method.{knob}" if knob in _SHEET.split() else knob: typed_value(value)
                    for knob, value in differing.items()
                }
                if comparison.told:
                    more["settings"] = comparison.told
                if engines:
                    differs = row["lossless"].get(DIFFERS, 0)
                    more |= {"engine": run.engine, "concurrency": run.concurrency, DIFFERS: differs}
                varied |= dict.fromkeys(more)
                facts = _facts(entry, task, row, standing)
                lines.append({"run": names[run.path], **more, **_numbers(row), **facts})
    before, after = (part.split() for part in _SHEET.split("KNOBS"))
    return pd.DataFrame(lines)[[*before, *varied, *after]]


def _numbers(row: SummaryRow) -> dict[str, object]:
    """Each metric with its bounds, by column."""
    numbers: dict[str, object] = {}
    for metric in METRICS:
        low, high = interval(row, metric.name) or (None, None)
        name = metric.name
        numbers |= {name: number(row, name), f"{name}_low": low, f"{name}_high": high}
    return numbers


def _facts(
    entry: ComparedLabel, task: str, row: SummaryRow, standing: Standing | None
) -> dict[str, object]:
    run, claim = entry.run, entry.claim
    whole = task == OVERALL
    of_row = "method state_scope n_cases n_timed n_dropped n_disturbed estimator timing task label"
    return {
        **{key: cast("Mapping[str, object]", row)[key] for key in of_row.split()},
        "model": run.model,
        "dtype": run.dtype,
        "dataset": run.dataset,
        "hardware": run.hardware,
        "synthetic": run.synthetic,
        "speedup_without_rule": entry.without_rule if whole else None,
        "against_the_best": standing["verdict"] if standing and whole else None,
        "p_against_the_best": standing["p"] if standing and whole else None,
        **{verdict: row["lossless"].get(verdict, 0) for verdict in VERDICTS},
        "claimed_speedup": claim and claim.value("speedup", task),
        "claimed_mat": claim and claim.value("mat", task),
        "claimed_model": claim and claim.model,
        "claimed_hardware": claim and claim.hardware,
        "claimed_source": claim and f"{claim.title}, {claim.source}",
        "verdict": entry.verdict(task),
    }
