"""Finished runs as Weights & Biases runs: ``python -m analysis.publish RUNS``, or ``logger=wandb``.

The run folders stay the only source: everything that is sent is read from them after the
measurement, so that no other process works while the clock runs. Runs that belong together (an
experiment, a sweep, or a folder) are a group. In it each label is a W&B run with flat keys
(``speedup``, ``mat``), plain decoding once, and a last one, ``comparison``, has the data about all
of them: table, pictures, warnings and record files. Ids come from the manifests, so runs that were
resumed, moved or published twice keep theirs. Predicted times have keys of their own.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.figures import pictures_of
from analysis.frame import records_sheet
from analysis.plots.style import Drawing, save
from analysis.runs.acceptance import rows_of_target_pass
from analysis.runs.captions import caption, conditions_of, warnings_of
from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.comparisons import ComparedLabel, ComparedRuns, make_comparisons
from analysis.runs.leaders import verdict_of
from analysis.runs.load import Run, load_runs, load_surfaces
from analysis.runs.settings import flat, settings_text, without_names
from analysis.tabular.comparison_tables import comparison_table
from analysis.tabular.table import sheet
from specbench.errors import ResultsError, first_line
from specbench.results.metrics import standing_word
from specbench.results.tasks import OVERALL

LONGEST_NAME, LONGEST_TAG = 128, 64  # letters, as W&B allows
PREDICTED = "predicted_"  # before the key of a number that rests on predicted times
# The ``logger`` node, as far as W&B has a use for it.
LOGGER: Mapping[str, Any] = {
    "project": "specbench", "entity": None, "mode": "offline", "tags": [], "folder": None,
}  # fmt: skip
_RECORDS = {".json", ".jsonl", ".parquet", ".gz"}  # ends of the files of a run
# Fields of a record except prompts, outputs and other lists as long as a sequence.
_TURN = (
    "label", "task", "category", "case_id", "turn", "repeat", "status", "n_prompt", "n_new",
    "n_target_passes", "n_drafted", "prefill_s", "decode_s", "wall_s", "finish_reason",
)  # fmt: skip
_MANIFEST = ("config", "hardware", "versions", "git", "seed", "run_key")
_COUNTED = ("mat", "n_", "equal", "near_tie", "bug", "not_audited")  # starts of keys without times
# Keys besides a method's knobs under which the same setting gives other numbers.
_CONDITIONS = {"dataset", "generation", "verifier", "engine", "pair", "state_scope"}


@dataclass(frozen=True)
class WandbRun:
    """Content of one W&B run, before it is sent.

    Attributes:
        first: the run folder that names it and its group.
        job_type: the method, ``comparison`` or ``cost``.
        files: record files by their name in the artifact.
    """

    first: Run
    identity: str
    name: str
    job_type: str
    config: Mapping[str, object]
    summary: Mapping[str, object]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Drawing] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


def logger_settings(run: Run, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the ``logger`` node given now, otherwise the run's, with defaults for missing keys."""
    node = given or run.manifest.config.get("logger") or {}
    return dict(LOGGER) | {key: node[key] for key in LOGGER if node.get(key) is not None}


def run_id(run: Run) -> str:
    """Return the id of a run folder, which is random and stays when the run is resumed.

    Merged shards have the first one's manifest, and are another run; so is a copy without an id.
    """
    folder_id = run.manifest.folder_id
    if folder_id is not None and not run.manifest.merged_from:
        return folder_id
    return _hashed(f"{folder_id or run.manifest.run_key}/{run.path.resolve().name}")


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def group_of(run: Run) -> str:
    """Return the experiment, otherwise the name of the sweep's folder or of the run's.

    A sweep without an ``output_dir`` has no folder to itself: the keys that were typed name it,
    which all of its jobs have in common.
    """
    folder, manifest = run.path.resolve(), run.manifest
    if run.experiment or not manifest.swept:
        return run.experiment or folder.name
    if root := manifest.config.get("output_dir"):
        return Path(root).name
    keys = [key for key in _overrides(run) if not key.startswith(("logger", "hydra"))]
    return f"{folder.parent.name}: {', '.join(keys)}"[:LONGEST_NAME]


def setting_of(run: Run, label: str) -> str:
    """Return the label with the knobs that were typed for it, ``ngrammys k=1, w=2``."""
    config = run.manifest.config
    method = config.get("method") or {}
    knobs: dict[str, object] = {}
    if label == (method.get("label") or method.get("name")):
        typed = {key.removeprefix("method."): value for key, value in _overrides(run).items()}
        knobs = {key: value for key, value in typed.items() if key in run.knobs(label)}
    for extra in config.get("compare") or ():
        if isinstance(extra, Mapping) and label == (extra.get("label") or extra.get("method")):
            knobs = {k: v for k, v in without_names(extra).items() if k != "method"}
    return " ".join(filter(None, [label, settings_text(knobs)]))


