# %% [markdown]
# # Anatomy of acceptance
#
# How deep does a draft hold, and where in the answer?

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.runs.acceptance import by_depth, by_position
from analysis.runs.comparisons import make_comparisons

comparisons = make_comparisons(shared.runs())

# %% [markdown]
# By depth: share of all steps that accepted at least so many draft tokens. A straight line on a
# logarithmic axis would mean that every token is accepted with the same chance. By position: MAT of
# the steps that begin within each stretch of the answer.

# %%
for comparison in comparisons:
    entries, left_out = shared.readable(comparison.drafting)
    depth, position = [], []
    for entry in entries:
        own = entry.records
        method = entry.method
        deep = [Point.at(d, share) for d, share in by_depth(own)]
        along = [Point.at(at, mat) for at, mat in by_position(own)]
        depth.append(Series(comparison.name_of(entry), method, deep))
        position.append(Series(comparison.name_of(entry), method, along))
    panels = [
        Panel("", "draft tokens accepted, at least", "share of steps", depth, top=1.0),
        Panel("", "position in the answer (tokens)", "MAT", position, bottom=1.0),
    ]
    figure = curves([panels], f"Acceptance: {comparison.title}", captions([comparison], left_out))
    shared.show(figure, f"acceptance_{comparison.model}_{comparison.dataset}")
