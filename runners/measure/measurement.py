"""The frame of every run that leaves records: lock, manifest, resume, progress, summary."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Self, TextIO

from tqdm import tqdm

from runners.job import CaseBlock, Job
from runners.measure import interference_rule
from runners.measure.blocks import BlockRunner, OutputSource
from runners.measure.method_runs import MethodRun, build_method_runs
from runners.run_folder import folder
from runners.run_folder.manifest import (
    JOB_FIELDS,
    add_start,
    begin,
    check_questions,
    check_resume,
    close,
)
from runners.run_folder.reproduce_note import write_reproduce_note
from runners.run_folder.resumable_files import BlockKey, ResultFiles
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


def attempts(job: Job, drafters: Mapping[str, Drafter] | None = None) -> Iterator[Measurement]:
    """Yield the job's measurement, with its folder locked, until the folder is complete.

    The caller measures within ``with run``. A label that turns out not to work is left out with its
    reason, and the others are measured in the next attempt. ``drafters``: see `build_method_runs`.

    Raises:
        MethodCannotRun: a label that is not optional cannot work, or has records already.
        WarmUpFailed: no label is left.
        OutputRefused: another process holds the folder, or it may not be resumed.
        RecordError: a file of the folder is damaged.
    """
    with folder.hold_folder(job.folder):
        cases = job.folder / records.CASES
        started = cases.exists() and cases.stat().st_size > 0
        left_out = dict(RunManifest.read(job.folder).left_out or {}) if started else {}
        run = None
        while run is None or not run.finished:
            if run:
                gc.collect()  # what the previous attempt loaded
            run = Measurement(job, left_out, started, drafters)
            yield run


class Measurement:
    """A run that this process measures: its locked folder, methods, files and exit code.

    Attributes:
        job: without the labels that are left out.
        finished: whether all is measured and written.
    """

    def __init__(
        self,
        job: Job,
        left_out: dict[str, str],
        started: bool,
        drafters: Mapping[str, Drafter] | None,
    ) -> None:
        self._left_out, self._started = left_out, started
        self.finished, self.exit_code = False, 1
        while True:
            self.job = job.without(left_out)
            try:
                self.runs = build_method_runs(self.job, drafters)
                break
            except MethodCannotRun as error:
                self._leave_out(error)
        self.manifest = _open_manifest(self.job, self.runs, started)
        self.manifest.left_out = left_out or None
        # Before any other file: without a manifest, a folder's records belong to no run.
        self.save_manifest()
        if not started:
            methods = {run.entry.name: type(run.drafter) for run in self.runs}
            write_reproduce_note(job.folder, self.manifest, methods, from_command=drafters is None)
        self.files = ResultFiles(self.job)
        add_start(self.manifest, len(self.files.done), self.files.redone)
        self.save_manifest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        """Close the folder; True if ``error`` was a label's, which the next attempt leaves out."""
        try:
            if error is None:
                self._finish()
            elif isinstance(error, MethodCannotRun | WarmUpFailed):
                self._leave_out(error)
            else:
                self._close_unfinished(error)
            return isinstance(error, MethodCannotRun | WarmUpFailed)
        except BaseException as refusal:
            self._close_unfinished(refusal)
            raise
        finally:
            for run in self.runs:
                run.drafter.close()

    def _close_unfinished(self, error: BaseException) -> None:
        close(self.manifest, "failed" if isinstance(error, Exception) else "interrupted", None)
        # The error that is being raised already explains why it could not be written.
        with contextlib.suppress(jsonl.DiskError):
            self.save_manifest()

    def _leave_out(self, error: MethodCannotRun | WarmUpFailed) -> None:
        """Leave labels out of the next attempt, or raise the error that ends the run."""
        if isinstance(error, WarmUpFailed):
            self._left_out |= error.reasons
            if not self.job.without(self._left_out).entries:
                raise error
        elif self._started or error.label not in self.job.optional:
            raise (error.__cause__ or error) from None
        else:
            self._left_out[error.label] = str(error)
        log.warning("left out, the others are measured: %s", error)

    def _finish(self) -> None:
        path, done = self.job.folder, self.files.done
        errors, _ = jsonl.read_jsonl(path / records.ERRORS)
        superseded, _ = records.read_records(path / records.DISTURBED)
        self.exit_code = max(exit_code(done, errors), int(bool(self.manifest.left_out)))
        summary = run_summary(done, errors, self.manifest, superseded)
        close(self.manifest, "complete", self.exit_code)
        self.files.finish(summary, self.manifest)
        self.finished = True

    @property
    def incomplete(self) -> bool:
        """True if blocks remain to be measured, for the first time or again."""
        return bool(self.files.pending or self._disturbed())

    def runner(self, source: OutputSource) -> BlockRunner:
        runs = {run.label: run for run in self.runs}
        done, forced = self.files.done, self.manifest.forced_resume
        return BlockRunner(self.job, runs, source, done, forced, started=bool(done))

    def save_manifest(self) -> None:
        self.manifest.write(self.job.folder)

    def pending(self, at_once: int = 1) -> Iterator[tuple[int, list[CaseBlock], set[BlockKey]]]:
        """Yield the batches that lack records: number in the run, blocks, keys that lack them.

        A batch belongs to one repeat. It is decoded whole, so that the missing turns run under the
        load of the rest. The caller appends its result before it takes the next batch.

        Args:
            at_once: blocks of a batch; groups of ``batch.size`` are formed all the same.
        """
        pending, blocks = {block.key for block in self.files.pending}, self.job.blocks()
        if self.job.config.batch.size > 1:
            batches = self.job.groups(self.job.config.batch.size)
        else:
            n = len(blocks) // self.job.repeats
            starts = [r * n + i for r in range(self.job.repeats) for i in range(0, n, at_once)]
            batches = [blocks[at : min(at + at_once, at - at % n + n)] for at in starts]
        with RunProgress(len(blocks), done=len(blocks) - len(pending)) as progress:
            for number, batch in enumerate(batches):
                missing = [block for block in batch if block.key in pending]
                if missing:
                    yield number, batch, {block.key for block in missing}
                for block in missing:
                    progress.advance(f"{block.case.task} {block.case.case_id}")

    def reruns(self) -> Iterator[tuple[CaseBlock, int]]:
        """Yield disturbed blocks, with their numbers of attempts, while they may be measured again.

        The caller replaces a block's records before it takes the next one. At most
        ``measure.rerun_minutes`` pass.
        """
        minutes, start = self.job.config.measure.rerun_minutes, time.monotonic()
        limit = "" if minutes is None else f", for {minutes:g} minutes at most"
        while blocks := self._disturbed():
            log.info("measuring again what was disturbed (cases: %d%s)", len(blocks), limit)
            with RunProgress(len(blocks)) as progress:
                for block in blocks:
                    remaining = self._disturbed()
                    if not remaining:  # all are quiet, or too many would stay disturbed
                        return
                    if minutes is not None and time.monotonic() - start >= 60 * minutes:
                        log.warning(
                            "%d disturbed cases are not measured again: measure.rerun_minutes=%g "
                            "is over. Tables count them as disturbed.",
                            len(remaining),
                            minutes,
                        )
                        return
                    keys = block.record_keys(self.job.labels)
                    yield block, 1 + max(r.attempt for r in self.files.done if r.key in keys)
                    progress.advance(f"again {block.case.task} {block.case.case_id}")

    def _disturbed(self) -> list[CaseBlock]:
        """List the disturbed blocks to measure again; none of a group, which is measured whole."""
        if self.job.config.batch.size > 1:
            return []
        superseded = len(self.files.superseded)
        return interference_rule.to_measure_again(self.job, self.files.done, superseded)


