"""One frame of all runs: a line per run, label and task, a column per metric and bound."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.runs.comparisons import ComparedRuns, run_names
from analysis.runs.leaders import standings
from analysis.runs.settings import typed_value, varied_knobs
from specbench.results.metrics import METRICS
from specbench.results.records import AUDIT_STATUSES, DIFFERS, OWN_ENGINE
from specbench.results.summary_schema import interval
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
_OF_RUN = ("model", "dtype", "dataset", "hardware", "synthetic")


def records_sheet(comparisons: Sequence[ComparedRuns]) -> pd.DataFrame:
    """Make a line per run, label and task: conditions, each metric with its bounds, claims."""
    runs = [run for comparison in comparisons for run in comparison.runs]
    names, engines = run_names(runs), any(run.engine != OWN_ENGINE for run in runs)
    lines: list[dict[str, object]] = []
    varied: dict[str, None] = {}
    for comparison in comparisons:
        standing_by_label = standings(comparison)
        knobs = varied_knobs([(entry.run, entry.label) for entry in comparison.entries])
        for entry, differing in zip(comparison.entries, knobs, strict=True):
            run, claim = entry.run, entry.claim
            more: dict[str, object] = {
                f"method.{knob}" if knob in _SHEET.split() else knob: typed_value(value)
                for knob, value in differing.items()
            }
            if comparison.overrides:
                more["settings"] = comparison.overrides
            if engines:
                more |= {"engine": run.engine, "concurrency": run.concurrency, DIFFERS: None}
            varied |= dict.fromkeys(more)
            standing = standing_by_label.get((run.path, entry.label))
            for task, row in entry.rows.items():
                whole = task == OVERALL
                line: dict[str, object] = {
                    **row,
                    **more,
                    **dict.fromkeys([*AUDIT_STATUSES, DIFFERS], 0),
                    **row["lossless"],
                    **{name: getattr(run, name) for name in _OF_RUN},
                    "run": names[run.path],
                    "speedup_without_rule": entry.without_rule if whole else None,
                    "against_the_best": standing["verdict"] if standing and whole else None,
                    "p_against_the_best": standing["p"] if standing and whole else None,
                    "claimed_speedup": claim and claim.value("speedup", task),
                    "claimed_mat": claim and claim.value("mat", task),
                    "claimed_model": claim and claim.model,
                    "claimed_hardware": claim and claim.hardware,
                    "claimed_source": claim and f"{claim.title}, {claim.source}",
                    "verdict": entry.verdict(task),
                }
                for metric in METRICS:
                    low, high = interval(row, metric.name) or (None, None)
                    line |= {f"{metric.name}_low": low, f"{metric.name}_high": high}
                lines.append(line)
    before, after = (part.split() for part in _SHEET.split("KNOBS"))
    return pd.DataFrame(lines)[[*before, *varied, *after]]
