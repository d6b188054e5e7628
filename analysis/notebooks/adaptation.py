# %% [markdown]
# # Adaptation
#
# Methods that learn while they decode get better: within an answer, and, where their state is kept
# for the run, from request to request.

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.runs.acceptance import by_position, stream_parts
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import mat

comparisons = make_comparisons(shared.runs())

# %%
for comparison in comparisons:
    entries, left_out = shared.readable(comparison.drafting)
    within, over = [], []
    for entry in entries:
        own = entry.records
        method = entry.method
        along = [Point.at(at, value) for at, value in by_position(own)]
        stream = [Point.at(size, mat(turns)) for size, turns in stream_parts(own, 5)]
        within.append(Series(comparison.name_of(entry), method, along))
        over.append(Series(comparison.name_of(entry), method, stream))
    panels = [
        Panel("within an answer", "position (tokens)", "MAT", within, bottom=1.0),
        Panel("over the stream", "tokens of finished requests", "MAT", over, bottom=1.0),
    ]
    figure = curves([panels], f"Adaptation: {comparison.title}", captions([comparison], left_out))
    shared.show(figure, f"adaptation_{comparison.model}_{comparison.dataset}")
