# %% [markdown]
# # Where the time goes
#
# Milliseconds per token, by phase of a step: what plain decoding pays for its passes, and what a
# method pays for fewer of them. Runs: any with `measure=phases`.

# %%
from analysis.notebooks import shared
from analysis.plots.stacked_bars import stacked_bars
from analysis.runs.comparisons import caption, make_comparisons
from analysis.runs.estimates import pooled_ratio
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord

PHASES = ("draft", "verify", "accept", "cache", "observe", "other")
phased = [run for run in shared.runs() if any(record.phase_s for record in run.records)]


# %%
def milliseconds(records: list[CaseRecord], phase: str) -> Estimate:
    return pooled_ratio(
        records, lambda r: 1e3 * (r.phase_s or {}).get(phase, 0.0), lambda r: max(0, r.n_new - 1)
    )


# %%
for comparison in make_comparisons(phased):
    rows = {}
    for entry in comparison.entries:
        own = [r for r in entry.run.records if r.label == entry.label and r.phase_s]
        per_token = {phase: milliseconds(own, phase) for phase in PHASES}
        parts = {p: (m.value, m.interval) for p, m in per_token.items() if m.value}
        rows[comparison.name_of(entry)] = parts
    figure = stacked_bars(
        rows, "milliseconds per token", f"Time: {comparison.title}", caption(comparison), "{:.1f}"
    )
    shared.show(figure, f"time_{comparison.model}_{comparison.dataset}")
