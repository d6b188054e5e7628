"""Join the folders of a run's shards into one: ``python -m analysis.merge SHARD… -o DIR``.

Shards of one run share its key (``shard=0/4`` … ``shard=3/4``). The result is an ordinary complete
run folder: the same command without ``shard`` and with ``output_dir=DIR`` prints its table. Needs
no torch and no GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.runs.cli import parser_of, reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.jsonl_schema import answer_line
from specbench.results.manifest import ModelInfo, RunManifest
from specbench.results.records import (
    CASES,
    DIALOGUE,
    DISTURBED,
    ERRORS,
    LEFT,
    STEPS,
    SUMMARY,
)
from specbench.results.run_summary import exit_code, run_summary
from specbench.storage import jsonl

# What must agree before records are joined; _CONDITIONS may differ with --mixed.
_SUBJECT = ("schema_version", "run_key", "prompt_set_hash", "baseline")
_MODEL = ("id", "revision", "weights_hash", "dtype", "weights", "tokenizer_hash", "template_sha")
_CONDITIONS = ("hardware", "versions", "git")


def merge(paths: Sequence[Path], output: Path, mixed: bool = False) -> Run:
    """Join the shards below the paths into a new folder; ``mixed`` accepts different conditions.

    Raises:
        ResultsError: a shard is missing, incomplete, there twice or from another run, or
            ``output`` exists already; the message says which, and what to type.
    """
    if output.exists():
        raise ResultsError(f"{output} exists already. Give a folder that does not: -o DIR.")
    runs = _every_shard(paths)
    first = runs[0].manifest
    differing = [
        f"{key} of {_name(run)} is not that of {_name(runs[0])}"
        for key in _CONDITIONS
        for run in runs
        if getattr(run.manifest, key) != getattr(first, key)
    ]
    if differing and not mixed:
        raise ResultsError(
            "the shards were measured under different conditions:\n  "
            + "\n  ".join(differing)
            + "\nSpeedups are paired within each shard and stay valid, tokens/s is a mixture. "
            "Add --mixed to join them all the same; the manifest then says so."
        )
    records = sorted(
        (record for run in runs for record in run.records),
        key=lambda record: (record.stream_index, record.turn, record.position),
    )
    counts = Counter(record.key for record in records)
    if twice := [key for key, count in counts.items() if count > 1]:
        repeat, case_id, turn, label = twice[0]
        raise ResultsError(
            f"{len(twice)} records are there twice, the first one: label {label}, case {case_id}, "
            f"turn {turn}, repeat {repeat}. These are not the shards of one run."
        )
    errors = [error for run in runs for error in run.errors]
    superseded = [record for run in runs for record in run.superseded]
    answers = [
        line for run in runs for line in jsonl.read_jsonl(run.path / DIALOGUE, answer_line)[0]
    ]
    manifest = _manifest(runs, differing, exit_code(records, errors))
    building = output.with_name(output.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    jsonl.rewrite_jsonl(building / CASES, (record.to_json() for record in records))
    jsonl.rewrite_jsonl(building / ERRORS, errors)
    if superseded:
        lines = (record.to_json() for record in superseded)
        jsonl.rewrite_jsonl(building / DISTURBED, lines)
    if answers:
        jsonl.rewrite_jsonl(building / DIALOGUE, answers)
    steps = pa.concat_tables([pq.read_table(run.path / STEPS) for run in runs])
    pq.write_table(steps, building / STEPS)
    jsonl.write_json(building / SUMMARY, run_summary(records, errors, manifest, superseded))
    manifest.finish(building, LEFT)
    os.replace(building, output)
    return Run(output, manifest, records, complete=True)


def _name(run: Run) -> str:
    i, n = run.manifest.shard or (0, 1)
    return f"shard={i}/{n}"


def _every_shard(paths: Sequence[Path]) -> list[Run]:
    """Return the shards in order; refuse incomplete, missing, repeated or foreign ones."""
    runs = [run for run in load_runs(paths) if run.manifest.shard is not None]
    if not runs:
        folders = ", ".join(map(str, paths))
        raise ResultsError(f"no shard at or below {folders}. Make them: python run.py shard=0/2 …")
    by_name: dict[str, Run] = {}
    for run in runs:
        if differing := _differing(run.manifest, runs[0].manifest):
            raise ResultsError(
                f"{run.path} and {runs[0].path} are not shards of one run:\n  "
                + "\n  ".join(differing)
                + "\nName only the folders of one run."
            )
        if (first := by_name.setdefault(_name(run), run)) is not run:
            raise ResultsError(
                f"{_name(run)} is there twice: {first.path}, {run.path}. Name one of them."
            )
        if not run.complete:
            raise ResultsError(
                f"{run.path} ({_name(run)}) is incomplete. Repeat its command to finish it."
            )
        run.manifest.check_files(run.path)
    cuts = {run.manifest.shard[1] for run in runs if run.manifest.shard}
    names = [f"shard={i}/{n}" for n in sorted(cuts) for i in range(n)]
    if missing := [name for name in names if name not in by_name]:
        raise ResultsError(f"not all shards are there: run the command with {', '.join(missing)}.")
    return [by_name[name] for name in names]


def _differing(there: RunManifest, here: RunManifest) -> list[str]:
    """List how two runs differ; a label that one of them left out is not compared."""
    missing = {*(there.left_out or {}), *(here.left_out or {})}

    def subject(manifest: RunManifest) -> dict[str, Any]:
        model = manifest.model or ModelInfo()
        labels = {k: v.to_json() for k, v in manifest.labels.items() if k not in missing}
        return {
            **{key: getattr(manifest, key) for key in _SUBJECT},
            **{f"model.{key}": getattr(model, key) for key in _MODEL},
            **{f"labels.{label}": info for label, info in labels.items()},
        }

    ours, theirs = subject(here), subject(there)
    return [
        f"{key}: there {json.dumps(theirs.get(key))[:60]}, here {json.dumps(ours.get(key))[:60]}"
        for key in {**ours, **theirs}
        if ours.get(key) != theirs.get(key)
    ]


def _manifest(runs: Sequence[Run], differing: list[str], code: int) -> RunManifest:
    first = runs[0].manifest
    left_out: dict[str, str] = {}
    for run in runs:
        for label, reason in (run.manifest.left_out or {}).items():
            text = f"{_name(run)}: {reason}"
            left_out[label] = " ".join(filter(None, [left_out.get(label), text]))
    reads = [run.manifest.model.read_bytes_per_s for run in runs if run.manifest.model]
    fastest = max((read for read in reads if read), default=None)
    return first.model_copy(
        update={
            "model": first.model and first.model.model_copy(update={"read_bytes_per_s": fastest}),
            "config": {**first.config, "shard": None},
            "identity": {**(first.identity or {}), "shard": None},
            "overrides": [o for o in first.overrides if not o.startswith("shard=")],
            "labels": {k: info for run in runs for k, info in run.manifest.labels.items()},
            "left_out": left_out or None,
            "status": "complete",
            "exit_code": max(code, int(bool(left_out))),
            "starts": [start for run in runs for start in run.manifest.starts],
            "forced_resume": any(run.manifest.forced_resume for run in runs),
            "merged_from": [str(run.path) for run in runs],
            "mixed_conditions": differing,
        }
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code (2: shards do not join, or a damaged file)."""
    parser = parser_of(__doc__, "analysis.merge")
    parser.add_argument("shards", nargs="+", type=Path, help="their folders, or a folder of them")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--mixed", action="store_true", help="accept different hardware or code")
    options = parser.parse_args(arguments)

    def work() -> int:
        run = merge(options.shards, options.output, options.mixed)
        cases = len({record.case_id for record in run.records})
        sys.stdout.write(f"{run.path}: {len(run.records)} records of {cases} cases\n")
        return 0

    return reporting_errors(work)


if __name__ == "__main__":
    sys.exit(main())