def _open_manifest(job: Job, runs: Sequence[MethodRun], started: bool) -> RunManifest:
    machine = environment.describe()
    new = begin(job, {run.label: run.describe() for run in runs}, machine)
    if not started:
        return new
    folder.check_owner(job.folder, job.run_key, job.identity)
    manifest = RunManifest.read(job.folder)
    check_questions(manifest, job.config, job.cases, job.folder)
    manifest.forced_resume |= check_resume(manifest, machine, job.config.resume == "force")
    for name in JOB_FIELDS:
        setattr(manifest, name, getattr(new, name))
    return manifest


class RunProgress:
    """Counts finished blocks and estimates the remaining time. A context manager.

    An earlier start finished ``done`` blocks. Without a terminal it writes lines to the log.
    """

    def __init__(self, total: int, done: int = 0, out: TextIO | None = None) -> None:
        out = out or sys.stderr
        self._bar = tqdm(total=total, initial=done, unit="case", file=out, disable=not out.isatty())
        self._total, self._done, self._first = total, done, done
        self._start = self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.close()

    def advance(self, note: str) -> None:
        """Count one more finished block; ``note`` describes it."""
        self._done += 1
        self._bar.set_description(note, refresh=False)
        self._bar.update()
        now, every = time.monotonic(), max(1, self._total // _LINES)
        due = self._done % every == 0 or self._done == self._total
        if self._bar.disable and (due or now - self._last_line > _QUIET_S):
            self._last_line, elapsed = now, now - self._start
            remaining_s = elapsed / (self._done - self._first) * (self._total - self._done)
            times = (tqdm.format_interval(seconds) for seconds in (elapsed, remaining_s))
            log.info(
                "%d/%d cases, %s gone, about %s left (%s)", self._done, self._total, *times, note
            )
