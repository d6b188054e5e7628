"""A run folder as Weights & Biases runs: ``python -m analysis.publish RUN``, or ``logger=wandb``.

The run folder stays the only source: everything sent is read from it, after the measurement, so
that no other process works while the clock runs. Each label is a W&B run: ``job_type`` is its
method, ``group`` its folder, or the sweep or experiment that the folder belongs to, and ``setting``
the label with what was typed for it, which panels keep apart. Its id comes
from the manifest, so a run that was killed and resumed, moved, or published twice, keeps it
(offline each publication is one more segment, which ``wandb sync`` appends), and the same command
on another machine is another run.

Numbers have flat keys (``speedup``, ``mat``), the same for all labels, so that a project is grouped
by setting and filtered by model, data and timing. Predicted times have keys of their own; tokens
per pass predict nothing. A cost run has no labels and no records, but the times of passes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from analysis.figures import task_bars
from analysis.plots.charts import Panel, Point, Series, curves
from analysis.plots.heatmaps import slowdown_caption, slowdown_heatmaps
from analysis.plots.layout import Drawing, save
from analysis.plots.style import styled
from analysis.runs.acceptance import rows_of_target_pass
from analysis.runs.captions import caption
from analysis.runs.command import reporting_errors
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, make_comparisons
from analysis.runs.leaders import standings, verdict_of
from analysis.runs.load import Run, load_runs, load_surfaces
from analysis.runs.published_names import LONGEST, group_of, hashed, run_id, setting_of
from analysis.runs.settings import without_names
from analysis.tabular.records_sheet import records_sheet
from specbench.errors import ResultsError
from specbench.results.records import (
    CASES,
    DISTURBED,
    ERRORS,
    MANIFEST,
    STEPS,
    SUMMARY,
    SURFACE,
    CaseRecord,
)
from specbench.results.summary_schema import SummaryRow, interval, number
from specbench.results.tasks import OVERALL

UNREACHABLE = 3  # exit code where W&B cannot be used online
FILES = (MANIFEST, CASES, DISTURBED, STEPS, SUMMARY, ERRORS, SURFACE)
PREDICTED = "predicted_"  # before the key of a number that rests on predicted times
_FIGURES = (
    "mat", "tokens_per_s", "speedup", "end_to_end_speedup", "geomean_speedup", "speedup_eager",
    "speedup_graph", "bandwidth_share", "joules_per_token",
)  # fmt: skip
_COUNTS = ("n_cases", "n_timed", "n_dropped", "n_disturbed")
# Of a record all but prompts, answers and other lists as long as a text.
_RECORD = (
    "task", "category", "case_id", "turn", "repeat", "status", "n_prompt", "n_new",
    "n_target_passes", "n_drafted", "prefill_s", "decode_s", "wall_s", "finish_reason",
)  # fmt: skip
_CASE_COLUMNS = ("label", *_RECORD, "mat", "speedup", "verdict")
_MANIFEST = ("config", "hardware", "versions", "git", "seed", "run_key")
_PASS_COLUMNS = ("kind", "rows", "k", "w", "context", "median_ms")


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


def logger_settings(run: Run, given: Mapping[str, Any] | None = None) -> LoggerSettings:
    """The ``logger`` node given now, else the run's, with defaults for what it lacks."""
    node = given or run.manifest.config.get("logger") or {}
    known = [f.name for f in fields(LoggerSettings)]
    return LoggerSettings(**{key: node[key] for key in known if node.get(key) is not None})


