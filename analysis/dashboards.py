"""Weights & Biases' workspace and report as code: ``python -m analysis.dashboards RUNS``.

Panels are made of the labels and tasks of the runs given, and refer to the summary keys under which
:mod:`analysis.publish` sends them. Without ``--push`` nothing is sent: what would be made is
written to a file, and the commands that make it are printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.publish import PREDICTED, logger_settings, summary_metrics
from analysis.runs.command import runs_parser, with_runs
from analysis.runs.comparisons import Comparison, make_comparisons
from analysis.runs.load import Run
from analysis.tabular.comparison_tables import comparison_table
from analysis.tabular.table import to_markdown
from specbench.results.statistics.summary import task_order
from specbench.results.tasks import OVERALL

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
PICTURES = ["figures/speedup", "figures/mat", f"figures/{PREDICTED}speedup"]
_PINNED = 8  # columns of the table of runs that stay in view

DEFINITIONS = """\
- **MAT**: new tokens after the first over target passes after the prompt's; 1.00 for plain \
decoding.
- **Speedup**: tokens/s of the method over tokens/s of plain decoding (`ar`), measured in the same \
process on the same prompts, interleaved.
- **Lossless**: `equal` (the tokens of plain decoding), `near_tie` (other tokens, each within the \
number format's tolerance of the likeliest), `bug` (anything else).
"""


@dataclass(frozen=True)
class Subject:
    """What is compared.

    Attributes:
        entity: W&B user or team; "" until known.
        project: the W&B project that the runs were sent to.
        keys: the summary keys that the runs have.
        comparisons: the runs, for the tables of the report.
    """

    entity: str
    project: str
    keys: frozenset[str]
    comparisons: Sequence[Comparison]

    def keys_of(self, figure: str, task: str) -> list[str]:
        """The summary keys of a figure for a task, one per label in the order of the runs."""
        labels = dict.fromkeys(
            entry.label for comparison in self.comparisons for entry in comparison.entries
        )
        wanted = (f"{label}/{task}/{figure}" for label in labels)
        return [key for key in wanted if key in self.keys]

    @property
    def tasks(self) -> list[str]:
        found = {task for comparison in self.comparisons for task in comparison.tasks}
        return [OVERALL, *(sorted(found, key=task_order) if len(found) > 1 else [])]


def subject_of(
    runs: Sequence[Run], entity: str | None = None, project: str | None = None
) -> Subject:
    """What runs with records compare; entity and project by default as their ``logger`` says."""
    nodes = [logger_settings(run) for run in runs]
    comparisons = make_comparisons(runs)
    return Subject(
        entity=entity or next(filter(None, (node.entity for node in nodes)), ""),
        project=project or nodes[0].project,
        keys=frozenset(key for comparison in comparisons for key in summary_metrics(comparison)),
        comparisons=comparisons,
    )


def bars(compared: Subject, figure: str, task: str, title: str) -> list[Any]:
    """A panel with a bar for every label that has the figure; none where none has."""
    import wandb_workspaces.reports.v2 as wr

    keys = compared.keys_of(figure, task)
    if not keys:
        return []
    metrics = [wr.SummaryMetric(key) for key in keys]
    names = {key: key.split("/")[0] for key in keys}
    return [wr.BarPlot(title=title, metrics=metrics, line_titles=names, title_x=title)]


def panels(compared: Subject, figure: str, words: str) -> list[Any]:
    """A figure over the whole run and for every task."""
    titles = {task: words if task == OVERALL else f"{words}: {task}" for task in compared.tasks}
    return [panel for task in titles for panel in bars(compared, figure, task, titles[task])]


def verdict_panels(compared: Subject) -> list[Any]:
    """Turns by verdict of the audit, over the whole run."""
    return [p for kind, words in VERDICTS.items() for p in bars(compared, kind, OVERALL, words)]


def workspace(compared: Subject) -> Any:
    """The workspace: a section per figure, then verdicts, pictures and settings that differ."""
    import wandb_workspaces.expr as expr
    import wandb_workspaces.reports.v2 as wr
    import wandb_workspaces.workspaces as ws

    sections = [
        ws.Section(name=words, panels=panels(compared, figure, words), is_open=place == 0)
        for place, (figure, words) in enumerate(FIGURES.items())
    ]
    sections += [
        ws.Section(name="Lossless", panels=verdict_panels(compared), is_open=True),
        ws.Section(
            name="Pictures and settings",
            panels=[wr.MediaBrowser(media_keys=PICTURES), wr.RunComparer(diff_only="split")],
        ),
    ]
    return ws.Workspace(
        entity=compared.entity,
        project=compared.project,
        name=TITLE,
        sections=[section for section in sections if section.panels],
        runset_settings=ws.RunsetSettings(
            order=[expr.Ordering(expr.Metric("Name"), ascending=True)],
            pinned_columns=[f"summary:{key}" for key in compared.keys_of("speedup", OVERALL)][
                :_PINNED
            ],
        ),
    )


def report(compared: Subject) -> Any:
    """The report: tables with claims as they stand now, and panels that follow the project."""
    import wandb_workspaces.reports.v2 as wr

    def grid(shown: Sequence[Any]) -> Any:
        return wr.PanelGrid(
            runsets=[wr.Runset(entity=compared.entity, project=compared.project, name="All runs")],
            panels=list(shown),
        )

    blocks: list[Any] = [wr.TableOfContents(), wr.H1("Words")]
    blocks.append(wr.MarkdownBlock(text=DEFINITIONS))
    for timing, words in TABLES.items():
        tables = [comparison_table(c) for c in compared.comparisons if c.timing == timing]
        blocks += [wr.H1(words)] if tables else []
        blocks += [wr.MarkdownBlock(text=to_markdown([table])) for table in tables]
    sections = {words: panels(compared, figure, words) for figure, words in FIGURES.items()}
    for words, shown in {**sections, "Lossless": verdict_panels(compared)}.items():
        blocks += [wr.H1(words), grid(shown)] if shown else []
    blocks += [wr.H1("Pictures"), grid([wr.MediaBrowser(media_keys=PICTURES)])]
    return wr.Report(
        entity=compared.entity,
        project=compared.project,
        title=TITLE,
        description="Made by python -m analysis.dashboards; repeat the command to bring it up to "
        "date.",
        blocks=blocks,
        width="fluid",
    )


def description(made: Any) -> Any:
    """A workspace, a report or a part of one as plain values, with the kind of each part.

    Identifiers that the library draws at random are left out: the same runs give the same file.
    """
    if dataclasses.is_dataclass(made) and not isinstance(made, type):
        fields = {
            f.name: description(getattr(made, f.name))
            for f in dataclasses.fields(made)
            if not f.name.startswith("_")
        }
        return {"kind": type(made).__name__} | {
            key: value for key, value in fields.items() if value not in (None, "", [], {})
        }
    if isinstance(made, dict):
        return {str(key): description(value) for key, value in made.items()}
    if isinstance(made, list | tuple):
        return [description(part) for part in made]
    return made if isinstance(made, str | int | float | bool | None) else str(made)


def next_steps(compared: Subject, names: Iterable[str]) -> str:
    """The commands that make what was written, for somebody with an account."""
    runs = " ".join(names)
    entity = compared.entity or "NAME"
    return "\n".join(
        [
            "Nothing was sent. To have it on W&B:",
            "  wandb login",
            f"  python -m analysis.publish {runs} "
            f'--settings \'{{"mode": "online", "project": "{compared.project}"}}\'',
            f"  python -m analysis.dashboards {runs} --entity {entity} "
            f"--project {compared.project} --push",
        ]
    )


def push(compared: Subject) -> list[str]:
    """Save both on W&B; needs ``wandb login`` and a network.

    Returns:
        Their addresses.

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
    add("-o", "--output", type=Path, metavar="FILE", default=Path("dashboards.json"))
    add("--entity", help="W&B user or team (default: the runs' own, or the account's)")
    add("--project", help="default: the runs' own")
    add("--push", action="store_true", help="save them on W&B; needs wandb login")
    return with_runs(parser.parse_args(arguments), _make)


def _make(runs: Sequence[Run], options: argparse.Namespace) -> int:
    recorded = [run for run in runs if run.records]
    if not recorded:
        sys.stderr.write("error: these runs measured costs alone: there is nothing to compare.\n")
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
    options.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(description(made), indent=1, ensure_ascii=False)
    options.output.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(f"{options.output}\n{next_steps(compared, map(str, options.runs))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
