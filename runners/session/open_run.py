"""The frame of every run that leaves records: lock, manifest, resume, progress, summary."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

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
from runners.run_folder.repeat import leave_repeat
from runners.run_folder.resumable_files import ResultFiles
from runners.session import interference_rule
from runners.session.blocks import Answers, BlockResult, BlockRunner
from runners.session.method_runs import MethodRun, build_method_runs
from specbench.decoding.drafter import Drafter
from specbench.errors import MethodCannotRun, WarmUpFailed
from specbench.results import records
from specbench.results.manifest import RunManifest
from specbench.results.run_summary import exit_code, run_summary
from specbench.storage import jsonl
from specbench.system import environment

log = logging.getLogger(__name__)

_LINES = 20  # at most about this many lines for a whole run that is not on a terminal
_QUIET_S = 60.0  # but never silent for much longer than this


@dataclass(frozen=True, slots=True)
class OpenRun:
    """A run folder that this process holds: its files, its manifest, its methods in their order."""

    job: Job
    runs: Sequence[MethodRun]
    files: ResultFiles
    manifest: RunManifest

    def runner(self, source: Answers) -> BlockRunner:
        """What measures the run's blocks."""
        runs = {run.label: run for run in self.runs}
        done, forced = self.files.done, self.manifest.forced_resume
        return BlockRunner(self.job, runs, source, done, forced, begun=bool(done))

    def measure(
        self,
        runner: BlockRunner,
        at_once: int = 1,
        before_write: Callable[[BlockResult], None] = lambda _: None,
        after_block: Callable[[CaseBlock], None] = lambda _: None,
    ) -> None:
        """Measure the missing blocks, then again those that were disturbed.

        Args:
            at_once: blocks of a batch.
            before_write: sees what is written; ``after_block``: is called when a block is.
        """
        pending, total = {block.place for block in self.files.pending}, len(self.job.blocks())
        with RunProgress(total, done=total - len(pending)) as progress:
            for number, batch in enumerate(self._batches(at_once)):
                missing = [block for block in batch if block.place in pending]
                if not missing:
                    continue
                # All of it, so that what is missing is answered under the load of the rest.
                made = runner.run(batch, number).of({block.place for block in missing})
                before_write(made)
                self.files.append(made.records, made.errors, made.steps)
                for block in missing:
                    after_block(block)
                    progress.advance(f"{block.case.task} {block.case.case_id}")
        if at_once == 1:  # a batch of several is answered anew as a whole or not at all
            self._measure_again(runner)

    def _measure_again(self, runner: BlockRunner) -> None:
        """Measure disturbed blocks again, for `measure.rerun_minutes` at most."""
        minutes, start = self.job.config.measure.rerun_minutes, time.monotonic()
        most = "" if minutes is None else f", for {minutes:g} minutes at most"
        blocks = self.noisy()
        while blocks:
            log.info("measuring again what was disturbed (cases: %d%s)", len(blocks), most)
            with RunProgress(len(blocks)) as progress:
                for block in blocks:
                    if minutes is not None and time.monotonic() - start >= 60 * minutes:
                        log.warning(
                            "%d disturbed cases are not measured again: measure.rerun_minutes=%g "
                            "is over. Tables count them as disturbed.",
                            len(self.noisy()),
                            minutes,
                        )
                        return
                    keys = block.keys(self.job.labels)
                    attempt = 1 + max(r.attempt for r in self.files.done if r.key in keys)
                    result = runner.run([block], block.stream_index, attempt)
                    self.files.replace(result.records, result.errors, result.steps)
                    progress.advance(f"again {block.case.task} {block.case.case_id}")
                    remaining = self.noisy()
                    if not remaining:  # all are quiet, or too many would stay disturbed
                        break
            blocks = remaining

    def _batches(self, size: int) -> Iterator[list[CaseBlock]]:
        """The blocks of the run, so many at a time as are asked at once; of one repeat."""
        if self.job.config.batch.size > 1:
            yield from self.job.groups(size)
            return
        for repeat in range(self.job.repeats):
            blocks = [block for block in self.job.blocks() if block.repeat == repeat]
            for start in range(0, len(blocks), size):
                yield blocks[start : start + size]

    def noisy(self) -> list[CaseBlock]:
        """List the disturbed blocks to measure again; none of a run in batches."""
        if self.job.config.batch.size > 1:  # a group is measured as a whole or not at all
            return []
        return interference_rule.to_measure_again(
            self.job, self.files.done, len(self.files.superseded)
        )

    def save_manifest(self) -> None:
        self.manifest.write(self.job.folder)