def _typed_conditions(run: Run) -> dict[str, str]:
    """Return the overrides, besides methods and knobs, that change a run's numbers."""
    keys = {key for key in flat(run.manifest.identity or {}) if key.split(".")[0] in _CONDITIONS}
    return {key: value for key, value in _overrides(run).items() if key in keys}


def _overrides(run: Run) -> dict[str, str]:
    pairs = (override.lstrip("+~").partition("=") for override in run.manifest.overrides)
    return {key: value for key, _, value in pairs}


def run_config(run: Run) -> dict[str, object]:
    """Return a W&B run's configuration: flat keys to filter by, then the run's full config."""
    manifest = run.manifest.to_json()
    return {
        "model": run.model,
        "dataset": run.dataset if run.records else None,
        "dtype": run.dtype,
        "timing": run.timing,
        "machine": run.hardware,
        "typed": settings_text(_typed_conditions(run)),
        **{key: manifest[key] for key in _MANIFEST if key in manifest},
    }


def wandb_runs(runs: Sequence[Run]) -> Iterator[WandbRun]:
    """Yield the W&B runs to publish: cost surfaces, then each group's comparisons."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.surface is None:
            groups.setdefault(group_of(run), []).append(run)
            continue
        name, files = run.path.resolve().name, _record_files([run])
        summary = {"complete": run.complete}
        yield WandbRun(run, run_id(run), name, "cost", run_config(run), summary, files=files)
    for members in groups.values():
        shared = set.intersection(*(set(_typed_conditions(run).items()) for run in members))
        for comparison in make_comparisons(members):
            # Jobs that a sweep gets later do not take the place of the one that was first.
            first = min(comparison.runs, key=lambda run: (run.records[0].started_at, str(run.path)))
            for entry, rows in label_rows(comparison):
                if entry.label != entry.run.baseline or entry.run is first:
                    typed = _typed_conditions(entry.run).items()
                    differing = dict(item for item in typed if item not in shared)
                    yield _of_label(comparison, entry, rows, settings_text(differing))
            yield _of_all(comparison, first)


def _of_label(
    comparison: ComparedRuns, entry: ComparedLabel, rows: pd.DataFrame, differing: str
) -> WandbRun:
    run, setting = entry.run, setting_of(entry.run, entry.label)
    timed = _before_times(run.timing)
    turns = [
        [*(getattr(record, key) for key in _TURN), record.lossless.verdict]
        for record in run.records
        if record.label == entry.label
    ]
    cases = pd.DataFrame(turns, columns=[*_TURN, "verdict"])
    return WandbRun(
        first=run,
        identity=_hashed(f"{run_id(run)}/{entry.label}"),
        name=" ".join(filter(None, [setting, differing])),
        job_type=entry.method,
        config={
            **run_config(run),
            "conditions": dict(conditions_of(comparison)),
            "label": entry.label,
            "method": entry.method,
            "setting": setting,
            "state_scope": entry.overall["state_scope"],
            "knobs": without_names(entry.knobs),
        },
        summary=label_numbers(entry, rows) | {"timing": run.timing, "complete": run.complete},
        tables={f"{timed}cases": cases, f"{timed}tasks": rows},
    )


def _of_all(comparison: ComparedRuns, first: Run) -> WandbRun:
    """Make the W&B run about all labels: tables, pictures, the verdict and the record files."""
    timed = _before_times(comparison.timing)
    warned = [(warning.code, warning.text, warning.decides) for warning in warnings_of(comparison)]
    return WandbRun(
        first=first,
        identity=_hashed(f"{run_id(first)}/comparison"),
        name="all methods",
        job_type="comparison",
        config={**run_config(first), "conditions": dict(conditions_of(comparison))},
        summary={
            f"{timed}verdict": verdict_of(comparison),
            "caption": caption(comparison),
            "complete": all(run.complete for run in comparison.runs),
        },
        tables={
            f"{timed}comparison": sheet([comparison_table(comparison).in_short()]),
            "warnings": pd.DataFrame(warned, columns=["code", "text", "decides"]),
        },
        figures={f"{timed}{key}": figure for key, figure in pictures_of(comparison)},
        files=_record_files(comparison.runs),
    )


def _record_files(runs: Sequence[Run]) -> dict[str, Path]:
    paths = [path for run in runs for path in sorted(run.path.glob("*.*"))]
    return {f"{p.parent.resolve().name}/{p.name}": p for p in paths if p.suffix in _RECORDS}


def _before_times(timing: str) -> str:
    return PREDICTED if timing == "predicted" else ""


def label_rows(comparison: ComparedRuns) -> list[tuple[ComparedLabel, pd.DataFrame]]:
    """Return each label with its lines of ``analysis.tables --csv``, one for each task."""
    groups = records_sheet([comparison]).groupby(["run", "label"], sort=False)
    return list(zip(comparison.entries, (rows for _, rows in groups), strict=True))


def label_numbers(entry: ComparedLabel, rows: pd.DataFrame) -> dict[str, object]:
    """Return the numbers and the standing of a label's lines, by task below ``task/``."""
    timed = _before_times(entry.run.timing)
    numbers: dict[str, object] = {}
    for row in rows.to_dict("records"):
        task = "" if row["task"] == OVERALL else f"task/{row['task']}/"
        for key, value in row.items():
            name = f"{task}{'' if str(key).startswith(_COUNTED) else timed}{key}"
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and value == value:
                numbers[name] = value
            elif key == "against_the_best" and isinstance(value, str):
                numbers[name] = standing_word(value)
    if (tokens := rows_of_target_pass(entry).value) is not None:
        numbers["tokens_per_pass"] = tokens
    return numbers


