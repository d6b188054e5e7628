"""Pictures of everything that a comparison has: ranked, by prompt, by MAT, by draft budget."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from matplotlib.ticker import NullLocator, ScalarFormatter

from analysis.plots.charts import Point, error_lengths
from analysis.plots.layout import Drawing, canvas, finish, legend_of, shown, with_cut
from analysis.plots.ranking import PRICE_TEXT, Ranked, mat_against_speedup, prompts, ranked
from analysis.plots.style import BAND, PLAIN, REFERENCE, line_style, looks, speedup_words, unit_of
from analysis.plots.sweeps import figure_name
from analysis.runs.acceptance import rows_of_target_pass
from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.estimates import prompt_speedups
from analysis.runs.leaders import leaders
from analysis.runs.settings import apart, without_names
from analysis.runs.surfaces import cost_of_pass

_SETTINGS = 3  # of one method, from which a line along its budgets is drawn
_MOST = 40  # rows of a picture that can be read
_DOTS = 16  # with names, that can be told apart
_DASHES = ("-", "--", "-.", ":")  # what sets lines of one method apart
_BUDGET_TEXT = (
    "Each point is a setting, at the mean number of tokens that a target pass reads with it: the "
    "last committed one and its draft. A line joins settings that differ in one knob, or in two "
    "that grow together; points off the lines differ in more."
)
_COST_TEXT = (
    "Grey, right axis: time of a target pass of so many tokens over that of one, {context} tokens "
    "cached ({source}). A longer draft pays while speedup grows faster than this."
)


def overview_pictures(comparison: ComparedRuns, caption: str) -> Iterator[tuple[str, Drawing]]:
    """The pictures with what is added to their files' names, for labels that have a speedup."""
    entries = [e for e in comparison.ranked if e.overall["speedup"] is not None]
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
        price, said = cost_of_pass(comparison.runs[0].manifest)
        text = f"{PRICE_TEXT.format(**said)}\n{text}" if price else text
        yield "mat_speedup", mat_against_speedup(rows[:_DOTS], units, title, text, price)
    if any(row.prompts for row in rows):
        yield "prompts", prompts(rows, units[0], f"Speedup prompt by prompt ({where})", caption)


def _of(caption: str, most: int, count: int) -> str:
    """The caption, which says so where a picture has but some of the methods."""
    return f"The {most} first of {count} are drawn.\n{caption}" if count > most else caption


def budget_picture(comparison: ComparedRuns, caption: str) -> Drawing | None:
    """Speedup by draft budget of methods that ran with several; None without one."""
    entries = [e for e in comparison.ranked if e.overall["speedup"] is not None]
    lines = _by_budget(entries)
    if not lines:
        return None
    cost, words = cost_of_pass(comparison.runs[0].manifest)
    text = f"{_COST_TEXT.format(**words)}\n{caption}" if cost else caption
    title = f"Speedup against draft budget ({comparison.printed_title})"
    return speedup_by_budget(lines, cost, speedup_words(comparison.timing), title, text)


def undecided_groups(entries: Sequence[ComparedLabel]) -> list[list[ComparedLabel]]:
    """The labels that may be the fastest, then those that may be it among the rest, and so on."""
    left, groups = [entry for entry in entries if entry.ranked], []
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
        rows_of_target_pass(entry).value,
    )


def _by_budget(entries: Sequence[ComparedLabel]) -> dict[tuple[str, str], list[list[Point]]]:
    """Of each method with several settings a point for each label, those of a line together."""
    found: dict[str, list[tuple[Point, dict[str, object]]]] = {}
    for entry in entries:
        tokens = rows_of_target_pass(entry).value
        if tokens is not None:
            point = Point.at(tokens, entry.measured("speedup"))
            found.setdefault(entry.method, []).append((point, without_names(entry.knobs)))
    lines = {}
    for method, members in found.items():
        points, settings = zip(*members, strict=True)
        if len({_text(own) for own in settings}) >= _SETTINGS:
            joined = sorted(_joined(apart(settings)), key=len, reverse=True)
            lines[shown(method), method] = [[points[i] for i in places] for places in joined]
    return lines


