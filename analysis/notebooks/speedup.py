# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Speedup
#
# How much faster than plain decoding is each method, on which task, and how sure is that?
#
# Needs: runs with measured times, from `python run.py 'compare=[pld]'`. As a plain file:
# `RUNS=results FIGURES=out python analysis/notebooks/speedup.py`; as a notebook:
# `RUNS=results jupytext --to notebook --execute analysis/notebooks/speedup.py`.

# %%
from analysis.figures import speedup_by_task
from analysis.notebooks import shared
from analysis.runs.comparisons import make_comparisons
from analysis.tabular.comparison_tables import pairs_table
from analysis.tabular.table import sheet

comparisons = make_comparisons(
    shared.runs("measured times", where=lambda run: run.timing == "measured")
)

# %% [markdown]
# The headline: ratio of total tokens/s, paired over the same cases, with 95 % intervals of a
# bootstrap over prompts. `end_to_end_speedup` has the prompt's pass in the time.

# %%
columns = ("n_timed", "mat", "tokens_per_s", "speedup", "speedup_low", "speedup_high")
more = ("end_to_end_speedup", "against_the_best", "p_against_the_best")
shared.table(shared.numbers(comparisons, *columns, *more), "Speedup over the whole run")

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
    if page is not None:
        shared.table(sheet([page]), page.title)
