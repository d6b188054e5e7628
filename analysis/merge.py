"""Join the folders of a run's shards into one: ``python -m analysis.merge SHARD… -o DIR``.

Shards of one run share its key (``shard=0/4`` … ``shard=3/4``). The result is an ordinary complete
run folder: the same command without ``shard`` and with ``output_dir=DIR`` prints its table. Files
in, files out; no torch, no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.runs.command import reporting_errors
from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.lines import answer_line, error_line, turn_line
from specbench.results.manifest import LabelInfo, ModelInfo, RunManifest
from specbench.results.records import CASES, DIALOGUE, DISTURBED, ERRORS, LEFT, STEPS, SUMMARY
from specbench.results.statistics.run_summary import exit_code, run_summary
from specbench.storage import jsonl

# What must be the same for records to stand in one table.
_SUBJECT = ("schema_version", "run_key", "prompt_set_hash", "baseline")
_MODEL = ("id", "revision", "weights_hash", "dtype", "weights", "tokenizer_hash", "template_sha")


def merge(paths: Sequence[Path], output: Path, mixed: bool = False) -> Run:
    """Join the shards below the paths into a new folder; ``mixed`` accepts different conditions.

    Raises:
        ResultsError: a shard is missing, incomplete, there twice or from another run, or
            ``output`` exists already; the message says which, and what to type.
    """
    if output.exists():
        raise ResultsError(f"{output} exists already. Give a folder that does not: -o DIR.")
    runs = [run for run in load_runs(paths) if run.manifest.shard is not None]
    if not runs:
        where = ", ".join(map(str, paths))
        raise ResultsError(f"no shard at or below {where}. Make them: python run.py shard=0/2 …")
    _check_same(runs)
    runs = _check_whole(runs)
    for run in runs:
        run.manifest.check_files(run.path)
    conditions = _conditions(runs, mixed)
    _check_keys(runs)

    records = sorted(
        (record for run in runs for record in run.records),
        key=lambda record: (record.stream_index, record.turn, record.position),
    )
    errors = _lines(runs, ERRORS)
    manifest = _manifest(runs, conditions, exit_code(records, errors))
    building = output.with_name(output.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    jsonl.rewrite_jsonl(building / CASES, (record.to_json() for record in records))
    jsonl.rewrite_jsonl(building / ERRORS, errors)
    for name in (DISTURBED, DIALOGUE):
        if lines := _lines(runs, name):
            jsonl.rewrite_jsonl(building / name, lines)
    steps = pa.concat_tables([pq.read_table(run.path / STEPS) for run in runs])
    pq.write_table(steps, building / STEPS)
    superseded = [record for run in runs for record in run.superseded]
    jsonl.write_json(building / SUMMARY, run_summary(records, errors, manifest, superseded))
    manifest.finish(building, LEFT)
    os.replace(building, output)
    return Run(output, manifest, records, complete=True)


def _check_same(runs: Sequence[Run]) -> None:
    first, *others = runs
    for run in others:
        there, here = run.manifest, first.manifest
        pairs = [(key, getattr(there, key), getattr(here, key)) for key in _SUBJECT]
        pairs.append(("labels", _labels(there, here), _labels(here, there)))
        models = [manifest.model or ModelInfo() for manifest in (there, here)]
        pairs += [(f"model.{key}", *(getattr(model, key) for model in models)) for key in _MODEL]
        differing = [
            f"{key}: there {_short(theirs)}, here {_short(ours)}"
            for key, theirs, ours in pairs
            if theirs != ours
        ]
        if differing:
            raise ResultsError(
                f"{run.path} and {first.path} are not shards of one run:\n  "
                + "\n  ".join(differing)
                + "\nName only the folders of one run."
            )


def _labels(own: RunManifest, other: RunManifest) -> dict[str, LabelInfo | None]:
    """A shard's labels, without what is known of those that either of the two left out."""
    missing = {**(own.left_out or {}), **(other.left_out or {})}
    found = dict.fromkeys([*own.labels, *(own.left_out or {})])
    return {label: None if label in missing else own.labels[label] for label in sorted(found)}


