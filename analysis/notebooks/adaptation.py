# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Adaptation
#
# Methods that learn while they decode get better: within an answer, and, where their state is kept
# for the run, from request to request.
#
# Needs: any finished run with answers of some length; state over requests needs
# `python run.py state_scope=paper`, as in `python run.py experiment=ssd_stream`.

# %%
from analysis.notebooks import shared
from analysis.papers.reproduction import captions
from analysis.plots.charts import Panel, curves
from analysis.runs.acceptance import by_position, stream_parts
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import mat

comparisons = make_comparisons(shared.runs(command="python run.py experiment=ssd_stream"))

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
    title = f"Adaptation: {comparison.printed_title}"
    words = captions([comparison], left_out, speedup=False, times=False)
    shared.show(
        curves([panels], title, words), f"adaptation_{comparison.model}_{comparison.dataset}"
    )
    for series, across in ((within, "position in the answer"), (over, "tokens of requests")):
        shared.table(shared.points(series, across), title)
