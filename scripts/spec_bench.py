"""Exchange runs with Spec-Bench: write a run as its answer files, or read its files as a run.

python scripts/spec_bench.py export RUN OUT
python scripts/spec_bench.py import OUT ar=vanilla.jsonl pld=pld.jsonl --model vicuna7b
python scripts/spec_bench.py import --help      # what each of the two keeps and loses
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.export import one_run, without_text, write_answers
from analysis.runs.command import add_command, parser_of, reporting_errors
from specbench.config.schema import ModelConfig
from specbench.errors import ConfigurationError, OutputRefused, SpecBenchError
from specbench.results.formats.spec_bench import (
    UNKNOWN_FIELDS,
    UNKNOWN_SCOPE,
    AnswerError,
    Source,
    from_answer,
    mean_accept_length,
)
from specbench.results.manifest import BASELINE, LabelInfo, ModelInfo, RunManifest
from specbench.results.records import CASES, ERRORS, LEFT, SUMMARY, CaseRecord
from specbench.results.statistics.summary import summarize
from specbench.results.tasks import OVERALL
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import JsonObject
from specbench.system.noted import Gpu

_EXPORT = """Write a run as Spec-Bench's answer files, so that its own speed.py can be run on them.

    python scripts/spec_bench.py export RUN OUT

Its evaluation/speed.py takes two of them as --file-path and --base-path, once one line of it has
been edited: in its parser.add_argument("--mean-report", ...) near the end, the line default=True,
must become default=False,. As it stands the option is on whatever is typed, and the files that are
named are not read.

One file per label; with repeats, one folder run_1, run_2, ... each. Its MAT is ours. What it prints
of speeds is python -m analysis.tables RUN --estimator specbench_exact. With --estimator specbench
the baseline's tokens are counted like a method's: speed.py tokenizes that one's text again and
subtracts one, so the EOS is lost there and nowhere else.
"""

_IMPORT = """Read Spec-Bench's answer files as a run folder, so that analysis can show them.

    python scripts/spec_bench.py import OUT ar=vanilla.jsonl pld=pld.jsonl --model vicuna7b
    python -m analysis.tables OUT

