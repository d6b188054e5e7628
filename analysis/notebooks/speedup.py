# %% [markdown]
# # Speedup
#
# How much faster than plain decoding is each method, on which task, and how sure is that?
# As a plain file: `RUNS=results FIGURES=out python analysis/notebooks/speedup.py`; as a notebook:
# `jupytext --to notebook analysis/notebooks/speedup.py`.

# %%
from analysis import notebook
from analysis.figures import speedup_by_task
from analysis.runs.comparisons import make_comparisons
from analysis.tabular.comparison_tables import pairs_table

groups = make_comparisons([run for run in notebook.runs() if run.timing == "measured"])

# %% [markdown]
# The headline: ratio of total tokens/s, paired over the same cases, with 95 % intervals of a
# bootstrap over prompts.

# %%
for group in groups:
    figure = speedup_by_task(group)
    if figure is not None:
        notebook.show(figure, f"speedup_{group.runs[0].model}_{group.runs[0].dataset}")

# %% [markdown]
# Is one faster than another? Every pair of labels of a run, corrected for their number.

# %%
for group in groups:
    page = pairs_table(group)
    for row in page.rows if page is not None else ():
        print(group.title, *row, sep=" | ")
