"""Exchange runs with Spec-Bench: write a run as its answer files, or read its files as a run.

python scripts/spec_bench.py export RUN OUT
python scripts/spec_bench.py import OUT ar=vanilla.jsonl pld=pld.jsonl --model vicuna7b
python scripts/spec_bench.py import --help      # what each of the two keeps and loses
"""

# Their format (hemingkx/Spec-Bench, evaluation/eval.py and speed.py; no code taken): a line per
# question, whose only choice has an entry per turn in turns, decoding_steps, new_tokens and
# wall_time, and one per step in accept_lengths, all turns after each other. Their wall time holds
# the prompt's pass, and their accepted length is ours. Some of their methods count the prompt's
# pass and its token as a step, so that the lengths add up to new_tokens and not to one less.

import argparse
import datetime
import hashlib
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this checkout, not an installed one

from analysis.runs.cli import add_command, parser_of, reporting_errors
from analysis.runs.load import Run, usable_runs
from specbench.config.schema import ModelConfig
from specbench.errors import (
    ConfigurationError,
    OutputRefused,
    ResultsError,
    SpecBenchError,
    field_error,
)
from specbench.paths import file_name
from specbench.results.jsonl_schema import Committed, Count, Line, Seconds
from specbench.results.manifest import BASELINE, LabelInfo, ModelInfo, RunManifest
from specbench.results.records import (
    CASES,
    ERRORS,
    LEFT,
    SUMMARY,
    BlockKey,
    CaseRecord,
    group_by,
)
from specbench.results.statistics.summary import (
    is_complete,
    summarize,
    untimed_blocks,
)
from specbench.results.tasks import task_of
from specbench.storage import jsonl
from specbench.storage.hashes import file_sha256
from specbench.storage.jsonl import JsonObject
from specbench.system.hardware import Gpu

_EXPORT = """Write a run as Spec-Bench's answer files, so that its own speed.py can be run on them.

Its evaluation/speed.py takes two of them as --file-path and --base-path, once default=True of its
--mean-report near the end is default=False: as it stands, the files that are named are not read.

One file per label; with repeats, one folder run_1, run_2, ... each. Its MAT is ours. What it prints
of speeds is python -m analysis.tables RUN --estimator specbench_exact. With --estimator specbench
the baseline's tokens are counted like a method's: speed.py tokenizes that one's text again.
"""

_IMPORT = """Read Spec-Bench's answer files as a run folder, so that analysis can show them.

A label given again is its next repeat. What their files do not say (token ids, prefill apart from
decoding, what was drafted, verdicts) stays unknown: the manifest lists it, and every table's
caption says so. So there is no speedup over decoding time, only their estimator's. A question whose
counts contradict each other is refused. One with the answer "ERROR" becomes a failed case, which
drops out for all labels: it repeats the numbers of the turn before.
"""

_UNKNOWN_TOKEN = -1  # stands for each new token of a file that has none
# Fields of a record that their files say nothing about; 0, empty or the marks above stand there.
_UNKNOWN_FIELDS = (
    "prompt_ids", "n_prompt", "output_ids", "finish_reason", "n_drafted", "n_aux", "prefill_s",
    "decode_s", "drafter_setup_s", "state_scope", "seed", "lossless",
)  # fmt: skip
_PER_TURN = ("turns", "decoding_steps", "new_tokens", "wall_time")  # a choice has one of each
_ERROR = "ERROR"  # what their eval.py writes where decoding failed; numbers are the turn before's


class AnswerError(ConfigurationError):
    """An answer line contradicts itself or lacks a field."""


class _Question(Line):
    question_id: int | str
    category: str
    tstamp: float = 0.0


class _Choice(Line):
    turns: list[str]
    decoding_steps: list[int]
    new_tokens: list[Count]
    wall_time: list[Annotated[Seconds, Field(gt=0)]]
    accept_lengths: Committed


class _Answer(_Question):
    choices: Annotated[list[_Choice], Field(min_length=1)]


