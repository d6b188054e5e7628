"""Weights & Biases' workspace and report as code: ``python -m analysis.dashboards RUNS``.

:mod:`analysis.publish` sends a W&B run for each label, with flat keys; panels group them by
setting, so that no bar is a mean over a sweep, and are filtered by model, data, timing and typed
conditions. Without ``--push`` nothing is sent, and the commands to type are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from analysis.publish import PREDICTED, label_numbers, label_rows, logger_settings, run_config
from analysis.runs.cli import runs_parser, with_runs
from analysis.runs.comparisons import ComparedRuns, make_comparisons
from analysis.runs.load import Run
from analysis.runs.sweeps import swept_knobs
from analysis.tabular.comparison_tables import comparison_table
from analysis.tabular.table import to_markdown
from specbench.errors import ResultsError, first_line
from specbench.results.conditions import DEFINITIONS
from specbench.results.metrics import METRIC

TITLE = "Speculative decoding compared"
# Panel titles by summary key, in the order of the sections.
_SHOWN = {
    key: f"{METRIC[key].heading} ({METRIC[key].unit or 'ratio to ar'})"
    for key in ("speedup", "mat", "tokens_per_s")
}
METRICS = _SHOWN | {f"{PREDICTED}{k}": f"PREDICTED {_SHOWN[k]}" for k in _SHOWN if k != "mat"}
OUTPUTS = {
    "bug": "Turns with wrong outputs (must be 0)",
    "near_tie": "Turns that differ by a near tie",
    "not_audited": "Turns not audited",
}
_FILTERS = ("model", "dataset", "timing", "typed")  # keys of a W&B run's configuration
_PINNED = ["summary:speedup", "summary:mat", "summary:tokens_per_s", "config:model.value"]


@dataclass(frozen=True)
class Subject:
    """Runs that are compared in a W&B project; ``entity``: user or team, "" until known."""

    entity: str
    project: str
    comparisons: Sequence[ComparedRuns]

    @classmethod
    def from_runs(cls, runs: Sequence[Run], entity: str = "", project: str = "") -> Subject:
        """Compare runs with records, by default in their ``logger``'s project."""
        nodes = [logger_settings(run) for run in runs]
        default_entity = next((node["entity"] for node in nodes if node["entity"]), "")
        return cls(entity or default_entity, project or nodes[0]["project"], make_comparisons(runs))

    @property
    def where(self) -> dict[str, str]:
        return {"entity": self.entity, "project": self.project}

    @cached_property
    def keys(self) -> set[str]:
        """Keys of the labels' summaries."""
        pairs = [pair for comparison in self.comparisons for pair in label_rows(comparison)]
        return {key for entry, rows in pairs for key in label_numbers(entry, rows)}

    @property
    def filters(self) -> list[dict[str, str]]:
        configs = [run_config(run) for c in self.comparisons for run in c.runs]
        values = dict.fromkeys(tuple(str(config[key]) for key in _FILTERS) for config in configs)
        return [dict(zip(_FILTERS, combination, strict=True)) for combination in values]


def sections(subject: Subject) -> dict[str, list[Any]]:
    """Return panels by the heading above them, without empty headings."""
    import wandb_workspaces.reports.v2 as wr

    def bars(titles: Mapping[str, str]) -> list[Any]:
        by = wr.Config("setting")
        return [
            wr.BarPlot(title=title, metrics=[wr.SummaryMetric(key)], groupby=by, title_x=title)
            for key, title in titles.items()
            if key in subject.keys
        ]

    panels = {title: bars({key: title}) for key, title in METRICS.items()}
    knobs = dict.fromkeys(knob for c in subject.comparisons for knob in swept_knobs(c))
    for before, heading in (("", "Settings"), (PREDICTED, "Settings, PREDICTED")):
        key = f"{before}speedup"
        if key not in subject.keys:
            continue
        metric, mat, length = map(wr.SummaryMetric, (key, "mat", "tokens_per_pass"))
        axes = [*(wr.Config(f"knobs.{knob}") for knob in knobs), mat, metric]
        columns = [wr.ParallelCoordinatesPlotColumn(axis) for axis in axes]
        title = f"{METRICS[key]} against"
        panels[heading] = [
            *([wr.ParallelCoordinatesPlot(title="Settings", columns=columns)] if knobs else []),
            wr.ScatterPlot(
                title=f"{title} tokens verified per step", x=length, y=metric, log_x=True
            ),
            wr.ScatterPlot(title=f"{title} MAT", x=mat, y=metric),
        ]
    tasks = sorted(key.split("/") for key in subject.keys if key.startswith("task/"))
    for key, title in METRICS.items():
        titles = {"/".join(t): f"{title}: {t[1]}" for t in tasks if t[2] == key}
        panels[f"{title}, by task"] = bars(titles)
    panels |= {"Outputs": bars(OUTPUTS), "Pictures": [wr.MediaBrowser()]}
    return {title: group for title, group in panels.items() if group}


