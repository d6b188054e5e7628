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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.runs.load import Run, load_runs
from specbench.errors import ResultsError
from specbench.results.manifest import RunManifest
from specbench.results.records import (
    CASES,
    DIALOGUE,
    DISTURBED,
    DONE,
    ERRORS,
    MANIFEST,
    STEPS,
    SUMMARY,
)
from specbench.results.statistics import exit_code, run_summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

# What must be the same for records to stand in one table.
_SUBJECT = ("schema_version", "run_key", "prompt_set_hash", "baseline", "labels")
_MODEL = ("id", "revision", "weights_hash", "dtype", "tokenizer_hash", "template_sha")


def merge(paths: Sequence[Path], output: Path, mixed: bool = False) -> Run:
    """Join shards.

    Args:
        paths: the shards' folders, or folders that hold them, searched recursively.
        output: the folder to make.
        mixed: accept shards from different hardware, versions or code; the manifest says so.

    Raises:
        ResultsError: a shard is missing, incomplete, there twice or from another run, or
            ``output`` exists already; the message says which, and what to type.
    """
    if output.exists():
        raise ResultsError(f"{output} exists already. Give a folder that does not: -o DIR.")
    runs = [run for run in load_runs(paths) if _shard(run) is not None]
    if not runs:
        where = ", ".join(map(str, paths))
        raise ResultsError(f"no shard at or below {where}. Make them: python run.py shard=0/2 …")
    _check_same(runs)
    runs = _check_whole(runs)
    conditions = _conditions(runs, mixed)
    _check_keys(runs)

    records = sorted(
        (record for run in runs for record in run.records),
        key=lambda record: (record.stream_index, record.turn, record.position),
    )
    errors = [line for run in runs for line in _lines(run.path / ERRORS)]
    manifest = _manifest(runs, conditions, exit_code(records, errors))
    building = output.with_name(output.name + ".tmp")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    _write_lines(building / CASES, (record.to_json() for record in records))
    _write_lines(building / ERRORS, errors)
    for name in (DISTURBED, DIALOGUE):
        lines = [line for run in runs for line in _lines(run.path / name)]
        if lines:
            _write_lines(building / name, lines)
    steps = pa.concat_tables([pq.read_table(run.path / STEPS) for run in runs])
    pq.write_table(steps, building / STEPS)
    _write_json(building / SUMMARY, run_summary(records, errors, RunManifest.from_json(manifest)))
    _write_json(building / MANIFEST, manifest)
    (building / DONE).write_text("", encoding="utf-8")
    os.replace(building, output)
    return Run(output, manifest, records, complete=True)


def _shard(run: Run) -> tuple[int, int] | None:
    """``(i, n)``; None for a whole run."""
    shard = (run.manifest.get("identity") or {}).get("shard")
    if shard is None:
        return None
    i, n = str(shard).split("/")
    return int(i), int(n)


def _check_same(runs: Sequence[Run]) -> None:
    first, *others = runs
    for run in others:
        differing = [
            f"{key}: there {_short(run.manifest.get(key))}, here {_short(first.manifest.get(key))}"
            for key in _SUBJECT
            if run.manifest.get(key) != first.manifest.get(key)
        ]
        ours, theirs = (r.manifest.get("model") or {} for r in (first, run))
        differing += [
            f"model.{key}: there {_short(theirs.get(key))}, here {_short(ours.get(key))}"
            for key in _MODEL
            if theirs.get(key) != ours.get(key)
        ]
        if differing:
            raise ResultsError(
                f"{run.path} and {first.path} are not shards of one run:\n  "
                + "\n  ".join(differing)
                + "\nName only the folders of one run."
            )


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _check_whole(runs: Sequence[Run]) -> list[Run]:
    """The shards in order, once it is clear that each is there once and complete."""
    counts = {n for run in runs if (shard := _shard(run)) for n in shard[1:]}
    if len(counts) > 1:
        raise ResultsError(
            "shards of different cuts cannot be joined: "
            + ", ".join(f"{run.path} is {_words(run)}" for run in runs)
        )
    by_shard: dict[int, list[Run]] = {}
    for run in runs:
        by_shard.setdefault((_shard(run) or (0, 1))[0], []).append(run)
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
    i, n = _shard(run) or (0, 1)
    return f"shard={i}/{n}"


def _conditions(runs: Sequence[Run], mixed: bool) -> list[str]:
    """What differs among the shards' hardware, versions and code, in words."""
    differing = []
    for key in ("hardware", "versions", "git"):
        values = [run.manifest.get(key) for run in runs]
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
    """Refuse a record that is there twice."""
    counts = Counter(record.key for run in runs for record in run.records)
    twice = [key for key, count in counts.items() if count > 1]
    if twice:
        repeat, case_id, turn, label = twice[0]
        raise ResultsError(
            f"{len(twice)} records are there twice, the first one: label {label}, case {case_id}, "
            f"turn {turn}, repeat {repeat}. These are not the shards of one run."
        )


def _manifest(runs: Sequence[Run], conditions: list[str], code: int) -> dict[str, Any]:
    """The first shard's manifest without its shard, and where everything came from."""
    merged = dict(runs[0].manifest)
    merged["config"] = {**merged["config"], "shard": None}
    merged["identity"] = {**merged["identity"], "shard": None}
    merged["overrides"] = [o for o in merged["overrides"] if not o.startswith("shard=")]
    merged["status"] = "complete"
    merged["exit_code"] = code
    merged["starts"] = [start for run in runs for start in run.manifest["starts"]]
    merged["forced_resume"] = any(run.manifest.get("forced_resume") for run in runs)
    merged["merged_from"] = [str(run.path) for run in runs]
    merged["mixed_conditions"] = conditions
    return merged


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    text = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in lines)
    path.write_text("".join(text), encoding="utf-8")


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code (2: the shards cannot be joined, or a damaged file)."""
    parser = argparse.ArgumentParser(
        prog="python -m analysis.merge", description="Join the shards of a run into one folder."
    )
    parser.add_argument("shards", nargs="+", type=Path, help="their folders, or a folder of them")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--mixed", action="store_true", help="accept different hardware or code")
    options = parser.parse_args(arguments)
    try:
        run = merge(options.shards, options.output, options.mixed)
    except Exception as error:
        # The project's own errors carry their exit code and a message meant for the user.
        code = getattr(error, "exit_code", None)
        if code is None:
            raise
        sys.stderr.write(f"error: {error}\n")
        return int(code)
    cases = len({record.case_id for record in run.records})
    sys.stdout.write(f"{run.path}: {len(run.records)} records of {cases} cases\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
