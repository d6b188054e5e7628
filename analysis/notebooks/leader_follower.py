# %% [markdown]
# # Leader and follower length
#
# Cacheback: tokens that are looked up against tokens that are drafted behind them.
# Runs: `python run.py experiment=cacheback_figure4`, or any sweep over `method.leader_len` and
# `method.follower_len`; each table, budget and merging of branches has a figure of its own.

# %%
from analysis.notebooks import shared
from analysis.papers.cacheback import length_figures

# %%
for runs in shared.by_experiment("leader_len", "follower_len"):
    for name, figure in length_figures(runs):
        shared.show(figure, f"lengths_{name}")
