# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mean accepted tokens
#
# Tokens per target pass, bonus token included: what a method gains before it costs anything. The
# same on every machine.
#
# Needs: any finished run, from `python run.py 'compare=[pld]'`; a replay does, too.

# %%
from analysis.figures import task_bars
from analysis.notebooks import shared
from analysis.plots.charts import Panel, curves
from analysis.runs.acceptance import by_depth, by_position, stream_parts
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import mat

comparisons = make_comparisons(shared.runs())

# %%
columns = ("n_cases", "mat", "mat_low", "mat_high", "timing")
shared.table(shared.numbers(comparisons, *columns), "MAT over the whole run")

# %%
for comparison in comparisons:
    figure = task_bars(comparison, "mat")
    if figure is not None:
        shared.show(figure, f"mat_{comparison.model}_{comparison.dataset}")

# %% [markdown]
# How deep does a draft hold: share of the steps with a draft that accepted at least so many of its
# tokens? If every token were accepted with the same chance p, the shares would fall as p, p², p³.
#
# Where do methods that learn get better: within an answer (MAT of the steps that begin within each
# stretch of it), and, with state kept for the run (`python run.py state_scope=paper`), from
# request to request?

# %%
for comparison in comparisons:
    depth = shared.lines(comparison, lambda e: by_depth(e.records, depths=e.run.depths))
    within = shared.lines(comparison, lambda e: by_position(e.records))
    over = shared.lines(
        comparison, lambda e: [(size, mat(turns)) for size, turns in stream_parts(e.records, 5)]
    )
    if not (depth or within or over):
        continue
    panels = [
        Panel("", "draft tokens accepted, at least", "share of drafts", depth, top=1.0),
        Panel("within an answer", "position (tokens)", "MAT", within, bottom=1.0),
        Panel("over the stream", "tokens of finished requests", "MAT", over, bottom=1.0),
    ]
    title = f"Acceptance: {comparison.printed_title}"
    figure = curves([panels], title, shared.caption_of(comparison))
    shared.show(figure, f"acceptance_{comparison.model}_{comparison.dataset}")
