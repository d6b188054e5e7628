"""A run folder as a Weights & Biases run: ``python -m analysis.publish RUN``, or ``logger=wandb``.

The run folder stays the only source: everything sent is read from it, after the measurement, so
that no other process works while the clock runs. Each label is a W&B run, the labels of a folder
are a group (:mod:`analysis.wandb_runs`). Its id comes from the manifest, so a run that was killed
and resumed, moved, or published twice, keeps it (offline each publication is one more segment,
which ``wandb sync`` appends), and the same command on another machine is another run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from analysis import cost_surfaces
from analysis.plots.layout import save
from analysis.plots.style import styled
from analysis.runs.captions import caption
from analysis.runs.command import reporting_errors
from analysis.runs.comparisons import ComparedLabel, Comparison, make_comparisons
from analysis.runs.leaders import standings
from analysis.runs.load import SURFACE, Run, load_runs, load_surfaces
from analysis.wandb_runs import (
    CASE_COLUMNS,
    PREDICTED,
    TASK_COLUMNS,
    WandbRun,
    case_rows,
    configuration,
    describe_label,
    describe_surface,
    label_numbers,
    run_id,
    save_pictures,
    task_rows,
)
from specbench.errors import ResultsError
from specbench.results.records import (
    CANDIDATES,
    CASES,
    DISTURBED,
    ERRORS,
    MANIFEST,
    STEPS,
    SUMMARY,
)
from specbench.results.summary_schema import Standing
from specbench.storage.jsonl import JsonObject

UNREACHABLE = 3  # exit code where W&B cannot be used online
FILES = (MANIFEST, CASES, DISTURBED, STEPS, SUMMARY, ERRORS, CANDIDATES, SURFACE)


class UnreachableError(Exception):
    """W&B cannot be used online here: no network, no key, or no such account."""


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


def publish(run: Run, given: JsonObject | None = None) -> str:
    """Send a run folder to W&B, or lay it down for ``wandb sync``; says where it is.

    A ``logger`` node that is given wins over the run's own.

    Raises:
        ImportError: wandb is not installed.
        UnreachableError: it was to be sent, and W&B did not take it on.
        Exception: whatever wandb raises; the run folder is untouched.
    """
    chosen = logger_settings(run, given)
    place = Path(chosen.folder or run.path / "wandb")
    place.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    sent: list[WandbRun] = []
    urls: list[str] = []
    if run.surface is not None:
        who = describe_surface(run)
        with _open(who, configuration(run), chosen, place) as live:
            _send_surface(live, run, place / "figures")
            _send_files(live, run)
            urls.append(str(live.url))
        sent.append(who)
    for comparison in make_comparisons([run] if run.records else [], None):
        pictures = save_pictures(comparison, place / "figures")
        stands = standings(comparison)
        for entry in comparison.entries:
            who = describe_label(entry)
            with _open(who, configuration(run, entry), chosen, place) as live:
                _send_label(live, entry, comparison, stands.get((run.path, entry.label)))
                for name, path in pictures.items():
                    live.log({f"figures/{name}": wandb_image(path)})
                if not sent:  # the records of all labels are in the same files
                    _send_files(live, run)
                urls.append(str(live.url))
            sent.append(who)
    count = f"{len(sent)} W&B {'run' if len(sent) == 1 else 'runs'}, group {sent[0].group}"
    if chosen.mode == "offline":
        return f"{count}, laid down; type: wandb sync {place}/wandb/offline-run-*"
    return f"{count}: {urls[0]}"


@contextlib.contextmanager
def _open(who: WandbRun, config: JsonObject, chosen: LoggerSettings, place: Path) -> Iterator[Any]:
    import wandb

    try:
        live = wandb.init(
            project=chosen.project,
            entity=chosen.entity,
            mode=chosen.mode,
            dir=str(place),
            config=config,
            resume="allow",
            **asdict(replace(who, tags=[*who.tags, *chosen.tags])),
            settings=wandb.Settings(console="off", init_timeout=60),
        )
    except (wandb.errors.Error, ConnectionError, TimeoutError) as error:
        if chosen.mode != "online":
            raise
        raise UnreachableError(f"{type(error).__name__}: {error}") from error
    try:
        yield live
    finally:
        live.finish()


def _send_files(live: Any, run: Run) -> None:
    import wandb

    artifact = wandb.Artifact(f"run-{run_id(run)}", type="records")
    for name in FILES:
        if (run.path / name).exists():
            artifact.add_file(str(run.path / name))
    live.log_artifact(artifact)


def wandb_image(path: Path) -> object:
    """A picture as W&B takes it."""
    import wandb

    return wandb.Image(str(path))


def _send_label(
    live: Any, entry: ComparedLabel, comparison: Comparison, standing: Standing | None
) -> None:
    import wandb

    predicted = PREDICTED if entry.run.timing == "predicted" else ""
    live.log(
        {
            f"{predicted}cases": wandb.Table(columns=[*CASE_COLUMNS], data=case_rows(entry)),
            f"{predicted}tasks": wandb.Table(columns=[*TASK_COLUMNS], data=task_rows(entry)),
        }
    )
    live.summary.update(label_numbers(entry))
    live.summary["timing"] = entry.run.timing
    live.summary["complete"] = entry.run.complete
    live.summary["caption"] = caption(comparison)
    if standing is not None:
        live.summary[f"{predicted}against_the_best"] = standing["verdict"]


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
