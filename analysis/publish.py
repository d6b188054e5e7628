"""A run folder as a Weights & Biases run: ``python -m analysis.publish RUN``, or ``logger=wandb``.

The run folder stays the only source: everything sent is read from it, after the measurement, so
that no other process works while the clock runs. One W&B run per folder; its id stands in the
manifest, so a run that was killed and resumed, moved, or published twice, keeps it (offline each
publication is one more segment, which ``wandb sync`` appends), and the same command on another
machine is another run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from analysis import cost_surfaces
from analysis.figures import mean_accepted_tokens, speedup_by_task
from analysis.plots.layout import save
from analysis.plots.style import styled
from analysis.runs.captions import caption
from analysis.runs.command import reporting_errors
from analysis.runs.comparisons import Comparison, make_comparisons
from analysis.runs.load import SURFACE, Run, load_runs, load_surfaces
from specbench.errors import ResultsError
from specbench.results import summary_schema
from specbench.results.records import (
    CANDIDATES,
    CASES,
    DISTURBED,
    ERRORS,
    MANIFEST,
    STEPS,
    SUMMARY,
)
from specbench.results.tasks import OVERALL
from specbench.storage.jsonl import JsonObject

UNREACHABLE = 3  # exit code where W&B cannot be used online
FILES = (MANIFEST, CASES, DISTURBED, STEPS, SUMMARY, ERRORS, CANDIDATES, SURFACE)
# A case's columns: all of a record but the lists as long as a text.
CASE_COLUMNS = (
    "label", "method", "task", "category", "case_id", "turn", "repeat", "status", "n_prompt",
    "n_new", "n_target_passes", "n_drafted", "prefill_s", "decode_s", "wall_s", "finish_reason",
)  # fmt: skip
SUMMARY_COLUMNS = (
    "label", "method", "task", "n_cases", "n_timed", "n_disturbed", "mat", "tokens_per_s",
    "speedup", "geomean_speedup", "speedup_eager", "speedup_graph", "bandwidth_share",
)  # fmt: skip
PREDICTED = "predicted_"  # before the key of a number that rests on predicted times


class UnreachableError(Exception):
    """W&B cannot be used online here: no network, no key, or no such account."""


def run_id(run: Run) -> str:
    """The W&B id of a run folder: random, made with the folder and kept by whoever resumes it.

    Folders that are older than such ids have one of their run key and name. Merged shards have the
    first one's manifest, and are another run.
    """
    made = run.manifest.folder_id
    if made is not None and not run.manifest.merged_from:
        return made
    key = f"{made or run.manifest.run_key}/{run.path.resolve().name}"
    return hashlib.sha256(key.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class WandbRun:
    """How W&B knows a run folder."""

    id: str
    name: str
    group: str
    job_type: str
    tags: Sequence[str]


def describe_run(run: Run) -> WandbRun:
    """Name, group, job type and tags of the W&B run."""
    folder = run.path.resolve()
    if run.surface is None:
        methods = [label for label in run.labels if label != run.baseline] or run.labels
        kind = str(run.manifest.setting("method", "name") or methods[0])
        tags = [run.model, run.dataset, *methods]
    else:
        kind, tags = "cost", [run.model, "cost"]
    group = run.experiment or folder.parent.name
    return WandbRun(run_id(run), folder.name, group, kind, tags)


@dataclass(frozen=True)
class LoggerSettings:
    """The ``logger`` node, as far as W&B has a use for it."""

    project: str = "specbench"
    entity: str | None = None
    mode: str = "offline"
    tags: Sequence[str] = ()
    folder: str | None = None


def logger_settings(run: Run, given: JsonObject | None = None) -> LoggerSettings:
    """The ``logger`` node given now, else the run's own, with defaults for what it lacks."""
    node = given or run.manifest.config.get("logger") or {}
    known = [f.name for f in fields(LoggerSettings)]
    return LoggerSettings(**{key: node[key] for key in known if node.get(key) is not None})


def configuration(run: Run) -> dict[str, object]:
    """What W&B shows as the run's configuration: the composed one and the machine."""
    kept = ("config", "labels", "hardware", "versions", "git", "model", "seed", "run_key")
    manifest = run.manifest.to_json()
    return {key: manifest[key] for key in kept if key in manifest}


def summary_metrics(comparison: Comparison) -> dict[str, float]:
    """Flat numbers by ``<label>/<task>/<figure>``; what has no value is left out.

    Predicted times have keys of their own; tokens per pass are no prediction.
    """
    found = {}
    timed = PREDICTED if comparison.timing == "predicted" else ""
    for entry in comparison.entries:
        for task, row in entry.rows.items():
            for figure in SUMMARY_COLUMNS[SUMMARY_COLUMNS.index("mat") :]:
                if (value := summary_schema.number(row, figure)) is not None:
                    kind = figure if figure == "mat" else timed + figure
                    found[f"{entry.label}/{task}/{kind}"] = float(value)
            for verdict, count in row["lossless"].items():
                found[f"{entry.label}/{task}/{verdict}"] = float(count)
        if entry.without_rule is not None:
            found[f"{entry.label}/{OVERALL}/speedup_without_rule"] = entry.without_rule
    return found


