"""Captions of tables and figures: two lines, of which the second warns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from analysis.runs.comparisons import ComparedRuns
from analysis.runs.load import Run
from specbench.results.conditions import KINDS, Warned, conditions, join_conditions, warnings
from specbench.results.headline_table import cases_text
from specbench.results.statistics.disturbed import disturbance_text
from specbench.results.statistics.served import served_labels
from specbench.results.summary_schema import SummaryRow


def caption(comparison: ComparedRuns) -> str:
    """Format model, data, cases and hardware, and on a second line the warnings that decide.

    The first line begins with the kind of the numbers unless they were measured here.
    """
    first = comparison.runs[0]
    cases = cases_text(entry.overall for entry in comparison.entries)
    model = conditions_of(comparison)["model"]
    settings = f", {comparison.overrides}" if comparison.overrides else ""
    head = f"{model} on {first.dataset}{settings}: {cases}. {first.hardware}."
    deciding = [warned for warned in warnings_of(comparison) if warned.decides]
    kinds = [warned.text for warned in deciding if warned.code in KINDS]
    # Remarks are long and listed with the conditions.
    others = [warned.text for warned in deciding if warned.code not in (*KINDS, "REMARK")]
    return "\n".join(filter(None, [" ".join([*kinds, head]), " ".join(others)]))


def captions(comparisons: Iterable[ComparedRuns], *before: str) -> str:
    """Join ``before`` and the comparisons' captions, each line once."""
    lines = [line for comparison in comparisons for line in caption(comparison).splitlines()]
    return "\n".join(dict.fromkeys(filter(None, [*before, *lines])))


def conditions_of(comparison: ComparedRuns) -> Mapping[str, str]:
    """Return a comparison's conditions; those that differ between its runs side by side."""
    lines = join_conditions(
        conditions(run.counted, run.manifest, _rows(comparison, run)) for run in comparison.runs
    )
    text = disturbance_text({e.run.path: e.disturbed for e in comparison.entries}.values())
    return {**lines, **({"disturbed turns": text} if text else {})}


def warnings_of(comparison: ComparedRuns) -> list[Warned]:
    """List what may mislead a reader of a comparison, each warning once."""
    warned: list[Warned] = []
    for run in comparison.runs:
        rows = _rows(comparison, run)
        served = served_labels(run.counted, run.labels, baseline=run.baseline)
        warned += warnings(run.counted, run.manifest, rows, run.errors, run.left_out, served)
    return list({warning.text: warning for warning in warned}.values())


def _rows(comparison: ComparedRuns, run: Run) -> list[SummaryRow]:
    return [row for e in comparison.entries if e.run is run for row in e.rows.values()]
