# %% [markdown]
# # (k, w) heatmaps
#
# N-Grammys: k rows of w draft tokens. More rows and longer ones are accepted more often (tokens per
# call) until the target's pass costs more than that brings (speedup).
# Runs: `python run.py experiment=ngrammys_figure3`, or any sweep over `method.k` and `method.w`.

# %%
from analysis import notebook
from analysis.artifacts.ngrammys import grid_figures

swept = [
    run
    for run in notebook.runs()
    if any({"k", "w"} <= run.knobs(label).keys() for label in run.labels)
]

# %%
for key, unit in (("mat", "tokens per call (MAT)"), ("speedup", "speedup over ar")):
    for name, figure in grid_figures(swept, key, unit):
        notebook.show(figure, f"kw_{key}_{name}")
