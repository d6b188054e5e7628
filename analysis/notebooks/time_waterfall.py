# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Where the time goes
#
# Milliseconds per token, by phase of a step: what plain decoding pays for its passes, and what a
# method pays for fewer of them.
#
# Needs: runs whose clock looked into the steps, from `python run.py measure=phases`.

# %%
import pandas as pd

from analysis.notebooks import shared
from analysis.plots.stacked_bars import stacked_bars
from analysis.plots.sweeps import figure_name
from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import STEP_PHASES, decoded_tokens, phase_s, pooled_ratio
from specbench.results.estimate import Estimate
from specbench.results.records import CaseRecord

phased = shared.runs(
    "times by phase",
    "python run.py measure=phases 'compare=[pld]'",
    where=lambda run: any(record.phase_s for record in run.records),
)


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
        rows,
        "milliseconds per token",
        f"Time: {comparison.printed_title}",
        caption(comparison),
        "{:.1f}",
    )
    shared.show(figure, f"time_{comparison.model}_{comparison.dataset}")
    values = {name: {p: cell.value for p, cell in row.items()} for name, row in rows.items()}
    frame = pd.DataFrame(values).T.rename_axis("label").reset_index()
    shared.table(frame, f"Milliseconds per token: {comparison.printed_title}")