def export_run(options: argparse.Namespace) -> None:
    """Write each label of a run as a file; its questions are those that all labels finished."""
    runs, _ = usable_runs([options.run], include_incomplete=True)
    if len(runs) != 1:
        raise ResultsError(f"{options.run} holds {len(runs)} runs; name the folder of one.")
    (run,) = runs
    records = [record for record in run.records if record.label in run.labels]
    if why := _no_answers(run, records):
        raise ResultsError(f"{run.path} {why}.")
    decode = (lambda _: "") if options.no_text else _decoder(run.manifest.config["model"])
    blocks = group_by(records, lambda turn: turn.block)
    untimed = untimed_blocks(records)
    # Their format has no word for a turn that went wrong.
    whole = [key for key, turns in blocks.items() if is_complete(turns, run.labels)]
    timed = [key for key in whole if key not in untimed]
    repeats = sorted({record.repeat for record in records})
    setting = f"{run.dtype.replace(' ', '-')}-temp-{run.temperature}"
    setting += "-predicted" if run.timing == "predicted" else ""
    written: set[Path] = set()
    for label, repeat in itertools.product(run.labels, repeats):
        folder = options.out / f"run_{repeat + 1}" if len(repeats) > 1 else options.out
        folder.mkdir(parents=True, exist_ok=True)
        model_id = f"{run.model}-{label}-{setting}"
        path = folder / f"{file_name(model_id)}.jsonl"
        if path in written:  # labels that differ in letters that no file's name takes
            path = folder / f"{file_name(f'{len(written)}-{model_id}')}.jsonl"
        written.add(path)
        label_records = [record for record in records if record.label == label]
        label_blocks = [block for block in timed if block[0] == repeat]
        jsonl.rewrite_jsonl(path, to_answers(label_records, label_blocks, model_id, decode))
        print(f"{path}: {len(label_blocks)} questions")
    failed, disturbed = len(blocks) - len(whole), len(whole) - len(timed)
    if failed or disturbed:
        print(f"left out for all labels: questions of which {failed} failed, {disturbed} disturbed")


def _no_answers(run: Run, records: Sequence[CaseRecord]) -> str:
    """Say why a run has no answers to export; empty if it has."""
    if run.manifest.imported is not None:
        return "was made of answer files: it holds no tokens"
    if run.timing == "none":
        return "is a replay without times. Give it runner.surface=FILE, or export the live run"
    if any(record.batch for record in records):
        return "decoded several cases at once. Export a run with batch.size=1"
    if any(r.served and r.n_new > 1 and not r.committed_per_step for r in records):
        return "was answered by a server that does not report steps. Export a run of our engine"
    return ""


def _decoder(model: JsonObject) -> Callable[[Sequence[int]], str]:
    from specbench.models.loading import load_tokenizer  # brings torch

    try:
        tokenizer = load_tokenizer(ModelConfig(**model))
    except SpecBenchError as error:
        raise ConfigurationError(
            f"{error} --no-text leaves the answers' text out, which their speed.py needs of the "
            "baseline alone."
        ) from error
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip()


def to_answers(
    records: Iterable[CaseRecord],
    blocks: Iterable[BlockKey],
    model_id: str,
    decode: Callable[[Sequence[int]], str],
) -> list[JsonObject]:
    """Make the lines of one label's file, a question for each of ``blocks``."""
    turns_of, lines = group_by(records, lambda turn: turn.block), []
    for key in blocks:
        turns = sorted(turns_of[key], key=lambda record: record.turn)
        first = turns[0]
        name = f"{first.run_key}/{first.label}/{first.repeat}/{first.case_id}"
        choice = {
            "index": 0,
            "turns": [decode(turn.output_ids) for turn in turns],
            "decoding_steps": [turn.n_target_passes for turn in turns],
            "new_tokens": [turn.n_new for turn in turns],
            "wall_time": [turn.wall_s for turn in turns],
            "accept_lengths": [n for turn in turns for n in turn.committed_per_step],
        }
        at = first.started_at
        line = {
            "question_id": _question_id(first.case_id),
            "category": first.category,
            "answer_id": hashlib.sha256(name.encode()).hexdigest()[:22],
            "model_id": model_id,
            "choices": [choice],
            "tstamp": datetime.datetime.fromisoformat(at).timestamp() if at else 0.0,
        }
        lines.append(line)
    return lines