def workspace(subject: Subject) -> Any:
    """Return the workspace: runs grouped by setting, filtered to the first comparison."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    panel_sections = [
        ws.Section(name=title, panels=panels, is_open=i < 2 or title == "Outputs")
        for i, (title, panels) in enumerate(sections(subject).items())
    ]
    differences = [wr.RunComparer(diff_only="split")]
    panel_sections.append(ws.Section(name="What differs", panels=differences))
    runs = ws.RunsetSettings(
        groupby=[expr.Config("setting")],
        filters=[expr.Config(key) == value for key, value in subject.filters[0].items()],
        order=[expr.Ordering(expr.Summary("speedup"), ascending=False)],
        pinned_columns=_PINNED,
    )
    return ws.Workspace(**subject.where, name=TITLE, sections=panel_sections, runset_settings=runs)


def report(subject: Subject) -> Any:
    """Return the report: today's tables, and panels that follow the project.

    It has a set of runs for each comparison's model, data, timing and conditions.
    """
    import wandb_workspaces.reports.v2 as wr

    runsets = [
        wr.Runset(
            **subject.where,
            name="{model} on {dataset}, {timing} {typed}".format(**values).strip(),
            filters=" and ".join(f"Config('{key}') = '{value}'" for key, value in values.items()),
            groupby=["config.setting"],
        )
        for values in subject.filters
    ]
    tables = to_markdown([comparison_table(comparison) for comparison in subject.comparisons])
    terms = "".join(f"- **{term}**: {meaning}\n" for term, meaning in DEFINITIONS.items())
    blocks = [wr.TableOfContents()]
    for heading, text in (("Tables", tables), ("Terms", terms)):
        blocks += [wr.H1(heading), wr.MarkdownBlock(text=text)]
    for heading, panels in sections(subject).items():
        blocks += [wr.H1(heading), wr.PanelGrid(runsets=runsets, panels=panels)]
    about = "Made by python -m analysis.dashboards; repeat the command to bring it up to date."
    return wr.Report(**subject.where, title=TITLE, description=about, blocks=blocks, width="fluid")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 done, 1 if W&B refused, 2 for bad input or without wandb-workspaces."""
    about = "List the panels of W&B's workspace and report of runs; --push saves both on W&B."
    parser = runs_parser("dashboards", about)
    parser.add_argument("--entity", default="", help="W&B user or team (default: the runs' own)")
    parser.add_argument("--project", default="", help="default: the runs' own")
    parser.add_argument("--push", action="store_true", help="save them on W&B; needs wandb login")
    return with_runs(parser.parse_args(arguments), _make)


def _make(runs: Sequence[Run], options: argparse.Namespace) -> int:
    runs = [run for run in runs if run.records]
    if not runs:
        raise ResultsError("no run in this folder has speeds, only costs. Make one: python run.py")
    subject = Subject.from_runs(runs, options.entity, options.project)
    try:
        if options.push and not subject.entity:
            import wandb

            subject = replace(subject, entity=str(wandb.Api().default_entity))
        pages = [workspace(subject), report(subject)]
        if options.push:
            sys.stdout.write("".join(f"{page.save().url}\n" for page in pages))
            return 0
    except ImportError as error:
        raise ResultsError(
            "wandb-workspaces is not installed: pip install -e '.[wandb]'"
        ) from error
    except Exception as error:
        # The library raises its transport's errors; report any of them to the user.
        sys.stderr.write(f"error: not pushed: {first_line(error)}\nType wandb login first.\n")
        return 1
    panels = "".join(f"  {title}: {len(group)}\n" for title, group in sections(subject).items())
    folders = " ".join(map(str, options.runs))
    settings = json.dumps({"mode": "online", "project": subject.project})
    sys.stdout.write(
        f"Panels:\n{panels}Nothing was sent. To save it on W&B:\n  wandb login\n"
        f"  python -m analysis.publish {folders} --settings '{settings}'\n"
        f"  python -m analysis.dashboards {folders} --entity {subject.entity or 'NAME'} "
        f"--project {subject.project} --push\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
