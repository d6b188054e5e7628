"""Sweeps: labels of a comparison that differ in one knob or two, with all else the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from analysis.runs.comparisons import ComparedLabel, ComparedRuns
from analysis.runs.leaders import leaders
from analysis.runs.settings import differing_settings, other_settings, varied_knobs, without_names
from specbench.errors import ResultsError
from specbench.results.cells import FEWEST, NumberCell
from specbench.results.summary_schema import n_of, number

# A knob's value as it is ordered and shown: other kinds (switches, lists) as their text.
Value: TypeAlias = "int | float | str"
Cell: TypeAlias = tuple[Value, ...]


@dataclass(frozen=True)
class Sweep:
    """Labels that differ in some knobs alone: one heatmap, or one line.

    Attributes:
        method: of all the labels.
        words: the other settings, as far as the comparison's sweeps differ in them; "" where there
            is but one.
        entries: by the values of the knobs.
    """

    method: str
    fixed_settings: str
    entries: Mapping[Cell, ComparedLabel]

    def titled(self, title: str) -> str:
        """The title with the words below it, a setting a line: grids are narrow."""
        return "\n".join(filter(None, [title, *self.fixed_settings.split(", ")]))

    def estimates(self, key: str) -> dict[Cell, NumberCell]:
        return {cell: entry.measured(key) for cell, entry in self.entries.items()}

    def leaders(self, key: str) -> list[Cell]:
        """The best cell by ``speedup`` or ``mat``, then those not shown behind it."""
        entries = [e for e in self.entries.values() if number(e.overall, key) is not None]
        if len(entries) < 2 or any(n_of(e.overall, key) < FEWEST for e in entries):
            return []
        cells = {id(entry): cell for cell, entry in self.entries.items()}
        return [cells[id(entry)] for entry in leaders(entries, key, same_prompts=True)]


def sweeps(comparison: ComparedRuns, *knobs: str) -> list[Sweep]:
    """Find the comparison's sweeps over these knobs, each of one method with all else the same.

    A single setting does not make a sweep.

    Raises:
        ResultsError: a setting was run twice; says which folders to choose from.
    """
    by_setting: dict[str, dict[Cell, ComparedLabel]] = {}
    drafting = comparison.drafting
    others = other_settings([(entry.run, entry.label) for entry in drafting])
    for entry, other in zip(drafting, others, strict=True):
        fixed = dict(entry.knobs)
        if not set(knobs) <= fixed.keys():
            continue
        cell = tuple(_value(fixed.pop(knob)) for knob in knobs)
        fixed = {"method": entry.method, **without_names(fixed), **other}
        cells = by_setting.setdefault(json.dumps(fixed, sort_keys=True), {})
        if (first := cells.setdefault(cell, entry)) is not entry:
            values = ", ".join(f"{knob} {value}" for knob, value in zip(knobs, cell, strict=True))
            raise ResultsError(
                f"{comparison.title}: {values} was run twice with the same settings, in "
                f"{first.run.path} and {entry.run.path}. Name the folder of one sweep."
            )
    several = {setting: cells for setting, cells in by_setting.items() if len(cells) > 1}
    settings = [json.loads(setting) for setting in several]
    differing = differing_settings(settings)
    return [
        Sweep(setting["method"], ", ".join(f"{key} {differs[key]}" for key in differs), cells)
        for setting, differs, cells in zip(settings, differing, several.values(), strict=True)
    ]


def _value(value: object) -> Value:
    sortable = isinstance(value, int | float | str) and not isinstance(value, bool)
    return cast("Value", value) if sortable else json.dumps(value)


def swept_knobs(comparison: ComparedRuns) -> list[str]:
    """What a picture of the sweep has as axes, in the order of the method's settings.

    The knobs in which labels of one name differ; where every label has a name of its own, those in
    which labels of one method do.
    """
    varied = varied_knobs([(entry.run, entry.label) for entry in comparison.drafting])
    if not any(varied):
        by_method: dict[str, list[dict[str, object]]] = {}
        for entry in comparison.drafting:
            by_method.setdefault(entry.method, []).append(without_names(entry.knobs))
        varied = [knobs for group in by_method.values() for knobs in differing_settings(group)]
    return list(dict.fromkeys(knob for knobs in varied for knob in knobs))
