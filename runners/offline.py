"""The runner of the main job: all labels over all cases, interleaved, resumable."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
from typing import TYPE_CHECKING, Any

from runners.job import EAGER_BASELINE
from runners.run_folder import folder
from runners.run_folder.manifest import add_start, begin, check_resume, check_subject, close
from runners.session import device_lock, interference_rule, warmup
from runners.session.method_runs import build_method_runs, keep_state
from runners.session.progress import RunProgress
from specbench.data import cases
from specbench.errors import ConfigurationError
from specbench.models import loading
from specbench.results import console, records
from specbench.results.manifest import BASELINE, RunManifest
from specbench.results.statistics import exit_code, run_summary
from specbench.storage import jsonl
from specbench.system import environment, nvml
from specbench.system.interference import SystemMonitor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from omegaconf import DictConfig

    from runners.job import CaseBlock, Job
    from runners.run_folder.folder import ResultFiles
    from runners.session.blocks import BlockRunner
    from runners.session.method_runs import MethodRun
    from runners.session.session import Session
    from specbench.results.manifest import ModelInfo
    from specbench.results.records import CaseRecord

    MakeStage = Callable[[Job, Sequence[MethodRun]], Session]
    Measure = Callable[
        [Job, Sequence[MethodRun], list[CaseBlock], ResultFiles, RunManifest, bool], None
    ]

log = logging.getLogger(__name__)

_CANDIDATES = 16  # ids kept at each position under record=true; Token Recycling takes 8

IN_PROCESS = False

show = console.print_folder


def adopt(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """The configuration as it is."""
    return cfg


def questions(cfg: DictConfig) -> tuple[cases.Case, ...]:
    """The data set's cases.

    Raises:
        WeightsNotFound: there is no model to ask.
        DatasetError: a file is missing or malformed.
    """
    loading.model_files_present(cfg)
    return tuple(cases.load_cases(cfg.dataset, cfg.data_dir))


def run(job: Job, make_stage: MakeStage | None = None) -> int:
    """Measure what is missing in the job's folder and close it.

    Args:
        job: what is run.
        make_stage: loads what the labels share; by default ``runners.session.session.Session``.

    Returns:
        0, or 1 where a case failed or an output is not what plain decoding gives.

    Raises:
        ConfigurationError: the job cannot be run as it is, or here; see its subclasses.
        DiskError: results cannot be written.
    """
    return complete(both_baselines(job), functools.partial(_measure, make_stage))


def both_baselines(job: Job) -> Job:
    """The job with an eager ``ar`` beside the one whose passes are CUDA graphs.

    A speedup over graphs alone cannot be held against those of papers, and one over eager passes
    alone is partly the launches'. A folder that was begun keeps the labels it has.
    """
    path = job.folder / records.MANIFEST
    if path.exists():
        wanted = EAGER_BASELINE in RunManifest.read(job.folder).labels
    else:
        wanted = (
            bool(job.config["engine"]["eager_baseline"])
            and job.config["engine"]["name"] in ("auto", "graph")
            and not job.config["measure"]["phases"]  # no headline numbers come of it
            and job.config["model"].get("device_map") is None  # spread, it has no graphs
            and device_lock.names(job) != ["cpu"]
        )
    has_one = any(
        entry.label == EAGER_BASELINE or (entry.name == BASELINE and entry.method.get("eager"))
        for entry in job.entries
    )
    return job.with_eager_baseline() if wanted and job.baseline and not has_one else job


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
        contenders = build_method_runs(job)
        manifest, forced = _open_manifest(job, contenders)
        files = folder.ResultFiles(job)
        add_start(manifest, len(files.done), files.redone)
        manifest.write(job.folder)
        try:
            pending = _pending(job, files.done)
            if pending or _disturbed(job, files):
                measure(job, contenders, pending, files, manifest, forced)
            return _finish(job, files, manifest)
        except BaseException as error:
            status = "failed" if isinstance(error, Exception) else "interrupted"
            close(manifest, status, None)
            # The reason why it could not be written is the error on its way up.
            with contextlib.suppress(jsonl.DiskError):
                manifest.write(job.folder)
            raise
        finally:
            files.close()
            for contender in contenders:
                contender.drafter.close()


def _open_manifest(job: Job, contenders: Sequence[MethodRun]) -> tuple[RunManifest, bool]:
    """The folder's manifest or a new one, and whether records must be marked as forced."""
    machine = environment.describe()
    path = job.folder / records.MANIFEST
    cases = job.folder / records.CASES
    if not path.exists() or not cases.exists() or cases.stat().st_size == 0:
        return begin(job, {c.label: c.describe() for c in contenders}, machine), False
    folder.check_owner(job.folder, job.run_key, job.identity)
    manifest = RunManifest.read(job.folder)
    if check_resume(manifest, machine, force=job.config["resume"] == "force"):
        manifest.forced_resume = True
    return manifest, manifest.forced_resume


