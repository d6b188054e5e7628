# %% [markdown]
# # Adaptation
#
# Methods that learn while they decode get better: within an answer, and, where their state is kept
# for the run, from request to request.

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, curves
from analysis.runs.acceptance import by_position, stream_parts
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import mat

comparisons = make_comparisons(shared.runs())

# %%
for comparison in comparisons:
    within, left_out = shared.drawn(comparison, by_position)
    over, _ = shared.drawn(
        comparison, lambda own: [(size, mat(turns)) for size, turns in stream_parts(own, 5)]
    )
    panels = [
        Panel("within an answer", "position (tokens)", "MAT", within, bottom=1.0),
        Panel("over the stream", "tokens of finished requests", "MAT", over, bottom=1.0),
    ]
    figure = curves([panels], f"Adaptation: {comparison.title}", captions([comparison], left_out))
    shared.show(figure, f"adaptation_{comparison.model}_{comparison.dataset}")
