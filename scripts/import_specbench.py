"""Read Spec-Bench's answer files as a run folder, so that ``analysis`` can show them.

    python scripts/import_specbench.py OUT ar=vanilla.jsonl pld=pld.jsonl --model vicuna7b
    python -m analysis.tables OUT

A label given again is its next repeat. What their files do not say (token ids, prefill apart from
decoding, what was drafted, verdicts) stays unknown: the manifest lists it, and every table's
caption says so. So there is no speedup over decoding time, only their estimator's. A question whose
counts contradict each other is refused; with ``--flag`` it becomes a failed case, which drops out
for all labels. An answer "ERROR" always does: its numbers are those of the turn before.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import ConfigurationError, OutputRefused, SpecBenchError
from specbench.results.records import (
    CASES,
    DONE,
    ERRORS,
    MANIFEST,
    SCHEMA_VERSION,
    SUMMARY,
    CaseRecord,
)
from specbench.results.spec_bench_format import (
    UNKNOWN_FIELDS,
    UNKNOWN_SCOPE,
    AnswerError,
    Source,
    from_answer,
    mean_accept_length,
)
from specbench.results.statistics import OVERALL, summarise
from specbench.storage import jsonl

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        raise OutputRefused(f"{options.out} is not empty. Name a new folder.")
    files = [_named(text) for text in options.files]
    labels = list(dict.fromkeys(label for label, _ in files))
    if options.baseline is not None and options.baseline not in labels:
        raise ConfigurationError(
            f"--baseline {options.baseline} is none of the labels {', '.join(labels)}."
        )
    digests = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for _, path in files}
    run_key = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16]
    records: list[CaseRecord] = []
    errors: list[dict[str, Any]] = []
    theirs: dict[str, list[dict[str, Any]]] = {}
    for place, (label, path) in enumerate(files):
        repeat = sum(earlier == label for earlier, _ in files[:place])
        source = Source(
            label, label, options.model, options.dataset, run_key, repeat, labels.index(label)
        )
        lines = _lines(path)
        theirs.setdefault(label, []).extend(lines)
        for number, line in enumerate(lines):
            made, error = _question(line, source, number, path, options.flag)
            records += made
            errors += error
    _write(options, labels, records, errors, digests, run_key)
    rows = {row["label"]: row for row in _rows(records, labels, options) if row["task"] == OVERALL}
    for label in labels:
        ours, mean = rows[label]["mat"], mean_accept_length(theirs[label])
        print(
            f"{label}: {rows[label]['n_cases']} questions, MAT {_number(ours)} "
            f"(Spec-Bench's mean accepted tokens: {_number(mean)})"
        )
    if errors:
        print(f"{len(errors)} questions are marked as failed; reasons in {options.out / ERRORS}")
    print(f"{options.out}: python -m analysis.tables {options.out}")
    return 0


def _named(text: str) -> tuple[str, Path]:
    """``LABEL=FILE``, or a file whose name is the label."""
    label, _, name = text.rpartition("=")
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(f"{name} is no file. Type LABEL=FILE, e.g. pld=answers/pld.jsonl.")
    return label or re.sub(r"\.jsonl$", "", path.name), path


def _lines(path: Path) -> list[dict[str, Any]]:
    lines, cut = jsonl.read_jsonl(path)
    if cut or not lines:
        raise AnswerError(f"{path}: {'the last line is cut off' if cut else 'no answer in it'}.")
    asked = [str(line.get("question_id")) for line in lines]
    twice = sorted({name for name in asked if asked.count(name) > 1})
    if twice:
        raise AnswerError(f"{path}: questions occur more than once: {', '.join(twice[:5])}.")
    return lines


def _question(
    line: dict[str, Any], source: Source, number: int, path: Path, flag: bool
) -> tuple[list[CaseRecord], list[dict[str, Any]]]:
    """The records of a line, and why it failed if it did."""
    try:
        records = from_answer(line, source, number)
        reason = 'the answer is "ERROR"' if records[0].status == "failed" else ""
    except AnswerError as error:
        if not flag:
            raise AnswerError(
                f"{path}, line {number + 1}: {error} Type --flag to keep such questions as failed "
                "cases."
            ) from error
        reason = str(error)
        # From the fields that must be there for a record at all.
        erroneous = {**line, "choices": [_ERRONEOUS]}
        records = from_answer(erroneous, source, number)
    if not reason:
        return records, []
    first = records[0]
    where = {"label": first.label, "case_id": first.case_id, "turn": 0, "repeat": first.repeat}
    return records, [{**where, "type": "AnswerError", "message": reason, "traceback": ""}]


_ERRONEOUS = {
    "turns": ["ERROR"], "decoding_steps": [0], "new_tokens": [0], "wall_time": [0.0],
    "accept_lengths": [],
}  # fmt: skip


def _rows(
    records: Sequence[CaseRecord], labels: Sequence[str], options: argparse.Namespace
) -> list[dict[str, Any]]:
    return summarise(records, labels, _baseline(labels, options), estimator="specbench")


def _baseline(labels: Sequence[str], options: argparse.Namespace) -> str | None:
    return options.baseline or ("ar" if "ar" in labels else None)


def _write(
    options: argparse.Namespace,
    labels: Sequence[str],
    records: Sequence[CaseRecord],
    errors: Sequence[dict[str, Any]],
    digests: dict[str, str],
    run_key: str,
) -> None:
    gpus = [{"name": name} for name in options.gpu]
    model = {"name": options.model, "dtype": options.dtype, "device": "cuda" if gpus else None}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "run_key": run_key,
        "status": "complete",
        "exit_code": 1 if errors else 0,
        "imported": {"from": "Spec-Bench", "sha256": digests, "unknown": UNKNOWN_FIELDS},
        "config": {
            "model": model,
            "dataset": {"name": options.dataset},
            "generation": {"temperature": options.temperature},
            "estimator": "specbench",
            "repeats": 1 + max(record.repeat for record in records),
        },
        "labels": {
            label: {"method": label, "method_version": 1, "state_scope": UNKNOWN_SCOPE, "knobs": {}}
            for label in labels
        },
        "baseline": _baseline(labels, options),
        "seed": 0,
        "hardware": {"cpu": None, "gpus": gpus},
        "versions": {},
        "git": None,
        "model": {"dtype": options.dtype, "device": model["device"]},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    jsonl.rewrite_jsonl(options.out / CASES, (record.to_json() for record in records))
    jsonl.rewrite_jsonl(options.out / ERRORS, errors)
    jsonl.write_json(options.out / SUMMARY, {"rows": _rows(records, labels, options)})
    jsonl.write_json(options.out / MANIFEST, manifest)
    jsonl.write_text(options.out / DONE, "")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("out", type=Path, help="the run folder, new")
    add("files", nargs="+", metavar="LABEL=FILE", help="an answer file; its name is the default")
    add("--model", required=True, help="the model's name, as in conf/model")
    add("--dataset", default="specbench", help="default: specbench")
    add("--baseline", help="label that speedups refer to (default: ar, where there is one)")
    add("--dtype", help="number format, e.g. float16, where known")
    add("--gpu", action="append", default=[], help="name of the GPU, where known; once for each")
    add("--temperature", type=float, default=0.0)
    add("--flag", action="store_true", help="keep contradictory questions as failed cases")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecBenchError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
