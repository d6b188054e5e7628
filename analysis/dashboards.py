"""Weights & Biases' workspace and report as code: ``python -m analysis.dashboards RUNS``.

:mod:`analysis.publish` sends a W&B run for each label, with flat keys; the panels group these by
setting, so that no bar is a mean over a sweep, and are filtered by model, data and timing. Without
``--push`` nothing is sent: what would be made is written to a file beside the runs, and the
commands that make it are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from analysis.publish import PREDICTED, label_numbers, logger_settings
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, make_comparisons
from analysis.runs.load import Run
from analysis.runs.sweeps import swept_knobs
from analysis.tabular.comparison_tables import comparison_table
from analysis.tabular.table import to_markdown
from specbench.results.wording import DEFINITIONS

TITLE = "Speculative decoding compared"
# What panels show, with its name and unit, in the order of the sections.
FIGURES = {
    "speedup": "Speedup over ar (ratio of tokens/s)",
    "mat": "MAT (tokens per target pass)",
    "tokens_per_s": "Decode speed (tokens/s)",
    f"{PREDICTED}speedup": "PREDICTED speedup over ar (by a cost surface, not measured)",
    f"{PREDICTED}tokens_per_s": "PREDICTED decode speed (tokens/s)",
}
# Headings of the report's tables, by where their times come from.
TABLES = {
    "measured": "Measured, claims beside",
    "predicted": "Predicted by a cost surface, claims beside",
    "none": "Replayed without times, claims beside",
}
VERDICTS = {
    "bug": "Turns that are not plain decoding's (must be 0)",
    "near_tie": "Turns that differ by a near tie",
    "not_audited": "Turns not audited",
}
_PICTURES = ["figures/speedup", "figures/mat", f"figures/{PREDICTED}speedup"]
# Columns of the table of runs that stay in view.
_PINNED = ("summary:speedup", "summary:mat", "summary:tokens_per_s", "config:model.value")


@dataclass(frozen=True)
class Subject:
    """Runs that are compared in a W&B project; ``entity``: user or team, "" until known."""

    entity: str
    project: str
    comparisons: Sequence[ComparedRuns]

    @cached_property
    def keys(self) -> frozenset[str]:
        """The summary keys that the labels have."""
        entries = (entry for comparison in self.comparisons for entry in comparison.entries)
        return frozenset(key for entry in entries for key in label_numbers(entry))

    def conditions(self) -> list[dict[str, str]]:
        """Model, data and timing of the comparisons, each once."""
        each = dict.fromkeys((c.model, c.dataset, c.timing) for c in self.comparisons)
        return [dict(zip(("model", "dataset", "timing"), one, strict=True)) for one in each]


def subject_of(
    runs: Sequence[Run], entity: str | None = None, project: str | None = None
) -> Subject:
    """What runs with records compare; entity and project by default as their ``logger`` says."""
    nodes = [logger_settings(run) for run in runs]
    return Subject(
        entity=entity or next(filter(None, (node.entity for node in nodes)), ""),
        project=project or nodes[0].project,
        comparisons=make_comparisons(runs),
    )


def _bars(compared: Subject, titles: dict[str, str]) -> list[Any]:
    """For each key that a label has a panel with a bar for every setting."""
    import wandb_workspaces.reports.v2 as wr

    return [
        wr.BarPlot(
            title=title,
            metrics=[wr.SummaryMetric(key)],
            groupby=wr.Config("setting"),
            title_x=title,
        )
        for key, title in titles.items()
        if key in compared.keys
    ]


def _sweep_panels(compared: Subject, timed: str = "") -> list[Any]:
    """Of a sweep parallel coordinates over its knobs; of any runs speedup by budget and by MAT."""
    import wandb_workspaces.reports.v2 as wr

    key = f"{timed}speedup"
    if key not in compared.keys:
        return []
    panels: list[Any] = [
        wr.ScatterPlot(
            title=f"{FIGURES[key]} against {words}",
            x=wr.SummaryMetric(across),
            y=wr.SummaryMetric(key),
            log_x=across == "tokens_per_pass",
        )
        for across, words in (("tokens_per_pass", "draft budget"), ("mat", "MAT"))
    ]
    if knobs := dict.fromkeys(k for c in compared.comparisons for k in swept_knobs(c)):
        axes = [*(wr.Config(f"knobs.{k}") for k in knobs), *map(wr.SummaryMetric, ("mat", key))]
        columns = [wr.ParallelCoordinatesPlotColumn(axis) for axis in axes]
        panels.insert(0, wr.ParallelCoordinatesPlot(title="Settings", columns=columns))
    return panels


def sections(compared: Subject) -> dict[str, list[Any]]:
    """Panels by the heading above them; headings without any are left out."""
    import wandb_workspaces.reports.v2 as wr

    panels = {words: _bars(compared, {key: words}) for key, words in FIGURES.items()}
    panels["Settings and draft budgets"] = _sweep_panels(compared)
    panels["Settings and draft budgets, PREDICTED"] = _sweep_panels(compared, PREDICTED)
    tasks = sorted(key for key in compared.keys if key.startswith("task/"))
    for figure, words in FIGURES.items():
        titles = {k: f"{words}: {k.split('/')[1]}" for k in tasks if k.endswith(f"/{figure}")}
        panels[f"{words}, by task"] = _bars(compared, titles)
    panels["Lossless"] = _bars(compared, VERDICTS)
    panels["Pictures"] = [wr.MediaBrowser(media_keys=_PICTURES)]
    return {words: drawn for words, drawn in panels.items() if drawn}


def workspace(compared: Subject) -> Any:
    """The workspace: runs grouped by setting, filtered to the first model, data set and timing."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    shown = [
        ws.Section(name=words, panels=panels, is_open=place < 2 or words == "Lossless")
        for place, (words, panels) in enumerate(sections(compared).items())
    ]
    shown.append(ws.Section(name="What differs", panels=[wr.RunComparer(diff_only="split")]))
    return ws.Workspace(
        entity=compared.entity,
        project=compared.project,
        name=TITLE,
        sections=shown,
        runset_settings=ws.RunsetSettings(
            groupby=[expr.Config("setting")],
            filters=[expr.Config(k) == value for k, value in compared.conditions()[0].items()],
            order=[expr.Ordering(expr.Summary("speedup"), ascending=False)],
            pinned_columns=[*_PINNED],
        ),
    )