def _question_id(case_id: str) -> int | str:
    """Give the id as a number if it prints the same and every JSON reader has it exactly."""
    exact = case_id.isdecimal() and len(case_id) <= 15 and str(int(case_id)) == case_id
    return int(case_id) if exact else case_id


def import_answers(options: argparse.Namespace) -> None:
    """Make a run folder of answer files."""
    if options.out.exists() and any(options.out.iterdir()):
        raise OutputRefused(f"{options.out} is not empty. Name a new folder.")
    files = [_parse_file(text) for text in options.files]
    labels = list(dict.fromkeys(label for label, _ in files))
    if options.baseline not in (None, *labels):
        raise ConfigurationError(
            f"--baseline must be {' or '.join(labels)}, got {options.baseline}."
        )
    baseline = options.baseline or (BASELINE if BASELINE in labels else None)
    digests = {str(path): file_sha256(path) for _, path in files}
    run_key = hashlib.sha256("".join(digests.values()).encode()).hexdigest()[:16]
    records: list[CaseRecord] = []
    errors: list[dict[str, object]] = []
    for index, (label, path) in enumerate(files):
        repeat = sum(earlier == label for earlier, _ in files[:index])
        source = {
            "label": label, "method": label, "model": options.model, "dataset": options.dataset,
            "run_key": run_key, "repeat": repeat, "position": labels.index(label),
        }  # fmt: skip
        for number, line in enumerate(_lines(path)):
            try:
                turns = from_answer(line, source, number)
            except AnswerError as error:
                raise AnswerError(f"{path}, line {number + 1}: {error}") from error
            records += turns
            if turns[0].status == "failed":
                why = {"type": "AnswerError", "message": f'the answer is "{_ERROR}"'}
                errors.append({**turns[0].turn_id, **why, "traceback": ""})
    rows = summarize(records, labels, baseline, estimator="specbench")
    options.out.mkdir(parents=True, exist_ok=True)
    jsonl.rewrite_jsonl(options.out / CASES, (record.to_json() for record in records))
    jsonl.rewrite_jsonl(options.out / ERRORS, errors)
    jsonl.write_json(options.out / SUMMARY, {"rows": rows})
    gpus = [Gpu(name=name) for name in options.gpu]
    device = "cuda" if gpus else None
    RunManifest(
        run_key=run_key,
        status="complete",
        exit_code=1 if errors else 0,
        config={
            "model": {"name": options.model, "dtype": options.dtype, "device": device},
            "dataset": {"name": options.dataset},
            "generation": {"temperature": options.temperature},
            "estimator": "specbench",
            "repeats": 1 + max(record.repeat for record in records),
        },
        labels={
            label: LabelInfo(method=label, method_version=1, state_scope="unknown")
            for label in labels
        },
        baseline=baseline,
        hardware={"cpu": None, "gpus": gpus},
        model=ModelInfo(dtype=options.dtype, device=device),
        imported={"from": "Spec-Bench", "sha256": digests, "unknown": _UNKNOWN_FIELDS},
    ).finish(options.out, LEFT)
    if errors:
        print(f"{len(errors)} questions are marked as failed; reasons in {options.out / ERRORS}")
    print(f"{options.out}: python -m analysis.tables {options.out}")


def _parse_file(text: str) -> tuple[str, Path]:
    """Parse ``LABEL=FILE``, or a file whose name is the label."""
    label, _, name = text.partition("=") if not Path(text).is_file() else ("", "", text)
    path = Path(name)
    if not path.is_file():
        raise ConfigurationError(f"{name} is not a file. Type LABEL=FILE, e.g. pld=pld.jsonl.")
    return label or path.name.removesuffix(".jsonl"), path


