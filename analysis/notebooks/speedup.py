# %% [markdown]
# # Speedup
#
# How much faster than plain decoding is each method, on which task, and how sure is that?
# As a plain file: `RUNS=results FIGURES=out python analysis/notebooks/speedup.py`; as a notebook:
# `jupytext --to notebook analysis/notebooks/speedup.py`.

# %%
from analysis.figures import speedup_by_task
from analysis.notebooks import shared
from analysis.runs.comparisons import make_comparisons
from analysis.tabular.comparison_tables import pairs_table

comparisons = make_comparisons([run for run in shared.runs() if run.timing == "measured"])

# %% [markdown]
# The headline: ratio of total tokens/s, paired over the same cases, with 95 % intervals of a
# bootstrap over prompts.

# %%
for comparison in comparisons:
    figure = speedup_by_task(comparison)
    if figure is not None:
        shared.show(figure, f"speedup_{comparison.model}_{comparison.dataset}")

# %% [markdown]
# Is one faster than another? Every pair of labels of a run, corrected for their number.

# %%
for comparison in comparisons:
    page = pairs_table(comparison)
    for row in page.rows if page is not None else ():
        print(comparison.title, *row, sep=" | ")
