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
# N-Grammys: k rows of w draft tokens. More rows and longer ones are accepted more often (MAT) until
# the target's pass costs more than that brings (speedup).
#
# Needs: `python run.py experiment=ngrammys_figure3`, or any sweep over `method.k` and `method.w`;
# each strategy (and every other setting) has a heatmap of its own, each experiment a figure.

# %%
from analysis.figures import figures_of
from analysis.notebooks import shared
from analysis.runs.comparisons import make_comparisons

command = "python run.py experiment=ngrammys_figure3"
runs = shared.runs(
    "the settings k and w",
    command,
    where=lambda run: any({"k", "w"} <= run.knobs(label).keys() for label in run.labels),
)

# %%
for name, figure in figures_of(runs):
    shared.show(figure, name)

# %%
intervals = ("mat", "mat_low", "mat_high", "speedup", "speedup_low", "speedup_high")
swept = [comparison for comparison in make_comparisons(runs) if len(comparison.runs) > 1]
shared.table(shared.numbers(swept, "k", "w", "timing", *intervals), "Every setting")