def publish(run: Run, given: Mapping[str, Any] | None = None) -> str:
    """Send a run folder to W&B, or lay it down for ``wandb sync``; says where it is.

    A ``logger`` node that is given wins over the run's.

    Raises:
        ImportError: wandb is not installed.
        UnreachableError: it was to be sent, and W&B did not take it on.
        Exception: whatever wandb raises; the run folder is untouched.
    """
    import wandb

    settings = logger_settings(run, given)
    folder = Path(settings.folder or run.path / "wandb")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    urls: list[str] = []

    @contextlib.contextmanager
    def opened(entry: ComparedLabel | None = None) -> Iterator[Any]:
        live = _open(run, entry, settings, folder)
        try:
            yield live
            if not urls:  # the records of all labels are in the same files
                artifact = wandb.Artifact(f"run-{run_id(run)}", type="records")
                for name in FILES:
                    if (run.path / name).exists():
                        artifact.add_file(str(run.path / name))
                live.log_artifact(artifact)
            urls.append(str(live.url))
        finally:
            live.finish()

    def saved(figures: Mapping[str, Drawing]) -> dict[str, Path]:
        return {
            key: save(drawn, folder / "figures", key, True)[0] for key, drawn in figures.items()
        }

    def pictures(paths: Mapping[str, Path]) -> dict[str, Any]:
        # An image belongs to one W&B run: each run has images of its own of the same files.
        return {f"figures/{name}": wandb.Image(str(path)) for name, path in paths.items()}

    if run.surface is not None:
        with opened() as live, styled():
            live.log({"passes": wandb.Table(columns=[*_PASS_COLUMNS], data=_pass_rows(run))})
            live.log(pictures(saved(_surface_figures(run))))
            live.summary.update(_pass_numbers(run) | {"caption": _surface_caption(run)})
    for comparison in make_comparisons([run] if run.records else [], None):
        with styled():
            drawn = saved(label_figures(comparison))
        sheet = records_sheet([comparison]).astype(object)
        sheet = sheet.where(sheet.notna(), None)
        stands, sentence = standings(comparison), verdict_of(comparison)
        for entry in comparison.entries:
            predicted = PREDICTED if run.timing == "predicted" else ""
            rows = sheet[sheet.label == entry.label].values.tolist()
            with opened(entry) as live:
                cases = wandb.Table(columns=[*_CASE_COLUMNS], data=_case_rows(entry))
                tasks = wandb.Table(columns=[*sheet], data=rows)
                live.log({f"{predicted}cases": cases, f"{predicted}tasks": tasks} | pictures(drawn))
                live.summary.update(label_numbers(entry))
                state = {"timing": run.timing, "complete": run.complete}
                live.summary.update(state | {"caption": caption(comparison)})
                if sentence:
                    live.summary[f"{predicted}verdict"] = sentence
                if standing := stands.get((run.path, entry.label)):
                    live.summary[f"{predicted}against_the_best"] = standing["verdict"]
    count = f"{len(urls)} W&B {'run' if len(urls) == 1 else 'runs'}, group {group_of(run)}"
    if settings.mode == "offline":
        return f"{count}, laid down; type: wandb sync {folder}/wandb/offline-run-*"
    return f"{count}: {urls[0]}"


def _open(run: Run, entry: ComparedLabel | None, settings: LoggerSettings, folder: Path) -> Any:
    """The W&B run of a label, or of a cost run, which has none.

    Its configuration is flat in what is filtered by; below, all that composed the run. ``knobs``
    are the label's: columns of parallel coordinates are ``knobs.<name>``.
    """
    import wandb

    manifest = run.manifest.to_json()
    name, identity, job, tags = run.path.resolve().name, run_id(run), "cost", [run.model, "cost"]
    config: dict[str, object] = {"model": run.model, "dtype": run.dtype, "timing": run.timing}
    config |= {"machine": run.hardware, "temperature": run.temperature}
    if entry is not None:
        setting = setting_of(run, entry.label)
        name, job = f"{setting} ({name})"[:LONGEST], entry.method
        identity = hashed(f"{identity}/{entry.label}")
        tags = [run.model, run.dataset, run.timing, entry.method]
        config |= {"label": entry.label, "method": entry.method, "dataset": run.dataset}
        config |= {"setting": setting}
        config |= {"state_scope": entry.overall["state_scope"]}
        config |= {"knobs": without_names(entry.knobs)}
    try:
        return wandb.init(
            project=settings.project,
            entity=settings.entity,
            mode=settings.mode,
            dir=str(folder),
            id=identity,
            name=name,
            group=group_of(run),
            job_type=job,
            tags=[*dict.fromkeys([*tags, *settings.tags])],
            config=config | {key: manifest[key] for key in _MANIFEST if key in manifest},
            resume="allow",
            settings=wandb.Settings(console="off", init_timeout=60),
        )
    except (wandb.errors.Error, ConnectionError, TimeoutError) as error:
        if settings.mode != "online":
            raise
        raise UnreachableError(f"{type(error).__name__}: {error}") from error


def label_numbers(entry: ComparedLabel) -> dict[str, float]:
    """Flat numbers of a label over its run, and by task below ``task/``; none without a value."""
    numbers = _numbers(entry.overall)
    for task, row in entry.rows.items():
        if task != OVERALL:
            numbers |= {f"task/{task}/{key}": value for key, value in _numbers(row).items()}
    if entry.without_rule is not None:
        numbers["speedup_without_rule"] = entry.without_rule
    if (tokens := rows_of_target_pass(entry).value) is not None:
        numbers["tokens_per_pass"] = tokens
    return numbers


def _numbers(row: SummaryRow) -> dict[str, float]:
    timed = PREDICTED if row["timing"] == "predicted" else ""
    values: dict[str, float | None] = {}
    for key in _FIGURES:
        name = key if key == "mat" else timed + key
        low, high = interval(row, key) or (None, None)
        values |= {name: number(row, key), f"{name}_low": low, f"{name}_high": high}
    values |= {key: number(row, key) for key in _COUNTS} | dict(row["lossless"])
    return {key: float(value) for key, value in values.items() if value is not None}


