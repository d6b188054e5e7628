# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Anatomy of acceptance
#
# How deep does a draft hold, and where in the answer?
#
# Needs: any finished run, from `python run.py 'compare=[pld]'`; a replay does, too.

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, curves
from analysis.runs.acceptance import by_depth, by_position
from analysis.runs.comparisons import make_comparisons

comparisons = make_comparisons(shared.runs())

# %% [markdown]
# By depth: share of all steps that accepted at least so many draft tokens. If every token were
# accepted with the same chance p, the shares would fall as p, p², p³. By position: MAT of the steps
# that begin within each stretch of the answer.

# %%
for comparison in comparisons:
    depth, left_out = shared.drawn(comparison, by_depth)
    position, _ = shared.drawn(comparison, by_position)
    panels = [
        Panel("", "draft tokens accepted, at least", "share of steps", depth, top=1.0),
        Panel("", "position in the answer (tokens)", "MAT", position, bottom=1.0),
    ]
    title = f"Acceptance: {comparison.printed_title}"
    words = captions([comparison], left_out, speedup=False, times=False)
    shared.show(
        curves([panels], title, words), f"acceptance_{comparison.model}_{comparison.dataset}"
    )
    for series, across in ((depth, "accepted, at least"), (position, "position in the answer")):
        shared.table(shared.points(series, across), title)