def report(compared: Subject) -> Any:
    """The report: tables with claims as they stand now, and panels that follow the project.

    A set of runs for each model, data set and timing; a reader switches between them.
    """
    import wandb_workspaces.reports.v2 as wr

    where = {"entity": compared.entity, "project": compared.project}
    runsets = [
        wr.Runset(
            **where,
            name="{model} on {dataset}, {timing}".format(**one),
            filters=" and ".join(f"Config('{key}') = '{value}'" for key, value in one.items()),
            groupby=["config.setting"],
        )
        for one in compared.conditions()
    ]
    words = (f"- **{word}**: {meaning}\n" for word, meaning in DEFINITIONS.items())
    blocks = [wr.TableOfContents(), wr.H1("Words"), wr.MarkdownBlock(text="".join(words))]
    for timing, heading in TABLES.items():
        tables = [comparison_table(c) for c in compared.comparisons if c.timing == timing]
        blocks += [wr.H1(heading)] if tables else []
        blocks += [wr.MarkdownBlock(text=to_markdown([table])) for table in tables]
    for heading, panels in sections(compared).items():
        blocks += [wr.H1(heading), wr.PanelGrid(runsets=runsets, panels=panels)]
    about = "Made by python -m analysis.dashboards; repeat the command to bring it up to date."
    return wr.Report(**where, title=TITLE, description=about, blocks=blocks, width="fluid")


def description(made: Any) -> Any:
    """A workspace, a report or a part of one as plain values, with the kind of each part.

    Identifiers that the library draws at random are left out: the same runs give the same file.
    """
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        parts = {f.name: description(getattr(made, f.name)) for f in dataclasses.fields(made)}
        said = {k: v for k, v in parts.items() if k[0] != "_" and v not in (None, "", [], {})}
        return {"kind": type(made).__name__} | said
    if isinstance(made, dict):
        return {str(key): description(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [description(part) for part in made]
    return made if isinstance(made, str | int | float | bool | None) else str(made)


def push(compared: Subject) -> list[str]:
    """Save both on W&B and return their addresses; needs ``wandb login`` and a network.

    Raises:
        Exception: whatever W&B raises.
    """
    if not compared.entity:
        import wandb

        compared = dataclasses.replace(compared, entity=str(wandb.Api().default_entity))
    return [str(made.save().url) for made in (workspace(compared), report(compared))]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 done, 1 where W&B refused, 2 for bad input or without wandb-workspaces."""
    parser = runs_parser(
        "dashboards",
        "W&B's comparison workspace and report of runs, as a file or, with --push, in a project.",
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, metavar="FILE", help="default: RUNS/dashboards.json")
    add("--entity", help="W&B user or team (default: the runs' own, or the account's)")
    add("--project", help="default: the runs' own")
    add("--push", action="store_true", help="save them on W&B; needs wandb login")
    return with_runs(parser.parse_args(arguments), _make)


def _make(runs: Sequence[Run], options: argparse.Namespace) -> int:
    recorded = [run for run in runs if run.records]
    if not recorded:
        sys.stderr.write(
            "error: no run in this folder has speeds, only costs. Make one: python run.py\n"
        )
        return 2
    compared = subject_of(recorded, options.entity, options.project)
    try:
        made = {"workspace": workspace(compared), "report": report(compared)}
    except ImportError:
        sys.stderr.write("error: wandb-workspaces is not installed: pip install -e '.[wandb]'\n")
        return 2
    if options.push:
        try:
            sys.stdout.write("".join(f"{address}\n" for address in push(compared)))
        except Exception as error:
            # The library raises what its transport does: whatever it is, the user must hear it.
            sys.stderr.write(
                f"not pushed: {type(error).__name__}: {error}\nType wandb login first; "
                "without --push a file is written instead.\n"
            )
            return 1
        return 0
    output = options.output or options.runs[0] / "dashboards.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(description(made), indent=1, ensure_ascii=False)
    output.write_text(text + "\n", encoding="utf-8")
    folders, settings = (
        " ".join(map(str, options.runs)),
        json.dumps({"mode": "online", "project": compared.project}),
    )
    sys.stdout.write(
        f"{output}\nNothing was sent. To have it on W&B:\n  wandb login\n"
        f"  python -m analysis.publish {folders} --settings '{settings}'\n"
        f"  python -m analysis.dashboards {folders} --entity {compared.entity or 'NAME'} "
        f"--project {compared.project} --push\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
