"""What a label of a run is on Weights & Biases: its name, configuration, numbers and tables.

A label is a W&B run: ``job_type`` is its method, ``group`` its folder, or the sweep or experiment
that the folder belongs to. Numbers have flat keys (``speedup``, ``mat``), the same for all labels,
so that a project is grouped by method and filtered by model, data and timing. Predicted times have
keys of their own; tokens per pass are no prediction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from analysis.figures import mean_accepted_tokens, speedup_by_task
from analysis.plots.layout import save
from analysis.plots.style import styled
from analysis.runs.comparisons import ComparedLabel, Comparison
from analysis.runs.drafting import rows_of_target_pass
from analysis.runs.load import Run
from analysis.runs.settings import without_names
from specbench.results.records import CaseRecord
from specbench.results.summary_schema import SummaryRow, interval, number
from specbench.results.tasks import OVERALL
from specbench.storage.jsonl import JsonObject

PREDICTED = "predicted_"  # before the key of a number that rests on predicted times
WITH_BOUNDS = ("mat", "tokens_per_s", "speedup", "end_to_end_speedup", "geomean_speedup")
_FIGURES = (*WITH_BOUNDS, "speedup_eager", "speedup_graph", "bandwidth_share", "joules_per_token")
_COUNTS = ("n_cases", "n_timed", "n_dropped", "n_disturbed")
# Of a record all but the lists as long as a text.
_RECORD = (
    "task", "category", "case_id", "turn", "repeat", "status", "n_prompt", "n_new",
    "n_target_passes", "n_drafted", "prefill_s", "decode_s", "wall_s", "finish_reason",
)  # fmt: skip
CASE_COLUMNS = ("label", *_RECORD, "mat", "speedup", "verdict")
_TASK = (*_COUNTS[:2], *(name + end for name in WITH_BOUNDS for end in ("", "_low", "_high")))
TASK_COLUMNS = ("label", "task", *_TASK)


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
    """How W&B knows a run."""

    id: str
    name: str
    group: str
    job_type: str
    tags: Sequence[str]


def describe_label(entry: ComparedLabel) -> WandbRun:
    """Name, group, job type and tags of a label."""
    run = entry.run
    own = hashlib.sha256(f"{run_id(run)}/{entry.label}".encode()).hexdigest()[:16]
    tags = list(dict.fromkeys([run.model, run.dataset, run.timing, entry.method]))
    name = f"{entry.label} ({run.path.resolve().name})"
    return WandbRun(own, name, group_of(run), entry.method, tags)


def describe_surface(run: Run) -> WandbRun:
    """Name, group, job type and tags of a cost run, which has no labels."""
    name = run.path.resolve().name
    return WandbRun(run_id(run), name, group_of(run), "cost", [run.model, "cost"])


def group_of(run: Run) -> str:
    """The experiment, else the folder of a sweep, else the run's own folder."""
    folder = run.path.resolve()
    swept = (folder.parent / "multirun.yaml").exists()
    return run.experiment or (folder.parent if swept else folder).name


def configuration(run: Run, entry: ComparedLabel | None = None) -> JsonObject:
    """What W&B shows as a run's configuration: flat what is filtered by, then all that composed it.

    ``knobs`` are the label's own; columns of parallel coordinates are ``knobs.<name>``.
    """
    manifest = run.manifest.to_json()
    kept = ("config", "hardware", "versions", "git", "seed", "run_key")
    found: JsonObject = {
        "model": run.model,
        "dtype": run.dtype,
        "timing": run.timing,
        "machine": run.hardware,
        "temperature": run.temperature,
    }
    if entry is not None:
        found |= {
            "label": entry.label,
            "method": entry.method,
            "dataset": run.dataset,
            "state_scope": entry.overall["state_scope"],
            "knobs": without_names(entry.knobs),
        }
    return found | {key: manifest[key] for key in kept if key in manifest}


def label_numbers(entry: ComparedLabel) -> dict[str, float]:
    """Flat numbers of a label over its run, and by task below ``task/``; none without a value."""
    found = _numbers(entry.overall)
    found |= {
        f"task/{task}/{key}": value
        for task, row in entry.rows.items()
        if task != OVERALL
        for key, value in _numbers(row).items()
    }
    if entry.without_rule is not None:
        found["speedup_without_rule"] = entry.without_rule
    if (tokens := rows_of_target_pass(entry).value) is not None:
        found["tokens_per_pass"] = tokens
    return found


def _numbers(row: SummaryRow) -> dict[str, float]:
    timed = PREDICTED if row["timing"] == "predicted" else ""
    found: dict[str, float] = {}
    for key in _FIGURES:
        prefix = "" if key == "mat" else timed
        if (value := number(row, key)) is not None:
            found[prefix + key] = float(value)
        for end, bound in zip(("low", "high"), interval(row, key) or (), strict=False):
            found[f"{prefix}{key}_{end}"] = float(bound)
    counts = {key: number(row, key) for key in _COUNTS} | dict(row["lossless"])
    return found | {key: float(count) for key, count in counts.items() if count is not None}


def task_rows(entry: ComparedLabel) -> list[list[object]]:
    """Rows of :data:`TASK_COLUMNS`, the whole run's first."""
    rows = []
    for task, row in entry.rows.items():
        own = {**row, **_bounds(row)}
        rows.append([entry.label, task, *(own.get(name) for name in _TASK)])
    return rows


def _bounds(row: SummaryRow) -> dict[str, float]:
    return {
        f"{key}_{end}": bound
        for key in WITH_BOUNDS
        for end, bound in zip(("low", "high"), interval(row, key) or (), strict=False)
    }


def case_rows(entry: ComparedLabel) -> list[list[object]]:
    """Rows of :data:`CASE_COLUMNS`, one for each turn, with its own MAT and speedup.

    A turn that does not count in speeds has no speedup; neither prompts nor answers are in it.
    """
    run = entry.run
    plain = {r.key[:-1]: r for r in run.records if r.label == run.baseline and r.status == "ok"}
    rows: list[list[object]] = []
    for record in (r for r in run.records if r.label == entry.label):
        own = plain.get(record.key[:-1])
        speeds = _speed(record), _speed(own) if own else None
        passes = record.n_target_passes
        rows.append(
            [
                entry.label,
                *(getattr(record, column) for column in _RECORD),
                (record.n_new - 1) / passes if record.status != "failed" and passes else None,
                speeds[0] / speeds[1] if speeds[0] and speeds[1] else None,
                record.lossless.verdict,
            ]
        )
    return rows


def _speed(record: CaseRecord) -> float | None:
    timed = record.status == "ok" and record.timing != "none" and record.decode_s
    return (record.n_new - 1) / record.decode_s if timed else None


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
