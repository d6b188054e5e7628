"""The runner of the main job: all labels over all cases, interleaved, resumable."""

from __future__ import annotations

import contextlib
import gc
import logging
from typing import TYPE_CHECKING, Any

from runners import folder, manifest, table, warmup
from runners.contenders import build_contenders
from runners.job import BASELINE
from runners.progress import RunProgress
from specbench import cases, durable, environment, models, records
from specbench.errors import ConfigurationError
from specbench.statistics import summarise

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omegaconf import DictConfig

    from runners.contenders import Contender
    from runners.folder import ResultFiles
    from runners.job import Block, Job
    from runners.stage import Stage
    from specbench.records import CaseRecord

    Measure = Callable[
        [Job, Sequence[Contender], list[Block], ResultFiles, dict[str, Any], bool], None
    ]

log = logging.getLogger(__name__)

_NEAR_TIES_SHOWN_FROM = 0.02  # of the audited turns, in float32
_CANDIDATES = 16  # ids kept at each position under record=true; Token Recycling takes 8
_STEAL_SHOWN_FROM = 0.05  # of the CPU time while turns ran


IN_PROCESS = False

show = table.print_folder


def adopt(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration as it is."""
    return cfg


def questions(cfg: DictConfig) -> tuple[cases.Case, ...]:
    """The data set's cases.

    Raises:
        WeightsNotFound: there is no model to ask.
        DatasetError: a file is missing or malformed.
    """
    models.model_files_present(cfg)
    return tuple(cases.load_cases(cfg.dataset, cfg.data_dir))


def run(job: Job) -> int:
    """Measure what is missing in the job's folder and close it.

    Returns:
        0, or 1 where a case failed or an output is not what plain decoding gives.

    Raises:
        ConfigurationError: the job cannot be run as it is, or here; see its subclasses.
        DiskError: results cannot be written.
    """
    return complete(job, _measure)


def complete(job: Job, measure: Measure) -> int:
    """The frame of every run that leaves records: lock, manifest, resume, summary.

    Args:
        job: what is run.
        measure: makes the missing records and appends them to the files.

    Returns:
        0, or 1 where a case failed or an output is not what plain decoding gives.

    Raises:
        ConfigurationError: the job cannot be run as it is, or here; see its subclasses.
        DiskError: results cannot be written.
    """
    with folder.held(job.folder):
        contenders = build_contenders(job)
        surroundings = environment.describe()
        book, forced = _open_manifest(job, contenders, surroundings)
        files = folder.ResultFiles(job)
        manifest.add_start(book, len(files.done), files.redone)
        durable.write_json(job.folder / records.MANIFEST, book)
        try:
            pending = _pending(job, files.done)
            if pending:
                measure(job, contenders, pending, files, book, forced)
            return _finish(job, files, book)
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            manifest.close(book, status, None)
            # The reason why it could not be written is the error on its way up.
            with contextlib.suppress(durable.DiskError):
                durable.write_json(job.folder / records.MANIFEST, book)
            raise
        finally:
            files.close()
            for contender in contenders:
                contender.drafter.close()


def _open_manifest(
    job: Job, contenders: Sequence[Contender], surroundings: dict[str, Any]
) -> tuple[dict[str, Any], bool]:
    """The folder's manifest or a new one, and whether records must be marked as forced."""
    path = job.folder / records.MANIFEST
    cases = job.folder / records.CASES
    if not path.exists() or not cases.exists() or cases.stat().st_size == 0:
        return manifest.begin(job, contenders, surroundings), False
    folder.check_owner(job.folder, job.run_key, job.identity)
    book = durable.read_json(path)
    if manifest.check_resume(book, surroundings, force=job.config["resume"] == "force"):
        book["forced_resume"] = True
    return book, bool(book["forced_resume"])


def _pending(job: Job, done: list[CaseRecord]) -> list[Block]:
    present = {record.key for record in done}
    return [block for block in job.blocks() if not block.keys(job.labels) <= present]


def _measure(
    job: Job,
    contenders: Sequence[Contender],
    pending: list[Block],
    files: ResultFiles,
    book: dict[str, Any],
    forced: bool,
) -> None:
    # Heavy imports only where something is left to measure.
    from runners.answers import PlainAnswers
    from runners.blocks import BlockRunner
    from runners.stage import Stage

    stage = Stage(job, contenders)
    model = stage.describe()
    manifest.check_subject(book, job, model)
    book["model"] = model
    durable.write_json(job.folder / records.MANIFEST, book)
    log.info("warming up %s", ", ".join(job.labels))
    lengths = [len(stage.render([(case.turns[0], None)])) for case in job.cases]
    warmup.warm_up(stage, contenders, lengths, rounds=int(job.config["measure"]["warmup"]))
    answers = PlainAnswers(job.folder / records.DIALOGUE, stage.plain)
    runner = BlockRunner(job, stage, contenders, answers, files.done, forced)
    # What exists by now lives to the end: the collector need not walk it during a measurement.
    gc.collect()
    gc.freeze()
    candidates = _candidates_file(job)
    total = len(job.blocks())
    try:
        with RunProgress(total, done=total - len(pending)) as progress:
            for block in pending:
                result = runner.run(block)
                if candidates is not None:
                    candidates.append(_candidates(stage, job, result.records))
                files.append(result.records, result.errors, result.steps)
                progress.advance(f"{block.case.task} {block.case.case_id}")
    finally:
        answers.close()
        if candidates is not None:
            candidates.close()


def _candidates_file(job: Job) -> durable.JsonlWriter | None:
    """Where the likeliest ids go, under record=true.

    Raises:
        ConfigurationError: there is no plain greedy output to take them at.
    """
    if not job.config.get("record"):
        return None
    if job.baseline is None or not job.greedy:
        raise ConfigurationError(
            f"record=true keeps the likeliest ids at each position of {BASELINE}'s greedy output: "
            "type baseline=true and generation.temperature=0, or drop record."
        )
    path = job.folder / records.CANDIDATES
    lines, truncated = durable.read_jsonl(path)
    if truncated:
        durable.rewrite_jsonl(path, lines)
    return durable.JsonlWriter(path)


def _candidates(stage: Stage, job: Job, made: Sequence[CaseRecord]) -> list[dict[str, Any]]:
    """A line for each finished turn of the baseline; a block that is redone writes it again."""
    return [
        {
            "label": record.label,
            "case_id": record.case_id,
            "turn": record.turn,
            "repeat": record.repeat,
            "top": stage.likeliest(record, _CANDIDATES),
        }
        for record in made
        if record.label == job.baseline and record.status != "failed" and record.repeat == 0
    ]


def _finish(job: Job, files: ResultFiles, book: dict[str, Any]) -> int:
    errors, _ = durable.read_jsonl(job.folder / records.ERRORS)
    bugs = sum(record.lossless.verdict == "bug" for record in files.done)
    exit_code = 1 if errors or bugs else 0
    rows = summarise(
        files.done,
        list(job.labels),
        baseline=job.baseline,
        seed=int(job.config["seed"]),
        estimator=job.config["estimator"],
    )
    summary = {
        "schema_version": records.SCHEMA_VERSION,
        "run_key": job.run_key,
        "rows": rows,
        "caption": _caption(job, files.done),
        "notes": [*book.get("notes", []), *_notes(job, files.done, errors, bugs, book)],
    }
    manifest.close(book, "complete", exit_code)
    files.finish(summary, book)
    return exit_code


def _caption(job: Job, done: list[CaseRecord]) -> str:
    scopes = {record.label: record.state_scope for record in done}
    model, dataset = job.config["model"]["name"], job.config["dataset"]["name"]
    kept = ", ".join(f"{label}: {scope}" for label, scope in scopes.items())
    predicted = any(record.timing == "predicted" for record in done)
    times = "PREDICTED times, not measured ones. " if predicted else ""
    return f"{times}{model} on {dataset}, repeats={job.repeats}. State kept per {kept}."


def _notes(
    job: Job,
    done: list[CaseRecord],
    errors: list[dict[str, Any]],
    bugs: int,
    book: dict[str, Any],
) -> list[str]:
    notes = []
    failed = {(r.case_id, r.label) for r in done if r.status == "failed"}
    if failed:
        dropped = len({case for case, _ in failed})
        by_label = {label: sum(1 for _, x in failed if x == label) for label in job.labels}
        counts = ", ".join(f"{label} {n}" for label, n in by_label.items() if n)
        notes.append(
            f"{dropped} of {len({r.case_id for r in done})} cases are dropped for all labels "
            f"because one failed ({counts}); reasons in {records.ERRORS}."
        )
    unaudited = sum(error["during"] == "audit" for error in errors)
    if unaudited:
        notes.append(f"the audit itself failed for {unaudited} turns; reasons in {records.ERRORS}.")
    if bugs:
        notes.append(
            f"{bugs} outputs are not what plain decoding gives (verdict bug): find them in "
            f"{records.CASES}. The numbers of their labels are not to be trusted."
        )
    audited = [r for r in done if r.lossless.verdict != "not_audited" and r.label != job.baseline]
    ties = sum(record.lossless.verdict == "near_tie" for record in audited)
    dtype = (book.get("model") or {}).get("dtype", "")
    if "float32" in dtype and ties > _NEAR_TIES_SHOWN_FROM * len(audited):
        notes.append(
            f"{ties} of {len(audited)} audited turns are near ties, more than "
            f"{_NEAR_TIES_SHOWN_FROM:.0%} in float32: look at their gaps in {records.CASES}."
        )
    disturbed = {record.case_id for record in done if record.status == "disturbed"}
    if disturbed:
        notes.append(f"{len(disturbed)} cases hold a disturbed turn, which counts in no time.")
    steal = [record.cpu_steal for record in done if record.cpu_steal is not None]
    if steal and sum(steal) > _STEAL_SHOWN_FROM * len(steal):
        notes.append(
            f"the hypervisor gave {sum(steal) / len(steal):.0%} of this machine's CPU time to "
            "others while turns were measured: times are disturbed (cpu_steal in the records)."
        )
    if any(record.forced_resume for record in done):
        notes.append("resumed with resume=force: not all records come from the same conditions.")
    return notes