def complete(
    job: Job, measure: Callable[[OpenRun], None], given: Mapping[str, Drafter] | None = None
) -> int:
    """Hold the job's folder, have what is missing measured, and close it: `Runner.run`.

    An optional label of the job that turns out not to work here is left out, with its reason, and
    so is any that fails in its warm-up. In a folder that holds records already its labels stay as
    they are.

    ``measure`` makes the missing records and appends them to the files; ``given`` as in
    `build_method_runs`.
    """
    with folder.hold_folder(job.folder):
        begun = _has_records(job)
        left_out = (RunManifest.read(job.folder).left_out or {}) if begun else {}
        while True:
            try:
                return _complete(job.without(left_out), measure, given, left_out)
            except MethodCannotRun as error:
                if begun or error.label not in job.optional:
                    raise (error.__cause__ or error) from None
                log.warning("%s is left out: %s", error.label, error)
                left_out[error.label] = str(error)
            except WarmUpFailed as error:
                left_out |= error.reasons
                if not job.without(left_out).entries:
                    raise
                log.warning("left out, the others are measured: %s", error)
            gc.collect()  # what was loaded for the attempt


def _complete(
    job: Job,
    measure: Callable[[OpenRun], None],
    given: Mapping[str, Drafter] | None,
    left_out: Mapping[str, str],
) -> int:
    runs = build_method_runs(job, given)
    manifest = _open_manifest(job, runs)
    manifest.left_out = dict(left_out) or None
    begun = _has_records(job)
    # Before any other file: a folder with records and no manifest is nobody's.
    manifest.write(job.folder)
    if not begun:
        methods = {run.entry.name: type(run.drafter) for run in runs}
        leave_repeat(job.folder, manifest, methods, typed=given is None)
    files = ResultFiles(job)
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


def _has_records(job: Job) -> bool:
    path, cases = job.folder / records.MANIFEST, job.folder / records.CASES
    return path.exists() and cases.exists() and cases.stat().st_size > 0


def _open_manifest(job: Job, runs: Sequence[MethodRun]) -> RunManifest:
    machine = environment.describe()
    if not _has_records(job):
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
    code = max(exit_code(run.files.done, errors), int(bool(run.manifest.left_out)))
    summary = run_summary(run.files.done, errors, run.manifest, superseded)
    close(run.manifest, "complete", code)
    run.files.finish(summary, run.manifest)
    return code


class RunProgress:
    """Counts finished blocks and says how long the rest will take. A context manager.

    Args:
        total: blocks of the run.
        done: blocks that an earlier start finished.
        console: where the bar goes; decides whether there is one.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total: int,
        done: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._done, self._first = total, done, done
        self._clock = clock
        self._start = self._last_line = clock()
        console = console or Console(stderr=True)
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("cases", total=total, completed=done)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *details: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, note: str) -> None:
        """One more block is done; ``note`` says what it was."""
        self._done += 1
        if self._bar:
            self._bar.update(self._task, advance=1, description=note)
            return
        now = self._clock()
        every = max(1, self._total // _LINES)
        if self._done % every == 0 or self._done == self._total or now - self._last_line > _QUIET_S:
            self._last_line = now
            elapsed = now - self._start
            left = elapsed / (self._done - self._first) * (self._total - self._done)
            log.info(
                "%d/%d cases, %s gone, about %s left (%s)",
                self._done,
                self._total,
                _minutes(elapsed),
                _minutes(left),
                note,
            )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}:{rest:02d}"
    return f"{minutes // 60} h {minutes % 60:02d} min"
