"""The growing files of a run: which blocks a resumed run lacks, and how a block is added.

The interleaved block, all labels of one case in one repeat, is the unit: an incomplete
block is dropped and measured again whole, so that pairs stay paired. So is a group of cases in
lock-step.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runners.job import CaseBlock, Job
from specbench.errors import CaseFailed
from specbench.results import records
from specbench.results.jsonl_schema import ErrorLine, StepTrace, error_line, read_steps, write_steps
from specbench.results.manifest import RunManifest
from specbench.results.records import CaseRecord
from specbench.results.summary_schema import Summary
from specbench.storage import jsonl

log = logging.getLogger(__name__)

_TRACEBACK_CHARACTERS = 4000

BlockKey = tuple[int, str]


@dataclass(slots=True)
class BlockResult:
    """The results of blocks: records, lines for ``errors.jsonl``, step traces."""

    records: list[CaseRecord] = field(default_factory=list)
    errors: list[ErrorLine] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)

    def extend(self, other: BlockResult) -> None:
        self.records += other.records
        self.errors += other.errors
        self.steps += other.steps

    def select(self, keys: set[BlockKey]) -> BlockResult:
        """Select the part of some blocks."""
        return BlockResult(
            [r for r in self.records if (r.repeat, r.case_id) in keys],
            [e for e in self.errors if (e["repeat"], e["case_id"]) in keys],
            [s for s in self.steps if (s.repeat, s.case_id) in keys],
        )

    def add_error(self, record: CaseRecord, error: Exception, during: str) -> None:
        """Keep why a turn failed; ``during`` is ``decode``, ``audit`` or ``replay``."""
        line = {
            **record.turn_id,
            "during": during,
            "type": error.kind if isinstance(error, CaseFailed) else type(error).__name__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:],
            "at": record.started_at,
        }
        self.errors.append(error_line(line))


def _trace_line(line: jsonl.JsonObject) -> jsonl.JsonObject:
    StepTrace.from_json(line)
    return line


class ResultFiles:
    """The growing files of a run, written under the lock; whole blocks only.

    Attributes:
        done: records of the complete blocks, in the order they were written.
        redone: number of blocks that were found incomplete and dropped.
        superseded: ``(repeat, case_id, attempt)`` of the measurements in ``disturbed.jsonl``.
    """

    def __init__(self, job: Job) -> None:
        self._job, self._folder = job, job.folder
        self.done, truncated = self._read(records.CASES)
        steps_log, steps = self._folder / records.STEPS_LOG, self._folder / records.STEPS
        if self.done and steps.exists() and not steps_log.exists():  # DONE was removed by hand
            jsonl.rewrite_jsonl(steps_log, (trace.to_json() for trace in read_steps(steps)))
        self.redone = self._keep(self._complete(), truncated)
        self.superseded = self._keep_superseded()
        for name in (records.CASES, records.ERRORS, records.STEPS_LOG):
            jsonl.append_jsonl(self._folder / name, [])  # they exist even if empty

    @property
    def pending(self) -> list[CaseBlock]:
        """The blocks that lack a record, in the order of the run."""
        present = {record.key for record in self.done}
        labels = self._job.labels
        return [block for block in self._job.blocks() if not block.record_keys(labels) <= present]

    def _read(self, name: str) -> tuple[list[CaseRecord], bool]:
        """Read the records of a file, all of which must be of this job."""
        job, path = self._job, self._folder / name
        lines, truncated = records.read_records(path, run_key=job.run_key, labels=job.labels)
        indices = {key: b.stream_index for b in job.blocks() for key in b.record_keys(job.labels)}
        for number, record in enumerate(lines, start=1):
            if indices.get(record.key) != record.stream_index:
                turn = f"case {record.case_id}, turn {record.turn}, repeat {record.repeat}"
                raise jsonl.damaged(path, number, f"{turn} does not belong to this run")
        return lines, truncated

    def _complete(self) -> set[BlockKey]:
        """Return the blocks that have all records, their steps, and all of their group."""
        steps = {trace.key: trace.committed for trace in self.traces()}
        complete = {block.key for block in self._job.blocks()}
        complete -= {block.key for block in self.pending}
        for record in self.done:
            # Servers report at most the tokens per step, which are in the record.
            ours = record.engine == records.OWN_ENGINE
            if ours and steps.get(record.key, []) != record.committed_per_step:
                complete.discard((record.repeat, record.case_id))
        if self._job.config.batch.size > 1:  # a group's times come from one measurement
            for group in self._job.groups(self._job.config.batch.size):
                keys = {block.key for block in group}
                complete -= set() if keys <= complete else keys
        return complete

    def _keep(self, complete: set[BlockKey], truncated: bool) -> int:
        """Drop incomplete blocks from all files; return their number."""
        started = {(record.repeat, record.case_id) for record in self.done}
        redone = max(len(started - complete), int(truncated))
        if redone:
            log.info(
                "%s: the last run was cut off in the middle of a case%s; %d incomplete block%s "
                "dropped and measured again",
                self._folder / records.CASES,
                " (truncated line)" if truncated else "",
                redone,
                "s are" if redone > 1 else " is",
            )
            self._rewrite([r for r in self.done if (r.repeat, r.case_id) in complete])
        # These are written before the block's records, so they may run ahead of them.
        parse: Callable[[jsonl.JsonObject], Mapping[str, object]]
        for name, parse in ((records.ERRORS, error_line), (records.STEPS_LOG, _trace_line)):
            jsonl.mend_jsonl(
                self._folder / name,
                parse,
                lambda line: (line["repeat"], line["case_id"]) in complete,
            )
        return redone

    def _keep_superseded(self) -> set[tuple[int, str, int]]:
        """Drop lines of ``disturbed.jsonl`` from a process that was killed after copying them."""
        copied, truncated = self._read(records.DISTURBED)
        present = {(r.repeat, r.case_id): r.attempt for r in self.done}
        # A block that is measured from the start has superseded none.
        keep = [r for r in copied if r.attempt < present.get((r.repeat, r.case_id), 0)]
        if truncated or len(keep) < len(copied):
            path = self._folder / records.DISTURBED
            jsonl.rewrite_jsonl(path, (record.to_json() for record in keep))
        return {(record.repeat, record.case_id, record.attempt) for record in keep}

    def append(self, block: BlockResult) -> None:
        """Write a finished block; its records go last, as one write, and make it count."""
        jsonl.append_jsonl(self._folder / records.STEPS_LOG, (t.to_json() for t in block.steps))
        jsonl.append_jsonl(self._folder / records.ERRORS, block.errors)
        jsonl.append_jsonl(self._folder / records.CASES, (r.to_json() for r in block.records))
        self.done.extend(block.records)

    def replace(self, block: BlockResult) -> None:
        """Replace the measurement of a block.

        The old records go to ``disturbed.jsonl`` first, and the new ones take their place last, so
        that a process killed in between leaves the old measurement.
        """
        key = (block.records[0].repeat, block.records[0].case_id)
        old = [r for r in self.done if (r.repeat, r.case_id) == key]
        jsonl.append_jsonl(self._folder / records.DISTURBED, (r.to_json() for r in old))
        steps = [trace.to_json() for trace in block.steps]
        for name, new in ((records.STEPS_LOG, steps), (records.ERRORS, block.errors)):
            lines, _ = jsonl.read_jsonl(self._folder / name)
            keep = [line for line in lines if (line["repeat"], line["case_id"]) != key]
            jsonl.rewrite_jsonl(self._folder / name, [*keep, *new])
        at = self.done.index(old[0])
        # At the old position, so that drafters that learn over a run see the same order later.
        self._rewrite([*self.done[:at], *block.records, *self.done[at + len(old) :]])
        self.superseded |= {(*key, record.attempt) for record in old}

    def _rewrite(self, done: list[CaseRecord]) -> None:
        jsonl.rewrite_jsonl(self._folder / records.CASES, (r.to_json() for r in done))
        self.done[:] = done  # others hold this list

    def traces(self) -> list[StepTrace]:
        return jsonl.read_jsonl(self._folder / records.STEPS_LOG, StepTrace.from_json)[0]

    def finish(self, summary: Summary, manifest: RunManifest) -> None:
        """Write the closing files; ``DONE`` last."""
        folder = self._folder
        write_steps(folder / records.STEPS, self.traces())
        jsonl.write_json(folder / records.SUMMARY, summary)
        manifest.finish(folder, records.LEFT)
        (folder / records.STEPS_LOG).unlink()