def save_pictures(comparison: Comparison, folder: Path) -> dict[str, Path]:
    """Save the bar charts as PNG; by the name that panels of a dashboard know them by."""
    drawn = {}
    with styled():
        for name, draw in (("speedup", speedup_by_task), ("mat", mean_accepted_tokens)):
            figure = draw(comparison)
            if figure is not None:
                predicted = name == "speedup" and comparison.timing == "predicted"
                name = PREDICTED + name if predicted else name
                drawn[name] = save(figure, folder, name, caption=True)[0]
    return drawn


def publish(run: Run, given: JsonObject | None = None) -> str:
    """Send a run folder to W&B, or lay it down for ``wandb sync``; says where it is.

    A ``logger`` node that is given wins over the run's own.

    Raises:
        ImportError: wandb is not installed.
        UnreachableError: it was to be sent, and W&B did not take it on.
        Exception: whatever wandb raises; the run folder is untouched.
    """
    import wandb

    chosen, who = logger_settings(run, given), describe_run(run)
    place = Path(chosen.folder or run.path / "wandb")
    place.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        live = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            mode=chosen.mode,
            dir=str(place),
            config=configuration(run),
            resume="allow",
            **asdict(replace(who, tags=[*who.tags, *chosen.tags])),
            settings=wandb.Settings(console="off", init_timeout=60),
        )
    except (wandb.errors.Error, ConnectionError, TimeoutError) as error:
        if chosen.mode != "online":
            raise
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
    try:
        if run.surface is None:
            _send_records(live, run, place / "figures")
        else:
            _send_surface(live, run, place / "figures")
        live.summary["complete"] = run.complete
        artifact = wandb.Artifact(f"run-{who.id}", type="records")
        for name in FILES:
            if (run.path / name).exists():
                artifact.add_file(str(run.path / name))
        live.log_artifact(artifact)
    finally:
        live.finish()
    if chosen.mode == "offline":
        return f"W&B run {who.id} laid down; type: wandb sync {place}/wandb/offline-run-*"
    return f"W&B run {who.id}: {live.url}"


def _send_records(live: Any, run: Run, folder: Path) -> None:
    import wandb

    cases = [[getattr(record, column) for column in CASE_COLUMNS] for record in run.records]
    timed = PREDICTED if run.timing == "predicted" else ""
    live.log({f"{timed}cases": wandb.Table(columns=list(CASE_COLUMNS), data=cases)})
    for comparison in make_comparisons([run], None):
        rows = [row for entry in comparison.entries for row in entry.rows.values()]
        summary = [[row.get(column) for column in SUMMARY_COLUMNS] for row in rows]
        live.log({f"{timed}summary": wandb.Table(columns=list(SUMMARY_COLUMNS), data=summary)})
        live.summary.update(summary_metrics(comparison))
        live.summary["caption"] = caption(comparison)
        for name, path in save_pictures(comparison, folder).items():
            live.log({f"figures/{name}": wandb.Image(str(path))})


def _send_surface(live: Any, run: Run, folder: Path) -> None:
    import wandb

    columns = list(cost_surfaces.PASS_COLUMNS)
    live.log({"passes": wandb.Table(columns=columns, data=cost_surfaces.pass_rows(run))})
    live.summary.update(cost_surfaces.pass_metrics(run))
    live.summary["caption"] = cost_surfaces.caption(run)
    with styled():
        for name, figure in cost_surfaces.figures(run).items():
            live.log(
                {f"figures/{name}": wandb.Image(str(save(figure, folder, name, caption=True)[0]))}
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; 0 where all were published, 1 where W&B refused one, 2 for bad input.

    3 where it cannot be used online; then the remaining folders are not tried.
    """
    parser = argparse.ArgumentParser(
        prog="python -m analysis.publish",
        description="Copy run folders to Weights & Biases (offline unless logger.mode=online).",
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders above them")
    parser.add_argument(
        "--settings", type=json.loads, help='JSON over the runs\' own, e.g. \'{"mode": "online"}\''
    )
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _publish_all(options))


def _publish_all(options: argparse.Namespace) -> int:
    runs = [*load_runs(options.runs), *load_surfaces(options.runs, by_hand=True)]
    if not runs:
        raise ResultsError(f"{options.runs[0]} holds no run with records and no cost surface.")
    failed = 0
    for number, run in enumerate(runs, start=1):
        try:
            sys.stdout.write(publish(run, options.settings) + "\n")
        except ImportError:
            sys.stderr.write(
                "error: wandb is not installed: pip install -e '.[wandb]', or logger=none\n"
            )
            return 2
        except UnreachableError as error:
            rest = f", nor the {len(runs) - number} after it" if number < len(runs) else ""
            why = f"W&B cannot be used online: {error}"
            sys.stderr.write(f"not published: {run.path}{rest}: {why}\n")
            return UNREACHABLE
        except Exception as error:
            # A dashboard is a copy: whatever is wrong with the service, the records are safe.
            failed += 1
            sys.stderr.write(f"not published: {run.path}: {type(error).__name__}: {error}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
