"""Pictures of everything that a comparison has: ranked, by prompt, by MAT, by draft budget."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.ticker import NullLocator, ScalarFormatter

from analysis.plots.charts import Point, error_lengths
from analysis.plots.layout import Drawing, canvas, finish, legend_of
from analysis.plots.ranking import Ranked, mat_against_speedup, prompts, ranked
from analysis.plots.style import BAND, PLAIN, REFERENCE, line_style, speedup_words, unit_of
from analysis.plots.sweeps import figure_name
from analysis.runs.acceptance import rows_of_target_pass
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import prompt_speedups
from analysis.runs.leaders import leaders
from analysis.runs.settings import NAMES
from analysis.runs.surfaces import cost_of_pass
from specbench.results.names import display_name

_SETTINGS = 3  # of one method, from which a line along its budgets is drawn
_MOST = 40  # rows of a picture that can be read
_DOTS = 16  # with names, that can be told apart
_BUDGET_TEXT = (
    "Each point is a setting, at the mean number of tokens that a target pass reads with it: the "
    "last committed one and its draft."
)
_COST_TEXT = (
    "Grey, right axis: time of a target pass of so many tokens over that of one, {context} tokens "
    "cached ({source}). A longer draft pays while speedup grows faster than this."
)


def overview_pictures(comparison: ComparedRuns, caption: str) -> Iterator[tuple[str, Drawing]]:
    """The pictures with what is added to their files' names, for labels that have a speedup."""
    entries = [e for e in comparison.drafting if e.overall["speedup"] is not None]
    if not entries:
        return
    where, words = comparison.printed_title, caption
    units = (speedup_words(comparison.timing), unit_of("mat", comparison.timing))
    groups = undecided_groups(entries)
    rows = [_ranked(comparison, entry) for group in groups for entry in group]
    rows, caption = rows[:_MOST], _of(caption, _MOST, len(entries))
    if len(entries) > 1:
        bands = [len(group) for group in groups]
        yield "ranked", ranked(rows, bands, units, f"All methods, ranked ({where})", caption)
        title = f"MAT against speedup ({where})"
        text = _of(words, _DOTS, len(entries))
        yield "mat_speedup", mat_against_speedup(rows[:_DOTS], units, title, text)
    if any(row.prompts for row in rows):
        yield "prompts", prompts(rows, units[0], f"Speedup prompt by prompt ({where})", caption)


def _of(caption: str, most: int, count: int) -> str:
    """The caption, which says so where a picture has but some of the methods."""
    return f"The {most} first of {count} are drawn.\n{caption}" if count > most else caption


def budget_picture(comparison: ComparedRuns, caption: str) -> Drawing | None:
    """Speedup by draft budget of methods that ran with several; None without one."""
    entries = [e for e in comparison.drafting if e.overall["speedup"] is not None]
    lines = _by_budget(entries)
    if not lines:
        return None
    cost, words = cost_of_pass(comparison.runs[0].manifest.config.get("runner") or {})
    text = f"{_COST_TEXT.format(**words)}\n{caption}" if cost else caption
    title = f"Speedup against draft budget ({comparison.printed_title})"
    return speedup_by_budget(lines, cost, speedup_words(comparison.timing), title, text)


def undecided_groups(entries: Sequence[ComparedLabel]) -> list[list[ComparedLabel]]:
    """The labels that may be the fastest, then those that may be it among the rest, and so on."""
    left, groups = list(entries), []
    while left:
        first = leaders(left, "speedup")
        groups.append(sorted(first, key=lambda entry: -(entry.overall["speedup"] or 0.0)))
        left = [entry for entry in left if entry not in first]
    return groups


def _ranked(comparison: ComparedRuns, entry: ComparedLabel) -> Ranked:
    return Ranked(
        figure_name(comparison, entry),
        entry.method,
        entry.measured("speedup"),
        entry.measured("mat"),
        prompt_speedups(entry.run, entry.label),
    )


def _by_budget(entries: Sequence[ComparedLabel]) -> Mapping[tuple[str, str], list[Point]]:
    """Of each method with several settings a point for each label."""
    found: dict[tuple[str, str], list[Point]] = {}
    settings: dict[str, set[str]] = {}
    for entry in entries:
        tokens = rows_of_target_pass(entry).value
        if tokens is not None:
            point = Point.at(tokens, entry.measured("speedup"))
            found.setdefault((display_name(entry.method), entry.method), []).append(point)
            known = {key: value for key, value in entry.knobs.items() if key not in NAMES}
            settings.setdefault(entry.method, set()).add(json.dumps(known, sort_keys=True))
    return {key: points for key, points in found.items() if len(settings[key[1]]) >= _SETTINGS}


def speedup_by_budget(
    methods: Mapping[tuple[str, str], Sequence[Point]],
    cost: Mapping[int, float],
    unit: str,
    title: str,
    caption: str,
) -> Drawing:
    """A line per method through its settings, before the cost of a pass; tokens are logarithmic.

    Args:
        methods: by name as shown and method, speedups at their numbers of tokens.
        cost: of a pass by its tokens, in passes of one token; empty where it is not known.
    """
    figure = canvas(6.4, 3.6, keep_shape=True)
    axes = figure.subplots()
    tokens = [point.x for points in methods.values() for point in points]
    low, high = 0.93 * min(tokens), 1.08 * max(tokens)
    if cost:
        behind = axes.twinx()
        behind.fill_between(list(cost), list(cost.values()), 1.0, color=BAND, linewidth=0)
        highest = max([value for rows, value in cost.items() if rows <= high] + [1.2])
        behind.set(ylabel="time of a pass\n(of one token: 1)", ylim=(1.0, 1.25 * highest))
        behind.spines["right"].set_visible(True)
        behind.grid(visible=False)
        # The lines in front of the area, which is on the second pair of axes.
        axes.set_zorder(behind.get_zorder() + 1)
        axes.patch.set_visible(False)
    for (name, method), points in methods.items():
        known = sorted((p for p in points if p.y is not None), key=lambda point: point.x)
        axes.errorbar(
            [point.x for point in known], [point.y for point in known], yerr=error_lengths(known),
            label=name, elinewidth=0.5, **line_style(method),
        )  # fmt: skip
    axes.axhline(1.0, color=REFERENCE, linewidth=0.8, linestyle="--", label=PLAIN)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlim=(low, high), xlabel="tokens of a target pass (mean)", ylabel=unit)
    finish(figure, title, f"{_BUDGET_TEXT}\n{caption}", legend_of([axes]))
    return figure
