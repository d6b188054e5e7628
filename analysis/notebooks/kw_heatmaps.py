# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # (k, w) heatmaps
#
# N-Grammys: k rows of w draft tokens. More rows and longer ones are accepted more often (tokens per
# call) until the target's pass costs more than that brings (speedup).
#
# Needs: `python run.py experiment=ngrammys_figure3`, or any sweep over `method.k` and `method.w`;
# each strategy (and every other setting) has a heatmap of its own, each experiment a figure.

# %%
from analysis.notebooks import shared
from analysis.papers.ngrammys import grid_figures
from analysis.runs.comparisons import make_comparisons

swept = shared.by_experiment("python run.py experiment=ngrammys_figure3", "k", "w")
columns = (
    "k",
    "w",
    "timing",
    "mat",
    "mat_low",
    "mat_high",
    "speedup",
    "speedup_low",
    "speedup_high",
)

# %%
for key in ("mat", "speedup"):
    for runs in swept:
        for name, figure in grid_figures(runs, key):
            shared.show(figure, f"kw_{key}_{name}")

# %%
for runs in swept:
    shared.table(shared.numbers(make_comparisons(runs), *columns), "Every setting")
