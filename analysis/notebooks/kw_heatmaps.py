# %% [markdown]
# # (k, w) heatmaps
#
# N-Grammys: k rows of w draft tokens. More rows and longer ones are accepted more often (tokens per
# call) until the target's pass costs more than that brings (speedup).
# Runs: `python run.py experiment=ngrammys_figure3`, or any sweep over `method.k` and `method.w`;
# each strategy (and every other setting) has a heatmap of its own, each experiment a figure.

# %%
from analysis.notebooks import shared
from analysis.papers.ngrammys import grid_figures

swept = shared.by_experiment("k", "w")

# %%
for key in ("mat", "speedup"):
    for runs in swept:
        for name, figure in grid_figures(runs, key):
            shared.show(figure, f"kw_{key}_{name}")
