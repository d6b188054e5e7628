# %% [markdown]
# # Anatomy of acceptance
#
# How deep does a draft hold, and where in the answer?

# %%
from analysis import notebook
from analysis.papers.reproduction import captions, drafting, measured_point
from analysis.plots.charts import Panel, Series, curves
from analysis.runs.acceptance import by_depth, by_position
from analysis.runs.comparisons import make_comparisons, name

groups = make_comparisons(notebook.runs())

# %% [markdown]
# By depth: share of all steps that accepted at least so many draft tokens. A straight line on a
# logarithmic axis would mean that every token is accepted with the same chance. By position: MAT of
# the steps that begin within each stretch of the answer.

# %%
for group in groups:
    entries, left_out = notebook.readable(drafting(group))
    depth, position = [], []
    for entry in entries:
        own = [record for record in entry.run.records if record.label == entry.label]
        method = str(entry.overall["method"])
        deep = [measured_point(d, share) for d, share in by_depth(own)]
        along = [measured_point(at, mat) for at, mat in by_position(own)]
        depth.append(Series(name(group, entry), method, deep))
        position.append(Series(name(group, entry), method, along))
    panels = [
        Panel("", "draft tokens accepted, at least", "share of steps", depth, top=1.0),
        Panel("", "position in the answer (tokens)", "MAT", position, bottom=1.0),
    ]
    figure = curves([panels], f"Acceptance: {group.title}", captions([group], left_out))
    notebook.show(figure, f"acceptance_{group.runs[0].model}_{group.runs[0].dataset}")
