"""Sweeps: labels of a comparison that differ in one or two knobs only."""

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
    """Labels that differ in the swept knobs only: one heatmap, or one line.

    Attributes:
        method: of all the labels.
        fixed_settings: the other settings in which the comparison's sweeps differ; "" if there
            is only one.
        entries: by the values of the knobs.
    """

    method: str
    fixed_settings: str
    entries: Mapping[Cell, ComparedLabel]

    def titled(self, title: str) -> str:
        """Format the title with the fixed settings below it, one a line: grids are narrow."""
        return "\n".join(filter(None, [title, *self.fixed_settings.split(", ")]))

    def estimates(self, key: str) -> dict[Cell, NumberCell]:
        return {cell: entry.measured(key) for cell, entry in self.entries.items()}

    def leaders(self, key: str) -> list[Cell]:
        """Return the best cell by ``speedup`` or ``mat``, then those not significantly below it."""
        entries = [e for e in self.entries.values() if number(e.overall, key) is not None]
        if len(entries) < 2 or any(n_of(e.overall, key) < FEWEST for e in entries):
            return []
        cells = {id(entry): cell for cell, entry in self.entries.items()}
        return [cells[id(entry)] for entry in leaders(entries, key, same_prompts=True)]


def sweeps(comparison: ComparedRuns, *knobs: str) -> list[Sweep]:
    """Find the comparison's sweeps over these knobs, each of one method and fixed other settings.

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
    """List the knobs that a picture of the sweep has as axes, in the method's order.

    These are the knobs in which labels of one name differ; if all names are unique, those in
    which labels of one method differ.
    """
    varied = varied_knobs([(entry.run, entry.label) for entry in comparison.drafting])
    if not any(varied):
        by_method: dict[str, list[dict[str, object]]] = {}
        for entry in comparison.drafting:
            by_method.setdefault(entry.method, []).append(without_names(entry.knobs))
        varied = [knobs for group in by_method.values() for knobs in differing_settings(group)]
    return list(dict.fromkeys(knob for knobs in varied for knob in knobs))
