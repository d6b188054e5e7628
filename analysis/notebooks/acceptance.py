# %% [markdown]
# # Anatomy of acceptance
#
# How deep does a draft hold, and where in the answer?

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, curves
from analysis.runs.acceptance import by_depth, by_position
from analysis.runs.comparisons import make_comparisons

comparisons = make_comparisons(shared.runs())

# %% [markdown]
# By depth: share of all steps that accepted at least so many draft tokens. A straight line on a
# logarithmic axis would mean that every token is accepted with the same chance. By position: MAT of
# the steps that begin within each stretch of the answer.

# %%
for comparison in comparisons:
    depth, left_out = shared.drawn(comparison, by_depth)
    position, _ = shared.drawn(comparison, by_position)
    panels = [
        Panel("", "draft tokens accepted, at least", "share of steps", depth, top=1.0),
        Panel("", "position in the answer (tokens)", "MAT", position, bottom=1.0),
    ]
    figure = curves([panels], f"Acceptance: {comparison.title}", captions([comparison], left_out))
    shared.show(figure, f"acceptance_{comparison.model}_{comparison.dataset}")