def _lines(path: Path) -> list[JsonObject]:
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            lines.append(jsonl.parse_json(text))
            _Question.from_json(lines[-1])
        except ValueError as error:
            raise AnswerError(f"{path}, line {number}: {field_error(error)}.") from error
    if not lines:
        raise AnswerError(f"{path}: no answer in it.")
    counts = Counter(str(line["question_id"]) for line in lines)
    if twice := sorted(name for name, count in counts.items() if count > 1):
        raise AnswerError(f"{path}: questions occur more than once: {', '.join(twice[:5])}.")
    return lines


def from_answer(line: JsonObject, source: JsonObject, stream_index: int) -> list[CaseRecord]:
    """Make the records of one question, a turn each; ``failed`` if their run noted an error.

    Args:
        source: fields of every record that answer files do not say.

    Raises:
        AnswerError: a field is missing or counts contradict each other.
    """
    where = f"question {line.get('question_id')}"
    try:
        answer = _Answer.from_json(line)
    except ValueError as error:
        raise AnswerError(f"{where}: {field_error(error)}.") from error
    choice = answer.choices[0]
    lengths = {name: len(getattr(choice, name)) for name in _PER_TURN}
    if len({*lengths.values()}) > 1 or not choice.turns:
        counts = ", ".join(f"{n} {name}" for name, n in lengths.items())
        raise AnswerError(f"{where}: {counts}; each turn needs one of each.")
    moment = datetime.datetime.fromtimestamp(answer.tstamp, datetime.UTC)
    blank = CaseRecord(
        **source, task=task_of(answer.category), category=answer.category,
        case_id=str(answer.question_id), turn=0, stream_index=stream_index,
        state_scope="unknown", seed=0,
        started_at=moment.isoformat(timespec="milliseconds") if answer.tstamp else "",
    )  # fmt: skip
    records = [blank.replace(turn=turn) for turn in range(len(choice.turns))]
    if _ERROR in choice.turns:  # the lengths belong to no turn for sure
        return records
    steps = _split(choice.accept_lengths, choice.decoding_steps, where)
    for turn, (n_new, wall_s) in enumerate(zip(choice.new_tokens, choice.wall_time, strict=True)):
        committed = _after_the_first(steps[turn], n_new, f"{where}, turn {turn}")
        ids = [_UNKNOWN_TOKEN] * n_new
        records[turn] = records[turn].finished(ids, committed, wall_s=wall_s)
    return records


def _split(lengths: list[int], steps: list[int], where: str) -> list[list[int]]:
    """Split their flat list by turn.

    ``decoding_steps`` is the number of steps, or the index of the last one: then every turn has
    one more.
    """
    extra, rest = divmod(len(lengths) - sum(steps), len(steps))
    if rest or extra not in (0, 1):
        raise AnswerError(
            f"{where}: decoding_steps {steps} do not belong to {len(lengths)} accept_lengths."
        )
    ends = list(itertools.accumulate(count + extra for count in steps))
    return [lengths[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _after_the_first(lengths: list[int], n_new: int, where: str) -> list[int]:
    """Remove the first new token, which the prompt's pass yields, from the steps' tokens."""
    total = sum(lengths)
    if total not in (n_new - 1, n_new):
        raise AnswerError(
            f"{where}: accept_lengths add up to {total} and new_tokens is {n_new}; they must be "
            "equal, or differ by the prompt's one token."
        )
    if total < n_new or not lengths:
        return lengths
    first, *others = lengths
    return [first - 1, *others] if first > 1 else others


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__, "scripts.spec_bench")
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
    options = parser.parse_args(arguments)
    options.work(options)
    return 0


if __name__ == "__main__":
    sys.exit(reporting_errors(main))
