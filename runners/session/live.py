"""A run on a loaded model: all labels over all cases, interleaved, resumable."""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from runners.job import EAGER_BASELINE, Job
from runners.run_folder.baseline_cache import BaselineCache
from runners.run_folder.manifest import check_subject
from runners.session import device_lock, warmup
from runners.session.method_runs import MethodRun, keep_state
from runners.session.open_run import OpenRun, complete
from runners.session.progress import RunProgress
from specbench.decoding.drafter import Drafter
from specbench.results import records
from specbench.results.manifest import BASELINE, ModelInfo, RunManifest
from specbench.system import cuda_settings, nvml
from specbench.system.interference import SystemMonitor

if TYPE_CHECKING:  # they load torch, which a finished run does not need
    from runners.session.blocks import BlockRunner
    from runners.session.session import Session

    Load = Callable[[Job, Sequence[MethodRun]], Session]

log = logging.getLogger(__name__)


def run_live(job: Job, load: Load, given: Mapping[str, Drafter] | None = None) -> int:
    """Measure what is missing in the job's folder and close it, as `runners.runner.Runner.run`.

    ``load`` loads what the labels share; it is called only where something is missing. ``given`` as
    in `build_method_runs`.
    """
    cuda_settings.fix()  # before the manifest says what is in force
    return complete(both_baselines(job), functools.partial(_measure, load), given)


def both_baselines(job: Job) -> Job:
    """The job with an eager ``ar`` beside the one whose passes are CUDA graphs.

    A speedup over graphs alone cannot be held against those of papers, and one over eager passes
    alone is partly the launches'. A folder that was begun keeps the labels it has.
    """
    config = job.config
    if (job.folder / records.MANIFEST).exists():
        wanted = EAGER_BASELINE in RunManifest.read(job.folder).labels
    else:
        wanted = (
            config.engine.eager_baseline
            and config.engine.name in ("auto", "graph")
            and not config.measure.phases  # no headline numbers come of it
            and config.model.device_map is None  # spread, it has no graphs
            and device_lock.names(job) != ["cpu"]
        )
    has_one = any(
        entry.label == EAGER_BASELINE or (entry.name == BASELINE and entry.method.get("eager"))
        for entry in job.entries
    )
    return job.with_eager_baseline() if wanted and job.baseline and not has_one else job


def _measure(load: Load, run: OpenRun) -> None:
    # Heavy imports only where something is left to measure.
    from runners.session.blocks import BlockRunner
    from runners.session.head_check import check_heads
    from runners.session.recorder import Recorder

    job, runs, files, manifest = run.job, run.runs, run.files, run.manifest
    measure, earlier = job.config.measure, manifest.model
    drafts = [r.entry.draft for r in runs if r.drafter.needs.draft_model]
    drafts += [job.config.pair.draft for r in runs if getattr(r.drafter, "loop", "") == "assisted"]
    with device_lock.hold_device(job, drafts) as gpus:
        if measure.energy:
            nvml.check_energy(gpus, device_lock.names(job, drafts))
        for method_run in runs:
            if earlier is not None:
                method_run.measured.update(earlier.measured.get(method_run.label, {}))
        session = load(job, runs)
        model = session.describe()
        check_subject(manifest, model)
        model.copy_bytes_per_s = session.measure_copy_bandwidth()
        reading = session.fastest_read(earlier.read_bytes_per_s if earlier else None)
        reading.measure()
        model.read_bytes_per_s = reading.bytes_per_s
        _keep_reasons(model, earlier)
        manifest.model = model
        run.save_manifest()
        log.info("warming up %s", ", ".join(job.labels))
        prompts = [session.render([(case.turns[0], None)]) for case in job.cases]
        warmup.warm_up(session, runs, [*map(len, prompts)], rounds=measure.warmup)
        if job.greedy and job.baseline:
            found = session.calibrate_audit(prompts, earlier.audit if earlier else None)
            model.audit = found.to_json()
            run.save_manifest()
        check_heads(session, runs, session.render([(job.cases[0].turns[0], None)]))
        answers = BaselineCache(job.folder / records.DIALOGUE, session.plain)
        monitor = SystemMonitor(gpus, energy=measure.energy)
        by_label = {method_run.label: method_run for method_run in runs}
        runner = BlockRunner(
            job, session, by_label, answers, files.done, manifest.forced_resume, monitor
        )
        # What exists by now lives to the end: the collector need not walk it meanwhile.
        gc.collect()
        gc.freeze()
        asked = [i for method_run in runs for i in method_run.drafter.needs.hidden_layers]
        recorder = Recorder(job, session, asked) if job.config.record else None
        pending, total = run.files.pending, len(job.blocks())
        try:
            with RunProgress(total, done=total - len(pending)) as progress:
                for block in pending:
                    result = runner.run(block)
                    if recorder is not None:
                        recorder.keep(result.records)
                    files.append(result.records, result.errors, result.steps)
                    finished = [r for r in files.done if r.repeat == block.repeat]
                    for method_run in runs:
                        keep_state(method_run, finished)
                    reading.measure_between()
                    progress.advance(f"{block.case.task} {block.case.case_id}")
            _measure_again(run, runner)
            reading.measure()
        finally:
            gc.unfreeze()  # the process may live on: a notebook's
            if recorder is not None:
                recorder.close()
            model.read_bytes_per_s = reading.bytes_per_s
            session.note_passes(model)
            _keep_reasons(model, earlier)


def _keep_reasons(model: ModelInfo, earlier: ModelInfo | None) -> None:
    """Add why passes ran eagerly in the run's earlier starts, whose records stand beside."""
    if earlier is None:
        return
    drafts = [(d.passes, earlier.drafts.get(label)) for label, d in model.drafts.items()]
    for now, then in [(model.passes, earlier), *drafts]:
        if now is not None and "eager" in now and then is not None and then.passes is not None:
            now["eager"] = {**then.passes.get("eager", {}), **now["eager"]}


def _measure_again(run: OpenRun, runner: BlockRunner) -> None:
    while blocks := run.noisy():
        log.info("measuring again what was disturbed (cases: %d)", len(blocks))
        for block in blocks:
            keys = block.keys(run.job.labels)
            attempt = 1 + max(r.attempt for r in run.files.done if r.key in keys)
            result = runner.run_again(block, attempt)
            run.files.replace(result.records, result.errors, result.steps)
