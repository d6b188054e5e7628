"""The frame of every run that leaves records: lock, manifest, resume, summary."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from runners.job import CaseBlock, Job
from runners.run_folder import folder
from runners.run_folder.manifest import (
    add_start,
    begin,
    check_plan,
    check_questions,
    check_resume,
    close,
)
from runners.session import interference_rule
from runners.session.method_runs import MethodRun, build_method_runs
from specbench.decoding.drafter import Drafter
from specbench.results import records
from specbench.results.manifest import RunManifest
from specbench.results.statistics.run_summary import exit_code, run_summary
from specbench.storage import jsonl
from specbench.system import environment


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run folder that this process holds: its files, its manifest, its methods in their order."""

    job: Job
    runs: Sequence[MethodRun]
    files: folder.ResultFiles
    manifest: RunManifest

    def noisy(self) -> list[CaseBlock]:
        """Judge all turns together; the blocks that are to be measured again."""
        done, limits = self.files.done, self.job.config.measure.disturbed
        traces, baseline = self.files.traces(), self.job.baseline
        self.files.mark(interference_rule.judge(done, traces, limits, baseline))
        again = {place[:2] for place in self.files.superseded}
        return interference_rule.to_measure_again(self.job, done, len(again))

    def save_manifest(self) -> None:
        self.manifest.write(self.job.folder)


def complete(
    job: Job, measure: Callable[[OpenRun], None], given: Mapping[str, Drafter] | None = None
) -> int:
    """Hold the job's folder, have what is missing measured, and close it: `Runner.run`.

    ``measure`` makes the missing records and appends them to the files; ``given`` as in
    `build_method_runs`.
    """
    with folder.hold_folder(job.folder):
        runs = build_method_runs(job, given)
        manifest = _open_manifest(job, runs)
        # Before any other file: a folder with records and no manifest is nobody's.
        manifest.write(job.folder)
        files = folder.ResultFiles(job)
        run = OpenRun(job, runs, files, manifest)
        add_start(manifest, len(files.done), files.redone)
        run.save_manifest()
        try:
            if files.pending or run.noisy():
                measure(run)
            return _finish(run)
        except BaseException as error:
            close(manifest, "failed" if isinstance(error, Exception) else "interrupted", None)
            # The reason why it could not be written is the error on its way up.
            with contextlib.suppress(jsonl.DiskError):
                run.save_manifest()
            raise
        finally:
            for method_run in runs:
                method_run.drafter.close()


def _open_manifest(job: Job, runs: Sequence[MethodRun]) -> RunManifest:
    machine = environment.describe()
    path, cases = job.folder / records.MANIFEST, job.folder / records.CASES
    if not path.exists() or not cases.exists() or cases.stat().st_size == 0:
        return begin(job, {run.label: run.describe() for run in runs}, machine)
    folder.check_owner(job.folder, job.run_key, job.identity)
    manifest = RunManifest.read(job.folder)
    check_plan(manifest, job)
    check_questions(manifest, job.config, job.cases, job.folder)
    if check_resume(manifest, machine, force=job.config.resume == "force"):
        manifest.forced_resume = True
    return manifest


def _finish(run: OpenRun) -> int:
    errors, _ = jsonl.read_jsonl(run.job.folder / records.ERRORS)
    superseded, _ = records.read_records(run.job.folder / records.DISTURBED)
    code = exit_code(run.files.done, errors)
    summary = run_summary(run.files.done, errors, run.manifest, superseded)
    close(run.manifest, "complete", code)
    run.files.finish(summary, run.manifest)
    return code