def _pending(job: Job, done: list[CaseRecord]) -> list[CaseBlock]:
    present = {record.key for record in done}
    return [block for block in job.blocks() if not block.keys(job.labels) <= present]


def _disturbed(job: Job, files: ResultFiles) -> list[CaseBlock]:
    """Judge all turns together, and say which blocks are to be measured again."""
    limits = job.config["measure"]["disturbed"]
    files.mark(interference_rule.judge(files.done, files.traces(), limits))
    again = {place[:2] for place in files.superseded}
    return interference_rule.to_measure_again(job, files.done, len(again))


def _measure(
    make_stage: MakeStage | None,
    job: Job,
    contenders: Sequence[MethodRun],
    pending: list[CaseBlock],
    files: ResultFiles,
    manifest: RunManifest,
    forced: bool,
) -> None:
    # Heavy imports only where something is left to measure.
    from runners.run_folder.baseline_cache import BaselineCache
    from runners.session.blocks import BlockRunner
    from runners.session.session import Session

    measure = job.config["measure"]
    with device_lock.held(job) as gpus:
        if measure["energy"]:
            nvml.check_energy(gpus, device_lock.names(job))
        earlier = manifest.model
        for contender in contenders:
            if earlier is not None:
                contender.measured.update(earlier.measured.get(contender.label, {}))
        stage = (make_stage or Session)(job, contenders)
        model = stage.describe()
        check_subject(manifest, job, model)
        model.copy_bytes_per_s = stage.measure_copy_bandwidth()
        _keep_reasons(model, earlier)
        manifest.model = model
        manifest.write(job.folder)
        log.info("warming up %s", ", ".join(job.labels))
        lengths = [len(stage.render([(case.turns[0], None)])) for case in job.cases]
        warmup.warm_up(stage, contenders, lengths, rounds=int(measure["warmup"]))
        answers = BaselineCache(job.folder / records.DIALOGUE, stage.plain)
        watch = SystemMonitor(gpus, energy=bool(measure["energy"]))
        runner = BlockRunner(job, stage, contenders, answers, files.done, forced, watch)
        # What exists by now lives to the end: the collector need not walk it meanwhile.
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
                    finished = [r for r in files.done if r.repeat == block.repeat]
                    for contender in contenders:
                        keep_state(contender, finished)
                    progress.advance(f"{block.case.task} {block.case.case_id}")
            _measure_again(job, files, runner)
        finally:
            stage.note_passes(model)
            _keep_reasons(model, earlier)
            answers.close()
            if candidates is not None:
                candidates.close()


def _keep_reasons(model: ModelInfo, earlier: ModelInfo | None) -> None:
    """Add why passes ran eagerly in the run's earlier starts, whose records stand beside."""
    if earlier is None:
        return
    drafts = [(d, earlier.drafts.get(label)) for label, d in model.drafts.items()]
    for now, then in [(model.passes, earlier), *((d.passes, then) for d, then in drafts)]:
        if now is not None and "eager" in now and then is not None and then.passes is not None:
            now["eager"] = {**then.passes.get("eager", {}), **now["eager"]}


def _candidates_file(job: Job) -> jsonl.JsonlWriter | None:
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
    lines, truncated = jsonl.read_jsonl(path)
    if truncated:
        jsonl.rewrite_jsonl(path, lines)
    return jsonl.JsonlWriter(path)


def _candidates(stage: Session, job: Job, made: Sequence[CaseRecord]) -> list[dict[str, Any]]:
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


def _measure_again(job: Job, files: ResultFiles, runner: BlockRunner) -> None:
    """Replace disturbed blocks by new measurements, as often as the configuration allows."""
    while blocks := _disturbed(job, files):
        log.info("measuring %d disturbed cases again", len(blocks))
        for block in blocks:
            keys = block.keys(job.labels)
            attempt = 1 + max(r.attempt for r in files.done if r.key in keys)
            result = runner.run_again(block, attempt)
            files.replace(result.records, result.errors, result.steps)


def _finish(job: Job, files: ResultFiles, manifest: RunManifest) -> int:
    errors, _ = jsonl.read_jsonl(job.folder / records.ERRORS)
    code = exit_code(files.done, errors)
    summary = run_summary(files.done, errors, manifest)
    close(manifest, "complete", code)
    files.finish(summary, manifest)
    return code
