# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Leader and follower length
#
# Cacheback: tokens that are looked up against tokens that are drafted behind them.
#
# Needs: `python run.py experiment=cacheback_figure4`, or any sweep over `method.leader_len` and
# `method.follower_len`; each table, budget and merging of branches has a figure of its own.

# %%
from analysis.notebooks import shared
from analysis.papers.cacheback import length_figures
from analysis.runs.comparisons import make_comparisons

swept = shared.by_experiment(
    "python run.py experiment=cacheback_figure4", "leader_len", "follower_len"
)
columns = (
    "leader_len",
    "follower_len",
    "timing",
    "mat",
    "mat_low",
    "mat_high",
    "speedup",
    "speedup_low",
    "speedup_high",
)

# %%
for runs in swept:
    for name, figure in length_figures(runs):
        shared.show(figure, f"lengths_{name}")

# %%
for runs in swept:
    shared.table(shared.numbers(make_comparisons(runs), *columns), "Every setting")
