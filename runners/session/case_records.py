"""From a decoded turn to its lines in the run's files, for live runs and replays alike."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from runners.job import CaseBlock, Job, derive_seed
from runners.session.method_runs import MethodRun
from specbench.decoding.engine import DecodeResult
from specbench.errors import CaseFailed
from specbench.results.records import CaseRecord, StepTrace

_TRACEBACK_CHARACTERS = 4000


@dataclass(slots=True)
class BlockResult:
    """What a block leaves: records, lines for ``errors.jsonl``, step traces."""

    records: list[CaseRecord] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    steps: list[StepTrace] = field(default_factory=list)

    def extend(self, other: BlockResult) -> None:
        self.records += other.records
        self.errors += other.errors
        self.steps += other.steps

    def add_steps(
        self, record: CaseRecord, decoded: DecodeResult, step_s: Sequence[float] | None
    ) -> None:
        self.steps.append(
            StepTrace(
                **record.turn_id,
                drafted=decoded.drafted_per_step,
                depth=decoded.depth_per_step,
                committed=decoded.committed_per_step,
                sources=decoded.sources_per_step,
                step_s=step_s,
            )
        )

    def add_error(self, record: CaseRecord, error: Exception, during: str) -> None:
        """Keep why a turn failed; ``during`` is ``decode``, ``audit`` or ``replay``."""
        trace = "".join(traceback.format_exception(error))
        self.errors.append(
            {
                **record.turn_id,
                "during": during,
                "type": error.kind if isinstance(error, CaseFailed) else type(error).__name__,
                "message": str(error),
                "traceback": trace[-_TRACEBACK_CHARACTERS:],
                "at": record.started_at,
            }
        )


def begin_record(
    job: Job, block: CaseBlock, turn: int, run: MethodRun, position: int, **more: Any
) -> CaseRecord:
    """A record that holds all that is known before the turn is decoded, as failed.

    ``position`` is the label's place in the block's order.
    """
    config, case = job.config, block.case
    return CaseRecord(
        run_key=job.run_key,
        label=run.label,
        method=run.entry.name,
        method_version=run.drafter.version,
        model=config.model.name,
        dataset=config.dataset.name,
        task=case.task,
        category=case.category,
        case_id=case.case_id,
        turn=turn,
        repeat=block.repeat,
        stream_index=block.stream_index,
        position=position,
        state_scope=run.scope,
        seed=derive_seed(config.seed, case.case_id, turn, block.repeat),
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        **more,
    )


def finish_record(record: CaseRecord, decoded: DecodeResult, **measured: Any) -> CaseRecord:
    """The record of a decoded turn; ``measured`` are the fields that the clock and others give."""
    return record.finished(
        decoded.output_ids,
        decoded.committed_per_step,
        finish_reason=decoded.finish_reason,
        n_drafted=decoded.n_drafted,
        n_aux=decoded.n_aux,
        **{"drafter": decoded.drafter, **measured},
    )
