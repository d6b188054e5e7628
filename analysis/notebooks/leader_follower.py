# %% [markdown]
# # Leader and follower length
#
# Cacheback: tokens that are looked up against tokens that are drafted behind them.
# Runs: `python run.py experiment=cacheback_figure4`, or any sweep over `method.leader_len` and
# `method.follower_len`.

# %%
from analysis import notebook
from analysis.artifacts.cacheback import length_figures

swept = [
    run
    for run in notebook.runs()
    if any({"leader_len", "follower_len"} <= run.knobs(label).keys() for label in run.labels)
]

# %%
for name, figure in length_figures(swept):
    notebook.show(figure, f"lengths_{name}")