def _case_rows(entry: ComparedLabel) -> list[list[object]]:
    """One row for each turn, with a MAT and a speedup of its own where it counts in speeds."""
    run = entry.run
    plain = {r.key[:-1]: r for r in run.records if r.label == run.baseline and r.status == "ok"}
    rows: list[list[object]] = []
    for record in (r for r in run.records if r.label == entry.label):
        beside = plain.get(record.key[:-1])
        speed, plain_speed = _speed(record), _speed(beside) if beside else None
        passes = record.n_target_passes if record.status != "failed" else 0
        mat = (record.n_new - 1) / passes if passes else None
        speedup = speed / plain_speed if speed and plain_speed else None
        values = [getattr(record, column) for column in _RECORD]
        rows.append([entry.label, *values, mat, speedup, record.lossless.verdict])
    return rows


def _speed(record: CaseRecord) -> float | None:
    timed = record.status == "ok" and record.timing != "none" and record.decode_s
    return (record.n_new - 1) / record.decode_s if timed else None


def label_figures(comparison: ComparedRuns) -> dict[str, Drawing]:
    """The bar charts, by the name that panels of a dashboard know them by."""
    timed = PREDICTED if comparison.timing == "predicted" else ""
    drawn = {
        f"{timed}speedup": task_bars(comparison, "speedup"),
        "mat": task_bars(comparison, "mat"),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def _medians(run: Run) -> Iterator[tuple[str, dict[str, int], float]]:
    """Of every pass its kind, its place on the grid by axis, and its median milliseconds."""
    for kind, times in run.surface.passes.items() if run.surface else ():
        medians = 1e3 * np.median(times.samples_s, axis=-1)
        for index, values in enumerate(itertools.product(*times.axes.values())):
            yield kind, dict(zip(times.axes, values, strict=True)), float(medians.flat[index])


def _pass_rows(run: Run) -> list[list[str | float | None]]:
    """One row for every pass of the grids; None where it has no such axis."""
    return [
        [kind, *(at.get(name) for name in _PASS_COLUMNS[1:-1]), ms]
        for kind, at, ms in _medians(run)
    ]


def _pass_numbers(run: Run) -> dict[str, float]:
    """Flat numbers: milliseconds of prompts and of trees, microseconds of drafting a step."""
    numbers: dict[str, float] = {}
    for kind, at, ms in _medians(run):
        if kind in ("prefill", "tree"):
            rows = f"/{at['rows']}_rows" if kind == "tree" else ""
            numbers[f"{kind}_ms/{at['context']}_tokens{rows}"] = ms
    drafting = run.surface.drafting_us if run.surface else {}
    return numbers | {
        f"drafting_us/{x}/{context}_tokens": us for (x, context), us in drafting.items()
    }


def _surface_caption(run: Run) -> str:
    return f"{run.model} ({run.dtype}). Hardware: {run.hardware}. Code: {run.code}."


def _surface_figures(run: Run) -> dict[str, Drawing]:
    """Time of tree passes by rows, and of batch passes over a pass of one token, where measured."""
    drawn: dict[str, Drawing] = {}
    lines: dict[int, list[Point]] = {}
    for kind, at, ms in _medians(run):
        if kind == "tree":
            lines.setdefault(at["context"], []).append(Point(at["rows"], ms))
    if lines:
        series = [Series(f"{c} cached tokens", "ar", line) for c, line in lines.items()]
        panel = Panel("", "rows (root and draft nodes)", "time of a pass (ms)", series)
        text = (
            "Medians of a target pass over a draft tree, root included, at so many cached tokens; "
            "random ids, verdict and copy to the host included."
        )
        title = f"Cost of a pass ({run.model})"
        drawn["passes"] = curves([[panel]], title, f"{text}\n{_surface_caption(run)}")
    if run.surface is not None and run.surface.has_slowdowns:
        text = "Time of a target pass over k rows of w + 1 tokens (a batch), relative to that of a "
        text = slowdown_caption(run, f"{text}single token.")
        drawn["slowdown"] = slowdown_heatmaps(run, f"Cost of a batch pass ({run.model})", text)
    return drawn


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
    for place, run in enumerate(runs, start=1):
        try:
            sys.stdout.write(publish(run, options.settings) + "\n")
        except ImportError:
            sys.stderr.write(
                "error: wandb is not installed: pip install -e '.[wandb]', or logger=none\n"
            )
            return 2
        except UnreachableError as error:
            rest = f", nor the {len(runs) - place} after it" if place < len(runs) else ""
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