def _left_out(runs: Sequence[Run]) -> dict[str, str] | None:
    """The labels that a shard left out, and so the whole, with their reasons."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for label, why in (run.manifest.left_out or {}).items():
            found.setdefault(label, []).append(f"{_words(run)}: {why}")
    return {label: " ".join(said) for label, said in found.items()} or None


def _short(value: object) -> str:
    if isinstance(value, dict):  # of labels
        value = {label: info and info.to_json() for label, info in value.items()}
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _check_whole(runs: Sequence[Run]) -> list[Run]:
    """The shards in order, once it is clear that each is there once and complete."""
    shards = [(run.manifest.shard or (0, 1), run) for run in runs]
    counts = {n for (_, n), _ in shards}
    if len(counts) > 1:
        raise ResultsError(
            "shards of different cuts cannot be joined: "
            + ", ".join(f"{run.path} is {_words(run)}" for run in runs)
        )
    by_shard: dict[int, list[Run]] = {}
    for (i, _), run in shards:
        by_shard.setdefault(i, []).append(run)
    for same in by_shard.values():
        if len(same) > 1:
            raise ResultsError(
                f"{_words(same[0])} is there {len(same)} times: "
                + ", ".join(str(run.path) for run in same)
                + ". Name one of them."
            )
    (n,) = counts
    missing = [f"shard={i}/{n}" for i in range(n) if i not in by_shard]
    if missing:
        raise ResultsError(f"not all shards are there: run the command with {', '.join(missing)}.")
    for run in runs:
        if not run.complete:
            raise ResultsError(
                f"{run.path} ({_words(run)}) is incomplete. Repeat its command to finish it."
            )
    return [by_shard[i][0] for i in range(n)]


def _words(run: Run) -> str:
    i, n = run.manifest.shard or (0, 1)
    return f"shard={i}/{n}"


def _conditions(runs: Sequence[Run], mixed: bool) -> list[str]:
    """What differs among the shards' hardware, versions and code, in words."""
    differing = []
    for key in ("hardware", "versions", "git"):
        values = [getattr(run.manifest, key) for run in runs]
        for run, value in zip(runs, values, strict=True):
            if value != values[0]:
                differing.append(f"{key} of {_words(run)} is not that of {_words(runs[0])}")
    if differing and not mixed:
        raise ResultsError(
            "the shards were measured under different conditions:\n  "
            + "\n  ".join(differing)
            + "\nSpeedups are paired within each shard and stay valid, tokens/s is a mixture. "
            "Add --mixed to join them all the same; the manifest then says so."
        )
    return differing


def _check_keys(runs: Sequence[Run]) -> None:
    counts = Counter(record.key for run in runs for record in run.records)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        repeat, case_id, turn, label = twice[0]
        raise ResultsError(
            f"{len(twice)} records are there twice, the first one: label {label}, case {case_id}, "
            f"turn {turn}, repeat {repeat}. These are not the shards of one run."
        )


def _manifest(runs: Sequence[Run], conditions: list[str], code: int) -> RunManifest:
    first = runs[0].manifest
    missing = _left_out(runs)
    labels = {label: info for run in runs for label, info in run.manifest.labels.items()}
    reads = [model.read_bytes_per_s for run in runs if (model := run.manifest.model)]
    fastest = max((read for read in reads if read), default=None)
    return first.model_copy(
        update={
            "model": first.model and first.model.model_copy(update={"read_bytes_per_s": fastest}),
            "config": {**first.config, "shard": None},
            "identity": {**(first.identity or {}), "shard": None},
            "overrides": [o for o in first.overrides if not o.startswith("shard=")],
            "labels": labels,
            "left_out": missing,
            "status": "complete",
            "exit_code": max(code, int(bool(missing))),
            "starts": [start for run in runs for start in run.manifest.starts],
            "forced_resume": any(run.manifest.forced_resume for run in runs),
            "merged_from": [str(run.path) for run in runs],
            "mixed_conditions": conditions,
        }
    )


def _lines(runs: Sequence[Run], name: str) -> list[Mapping[str, object]]:
    parse: Callable[[object], Mapping[str, object]] = turn_line
    if name in (ERRORS, DIALOGUE):
        parse = error_line if name == ERRORS else answer_line
    return [line for run in runs for line in jsonl.read_jsonl(run.path / name, parse)[0]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: the shards cannot be joined, or a damaged file)."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.merge", description="Join the shards of a run into one folder."
    )
    parser.add_argument("shards", nargs="+", type=Path, help="their folders, or a folder of them")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--mixed", action="store_true", help="accept different hardware or code")
    options = parser.parse_args(arguments)
    return reporting_errors(lambda: _merge(options))


def _merge(options: argparse.Namespace) -> int:
    run = merge(options.shards, options.output, options.mixed)
    cases = len({record.case_id for record in run.records})
    sys.stdout.write(f"{run.path}: {len(run.records)} records of {cases} cases\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