A label given again is its next repeat. What their files do not say (token ids, prefill apart from
decoding, what was drafted, verdicts) stays unknown: the manifest lists it, and every table's
caption says so. So there is no speedup over decoding time, only their estimator's. A question whose
counts contradict each other is refused; with --flag it becomes a failed case, which drops out for
all labels. An answer "ERROR" always does: it repeats the numbers of the turn before.
"""

# The fields that must be there for a record at all.
_FAILED_ANSWER = {
    "turns": ["ERROR"],
    "decoding_steps": [0],
    "new_tokens": [0],
    "wall_time": [0.0],
    "accept_lengths": [],
}


def export_run(options: argparse.Namespace) -> None:
    decoder = without_text if options.no_text else _decoder
    write_answers(one_run(options.run, incomplete=True), options.out, [], decoder)
    if options.no_text:
        print("without text: their speed.py cannot count the tokens of a baseline in these files")


def _decoder(model: JsonObject) -> Callable[[Sequence[int]], str]:
    from specbench.models.loading import load_tokenizer  # brings torch

    try:
        # What older runs wrote besides says nothing about the tokenizer.
        known = {f.name: model[f.name] for f in fields(ModelConfig) if f.name in model}
        tokenizer = load_tokenizer(ModelConfig(**known))
    except SpecBenchError as error:
        raise ConfigurationError(
            f"{error} Without its tokenizer the answers' text cannot be written; --no-text leaves "
            "it out, which is enough for the methods' files, not for the baseline's."
        ) from error

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()

    return decode


def import_answers(options: argparse.Namespace) -> None:
    if options.out.exists() and any(options.out.iterdir()):
        raise OutputRefused(f"{options.out} is not empty. Name a new folder.")
    files = [_named(text) for text in options.files]
    labels = list(dict.fromkeys(label for label, _ in files))
    if options.baseline is not None and options.baseline not in labels:
        raise ConfigurationError(
            f"--baseline {options.baseline} is not one of the labels {', '.join(labels)}."
        )
    baseline = options.baseline or (BASELINE if BASELINE in labels else None)
    digests = {str(path): file_sha256(path) for _, path in files}
    run_key = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16]
    records: list[CaseRecord] = []
    errors: list[dict[str, object]] = []
    theirs: dict[str, list[JsonObject]] = {}
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
    rows = summarize(records, labels, baseline, estimator="specbench")
    options.out.mkdir(parents=True, exist_ok=True)
    jsonl.rewrite_jsonl(options.out / CASES, (record.to_json() for record in records))
    jsonl.rewrite_jsonl(options.out / ERRORS, errors)
    jsonl.write_json(options.out / SUMMARY, {"rows": rows})
    manifest = _manifest(options, labels, baseline)
    manifest.run_key = run_key
    manifest.imported = {"from": "Spec-Bench", "sha256": digests, "unknown": UNKNOWN_FIELDS}
    manifest.config["repeats"] = 1 + max(record.repeat for record in records)
    manifest.exit_code = 1 if errors else 0
    manifest.finish(options.out, LEFT)
    for row in (row for row in rows if row["task"] == OVERALL):
        mean = mean_accept_length(theirs[row["label"]])
        print(
            f"{row['label']}: {row['n_cases']} questions, MAT {_number(row['mat'])} "
            f"(Spec-Bench's mean accepted tokens: {_number(mean)})"
        )
    if errors:
        print(f"{len(errors)} questions are marked as failed; reasons in {options.out / ERRORS}")
    print(f"{options.out}: python -m analysis.tables {options.out}")


def _named(text: str) -> tuple[str, Path]:
    """``LABEL=FILE``, or a file whose name is the label."""
    label, _, name = text.rpartition("=")
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(f"{name} is not a file. Type LABEL=FILE, e.g. pld=pld.jsonl.")
    return label or re.sub(r"\.jsonl$", "", path.name), path


def _lines(path: Path) -> list[JsonObject]:
    lines, cut = jsonl.read_jsonl(path)
    if cut or not lines:
        raise AnswerError(f"{path}: {'the last line is cut off' if cut else 'no answer in it'}.")
    asked = [str(line.get("question_id")) for line in lines]
    twice = sorted({name for name in asked if asked.count(name) > 1})
    if twice:
        raise AnswerError(f"{path}: questions occur more than once: {', '.join(twice[:5])}.")
    return lines


def _question(
    line: JsonObject, source: Source, number: int, path: Path, flag: bool
) -> tuple[list[CaseRecord], list[dict[str, object]]]:
    try:
        records = from_answer(line, source, number)
        if records[0].status != "failed":
            return records, []
        reason = 'the answer is "ERROR"'
    except AnswerError as error:
        if not flag:
            raise AnswerError(
                f"{path}, line {number + 1}: {error} Type --flag to keep such questions as failed "
                "cases."
            ) from error
        reason = str(error)
        records = from_answer({**line, "choices": [_FAILED_ANSWER]}, source, number)
    about = {"type": "AnswerError", "message": reason, "traceback": ""}
    return records, [{**records[0].turn_id, **about}]


def _manifest(
    options: argparse.Namespace, labels: Sequence[str], baseline: str | None
) -> RunManifest:
    gpus = [Gpu(name=name) for name in options.gpu]
    device = "cuda" if gpus else None
    return RunManifest(
        status="complete",
        config={
            "model": {"name": options.model, "dtype": options.dtype, "device": device},
            "dataset": {"name": options.dataset},
            "generation": {"temperature": options.temperature},
            "estimator": "specbench",
        },
        labels={
            label: LabelInfo(method=label, method_version=1, state_scope=UNKNOWN_SCOPE)
            for label in labels
        },
        baseline=baseline,
        hardware={"cpu": None, "gpus": gpus},
        model=ModelInfo(dtype=options.dtype, device=device),
    )


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    commands = parser.add_subparsers(metavar="export|import", required=True)
    command = add_command(commands, "export", _EXPORT)
    command.set_defaults(work=export_run)
    add = command.add_argument
    add("run", type=Path, help="folder of a run")
    add("out", type=Path, help="folder of the answer files")
    add("--no-text", action="store_true", help="needs no tokenizer; see above")
    command = add_command(commands, "import", _IMPORT)
    command.set_defaults(work=import_answers)
    add = command.add_argument
    add("out", type=Path, help="the run folder, new")
    add("files", nargs="+", metavar="LABEL=FILE", help="an answer file; its name is the default")
    add("--model", required=True, help="the model's name, as in conf/model")
    add("--dataset", default="specbench", help="default: specbench")
    add("--baseline", help="label that speedups refer to (default: ar, where there is one)")
    add("--dtype", help="number format, e.g. float16, where known")
    add("--gpu", action="append", default=[], help="name of the GPU, where known; once for each")
    add("--temperature", type=float, default=0.0)
    add("--flag", action="store_true", help="keep contradictory questions as failed cases")
    options = parser.parse_args(arguments)
    options.work(options)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