def send(content: WandbRun, settings: Mapping[str, Any], folder: Path) -> str:
    """Send one W&B run, or write it for ``wandb sync``, and return its address.

    Raises:
        Exception: whatever wandb raises; the run folder is untouched.
    """
    import wandb

    run = content.first
    tags = [run.model, run.dataset if run.records else "", run.timing, content.job_type]
    with wandb.init(
        **{key: settings[key] for key in ("project", "entity", "mode")},
        dir=str(folder),
        id=content.identity,
        name=content.name[:LONGEST_NAME],
        group=group_of(run)[:LONGEST_NAME],
        job_type=content.job_type[:LONGEST_TAG],
        tags=list(dict.fromkeys(t[:LONGEST_TAG] for t in [*tags, *settings["tags"]] if t)),
        config=dict(content.config),
        resume="allow",
        settings=wandb.Settings(console="off", init_timeout=60),
    ) as live:
        for key, frame in content.tables.items():
            cells = frame.astype(object).where(frame.notna(), None).values.tolist()
            live.log({key: wandb.Table(columns=[*frame], data=cells, allow_mixed_types=True)})
        for key, figure in content.figures.items():
            png = save(figure, folder / "figures", f"{content.identity}_{key}")[0]
            live.log({f"figures/{key}": wandb.Image(str(png))})
        live.summary.update(dict(content.summary))
        if content.files:
            artifact = wandb.Artifact(f"records-{content.identity}", type="records")
            for name, path in content.files.items():
                artifact.add_file(str(path), name=name)
            live.log_artifact(artifact)
        return str(live.url)


def publish(runs: Sequence[Run], given: Mapping[str, Any] | None = None) -> int:
    """Publish the runs; print how many W&B runs they became and what to type.

    A W&B run that cannot be sent is written offline, and so are all that follow.

    Returns:
        0, or 1 if something was not published as the ``logger`` node says.
    """
    settings = logger_settings(runs[0], given)
    above = Path(os.path.relpath(os.path.commonpath([run.path.resolve() for run in runs])))
    folder = Path(settings["folder"] or above / "wandb")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("WANDB_SILENT", "true")
    addresses: list[str] = []
    code = 0
    for content in wandb_runs(runs):
        try:
            addresses.append(send(content, settings, folder))
        except ImportError:
            raise
        except Exception as error:
            # A copy: whatever is wrong with the service, the records are safe.
            code = 1
            sys.stderr.write(f"error: not sent: {content.name}: {first_line(error)}\n")
            if settings["mode"] == "online":
                sys.stderr.write("From here on, everything is written offline.\n")
                settings["mode"] = "offline"
                addresses.append(send(content, settings, folder))
    count = f"W&B: {len(addresses)} runs in group {', '.join(dict.fromkeys(map(group_of, runs)))}"
    if settings["mode"] == "offline":
        count += f", written offline. Type: wandb sync {folder}/wandb/offline-run-*"
    elif addresses:
        count += f": {addresses[-1]}"
    sys.stdout.write(f"{count}\n")
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 if everything was published as requested, 1 if not, 2 for bad input."""
    parser = parser_of(__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders, or folders above them")
    parser.add_argument(
        "--settings", type=json.loads, help='JSON over the runs\' own, e.g. \'{"mode": "online"}\''
    )
    options = parser.parse_args(arguments)

    def work() -> int:
        runs = [*load_runs(options.runs), *load_surfaces(options.runs, by_hand=True)]
        if not runs:
            raise ResultsError(f"{options.runs[0]} holds no run with records and no cost surface.")
        try:
            return publish(runs, options.settings)
        except ImportError as error:
            raise ResultsError("wandb is not installed: pip install -e '.[wandb]'") from error

    return reporting_errors(work)


if __name__ == "__main__":
    sys.exit(main())
