# %% [markdown]
# # Where the time goes
#
# Milliseconds per token, by phase of a step: what plain decoding pays for its passes, and what a
# method pays for fewer of them. Runs: any with `measure=phases`.

# %%
from analysis.notebooks import shared
from analysis.plots.stacked_bars import stacked_bars
from analysis.plots.sweeps import figure_name
from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import STEP_PHASES, decoded_tokens, phase_s, pooled_ratio
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord

phased = [run for run in shared.runs() if any(record.phase_s for record in run.records)]


# %%
def milliseconds(records: list[CaseRecord], phase: str) -> Estimate:
    return pooled_ratio(records, lambda r: 1e3 * phase_s(r, phase), decoded_tokens)


# %%
for comparison in make_comparisons(phased):
    rows = {}
    for entry in comparison.entries:
        own = [record for record in entry.timed_records if record.phase_s]
        rows[figure_name(comparison, entry)] = {p: milliseconds(own, p) for p in STEP_PHASES}
    figure = stacked_bars(
        rows, "milliseconds per token", f"Time: {comparison.title}", caption(comparison), "{:.1f}"
    )
    shared.show(figure, f"time_{comparison.model}_{comparison.dataset}")
