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
from analysis.figures import task_bars
from analysis.notebooks import shared
from analysis.plots.charts import stacked_bars
from analysis.runs.captions import caption
from analysis.runs.comparisons import make_comparisons
from analysis.runs.estimates import STEP_PHASES, decoded_tokens, phase_s, pooled_ratio
from analysis.tabular.comparison_tables import pairs_table
from analysis.tabular.table import sheet
from specbench.results.cells import NumberCell
from specbench.results.records import CaseRecord

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
    figure = task_bars(comparison, "speedup")
    if figure is not None:
        shared.show(figure, f"speedup_{comparison.model}_{comparison.dataset}")

# %% [markdown]
# Is one faster than another? Every pair of labels of a run, corrected for their number.

# %%
for comparison in comparisons:
    page = pairs_table(comparison)
    if page is not None:
        shared.table(sheet([page]), page.title)

# %% [markdown]
# Where does the time go? Milliseconds per token by phase of a step: what plain decoding pays for
# its passes, and what a method pays for fewer of them. Only runs with `measure=phases` know it.


# %%
def milliseconds(records: list[CaseRecord], phase: str) -> NumberCell:
    return pooled_ratio(records, lambda r: 1e3 * phase_s(r, phase), decoded_tokens)


# %%
for comparison in comparisons:
    rows = {}
    for entry in comparison.entries:
        clocked = [record for record in entry.timed_records if record.phase_s]
        if clocked:
            name = comparison.name_of(entry)
            rows[name] = {phase: milliseconds(clocked, phase) for phase in STEP_PHASES}
    if rows:
        title = f"Time: {comparison.printed_title}"
        figure = stacked_bars(rows, "milliseconds per token", title, caption(comparison), "{:.1f}")
        shared.show(figure, f"time_{comparison.model}_{comparison.dataset}")
