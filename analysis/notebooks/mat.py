# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Mean accepted tokens
#
# Tokens per target pass, bonus token included: what a method gains before it costs anything. The
# same on every machine.
#
# Needs: any finished run, from `python run.py 'compare=[pld]'`; a replay does, too.

# %%
import functools

from analysis.figures import task_bars
from analysis.notebooks import shared
from analysis.plots.charts import Panel, bars, curves
from analysis.runs.acceptance import by_depth, by_position, stream_parts
from analysis.runs.comparisons import ComparedLabel, make_comparisons
from analysis.runs.estimates import mat, pooled_ratio, steps
from specbench.results.estimate import Estimate

comparisons = make_comparisons(shared.runs())

# %%
columns = ("n_cases", "mat", "mat_low", "mat_high", "timing")
shared.table(shared.numbers(comparisons, *columns), "MAT over the whole run")

# %%
for comparison in comparisons:
    figure = task_bars(comparison, "mat")
    if figure is not None:
        shared.show(figure, f"mat_{comparison.model}_{comparison.dataset}")

# %% [markdown]
# A mean hides how it comes about: many steps with a little, or a few with much? Share of steps that
# committed so many tokens.


# %%
def shares(entry: ComparedLabel, most: int) -> list[tuple[int, Estimate]]:
    def share(committed: int) -> Estimate:
        return pooled_ratio(
            entry.records, lambda r: list(r.committed_per_step).count(committed), steps, at_most=1
        )

    return [(n - 1, share(n)) for n in range(1, most + 1)]


# %%
for comparison in comparisons:
    counts = [n for run in comparison.runs for r in run.records for n in r.committed_per_step]
    most = max(counts, default=1)
    series = shared.drawn(comparison, functools.partial(shares, most=most))
    if not series:
        continue  # plain decoding alone, or no step was counted
    ticks = [str(n) for n in range(1, most + 1)]
    panel = Panel("", "tokens committed by a step", "share of steps", series, ticks, top=1.0)
    title = f"Tokens per step: {comparison.printed_title}"
    shared.show(
        bars([panel], title, shared.caption_of(comparison)),
        f"steps_{comparison.model}_{comparison.dataset}",
    )
    # A bar's place counts from 0, for one token.
    frame = shared.points(series, "tokens committed")
    frame["tokens committed"] += 1
    shared.table(frame, title)

# %% [markdown]
# How deep does a draft hold: share of the steps with a draft that accepted at least so many of its
# tokens? If every token were accepted with the same chance p, the shares would fall as p, p², p³.
#
# Where do methods that learn get better: within an answer (MAT of the steps that begin within each
# stretch of it), and, with state kept for the run (`python run.py state_scope=paper`), from
# request to request?

# %%
for comparison in comparisons:
    depth = shared.drawn(comparison, lambda e: by_depth(e.records, depths=e.run.depths))
    within = shared.drawn(comparison, lambda e: by_position(e.records))
    over = shared.drawn(
        comparison, lambda e: [(size, mat(turns)) for size, turns in stream_parts(e.records, 5)]
    )
    if not (depth or within or over):
        continue
    panels = [
        Panel("", "draft tokens accepted, at least", "share of drafts", depth, top=1.0),
        Panel("within an answer", "position (tokens)", "MAT", within, bottom=1.0),
        Panel("over the stream", "tokens of finished requests", "MAT", over, bottom=1.0),
    ]
    title = f"Acceptance: {comparison.printed_title}"
    figure = curves([panels], title, shared.caption_of(comparison))
    shared.show(figure, f"acceptance_{comparison.model}_{comparison.dataset}")
    for panel in panels:
        shared.table(shared.points(panel.series, panel.xlabel), title)