def _joined(settings: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """The settings that differ in one number alone, or in two that grow together; others alone.

    Of several ways to part them the one with the most settings on lines, then the fewest lines.
    """
    knobs = list(dict.fromkeys(knob for own in settings for knob in own))
    ways = [[[i] for i in range(len(settings))]]
    for varied in [*((knob,) for knob in knobs), *itertools.combinations(knobs, 2)]:
        lines: dict[str, list[int]] = {}
        for i, own in enumerate(settings):
            fixed = {knob: value for knob, value in own.items() if knob not in varied}
            lines.setdefault(_text(fixed), []).append(i)
        if all(
            _grow([[settings[i].get(k) for k in varied] for i in line]) for line in lines.values()
        ):
            ways.append(list(lines.values()))
    return max(ways, key=lambda way: (sum(len(line) for line in way if len(line) > 1), -len(way)))


def _grow(values: list[list[object]]) -> bool:
    """Whether all are numbers and there is an order in which each of them grows."""
    if len(values) == 1:
        return True
    if not all(
        isinstance(v, int | float) and not isinstance(v, bool) for row in values for v in row
    ):
        return False
    ordered: list[list[float]] = sorted(values)  # type: ignore[arg-type]
    return all(
        one < other
        for row, after in itertools.pairwise(ordered)
        for one, other in zip(row, after, strict=True)
    )


def _text(settings: Mapping[str, object]) -> str:
    return json.dumps(settings, sort_keys=True)


def speedup_by_budget(
    methods: Mapping[tuple[str, str], Sequence[Sequence[Point]]],
    cost: Mapping[int, float],
    unit: str,
    title: str,
    caption: str,
) -> Drawing:
    """Settings of each method before the cost of a pass; tokens are logarithmic.

    Args:
        methods: by name as shown and method, speedups at their numbers of tokens, those of a line
            together.
        cost: of a pass by its tokens, in passes of one token; empty where it is not known.
    """
    figure = canvas(6.4, 3.6, keep_shape=True)
    axes = figure.subplots()
    tokens = [point.x for lines in methods.values() for line in lines for point in line]
    low, high = 0.93 * min(tokens), 1.08 * max(tokens)
    if cost:
        behind = axes.twinx()
        area = behind.fill_between(list(cost), list(cost.values()), 1.0, color=BAND, linewidth=0)
        highest = max([value for rows, value in cost.items() if rows <= high] + [1.2])
        behind.set(ylabel="time of a pass\n(of one token: 1)", ylim=(1.0, 1.25 * highest))
        behind.spines["right"].set_visible(True)
        behind.grid(visible=False)
        # The lines in front of the area, which is on the second pair of axes.
        axes.set_zorder(behind.get_zorder() + 1)
        axes.patch.set_visible(False)
    every = looks((method, name) for name, method in methods)
    for (name, method), lines in methods.items():
        for line, dashes in zip(lines, itertools.cycle(_DASHES), strict=False):
            known = sorted((p for p in line if p.y is not None), key=lambda point: point.x)
            axes.errorbar(
                [p.x for p in known], [p.y for p in known], yerr=error_lengths(known),
                label=name, elinewidth=0.5,
                **line_style(every[method, name]) | {"linestyle": dashes},
            )  # fmt: skip
    axes.axhline(1.0, color=REFERENCE, linewidth=0.8, linestyle="--", label=PLAIN)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set(xlim=(low, high), xlabel="tokens of a target pass (mean)", ylabel=unit)
    legend = legend_of([axes]) | ({"time of a pass": area} if cost else {})
    finish(figure, title, with_cut(f"{_BUDGET_TEXT}\n{caption}", [axes]), legend)
    return figure
